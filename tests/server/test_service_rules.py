"""Rules of a server's compiled step, each by itself; and wrong variants of it that random requests may not show."""

from __future__ import annotations

import collections
import weakref

import dask
import numpy as np
import pytest
from compiled import error_beside, put_variant
from lone_server import Endpoint, LoneServer
from test_service import (
    BY_NAME,
    DECLINED,
    NEXT,
    SPECS,
    STAMP,
    differences,
    every,
    follow,
    forwarded,
    keyed,
    play,
    prepared,
    prepared_backup,
    pull,
    push,
)

from dps.engine.state.shard import Shard
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, RULE_DELETE
from dps.errors import MovedError


def random_requests() -> None:
    """A primary answers as in the general way."""
    collections.deque(map(play, range(200)), maxlen=0)


def random_ops() -> None:
    """A backup carries ops out as in the general way."""
    collections.deque(map(follow, range(200)), maxlen=0)


def what_is_not_plain_is_left() -> None:
    """What a request asks for beyond the plain goes the general way, whole."""
    reasons = ["a certificate", "a pull with a rule", "two rules", "half a frame", "a repeat", "an older attempt"]
    for reason in reasons:
        frame, _ = DECLINED[reason]
        assert prepared().step(frame) == (0, b""), reason


def answers_have_a_limit() -> None:
    """A pull of more bytes than a frame may have goes the general way, which says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Endpoint, "frame_limit", 4 * BY_NAME["adam"].dim * 10)
        server = prepared()
    for count in (10, 11):
        answered, answers = server.step(pull("adam", count))
        assert (answered > 0, len(answers) > HEADER_SIZE) == (count == 10, count == 10)


def rows_come_again() -> None:
    """A key that was deleted begins anew, with its row while a cut is open; then other keys get the row."""
    for is_cut in (True, False):
        servers = [LoneServer(SPECS, plain) for plain in (True, False)]
        for name in ("sgd", "adam", "int64"):
            delete_and_push_again(name, servers, is_cut)


def delete_and_push_again(name: str, servers: list[LoneServer], is_cut: bool) -> None:
    """The same ops on two servers, of which the first has the compiled step."""
    spec, keys = BY_NAME[name], np.arange(30)

    def take(frame: bytes) -> None:
        one, other = (server.take(frame) for server in servers)
        assert one == other
        assert not differences(*servers)

    take(keyed(spec, frames.PUSH, keys, np.full((30, spec.dim), 2.0), **STAMP))
    for server in servers if is_cut else ():
        every(name, lambda replica: replica.shard.begin_cut(None))(server)
    take(keyed(spec, frames.PUSH, keys[:20], np.empty((20, 0)), **NEXT, flags=RULE_DELETE))
    assert all(server.role.tables[spec.id].replicas[0].shard.vacancies for server in servers)
    declined = servers[0].declined
    take(keyed(spec, frames.PUSH, keys + 15, np.ones((30, spec.dim)), **{**NEXT, "number": 7}))
    assert servers[0].declined == declined, "it is plain"


def too_much_on_its_way_ends_a_step() -> None:
    """A peer whose push makes the backlog too large has to wait: what it has sent behind it is left, until later."""
    with dask.config.set({"dps.limits.unconfirmed": "1 B"}):
        server = prepared()
    suspended: list[bool] = []
    server.peer.suspend = lambda: suspended.append(True)  # type: ignore[method-assign]
    arrived = push("copies") + push("copies", number=7)
    assert server.step(arrived)[0] == len(arrived) // 2
    assert suspended == [True]
    assert server.step(pull("sgd") * 2)[0] == 2 * len(pull("sgd")), "the next step is not halted"


def a_change_that_breaks_off_ends_the_server() -> None:
    """After the first change of a step an error leaves shards of which it is not known what they have."""
    for server, frame in ((prepared(), push("rate", clock=9)), (prepared_backup(), forwarded("rate", clock=9))):
        failed: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.role.heartbeat, "fail", failed.append)
            patch.setattr(Shard, "numbers_at", lambda shard, clock, lag: 1 / 0)
            with pytest.raises((MovedError, ZeroDivisionError)):
                server.step(frame)
        assert failed == ["ZeroDivisionError: division by zero"]
        assert server.role.stopped


def a_step_keeps_nothing() -> None:
    """Behind a step nothing refers to what has arrived, nor to the peer."""
    server = prepared()
    inbox, peer = np.frombuffer(bytearray(push("sgd") + pull("sgd")), np.uint8).copy(), type("Peer", (), {})()
    gone = [weakref.ref(inbox), weakref.ref(peer)]
    assert server.role.service.step(inbox, 0, len(inbox), np.empty(1000, np.uint8), peer, False)[0] == len(inbox)
    del inbox, peer
    assert all(each() is None for each in gone)


RULES = [
    what_is_not_plain_is_left,
    answers_have_a_limit,
    rows_come_again,
    too_much_on_its_way_ends_a_step,
    a_change_that_breaks_off_ends_the_server,
    a_step_keeps_nothing,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_a_step_holds(rule) -> None:
    rule()


APPLIED_THEN_GATHERED = """            if pushed:
                self._apply(table, head, &part[n], &op, values)
            if answered and size <= room:
                self._values.gather_coded(table, &part[n], whole.brings, out + HEADER + part[n].a * row)
