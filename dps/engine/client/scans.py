"""Scans: reads keys, or keys and values, of all rows of a keyed table or of those in a range of keys.

A server answers a SCAN with a piece of a shard, and with the rank at which the next piece begins (`state/scan.py`).
Ranks follow from keys alone. So where the shard has moved to another server meanwhile, or a copy of it has become the
primary, that server is asked for the rest. The first pieces of all shards are asked for at once, and the next one of a
shard before the present one is looked at, so that servers work while answers travel.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dps.engine.client.byte_rows import bytes_of
from dps.engine.client.inputs import KeyRange, row_shape
from dps.engine.client.reads import readable
from dps.engine.client.requests import MOST_BYTES, MOST_PULLED_KEYS
from dps.engine.client.session import RETRIED, ClientSession
from dps.engine.client.shard_requests import ReshardedError, answered, keyed_spec, sent_to_shard
from dps.engine.client.ticket import Pending, SentCall
from dps.engine.core.blocks import empty
from dps.engine.core.ordering import sort_keys
from dps.engine.core.shard_map import ShardMap
from dps.engine.core.shards.rows import scatter
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.scan import BEGIN, LEAST_KEY, MOST_KEY
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import Scan, ScanAnswer
from dps.errors import InputError, ProtocolError

__all__ = ["RangeScan", "Scans"]

ALL = KeyRange(LEAST_KEY, MOST_KEY)
KEYS_A_SCAN = 1 << 20
MOST_ROWS = (1 << 31) - 1  # of one answer, because their places are counted in int32

Piece = tuple[np.ndarray, np.ndarray]  # keys, and values [m, dim]; of a scan for keys there are no values


class RangeScan(NamedTuple):
    """What a scan is to find: the rows of a table with keys of a range, or their keys only."""

    spec: TableSpec
    keys: KeyRange
    values: bool

    @property
    def shards(self) -> list[int]:
        """The shards that can have keys of the range."""
        first, last = self.keys
        if first > last:
            return []
        some = self.spec.partition.spread(first, last)
        if some is None:
            return list(range(self.spec.shards))
        starts = group(some, self.spec.shard_map).starts
        return np.flatnonzero(np.diff(starts)).tolist()

    @property
    def limit(self) -> int:
        """Rows of a piece, as many as a server finds in some milliseconds."""
        if not self.values:
            return KEYS_A_SCAN
        return max(1, min(MOST_PULLED_KEYS, MOST_BYTES // (8 + self.spec.dim * self.spec.itemsize)))

    def read(self, body: bytes | bytearray | memoryview, count: int) -> Piece:
        """The keys and values of an answer."""
        keys, spec = np.frombuffer(body, np.int64, count), self.spec
        numbers = count * spec.dim if self.values else 0
        return keys, np.frombuffer(body, spec.dtype, numbers, 8 * count).reshape(-1, spec.dim)

    def joined(self, pieces: list[Piece]) -> Piece:
        """All rows that were found, by ascending keys."""
        spec, count = self.spec, sum(len(keys) for keys, _ in pieces)
        if count > MOST_ROWS:
            raise InputError(f"table {spec.name!r}: {count} rows in the range, and a pull gives {MOST_ROWS} at most")
        ordered, places = np.empty(count, np.int64), np.empty(count, np.int32)
        sort_keys(np.concatenate([NO_KEYS, *(keys for keys, _ in pieces)]), ordered, places)
        values, start = empty((count, spec.dim), spec.dtype), 0
        for keys, rows in pieces:
            scatter(rows, places, start, values)
            start += len(keys)
        return ordered, bytes_of(values.reshape(row_shape((count,), spec)), spec)


NO_KEYS = np.empty(0, np.int64)


class Places(NamedTuple):
    """Neighbouring places of a table's keys: see :mod:`dps.engine.core.shard_map`."""

    first: int
    end: int

    def own(self, piece: Piece, shard_map: ShardMap) -> Piece:
        """The rows of a piece whose keys lie here."""
        places = shard_map.places(np.ascontiguousarray(piece[0]))
        which = np.flatnonzero((places >= self.first) & (places < self.end))
        return piece[0][which], piece[1][which] if len(piece[1]) else piece[1]


class Asked(NamedTuple):
    """A piece of a shard that was asked for; without a request where its server was not reached."""

    shard: int
    rank: int
    request: Request | None
    within: Places | None = None  # only its keys are wanted, because shards were merged since the scan began


def parts_of(waiting: Iterable[Asked], old: ShardMap, new: ShardMap) -> collections.deque[Asked]:
    """The pieces that a client asks for in place of `waiting`, because the table is cut into other shards by now.

    Keys keep their ranks, because the table keeps its salt. So each part goes on where the shard stopped; and so does
    the scan of each of the shards that were merged.

    >>> two, four = ShardMap(0, 2), ShardMap(0, 4)
    >>> [(each.shard, each.rank) for each in parts_of([Asked(1, 99, None)], two, four)]
    [(2, 99), (3, 99)]
    >>> parts_of([Asked(3, 99, None)], four, two)
    deque([Asked(shard=1, rank=99, request=None, within=Places(first=3072, end=4096))])
    """
    found: collections.deque[Asked] = collections.deque()
    for shard, rank, _, within in waiting:
        first, end = old.edges[shard : shard + 2]
        if within is not None:
            first, end = max(first, within.first), min(end, within.end)
        for n in new.within(first, end):
            is_whole = first <= new.edges[n] and new.edges[n + 1] <= end  # all keys of the shard are wanted
            found.append(Asked(n, rank, None, None if is_whole else Places(first, end)))
    return found


