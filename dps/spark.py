"""dps on Spark: a parameter server beside a Spark application, and training in its stages.

``ps.run(function, rdd_or_dataframe)`` needs nothing of this; see :meth:`dps.ParameterServer.run`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

from dps.deploy.local import LocalCluster
from dps.errors import DPSError, InputError, InputTypeError
from dps.parameter_server import ParameterServer
from dps.training import spark

__all__ = ["finished", "map_partitions_with_ps", "read_with", "start"]

LOOK = 0.5  # seconds between two looks whether the application has ended
RUN = "_dps_run"  # where a result has its run


def map_partitions_with_ps(
    data: Any,
    function: Callable[..., Any],
    ps: ParameterServer,
    staleness: float = math.inf,
    *,
    schema: Any = None,
    trainers: int | None = None,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """As Spark's ``mapPartitions``, with a parameter server: lazy, in ordinary stages.

    A partition's trainer comes when Spark schedules its task, so trainers wait for nobody. Whatever Spark computes
    again (lost executors, a second action without a cache, speculative copies) changes the tables once: pushes carry
    their place in the function's program, and those at a place that was reached before are repeats. For that the
    function is to make the same pushes in the same order whenever it sees the partition, and the partition's records
    are to come in the same order (after a shuffle: sort them, or cache or checkpoint before).

    Parameters
    ----------
    data : RDD or DataFrame
    function : callable
        Called as ``function(trainer, iterator)``, of records or pandas DataFrames; gives an iterable of the same, or
        None for nothing.
    ps : ParameterServer
    staleness : math.inf
        Nothing else is possible here: with a bound, trainers wait for others, that Spark might begin only when these
        are done. ``ps.run(function, data, staleness=...)`` runs all at once.
    schema : pyspark.sql.types.StructType or str, optional
        Of what the function gives for a DataFrame.
    trainers : int, optional
        With Spark Connect: how many partitions there are, at most.
    args, kwargs
        More arguments for `function`.

    Returns
    -------
    RDD or DataFrame
        Its partitions are not to be merged by ``coalesce`` without a shuffle. When it is no longer needed, tell
        :func:`finished`.

    Examples
    --------
    >>> def count(trainer, numbers):
    ...     for number in numbers:
    ...         trainer.push("count", [number % 2], 1)
    ...         yield number
    >>> def even_and_odd(spark):
    ...     with dps.spark.start(spark, servers=1) as ps:
    ...         ps.table("count", rows=2, dtype="int64")
    ...         numbers = spark.sparkContext.range(10, numSlices=3)
    ...         counted = dps.spark.map_partitions_with_ps(numbers, count, ps)
    ...         return counted.sum(), counted.count(), ps.client().pull("count")
    >>> even_and_odd(SparkSession.builder.getOrCreate())  # doctest: +SKIP
    (45, 10, array([5, 5]))
    """
    if not spark.is_spark(data) or isinstance(data, spark.ReadWith):
        raise InputTypeError(f"an RDD or a DataFrame of Spark's, not a {type(data).__name__}")
    if staleness != math.inf:
        raise InputError(
            f"staleness {staleness!r} in an ordinary stage: its trainers would wait for others that Spark has not "
            f"begun; use ps.run(function, data, staleness={staleness!r}), which runs all at once"
        )
    result, run = spark.elastic(ps._call, ps.ticket, data, function, schema, trainers, args, kwargs or {})
    setattr(result, RUN, run)
    return result


def read_with(data: Any, function: Callable[..., Any]) -> Any:
    """Data for :meth:`dps.ParameterServer.run` whose partitions are what `function` makes of them.

    It is called on the executors as records or batches arrive, so that they need not all be in memory, and neither
    lists nor pandas frames are made: columns of lists are quick to read so.

    Parameters
    ----------
    data : RDD or DataFrame
    function : callable
        Called as ``function(number of the partition, iterator)``, of records or of ``pyarrow.RecordBatch``. Where it
        raises, Spark takes it for an error of the data, and runs the stage again.

    Returns
    -------
    object
        For ``ps.run(train, ...)``; `train` is given a list of what the function returned.

    Examples
    --------
    >>> def longest(number, batches):
    ...     return max((batch["words"].value_lengths().to_numpy().max() for batch in batches if len(batch)), default=0)
    >>> def train_on(ps, frame, train):
    ...     return ps.run(train, dps.spark.read_with(frame, longest), staleness=1)
    """
    if not spark.is_spark(data) or isinstance(data, spark.ReadWith):
        raise InputTypeError(f"an RDD or a DataFrame of Spark's, not a {type(data).__name__}")
    return spark.ReadWith(data, function)


def finished(data: Any) -> None:
    """Say that a result of :func:`map_partitions_with_ps` will not be computed again: what is kept for it may go.

    Without this it is kept until the parameter server is closed: a few hundred bytes a partition.

    Parameters
    ----------
    data : RDD or DataFrame
        As it was returned. Results that were derived from it fail should they need it again.

    Examples
    --------
    >>> def total(numbers, ps):
    ...     counted = dps.spark.map_partitions_with_ps(numbers, count, ps)
    ...     result = counted.sum()
    ...     dps.spark.finished(counted)
    ...     return result
    """
    run = getattr(data, "__dict__", {}).get(RUN)
    if run is None:
        raise InputError("this is not a result of map_partitions_with_ps, as it was returned (of a cached one, too)")
    run.close()


def start(session: Any, servers: int = 2, *, host: str | None = None, **options: Any) -> ParameterServer:
    """A parameter server for a Spark application, on processes of the driver's machine.

    For applications that have no Dask cluster. (With one, ``dps.ParameterServer("tcp://scheduler:8786", servers=2)``
    is what a driver needs.)

    Parameters
    ----------
    session : pyspark.sql.SparkSession
    servers : int
        How many server processes.
    host : str, optional
        The address of this machine that executors can reach; by default that of Spark's driver
        (``spark.driver.host``).
    **options
        As for :class:`dps.ParameterServer`: ``copies``, ``name``, ``timeout``.

    Returns
    -------
    ParameterServer
        Closed at the end of a ``with`` block, by :meth:`dps.ParameterServer.close`, and within seconds after
        ``spark.stop()``: that is looked for by a thread.

    Examples
    --------
    >>> def train_on(spark, rdd, function):
    ...     with dps.spark.start(spark, servers=2) as ps:
    ...         ps.table("w", optimizer=dps.SGD(0.1))
    ...         return ps.run(function, rdd, staleness=1)
    """
    return Embedded(session, servers, host, options)


class Embedded(ParameterServer):
    """A parameter server with a Dask cluster of its own."""

    def __init__(self, session: Any, servers: int, host: str | None, options: dict[str, Any]):
        if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
            raise InputError(f"servers is a whole number from 1, not {servers!r}")
        host = host or session.conf.get("spark.driver.host", None) or "127.0.0.1"
        self._cluster = LocalCluster(servers=servers, trainers=0, host=host, dashboard_address=None)
        self._over = threading.Event()
        try:
            super().__init__(self._cluster, servers, **options)
        except BaseException:
            self._cluster.close()
            raise
        watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), session, self._over), name="dps-spark-watch", daemon=True
        )
        watch.start()

    def _let_go(self) -> None:
        super()._let_go()
        self._over.set()
        self._cluster.close()


def _watch(ps: weakref.ref[Embedded], session: Any, over: threading.Event) -> None:
    """Close the parameter server once its application has ended."""
    while not over.wait(LOOK):
        if _stopped(session):
            server = ps()
            if server is not None:
                with contextlib.suppress(DPSError):
                    server.close()
            return


def _stopped(session: Any) -> bool:
    if ".connect." in type(session).__module__:
        return bool(session.is_stopped)
    return session.sparkContext._jsc is None
