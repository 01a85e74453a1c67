"""Typed views of the header, for kinds of frames that use its 64 bytes for something else than rows. Pure.

The fields of :class:`dps.engine.wire.frames.Header` have the names that they have in a request for rows (PULL, PUSH,
REPLICATE). Other kinds have other numbers to say and say them in the same bytes. Each of these kinds has a class here,
with the names of its own: `header` makes the header, and `of` reads it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dps.engine.wire import frames
from dps.engine.wire.frames import Header

__all__ = [
    "NO_BOUND",
    "AgeRows",
    "Await",
    "CloseSums",
    "Collect",
    "DumpPiece",
    "Gone",
    "GoneAnswer",
    "PartitionRequest",
    "PieceAnswer",
    "RetireOrigins",
    "RingPiece",
    "RouteAnswer",
    "RouteRequest",
    "Scan",
    "ScanAnswer",
    "Tick",
    "TickAnswer",
    "Versions",
    "bound_of",
    "staleness_of",
]

# Value of the bound of a run that has none.
NO_BOUND = 1 << 31
# Number of bits that a bound takes.
BOUND_BITS = 32
# Added to `start` where routes are to be asked for anew. `start` is negative then, which no clock or bound makes it.
RENEWED = -1 << 63
# Largest clock that is told, because `start` is signed; a higher clock is told as this one.
MAX_LOWEST = (1 << 31) - 1


def bound_of(staleness: float) -> int:
    """A staleness as the answer to a TICK has it: plus 1, because 0 says nothing.

    >>> bound_of(0), bound_of(3.0), bound_of(math.inf) == NO_BOUND
    (1, 4, True)
    """
    return int(min(staleness + 1, NO_BOUND))


def staleness_of(bound: int) -> float | None:
    """The staleness in the answer to a TICK; None if the answer does not say it.

    >>> staleness_of(4), staleness_of(NO_BOUND), staleness_of(0)
    (3.0, inf, None)
    """
    if not bound:
        return None
    return math.inf if bound == NO_BOUND else bound - 1.0


class Tick(NamedTuple):
    """TICK: a trainer has completed so many iterations. The body is a report, or nothing."""

    clock: int  # iterations completed
    planned: int  # iterations that it will make; 0: unknown

    def header(self) -> Header:
        return Header(frames.TICK, clock=self.clock, count=self.planned)

    @classmethod
    def of(cls, header: Header) -> Tick:
        return cls(header.clock, header.count)


class Await(NamedTuple):
    """AWAIT: a trainer is about to read a table that has a staleness of its own. The body is empty."""

    lowest: int  # the clock that all trainers that count have to reach before

    def header(self) -> Header:
        return Header(frames.AWAIT, clock=self.lowest)

    @classmethod
    def of(cls, header: Header) -> Await:
        return cls(header.clock)


class TickAnswer(NamedTuple):
    """The answer to a TICK or an AWAIT: the trainer may go on."""

    trainers: int  # number of trainers that count in this run: those that have not left
    staleness: float | None  # staleness of the run from now on; infinite: no bound; None: not said
    lowest: int = 0  # the lowest clock of the trainers that count, or less
    renewed: bool = False  # the staleness of a table has changed: the trainer asks for the route before its next call

    def header(self, request: int) -> Header:
        bound = 0 if self.staleness is None else bound_of(self.staleness)
        start = (min(self.lowest, MAX_LOWEST) << BOUND_BITS | bound) + (RENEWED if self.renewed else 0)
        return Header(frames.OK, 0, request, parties=self.trainers, start=start)

    @classmethod
    def of(cls, header: Header) -> TickAnswer:
        return cls.of_fields(header.parties, header.start)

    @classmethod
    def of_fields(cls, parties: int, start: int) -> TickAnswer:
        """The answer that has these two fields: its `start` is the bound, and above it the lowest clock."""
        renewed = start < 0
        start -= RENEWED if renewed else 0
        return cls(parties, staleness_of(start & (1 << BOUND_BITS) - 1), start >> BOUND_BITS, renewed)


class Collect(NamedTuple):
    """COLLECT: what a trainer brings to a collective. The body is the call as JSON, then the array's bytes."""

    clock: int  # clock of the trainer, with `number` its place in the program
    number: int  # number of collective calls at this clock so far
    call_bytes: int  # size of the JSON

    def header(self) -> Header:
        return Header(frames.COLLECT, clock=self.clock, number=self.number, count=self.call_bytes)

    @classmethod
    def of(cls, header: Header) -> Collect:
        return cls(header.clock, header.number, header.count)


