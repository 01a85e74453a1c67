"""The typed views of headers: each number stands at its place in the 64 bytes, and comes back from there."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.wire import frames, headers
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header, encode_header
from dps.engine.wire.headers import (
    NO_BOUND,
    AgeRows,
    Await,
    CloseSums,
    Collect,
    DumpPiece,
    Gone,
    GoneAnswer,
    PartitionRequest,
    PieceAnswer,
    RetireOrigins,
    RingPiece,
    RouteAnswer,
    RouteRequest,
    Scan,
    ScanAnswer,
    Tick,
    TickAnswer,
    Versions,
)
from dps.errors import LimitError

# Offsets of the header's numbers, written down once more; each is 4 bytes long but for those in `FORMATS`.
KIND, FLAGS, REQUEST, TABLE, EPOCH, ORIGIN, NUMBER, CLOCK = 2, 3, 4, 8, 12, 16, 20, 24
SHARD, SHARDS, WEIGHT, START, COUNT, PARTIES, ATTEMPT, BODY = 32, 34, 36, 40, 48, 52, 54, 56
FORMATS = {KIND: "B", FLAGS: "B", CLOCK: "q", SHARD: "H", SHARDS: "H", WEIGHT: "i", START: "q"}
FORMATS |= {PARTIES: "H", ATTEMPT: "H", BODY: "Q"}

MOST_BODY = 2**32  # bytes

REPLICATED = {KIND: frames.REPLICATE, FLAGS: frames.CONTROL}
RETIRED = {**REPLICATED, FLAGS: frames.CONTROL | frames.RULE_ADD, CLOCK: 0}
AGED = {KIND: frames.REPLICATE, FLAGS: frames.CONTROL | frames.RULE_ASSIGN}
SCANNED = {KIND: frames.SCAN, TABLE: 1, SHARDS: 1}
WIRE = [  # an example of each view, and the numbers in the bytes that are not those of an empty header
    (Await(5), {KIND: frames.AWAIT, CLOCK: 5}),
    (TickAnswer(3, 2.0, 9, True), {KIND: frames.OK, REQUEST: 77, PARTIES: 3, START: (9 << 32) + 3 - (1 << 63)}),
    (Tick(5, 9), {KIND: frames.TICK, CLOCK: 5, COUNT: 9}),
    (TickAnswer(3, 2.0), {KIND: frames.OK, REQUEST: 77, PARTIES: 3, START: 3}),
    (TickAnswer(3, math.inf), {KIND: frames.OK, REQUEST: 77, PARTIES: 3, START: 1 << 31}),
    (TickAnswer(3, None), {KIND: frames.OK, REQUEST: 77, PARTIES: 3}),
    (TickAnswer(3, math.inf, 9), {KIND: frames.OK, REQUEST: 77, PARTIES: 3, START: (9 << 32) + (1 << 31)}),
    (Collect(5, 2, 48), {KIND: frames.COLLECT, CLOCK: 5, NUMBER: 2, COUNT: 48}),
    (RingPiece(-7, 2, 96, 17), {KIND: frames.RING, CLOCK: -7, SHARD: 2, START: 96, COUNT: 17, BODY: 24}),
    (PartitionRequest(7, 3, 1 << 40), {KIND: frames.FETCH_PARTITION, CLOCK: 7, ORIGIN: 3, START: 1 << 40}),
    (PieceAnswer(1 << 40, 9), {KIND: frames.OK, REQUEST: 77, START: 1 << 40, COUNT: 9}),
    (RouteRequest(6), {KIND: frames.ROUTE, ORIGIN: 6}),
    (RouteAnswer(6), {KIND: frames.OK, REQUEST: 77, ORIGIN: 6}),
    (Scan(1, 4, 7, 5, 1 << 40, 900, False), {**SCANNED, EPOCH: 4, SHARD: 7, CLOCK: 5, START: 1 << 40, COUNT: 900}),
    (Scan(1, 0, 0, -1, -(1 << 63), 9, True), {**SCANNED, FLAGS: frames.ANSWER, START: -(1 << 63), COUNT: 9}),
    (Gone(1, 4, 7, 1 << 40, 9), {KIND: frames.GONE, TABLE: 1, EPOCH: 4, SHARD: 7, SHARDS: 1, START: 1 << 40, COUNT: 9}),
    (GoneAnswer(9, 1 << 40, 1 << 41), {KIND: frames.OK, REQUEST: 77, START: 1 << 40, CLOCK: 1 << 41, COUNT: 9}),
    (ScanAnswer(9, 1 << 40), {KIND: frames.OK, REQUEST: 77, START: 1 << 40, COUNT: 9}),
    (Versions(1, 4, 2, 3), {KIND: frames.VERSIONS, TABLE: 1, EPOCH: 4, NUMBER: 2, COUNT: 3}),
    (DumpPiece(1, 4, 7, 2, 48), {KIND: frames.DUMP, TABLE: 1, EPOCH: 4, SHARD: 7, NUMBER: 2, COUNT: 48}),
    (CloseSums(1, 4, 5, 2), {**REPLICATED, TABLE: 1, EPOCH: 4, CLOCK: 5, START: 2, PARTIES: 1}),
    (AgeRows(1, 4, 9, 5, 3), {**AGED, TABLE: 1, EPOCH: 4, START: 9, CLOCK: 5, PARTIES: 3}),
    (RetireOrigins(1, 4, 9, 3), {**RETIRED, TABLE: 1, EPOCH: 4, START: 9, PARTIES: 3}),
]


def header_of(view) -> Header:
    """The header of a view; an answer's has the number of its request."""
    answers = TickAnswer, RouteAnswer, ScanAnswer, GoneAnswer, PieceAnswer
    return view.header(77) if isinstance(view, answers) else view.header()


