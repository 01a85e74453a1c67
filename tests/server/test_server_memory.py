"""The budget of a server: it is kept, what need not be refused is carried out, and what is refused changes nothing."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_server import LoneServer
from noticing import assert_noticed

import dps
from dps.engine.server import memory
from dps.engine.server.forgetting import Forgetting
from dps.engine.server.memory import Need, ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.state import memory as rules
from dps.engine.state.life import life_of
from dps.engine.state.memory import bytes_of_memory, first_bytes, growth, held_bytes, missing
from dps.engine.state.ops import ADD, NO_CLOCK, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.resharding import Renumbered
from dps.engine.state.shard import KeyedShard, make_shard
from dps.engine.state.transfer import digest
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_error, decode_header, encode_header, padded
from dps.errors import InputError, LimitError

ROWS = TableSpec("rows", dim=3, optimizer=dps.Adagrad(0.1), shards=2, id=1)
LRU = TableSpec("lru", dtype="int64", shards=1, life=life_of(None, "300 kB", "lru"), id=2)
SUMS = TableSpec("sums", aggregate="sum", shards=1, id=3)
SPECS = [ROWS, LRU]
COPIED = TableSpec("copied", dtype="int64", shards=2, copies=2, id=4)
COPIED_LRU = TableSpec("copied lru", dtype="int64", shards=1, copies=2, life=life_of(None, "300 kB", "lru"), id=5)
ROOM = 120_000  # bytes beside those of empty tables


def push(spec: TableSpec, keys: np.ndarray, **fields: int) -> bytes:
    parts = group(keys, spec.shard_map)
    columns = 0 if fields.get("flags") == frames.RULE_DELETE else spec.dim
    values = np.ones((len(keys), columns), spec.dtype)
    body = np.diff(parts.starts).astype(np.int64).tobytes() + parts.keys.tobytes()
    body += values.tobytes().ljust(padded(values.nbytes), b"\0")
    header = Header(frames.PUSH, table=spec.id, shards=spec.shards, count=len(keys), parties=1, **fields)
    return encode_header(header._replace(body=len(body))) + body


def bounded(specs: list[TableSpec], plain: bool, room: int = ROOM) -> LoneServer:
    least = sum(held_bytes(make_shard(spec, n)) for spec in specs for n in range(spec.shards))
    return LoneServer(specs, plain, memory=least + room)


def error_of(answer: bytes) -> Exception | None:
    if not answer:  # the acknowledgement waits for a copy
        return None
    header = decode_header(answer, 0, 1 << 30)
    return decode_error(answer[HEADER_SIZE : HEADER_SIZE + header.body]) if header.kind == frames.ERROR else None


def contents(server: LoneServer) -> list[str]:
    return [digest(r.shard) for table in server.role.tables.values() for _, r in sorted(table.replicas.items())]


def shards_of(server: LoneServer, spec: TableSpec) -> list[KeyedShard]:
    return [replica.shard for _, replica in sorted(server.role.tables[spec.id].replicas.items())]


def test_rows_that_two_shards_have_count_once() -> None:
    """A shard that gets another number, because another one of its table was divided, is there twice for a moment."""
    server, keys = bounded([SUMS, ROWS], plain=True), np.arange(500)
    server.take(push(ROWS, keys))
    before = server.role.memory.measure()
    made = dataclasses.replace(ROWS, id=9)
    shards = [Renumbered(shard, made).finish() for shard in shards_of(server, ROWS)]
    server.role.take_table(made, [Replica(made, n, shard) for each in shards for n, shard in each.items()])
    assert server.role.memory.measure() == before > 500 * 8
    server.role.drop(ROWS.id)
    assert server.role.memory.measure() == before


def check(seed: int, plain: bool) -> None:
    """Random pushes to two tables, of which one lets its coldest rows go, until the server has been full for long."""
    rng, server = np.random.default_rng(seed), bounded(SPECS, plain)
    limit, there = server.role.memory.limit, {spec.id: set() for spec in SPECS}
    refused = accepted_when_full = 0
    for turn in range(100):
        spec = SPECS[int(rng.random() < 0.4)]
        known = np.array(sorted(there[spec.id]), np.int64)
        old = rng.choice(known, min(len(known), int(rng.integers(300))), replace=False) if len(known) else known
        new = rng.integers(1 << 40, 1 << 60, int(rng.choice([0, 1, 5, 40, 300])))
        keys = np.unique(np.concatenate([old, new]))
        before, used = contents(server), server.role.memory.measure()
        error = error_of(server.take(push(spec, keys)))
        measured = server.role.memory.measure()
        assert measured <= limit, f"turn {turn}: {measured} bytes, and {limit} may be taken"
        if error is not None:
            refused += 1
            assert isinstance(error, LimitError), error
            assert "server 0: its tables take" in str(error)
            assert f"table '{spec.name}'" in str(error)
            assert contents(server) == before, "a refused push has changed something"
            assert len(new), "a push that creates no row was refused"
            indexes = sum(shard.index.nbytes for shard in shards_of(server, spec))
            row_bytes = (spec.dim + spec.slots) * spec.itemsize
            most = len(new) * (row_bytes + 2 + 36) + 2 * (1 << 14) + 1.5 * indexes
            assert used + most > limit, f"{len(new)} new rows were refused, and {limit - used} bytes are left"
        else:
            accepted_when_full += used > 0.85 * limit
        found = [shard.keys() for shard in shards_of(server, spec)]
        there[spec.id] = set(np.concatenate(found).tolist())
        if error is None:
            assert set(keys.tolist()) <= there[spec.id]
    assert refused
    assert accepted_when_full


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_budget_is_kept_and_nothing_is_refused_without_need(seed: int, plain: bool) -> None:
    check(seed, plain)


def check_eviction() -> None:
    """A table that evicts goes on on a full server, with as many rows as it had."""
    server = bounded(SPECS, plain=True)
    server.take(push(LRU, np.arange(2000)))
    number = 0
    while error_of(server.take(push(ROWS, np.arange(number, number + 50)))) is None:
        number += 50
    (shard,) = shards_of(server, LRU)
    full = len(shard)
    for first in range(10_000, 14_000, 100):
        assert error_of(server.take(push(LRU, np.arange(first, first + 100)))) is None
        assert server.role.memory.measure() <= server.role.memory.limit
    assert 0.9 * full <= len(shard) <= len(shard.rows)
    assert shard.evicted > 3000
    many = error_of(server.take(push(LRU, np.arange(20_000, 25_000))))
    assert "5000 new rows of table 'lru'" in str(many), "more new rows than others may go for"


def check_sums(room: int = ROOM) -> None:
    """The rows that an open clock will have count when they are pushed, so that its end keeps within the budget."""
    server = bounded([SUMS], plain=True, room=room)
    keys = 0
    while error_of(server.take(push(SUMS, np.arange(keys, keys + 200), clock=1))) is None:
        keys += 200
        assert keys < 20_000
    assert keys > 1000
    (shard,) = shards_of(server, SUMS)
    sums = shard.sums.nbytes  # which are there until all rows are
    assert error_of(server.take(push(SUMS, np.arange(keys), clock=1))) is None, "all of these have sums"
    server.take(push(SUMS, np.arange(5), clock=2))  # ends the clock
    assert len(shard) == keys
    assert shard.rows.nbytes + shard.index.nbytes + sums <= server.role.memory.limit
    assert error_of(server.take(push(SUMS, np.arange(100), clock=2))) is None, "these have rows"


def check_repeat() -> None:
    """A push that was carried out, and comes again when its rows have gone and the server is full, is no error."""
    server = bounded(SPECS, plain=True)
    first = push(ROWS, np.arange(10), trainer=1, attempt=1, number=1, clock=0)
    server.take(first)
    server.take(push(ROWS, np.arange(10), flags=frames.RULE_DELETE))
    number = 100
    while error_of(server.take(push(ROWS, np.arange(number, number + 20)))) is None:
        number += 20
    assert error_of(server.take(first)) is None
    assert not any(shard.is_there(np.arange(10)).any() for shard in shards_of(server, ROWS))


def check_copies() -> None:
    """Another server has used up its budget: no row is made of which it has a copy, unless others go."""
    server = bounded([ROWS, COPIED, COPIED_LRU], plain=True, room=1_000_000)
    for spec in (ROWS, COPIED, COPIED_LRU):
        assert error_of(server.take(push(spec, np.arange(1000)))) is None
    server.role.memory.learn_full([1])
    assert error_of(server.take(push(ROWS, np.arange(1000, 1010)))) is None, "of this table it has no copy"
    assert error_of(server.take(push(COPIED, np.arange(1000)))) is None, "this makes no row"
    refused = error_of(server.take(push(COPIED, np.arange(1000, 1002))))
    assert isinstance(refused, LimitError)
    assert "server 1 has a copy of shard" in str(refused)
    assert error_of(server.take(push(COPIED_LRU, np.arange(1000, 1100)))) is None
    assert len(shards_of(server, COPIED_LRU)[0]) == 1000, "as many rows go as come"
    server.role.memory.learn_full([0, 2])
    assert error_of(server.take(push(COPIED, np.arange(1000, 1002)))) is None


CHECKS = [functools.partial(check, 0, True), functools.partial(check, 1, False), check_eviction, check_sums]
CHECKS += [
    check_repeat,
    check_copies,
    *(functools.partial(check_sums, room) for room in range(150_000, 400_000, 50_000)),
]


def test_a_table_that_evicts_goes_on() -> None:
    check_eviction()


@pytest.mark.parametrize("room", range(100_000, 400_000, 50_000))
def test_rows_of_an_open_clock_count_when_they_are_pushed(room: int) -> None:
    check_sums(room)


def test_no_rows_are_made_of_which_a_full_server_has_a_copy() -> None:
    check_copies()


def test_a_push_that_comes_twice_is_no_error_on_a_full_server() -> None:
    check_repeat()


WRONG = {
    "a repeat is refused": (rules, "creates_rows", "return not (op.origin and", "return not (0 and"),
    "a push to rows that there are is refused": (
        ServerMemory, "admit", "need._replace(new=missing(need.shard, need.op))", "need",
    ),
    "an index that grows is not counted": (rules, "growth", "+ shard.index.growth(count if new else 0)", ""),
    "rows that grow are not counted": (rules, "growth", "rows * (", "0 * ("),
    "what was let through is forgotten until the next heartbeat": (ServerMemory, "measure", "self.used = sum", "sum"),
    "a thrifty shard grows as any other": (ServerMemory, "admit", "need.shard.thrifty = True", "pass"),
    "a table that evicts is refused": (ServerMemory, "_lacking", "if evicts and", "if False and"),
    "rows go that are not enough": (ServerMemory, "_lacking", "return lacking", "return lacking // 2"),
    "rows of the push itself may go": (ServerMemory, "_lacking", "lacking <= others", "True"),
    "an open clock's rows are not counted": (Need, "growth", "self.new + promised, self.new + promised", "0, 0"),
    "each push of a clock counts by itself": (ServerMemory, "_promise", "return rows if", "return 0 if"),
    "the room of copies is not looked at": (ServerMemory, "admit", "any(full.values()) or", ""),
    "the compiled step makes rows of which a full server has a copy": (
        ServerMemory, "learn_full", "len(servers) > 0", "False",
    ),
    "rows of a full copy come in free places": (ServerMemory, "_lacking", "(0 if full else", "(0 if not full else"),
    "room is made for nothing": (Forgetting, "make_room", "rows > 0", "False"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_noticed(wrong: str) -> None:
    assert_noticed(*WRONG[wrong], *CHECKS)


def test_a_compiled_step_that_does_not_ask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = memory.ServerMemory.__init__

    def wrong(self: ServerMemory, *args: object) -> None:
        right(self, *args)

    monkeypatch.setattr(memory.ServerMemory, "__init__", wrong)
    server = bounded(SPECS, plain=True)
    server.role.service.bounded = False
    for first in range(0, 20_000, 500):
        server.take(push(ROWS, np.arange(first, first + 500)))
    assert server.role.memory.measure() > server.role.memory.limit


PUSHES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 500), st.booleans(), st.booleans()), max_size=12)


@settings(deadline=None)
@given(PUSHES)
def test_a_shard_grows_by_what_was_said(pushes) -> None:
    shard = KeyedShard(TableSpec("w", dim=3, shards=1), 0)
    for first, count, thrifty, forget in pushes:
        op = Op(ADD, np.arange(first, first + count), 0, np.ones((count, 3), np.float32), NO_CLOCK, 1)
        shard.thrifty = thrifty
        new = missing(shard, op) if thrifty else count
        before, said = shard.nbytes, growth(shard, new, count)
        if thrifty:
            shard.reserve_exactly(new, count)
        else:
            shard.reserve(count)
        shard.apply(op)
        assert shard.nbytes <= before + said
        if thrifty and not new:
            assert said == 0
        if forget:
            shard.apply(Op(4, op.keys, 0, np.empty((count, 0)), NO_CLOCK, 1))


def test_shards_take_at_first_what_was_said() -> None:
    for spec in (TableSpec("d", rows=1001, dim=7, shards=3, optimizer=dps.Adam(0.1)), LRU):
        for number in range(spec.shards):
            said, taken = first_bytes(spec, number), make_shard(spec, number).nbytes
            assert 0.99 * taken - 1000 <= said <= 1.01 * taken


def test_a_table_that_does_not_fit_is_refused() -> None:
    server = bounded(SPECS, plain=True)
    with pytest.raises(LimitError, match=r"server 0: 1 shards of table 'large' take 400,000 bytes, and its other"):
        server.role.memory.check_table(TableSpec("large", rows=100_000, shards=1, id=9), [0])
    server.role.memory.check_table(TableSpec("small", rows=10_000, shards=1, id=9), [0])
    LoneServer(SPECS, plain=True).role.memory.check_table(TableSpec("large", rows=1 << 30, shards=1, id=9), [0])


@pytest.mark.parametrize("setting", ["none", 0, -1, True, "-2 GiB", 0.0])
def test_a_budget_that_is_none_is_refused(setting: object) -> None:
    with pytest.raises(InputError, match=r"dps\.memory is .* but must be null, bytes such as '4 GiB', or a share"):
        bytes_of_memory(setting, 1000, lambda text: int(text.replace(" GiB", "")))
