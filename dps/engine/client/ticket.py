"""Ticket: the right to call a parameter server. Pending: the future of a call on its way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dps.engine.core.requests.part import Part
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import decode_json
from dps.errors import DPSError

if TYPE_CHECKING:
    from distributed import Security

__all__ = ["Certificate", "Pending", "R", "SentCall", "Ticket"]

Last = dict[int, tuple[int, int]]  # by origin, its last op: clock and number

R = TypeVar("R", covariant=True)
T = TypeVar("T")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What lets a process use a parameter server: where its controller listens, and the session secret.

    Parameters
    ----------
    session : str
        The parameter server's name.
    controller : (str, int)
        Host and port of its controller.
    secret : str
        To be kept as a password is.
    security : distributed.security.Security, optional
        That of a cluster with TLS.

    Examples
    --------
    >>> Ticket("dps", ("127.0.0.1", 8786), "s3cret")
    Ticket(session='dps', controller=('127.0.0.1', 8786))
    """

    session: str
    controller: tuple[str, int]
    secret: str = dataclasses.field(repr=False)
    security: Security | None = dataclasses.field(default=None, repr=False)  # of a TLS cluster


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What the values of a pull contain: for each shard, the last op of every origin.

    An op is (clock, number within the clock). An origin is what made ops: a trainer of a run, or a client without a
    clock, whose ops have the clock -1; ``origin`` of both is its number. Values that contain an op contain all earlier
    ones of that origin.

    Parameters
    ----------
    shards : dict
        Shard -> origin -> (clock, number).
    edges : tuple of int
        Where the shards of the table began then, and the end, because shards may be split: rows of a dense table, slots
        of hashes of a keyed one. Shards that were merged shortly before count as several, where these have different
        ops. Of a shard that was merged during the pull, it names the ops that all of its rows have.

    Examples
    --------
    >>> certificate = Certificate({0: {7: (3, 1)}, 1: {7: (4, 0), 8: (4, 0)}})
    >>> certificate.contains(7, 3, 1), certificate.contains(8, 4, 0, shard=1), certificate.contains(8, 5, 0, shard=1)
    (True, True, False)
    """

    shards: dict[int, dict[int, tuple[int, int]]]
    edges: tuple[int, ...] = ()

    def contains(self, origin: int, clock: int, number: int = 0, shard: int | None = None) -> bool:
        """Whether the values contain that op: in one shard, or in all that the pull touched."""
        parts = self.shards.values() if shard is None else [self.shards.get(shard, {})]
        return all(origin in part and part[origin] >= (clock, number) for part in parts)

    @classmethod
    def read(cls, requests: list[Request]) -> Certificate:
        """From the answers to a certified pull, whose values are put where they belong."""
        found: list[tuple[Part, int, int, Last]] = []  # each answer's last ops at the places from first to end - 1
        edges: set[int] = set()
        for request in requests:
            part = request.call_part
            rows, of_table = part.fill(request.body), part.shard_map.edges
            edges.update(of_table)
            for shard, parts in decode_json(bytes(request.body[rows:])).items():
                ends = [*(first for first, _ in parts[1:]), of_table[int(shard) + 1]]
                for (first, ops), end in zip(parts, ends, strict=True):
                    found.append((part, first, end, {origin: (clock, seq) for origin, clock, seq in ops}))
        ordered = sorted(edges.union(first for _, first, _, _ in found))
        number = {edge: n for n, edge in enumerate(ordered)}
        said: dict[int, list[tuple[Part, Last]]] = {}  # by place, what answers say of it
        for part, first, end, last in found:
            for place in range(number[first], number[end]):
                said.setdefault(place, []).append((part, last))
        shards: dict[int, Last] = {}
        for place, here in said.items():
            if len(here) > 1:  # shards were merged meanwhile, so an answer speaks of rows that others have brought, too
                here = [each for each in here if _has_rows(each[0], *ordered[place : place + 2])] or here
            shards[place] = functools.reduce(_both, (last for _, last in here))
        return cls(shards, tuple(ordered))


def _has_rows(part: Part, first: int, end: int) -> bool:
    """Whether a part of a pull asks for rows in these places."""
    if part.keys is None:
        return part.span[0] < end and part.span[1] > first
    places = part.shard_map.places(part.keys)
    return bool(((places >= first) & (places < end)).any())


def _both(one: Last, other: Last) -> Last:
    """The last ops that rows of two answers have: the older ones, because some rows may have no more."""
    return {origin: min(one[origin], other[origin]) for origin in one.keys() & other.keys()}


class Sender(Protocol):
    """What a call on its way needs of the session that sent it."""

    now: Callable[[], float]

    def result(self, call: SentCall, timeout: float | None) -> None:
        """Wait for the outcome of a call; raise its error."""

    def poll(self, call: SentCall) -> None:
        """Read what has arrived of the answers to a call, without waiting."""


class SentCall:
    """A call on its way, as the session that sent it keeps it.

    Its time is counted as that of the `verb`, "pull" or "push".
    """

    __slots__ = ("requests", "seen", "session", "verb")

    def __init__(self, session: Sender, verb: str, requests: list[Request]):
        self.session, self.verb, self.requests = session, verb, requests
        self.seen = False  # the result was asked for, so its error is not raised a second time by a later wait

    @property
    def done(self) -> bool:
        """Whether all its requests have an answer or an error, as far as answers have been read."""
        return all(request.done for request in self.requests)


class Pending(Generic[R]):
    """The future of an asynchronous call, as ``pull_async`` and its like return it.

    It has the methods of ``concurrent.futures.Future`` that a client without a thread can offer. There is no
    ``add_done_callback``, because no thread would call back, and no ``cancel``, because a request that is written
    cannot be taken back: the servers may have applied it.

    Parameters
    ----------
    calls : sequence of SentCall
        What was sent: one call for each table.
    finish : callable
        Makes the result when all calls are answered.

    Examples
    --------
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     w = ps.table("w", rows=2)
    ...     pending = w.push_pull_async([0, 1], [1.0, 2.0])
    ...     pending.result(), pending.done(), pending.exception()
    (array([1., 2.], dtype=float32), True, None)
    >>> cluster.close()
    """

    __slots__ = ("_finish", "_value", "calls")

    def __init__(self, calls: Sequence[SentCall], finish: Callable[[], R]):
        self.calls = calls
        self._finish: Callable[[], R] | None = finish
        self._value: R

    @classmethod
    def of_tables(cls: type[Pending[V]], parts: Mapping[T, Pending[V]]) -> Pending[dict[T, V]]:
        """The calls to several tables as one, whose result is a dict."""
        calls = [call for pending in parts.values() for call in pending.calls]
        return Pending(calls, lambda: {table: cls._finished(pending) for table, pending in parts.items()})

    def done(self) -> bool:
        """Whether the call has its answer or has failed. Reads what has arrived, and does not wait.

        A call that failed because its server is gone counts as done: `result` sends it to another server, and waits.
        """
        for call in self.calls:
            if not call.done:
                call.session.poll(call)
        return all(call.done for call in self.calls)

    def result(self, timeout: float | None = None) -> R:
        """Wait for the answer; for a pull, the values.

        Parameters
        ----------
        timeout : float, optional
            Seconds; `dps.timeouts.request` by default. Unlike that of other futures it ends the call: after a
            time-out, whether a push was applied is not known, and `result` raises the same error again.

        Raises
        ------
        DPSError
            What a server answered, or that it is gone or did not answer in time.
        """
        if len(self.calls) == 1:
            self._wait(self.calls[0], timeout)
        elif self.calls:
            now = self.calls[0].session.now
            until = None if timeout is None else now() + timeout
            for call in self.calls:
                self._wait(call, None if until is None else max(0.0, until - now()))
        return self._finished()

    def _finished(self) -> R:
        finish = self._finish  # None once it was called; another thread may be here, too
        if finish is not None:
            self._value = finish()
            self._finish = None
        return self._value

    def exception(self, timeout: float | None = None) -> DPSError | None:
        """Wait as `result` does; the error that it raises, or None.

        Parameters
        ----------
        timeout : float, optional
            As for `result`.
        """
        try:
            self.result(timeout)
        except DPSError as error:
            return error
        return None

    @staticmethod
    def _wait(call: SentCall, timeout: float | None) -> None:
        call.seen = True
        call.session.result(call, timeout)
