"""The rules of rows that are pulled ahead, each by itself: a loop over batches whose client is carried out by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from noticing import assert_noticed

from dps.engine.state.caching import Cache
from dps.engine.training import rows_ahead as module
from dps.engine.training.rows_ahead import RowsAhead, SentPull


class Client:
    """A client: the value of a row is how often it was changed before the pull was sent.

    Attributes
    ----------
    asked : list
        Of each pull its clock, whether it was sent ahead, and its keys by table.
    """

    def __init__(self, summed: tuple[str, ...]):
        self.own = SimpleNamespace(clock=0, number=0)
        self.session = SimpleNamespace(own=self.own, gate=None, now=lambda: 0.0, cached=None)
        self.changes: Counter[tuple[str, int]] = Counter()
        self.asked: list[tuple[int, bool, dict[str, list[int]]]] = []
        self._summed, self.cache = summed, Cache()

    def spec_of(self, name: str) -> Any:
        return SimpleNamespace(aggregate="sum" if name in self._summed else None, dim=1, itemsize=8, cache=self.cache)

    def push(self, table: str, keys: list[int]) -> None:
        self.own.number += 1
        self.changes.update((table, key) for key in keys)

    def pull(self, keys: Mapping[str, np.ndarray], ahead: bool = False) -> dict[str, np.ndarray]:
        asked = {table: some.tolist() for table, some in keys.items()}
        self.asked.append((self.own.clock, ahead, {table: sorted(some) for table, some in asked.items()}))
        return {table: np.array([self.changes[table, key] for key in some]) for table, some in asked.items()}

    def pull_ahead(self, keys: Mapping[str, np.ndarray], clocks: int) -> Any:
        values = self.pull(keys, ahead=True)
        return SimpleNamespace(result=lambda: values)


class RowsHere:
    """Kept rows: which keys are here, some of them too old for any later batch."""

    def __init__(self, fresh: Iterable[int] = (), old: Iterable[int] = ()):
        self.is_used, self.told = True, list[list[tuple[int, str, list[int]]]]()
        self._fresh, self._old = [*fresh], [*old]

    def has(self, spec: Any, keys: np.ndarray) -> bool:
        return spec.cache.nbytes > 0

    def survey(self, spec: Any, keys: np.ndarray, ahead: int) -> tuple[np.ndarray, np.ndarray]:
        return np.isin(keys, self._old), ~np.isin(keys, self._old + self._fresh)

    def expect(self, coming: Iterable[tuple[int, str, np.ndarray]]) -> None:
        self.told.append([(at, table, keys.tolist()) for at, table, keys in coming])


class Loop:
    """A loop over batches 0, 1, 2..., each of which wants the row of its number; no other trainer is waited for."""

    def __init__(self, ahead: int = 1, wanted: Callable[[int], Any] = lambda batch: {"w": [batch]}, *summed: str):
        self.client, self.staleness, self.others_clock = Client(summed), 0.0, math.inf
        self.rows: list[dict[str, dict[int, int]]] = []  # that each batch was given
        self.merged: list[int] = []  # keys whose changes leave at the end of a batch
        self.rows_ahead = RowsAhead(self, wanted, ahead)  # type: ignore[arg-type]

    def run(self, batches: int, bodies: Mapping[int, Callable[[], object]] = {}) -> None:
        """Go through the batches; some of them have bodies."""
        for number, _, rows in self.rows_ahead.iterate((0, number, number) for number in range(batches)):
            given = {table: (each.keys.tolist(), each.values.tolist()) for table, each in rows.items()}
            self.rows.append({table: dict(zip(*each, strict=True)) for table, each in given.items()})
            bodies.get(number, lambda: None)()
            self.rows_ahead.finish(self.send_merged)
            self.client.own.clock, self.client.own.number = number + 1, 0

    def push(self, keys: Iterable[int], table: str = "w") -> None:
        """Push as the user of the loop does."""
        self.rows_ahead.calls.push(table, np.array([*keys]))

    def merge(self, key: int) -> None:
        """Gather a change, as `Trainer.increment` does."""
        self.rows_ahead.change("w", [key])
        self.merged.append(key)

    def send_merged(self) -> None:
        if self.merged:
            self.client.push("w", self.merged)
            self.merged = []

    @property
    def pulls(self) -> list[tuple[int, bool, list[int]]]:
        """Of each pull from w its clock, whether it was sent ahead, and its keys."""
        return [(clock, ahead, keys["w"]) for clock, ahead, keys in self.client.asked]


# ---- the rules


def caches_know_the_coming_batches() -> None:
    """A cache that is used is told which keys the batches after the present one name, and when."""
    loop, cache = Loop(ahead=2), RowsHere()
    loop.client.session.cached = cache
    loop.run(4)
    assert cache.told == [[(n, "w", [n]) for n in range(at + 1, min(at + 3, 4))] for at in range(4)]
    cache.is_used, cache.told = False, []
    loop.run(1)
    assert not cache.told


def so_many_are_ahead() -> None:
    """The pulls of so many later batches are on their way, and no more."""
    for ahead in (0, 1, 2):
        loop = Loop(ahead)
        loop.run(4)
        expected = [(max(0, n - ahead), n > 0 and ahead > 0, [n]) for n in range(4)]
        assert loop.pulls == expected


def each_is_sent_for_its_own_clock() -> None:
    """A pull is sent as soon as what is known of the others suffices for the clock of its batch, and not before."""
    loop = Loop(ahead=2)
    loop.staleness, loop.others_clock = 3.0, -1.0
    loop.run(4, {1: lambda: setattr(loop, "others_clock", 0.0)})
    assert loop.pulls == [(0, False, [0]), (0, True, [1]), (0, True, [2]), (2, True, [3])]


def what_was_known_counts() -> None:
    """A pull contains what the others had pushed when it was sent, whatever is known of them since."""
    loop = Loop()
    loop.staleness, loop.others_clock = 1.0, 0.0

    def later() -> None:
        loop.staleness, loop.others_clock = 0.0, 1.0

    loop.run(2, {0: later})
    assert loop.pulls == [(0, False, [0]), (0, True, [1]), (1, False, [1])]


def the_staleness_of_now_counts() -> None:
    """A pull that does not serve under a smaller staleness is dropped."""
    loop = Loop()
    loop.staleness, loop.others_clock = 1.0, 0.0
    loop.run(2, {0: lambda: setattr(loop, "staleness", 0.0)})
    assert (1, False, [1]) in loop.pulls


def its_user_is_asked_once() -> None:
    """What a batch wants is asked once, also where it was not pulled ahead in the end."""
    asked: list[int] = []
    loop = Loop(2, lambda batch: asked.append(batch) or {"w": [batch], "sum": [batch]}, "sum")
    loop.run(4)
    assert asked == [0, 1, 2, 3]


def sums_are_pulled_at_their_time() -> None:
    """Where one of its tables shows pushes when their clock has ended, nothing is pulled ahead for a batch."""
    loop = Loop(1, lambda batch: {"w": [batch], "sum": [batch]}, "sum")
    loop.run(3)
    assert [(clock, ahead) for clock, ahead, _ in loop.client.asked] == [(n, False) for n in range(3)]


def only_what_it_has_changed_is_pulled_again() -> None:
    """Of a pull ahead only the rows that were pushed since are pulled again."""
    loop = Loop(1, lambda batch: {"w": [batch, 10], "v": [10]})
    loop.run(3, {0: lambda: loop.push([10, 11]), 1: lambda: loop.push([10], "u")})
    again = [(clock, keys) for clock, _, keys in loop.client.asked if 10 not in keys.get("v", ())]
    assert again == [(0, {"w": [10]})]
    assert [rows["w"][10] for rows in loop.rows] == [0, 1, 1]


def again_behind_what_was_merged() -> None:
    """Changes that were gathered leave first, and then stale rows are pulled again."""
    loop = Loop()
    loop.run(2, {0: lambda: loop.merge(1)})
    assert loop.rows[1]["w"] == {1: 1}


def the_next_batch_is_first() -> None:
    """At the end of a batch the stale rows of the next one are pulled again, not those of the last one."""
    loop = Loop(2)
    loop.run(3, {0: lambda: loop.push([1, 2])})
    assert [rows["w"] for rows in loop.rows] == [{0: 0}, {1: 1}, {2: 1}]


def others_calls_change_any_row() -> None:
    """An op that is not noted may have changed any row: at the end of a batch, and before an op that is noted."""
    for behind in (lambda loop: None, lambda loop: loop.push([7])):
        loop = Loop()
        loop.run(2, {0: lambda loop=loop, behind=behind: [loop.client.push("w", [1]), behind(loop)]})
        assert loop.rows[1]["w"] == {1: 1}


def a_tick_is_an_op() -> None:
    """The first op of one clock has the number of the first op of another."""
    loop = Loop()

    def body() -> None:
        loop.client.push("w", [1])
        loop.client.own.clock, loop.client.own.number = 1, 0

    loop.run(2, {0: body})
    assert loop.rows[1]["w"] == {1: 1}


def what_it_knows_is_not_an_op() -> None:
    """Neither noted ops nor the tick behind a batch, nor what came before the loop, let whole pulls be repeated."""
    loop = Loop(2)
    loop.client.push("w", [7])
    loop.run(4, {n: lambda: loop.push([7]) for n in range(4)})
    assert len(loop.pulls) == 4


def any_row_where_it_is_not_said() -> None:
    """A slice of a table, all of it, and a vector on the servers, stand for any rows."""
    for keys in (slice(0, 2), None, SimpleNamespace(nnz=1), SimpleNamespace(is_sparse=True)):
        assert module.flat_or_all("w", keys) is None
    assert module.flat_or_all("w", [[1], [2]]).tolist() == [1, 2]  # type: ignore[union-attr]


def kept_rows_may_be_older() -> None:
    """Rows of a table with a cache are as fresh as the bound asked when they were read, and it may fall."""
    loop = Loop(1)
    loop.client.cache, loop.staleness, loop.others_clock = Cache(1000), 3.0, 2.0
    loop.run(2, {0: lambda: setattr(loop, "staleness", 0.0)})  # now only rows that were read at clock 1 may serve
    assert loop.pulls == [(0, False, [0]), (0, True, [1]), (1, False, [1])]


def loop_with_rows(ahead: int, cache: RowsHere) -> Loop:
    """Each batch wants a row of its own, and the rows 10 and 11."""
    loop = Loop(ahead, lambda batch: {"w": [batch, 10, 11]})
    loop.client.cache, loop.client.session.cached = Cache(1000), cache
    return loop


def rows_that_are_too_old_wait() -> None:
    """Rows that are here and too old for a later batch are pulled at the end of the batch before it."""
    loop = loop_with_rows(2, RowsHere(old=[10, 11]))
    loop.run(3, {0: lambda: loop.push([10])})
    assert loop.pulls == [
        (0, False, [0, 10, 11]),
        (0, True, [1, 10, 11]),
        (0, True, [2]),
        (0, True, [10]),
        (1, True, [10, 11]),
    ]
    assert [rows["w"] for rows in loop.rows] == [{0: 0, 10: 0, 11: 0}, {1: 0, 10: 1, 11: 0}, {2: 0, 10: 1, 11: 0}]
    loop = Loop(2, lambda batch: {"w": [10, 11]})  # with nothing left to be pulled at once
    loop.client.cache, loop.client.session.cached = Cache(1000), RowsHere(old=[10, 11])
    loop.run(3)
    assert loop.pulls == [(0, False, [10, 11]), (0, True, [10, 11]), (1, True, [10, 11])]


def rows_of_the_next_batch_do_not() -> None:
    """The rows of the next batch are pulled at once, because they travel while the present one is computed."""
    loop = loop_with_rows(1, RowsHere(old=[10, 11]))
    loop.run(3)
    assert loop.pulls == [(0, False, [0, 10, 11]), (0, True, [1, 10, 11]), (1, True, [2, 10, 11])]


def rows_that_are_here_take_nothing_of_the_link() -> None:
    """Bytes are counted of the rows that may travel: keys of 8 bytes, and rows of 8."""
    for ahead, cache, counts in ((2, RowsHere([10], [11]), [2, 1, 1]), (2, RowsHere(), [3, 3, 3])):
        loop, spent = loop_with_rows(ahead, cache), list[int]()
        loop.rows_ahead._budget = SimpleNamespace(  # type: ignore[assignment]
            due=lambda now: now, spend=lambda nbytes, now, spent=spent: spent.append(nbytes)
        )
        loop.run(4)
        assert spent == [16 * count for count in counts]


RULES = [
    caches_know_the_coming_batches,
    so_many_are_ahead,
    each_is_sent_for_its_own_clock,
    what_was_known_counts,
    the_staleness_of_now_counts,
    its_user_is_asked_once,
    sums_are_pulled_at_their_time,
    only_what_it_has_changed_is_pulled_again,
    again_behind_what_was_merged,
    the_next_batch_is_first,
    others_calls_change_any_row,
    a_tick_is_an_op,
    what_it_knows_is_not_an_op,
    any_row_where_it_is_not_said,
    kept_rows_may_be_older,
    rows_that_are_too_old_wait,
    rows_of_the_next_batch_do_not,
    rows_that_are_here_take_nothing_of_the_link,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_rows_ahead_holds(rule) -> None:
    rule()


SENT_THEN_PULLED = """
    send_merged()  # whose keys were noted
    self._place = self._next_op()
    pull = self._coming[0].pull if self._coming else None
    if pull is not None:
        pull.pull_stale(self._client)
