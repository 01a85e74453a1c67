"""The compiled step of a server against the general way: the same answers, rows, ledgers, versions and counters."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from compiled import put_variant, variants
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_server import FOREVER, LoneServer
from oracles import COLUMNS

import dps
from dps.engine.core import packed_keys
from dps.engine.core.codec import CODECS, bytes_of_row, encode
from dps.engine.server import requests
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.columns import of_columns
from dps.engine.state.ops import ADD, NO_CLOCK, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import KeyedShard
from dps.engine.state.snapshot import Cut
from dps.engine.state.transfer import Joining, digest, first_difference
from dps.engine.wire import frames
from dps.engine.wire.frames import (
    ANSWER,
    CERTIFICATE,
    CONTROL,
    NARROW,
    RANGE,
    RULE_ADD,
    RULE_ASSIGN,
    Header,
    encode_header,
    padded,
)
from dps.engine.wire.plain_answers import ROOM_BYTES
from dps.errors import LimitError, MovedError

SPECS = [
    TableSpec("add", shards=1, id=1),
    TableSpec("sgd", dim=3, shards=8, optimizer=dps.SGD(0.1), init=dps.Normal(1.0, seed=3), finite=True, id=2),
    TableSpec("adagrad", dim=2, shards=4, optimizer=dps.Adagrad(0.5, initial_accumulator=0.1), dtype="float64", id=3),
    TableSpec("adam", dim=16, shards=2, optimizer=dps.Adam(0.1), id=4),
    TableSpec("int64", dim=2, shards=4, dtype="int64", init=dps.Constant(7), id=5),
    TableSpec("ftrl", shards=4, optimizer=dps.FTRL(), init=dps.Uniform(-1.0, 1.0), id=6),
    TableSpec("rmsprop", dim=5, shards=2, optimizer=dps.RMSprop(0.1), dtype="float64", finite=True, id=7),
    TableSpec("dense int64", rows=37, dim=2, shards=5, dtype="int64", id=8),
    TableSpec("momentum", rows=300, shards=3, optimizer=dps.Momentum(0.1), init=dps.Uniform(-1.0, 1.0), id=9),
    TableSpec("adamw", rows=40, dim=3, shards=4, optimizer=dps.AdamW(0.1), id=10),
    TableSpec("assign", rows=64, dim=4, shards=2, optimizer=dps.Assign(), dtype="float64", id=11),
    TableSpec("sum", dim=2, shards=2, optimizer=dps.SGD(0.1), aggregate="sum", id=12),
    TableSpec("mean", rows=30, dim=2, shards=3, optimizer=dps.SGD(0.1), aggregate="mean", id=13),
    TableSpec("copies", dim=2, shards=2, optimizer=dps.SGD(0.1), copies=2, id=14),
    TableSpec("memory", rows=20, shards=2, optimizer=dps.SGD(0.1), copies=2, ack="memory", id=15),
    TableSpec("rate", dim=2, shards=2, optimizer=dps.SGD(dps.Exponential(0.5, factor=0.9)), id=16),
    TableSpec("lag", dim=2, shards=2, optimizer=dps.SGD(dps.StalenessAware(0.5), l1=0.1), id=20),
    TableSpec(
        "narrow",
        dim=6,
        shards=4,
        optimizer=dps.SGD(0.1),
        finite=True,
        wire=dps.Wire("int8", "float16", lists=True),
        id=22,
    ),
    TableSpec("narrow rows", rows=50, dim=2, shards=2, copies=2, wire=dps.Wire("bfloat16", "bfloat16"), id=23),
    TableSpec("lag copies", rows=40, dim=3, shards=2, optimizer=dps.Adam(dps.StalenessAware(0.1)), copies=2, id=21),
]
for number, (rows, copies) in enumerate([(None, 1), (40, 1), (None, 2)], 17):
    dim, optimizer, init = of_columns(COLUMNS)
    SPECS.append(
        TableSpec(f"columns {number}", rows, dim, "float32", optimizer, init, shards=2, copies=copies, id=number)
    )
BY_NAME = {spec.name: spec for spec in SPECS}
ROOMS = [ROOM_BYTES, frames.HEADER_SIZE + 70, 500]  # of the answers of a step


def framed(header: Header, body: bytes = b"") -> bytes:
    return encode_header(header._replace(body=len(body))) + body


def packed_bytes(keys: np.ndarray) -> bytes:
    out = np.empty(packed_keys.packed_bytes(keys), np.uint8)
    packed_keys.pack(keys, out)
    return out.tobytes()


def padded_bytes(array: np.ndarray) -> bytes:
    return array.tobytes().ljust(padded(array.nbytes), b"\0")


def value_bytes(spec: TableSpec, values: np.ndarray, flags: int) -> bytes:
    """The values of a push, as they travel."""
    values = values.astype(spec.dtype)
    if not flags & NARROW or spec.wire.push is None:
        return padded_bytes(values)
    out = np.empty(len(values) * bytes_of_row(CODECS[spec.wire.push], spec.dim, 0), np.uint8)
    encode(CODECS[spec.wire.push], values, out)
    return padded_bytes(out)


def keyed(spec: TableSpec, kind: int, keys: np.ndarray, values: np.ndarray | None = None, **fields) -> bytes:
    """A request for keys, which has a count for each shard."""
    parts = group(np.asarray(keys, np.int64), spec.shard_map)
    body = np.diff(parts.starts).astype(np.int64).tobytes() + parts.keys.tobytes()
    if values is not None:
        body += value_bytes(spec, values, fields.get("flags", 0))
    return framed(Header(kind, table=spec.id, shards=spec.shards, count=len(keys), **fields), body)


def ranged(spec: TableSpec, kind: int, start: int, count: int, values: np.ndarray | None = None, **fields) -> bytes:
    """A request for rows `start` to start + count - 1."""
    fields["flags"] = fields.get("flags", 0) | RANGE
    body = b"" if values is None else value_bytes(spec, values, fields["flags"])
    return framed(Header(kind, table=spec.id, shards=spec.shards, start=start, count=count, **fields), body)


def with_versions(frame: bytes, versions: np.ndarray) -> bytes:
    """The frame of a push as that of a forwarded op."""
    header, body = frames.decode_header(frame, 0, 1 << 40), frame[frames.HEADER_SIZE :]
    return framed(header, versions.astype(np.int64).tobytes() + body)


class Talk:
    """Random requests of three clients, some of them broken."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.numbers = [3, 3, 3]
        self.lists: list[tuple[int, bytes]] = []  # of tables with lists: the table, counts and keys
        self.clocks = [0, 0, 0]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def frame(self) -> bytes:
        rng = self.rng
        spec = SPECS[rng.integers(len(SPECS))]
        pushed = self.chance(0.6)
        kind, fields = (frames.PUSH, self.stamp()) if pushed else (frames.PULL, {"clock": int(rng.integers(-1, 4))})
        fields["flags"] = self.flags(pushed)
        packs = spec.wire.asks and (not fields["flags"] & frames.RULE_DELETE or self.chance(0.1))
        fields["flags"] |= NARROW * (packs and self.chance(0.6))
        fields["request"] = int(rng.integers(1 << 32))
        if self.chance(0.1):
            fields["rows"] = int(rng.integers(0, 5))
        make, where, count = self.place(spec)
        values = self.values(spec, count) if pushed else None
        frame = make(spec, kind, *where, values, **fields)
        if spec.wire.lists and packs and make is keyed and self.chance(0.7):
            frame = self.listed(frame, 8 * (spec.shards + count))
        return self.broken(frame) if self.chance(0.15) else frame

    def listed(self, frame: bytes, nbytes: int) -> bytes:
        """A frame whose keys, of so many bytes, are kept as a list, or are one that is; or something in it is wrong."""
        header, body = frames.decode_header(frame, 0, 1 << 40), frame[frames.HEADER_SIZE :]
        keys, flags = body[:nbytes], header.flags | frames.LIST
        known = [n for n, each in enumerate(self.lists) if each == (header.table, keys)]
        if known and self.chance(0.9):
            return framed(header._replace(flags=flags, start=known[-1]), body[nbytes:])
        number = len(self.lists) + int(self.rng.integers(-1, 3)) * self.chance(0.1)
        packed = keys[: 8 * header.shards] + packed_bytes(np.frombuffer(keys[8 * header.shards :], np.int64))
        if self.chance(0.1):  # of another length, or as they would travel without a list
            packed = [packed[:-8], packed + bytes(8), keys][self.rng.integers(3)]
        elif number == len(self.lists):
            self.lists.append((header.table, keys))
        return framed(header._replace(flags=flags, start=~number), packed + body[nbytes:])

    def forward(self, server: LoneServer) -> bytes:
        """A frame of a primary, for a backup in this state."""
        rng, spec = self.rng, SPECS[self.rng.integers(len(SPECS))]
        fields = {**self.stamp(), "flags": self.flags(True), "request": int(rng.integers(1 << 32))}
        fields["epoch"] = 1 - self.chance(0.05)
        if self.chance(0.1):
            fields["rows"] = int(rng.integers(0, 5))
        make, where, count = self.place(spec)
        frame = make(spec, frames.REPLICATE, *where, self.values(spec, count), **fields)
        shards = [replica.shard for _, replica in sorted(server.role.tables[spec.id].replicas.items())]
        versions = np.array([shard.version + 1 for shard in shards], np.int64)
        if self.chance(0.1):
            versions[rng.integers(len(versions))] += rng.choice([-1, 1])
        return with_versions(frame, versions)

    def place(self, spec: TableSpec) -> tuple[Callable[..., bytes], tuple, int]:
        """Rows of a table: the function that makes the frame, its arguments, how many rows."""
        rng = self.rng
        count = int(rng.choice([0, 1, 2, 9, 40, 400]))
        if spec.rows is not None and self.chance(0.5):
            start = int(rng.integers(spec.rows))
            count = min(count, spec.rows - start)
            return ranged, (start, count), count
        pool = spec.rows or int(rng.choice([50, 50, 100_000]))
        keys = rng.integers(0, pool, count)
        if self.chance(0.7):
            keys = rng.permutation(np.unique(keys))
        return keyed, (keys,), len(keys)

    def stamp(self) -> dict[str, int]:
        rng, client = self.rng, int(self.rng.integers(3))
        self.numbers[client] += 1
        if self.chance(0.2):
            self.clocks[client] += 1
        clock = NO_CLOCK if client == 2 else self.clocks[client] - int(self.chance(0.05))
        number = self.numbers[client] - int(rng.integers(3)) * self.chance(0.1)
        attempt = 1 if self.numbers[client] > 60 and not self.chance(0.1) else 0
        origin = 0 if self.chance(0.1) else client + 1
        parties = int(rng.integers(1, 4))
        return {"trainer": origin, "clock": clock, "number": number, "attempt": attempt, "parties": parties}

    def flags(self, pushed: bool) -> int:
        if not pushed:
            return CERTIFICATE * self.chance(0.03)
        rule = int(self.rng.choice([0, 0, 0, RULE_ADD, RULE_ASSIGN]))
        return rule | ANSWER * self.chance(0.2) | CONTROL * self.chance(0.01)

    def values(self, spec: TableSpec, count: int) -> np.ndarray:
        values = self.rng.normal(size=(count, spec.dim)) * 10
        if self.chance(0.05) and spec.dtype != "int64":
            values[self.rng.random(values.shape) < 0.2] = self.rng.choice([np.nan, np.inf, -np.inf])
        return values

    def broken(self, frame: bytes) -> bytes:
        """A frame with one field changed, or a body of another length; its length still fits its header."""
        rng = self.rng
        header, body = frames.decode_header(frame, 0, 1 << 40), frame[frames.HEADER_SIZE :]
        what = rng.integers(6)
        if what == 0 and body:
            body = body[:-8]
        elif what == 1:
            body += bytes(8)
        elif what == 2 and len(body) >= 8:
            body = np.int64(rng.choice([-1, 1 << 40, 3])).tobytes() + body[8:]
        elif what == 3:
            header = header._replace(shard=int(rng.integers(4)), shards=int(rng.integers(9)))
        elif what == 4:
            header = header._replace(start=int(rng.choice([-3, 5, 1 << 62])), count=int(rng.integers(50)))
        else:
            header = header._replace(table=int(rng.integers(20)), kind=int(rng.choice([16, 17, 18, 19, 21])))
        return framed(header, body)

    def event(self) -> Callable[[LoneServer], object]:
        """Something that changes what a server may answer."""
        rng, spec = self.rng, SPECS[self.rng.integers(len(SPECS))]
        number, first = int(rng.integers(spec.shards)), int(rng.integers(1, 4))
        what = rng.choice([0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7])
        late, read = self.chance(0.5), self.chance(0.7)

        def happen(server: LoneServer) -> None:
            role = server.role
            replica = role.tables[spec.id].replicas[number]
            shard = replica.shard
            if what == 0:
                role.heartbeat.lease_until = FOREVER if role.heartbeat.lease_until < 0 else -1.0
            elif what == 1:
                replica.stepping_down = not replica.stepping_down
            elif what == 2:
                replica.deposed = not replica.deposed
            elif what == 3 and shard.cut is None:
                shard.track_changes()
            elif what == 4:
                self.cut(server, replica, late, read, first)
            elif what == 5 and self.numbers[first - 1] > 70:
                role.settle(None, [[first, 1]])
            elif what == 6:
                role.settle(bool(number % 2), [])
            elif what == 7 and spec.copies > 1:
                role.relay.rechain(replica, None, None)

        return happen

    @staticmethod
    def cut(server: LoneServer, replica: Replica, late: bool, read: bool, pieces: int) -> None:
        """Begin to cut a shard, of now or of a later clock; or complete the cut, or read on in it, or end it."""
        shard, cut = replica.shard, replica.shard.cut
        if cut is None:
            clock = max(shard.clock, shard.ledger.certificate()[:, 1].max(initial=0)) + 1 if late else None
            if late or shard.sums is None:
                shard.begin_cut(clock, changed_only=shard.changed is not None and read)
        elif not cut.is_complete and read:
            if shard.would_close(cut.clock):
                shard.close_before(cut.clock)
            cut.complete()
        elif cut.is_complete and read:
            cut.pieces_read = getattr(cut, "pieces_read", [])
            for keys, rows in itertools.islice(cut.pieces(200), pieces):
                cut.pieces_read.append((str(keys), rows.tobytes()))
        else:
            shard.end_cut()


