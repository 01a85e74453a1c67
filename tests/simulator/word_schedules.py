"""Schedules in which trainers and clients give ids to words that they share, while servers fail and shards move.

What must hold:

- A word has one id, whichever client asks, at whatever time; no two words share one.
- Each id leads back to its word, and ids of a lane are numbered without a gap: in the table, and in each checkpoint
  that was taken while the run went on. So both ways and the counter are of one moment.
- A restored vocabulary gives the ids that it had, and none of these to another word.
- Counts are exact, whatever was repeated.

Keys are made from few bits of the hashes, so that words meet at keys all the time.
"""

from __future__ import annotations

import collections
import contextlib
import random
from typing import Any
from unittest import mock

import numpy as np
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses

from dps.engine.checkpoints.store import Store
from dps.engine.client.word_table import WordTable
from dps.engine.core import texts
from dps.engine.functions.words import WordLayout
from dps.errors import ControllerGoneError
from dps.testing import Simulation

__all__ = ["WORDS", "check_table", "check_words", "few_keys", "make_vocabulary"]

WORDS = [*(f"w{n}" for n in range(36)), "", "ß" * 4, b"\xff\x00", b"\xff"]
LAYOUT = WordLayout.made(lanes=4, width=8)
right = texts.keys_of


def few_keys(octets: Any, ends: Any, which: Any, bits: int, probe: int, out: np.ndarray) -> None:
    """Keys of which a lane has 16."""
    right(octets, ends, which, bits, probe, out)
    out[...] = (out & (-1 << 60)) | (out & 15)


def make_vocabulary(sim: Simulation, shards: int) -> None:
    """What ps.vocabulary("words", counts=True) makes."""
    sim.table("words", shards=shards, **LAYOUT.of_table)
    sim.table("words.counts", dtype="int64")


def as_bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def check_table(words: WordTable, client: Any) -> dict[bytes, int]:
    """Both ways agree and the counters have counted them; the id of each word."""
    of_id = dict(words.items(as_bytes=True))
    _, rows = client.pull("words", slice(None))
    numbered = collections.Counter(number % LAYOUT.lanes for number in of_id)
    for lane, count in numbered.items():
        assert sorted(number for number in of_id if number % LAYOUT.lanes == lane) == [
            lane + LAYOUT.lanes * n for n in range(count)
        ], f"the numbers of lane {lane} have gaps"
    ids = {word: number for number, word in of_id.items()}
    assert len(ids) == len(of_id), "a word has two ids"
    assert len(rows) == 2 * len(ids) + len(numbered), "a row has no counterpart"
    counters = client.pull("words", LAYOUT.counters(np.arange(LAYOUT.lanes)))[:, 0]
    assert counters.tolist() == [numbered[lane] for lane in range(LAYOUT.lanes)]
    assert words.ids(list(ids), assign=False).tolist() == list(ids.values()), "a word is not found"
    return ids


class Seen:
    """All ids that any client was ever given."""

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}
        self.words: dict[int, bytes] = {}

    def note(self, words: list[str | bytes], ids: np.ndarray) -> None:
        for word, number in zip(map(as_bytes, words), ids.tolist(), strict=True):
            assert number >= 0
            assert self.ids.setdefault(word, number) == number, f"{word!r} has two ids"
            assert self.words.setdefault(number, word) == word, f"{number} is of two words"


def name_words(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """The scenario: see the module's docstring."""
    draw, seen = random.Random(f"words {schedule.seed}"), Seen()
    make_vocabulary(sim, draw.choice((1, 2, 4)))
    least: collections.Counter[bytes] = collections.Counter()  # of the counts
    most: collections.Counter[bytes] = collections.Counter()  # a client may end between a count and its answer

    def batch(author: int, turn: int) -> list[Any]:
        return random.Random(f"{schedule.seed} {author} {turn}").choices(WORDS, k=8)

    def train(trainer: Any, _: Any) -> None:
        words = trainer.vocabulary("words")
        for turn in range(schedule.clocks):
            given = batch(trainer.number, turn)
            seen.note(given, words.count(given))
            assert words.words(words.ids(given), as_bytes=True) == list(map(as_bytes, given))
            trainer.tick()

    def call(client: Any, author: int) -> None:
        while not client.origin:  # a client does not retry its first connection: the controller might not exist
            with contextlib.suppress(ControllerGoneError):
                client.session.sleep(0.01)
                client.session.fetch_route()
        words = client.vocabulary("words")
        for turn in range(schedule.clocks):
            given = batch(author, turn)
            most.update(map(as_bytes, given))
            seen.note(given, words.count(given))
            least.update(map(as_bytes, given))

    for trainer in range(schedule.trainers):
        for turn in range(schedule.clocks):
            least.update(map(as_bytes, batch(trainer, turn)))
            most.update(map(as_bytes, batch(trainer, turn)))
    end = sim.schedule_checkpoints(clocks=1, incremental=draw.random() < 0.5) if draw.random() < 0.5 else None
    calls = [sim.submit(call, author) for author in (100, 101)]
    sim.run(train, range(schedule.trainers), staleness=schedule.staleness)
    sim.gather(calls)
    if end is not None:
        end()
    sim.rest()
    client = sim.client()
    words = client.vocabulary("words")
    there = check_table(words, client)
    assert there.items() >= seen.ids.items()
    counts = dict(zip(there, words.counts(list(there.values())).tolist(), strict=True))
    wrong = {word: counts[word] for word in there if not least[word] <= counts[word] <= most[word]}
    assert not wrong, f"{wrong}, to be counted: {least} to {most}"
    sim.checkpoint()
    restore(sim, client, words, there)


def restore(sim: Simulation, client: Any, words: WordTable, before: dict[bytes, int]) -> None:
    """Restore all checkpoints, the last one first: what they hold is sound, and goes on."""
    words.ids([b"new", b"newer"])
    for checkpoint in reversed(Store(sim.disk.url).list()):
        sim.restore(checkpoint.name)
        held = check_table(words, client)
        assert held.items() <= before.items()
        words.ids(["other"])
        assert check_table(words, client).items() > held.items()


def check_words(seed: int) -> str:
    """Run one schedule; its digest."""
    with mock.patch.object(texts, "keys_of", few_keys):
        return check_schedule(seed, name_words)