"""
PULLED_THEN_SENT = """
    pull = self._coming[0].pull if self._coming else None
    if pull is not None:
        pull.pull_stale(self._client)
    send_merged()
    self._place = self._next_op()
"""
WRONG = {
    "one too few": (RowsAhead, "_look_ahead", "<= self._ahead", "< self._ahead", so_many_are_ahead),
    "one too many": (RowsAhead, "_look_ahead", "<= self._ahead", "<= self._ahead + 1", so_many_are_ahead),
    "the present batch is counted": (RowsAhead, "_send", "enumerate(self._coming, 1)", "enumerate(self._coming, 2)",
                                     each_is_sent_for_its_own_clock),
    "the next batch is the present one": (RowsAhead, "_foresee", "(self._coming, 1)", "(self._coming, 0)",
                                          caches_know_the_coming_batches),
    "sent again": (RowsAhead, "_send", "coming.pull is None and ", "", so_many_are_ahead),
    "the batch is sent for itself": (RowsAhead, "iterate", "self._coming.popleft()\n        self._send()",
                                     "self._send()\n        self._coming.popleft()", so_many_are_ahead),
    "what is known now": (RowsAhead, "_rows", "may_serve(pull.others_clock,", "may_serve(self._standing.others_clock,",
                          what_was_known_counts),
    "its own clock for that of others": (RowsAhead, "_send", "self._level(wanted, clock + step)", "clock + step",
                                         what_was_known_counts),
    "rows that are kept were read now": (RowsAhead, "_level", "min(others, clock - self._bound(wanted))", "others",
                                         kept_rows_may_be_older),
    "what was sent serves": (RowsAhead, "_rows", " and may_serve(pull.others_clock, clock, self._bound(pull.wanted))",
                             "", the_staleness_of_now_counts),
    "asked twice": (RowsAhead, "_wanted", "if batch.wanted is None:", "if True:", its_user_is_asked_once),
    "one table shows its pushes": (RowsAhead, "_aggregates", "return any(", "return all(",
                                   sums_are_pulled_at_their_time),
    "of any table": (SentPull, "change", "name is None or self._names[table] == name", "True",
                     only_what_it_has_changed_is_pulled_again),
    "whole tables": (SentPull, "_pull", "self.wanted.keys[table][mask]", "self.wanted.keys[table]",
                     only_what_it_has_changed_is_pulled_again),
    "rows that are too old are pulled at once": (RowsAhead, "_survey", "late[table] = is_late", "pass",
                                                 rows_that_are_too_old_wait),
    "rows of the next batch wait": (RowsAhead, "_survey", "step > 1 and is_late", "is_late",
                                    rows_of_the_next_batch_do_not),
    "the others wait": (SentPull, "__init__", "~late[table] if", "late[table] if", rows_that_are_too_old_wait),
    "rows that are here take of the link": (RowsAhead, "_survey", "count_nonzero(is_away", "count_nonzero(keys < 99",
                                            rows_that_are_here_take_nothing_of_the_link),
    "rows that are compared take nothing": (RowsAhead, "_survey", "else is_away | is_late", "else is_away",
                                            rows_that_are_here_take_nothing_of_the_link),
    "before what was merged": (RowsAhead, "finish", SENT_THEN_PULLED, PULLED_THEN_SENT, again_behind_what_was_merged),
    "the last batch first": (RowsAhead, "finish", "self._coming[0].pull", "self._coming[-1].pull",
                             the_next_batch_is_first),
    "unnoticed at the end": (RowsAhead, "finish", "self._notice_others()", "pass", others_calls_change_any_row),
    "unnoticed before a push": (RowsAhead, "_noted", "self._notice_others()", "pass", others_calls_change_any_row),
    "without the clock": (RowsAhead, "_next_op", "return own.clock, own.number", "return own.number", a_tick_is_an_op),
    "a tick is another's": (RowsAhead, "iterate", "self._place = self._next_op()  # a tick", "pass  # a tick",
                            what_it_knows_is_not_an_op),
    "what came before is another's": (RowsAhead, "iterate", "self._place = self._next_op()\n    while", "while",
                                      what_it_knows_is_not_an_op),
    "a push is another's": (RowsAhead, "_noted", "    self._place = self._next_op()", "    pass",
                            what_it_knows_is_not_an_op),
    "a vector is its keys": (module, "flat_or_all", ' or getattr(keys, "is_sparse", False)', "",
                             any_row_where_it_is_not_said),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_rows_ahead_is_caught(name) -> None:
    assert_noticed(*WRONG[name])