def counters(table: ServerTable) -> object:
    table.meter.reported = ()  # the next report is complete
    return table.meter.report()


def content(cut: Cut | None) -> object:
    """All that a cut knows."""
    if cut is None:
        return None
    saved = cut.saved[: cut.copies].tobytes()
    numbers = cut.is_complete, cut.before, cut.latest, cut.has_changes, cut.existing, cut.given, cut.stop, cut.rows
    numbers += (cut.lead and (cut.lead.clock, cut.lead.origin),)
    return numbers, saved, cut.place.tobytes(), cut.ledger.certificate().tolist(), getattr(cut, "pieces_read", [])


def differences(one: LoneServer, other: LoneServer) -> list[str]:
    texts = []
    if one.role.requests != other.role.requests:
        texts.append(f"{one.role.requests} and {other.role.requests} requests")
    if one.role.relay.unconfirmed() != other.role.relay.unconfirmed():
        texts.append(f"{one.role.relay.unconfirmed()} and {other.role.relay.unconfirmed()} unconfirmed")
    for spec in SPECS:
        a, b = one.role.tables[spec.id], other.role.tables[spec.id]
        if counters(a) != counters(b):
            texts.append(f"the counters of {spec.name!r}")
        for number, replica in a.replicas.items():
            shard, same = replica.shard, b.replicas[number].shard
            difference = first_difference(shard, same)
            if difference is not None:
                texts.append(f"shard {number} of {spec.name!r}: {difference}")
            if (shard.changed is None) != (same.changed is None) or not np.array_equal(shard.changed, same.changed):
                texts.append(f"the flags of shard {number} of {spec.name!r}")
            if content(shard.cut) != content(same.cut):
                texts.append(f"the cut of shard {number} of {spec.name!r}")
            if shard.nbytes != same.nbytes:
                texts.append(f"the memory of shard {number} of {spec.name!r}: {shard.nbytes} and {same.nbytes}")
    return texts


