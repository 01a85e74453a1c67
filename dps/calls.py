"""Ticket: the right to call a parameter server. Pending: a call on its way."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dps.errors import UnknownTableError
from dps.wire.channel import Request

if TYPE_CHECKING:
    from dps.client import Client

__all__ = ["Pending", "Ticket"]


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
        began = time.perf_counter()
        deadline = time.monotonic() + (self._client._patience if timeout is None else timeout)
        self._seen = True
        with self._client._lock:
            try:
                for request in self._requests:
                    request.result(deadline)
            except UnknownTableError:
                self._client.forget_routes()  # dropped, and perhaps made anew, since we asked
                raise
        self._client.seconds[self._verb] += time.perf_counter() - began
        if callable(self._value):
            self._value = self._value()
        return self._value
