"""Servers that a fit has started, kept for some seconds for the next fit in the same place.

The place is what the estimator was given: a Dask client, a cluster, or the address of a scheduler. A search over
parameters fits one model after the other, and to start servers takes longer than a small fit. So the servers of a fit
end only when `dps.timeouts.reuse` has passed without another fit that asks for as many servers, when the Dask client or
the cluster is closed, or when the process ends. What a fit has made on them is dropped as soon as it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import dask
from dask.distributed import Client as DaskClient
from dask.utils import parse_timedelta
from distributed.deploy import Cluster

import dps

__all__ = ["close_kept", "kept_servers", "new_servers"]

POLL_SECONDS = 0.2  # between two checks whether the Dask client has been closed
CONNECT_SECONDS = 2.0  # the longest wait for a scheduler whose Dask client has been closed

# In a cluster and at an address, the parameter server has a Dask client of its own, which ends with it.
Place: TypeAlias = DaskClient | Cluster | str


class Kept(NamedTuple):
    """Servers that wait for the next fit."""

    ps: dps.ParameterServer
    address: str  # where the scheduler listens
    taken: threading.Event  # set when a fit takes the servers, or when they are closed


_kept: dict[tuple[Place, int], Kept] = {}  # by the place and the number of servers
_lock = threading.Lock()


def new_servers(place: Place, servers: int) -> dps.ParameterServer:
    """A parameter server for one fit, of a name that no other has."""
    return dps.ParameterServer(place, servers=servers, name=f"fit-{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def kept_servers(place: Place, servers: int) -> Iterator[dps.ParameterServer]:
    """A parameter server for one fit: that of the fit before, or a new one. If the fit fails, its servers end."""
    ps = _taken(place, servers)
    if ps is None:
        ps = new_servers(place, servers)
    try:
        yield ps
        seconds = parse_timedelta(dask.config.get("dps.timeouts.reuse"))
        if seconds > 0:
            for name in ps.tables():
                ps.drop_table(name)
    except BaseException:
        ps.close()
        raise
    if seconds > 0:
        _keep(place, servers, ps, seconds)
    else:
        ps.close()


def close_kept() -> None:
    """Close all servers that wait for a fit, at the end of the process or of a test."""
    with _lock:
        kept = list(_kept.values())
        _kept.clear()
    for each in kept:
        each.taken.set()
        _close(each)


atexit.register(close_kept)


def _taken(place: Place, servers: int) -> dps.ParameterServer | None:
    """The servers that are kept for this place, if they still work."""
    with _lock:
        kept = _kept.pop((place, servers), None)
    if kept is None:
        return None
    kept.taken.set()
    with contextlib.suppress(dps.DPSError, OSError):
        if kept.ps.servers() >= servers:
            return dps.ParameterServer.over(kept.ps.connection)  # without the arrays of the fit before
    _close(kept)
    return None


def _keep(place: Place, servers: int, ps: dps.ParameterServer, seconds: float) -> None:
    """Keep servers for the next fit; close them if others wait already, because another thread has fitted, too."""
    kept, key = Kept(ps, ps.connection.scheduler_address(), threading.Event()), (place, servers)
    with _lock:
        full = key in _kept
        if not full:
            _kept[key] = kept
    if full:
        _close(kept)
    else:
        threading.Thread(target=_watch, args=(key, kept, seconds), name="dps-kept-servers", daemon=True).start()


def _watch(key: tuple[Place, int], kept: Kept, seconds: float) -> None:
    """Close the servers once their time is over or their Dask client is closed, unless a fit takes them before."""
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        if kept.taken.wait(min(POLL_SECONDS, seconds)):
            return
        if kept.ps.dask_client.status != "running":
            break
    with _lock:
        mine = _kept.get(key) is kept
        if mine:
            del _kept[key]
    if mine:
        _close(kept)


def _close(kept: Kept) -> None:
    """End the servers, also where their Dask client or their cluster has been closed."""
    with contextlib.suppress(dps.DPSError, OSError, RuntimeError, ValueError):
        try:
            socket.create_connection(kept.ps.ticket.controller, CONNECT_SECONDS).close()
        except OSError:  # the cluster has closed all its parameter servers
            kept.ps.detach()
            return
        if kept.ps.dask_client.status == "running":
            kept.ps.close()
            return
        kept.ps.detach()
        options = {"security": kept.ps.dask_client.security, "set_as_default": False, "timeout": CONNECT_SECONDS}
        with DaskClient(kept.address, **options) as another:
            dps.ParameterServer.attach(another, kept.ps.name).close()
