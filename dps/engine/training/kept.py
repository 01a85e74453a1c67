"""Data that this process has sent to workers, and sends again where a worker died with it.

Dask cannot make scattered data again. Nor do more copies help, because its Active Memory Manager drops all but one of
them within seconds. So the driver keeps the way to make a partition: a cut of the caller's array, which takes no
memory, and not the partition itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from distributed import Client, Future

from dps.engine.daskapi.workers import workers_of
from dps.engine.training.types import Partition
from dps.errors import TooFewWorkersError

__all__ = ["cannot_be_sent_again", "send", "send_again", "send_mapped", "threads_outside_servers"]

Make: TypeAlias = Callable[[], Partition]

_makers: weakref.WeakKeyDictionary[Future, Make] = weakref.WeakKeyDictionary()


def threads_outside_servers(client: Client, role: Container[str]) -> dict[str, int]:
    """Address -> threads of each worker that is not for servers.

    Parameters
    ----------
    role : container of str
        Workers with servers, beside those that have the resource ``dps``.

    Raises
    ------
    TooFewWorkersError
        All workers are for servers.
    """
    workers = workers_of(client)
    threads = {
        worker: int(info["nthreads"])
        for worker, info in workers.items()
        if worker not in role and not info.get("resources", {}).get("dps")
    }
    if not threads:
        raise TooFewWorkersError(
            f"no worker is left for data in memory and its trainers: all {len(workers)} are for servers; add workers"
        )
    return threads


def send(client: Client, makers: Iterable[Make], workers: Iterable[str]) -> list[Future]:
    """Scatter what these functions return, in turn among the workers.

    Examples
    --------
    >>> from distributed import Client
    >>> with Client(processes=False, n_workers=1, dashboard_address=None) as client:
    ...     (future,) = send(client, [lambda: [1, 2]], client.nthreads())
    ...     future.result()
    [1, 2]
    """
    makers = list(makers)
    futures = client.scatter([make() for make in makers], workers=sorted(workers), hash=False)
    _makers.update(zip(futures, makers, strict=True))
    return futures


def send_mapped(client: Client, function: Callable, futures: Sequence[Future], *columns: Sequence) -> list[Future]:
    """As ``client.map(function, futures, *columns, pure=False)``, which computes on the workers.

    Where a result is lost together with the partition that it was made of, :func:`send_again` computes it here.
    """
    results = client.map(function, futures, *columns, pure=False)
    for result, future, *arguments in zip(results, futures, *columns, strict=True):
        if (make := _makers.get(future)) is not None:
            _makers[result] = functools.partial(_made, function, make, arguments)
    return results


def _made(function: Callable, make: Make, arguments: Sequence) -> Partition:
    return function(make(), *arguments)


def cannot_be_sent_again(futures: Iterable[Future]) -> list[Future]:
    """The futures whose partitions this process cannot make."""
    return [future for future in futures if future not in _makers]


def send_again(client: Client, futures: Iterable[Future], workers: Sequence[str]) -> None:
    """Make lost partitions and scatter them under the keys that they had, so that their futures are finished again.

    A partition stays lost where the worker that was to get it has gone meanwhile; its caller looks again.
    """
    for number, future in enumerate(futures):
        partition = _makers[future]()
        with contextlib.suppress(KeyError, OSError):  # of Dask, for an unknown worker and a broken connection
            client.scatter({future.key: partition}, workers=[workers[number % len(workers)]])
