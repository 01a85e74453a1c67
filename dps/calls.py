"""Ticket: the right to call a parameter server. Pending: a call on its way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.errors import DataLostError, UnknownTableError
from dps.state.ops import TableSpec
from dps.wire.channel import Request
from dps.wire.frames import decode_json, padded

if TYPE_CHECKING:
    from dps.client import Client

__all__ = ["Certificate", "Pending", "Ticket"]


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
    security: Any = dataclasses.field(default=None, repr=False)  # distributed.security.Security of a TLS cluster


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What the values of a pull contain: for each shard, the last op of every origin.

    An op is (clock, number within the clock). An origin is who made ops: a trainer of a run (``trainer.trainer``), or a
    client without a clock, whose ops have the clock -1. Values that contain an op contain all earlier ones of that
    origin.

    Parameters
    ----------
    shards : dict
        Shard -> origin -> (clock, number).

    Examples
    --------
    >>> certificate = Certificate({0: {7: (3, 1)}, 1: {7: (4, 0), 8: (4, 0)}})
    >>> certificate.contains(7, 3, 1), certificate.contains(8, 4, 0, shard=1), certificate.contains(8, 5, 0, shard=1)
    (True, True, False)
    """

    shards: dict[int, dict[int, tuple[int, int]]]

    def contains(self, origin: int, clock: int, number: int = 0, shard: int | None = None) -> bool:
        """Whether the values contain that op: in one shard, or in all that the pull touched."""
        parts = self.shards.values() if shard is None else [self.shards.get(shard, {})]
        return all(origin in part and part[origin] >= (clock, number) for part in parts)

    @classmethod
    def read(cls, requests: list[Request], spec: TableSpec) -> Certificate:
        """From the answers to a certified pull, whose values are put where they belong."""
        shards: dict[int, dict[int, tuple[int, int]]] = {}
        for request in requests:
            leg, body = request.leg, request.body
            count = (leg.b - leg.a) * spec.dim
            rows = np.frombuffer(body, spec.dtype, count).reshape(-1, spec.dim)
            order = None if leg.call.grouping is None else leg.call.grouping.order
            leg.call.out[slice(leg.a, leg.b) if order is None else order[leg.a : leg.b]] = rows
            for shard, ops in decode_json(bytes(body[padded(rows.nbytes) :])).items():
                shards[int(shard)] = {origin: (clock, number) for origin, clock, number in ops}
        return cls(shards)


class Pending:
    """An asynchronous call on its way, as ``pull_async`` and its like return it.

    Parameters
    ----------
    client, verb, requests, value
        Who asked, for what, the requests to servers, and the result or a function that makes it.

    Examples
    --------
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     _ = ps.table("w", rows=2)
    ...     pending = ps.client().push_pull_async("w", [0, 1], [1.0, 2.0])
    ...     pending.result()
    array([1., 2.], dtype=float32)
    >>> cluster.close()
    """

    def __init__(self, client: Client, verb: str, requests: list[Request], value: Any = None):
        self._client, self._verb, self._requests, self._value = client, verb, requests, value
        self._seen = False  # somebody has asked for the result, and was told of an error

    @property
    def done(self) -> bool:
        """Whether all servers have answered, as far as it has been read."""
        return all(request.done for request in self._requests)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer; for a pull, the values.

        Parameters
        ----------
        timeout : float, optional
            Seconds; `dps.timeouts.request` by default.

        Raises
        ------
        DPSError
            What a server answered, or that it is gone or did not answer in time.
        """
        client = self._client
        self._seen = True
        with client._lock:
            began = client._now()
            client.meter.mark = began
            try:
                client._complete(self, began + (client._patience if timeout is None else timeout))
                if client._open and client._open[0] is self:
                    client._open.popleft()
            except (UnknownTableError, DataLostError):
                client.forget_routes()  # dropped or lost, and perhaps made anew, since we asked
                raise
            finally:
                client.meter.lap(self._verb, client._now())
        if callable(self._value):
            self._value = self._value()
        return self._value
