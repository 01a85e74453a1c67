"""Where a model trains: a cluster or a parameter server, by its address in another process, and inside a Dask task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from dask.distributed import Client as DaskClient
from dask.distributed import get_client, get_worker, rejoin, secede

import dps
from dps.errors import InputTypeError
from dps.models.spark_pieces import is_spark

__all__ = ["Address", "address_of", "aside", "dask_of"]


class Address(NamedTuple):
    """Where a parameter server is: what an estimator's `client` becomes when the estimator is pickled."""

    scheduler: str
    name: str

    def __repr__(self) -> str:
        return f"<parameter server {self.name!r} in {self.scheduler}>"


def address_of(client: Any) -> str | Address | None:
    """What stands for `client` in another process: it holds no connection and no secret.

    Credentials do not travel: for a cluster with TLS the other process has its own in Dask's configuration.

    Examples
    --------
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         address_of(cluster) == cluster.scheduler_address, address_of(ps).name, address_of(None)
    (True, 'dps', None)
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
    if is_spark(client):
        return None  # the session that the other process has, if any
    raise InputTypeError(f"a {type(client).__name__} cannot be where a model trains: pass a Dask client or its address")


def _scheduler_of(client: DaskClient) -> str:
    return str(client.scheduler.address if client.scheduler is not None else client._start_arg)


def dask_of(scheduler: str | None) -> DaskClient | str | None:
    """What `dps.ParameterServer` takes for this address; in a task of that cluster, the worker's own client."""
    try:
        here = get_worker().scheduler.address
    except ValueError:  # no task
        return scheduler
    return get_client() if scheduler in (None, here) else scheduler


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside a Dask task, give its thread back for as long as this lasts: the trainers need threads."""
    try:
        secede()
    except (ValueError, KeyError, AttributeError):  # no task, a task that is aside already, no thread of the pool
        yield
        return
    try:
        yield
    finally:
        rejoin()
