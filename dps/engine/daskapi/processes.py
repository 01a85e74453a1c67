"""Facts about Dask's processes: hosts, TLS, the version of dps. Only public interfaces of Dask are used here."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from distributed import Client, Security
from distributed.comm import get_address_host
from distributed.versions import get_versions

from dps import config
from dps.engine.daskapi.protocols import DaskProcess, DaskScheduler
from dps.errors import VersionMismatchError

__all__ = [
    "VERSIONS_REQUEST",
    "check_versions",
    "check_versions_of",
    "connecting_tls",
    "host_of",
    "linking_tls",
    "listening_tls",
    "own_security",
    "own_version",
    "trainer_tls",
    "version_in",
]

# The arguments of Dask's request `versions`, which every Dask process answers, even one without dps.
VERSIONS_REQUEST = {"packages": ["dps"]}
# Number of places that a message names for each version.
MAX_PLACES_SHOWN = 3


def host_of(address: str) -> str:
    """The host in a Dask address; the loopback for in-process ones.

    >>> host_of("tcp://127.0.0.1:8786")
    '127.0.0.1'
    """
    return "127.0.0.1" if address.startswith("inproc://") else get_address_host(address)


def listening_tls(server: DaskProcess) -> ssl.SSLContext | None:
    """The TLS context of a Dask worker or scheduler for listening; None where its cluster speaks plain TCP."""
    if not server.address.startswith("tls://"):
        return None
    role = "scheduler" if hasattr(server, "workers") else "worker"
    return server.security.get_listen_args(role)["ssl_context"]


def linking_tls(server: DaskProcess) -> ssl.SSLContext | None:
    """The TLS context of a Dask worker for connecting to other endpoints; None where its cluster speaks plain TCP."""
    if not server.address.startswith("tls://"):
        return None
    return server.security.get_connection_args("worker")["ssl_context"]


def connecting_tls(security: Security | None) -> ssl.SSLContext | None:
    """The TLS context for connecting, from a `distributed.security.Security`; None where there is none."""
    if security is None:
        return None
    return security.get_connection_args("client").get("ssl_context")


def trainer_tls(security: Security | None) -> ssl.SSLContext | None:
    """The TLS context with which a client of a cluster listens to other clients; None where there is no TLS.

    It is made of the client's certificate, because a trainer may run where there is no Dask worker.
    """
    if security is None:
        return None
    return security.get_listen_args("client").get("ssl_context")


def own_security(scheduler: DaskScheduler) -> Security:
    """The `distributed.security.Security` with which a scheduler's process may be a client of itself."""
    security: Any = scheduler.security  # its attributes have no types
    if not scheduler.address.startswith("tls://") or security.tls_client_cert:
        return security
    return Security(
        tls_ca_file=security.tls_ca_file,
        tls_client_cert=security.tls_scheduler_cert,
        tls_client_key=security.tls_scheduler_key,
        require_encryption=True,
    )


def own_version() -> str | None:
    """The version of dps in this process, as Dask reports it; None if dps is importable but not installed."""
    return version_in(get_versions(**VERSIONS_REQUEST))


def version_in(answer: Mapping[str, Mapping[str, str | None]]) -> str | None:
    """The version of dps in an answer to `VERSIONS_REQUEST`; None if dps is not installed there."""
    return answer["packages"].get("dps")


def check_versions_of(client: Client, workers: list[str]) -> None:
    """Raise unless these workers, the scheduler and this client have the same version of dps.

    A process that does not answer in time is left out, because the next request to it will say why.
    """
    patience = config.seconds("connect")
    versions = {"this client": own_version()}
    try:
        scheduler = client.scheduler
        assert scheduler is not None, "the client is connected"
        answer = client.sync(scheduler.versions, **VERSIONS_REQUEST, callback_timeout=patience)
        versions[f"the scheduler {scheduler.address}"] = version_in(answer)
        if workers:
            msg = {"op": "versions", **VERSIONS_REQUEST}
            answers = client.sync(
                scheduler.broadcast, msg=msg, workers=workers, on_error="ignore", callback_timeout=patience
            )
            versions |= {f"worker {worker}": version_in(answer) for worker, answer in answers.items()}
    except (OSError, TimeoutError):
        pass
    check_versions(versions)


def check_versions(versions: Mapping[str, str | None]) -> None:
    """Raise unless all places have the same version of dps. An unknown version (None) is ignored.

    >>> check_versions({"this client": "0.2.0", "worker tcp://10.0.0.7:4711": "0.2.0", "another": None})
    >>> check_versions({"this client": "0.2.0", "worker tcp://10.0.0.7:4711": "0.1.0"})
    Traceback (most recent call last):
        ...
    dps.errors.VersionMismatchError: dps is not the same everywhere: 0.1.0 on worker tcp://10.0.0.7:4711; 0.2.0 on this
    client. Install one version on all of them
    """
    places: dict[str, list[str]] = {}
    for place, version in versions.items():
        if version is not None:
            places.setdefault(version, []).append(place)
    if len(places) < 2:
        return
    texts = []
    for version, names in sorted(places.items()):
        more = len(names) - MAX_PLACES_SHOWN
        shown = ", ".join(names[:MAX_PLACES_SHOWN])
        texts.append(f"{version} on {shown}" + (f" and {more} more" if more > 0 else ""))
    where = "; ".join(texts)
    raise VersionMismatchError(f"dps is not the same everywhere: {where}. Install one version on all of them")
