"""Vocabularies: words that get ids, and are looked up, both ways; the memory of a word.

One server in a process of its own, one client in this one, which keeps no words. The words are those of a stream in
which each occurs once, as str, 8 to 20 bytes long.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from distributed import Client

import dps
from benchmarks.common import Report, parser

BATCH = 10_000
ROUNDS = 5


def made_words(count: int) -> list[str]:
    """Different words of different lengths."""
    rng = np.random.default_rng(0)
    return [f"{'word' * repeats}{n:08x}" for n, repeats in enumerate(rng.integers(0, 4, count).tolist())]


def rate(call: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Million items a second, in batches."""
    began = time.perf_counter()
    for first in range(0, len(items), BATCH):
        call(items[first : first + BATCH])
    return len(items) / (time.perf_counter() - began) / 1e6


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    words = made_words(100_000 if args.quick else 1_000_000)
    with (
        Report("vocabulary", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
    ):
        vocabulary, worker = ps.vocabulary("words"), ps.status().servers[0].worker
        process = psutil.Process(client.run(os.getpid, workers=[worker])[worker])
        before = process.memory_info().rss
        report.add(f"{len(words):,} words get ids", rate(vocabulary.ids, words), "M words/s")
        report.add("memory of a word", (process.memory_info().rss - before) / len(words), "bytes")
        report.add("largest id, of the number of words", vocabulary.size / len(words), "")
        plain = {word: n for n, word in enumerate(words)}
        found: dict[str, list[float]] = {"words": [], "dict": [], "ids": []}
        ids = vocabulary.ids(words)
        for _ in range(ROUNDS):
            found["words"].append(rate(vocabulary.ids, words))
            found["dict"].append(rate(lambda batch: np.array([plain[word] for word in batch]), words))
            found["ids"].append(rate(vocabulary.words, ids))
        rates = {name: statistics.median(each) for name, each in found.items()}
        report.add("words looked up, batches of 10,000", rates["words"], "M words/s", None, None, ">= 1")
        report.add("the same", rates["words"], "M words/s", "a dict in process", rates["dict"])
        report.add("ids looked up, batches of 10,000", rates["ids"], "M words/s")


if __name__ == "__main__":
    main()