def play(seed: int, turns: int = 30) -> LoneServer:
    """Let two servers answer the same frames, several at a time; the one with the compiled step."""
    talk = Talk(seed)
    one = LoneServer(SPECS, plain=True, room=ROOMS[seed % len(ROOMS)])
    other = LoneServer(SPECS, plain=False)
    for _ in range(turns):
        arrived = b"".join(talk.frame() for _ in range(talk.rng.integers(1, 8)))
        assert one.take(arrived) == other.take(arrived)
        assert one.peer.closing == other.peer.closing
        if talk.chance(0.25):
            happen = talk.event()
            happen(one), happen(other)
        assert not differences(one, other)
    return one


def follow(seed: int, turns: int = 60) -> LoneServer:
    """Let two backups carry out the same ops; the one with the compiled step."""
    talk, one, other = Talk(seed), LoneServer(SPECS, True, backup=True), LoneServer(SPECS, False, backup=True)
    for _ in range(turns):
        arrived = talk.forward(one) * (1 + talk.chance(0.1))
        assert one.take(arrived) == other.take(arrived)
        assert one.peer.closing == other.peer.closing
        if talk.chance(0.1):
            happen = talk.event()
            happen(one), happen(other)
        assert not differences(one, other)
    return one


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_backup_does_the_same_as_in_the_general_way(seed: int) -> None:
    follow(seed)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_as_the_general_way(seed: int) -> None:
    play(seed)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_as_the_general_way_with_more_frames(seed: int) -> None:
    play(seed)


