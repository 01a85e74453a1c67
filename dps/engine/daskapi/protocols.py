"""What dps uses of Dask's scheduler, its workers and its tasks: the contracts between Dask and the controller.

Dask's own classes satisfy them. `cordon.py` uses more of the scheduler, and says what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dask.typing import Key
from distributed import Security
from distributed.core import Status

if TYPE_CHECKING:
    from distributed.core import PooledRPCCall
    from distributed.http.routing import RoutingApplication

__all__ = ["DaskProcess", "DaskScheduler", "DaskTask", "DaskWorker"]


class DaskProcess(Protocol):
    """A Dask scheduler or worker, in its own process."""

    @property
    def address(self) -> str: ...

    @property
    def security(self) -> Security: ...


class DaskTask(Protocol):
    """A task as the scheduler has it (`TaskState`)."""

    @property
    def key(self) -> Key: ...

    @property
    def state(self) -> str:
        """ "processing", "memory", "no-worker", ..."""

    @property
    def run_id(self) -> int | None:
        """The number of its latest assignment to a worker."""

    @property
    def processing_on(self) -> object | None:
        """The worker to which it is assigned."""


class DaskWorker(Protocol):
    """A worker as the scheduler has it (`WorkerState`)."""

    @property
    def address(self) -> str: ...

    @property
    def name(self) -> object: ...

    @property
    def nthreads(self) -> int: ...

    @property
    def memory_limit(self) -> int:
        """In bytes; 0: none."""

    @property
    def status(self) -> Status: ...

    @property
    def resources(self) -> Mapping[str, float]: ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the worker told the scheduler when it joined: the values of its `startup_information`, by name."""

    @property
    def processing(self) -> Collection[DaskTask]:
        """The tasks that are assigned to it."""

    @property
    def long_running(self) -> Collection[DaskTask]:
        """Those of its tasks that have seceded, and so given their threads back."""


class DaskScheduler(DaskProcess, Protocol):
    """What the controller reads of the cluster, and has Dask do for it."""

    @property
    def http_application(self) -> RoutingApplication:
        """What answers on HTTP."""

    @property
    def workers(self) -> Mapping[str, DaskWorker]:
        """By address."""

    @property
    def tasks(self) -> Mapping[Key, DaskTask]: ...

    @property
    def clients(self) -> Mapping[str, object]:
        """By their ids."""

    @property
    def handlers(self) -> dict[str, Callable[..., object]]:
        """What it answers, by the name of the request."""

    @property
    def rpc(self) -> Callable[[str], PooledRPCCall]:
        """Given a worker's address, what to call its handlers with."""

    def client_desires_keys(self, keys: Collection[Key], client: str) -> None:
        """Keep these tasks' results for that client."""

    def client_releases_keys(self, keys: Collection[Key], client: str, stimulus_id: str | None = None) -> None:
        """That client needs these results no more."""

    def remove_client(self, client: str, stimulus_id: str | None = None) -> None:
        """That client has gone."""

    @property
    def time_started(self) -> float:
        """Seconds since 1970."""

    def log_event(self, topic: str, msg: object) -> None:
        """Put an event into the scheduler's log."""
