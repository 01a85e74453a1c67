"""What Dask's scheduler says of its workers."""

from __future__ import annotations

from typing import Any

from distributed import Client

__all__ = ["workers_of"]


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """The scheduler's description of each worker, by address; not for asynchronous clients.

    ``client.scheduler_info`` keeps the scheduler's answer in the client and reads it there. A client asks by itself
    every two seconds, and for no worker. Where that answer comes in between, there seem to be no workers.
    """
    assert client.scheduler is not None, "the client was closed"
    workers: dict[str, dict[str, object]] = client.sync(client.scheduler.identity)["workers"]
    return workers