@pytest.mark.thorough
def test_many_of_these_frames_are_plain() -> None:
    servers = [play(seed) for seed in range(10)]
    assert sum(s.declined for s in servers) < 0.6 * sum(s.role.requests for s in servers)
    backups = [follow(seed) for seed in range(10)]
    assert sum(s.answered for s in backups) > sum(s.declined for s in backups) / 3


# ---- what is declined -----------------------------------------------------------------------------------------------

STAMP = {"trainer": 1, "clock": 5, "number": 5, "attempt": 1}
NEXT = {**STAMP, "number": 6}


def push(name: str, count: int = 1, **fields) -> bytes:
    spec = BY_NAME[name]
    values = np.ones((count, spec.dim))
    return keyed(spec, frames.PUSH, np.arange(count), values, **{**NEXT, **fields})


def pull(name: str, count: int = 1, **fields) -> bytes:
    return keyed(BY_NAME[name], frames.PULL, np.arange(count), **fields)


def changed(frame: bytes, extra: bytes = b"", **fields) -> bytes:
    """The frame with other fields, and more bytes in its body."""
    header = frames.decode_header(frame, 0, 1 << 40)
    return framed(header._replace(**fields), frame[frames.HEADER_SIZE :] + extra)


def every(name: str, change: Callable[[object], object]) -> Callable[[LoneServer], None]:
    """Do this with all replicas of a table."""

    def happen(server: LoneServer) -> None:
        for replica in server.role.tables[BY_NAME[name].id].replicas.values():
            change(replica)

    return happen


def put(name: str, **attributes: object) -> Callable[[LoneServer], None]:
    return every(name, lambda replica: [setattr(replica, key, value) for key, value in attributes.items()])


def no_lease(server: LoneServer) -> None:
    server.role.heartbeat.lease_until = -1.0


def without_backups(server: LoneServer) -> None:
    for replica in server.role.tables[BY_NAME["memory"].id].replicas.values():
        server.role.relay.rechain(replica, None, None)


def nothing(server: LoneServer) -> None: ...


def cut_with_later_ops(server: LoneServer) -> None:
    """All shards are being cut at clock 6, and each has an op of that clock already."""
    op = Op(ADD, np.arange(20), 0, np.ones((20, 3), np.float32), clock=6, parties=1)
    every("sgd", lambda replica: replica.shard.begin_cut(6))(server)
    every("sgd", lambda replica: replica.shard.apply(op))(server)
    every("sgd", lambda replica: setattr(replica.shard, "version", replica.shard.version - 1))(server)