def check_bytes() -> None:
    for view, numbers in WIRE:
        expected = bytearray(encode_header(Header(0)))
        for offset, number in numbers.items():
            struct.pack_into(f"<{FORMATS.get(offset, 'I')}", expected, offset, number)
        assert encode_header(header_of(view)) == expected, view
        assert type(view).of(decode_header(expected, 0, MOST_BODY)) == view, view


def test_each_number_stands_at_its_place() -> None:
    check_bytes()
    assert len(encode_header(Header(0))) == HEADER_SIZE


short, word = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
long = st.integers(-(2**63), 2**63 - 1)
FIELDS = {
    Tick: (long, word),
    TickAnswer: (
        short,
        st.one_of(st.none(), st.just(math.inf), st.integers(0, NO_BOUND - 2).map(float)),
        st.integers(0, 2**31 - 1),
        st.booleans(),
    ),
    Await: (long,),
    Collect: (long, word, word),
    RingPiece: (long, short, long, word),
    PartitionRequest: (long, word, long),
    PieceAnswer: (long, word),
    RouteRequest: (word,),
    RouteAnswer: (word,),
    Scan: (word, word, short, long, long, word, st.booleans()),
    ScanAnswer: (word, long),
    Gone: (word, word, short, long, word),
    GoneAnswer: (word, long, long),
    Versions: (word, word, word, word),
    DumpPiece: (word, word, short, word, word),
    CloseSums: (word, word, long, st.integers(0, 2)),
    AgeRows: (word, word, long, long, short),
    RetireOrigins: (word, word, long, short),
}


@given(st.one_of(*(st.builds(view, *fields) for view, fields in FIELDS.items())))
def test_what_is_written_is_read(view) -> None:
    header = decode_header(encode_header(header_of(view)), 0, MOST_BODY)
    assert type(view).of(header) == view
    if header.kind == frames.REPLICATE:
        assert RetireOrigins.matches(header) == isinstance(view, RetireOrigins)
        assert AgeRows.matches(header) == isinstance(view, AgeRows)


def test_every_view_is_tried() -> None:
    views = {value for name in headers.__all__ if isinstance(value := getattr(headers, name), type)}
    assert views == set(FIELDS) == {type(view) for view, _ in WIRE}


@pytest.mark.parametrize("staleness", [2.0**31 - 1, 2.0**40, math.inf])
def test_a_staleness_that_does_not_fit_is_none(staleness: float) -> None:
    assert TickAnswer.of(TickAnswer(1, staleness).header(1)).staleness == math.inf


def test_a_clock_that_does_not_fit_is_told_as_a_lower_one() -> None:
    assert TickAnswer.of(TickAnswer(1, math.inf, 2**40).header(1)) == TickAnswer(1, math.inf, 2**31 - 1)


# ---- what must not pass ---------------------------------------------------------------------------------------------

MUTANTS = [
    (headers, "bound_of", "staleness + 1", "staleness"),
    (headers, "bound_of", "min(staleness + 1, NO_BOUND)", "min(staleness, NO_BOUND) + 1"),
    (headers, "staleness_of", "bound - 1.0", "float(bound)"),
    (headers, "staleness_of", "if not bound:", "if False:"),
    (headers, "staleness_of", "bound == NO_BOUND", "False"),
    (Scan, "header", "start=self.rank", "start=self.limit"),
    (Scan, "header", "shards=1", "shards=0"),
    (Scan, "header", "clock=self.clock", "clock=-1"),
    (Scan, "header", "frames.ANSWER if self.values else 0", "0"),
    (Collect, "header", "number=self.number, count=self.call_bytes", "number=self.call_bytes, count=self.number"),
    (RetireOrigins, "header", "start=self.first, parties=self.origins", "start=self.origins, parties=self.first"),
    (RetireOrigins, "header", "clock=0", "clock=-1"),
    (CloseSums, "header", "parties=1", "parties=0"),
    (DumpPiece, "header", "number=self.content", "number=0"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), MUTANTS)
def test_a_wrong_variant_is_caught(monkeypatch, owner, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, LimitError)):
        check_bytes()
