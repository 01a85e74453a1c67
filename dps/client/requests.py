"""How a client's rows travel: cut into requests, in the order of the shards, to and from the places that it named.

A call (one pull or push) becomes legs, one for each server and run of neighbouring shards. Where a server does not
answer because shards have moved, its leg is cut again by the new route and sent again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from dps.core.rows import scatter, take
from dps.state.ops import TableSpec
from dps.state.partition import Grouping, bound
from dps.wire.channel import Channel, Request, Sink, ViewSink
from dps.wire.frames import CERTIFICATE, Header, padded

__all__ = ["Call", "Leg", "TableRoute", "again", "chunks", "legs", "send"]

SCRATCH = 1 << 18  # bytes moved at a time: a piece is still in the cache when it is used
PADDING = bytes(8)
Part: TypeAlias = np.ndarray | bytes  # of a frame's body


class TableRoute:
    """A table as a client sees it: its spec, and which server holds which run of neighbouring shards."""

    def __init__(self, spec: TableSpec, owners: list[int]):
        self.spec = spec
        self.row_bytes = spec.dim * spec.itemsize
        cuts = [0, *(n for n in range(1, len(owners)) if owners[n] != owners[n - 1]), len(owners)]
        self.runs = [(owners[a], a, b) for a, b in itertools.pairwise(cuts)]  # server, first shard, end


class ScatterSink:
    """Row j of an answer into out[order[start + j]], a cache-sized piece at a time."""

    def __init__(self, out: np.ndarray, order: np.ndarray, start: int, count: int):
        row = out.itemsize * out.shape[1]
        self._out = out
        self._order = order
        self._start = start
        self._left = count
        self._row = row
        self._piece = np.empty((max(1, min(count, SCRATCH // row)), out.shape[1]), out.dtype)
        self._view = memoryview(self._piece.reshape(-1).view(np.uint8))
        self._filled, self._wanted = 0, len(self._view)

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        return self._view[self._filled : self._wanted]

    def advance(self, nbytes: int) -> None:
        """That many bytes have arrived; a full piece goes to its places."""
        self._filled += nbytes
        if self._filled == self._wanted:
            rows = self._wanted // self._row
            scatter(self._piece[:rows], self._order, self._start, self._out)
            self._start, self._left, self._filled = self._start + rows, self._left - rows, 0
            self._wanted = min(self._wanted, self._left * self._row)


class Call(NamedTuple):
    """One pull or push, as it may have to be sent again."""

    header: Header
    grouping: Grouping | None  # the keys by shard; or
    rows: tuple[int, int]  # first row and end, of a dense table
    values: np.ndarray | None
    out: np.ndarray | None

    def copied(self) -> Call:
        """With arrays of its own, which the caller cannot change."""
        grouping = self.grouping
        if grouping is not None:
            grouping = grouping._replace(keys=grouping.keys.copy())
        return self._replace(grouping=grouping, values=None if self.values is None else self.values.copy())


class Leg(NamedTuple):
    """The part of a call that one request carries: shards `first` to `end` - 1, rows a to b - 1 of the call."""

    call: Call
    first: int
    end: int
    a: int
    b: int


def legs(call: Call, route: TableRoute, chunk: int) -> Iterator[tuple[int, Leg]]:
    """(server, leg) for each server and run of shards that the call touches; more where one would exceed `chunk` bytes.

    Where a call is cut into chunks depends on its rows alone, not on which servers hold them: each chunk has a number
    of its own, and has the same one when it is sent again.
    """
    shards, rows, most = route.spec.shards, count_of(call), rows_of(chunk, call, route)
    weight = call.header.rows
    for number, a in enumerate(range(0, max(rows, int(weight > 0)), most), call.header.number):
        rest = {"number": number, "rows": min(weight, 0)}  # the rows of data count once: with the first chunk
        whole = call if a == 0 else call._replace(header=call.header._replace(**rest))
        yield from again(Leg(whole, 0, shards, a, min(a + most, rows)), route)


def chunks(call: Call, route: TableRoute, chunk: int) -> int:
    """How many chunks a call is cut into: so many numbers it takes."""
    return max(-(-count_of(call) // rows_of(chunk, call, route)), int(call.header.rows > 0))


def rows_of(chunk: int, call: Call, route: TableRoute) -> int:
    """How many rows of the call make a chunk."""
    return max(1, chunk // (route.row_bytes + (8 if call.grouping is not None else 0)))


def again(leg: Leg, route: TableRoute) -> Iterator[tuple[int, Leg]]:
    """(server, leg) for each server that serves a part of `leg` by this route.

    A push that stands for rows of data goes to all shards, because all of them divide by the same number.
    """
    call = leg.call
    everywhere = call.header.rows > 0
    for server, first, end in route.runs:
        first, end = max(first, leg.first), min(end, leg.end)
        if first < end:
            low, high = limits(call, route.spec, first, end)
            a, b = (min(max(edge, leg.a), leg.b) for edge in (low, high))
            if a < b or everywhere:
                yield server, Leg(call, first, end, a, b)


def count_of(call: Call) -> int:
    """Rows of a call."""
    return call.rows[1] - call.rows[0] if call.grouping is None else len(call.grouping.keys)


def limits(call: Call, spec: TableSpec, first: int, end: int) -> tuple[int, int]:
    """Which rows of the call lie in the shards `first` to `end` - 1."""
    if call.grouping is not None:
        return int(call.grouping.starts[first]), int(call.grouping.starts[end])
    assert spec.rows is not None
    start = call.rows[0]
    return tuple(bound(n, spec.rows, spec.shards) - start for n in (first, end))  # type: ignore[return-value]


def send(leg: Leg, row_bytes: int, channel: Channel) -> Request:
    """Write the request of one leg."""
    (header, grouping, rows, values, out), first, end, a, b = leg
    nbytes = (b - a) * row_bytes
    padding = padded(nbytes) - nbytes
    order = None if grouping is None else grouping.order
    sink = None if out is None or header.flags & CERTIFICATE else sink_for(out, order, a, b)
    header = header._replace(shard=first, shards=end - first, count=b - a)
    pieces: Iterable[Part] = ()
    if grouping is None:
        header = header._replace(start=rows[0] + a)
    else:
        edges = grouping.starts[first : end + 1]
        inside = edges if edges[0] >= a and edges[-1] <= b else np.clip(edges, a, b)
        pieces = [inside[1:] - inside[:-1], grouping.keys[a:b]]
    body = 8 * (end - first + b - a) if grouping is not None else 0
    if values is not None:
        body += nbytes + padding
        if order is None:
            whole = (*pieces, values[a:b], PADDING[:padding])
            pieces = [piece for piece in whole if len(piece)]  # none of a push that only has its rows to say here
        else:
            pieces = gathered(pieces, values, order, a, b, padding)
    request = channel.send(header._replace(body=body), pieces, sink, 0 if sink is None else nbytes)
    request.leg = leg
    return request


def sink_for(out: np.ndarray, order: np.ndarray | None, a: int, b: int) -> Sink:
    """Where rows a to b - 1 of the grouped batch go."""
    if order is None:
        return ViewSink(memoryview(out[a:b].reshape(-1)).cast("B"))
    return ScatterSink(out, order, a, b - a)


def gathered(
    first: Iterable[Part], values: np.ndarray, order: np.ndarray, start: int, stop: int, padding: int
) -> Iterator[Part]:
    """The buffers of a body: `first`, then values[order[start:stop]] through one reused piece of memory."""
    row = values.itemsize * values.shape[1]
    piece = np.empty((max(1, min(stop - start, SCRATCH // row)), values.shape[1]), values.dtype)
    yield from first
    for a in range(start, stop, len(piece)):
        rows = min(len(piece), stop - a)
        take(values, order, a, piece[:rows])
        yield piece[:rows]
    if padding:
        yield PADDING[:padding]