class RingPiece(NamedTuple):
    """RING: numbers of an array on their way round a ring of trainers. RING_RESULT: numbers of a result, asked for."""

    round: int  # number of the ring's round, random
    step: int  # step of the round
    start: int  # first byte of the array
    nbytes: int

    def header(self, kind: int = frames.RING, flags: int = 0) -> Header:
        body = frames.padded(self.nbytes) if kind == frames.RING else 0
        return Header(kind, flags, clock=self.round, shard=self.step, start=self.start, count=self.nbytes, body=body)

    @classmethod
    def of(cls, header: Header) -> RingPiece:
        return cls(header.clock, header.shard, header.start, header.count)


class PartitionRequest(NamedTuple):
    """FETCH_PARTITION: bytes of a pickled partition that a trainer lends."""

    run: int
    partition: int  # by the driver's numbers
    start: int  # first byte

    def header(self) -> Header:
        return Header(frames.FETCH_PARTITION, clock=self.run, trainer=self.partition, start=self.start)

    @classmethod
    def of(cls, header: Header) -> PartitionRequest:
        return cls(header.clock, header.trainer, header.start)


class PieceAnswer(NamedTuple):
    """The answer to a RING_RESULT or FETCH_PARTITION. The body is as much of the bytes as travels in one frame."""

    total: int  # bytes that there are
    edition: int  # bytes of another edition do not fit to these; 0: none are here, ask again

    def header(self, request: int) -> Header:
        return Header(frames.OK, request=request, start=self.total, count=self.edition)

    @classmethod
    def of(cls, header: Header) -> PieceAnswer:
        return cls(header.start, header.count)


class RouteRequest(NamedTuple):
    """ROUTE: which servers have which shards?"""

    origin: int  # under which the client's ops go; 0: it wants one

    def header(self) -> Header:
        return Header(frames.ROUTE, trainer=self.origin)

    @classmethod
    def of(cls, header: Header) -> RouteRequest:
        return cls(header.trainer)


class RouteAnswer(NamedTuple):
    """The answer to a ROUTE. The body is the route."""

    origin: int  # origin of the client

    def header(self, request: int) -> Header:
        return Header(frames.OK, 0, request, trainer=self.origin)

    @classmethod
    def of(cls, header: Header) -> RouteAnswer:
        return cls(header.trainer)


class Scan(NamedTuple):
    """SCAN: rows of a shard whose keys lie in a range; the body has the least key and the greatest one.

    A piece of them: those whose ranks (`state/scan.py`) lie in a window that begins at `rank`.
    """

    table: int
    epoch: int
    shard: int
    clock: int  # of the client: sums of earlier clocks are closed before
    rank: int  # with which the piece begins
    limit: int  # how many rows the answer has at most
    values: bool  # asks for keys and values; else for keys

    def header(self) -> Header:
        return Header(
            frames.SCAN,
            frames.ANSWER if self.values else 0,
            table=self.table,
            epoch=self.epoch,
            clock=self.clock,
            shard=self.shard,
            shards=1,
            start=self.rank,
            count=self.limit,
        )

    @classmethod
    def of(cls, header: Header) -> Scan:
        values = bool(header.flags & frames.ANSWER)
        return cls(header.table, header.epoch, header.shard, header.clock, header.start, header.count, values)


class ScanAnswer(NamedTuple):
    """The answer to a SCAN. The body has the keys and, if they were asked for, the values."""

    rows: int
    rest: int  # the rank with which the next piece begins; after the last piece the one with which a scan begins

    def header(self, request: int, nbytes: int = 0) -> Header:
        return Header(frames.OK, 0, request, count=self.rows, start=self.rest, body=nbytes)

    @classmethod
    def of(cls, header: Header) -> ScanAnswer:
        return cls(header.count, header.start)


class Gone(NamedTuple):
    """GONE: the keys of rows of a shard that went by themselves, and why. The body is empty."""

    table: int
    epoch: int
    shard: int
    number: int  # of the first key that is asked for: see `state/gone.py`
    limit: int  # how many keys the answer has at most

    def header(self) -> Header:
        return Header(
            frames.GONE,
            table=self.table,
            epoch=self.epoch,
            shard=self.shard,
            shards=1,
            start=self.number,
            count=self.limit,
        )

    @classmethod
    def of(cls, header: Header) -> Gone:
        return cls(header.table, header.epoch, header.shard, header.start, header.count)


