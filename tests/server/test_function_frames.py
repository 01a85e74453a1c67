"""Calls of functions as frames to one server, whose functions run when a test says so: each rule by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lone_server import LoneServer
from noticing import assert_noticed

import dps
from dps.engine.core.shard_map import ShardMap
from dps.engine.functions.rows import Effect
from dps.engine.server import functions as module
from dps.engine.server.beside_thread import Outcome
from dps.engine.server.changes import Changes
from dps.engine.server.function_work import FunctionWork
from dps.engine.server.functions import FunctionCalls, op_of
from dps.engine.state.ops import ADD, NO_CLOCK, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import Shard
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_error, decode_header, encode_header
from dps.engine.wire.messages import ALONE, PREPARES, FunctionCall, decode_parts
from dps.engine.wire.values import decode_values, encode_values

KEYS = np.arange(8)
TRAINER = 7
OWN = {"trainer": TRAINER, "clock": NO_CLOCK, "table": 1}


@dps.function(changes=True)
def add_one(rows):
    before = float(rows.values.sum())
    rows.values += 1
    return before


@dps.function(changes=True)
def delete_all(rows):
    return rows.delete(np.ones(len(rows), bool))


class Hand:
    """Runs functions when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[[Outcome], None]]] = []

    def run(self, work: Callable[[], Any], seconds: float, done: Callable[[Outcome], None]) -> None:
        self.waiting.append((work, done))

    def close(self) -> None: ...

    def end(self) -> None:
        """Run the function that has waited for longest."""
        work, done = self.waiting.pop(0)
        done(Outcome(work(), None))


class Stage:
    """A server of one table in two shards, and the frames that a client sends to it."""

    def __init__(self, copies: int = 1) -> None:
        self.spec = TableSpec("w", id=1, shards=2, dtype="float64", copies=copies)
        self.server = LoneServer([self.spec], plain=False)
        self.functions = self.server.role.functions
        self.hand = self.functions._runner = Hand()  # type: ignore[assignment]
        self.postponed: list[Header] = []
        self.server.peer.postpone = lambda header, body: self.postponed.append(header)  # type: ignore[attr-defined]
        for function in (add_one, delete_all):
            self.functions.add(function.id, function.code)
        self.shards = [self.server.role.tables[1].replicas[n].shard for n in range(2)]
        for shard, keys in zip(self.shards, self.keys(), strict=True):
            shard.apply(Op(ADD, keys, 0, np.zeros((len(keys), 1)), NO_CLOCK, 1))

    def keys(self) -> list[np.ndarray]:
        """The keys of each shard."""
        parts = group(KEYS, ShardMap(0, 2))
        return [parts.keys[a:b] for a, b in itertools.pairwise(parts.starts.tolist())]

    def tell(self, kind: int, number: int, body: bytes = b"", **fields: int) -> bytes:
        """Send a frame; what the server sends at once."""
        made = {**OWN, "shard": 0, "shards": 2, "number": number, "request": 5, "body": len(body), **fields}
        return self.server.take(encode_header(Header(kind, **made)) + body)

    def call(self, function: dps.Function, number: int, mode: int, flags: int = 0, **fields: int) -> bytes:
        text = FunctionCall(function.id, 0, 0.0, 0, 0, encode_values({}, "it"), mode).encode()
        return self.tell(frames.CALL, number, text, flags=frames.RANGE | flags, **fields)

    def end(self) -> bytes:
        """Run a function; what the server sends then."""
        self.server.peer.received.clear()
        self.hand.end()
        return bytes(self.server.peer.received)

    @property
    def values(self) -> list[float]:
        """The distinct values of each shard's rows."""
        return [sorted({*shard.rows[: len(shard), 0].tolist()}) for shard in self.shards]


def refused(sent: bytes, error: str) -> None:
    """Assert that the answer is an error of that class and no other frame."""
    assert len(sent) >= HEADER_SIZE, "no answer"
    header = decode_header(sent, 0, 1 << 30)
    assert header.kind == frames.ERROR
    assert type(decode_error(sent[HEADER_SIZE:])).__name__ == error
    assert len(sent) == HEADER_SIZE + header.body


def taken(sent: bytes) -> list[Any]:
    """Assert that the answer is no error; what a function returned on each shard."""
    assert len(sent) >= HEADER_SIZE, "no answer"
    header = decode_header(sent, 0, 1 << 30)
    assert header.kind == frames.OK
    return [decode_values(part.value) for part in decode_parts(sent[HEADER_SIZE:])] if header.body else []


