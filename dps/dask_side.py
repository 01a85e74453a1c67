"""Small facts about the Dask process we are in: its host, its TLS. Everything here is public Dask."""

from __future__ import annotations

import ssl
from typing import Any

from distributed import Security
from distributed.comm import get_address_host

__all__ = ["connecting_tls", "host_of", "linking_tls", "listening_tls", "own_security"]


def host_of(address: str) -> str:
    """The host in a Dask address; the loopback for in-process ones.

    >>> host_of("tcp://127.0.0.1:8786")
    '127.0.0.1'
    """
    return "127.0.0.1" if address.startswith("inproc://") else get_address_host(address)


def listening_tls(server: Any) -> ssl.SSLContext | None:
    """The TLS context of a Dask worker or scheduler for listening; None where its cluster speaks plain TCP."""
    if not server.address.startswith("tls://"):
        return None
    role = "scheduler" if hasattr(server, "workers") else "worker"
    return server.security.get_listen_args(role)["ssl_context"]


def linking_tls(server: Any) -> ssl.SSLContext | None:
    """The TLS context of a Dask worker for connecting to other endpoints; None where its cluster speaks plain TCP."""
    if not server.address.startswith("tls://"):
        return None
    return server.security.get_connection_args("worker")["ssl_context"]


def connecting_tls(security: Any) -> ssl.SSLContext | None:
    """The TLS context for connecting, from a `distributed.security.Security`; None where there is none."""
    if security is None:
        return None
    return security.get_connection_args("client").get("ssl_context")


def own_security(scheduler: Any) -> Any:
    """The `distributed.security.Security` with which a scheduler's process may be a client of itself."""
    given = scheduler.security
    if not scheduler.address.startswith("tls://") or given.tls_client_cert:
        return given
    return Security(
        tls_ca_file=given.tls_ca_file,
        tls_client_cert=given.tls_scheduler_cert,
        tls_client_key=given.tls_scheduler_key,
        require_encryption=True,
    )