def cut_at_another_rate(server: LoneServer) -> None:
    """All shards are being cut at clock 6, and a later op without rows has come."""
    every("rate", lambda replica: replica.shard.begin_cut(6))(server)
    every("rate", lambda replica: setattr(replica.shard, "clock", 9))(server)


DECLINED: dict[str, tuple[bytes, Callable[[LoneServer], object]]] = {
    "an unknown table": (changed(push("sgd"), table=99), nothing),
    "another kind": (framed(Header(frames.STATUS)), nothing),
    "a scan": (framed(Header(frames.SCAN, table=1, count=3)), nothing),
    "a certificate": (pull("sgd", flags=CERTIFICATE), nothing),
    "a narrow push of a table that has none": (push("sgd", flags=NARROW), nothing),
    "a narrow pull of a table that has none": (pull("sgd", flags=NARROW), nothing),
    "two rules": (push("sgd", flags=RULE_ADD | RULE_ASSIGN), nothing),
    "a pull with a rule": (pull("sgd", flags=RULE_ADD), nothing),
    "a range of a keyed table": (ranged(BY_NAME["sgd"], frames.PULL, 0, 3), nothing),
    "a pull that is too long": (changed(pull("sgd"), bytes(8)), nothing),
    "a push that is too long": (changed(push("sgd"), bytes(8)), nothing),
    "a push that is too short": (changed(push("adam", 2), count=3), nothing),
    "a range that is too long": (changed(ranged(BY_NAME["adamw"], frames.PULL, 0, 3), bytes(8)), nothing),
    "more shards than there are": (changed(pull("add", 3), bytes(8), shards=2, count=3), nothing),
    "counts that do not add up": (
        framed(Header(frames.PULL, table=1, shards=1, count=1), np.array([2, 7]).tobytes()),
        nothing,
    ),
    "counts below zero": (
        framed(Header(frames.PULL, table=2, shards=2, count=1), np.array([-1, 2, 7]).tobytes()),
        nothing,
    ),
    "rows before the first": (ranged(BY_NAME["adamw"], frames.PULL, -1, 3), nothing),
    "rows after the last": (ranged(BY_NAME["adamw"], frames.PULL, 39, 3), nothing),
    "a range beyond all numbers": (ranged(BY_NAME["adamw"], frames.PULL, (1 << 63) - 2, 3), nothing),
    "rows that are not in the shards named": (
        changed(ranged(BY_NAME["adamw"], frames.PULL, 0, 30), shards=2),
        nothing,
    ),
    "rows before those of the shards named": (changed(ranged(BY_NAME["adamw"], frames.PULL, 0, 3), shard=1), nothing),
    "a row of another shard": (
        framed(Header(frames.PULL, table=10, shards=4, count=1), np.array([0, 1, 0, 0, 3]).tobytes()),
        nothing,
    ),
    "NaN": (keyed(BY_NAME["sgd"], frames.PUSH, np.arange(1), np.full((1, 3), np.nan), **NEXT), nothing),
    "infinity": (keyed(BY_NAME["rmsprop"], frames.PUSH, np.arange(1), np.full((1, 5), np.inf), **NEXT), nothing),
    "a push without rows= where others have it": (
        push("mean", number=7),
        lambda server: server.take(push("mean", rows=3)),
    ),
    "a pull without a lease": (pull("copies"), no_lease),
    "a push without a lease": (push("memory"), no_lease),
    "a shard that is elsewhere": (pull("sgd", 40), lambda s: s.role.tables[2].replicas.clear()),
    "no primary": (pull("sgd", 40), put("sgd", primary=False)),
    "a primary that steps down": (pull("sgd", 40), put("sgd", stepping_down=True)),
    "a deposed primary": (pull("sgd", 40), put("sgd", deposed=True)),
    "a dump that is coming": (pull("sgd"), put("sgd", joining=True, shard=Joining(BY_NAME["sgd"], 0))),
    "an op of a cut that has ops outside it": (push("sgd"), cut_with_later_ops),
    "an op of a cut at another rate": (push("rate", clock=NO_CLOCK, trainer=0), cut_at_another_rate),
    "a repeat": (push("sgd", **STAMP), nothing),
    "an older attempt": (push("sgd", attempt=0), nothing),
    "a new origin": (push("sgd", trainer=9), nothing),
    "a retired origin": (push("sgd"), lambda server: server.role.settle(None, [[1, 1]])),
    "half a frame": (pull("sgd")[:-8], nothing),
    "half a header": (pull("sgd")[:56], nothing),
    "no frame": (bytes(64), nothing),
}


def prepared() -> LoneServer:
    """A server that knows the origin of the requests above, and serves a table whose backups are lost."""
    server = LoneServer(SPECS, plain=True)
    without_backups(server)
    for spec in SPECS:
        server.take(keyed(spec, frames.PUSH, np.arange(20), np.ones((20, spec.dim)), **STAMP))
    server.role.settle(True, [])
    return server


def state(server: LoneServer) -> list[object]:
    tables = server.role.tables.values()
    held = [(table.spec.id, replica) for table in tables for replica in table.replicas.values() if not replica.joining]
    shards = [(number, replica.number, digest(replica.shard)) for number, replica in held]
    return [server.role.requests, *shards, *map(counters, tables)]