# ---- the rules


def shards_that_there_are(stage: Stage) -> None:
    """A call names shards of the table, or no function runs."""
    for shards in (0, 3):
        refused(stage.call(add_one, 0, ALONE, shards=shards), "ProtocolError")
    refused(stage.call(add_one, 0, ALONE, shard=1, shards=2), "ProtocolError")
    assert not stage.hand.waiting


def changes_as_said(stage: Stage) -> None:
    """A function that changes rows is not called as one that reads."""
    refused(stage.call(add_one, 0, 0), "ProtocolError")
    assert not stage.hand.waiting


def fenced_before(stage: Stage) -> None:
    """No function runs for an attempt that is over."""
    stage.shards[1].ledger.note(TRAINER, 1, 0, 0)
    refused(stage.call(add_one, 0, ALONE), "StoppedError")
    assert not stage.hand.waiting


def fenced_meanwhile(stage: Stage) -> None:
    """What an attempt has prepared changes no shard when one of them knows a later attempt."""
    stage.call(add_one, 0, PREPARES)
    taken(stage.end())
    stage.shards[1].ledger.note(TRAINER, 1, 0, 0)
    refused(stage.tell(frames.COMMIT, 0), "StoppedError")
    assert stage.values == [[0], [0]]
    assert not stage.functions.holds


def older_is_dropped(stage: Stage) -> None:
    """What a client has prepared before its next call is never committed, and holds nothing back."""
    stage.call(add_one, 0, PREPARES)
    stage.end()
    assert stage.call(add_one, 1, PREPARES) == b""
    taken(stage.end())
    refused(stage.tell(frames.COMMIT, 0), "BusyError")
    taken(stage.tell(frames.COMMIT, 1))
    assert stage.values == [[1], [1]]
    assert not stage.functions.holds


def beside_is_kept(stage: Stage) -> None:
    """The parts of a call for other shards are no older call."""
    for shard in range(2):
        assert stage.call(add_one, 0, PREPARES, shard=shard, shards=1) == b""
        taken(stage.end())
    for shard in range(2):
        taken(stage.tell(frames.COMMIT, 0, shard=shard, shards=1))
    assert stage.values == [[1], [1]]


def abort_revokes(stage: Stage) -> None:
    """A call that is given up while its function runs prepares nothing."""
    stage.call(add_one, 0, PREPARES)
    taken(stage.tell(frames.ABORT, 0))
    refused(stage.end(), "BusyError")
    assert not stage.functions.holds
    refused(stage.tell(frames.COMMIT, 0), "BusyError")
    assert stage.values == [[0], [0]]


def answered_from_memory(stage: Stage) -> None:
    """A repeat gets the answer of the first time, and the function runs once."""
    stage.call(add_one, 0, ALONE)
    first = taken(stage.end())
    assert first == [0.0, 0.0]
    stage.call(add_one, 1, ALONE)
    stage.end()
    assert stage.call(add_one, 0, ALONE) == b""
    assert taken(stage.end()) == first
    assert stage.values == [[2], [2]]


def replayed_is_known(stage: Stage) -> None:
    """A call that its client replays counts already, also on a shard that does not know it."""
    stage.call(add_one, 0, ALONE, flags=frames.REPLAYED)
    taken(stage.end())
    assert stage.values == [[0], [0]]


def counted_already(stage: Stage) -> None:
    """The effect of this call counts, as if it had come by another way, and rows have come again since."""
    header = Header(frames.COMMIT, number=0, **OWN)
    nothing = Effect(np.empty(0, np.int64), 0, np.empty((0, 1)))
    replicas = stage.server.role.tables[1].replicas
    for number, (shard, keys) in enumerate(zip(stage.shards, stage.keys(), strict=True)):
        assert shard.apply(op_of(header, nothing, None, replicas[number]))
        shard.apply(Op(ADD, keys, 0, np.ones((len(keys), 1)), NO_CLOCK, 1))


def deletes_once(stage: Stage) -> None:
    """A deletion that counts already deletes no rows that came after it."""
    stage.call(delete_all, 0, PREPARES)
    assert sum(taken(stage.end())) == len(KEYS)
    counted_already(stage)
    versions = [shard.version for shard in stage.shards]
    taken(stage.tell(frames.COMMIT, 0))
    assert stage.values == [[1], [1]]
    assert [shard.version for shard in stage.shards] == versions


