"""Where a model trains: a cluster or a parameter server, also by its address in another process or in a Dask task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dask.distributed import Client as DaskClient
from dask.distributed import get_client, get_worker, rejoin, secede

import dps
from dps import spark
from dps.errors import InputTypeError
from dps.models.kept_servers import kept_servers, new_servers
from dps.models.types import ClusterLike, Features
from dps.spark import is_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import TypeIs

__all__ = ["Address", "address_of", "aside", "dask_of", "is_session", "serving"]


class Address(NamedTuple):
    """The address of a parameter server. An estimator's `client` becomes one when the estimator is pickled."""

    scheduler: str
    name: str

    def __repr__(self) -> str:
        return f"<parameter server {self.name!r} in {self.scheduler}>"


def address_of(client: ClusterLike) -> str | Address | None:
    """The address that replaces `client` in another process. It holds no connection and no secret.

    The other process needs its own credentials: for a cluster with TLS, those in its Dask configuration.
    """
    if client is None or isinstance(client, (str, Address)):
        return client
    if isinstance(client, dps.ParameterServer):
        return Address(_scheduler_of(client.dask_client), client.name)
    if isinstance(client, DaskClient):
        return _scheduler_of(client)
    address = getattr(client, "scheduler_address", None)
    if isinstance(address, str) and address:
        return address
    if is_session(client):
        return None  # the other process uses its own session, if it has one
    raise InputTypeError(f"a {type(client).__name__} cannot be where a model trains: pass a Dask client or its address")


def _scheduler_of(client: DaskClient) -> str:
    return str(client.scheduler.address if client.scheduler is not None else client._start_arg)


def is_session(thing: object) -> TypeIs[SparkSession]:
    """Whether `thing` is a session of Spark; does not import pyspark."""
    return any(kind.__name__ == "SparkSession" and "pyspark" in kind.__module__ for kind in type(thing).__mro__)


def session_of(data: Features) -> SparkSession:
    from pyspark.sql import SparkSession

    return data.sparkSession if hasattr(data, "mapInArrow") else SparkSession.builder.getOrCreate()


def dask_of(scheduler: str | None) -> DaskClient | str | None:
    """The argument of `dps.ParameterServer` for this address: in a task of that cluster, the worker's own client."""
    try:
        here = get_worker().scheduler.address
    except ValueError:  # no task
        return scheduler
    return get_client() if scheduler in (None, here) else scheduler


def _in_task() -> bool:
    """Whether a Dask task runs this. The worker of a task may end at any time, so that no servers are kept for it."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside a Dask task, give the task's thread back for the duration, because the trainers need threads."""
    try:
        secede()
    except (ValueError, KeyError, AttributeError):  # no task, a task that has seceded already, or no thread of the pool
        yield
        return
    try:
        yield
    finally:
        rejoin()


@contextlib.contextmanager
def serving(
    client: ClusterLike, X: Features, servers: int, detaches: Callable[[], bool] = lambda: True
) -> Iterator[tuple[dps.ParameterServer, bool]]:
    """(parameter server, whether it was started for this fit and ends with it, or is kept for the next fit).

    A parameter server whose address `client` is, is detached from in the end, if `detaches()`.
    """
    if isinstance(client, dps.ParameterServer):
        yield client, False
        return
    if isinstance(client, Address):
        ps = dps.ParameterServer.attach(dask_of(client.scheduler), client.name)
        try:
            yield ps, False
        finally:
            if detaches():
                ps.detach()
        return
    started: contextlib.AbstractContextManager[dps.ParameterServer]
    if is_spark(X) and (client is None or is_session(client)):
        started = spark.start(session_of(X), servers=servers)
    elif is_session(client):
        raise InputTypeError(f"with a Spark session, X is an RDD or a DataFrame of Spark, not {type(X).__name__}")
    else:
        where = dask_of(client) if client is None or isinstance(client, str) else client
        where = DaskClient.current() if where is None else where
        started = new_servers(where, servers) if _in_task() else kept_servers(where, servers)
    with started as ps:
        yield ps, True
