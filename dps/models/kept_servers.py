"""Servers that a fit has started, kept for some seconds for the next fit of the same Dask client.

A search over parameters fits one model after the other, and to start servers takes longer than a small fit. So the
servers of a fit end only when `dps.timeouts.reuse` has passed without another fit that asks for as many servers, when
the Dask client is closed, or when the process ends. What a fit has made on them is dropped as soon as it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import dask
from dask.distributed import Client as DaskClient
from dask.utils import parse_timedelta

import dps

__all__ = ["close_kept", "kept_servers"]

POLL_SECONDS = 0.2  # between two checks whether the Dask client has been closed
CONNECT_SECONDS = 2.0  # the longest wait for a scheduler whose Dask client has been closed


class Kept(NamedTuple):
    """Servers that wait for the next fit."""

    ps: dps.ParameterServer
    client: DaskClient
    address: str  # where the client's scheduler listens
    taken: threading.Event  # set when a fit takes the servers, or when they are closed


_kept: dict[tuple[int, int], Kept] = {}  # by the identity of the Dask client and the number of servers
_lock = threading.Lock()


@contextlib.contextmanager
def kept_servers(client: DaskClient, servers: int) -> Iterator[dps.ParameterServer]:
    """A parameter server for one fit: that of the fit before, or a new one. If the fit fails, its servers end."""
    ps = _taken(client, servers)
    if ps is None:
        ps = dps.ParameterServer(client, servers=servers, name=f"fit-{uuid.uuid4().hex[:8]}")
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
        _keep(client, servers, ps, seconds)
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


def _taken(client: DaskClient, servers: int) -> dps.ParameterServer | None:
    """The servers that are kept for this client, if they still work."""
    with _lock:
        kept = _kept.pop((id(client), servers), None)
    if kept is None:
        return None
    kept.taken.set()
    with contextlib.suppress(dps.DPSError, OSError):
        if kept.client is client and kept.ps.servers() >= servers:
            return dps.ParameterServer.over(kept.ps.connection)  # without the arrays of the fit before
    _close(kept)
    return None


def _keep(client: DaskClient, servers: int, ps: dps.ParameterServer, seconds: float) -> None:
    """Keep servers for the next fit; close them if others wait already, because another thread has fitted, too."""
    assert client.scheduler is not None, "the fit was over it"
    kept = Kept(ps, client, str(client.scheduler.address), threading.Event())
    key = id(client), servers
    with _lock:
        full = key in _kept
        if not full:
            _kept[key] = kept
    if full:
        _close(kept)
    else:
        threading.Thread(target=_watch, args=(key, kept, seconds), name="dps-kept-servers", daemon=True).start()


def _watch(key: tuple[int, int], kept: Kept, seconds: float) -> None:
    """Close the servers once their time is over or their Dask client is closed, unless a fit takes them before."""
    for _ in range(max(1, round(seconds / POLL_SECONDS))):
        if kept.taken.wait(min(POLL_SECONDS, seconds)):
            return
        if kept.client.status != "running":
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
        if kept.client.status == "running":
            kept.ps.close()
            return
        kept.ps.detach()
        options = {"security": kept.client.security, "set_as_default": False, "timeout": CONNECT_SECONDS}
        with DaskClient(kept.address, **options) as another:
            dps.ParameterServer.attach(another, kept.ps.name).close()