@pytest.mark.parametrize("reason", DECLINED)
def test_what_is_declined(reason: str) -> None:
    frame, happen = DECLINED[reason]
    server = prepared()
    if happen is not nothing:
        answered, answers = prepared().step(frame)
        assert answered == len(frame), "it is declined for another reason, too"
        assert len(answers) >= frames.HEADER_SIZE
        happen(server)
    before = state(server)
    assert server.step(frame) == (0, b"")
    assert state(server) == before


def forwarded(name: str, version: int = 2, **fields) -> bytes:
    """A second op on a few rows, for a backup whose shards are all at version 1."""
    spec = BY_NAME[name]
    fields = {**NEXT, "epoch": 1, **fields}
    frame = keyed(spec, frames.REPLICATE, np.arange(20), np.ones((20, spec.dim)), **fields)
    return with_versions(frame, np.full(spec.shards, version))


def prepared_backup() -> LoneServer:
    server = LoneServer(SPECS, plain=True, backup=True)
    for spec in SPECS:
        server.take(forwarded(spec.name, version=1, **STAMP))
    return server


NOT_CONFIRMED: dict[str, tuple[bytes, Callable[[LoneServer], object]]] = {
    "a pull": (pull("sgd", 20), nothing),
    "a push": (push("sgd", 20), nothing),
    "a control op": (forwarded("sgd", flags=CONTROL), nothing),
    "an op that was applied": (forwarded("sgd", version=1), nothing),
    "an op that is too early": (forwarded("sgd", version=3), nothing),
    "an earlier epoch": (forwarded("sgd", epoch=0), nothing),
    "a later fence": (forwarded("sgd"), put("sgd", fence=2)),
    "a placement that is to come": (forwarded("sgd"), put("sgd", fence=0)),
    "a primary": (forwarded("sgd"), put("sgd", primary=True)),
    "an op of a cut that has ops outside it": (forwarded("sgd"), cut_with_later_ops),
    "a new origin": (forwarded("sgd", trainer=9), nothing),
    "a repeat": (forwarded("sgd", **STAMP), nothing),
    "a body without versions": (framed(Header(frames.REPLICATE, table=2, shards=8, epoch=1)), nothing),
    "a body that is too long": (changed(forwarded("sgd"), bytes(8)), nothing),
}


@pytest.mark.parametrize("reason", NOT_CONFIRMED)
def test_what_a_backup_declines(reason: str) -> None:
    frame, happen = NOT_CONFIRMED[reason]
    server = prepared_backup()
    assert prepared_backup().step(forwarded("sgd"))[0] == len(forwarded("sgd"))
    happen(server)
    before = state(server)
    assert server.step(frame) == (0, b"")
    assert state(server) == before


def test_a_client_forwards_nothing() -> None:
    server = prepared()
    assert server.step(forwarded("sgd")) == (0, b"")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_is_plain(spec: TableSpec) -> None:
    """Several frames in one step."""
    server = prepared()
    pulls = keyed(spec, frames.PULL, np.arange(20)) * 3
    assert server.step(pulls)[0] == len(pulls)
    pushes = [keyed(spec, frames.PUSH, np.arange(20), np.ones((20, spec.dim)), **{**NEXT, "number": n}) for n in (7, 8)]
    assert server.step(b"".join(pushes))[0] == sum(map(len, pushes))
    assert server.step(keyed(spec, frames.PULL, np.arange(20), clock=7))[0] > 0, "which closes the sums of a clock"
    assert not server.role.tables[spec.id].replicas[0].shard.would_close(7)
    arrived = forwarded(spec.name) + forwarded(spec.name, 3, number=7)
    assert prepared_backup().step(arrived)[0] == len(arrived)


def test_an_answer_that_has_no_room_is_left() -> None:
    server = prepared()
    frame = ranged(BY_NAME["momentum"], frames.PULL, 0, 300)
    inbox = np.frombuffer(bytearray(2 * frame), np.uint8)
    service = server.role.service
    for room, answered in ((64 + 3, 0), (64 + 1200, 1), (2 * (64 + 1200) - 1, 1), (2 * (64 + 1200), 2)):
        done = service.step(inbox, 0, len(inbox), np.empty(room, np.uint8), None, False)
        assert done == (answered * len(frame), answered * (64 + 1200))
        assert service.left == 0


@pytest.mark.parametrize("room", [64 + 4, 64 + 70, 64 + 1199])
def test_a_large_answer_is_made_in_pieces(room: int) -> None:
    server = prepared()
    frame = ranged(BY_NAME["momentum"], frames.PULL, 0, 300)
    inbox, out = np.frombuffer(bytearray(2 * frame), np.uint8), np.empty(room, np.uint8)
    _, whole = server.step(frame)
    service = server.role.service
    answered, made = service.step(inbox, 0, len(inbox), out, None, False)
    assert answered == len(frame), "one large answer at a time"
    pieces = [out[:made].tobytes()]
    while service.left:
        assert service.left == len(whole) - sum(map(len, pieces))
        pieces.append(out[: service.more(out)].tobytes())
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) <= room
    assert service.more(out) == 0
    service.step(inbox, 0, len(inbox), out, None, False)
    assert service.left > 0
    assert service.step(inbox, 0, 0, out, None, False) == (0, 0)
    assert (service.left, service.more(out)) == (0, 0), "another step has begun"


