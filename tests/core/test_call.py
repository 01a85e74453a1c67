"""A call without sockets: its requests say what the grouping says, and answers may arrive in any pieces."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import coalesce

from dps.engine.client.origin import Origin
from dps.engine.core.codec import bytes_of_row, decode, encode
from dps.engine.core.grouping import mix, sum_repeats
from dps.engine.core.requests.call import Call
from dps.engine.core.requests.form import Form
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.meter import CallMeter
from dps.engine.core.requests.part import Part, parts_of
from dps.engine.core.requests.terms import Terms
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.partition import group
from dps.engine.wire import frames
from dps.engine.wire.frames import decode_header, padded

FLOAT32 = np.dtype("float32").num
DIM = 3


def terms_of(*, pushes: bool, answered: bool = True, merges: bool = False, shards: int = 4) -> Terms:
    form = Form(7, FLOAT32, DIM, ShardMap(0, shards), False, [(0, 1), (1, shards)])
    return Terms(form, 5, 1 << 20, frames.PUSH if pushes else frames.PULL, 0, pushes, answered, merges)


def prepared(keys: np.ndarray, rows: np.ndarray | None = None, **options: bool) -> Call:
    call = Call.of(terms_of(pushes=rows is not None, **options), Origin(2, 1, 9, 3, 8), keys, rows, None)
    assert call is not None
    return call


keys_of = st.lists(st.integers(-50, 50), min_size=1, max_size=60).map(lambda keys: np.array(keys, np.int64))


def frame_of(part: Part, number: int, lists: KeyLists | None = None) -> bytes:
    """The whole request of a part."""
    part.begin(number, lists)
    frame = b""
    while pieces := part.pieces():
        frame += b"".join(pieces)
    assert len(frame) == part.sent
    return frame


@given(keys=keys_of, merges=st.booleans(), own=st.booleans())
def test_requests_say_what_the_grouping_says(keys: np.ndarray, merges: bool, own: bool) -> None:
    rows = np.random.default_rng(0).normal(size=(len(keys), DIM)).astype("float32")
    call = prepared(keys, rows, merges=merges)
    grouping = group(keys.copy(), ShardMap(0, 4))
    sums = rows.copy() if grouping.order is None else rows[grouping.order]
    merged = coalesce(grouping) if merges else None
    if merged is not None:
        sums = np.empty((len(merged[0].keys), DIM), "float32")
        sum_repeats(rows, grouping.order, merged[1], sums)
        grouping = merged[0]
    if own:  # the caller may change its arrays
        call.own()
        keys[:], rows[:] = 0, 0
    for n, part in enumerate(parts_of(call)):
        frame, (first, end) = frame_of(part, n + 1), part.shards
        a, b = grouping.starts[first], grouping.starts[end]
        header = decode_header(frame, 0, 1 << 20)
        said = header.request, header.shard, header.shards, header.count, header.number, header.parties
        assert said == (n + 1, first, end - first, b - a, 0, 8)
        counts, body = np.diff(grouping.starts[first : end + 1]).tobytes(), frame[frames.HEADER_SIZE :]
        pushed = sums[a:b].tobytes()
        assert body == counts + grouping.keys[a:b].tobytes() + pushed.ljust(padded(len(pushed)), b"\0")


@settings(max_examples=100)
@given(keys=keys_of, merges=st.booleans(), codec=st.integers(0, 3), ordered=st.booleans(), data=st.data())
def test_answers_may_arrive_in_any_pieces(
    keys: np.ndarray, merges: bool, codec: int, ordered: bool, data: st.DataObject
) -> None:
    table = np.random.default_rng(1).normal(size=(101, DIM)).astype("float32")
    if ordered:
        keys = group(keys, ShardMap(0, 4)).keys
    form = Form(7, FLOAT32, DIM, ShardMap(0, 4), False, [(0, 1), (1, 4)], [(codec, 0, False), (0, 0, False)])
    if codec:  # then the rows are pulled
        merges = False
        terms = Terms(form, 5, 1 << 20, frames.PULL, 0, False, True, False, narrow=True)
        call = Call.of(terms, Origin(2), keys, None, None)
        assert call is not None
    else:
        call = prepared(keys, np.zeros((len(keys), DIM), "float32"), merges=merges)
    grouping = group(keys, ShardMap(0, 4))
    merged = coalesce(grouping) if merges else None
    sent = (grouping if merged is None else merged[0]).keys
    starts = (grouping if merged is None else merged[0]).starts
    for n, part in enumerate(parts_of(call)):
        part.begin(n + 1)
        first, end = part.shards
        rows = travelled(table[sent[starts[first] : starts[end]] + 50], codec if part.run == 0 else 0)
        assert part.size == len(rows)
        if data.draw(st.booleans()):
            body = memoryview(rows.ljust(padded(len(rows)), b"\0"))
            assert not part.accept(frames.ERROR, n + 1, len(body), body)
            assert not part.accept(frames.OK, n + 2, len(body), body)
            assert not part.accept(frames.OK, n + 1, len(body), body[8:])
            assert not part.accept(frames.OK, n + 1, len(body) + 8, body)
            assert part.accept(frames.OK, n + 1, len(body), body)
            assert not part.accept(frames.OK, n + 1, len(body), body)
            continue
        while rows:
            view = part.buffer()
            size = data.draw(st.integers(1, min(len(view), len(rows))))
            view[:size] = rows[:size]
            part.advance(size)
            rows = rows[size:]
    answer, expected = call.finish(), table[keys + 50]
    if codec:
        here = np.array([group(keys[n : n + 1], ShardMap(0, 4)).starts[1] == 1 for n in range(len(keys))])
        expected[here] = rounded(expected[here], codec)
    np.testing.assert_array_equal(answer, expected)


def travelled(rows: np.ndarray, codec: int) -> bytes:
    if not codec:
        return rows.tobytes()
    out = np.empty(len(rows) * bytes_of_row(codec, DIM, 0), np.uint8)
    encode(codec, rows, out)
    return out.tobytes()


def rounded(rows: np.ndarray, codec: int) -> np.ndarray:
    out = np.empty_like(rows)
    decode(codec, np.frombuffer(travelled(rows, codec), np.uint8), out)
    return out


class Carried(NamedTuple):
    """What requests carry, taken apart: of each op and shard its keys (first row, of a range) and rows."""

    content: dict[tuple[int, int], tuple[list[int], bytes]]
    weights: dict[tuple[int, int], int]  # rows of data


def as_sent(rows: bytes, codec: int) -> bytes:
    """Rows that have travelled, as they were: whole numbers that all codecs but int8 keep."""
    if not codec:
        return rows
    count = len(rows) // (2 * DIM)
    wide = np.empty((count, DIM), np.float32)
    decode(codec, np.frombuffer(rows[: count * 2 * DIM], np.uint8), wide)
    return wide.tobytes()


def carried(parts: list[Part], table: int, shard_map: ShardMap, codecs: list[tuple[int, int, bool]]) -> Carried:
    """Read the requests of some parts, to a table with these shards, by a route with these codecs."""
    dense = shard_map.rows > 0
    content: dict[tuple[int, int], tuple[list[int], bytes]] = {}
    weights: dict[tuple[int, int], int] = {}
    ours, theirs = KeyLists(), KeyLists()  # of one connection, over which all parts go
    for n, part in enumerate(parts):
        frame = frame_of(part, n + 1, ours)
        header = decode_header(frame, 0, 1 << 20)
        assert header.body == len(frame) - 64
        if header.flags & frames.LIST:
            assert codecs[part.run][2], "the route wants no lists"
            stated = header.start, header.table, header.shard, header.shards, header.count
            listed, used = theirs.take(*stated, frame[64:])
            frame = frame[:64] + listed + frame[64 + used :]
        assert (header.table, header.request, part.table) == (table, n + 1, table)
        assert part.op == (2, 9, header.number)
        assert part.shards == (header.shard, header.shard + header.shards)
        words, begin, row = np.frombuffer(frame[64:], np.int64), header.start, 0
        at = 0 if dense else header.shards + header.count
        codec = codecs[part.run][1]
        assert header.flags & frames.NARROW == frames.NARROW * bool(codec)
        body = 8 * at + padded(header.count * DIM * (2 if codec else 4))
        assert len(frame) - 64 == body
        rows = as_sent(frame[64 + 8 * at :], codec)
        for shard in range(header.shard, header.shard + header.shards):
            if dense:
                first, end = shard_map.edges[shard : shard + 2]
                count = max(0, min(end, header.start + header.count) - max(first, begin))
                keys = list(range(begin, begin + count))
                begin += count
            else:
                count = int(words[shard - header.shard])
                keys = words[header.shards :][row : row + count].tolist()
            assert (header.number, shard) not in content
            content[header.number, shard] = keys, rows[row * 4 * DIM : (row + count) * 4 * DIM]
            weights[header.number, shard] = header.rows
            row += count
        assert row == header.count
    assert all((part.keys is None) == dense for part in parts)
    return Carried({place: what for place, what in content.items() if what[0]}, weights)


SHARDS, ROWS = 4, 41
runs_of = st.sets(st.integers(1, SHARDS - 1)).map(lambda cuts: list(itertools.pairwise([0, *sorted(cuts), SHARDS])))


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    first=runs_of,
    then=st.lists(st.tuples(runs_of, st.sampled_from(["same", "same", "halved", "quartered", "cut"])), max_size=3),
    own=st.booleans(),
)
def test_what_is_sent_again_is_what_was_sent(data: st.DataObject, first: list, then: list, own: bool) -> None:
    """By any routes, after each other, also where the table, or one shard, is split in between: the same keys and rows
    of each op, in the shards that there are then, and the same rows of data. An op has the next keys of the caller,
    whatever the shards are, and repeated keys are merged before, by their first places."""
    dense, weight = data.draw(st.booleans()), data.draw(st.sampled_from([-1, 0, 5]))
    merges = not dense and data.draw(st.booleans())
    most = data.draw(st.one_of(st.just(1), st.integers(1, 400)))  # 1: each chunk has one key
    forms, maps, codecs = [], [], []
    start = edges = ShardMap(ROWS if dense else 0, SHARDS).edges
    for n, (runs, change) in enumerate([(first, "same"), *then]):
        for _ in range(("same", "halved", "quartered").index(change) if change != "cut" else 0):
            edges = tuple(sorted({*edges, *((a + b) // 2 for a, b in itertools.pairwise(edges))}))
        if change == "cut":
            edges = tuple(sorted({*edges, data.draw(st.integers(1, edges[-1] - 1))}))
        maps.append(ShardMap(ROWS if dense else 0, len(edges) - 1, None, edges))
        numbers = [edges.index(edge) for edge in start]
        here = [(numbers[a], numbers[b]) for a, b in runs]
        codecs.append([(0, data.draw(st.integers(0, 2)), data.draw(st.booleans())) for _ in runs])
        forms.append(Form(7 + n, FLOAT32, DIM, maps[n], False, here, codecs[n]))
    if dense:
        begin, end = sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
        keys: object = slice(begin, end)
        count = end - begin
    else:
        keys = np.array(data.draw(st.lists(st.integers(-50, 50), max_size=40)), np.int64)
        keys = keys[np.argsort(shards_of(keys, 1 << 20))] if data.draw(st.booleans()) else keys
        count = len(keys)
    rows = np.arange(count * DIM, dtype="float32").reshape(count, DIM)
    origin = Origin(2, 1, 9, 3, 8)
    terms = Terms(forms[0], 5, most, frames.PUSH, 0, True, False, merges, narrow=True)
    call = Call.of(terms, origin, keys, rows, None, weight)
    assert call is not None
    call.take_number(origin)
    a_chunk = max(1, most // (4 * DIM + (0 if dense else 8)))
    if merges:
        _, first_places, which = np.unique(keys, return_index=True, return_inverse=True)
        sums = np.zeros((len(first_places), DIM), "float32")
        np.add.at(sums, which, rows)
        keys, rows = keys[np.sort(first_places)], sums[np.argsort(first_places)]
        count = len(keys)
    assert call.numbers == origin.number - 3 == max(-(-count // a_chunk), int(weight > 0))
    parts = parts_of(call)
    for n, form in enumerate(forms):
        if n:
            parts = [fresh for part in parts for fresh in part.again(form, [])]
        if own and n == 1:
            call.own()
        seen = carried(parts, 7 + n, maps[n], codecs[n])
        named = np.arange(begin, begin + count) if dense else keys
        shards = np.searchsorted(maps[n].edges, named if dense else shards_of(keys, 4096), "right") - 1
        for number in range(call.numbers):
            chunk = np.arange(count)[number * a_chunk : (number + 1) * a_chunk]
            for shard in range(maps[n].shards):
                mine = chunk[shards[chunk] == shard]
                expected = (named[mine].tolist(), rows[mine].tobytes()) if len(mine) else None
                assert seen.content.get((3 + number, shard)) == expected
        if weight > 0:  # all shards divide by the same number, which counts once
            assert {place for place, said in seen.weights.items() if said > 0} == {
                (3, s) for s in range(maps[n].shards)
            }
        assert all(said == (weight if number == 3 else min(weight, 0)) for (number, _), said in seen.weights.items())


def shards_of(keys: np.ndarray, shards: int) -> np.ndarray:
    return np.array([mix(int(key)) * shards >> 64 for key in keys], np.int64)


def test_a_certified_answer_is_put_in_place_behind_its_arrival() -> None:
    form = Form(7, FLOAT32, DIM, ShardMap(0, 1), False, [(0, 1)])
    keys = np.array([3, 1, 2])
    call = Call.of(
        Terms(form, 5, 1 << 20, frames.PULL, frames.CERTIFICATE, False, True, False), Origin(2), keys, None, None
    )
    assert call is not None
    (part,) = parts_of(call)
    part.begin(1)
    assert part.size == 0
    rows = np.arange(3 * DIM, dtype="float32").reshape(3, DIM)
    body = rows.tobytes().ljust(padded(rows.nbytes), b"\0") + b"{}"
    with pytest.raises(ValueError, match="where rows of 40 were to come"):
        part.fill(body[:39])
    assert not part.accept(frames.OK, 1, len(body), memoryview(body))
    assert body[part.fill(body) :] == b"{}"
    np.testing.assert_array_equal(call.finish(), rows)


def test_arguments_that_do_not_fit_are_refused() -> None:
    call = prepared(np.arange(6))
    for n in (-1, call.legs):
        with pytest.raises(ValueError, match=f"leg {n}"):
            Part(call, n)
    part = Part(call, 0)
    for nbytes in (-1, part.size + 1):
        with pytest.raises(ValueError, match="bytes arrived"):
            part.advance(nbytes)
    with pytest.raises(ValueError, match="no time is counted as 'rest'"):
        CallMeter(0.0).lap("rest", 1.0)


@pytest.mark.parametrize(
    ("keys", "rows", "out"),
    [
        ([1], None, None),
        (np.arange(3, dtype=np.int32), None, None),
        (np.arange(6)[::2], None, None),
        (np.zeros((1,) * 9, np.int64), None, None),
        (None, None, None),
        (slice(0, 1), None, None),
        (np.arange(3), np.zeros((3, DIM)), None),
        (np.arange(3), np.zeros((2, DIM), "float32"), None),
        (np.arange(3), [[0] * DIM] * 3, None),
        (np.arange(3), None, np.zeros((3, DIM))),
        (np.arange(3), None, np.zeros((3, DIM), "float32")[::-1]),
        (np.arange(3), None, [0]),
    ],
)
def test_what_is_not_plain_is_declined(keys: object, rows: object, out: object) -> None:
    assert Call.of(terms_of(pushes=rows is not None), Origin(2), keys, rows, out) is None


@pytest.mark.parametrize("origin", [Origin(parties=65_536), Origin(attempt=65_536)])
def test_a_stamp_that_does_not_fit_is_declined(origin: Origin) -> None:
    assert Call.of(terms_of(pushes=True), origin, np.arange(3), np.zeros((3, DIM), "float32"), None) is None


# ---- broken variants must not pass

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("call.pyx", "made.number += leg.chunk", "pass"),
    ("call.pyx", "made.rows = min(made.rows, 0)", "pass"),
    ("call.pyx", "min(form.edges[2 * run + 1], whole.end)", "form.edges[2 * run + 1]"),
    (
        "call.pyx",
        "made.request, made.table, made.count = leg.number, leg.table,",
        "made.request, made.count = leg.number,",
    ),
    ("call.pyx", "if a < b or everywhere:", "if a < b:"),
    ("call.pyx", "leg.chunk * (self.form.shards + 1) + shard", "shard"),
    ("call.pyx", "if survey_keys(self._cells + a - 1, 2", "if survey_keys(self._cells + a, 1"),
    ("call.pyx", "named[target[j]] = keys[j]", "named[j % distinct] = keys[j]"),
    (
        "call.pyx",
        "self.order[j] if whole.order == NULL or whole.taken else whole.order[self.order[j]]",
        "self.order[j]",
    ),
    ("call.pyx", "self.order == NULL or self.taken", "self.order == NULL"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    call, part = variants(["call", "part"], file, old, new)
    for name, module in {"Call": call, "parts_of": part}.items():
        monkeypatch.setitem(globals(), name, getattr(module, name))
    with pytest.raises((AssertionError, ValueError)):
        test_what_is_sent_again_is_what_was_sent()
