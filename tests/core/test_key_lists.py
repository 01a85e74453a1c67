"""Lists of keys at the two ends of a connection: both know the same ones, and a number stands for a whole list."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import size_of

from dps.engine.client.origin import Origin
from dps.engine.core.packed_keys import pack, packed_bytes
from dps.engine.core.requests import call as call_module
from dps.engine.core.requests import key_lists as lists_module
from dps.engine.core.requests import part as part_module
from dps.engine.core.requests.form import Form
from dps.engine.core.requests.key_lists import KEPT_BYTES
from dps.engine.core.requests.terms import Terms
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.partition import group
from dps.engine.wire import frames
from dps.engine.wire.frames import decode_header

FLOAT32 = np.dtype("float32").num


def packed(keys: np.ndarray) -> bytes:
    out = np.empty(packed_bytes(keys), np.uint8)
    pack(keys, out)
    return out.tobytes()


class Ends:
    """A client and a server with their lists, and a table for each of two maps of shards."""

    def __init__(self, core=lists_module, call=call_module, part=part_module):
        self.call, self.part = call, part
        self.ours, self.theirs = core.KeyLists(), core.KeyLists()
        self.maps = [ShardMap(0, 4), ShardMap(0, 2)]
        self.forms = [
            Form(7 + n, FLOAT32, 1, shards, False, [(0, 1), (1, shards.shards)], [(0, 0, True)] * 2)
            for n, shards in enumerate(self.maps)
        ]
        self.saved = 0  # bytes of keys that were not sent

    def send(self, table: int, keys: np.ndarray, pushes: bool, again: bool = False) -> None:
        """Send a call; the server finds the counts and keys that the grouping says."""
        kind = frames.PUSH if pushes else frames.PULL
        terms = Terms(self.forms[table], 1, 1 << 40, kind, 0, pushes, not pushes, False, narrow=True)
        call = self.call.Call.of(terms, Origin(2), keys, np.ones(len(keys), np.float32) if pushes else None, None)
        grouping = group(keys, self.maps[table])
        for part in self.part.parts_of(call):
            part.begin(1, self.ours)
            frame = b""
            while pieces := part.pieces():
                frame += b"".join(pieces)
            first, end = part.shards
            a, b = grouping.starts[first], grouping.starts[end]
            expected = np.diff(grouping.starts[first : end + 1]).tobytes() + grouping.keys[a:b].tobytes()
            for _ in range(1 + again):
                assert self.named(frame, pushes) == expected

    def named(self, frame: bytes, pushes: bool) -> bytes:
        header, body = decode_header(frame, 0, 1 << 40), frame[frames.HEADER_SIZE :]
        assert header.body == len(body)
        keys = body[: len(body) - frames.padded(4 * header.count)] if pushes else body
        if not header.flags & frames.LIST:
            return keys
        self.saved += 8 * header.count if not keys else 0
        stated = header.start, header.table, header.shard, header.shards, header.count
        found, nbytes = self.theirs.take(*stated, body)  # which has values behind them
        assert nbytes == len(keys)
        if keys:
            assert nbytes == 8 * header.shards + size_of(np.frombuffer(found, np.int64)[header.shards :])
        return found


def check_ends(data: st.DataObject, **modules: object) -> None:
    ends = Ends(**modules)
    pool = [np.random.default_rng(n).integers(0, 60, 1 + 5 * n) for n in range(8)]
    pool += [np.concatenate([pool[6][:-1], [61]]), np.concatenate([[62], pool[6][1:]])]  # which differ in one key
    for _ in range(data.draw(st.integers(1, 12))):
        keys = pool[data.draw(st.integers(0, len(pool) - 1))]
        ends.send(data.draw(st.integers(0, 1)), keys, data.draw(st.booleans()), data.draw(st.booleans()))
    assert (len(ends.ours), ends.ours.next, ends.ours.nbytes) == (
        len(ends.theirs),
        ends.theirs.next,
        ends.theirs.nbytes,
    )


@given(data=st.data())
def test_both_ends_know_the_same_lists(data: st.DataObject) -> None:
    check_ends(data)


def check_room(**modules: object) -> None:
    """Lists go at both ends alike, where there is no room; the ones named last stay."""
    ends, draw = Ends(**modules), np.random.default_rng(1)
    pool = [draw.integers(0, 1 << 60, count) for count in (100_000, 150_000, 200_000, 9, 250_000, 600_000)]
    for n in draw.integers(0, len(pool), 60):
        ends.send(0, pool[n], bool(n % 2))
        ends.send(0, pool[3], False)
        assert ends.ours.nbytes == ends.theirs.nbytes <= KEPT_BYTES
        assert len(ends.ours) == len(ends.theirs)
    assert ends.saved > 5_000_000
    before = ends.saved
    ends.send(0, pool[3], False)
    ends.send(0, pool[5], False)  # of which no part for a run of three shards fits
    assert ends.saved - before <= 8 * (9 + 200_000)


def test_lists_that_were_named_last_stay() -> None:
    check_room()


def test_lists_of_nothing_take_room() -> None:
    lists = lists_module.KeyLists()
    assert lists.take(~0, 7, 0, 0, 0, b"") == (b"", 0)
    for number in range(1, 20_000):
        lists.take(~number, 7, 0, 0, 0, b"")
    assert lists.nbytes <= KEPT_BYTES
    assert len(lists) < 20_000


def test_a_push_to_what_was_pulled_takes_no_keys() -> None:
    ends, keys = Ends(), np.random.default_rng(0).integers(0, 1 << 60, 1000)
    ends.send(0, keys, pushes=False)
    assert ends.saved == 0
    ends.send(0, keys, pushes=True)
    assert ends.saved == 8000
    ends.send(0, keys[:1].copy(), pushes=True)
    ends.send(0, keys[:1].copy(), pushes=True)
    assert ends.saved == 8000, "one is not worth it"
    ends.send(1, keys, pushes=True)
    assert ends.saved == 8000, "of another table"


TEN = np.int64(10).tobytes() + packed(np.arange(10))  # of one shard: a count, a form, a base and nine differences
LONGER = np.int64(11).tobytes() + packed(np.arange(11) ** 5)


@pytest.mark.parametrize(
    ("start", "table", "shard", "shards", "count", "body"),
    [
        (1, 7, 0, 1, 10, b""),
        (0, 8, 0, 1, 10, b""),
        (0, 7, 1, 1, 10, b""),
        (0, 7, 0, 2, 9, b""),
        (0, 7, 0, 1, 11, b""),
        (~2, 7, 0, 1, 10, TEN),
        (~1, 7, 0, 1, 10, TEN[:-8]),
        (~1, 7, 0, 1, 10, TEN[:8]),
        (~1, 7, 0, 1, 10, b""),
        (~1, 7, 0, 4, 10, TEN),
        (~1, 7, 0, 1, 1 << 31, TEN),
        (~1, 7, 0, 1, 10, TEN[:8] + b"\x09" + TEN[9:]),
        (~1, 7, 0, 1, 10, TEN[:8] + b"\x18" + TEN[9:]),
        (~1, 7, 0, 1, 10, TEN[:8] + b"\x21" + TEN[9:]),
        (~0, 7, 0, 1, 11, TEN),
        (~0, 7, 0, 1, 10, b""),
    ],
)
def test_a_list_that_is_not_known_is_refused(start, table, shard, shards, count, body) -> None:
    lists = lists_module.KeyLists()
    content = np.array([10, *range(10)]).tobytes()
    assert lists.take(~0, 7, 0, 1, 10, TEN) == (content, len(TEN))
    assert lists.take(0, 7, 0, 1, 10, b"") == (content, 0)
    with pytest.raises(ValueError, match=r"list \d of keys is not kept on this connection, which has had 1"):
        lists.take(start, table, shard, shards, count, body)
    assert lists.take(0, 7, 0, 1, 10, b"") == (content, 0)
    assert lists.take(~1, 7, 0, 1, 11, LONGER)[1] == len(LONGER), "which was kept all the same"


@pytest.mark.thorough
def test_lists_are_compared_whole() -> None:
    """A hash that is the same for all lists changes nothing but what is found."""
    changed = "key_lists.h", "return dps_mix(lanes[0] +", "return 0 * (lanes[0] +"
    core, call, part = variants(["key_lists", "call", "part"], *changed)

    @settings(max_examples=100, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_ends(data, core=core, call=call, part=part)

    check()


WRONG = [
    (
        "key_lists.pyx",
        "self._lists[number] = found\n",
        "self._lists = {number: found, **self._lists}\n",
    ),
    ("key_lists.pyx", "self.use(number)\n        return number", "return number"),
    ("key_lists.pyx", "~head.start == self.next", "head.start < 0"),
    (
        "key_lists.pyx",
        "while self.nbytes + nbytes + BESIDE > most_bytes:",
        "while self._numbers and self.nbytes + nbytes + BESIDE > most_bytes:",
    ),
    ("call.pyx", "made.body = 0 if leg.naming == AS_LIST else", "made.body ="),
    ("call.pyx", "leg.named = AS_KEPT_KEYS, number, ", "leg.named = AS_KEPT_KEYS, number, 8 + "),
    ("call.pyx", "if leg.naming == AS_KEPT_KEYS:", "if False:"),
    ("packed_keys.h", "return 8 + (count -", "return 8 + (count + 1 -"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "old", "new"), WRONG)
def test_a_wrong_variant_is_caught(file: str, old: str, new: str) -> None:
    core, call, part = variants(["key_lists", "call", "part"], file, old, new)

    @settings(max_examples=300, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_ends(data, core=core, call=call, part=part)

    def check_all() -> None:
        check()
        check_room(core=core, call=call, part=part)

    with pytest.raises((AssertionError, ValueError, MemoryError)):
        check_all()