def one_deletion_is_one_op(stage: Stage) -> None:
    """A deletion by a function is one op of a shard: the rows go, and the call counts."""
    before = [shard.version for shard in stage.shards]
    stage.call(delete_all, 0, ALONE)
    taken(stage.end())
    assert [shard.version - old for shard, old in zip(stage.shards, before, strict=True)] == [1, 1]
    assert stage.values == [[], []]


def push(stage: Stage) -> None:
    """Another client pushes; no copy confirms it."""
    for shard, keys in enumerate(stage.keys()):
        counts, values = np.array([len(keys)], np.int64), np.zeros((len(keys), 1))
        body = counts.tobytes() + keys.tobytes() + values.tobytes()
        fields = {"trainer": TRAINER + 1, "shard": shard, "shards": 1, "count": len(keys)}
        assert stage.tell(frames.PUSH, 0, body, **fields) == b""
    assert stage.server.role.relay.unconfirmed()[0]


def confirm(stage: Stage) -> bytes:
    """The copies confirm all that they were sent; what the server sends then."""
    stage.server.peer.received.clear()
    for successor in stage.server.role.ops.successors.values():
        for forward in list(successor.unconfirmed.values()):
            forward.confirm()
    return bytes(stage.server.peer.received)


def repeat_waits_for_copies(stage: Stage) -> None:
    """A repeated call is not acknowledged before the copies have its effect."""
    stage.call(add_one, 0, ALONE)
    assert stage.end() == b""
    assert stage.call(add_one, 0, ALONE) == b""
    assert stage.end() == b""
    assert len(confirm(stage)) > 2 * HEADER_SIZE
    assert stage.values == [[1], [1]]


def counted_waits_for_copies(stage: Stage) -> None:
    """A COMMIT whose effect counts already is not acknowledged before the copies have what came before."""
    push(stage)
    stage.call(add_one, 0, PREPARES)
    taken(stage.end())
    counted_already(stage)
    assert stage.tell(frames.COMMIT, 0) == b""
    taken(confirm(stage)[-HEADER_SIZE:])


RULES: dict[Callable[[Stage], None], int] = {
    shards_that_there_are: 1,
    changes_as_said: 1,
    fenced_before: 1,
    fenced_meanwhile: 1,
    older_is_dropped: 1,
    beside_is_kept: 1,
    abort_revokes: 1,
    answered_from_memory: 1,
    replayed_is_known: 1,
    deletes_once: 1,
    one_deletion_is_one_op: 1,
    repeat_waits_for_copies: 2,
    counted_waits_for_copies: 2,
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_a_call_holds(rule) -> None:
    rule(Stage(RULES[rule]))


CALLS = FunctionCalls
WRONG = {
    "shards are not checked": (module, "_check_shards", "header.shards < 1 or", "False and", shards_that_there_are),
    "any mode": (CALLS, "call", "changes != (call.mode != READS)", "False", changes_as_said),
    "an older attempt counts": (CALLS, "_apply", "if header.trainer:", "if False:", fenced_meanwhile),
    "an older hold stays": (CALLS, "call", "self._end_older(header)", "pass", older_is_dropped),
    "each hold is older": (CALLS, "_end_older", "not hold.belongs_beside(header)", "True", beside_is_kept),
    "abort lets it run": (CALLS, "abort", "running.revoked = True", "pass", abort_revokes),
    "a repeat runs again": (FunctionWork, "__call__", "if value is None:", "if True:", answered_from_memory),
    "no answer is kept": (CALLS, "_apply", "kept[result] if keeps else None", "None", answered_from_memory),
    "a replay counts": (CALLS, "_repeated", "(known or ", "(", replayed_is_known),
    "what counts deletes": (Shard, "apply", "if origin and self", "if False and self", deletes_once),
    "it deletes twice": (Changes, "effects", "if replica.shard.apply(op):", (
                         "if replica.shard.apply(op) | replica.shard.apply(op._replace(origin=0)):"),
                         one_deletion_is_one_op),
    "a repeat does not follow": (CALLS, "_answer_when_confirmed", "self._owner.ops.follow(replica, owed)", "pass",
                                 repeat_waits_for_copies),
    "what counts does not follow": (Changes, "effects", "self._ops.follow(replica, owed)", "pass",
                                    counted_waits_for_copies),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_a_call_is_caught(name) -> None:
    *wrong, rule = WRONG[name]
    assert_noticed(*wrong, lambda: rule(Stage(RULES[rule])))