class GoneAnswer(NamedTuple):
    """The answer to a GONE. The body has the keys, then why each of them went."""

    keys: int
    first: int  # number of the first of them, larger than the one asked for where the server has forgotten some
    stop: int  # number of the next key of the shard that will go

    def header(self, request: int, nbytes: int = 0) -> Header:
        return Header(frames.OK, 0, request, count=self.keys, start=self.first, clock=self.stop, body=nbytes)

    @classmethod
    def of(cls, header: Header) -> GoneAnswer:
        return cls(header.count, header.start, header.clock)


class Versions(NamedTuple):
    """VERSIONS: a backup asks a primary for the versions of shards, before it answers pulls of these."""

    table: int
    epoch: int
    server: int  # number of the server that asks
    shards: int  # how many shards the body names

    def header(self) -> Header:
        return Header(frames.VERSIONS, table=self.table, epoch=self.epoch, number=self.server, count=self.shards)

    @classmethod
    def of(cls, header: Header) -> Versions:
        return cls(header.table, header.epoch, header.number, header.count)


class DumpPiece(NamedTuple):
    """DUMP: a piece of a shard for a server that is to hold it. The body is made by `frames.pack_arrays`."""

    table: int
    epoch: int
    shard: int
    content: int  # what is in it, see `server/replicas.py`
    text_bytes: int  # size of the JSON at the beginning of the body

    def header(self) -> Header:
        return Header(
            frames.DUMP,
            table=self.table,
            epoch=self.epoch,
            shard=self.shard,
            number=self.content,
            count=self.text_bytes,
        )

    @classmethod
    def of(cls, header: Header) -> DumpPiece:
        return cls(header.table, header.epoch, header.shard, header.number, header.count)


class CloseSums(NamedTuple):
    """REPLICATE with CONTROL: the clock of a table with an aggregate ends on a backup, too."""

    table: int
    epoch: int
    clock: int
    what: int  # is done with the sums: KEEP, DROP, FAILED or OLDER of `state/ops.py`

    def header(self) -> Header:
        flags, clock = frames.CONTROL, self.clock
        return Header(
            frames.REPLICATE, flags, table=self.table, epoch=self.epoch, clock=clock, start=self.what, parties=1
        )

    @classmethod
    def of(cls, header: Header) -> CloseSums:
        return cls(header.table, header.epoch, header.clock, header.start)


class AgeRows(NamedTuple):
    """REPLICATE with CONTROL and RULE_ASSIGN: a new moment begins for the rows of a backup, too."""

    table: int
    epoch: int
    time: int  # milliseconds since 1970
    clock: int
    ops: int  # that a moment lasts

    def header(self) -> Header:
        flags, clock = frames.CONTROL | frames.RULE_ASSIGN, self.clock
        return Header(
            frames.REPLICATE, flags, table=self.table, epoch=self.epoch, clock=clock, start=self.time, parties=self.ops
        )

    @classmethod
    def of(cls, header: Header) -> AgeRows:
        return cls(header.table, header.epoch, header.start, header.clock, header.parties)

    @staticmethod
    def matches(header: Header) -> bool:
        """Whether a REPLICATE with CONTROL is one of these."""
        return bool(header.flags & frames.RULE_ASSIGN)


class RetireOrigins(NamedTuple):
    """REPLICATE with CONTROL and RULE_ADD: these origins make no more ops, so a backup may forget them, too."""

    table: int
    epoch: int
    first: int  # origin
    origins: int  # how many, from there on

    def header(self) -> Header:
        flags = frames.CONTROL | frames.RULE_ADD
        return Header(
            frames.REPLICATE, flags, table=self.table, epoch=self.epoch, clock=0, start=self.first, parties=self.origins
        )

    @classmethod
    def of(cls, header: Header) -> RetireOrigins:
        return cls(header.table, header.epoch, header.start, header.parties)

    @staticmethod
    def matches(header: Header) -> bool:
        """Whether a REPLICATE with CONTROL is one of these; else it is a :class:`CloseSums`."""
        return bool(header.flags & frames.RULE_ADD)
