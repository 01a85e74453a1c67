"""Small facts about Dask's processes: hosts, TLS, which dps is installed there. Everything here is public Dask."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from distributed import Client, Security
from distributed.comm import get_address_host
from distributed.versions import get_versions

from dps import config
from dps.errors import VersionMismatchError

__all__ = [
    "ASK",
    "ask_versions",
    "connecting_tls",
    "host_of",
    "linking_tls",
    "listening_tls",
    "own_security",
    "own_version",
    "same_versions",
    "version_in",
]

ASK = {"packages": ["dps"]}  # arguments of `versions`, which every Dask server answers, also one without dps
SHOWN = 3  # places of one version in a message


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


def own_version() -> str | None:
    """The dps that is installed here, as Dask tells it to others; None if it is only on the path."""
    return version_in(get_versions(**ASK))


def version_in(answer: Mapping[str, Any]) -> str | None:
    """The version of dps in an answer to `ASK`."""
    return answer["packages"].get("dps")


def ask_versions(client: Client, workers: list[str]) -> None:
    """Raise unless these workers, the scheduler and this client have one version of dps.

    Who does not answer in time is left out: whatever comes next will say why.
    """
    patience = config.seconds("connect")
    found = {"this client": own_version()}
    try:
        scheduler: Any = client.scheduler
        answer = client.sync(scheduler.versions, **ASK, callback_timeout=patience)
        found[f"the scheduler {scheduler.address}"] = version_in(answer)
        if workers:
            msg = {"op": "versions", **ASK}
            answers = client.sync(
                scheduler.broadcast, msg=msg, workers=workers, on_error="ignore", callback_timeout=patience
            )
            found |= {f"worker {worker}": version_in(answer) for worker, answer in answers.items()}
    except (OSError, TimeoutError):
        pass
    same_versions(found)


def same_versions(found: Mapping[str, str | None]) -> None:
    """Raise unless there is one version of dps; those that are not known (None) are passed over.

    >>> same_versions({"this client": "0.2.0", "worker tcp://10.0.0.7:4711": "0.2.0", "another": None})
    >>> same_versions({"this client": "0.2.0", "worker tcp://10.0.0.7:4711": "0.1.0"})
    Traceback (most recent call last):
        ...
    dps.errors.VersionMismatchError: dps is not the same everywhere: 0.1.0 on worker tcp://10.0.0.7:4711; 0.2.0 on this
    client. Install one version on all of them
    """
    places: dict[str, list[str]] = {}
    for where, version in found.items():
        if version is not None:
            places.setdefault(version, []).append(where)
    if len(places) < 2:
        return
    told = (
        f"{version} on {', '.join(where[:SHOWN])}" + (f" and {len(where) - SHOWN} more" if len(where) > SHOWN else "")
        for version, where in sorted(places.items())
    )
    raise VersionMismatchError(f"dps is not the same everywhere: {'; '.join(told)}. Install one version on all of them")