"""
GATHERED_THEN_APPLIED = """            if answered and size <= room:
                self._values.gather_coded(table, &part[n], whole.brings, out + HEADER + part[n].a * row)
            if pushed:
                self._apply(table, head, &part[n], &op, values)
"""
WRONG = {  # text of service.pyx or apply.pyx, the wrong text, and the rule that breaks
    "deleted rows are not filled": ("if (shard.index.end > born.first or shard.vacancies) and",
                                    "if shard.index.end > born.first and", rows_come_again),
    "deleted rows stay vacant": ("        fill_vacancies(shard, index, op.count)", "        pass", rows_come_again),
    "new rows are the last ones": ("cnp.PyArray_DATA(shard.vacant) if shard.vacancies else NULL", "NULL",
                                   rows_come_again),
    "answers of before": (APPLIED_THEN_GATHERED, GATHERED_THEN_APPLIED, random_requests),
    "backups keep no answers": ("if head.flags & ANSWER and head.trainer:", "if False:", random_ops),
    "versions by part": ("versions[shard.number - head.shard]", "versions[n]", random_ops),
    "any flags of a pull": ("return not head.flags & ~(RANGE | NARROW | LIST | SHARED)", "return True",
                            what_is_not_plain_is_left),
    "a deletion is a step": ("return head.flags & RULE_DELETE != RULE_DELETE", "return True",
                             what_is_not_plain_is_left),
    "the header is a part of the body": ("min(end - done - HEADER, self._limit)", "min(end - done, self._limit)",
                                         what_is_not_plain_is_left),
    "answers without a limit": ("head.count * table.row_bytes > self._limit or size > room", "size > room",
                                answers_have_a_limit),
    "the header counts twice": ("received + size - HEADER, seconds", "received + size, seconds", random_requests),
    "nothing halts it": ("self._is_halted = self._throttle(self._peer)", "self._throttle(self._peer)",
                         too_much_on_its_way_ends_a_step),
    "it stays halted": ("self._is_halted = self._has_changed = False", "self._has_changed = False",
                        too_much_on_its_way_ends_a_step),
    "a primary goes on": ("self._has_changed = self._has_changed or pushed", "pass",
                          a_change_that_breaks_off_ends_the_server),
    "a backup goes on": ("        self._has_changed = True\n", "", a_change_that_breaks_off_ends_the_server),
    "the inbox is kept": ("self._peer = self._inbox = self._list = None", "self._peer = None", a_step_keeps_nothing),
}  # fmt: skip
FIRST = "deleted rows are not filled", "a primary goes on"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [each if each in FIRST else pytest.param(each, marks=pytest.mark.slow) for each in WRONG]
)
def test_a_wrong_variant_of_a_step_is_caught(monkeypatch, name) -> None:
    old, new, rule = WRONG[name]
    put_variant(monkeypatch, ("service", "apply"), old, new)
    with pytest.raises(AssertionError):
        rule()


IS_NEXT = "return clock > last.clock or (clock == last.clock and number > last.number)"
WRONG_LEDGERS = [  # text of ledger.pyx, which a step asks whether an op is new; the wrong text
    (IS_NEXT, IS_NEXT.replace("number > last", "number >= last")),
    (IS_NEXT, "return number > last.number"),
    ("last.attempt > attempt:\n            return False", "False:\n            return False"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), WRONG_LEDGERS)
def test_a_wrong_variant_of_the_ledger_under_a_step_is_caught(old, new) -> None:
    checks = "import test_service_rules as t; t.what_is_not_plain_is_left(); t.random_requests()"
    assert "AssertionError" in error_beside("ledger", old, new, checks)


@pytest.mark.slow
def test_the_right_variant_of_the_ledger_is_not() -> None:
    assert not error_beside("ledger", IS_NEXT, IS_NEXT, "import test_service_rules as t; t.what_is_not_plain_is_left()")