WIDE = TableSpec("wide", rows=50, dim=40, shards=1, id=1)


def pushes_behind_a_large_answer() -> None:
    """There is room for the next answer, and none for another row of the large one: the next request has to wait."""
    server = LoneServer([WIDE], plain=True)
    ones, stamp = np.ones((50, 40)), {"trainer": 1, "attempt": 1, "clock": 0, "parties": 1}
    server.take(ranged(WIDE, frames.PUSH, 0, 50, ones, number=1, **stamp))
    pull = ranged(WIDE, frames.PULL, 0, 50)
    _, whole = server.step(pull)
    behind = ranged(WIDE, frames.PUSH, 0, 50, ones, number=2, **stamp)
    inbox, out = np.frombuffer(bytearray(pull + behind), np.uint8), np.empty(64 + 160 + 100, np.uint8)
    service = server.role.service
    answered, made = service.step(inbox, 0, len(inbox), out, None, False)
    assert answered == len(pull)
    pieces = [out[:made].tobytes()]
    while service.left:
        pieces.append(out[: service.more(out)].tobytes())
    assert b"".join(pieces) == whole
    assert service.step(inbox, answered, len(inbox), out, None, False)[0] == len(behind)


def test_what_comes_behind_a_large_answer_waits_for_all_of_it() -> None:
    pushes_behind_a_large_answer()


@pytest.mark.slow
def test_a_step_that_does_not_wait_for_a_large_answer_is_caught(monkeypatch) -> None:
    put_variant(monkeypatch, ("service",), "and self._values.left == 0:", "and True:")
    with pytest.raises(AssertionError):
        pushes_behind_a_large_answer()


def an_op_that_closes_a_clock_during_a_cut() -> None:
    """The rows of the sums are saved for the cut before those of the op, which have their room all the same."""
    server, spec = prepared(), BY_NAME["mean"]
    shard = server.role.tables[spec.id].replicas[0].shard
    before, cut = shard.rows.copy(), shard.begin_cut(6)
    summed = keyed(spec, frames.PUSH, [1, 2], np.ones((2, 2)), **{**NEXT, "clock": 6})
    added = keyed(spec, frames.PUSH, [3], np.ones((1, 2)), **{**NEXT, "clock": 7}, flags=RULE_ADD)
    for frame in (summed, added):
        assert server.step(frame)[0] == len(frame)
    assert shard.sums is None
    assert np.flatnonzero((shard.rows != before).any(axis=1)).tolist() == [1, 2, 3]
    cut.complete()
    ((_, rows),) = cut.pieces(1 << 20)
    np.testing.assert_array_equal(rows, before)


def test_an_op_that_closes_a_clock_during_a_cut() -> None:
    an_op_that_closes_a_clock_during_a_cut()


@pytest.mark.slow
def test_a_close_that_takes_the_room_of_its_op_is_caught(monkeypatch) -> None:
    put_variant(monkeypatch, ("service",), "shard.index is None and not has_room(shard, op.count)", "False")
    with pytest.raises(MovedError):
        an_op_that_closes_a_clock_during_a_cut()


@pytest.mark.parametrize("error", [MemoryError, LimitError])
def test_without_memory_for_new_rows_it_is_declined(monkeypatch, error: type) -> None:
    server = prepared()

    def reserve(shard: KeyedShard, new: int) -> None:
        raise error("none is left")

    monkeypatch.setattr(KeyedShard, "reserve", reserve)
    before = state(server)
    frame = keyed(BY_NAME["sgd"], frames.PUSH, np.arange(50_000), np.ones((50_000, 3)), **NEXT)
    assert server.step(frame) == (0, b"")
    assert state(server) == before


@pytest.mark.parametrize(("start", "end"), [(-8, 64), (0, 72), (64, 0), (4, 64)])
def test_parts_of_an_inbox_that_do_not_fit_are_refused(start: int, end: int) -> None:
    service = prepared().role.service
    with pytest.raises(ValueError, match="of an inbox of 64"):
        service.step(np.zeros(64, np.uint8), start, end, np.empty(64, np.uint8), None, False)
    with pytest.raises(TypeError):
        service.step(np.zeros(64, np.int8), 0, 64, np.empty(64, np.uint8), None, False)


# ---- what must not pass ---------------------------------------------------------------------------------------------

