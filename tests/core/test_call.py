"""A call without sockets: its requests say what the grouping says, and answers may arrive in any pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.client.origin import Origin
from dps.core.call import Call, Terms
from dps.core.form import Form
from dps.core.meter import CallMeter
from dps.core.part import Part, parts_of
from dps.state.partition import coalesce, group, sum_repeats
from dps.wire import frames
from dps.wire.frames import decode_header, padded

FLOAT32 = np.dtype("float32").num
DIM = 3


def terms_of(*, pushes: bool, answered: bool = True, merges: bool = False, shards: int = 4) -> Terms:
    form = Form(7, FLOAT32, DIM, 0, shards, shards.bit_length() - 1, False, [(0, 1), (1, shards)])
    return Terms(form, 5, 1 << 20, frames.PUSH if pushes else frames.PULL, 0, pushes, answered, merges)


def prepared(keys: np.ndarray, rows: np.ndarray | None = None, **options: bool) -> Call:
    call = Call.of(terms_of(pushes=rows is not None, **options), Origin(2, 1, 9, 3, 8), keys, rows, None)
    assert call is not None
    return call


keys_of = st.lists(st.integers(-50, 50), min_size=1, max_size=60).map(lambda keys: np.array(keys, np.int64))


def frame_of(part: Part, number: int) -> bytes:
    """The whole request of a part."""
    part.begin(number)
    frame = b""
    while pieces := part.pieces():
        frame += b"".join(pieces)
    assert len(frame) == part.sent
    return frame


@given(keys=keys_of, merges=st.booleans(), own=st.booleans())
def test_requests_say_what_the_grouping_says(keys: np.ndarray, merges: bool, own: bool) -> None:
    rows = np.random.default_rng(0).normal(size=(len(keys), DIM)).astype("float32")
    call = prepared(keys, rows, merges=merges)
    grouping = group(keys.copy(), 0, 4)
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


@settings(max_examples=50)
@given(keys=keys_of, merges=st.booleans(), data=st.data())
def test_answers_may_arrive_in_any_pieces(keys: np.ndarray, merges: bool, data: st.DataObject) -> None:
    table = np.random.default_rng(1).normal(size=(101, DIM)).astype("float32")
    call = prepared(keys, np.zeros((len(keys), DIM), "float32"), merges=merges)
    grouping = group(keys, 0, 4)
    merged = coalesce(grouping) if merges else None
    sent = (grouping if merged is None else merged[0]).keys
    starts = (grouping if merged is None else merged[0]).starts
    for n, part in enumerate(parts_of(call)):
        part.begin(n + 1)
        first, end = part.shards
        rows = table[sent[starts[first] : starts[end]] + 50].tobytes()
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
    answer = call.finish()
    np.testing.assert_array_equal(answer, table[keys + 50])


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
