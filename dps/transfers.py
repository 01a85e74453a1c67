"""How a client's rows travel: cut into requests, in the order of the shards, to and from the places that it named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dps.state.kernels import scatter, take
from dps.state.ops import TableSpec
from dps.state.partition import Grouping, bound
from dps.wire.channel import Channel, Request, Sink, ViewSink
from dps.wire.frames import Header, padded

__all__ = ["TableRoute", "key_requests", "range_requests"]

SCRATCH = 1 << 18  # bytes moved at a time: a piece is still in the cache when it is used
PADDING = bytes(8)


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
        self._out, self._order, self._start, self._left, self._row = out, order, start, count, row
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


def key_requests(
    route: TableRoute,
    header: Header,
    grouping: Grouping,
    values: np.ndarray | None,
    out: np.ndarray | None,
    chunk: int,
    channel: Callable[[int], Channel],
) -> list[Request]:
    """Write one request for each server and run of shards that the keys touch; more where it would exceed `chunk`."""
    keys, starts, order, _ = grouping
    most = max(1, chunk // (8 + route.row_bytes))
    requests = []
    for server, first, end in route.runs:
        edges = starts[first : end + 1]
        low, high = int(edges[0]), int(edges[-1])
        for a in range(low, high, most):
            b = min(a + most, high)
            inside = edges if b - a == high - low else np.clip(edges, a, b)
            counts = inside[1:] - inside[:-1]
            nbytes = (b - a) * route.row_bytes
            body = 8 * (end - first + b - a)
            pieces: Any = [counts, keys[a:b]]
            if values is not None:
                padding = padded(nbytes) - nbytes
                body += nbytes + padding
                if order is None:
                    pieces += [values[a:b], PADDING[:padding]] if padding else [values[a:b]]
                else:
                    pieces = gathered(pieces, values, order, a, b, padding)
            sink = None if out is None else sink_for(out, order, a, b)
            ask = header._replace(shard=first, shards=end - first, count=b - a, body=body)
            requests.append(channel(server).send(ask, pieces, sink, 0 if out is None else nbytes))
    return requests


def range_requests(
    route: TableRoute,
    header: Header,
    rows: tuple[int, int],
    values: np.ndarray | None,
    out: np.ndarray | None,
    chunk: int,
    channel: Callable[[int], Channel],
) -> list[Request]:
    """The same for rows `rows[0]` to `rows[1] - 1` of a dense table; no keys travel."""
    spec, (start, stop), requests = route.spec, rows, []
    assert spec.rows is not None
    most = max(1, chunk // route.row_bytes)
    for server, first, end in route.runs:
        low = max(start, bound(first, spec.rows, spec.shards))
        high = min(stop, bound(end, spec.rows, spec.shards))
        for a in range(low, high, most):
            b = min(a + most, high)
            nbytes = (b - a) * route.row_bytes
            pieces: list[Any] = []
            if values is not None:
                pieces = [values[a - start : b - start], PADDING[: padded(nbytes) - nbytes]]
            sink = None if out is None else sink_for(out, None, a - start, b - start)
            body = padded(nbytes) if pieces else 0
            ask = header._replace(shard=first, shards=end - first, start=a, count=b - a, body=body)
            requests.append(channel(server).send(ask, pieces, sink, 0 if out is None else nbytes))
    return requests


def sink_for(out: np.ndarray, order: np.ndarray | None, a: int, b: int) -> Sink:
    """Where rows a to b - 1 of the grouped batch go."""
    if order is None:
        return ViewSink(memoryview(out[a:b].reshape(-1)).cast("B"))
    return ScatterSink(out, order, a, b - a)


def gathered(
    first: list[Any], values: np.ndarray, order: np.ndarray, start: int, stop: int, padding: int
) -> Iterator[Any]:
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
