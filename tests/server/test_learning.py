"""Ops that reach a joiner while a dump brings its rows: the compiled step against `Joining.apply`, and the primary."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from compiled import put_variant
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_server import LoneServer

import dps
from dps.engine.state.life import RowLife
from dps.engine.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import KeyedShard, make_shard
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, decode_header, encode_header, pack_arrays, padded
from dps.engine.wire.headers import DumpPiece

EPOCH, KEYS = 1, 60
ORIGIN = 5
SPECS = [
    TableSpec("keyed", dim=3, shards=2, optimizer=dps.Adagrad(0.5), init=dps.Normal(1.0, seed=3), id=1),
    TableSpec("dense", rows=KEYS, dim=2, shards=3, dtype="int64", id=2),
    TableSpec("records", dim=2, shards=2, optimizer=dps.SGD(0.1), life=RowLife((dps.ExpireUnused("1 day"),)), id=3),
    TableSpec("narrow", dim=5, shards=2, dtype="uint8", id=4),
    TableSpec("sums", dim=2, shards=2, optimizer=dps.SGD(0.1), aggregate="sum", id=5),
]
RULES = {PUSH: 0, ADD: frames.RULE_ADD, ASSIGN: frames.RULE_ASSIGN}


class Feeder:
    """The primary of all shards of a table: ops and pieces of its dumps, as frames for a joiner."""

    def __init__(self, spec: TableSpec, rng: np.random.Generator):
        self.spec, self.rng, self.number, self.clock = spec, rng, 0, 0
        self.shards = [make_shard(spec, n) for n in range(spec.shards)]
        for _ in range(rng.integers(0, 8)):
            self.op()
        self.dumps = [Dump(shard) for shard in self.shards]
        self.left = [*range(spec.shards)]

    def op(self) -> bytes:
        """A random op on all shards."""
        spec, rng = self.spec, self.rng
        self.number += 1
        keys = rng.choice(KEYS, rng.integers(1, 20), replace=False)
        parts = group(np.sort(keys), spec.shard_map)
        values = rng.integers(0, 9, (len(keys), spec.dim)).astype(spec.dtype)
        rule = [PUSH, ADD, ASSIGN][rng.integers(3)]
        self.clock += int(rng.integers(2))
        clock = self.clock if spec.aggregate else NO_CLOCK
        stamp = (ORIGIN, 0, self.number) if rng.random() < 0.5 else (0, 0, 0)
        for shard, a, b in zip(self.shards, parts.starts[:-1], parts.starts[1:], strict=True):
            if a < b:
                assert shard.apply(Op(rule, parts.keys[a:b], 0, values[a:b], clock, 1, *stamp))
        versions = np.array([shard.version for shard in self.shards], np.int64)
        counts = np.diff(parts.starts).astype(np.int64)
        body = versions.tobytes() + counts.tobytes() + parts.keys.tobytes()
        body += values.tobytes().ljust(padded(values.nbytes), b"\0")
        trainer, attempt, number = stamp
        header = Header(
            frames.REPLICATE, RULES[rule], table=spec.id, epoch=EPOCH, trainer=trainer, attempt=attempt, number=number,
            clock=clock, shards=spec.shards, count=len(keys), parties=1, body=len(body),
        )  # fmt: skip
        return encode_header(header) + body

    def piece(self, shard: int, content: int) -> bytes:
        """The next piece of a shard's dump; nothing after the last one."""
        found = self.dumps[shard].head() if content == 0 else ({}, []) if content == 2 else self._rows(shard)
        if found is None:
            self.left.remove(shard)
            return self.piece(shard, 2)
        text_bytes, pieces = pack_arrays(*found)
        body = b"".join(bytes(memoryview(piece).cast("B")) if len(piece) else b"" for piece in pieces)
        header = DumpPiece(self.spec.id, EPOCH, shard, content, text_bytes).header()
        return encode_header(header._replace(body=len(body))) + body

    def _rows(self, shard: int):
        return self.dumps[shard].piece(int(self.rng.integers(1, 400)))


def learn(seed: int) -> tuple[int, int]:
    """Two servers learn the shards of a table, one of them by the compiled step: how many ops it took, of how many."""
    rng = np.random.default_rng(seed)
    feeder = Feeder(SPECS[seed % len(SPECS)], rng)
    compiled, general = (LoneServer([feeder.spec], plain, backup=True) for plain in (True, False))
    ops = 0

    def send(frame: bytes) -> None:
        assert compiled.take(frame) == general.take(frame)
        header = decode_header(compiled.peer.received, 0, 1 << 40)
        assert header.kind == frames.OK, bytes(compiled.peer.received)

    for server in (compiled, general):
        server.role.tables[feeder.spec.id].replicas.clear()
    for shard in range(feeder.spec.shards):
        send(feeder.piece(shard, 0))
    plain = compiled.answered
    while feeder.left:
        for _ in range(rng.integers(0, 3)):
            send(feeder.op())
            ops += 1
        send(feeder.piece(int(rng.choice(feeder.left)), 1))
    plain = compiled.answered - plain
    for server in (compiled, general):
        for number, shard in enumerate(feeder.shards):
            found = server.role.tables[feeder.spec.id].replicas[number].shard
            assert type(found) is type(shard)
            assert first_difference(shard, found) is None, first_difference(shard, found)
    send(feeder.op())
    return plain, ops


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_joiner_that_learns_does_the_same_as_in_the_general_way(seed: int) -> None:
    learn(seed)


def test_the_compiled_step_takes_the_ops_of_a_joiner_that_learns() -> None:
    for kind, spec in enumerate(SPECS):
        counts = [learn(seed) for seed in range(kind, 60, len(SPECS))]
        plain, ops = map(sum, zip(*counts, strict=True))
        assert plain > 0.5 * ops > 10 or spec.aggregate, (spec.name, plain, ops)


def test_a_joiner_has_no_row_that_did_not_come() -> None:
    shard = KeyedShard(SPECS[0], 0)
    joining = Joining(SPECS[0], 0)
    joining.begin(*Dump(shard).head())
    assert isinstance(joining.so_far, KeyedShard)
    assert len(joining.so_far) == len(joining) == 0


WRONG = {
    "rows that are still to come are born": ("if op.keys == NULL or shard.index is None:", "if True:"),
    "the values of other keys": ("<const char *> op.values + n * row_bytes", "<const char *> op.values"),
    "the ledger notes ops before it has come": (
        "self._memory[KNOWN], table.row_bytes)\n            return 0",
        "self._memory[KNOWN], table.row_bytes)",
    ),
    "sums take part": ("or table.aggregated or shard.vacancies", "or shard.vacancies"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [next(iter(WRONG)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*WRONG][1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, name: str) -> None:
    put_variant(monkeypatch, ("service", "request", "apply"), *WRONG[name])
    with pytest.raises((AssertionError, ValueError, dps.DPSError)):
        collections.deque(map(learn, range(400)), maxlen=0)