WRONG_BACKUPS = [
    (" or head.epoch < replica.fence", ""),
    ("if versions[shard.number - head.shard] != shard.version + 1:", "if False:"),
    ("(<dps_header *> out).count = 0", "pass"),
]
WRONG = [
    ("not replica.takes_requests()", "False"),
    ("not shard.ledger.is_next(head.trainer, head.attempt, head.clock, head.number)", "False"),
    ("and not self._holds_lease()", "and False"),
    ("self._cut_range(table, head) if length == <uint64_t> nbytes else DECLINED", "self._cut_range(table, head)"),
    ("return count if a == head.count else DECLINED", "return count"),
    ("return count if row == head.start + head.count else DECLINED", "return count"),
    ("self.forwards = True", "pass"),
    ("if table.finite and not are_finite", "if False and not are_finite"),
    ("may_follow(shard, head.clock, op.rule == OP_PUSH)", "False"),
    ("save_rows(shard, index, start, op.count, op.clock, op.rule == OP_PUSH)", "False"),
    ("note_op(shard, head.clock, head.trainer, head.attempt, head.number, op.rule == OP_PUSH)", "pass"),
    ("has_room(shard, part[n].b - part[n].a)", "True"),
    ("if row < stop or head.rows > 0:", "if row < stop:"),
    ("if counts[n] > 0 or head.rows > 0:", "if counts[n] > 0:"),
    ("return aggregated and", "return False and"),
    ("and op.clock != NO_CLOCK\n", "\n"),
    ("            shard.close_before(head.clock)", "            pass"),
    ("self._close_before(<object> part[n].replica, head.clock)", "pass"),
    ("head.flags & ~(NARROW | LIST)", "head.flags"),
    ("        if codec != AS_IS:\n            whole.values", "        if False:\n            whole.values"),
    ("if (sums.rows < 0) != (head.rows < 0):", "if False:"),
    ("max(sums.parties, op.parties)", "op.parties"),
    ("max(sums.rows, <int64_t> 0) + op.rows", "op.rows"),
    ("dps_flag(touched, sums.touched.shape[0], index, start, op.count, TOUCHED)", "pass"),
    ("shard.ledger.record(head.trainer, head.attempt, head.clock, head.number)", "pass"),
    ("(<ShardState> part.shard).ledger.keep(head.trainer, head.clock, head.number, kept)", "pass"),
    ("shard.version += 1", "pass"),
    ("        if head.clock > shard.clock:\n            shard.clock = head.clock\n", ""),
    ("shard.clock if op.clock == NO_CLOCK else op.clock", "max(op.clock, 0)"),
    ("shard.lead.note(head.clock, head.trainer)", "shard.lead.note(head.clock, 0)"),
    ("if shard.lead is not None and op.rule == OP_PUSH:", "if shard.lead is not None:"),
    ("op.lag = shard.lead.lag(head.clock)", "pass"),
    ("    if op.lag:\n", "    if False:\n"),
    ("not shard.row_start.is_zero", "False"),
    ("part[n].start, part[n].b - part[n].a)", "part[n].start, 0)"),
    ("add_keys(part[n].number, part[n].keys, ", "add_keys(part[n].number, NULL, "),
    ("counters.add(head.count, ", "counters.add(1, "),
    ("self.requests += 1  #", "pass  #"),
    ("(<dps_header *> out).body = nbytes", "pass"),
]
WRONG_VALUES = [
    ("if missing and not table.row_start.has_zeros:", "if False:"),
    ("piece.start + self._row", "piece.start"),
    ("piece.keys = piece.keys + self._row", "pass"),
    ("made, self.left = made + self.left, 0", "self.left = 0"),
    ("piece.start += piece.b", "pass"),
    ("piece.keys = piece.keys + piece.b", "pass"),
]


WRONG_CUTS = [  # text of dps/engine/core/shards/cuts.pyx, the wrong text
    ("if apart and cut.given < cut.stop:", "if False:"),
    ("cut.copies = dps_save(", "to.used = dps_save("),
    ("cut.existing = shard.rows.shape[0] if shard.index is None else shard.index.end", "pass"),
    ("CHANGED * inside | LATER * apart", "CHANGED"),
    ("if shard.changed is not None:", "if False:"),
    ("if origin:", "if False:"),
    ("shard.lead.lag(clock) != cut.lead.lag(clock)", "False"),
    ("cut.lead.note(clock, origin)", "pass"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [WRONG_CUTS[0], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in WRONG_CUTS[1:])]
)
def test_a_step_that_saves_wrong_rows_for_a_cut_is_caught(monkeypatch, old: str, new: str) -> None:
    *_, service = variants(["cuts", "apply", "service"], "cuts.pyx", old, new)
    monkeypatch.setattr(requests, "Service", service.Service)
    with pytest.raises((AssertionError, ValueError)):
        collections.deque(map(play, range(200)), maxlen=0)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), WRONG_BACKUPS)
def test_a_broken_backup_is_caught(monkeypatch, old: str, new: str) -> None:
    put_variant(monkeypatch, ("service", "request"), old, new)
    with pytest.raises(AssertionError):
        collections.deque(map(follow, range(200)), maxlen=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [*WRONG[:2], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in WRONG[2:])]
)
def test_a_broken_variant_is_caught(monkeypatch, old: str, new: str) -> None:
    put_variant(monkeypatch, ("service", "request", "apply"), old, new)
    with pytest.raises((AssertionError, MemoryError, ValueError, OverflowError, MovedError)):  # of a server that failed
        collections.deque(map(play, range(800)), maxlen=0)


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), WRONG_VALUES)
def test_wrong_values_are_caught(monkeypatch, old: str, new: str) -> None:
    _, service = variants(["gathering", "service"], "gathering.pyx", old, new)
    monkeypatch.setattr(requests, "Service", service.Service)
    with pytest.raises(AssertionError):
        collections.deque(map(play, range(200)), maxlen=0)