class SentScan(SentCall):
    """A scan on its way: the pieces that are still to come, one of each shard, and those that are here."""

    __slots__ = ("found", "scan", "waiting")

    def __init__(self, sender: Scans, scan: RangeScan, asked: list[Asked]):
        super().__init__(sender, "pull", [each.request for each in asked if each.request is not None])
        self.scan, self.waiting = scan, collections.deque(asked)
        self.found: list[Piece] = []


class Scans:
    """The scans of one session."""

    def __init__(self, session: ClientSession):
        self._session, self.now = session, session.now

    def iterate(self, table: str, shard: int | None, shard_map: ShardMap | None = None) -> Iterator[np.ndarray]:
        """The keys of a table, or of one of its shards, piece after piece.

        `shard_map` is that by which the shard was named; where the table is cut otherwise now, what it had is read.
        """
        session = self._session
        with session.lock:
            scan = RangeScan(keyed_spec(session, table), ALL, False)
            readable(session, table)
        waiting = collections.deque(Asked(n, BEGIN, None) for n in (scan.shards if shard is None else [shard]))
        if shard is not None and shard_map is not None:
            if not 0 <= shard < shard_map.shards:
                raise InputError(f"table {table!r} has {shard_map.shards} shards; there is no {shard}")
            waiting = parts_of(waiting, shard_map, scan.spec.shard_map)
        while waiting:
            asked = waiting.popleft()
            with session.lock:
                session.meter.begin(session.now())
                try:
                    (keys, _), rank = self._piece(scan, asked, None)
                except ReshardedError as told:
                    waiting = parts_of((asked, *waiting), scan.spec.shard_map, told.spec.shard_map)
                    scan = scan._replace(spec=told.spec)
                    continue
                finally:
                    session.meter.lap("pull", session.now())
            if rank != BEGIN:
                waiting.appendleft(asked._replace(rank=rank, request=None))
            if len(keys):
                yield keys

    def send_keys(self, table: str, shard: int | None) -> Pending[list[np.ndarray]]:
        """Ask all shards of a table, or one of them, for their keys."""
        session = self._session
        with session.lock:
            scan = RangeScan(keyed_spec(session, table), ALL, False)
            readable(session, table)
            sent = self._send(scan, scan.shards if shard is None else [shard])
        return Pending((sent,), lambda: [keys for keys, _ in sent.found if len(keys)])

    def send(self, scan: RangeScan) -> Pending[Piece]:
        """Ask for the rows of a range. To be called under the session's lock, when nothing older is left behind."""
        sent = self._send(scan, scan.shards)
        return Pending((sent,), lambda: scan.joined(sent.found))

    # -- what a `Pending` asks of the sender of its calls

    def poll(self, call: SentCall) -> None:
        self._session.poll(call)

    def result(self, call: SentCall, timeout: float | None) -> None:
        assert isinstance(call, SentScan)
        session = self._session
        until = None if timeout is None else session.now() + timeout
        with session.lock:
            session.meter.begin(session.now())
            try:
                while call.waiting:
                    asked = call.waiting[0]
                    try:
                        piece, rank = self._piece(call.scan, asked, until)
                    except ReshardedError as told:
                        call.waiting = parts_of(call.waiting, call.scan.spec.shard_map, told.spec.shard_map)
                        call.scan = call.scan._replace(spec=told.spec)
                        continue
                    call.waiting.popleft()
                    if rank != BEGIN:
                        call.waiting.append(self._ask(call.scan, asked.shard, rank, asked.within))
                    call.found.append(piece)
            finally:
                session.meter.lap(call.verb, session.now())

    # -- inside

    def _send(self, scan: RangeScan, shards: list[int]) -> SentScan:
        return SentScan(self, scan, [self._ask(scan, shard, BEGIN) for shard in shards])

    def _ask(self, scan: RangeScan, shard: int, rank: int, within: Places | None = None) -> Asked:
        try:
            return Asked(shard, rank, self._sent(scan, shard, rank), within)
        except (ReshardedError, *RETRIED):
            return Asked(shard, rank, None, within)

    def _sent(self, scan: RangeScan, shard: int, rank: int) -> Request:
        session, spec = self._session, scan.spec

        def header() -> Header:
            return Scan(spec.id, session.epoch, shard, session.own.clock, rank, scan.limit, scan.values).header()

        return sent_to_shard(session, spec, shard, header, np.array(scan.keys, np.int64).tobytes())

    def _piece(self, scan: RangeScan, asked: Asked, until: float | None) -> tuple[Piece, int]:
        """A piece of a shard, and the rank behind it; asked for again where the shard has moved."""
        session = self._session
        send = functools.partial(self._sent, scan, asked.shard, asked.rank)
        header, body = answered(session, asked.request, send, until)
        answer = ScanAnswer.of(header)
        if BEGIN != answer.rest <= asked.rank:  # else a scan would not end
            raise ProtocolError(f"a piece of a scan from rank {asked.rank} on ends at rank {answer.rest}")
        session.meter.counted(True, answer.rows)
        piece = scan.read(body, answer.rows)
        return piece if asked.within is None else asked.within.own(piece, scan.spec.shard_map), answer.rest
