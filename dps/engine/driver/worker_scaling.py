"""Workers for servers that a cluster starts and ends, as the load asks for them.

The controller decides how many servers there are, and says how many workers there should be for them
(`coordination/autoscaling.py`). It cannot start any: the cluster object can, which lives in a program, as with Dask's
own ``cluster.adapt``. So a thread of that program asks the controller at the interval at which this decides, and tells
the cluster. Nothing else relies on the thread: without it servers come and go on the workers that there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from dps.engine.telemetry.snapshot import AdaptStatus, Status
from dps.errors import InputError, InputTypeError

__all__ = ["ScalableCluster", "ServerWorkers", "adapt_status", "check_cluster"]

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0  # for which `close` waits for a call of the cluster that is under way


@runtime_checkable
class ScalableCluster(Protocol):
    """A cluster that can change the number of its workers for servers, such as `dps.LocalCluster`."""

    def scale_servers(self, n: int, timeout: float) -> object:
        """Have `n` workers for servers; of fewer, those stay that have a server, whatever `n` is.

        For `timeout` seconds it may wait until enough workers have no server.
        """
        ...


def check_cluster(cluster: object) -> None:
    """Raise InputTypeError or InputError if `cluster` cannot start and end workers for servers; None is no cluster."""
    if cluster is not None and not isinstance(cluster, ScalableCluster):
        raise InputTypeError(
            f"cluster={cluster!r} has no method scale_servers(n, timeout), which starts and ends workers for servers: "
            "give a dps.LocalCluster, a dps.YarnCluster, or an object with this method"
        )
    if getattr(cluster, "asynchronous", False):
        raise InputError(f"cluster={cluster!r} is asynchronous: a thread tells it, so it needs a loop of its own")


def adapt_status(call: Callable[[str], bytes]) -> AdaptStatus | None:
    """The last decision of the controller about the number of servers; None if the number is fixed (`ps.scale`).

    `call` asks the controller, as `DriverConnection.call` does.
    """
    return msgspec.msgpack.decode(call("snapshot"), type=Status).adapt  # the verb "status" would ask all servers, too


class ServerWorkers:
    """Has a cluster follow what the controller says, in a thread. At first there is no cluster."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def follow(self, cluster: ScalableCluster | None, ask: Callable[[], AdaptStatus | None], interval: float) -> None:
        """Have this cluster start and end workers from now on, in place of another one; None: no cluster.

        Parameters
        ----------
        cluster : ScalableCluster, optional
        ask : callable
            It returns the controller's last decision, or None if the number of servers is fixed; then the thread ends.
        interval : float
            Seconds between two questions.
        """
        self.close()
        if cluster is not None:
            self._closed = threading.Event()
            arguments = cluster, ask, interval, self._closed
            self._thread = threading.Thread(target=_follow, args=arguments, name="dps-server-workers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Start and end workers no more; those that there are stay."""
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(JOIN_SECONDS)


def _follow(
    cluster: ScalableCluster, ask: Callable[[], AdaptStatus | None], interval: float, closed: threading.Event
) -> None:
    failed, told = "", None
    while not closed.wait(interval):
        try:
            if (status := ask()) is None:
                return
            decision = status.workers, status.workers_wanted
            if closed.is_set() or status.workers_wanted is None or status.workers == status.workers_wanted:
                continue
            if decision != told:
                told = decision
                logger.info("workers for servers: %s -> %s; %s", *decision, status.text)
            cluster.scale_servers(status.workers_wanted, timeout=0)  # the next look tells it again
            failed = ""
        except Exception as error:  # any, because the cluster may be any object, and the scheduler may be gone
            if (why := f"{type(error).__name__}: {error}") != failed and not closed.is_set():  # each is logged once
                failed = why
                logger.warning("the number of workers for servers stays, and is tried again: %s", why)
