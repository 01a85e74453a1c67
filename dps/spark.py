"""dps on Spark: a parameter server beside a Spark application, and training in its stages.

``ps.run(function, rdd_or_dataframe)`` does not need this module; see :meth:`dps.ParameterServer.run`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dps.engine.deploy.local import LocalCluster
from dps.engine.driver.parameter_server import ParameterServer
from dps.engine.training import spark
from dps.engine.training.data import ReadWith, is_spark
from dps.errors import DPSError, InputError, InputTypeError

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from dps.engine.training.trainer import Trainer

__all__ = [
    "end_run",
    "foreach_partition_with_ps",
    "get_or_create",
    "is_spark",
    "map_partitions_with_ps",
    "read_with",
    "start",
]

# Pause between two checks whether the Spark application has ended.
POLL_SECONDS = 0.5
# Attribute of an RDD or DataFrame: the run that computes it.
RUN_ATTRIBUTE = "_dps_run"

# Parameter servers by the id of their Spark application: see `get_or_create`.
_created: dict[str, ParameterServer] = {}
_creating = threading.Lock()


def map_partitions_with_ps(
    data: DataFrame | RDD,
    function: Callable[..., object],
    ps: ParameterServer,
    staleness: float = math.inf,
    *,
    schema: StructType | str | None = None,
    trainers: int | None = None,
    args: tuple = (),
    kwargs: dict[str, object] | None = None,
) -> DataFrame | RDD:
    """Apply a function to each partition, as Spark's ``mapPartitions`` does, with a trainer: lazy, in ordinary stages.

    A partition's trainer starts when Spark schedules its task, so a trainer waits for no other trainer. Spark may
    compute a partition again (after a lost executor, in a second action without a cache, as a speculative copy), and
    the tables still change once: each push carries its number among the trainer's pushes, and servers drop numbers that
    they have applied. So the function must make the same pushes in the same order each time it gets the partition, and
    the partition's records must come in the same order (after a shuffle: sort them, or cache or checkpoint before).

    Parameters
    ----------
    data : RDD or DataFrame
    function : callable
        Called as ``function(trainer, iterator)``, with an iterator of records or pandas DataFrames. It returns an
        iterable of the same kind, or None if it has no results.
    ps : ParameterServer
    staleness : math.inf
        No other value is possible: with a bound, trainers would wait for other trainers, which Spark may start only
        after these have ended. ``ps.run(function, data, staleness=...)`` runs all trainers at once.
    schema : pyspark.sql.types.StructType or str, optional
        The schema of the function's results for a DataFrame.
    trainers : int, optional
        With Spark Connect: the largest possible number of partitions.
    args, kwargs
        More arguments for `function`.

    Returns
    -------
    RDD or DataFrame
        Its partitions must not be merged by ``coalesce`` without a shuffle. Call :func:`end_run` when it is no longer
        needed.

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
    if not is_spark(data) or isinstance(data, ReadWith):
        raise InputTypeError(f"an RDD or a DataFrame of Spark's, not a {type(data).__name__}")
    if staleness != math.inf:
        raise InputError(
            f"staleness {staleness!r} in an ordinary stage: its trainers would wait for others that Spark has not "
            f"begun; use ps.run(function, data, staleness={staleness!r}), which runs all at once"
        )
    result, run = spark.elastic(ps.connection.call, ps.ticket, data, function, schema, trainers, args, kwargs or {})
    setattr(result, RUN_ATTRIBUTE, run)
    return result


def foreach_partition_with_ps(
    data: DataFrame | RDD,
    function: Callable[..., object],
    ps: ParameterServer,
    *,
    trainers: int | None = None,
    args: tuple = (),
    kwargs: dict[str, object] | None = None,
) -> None:
    """Call a function on each partition, as Spark's ``foreachPartition`` does, with a trainer. Pushes count once.

    A client that the function of an ordinary ``foreachPartition`` makes would push again when Spark runs its task
    again. Here the trainer is that of the partition, whichever task computes it: see :func:`map_partitions_with_ps`.

    Parameters
    ----------
    data : RDD or DataFrame
    function : callable
        Called as ``function(trainer, iterator)``, with an iterator of records or pandas DataFrames. What it returns is
        dropped.
    ps : ParameterServer
    trainers : int, optional
        With Spark Connect: the largest possible number of partitions.
    args, kwargs
        More arguments for `function`.

    Examples
    --------
    >>> def add_up(trainer, numbers):
    ...     for number in numbers:
    ...         trainer.push("sum", [0], number)
    >>> def sum_of(spark):
    ...     ps = dps.spark.get_or_create(spark)
    ...     ps.table("sum", rows=1)
    ...     dps.spark.foreach_partition_with_ps(spark.sparkContext.range(10), add_up, ps)
    ...     return ps.client().pull("sum")
    >>> sum_of(SparkSession.builder.getOrCreate())  # doctest: +SKIP
    array([45.], dtype=float32)
    """
    schema = "nothing boolean" if hasattr(data, "schema") else None
    arguments = (function, *args)
    called = map_partitions_with_ps(
        data, without_result, ps, schema=schema, trainers=trainers, args=arguments, kwargs=kwargs
    )
    try:
        called.count()
    finally:
        end_run(called)


def without_result(
    trainer: Trainer, records: object, function: Callable[..., object], *args: object, **kwargs: object
) -> None:
    """Call the function of :func:`foreach_partition_with_ps`, in a task of Spark's."""
    result = function(trainer, records, *args, **kwargs)
    if isinstance(result, Iterator):
        for _ in result:  # because a generator does nothing before
            pass


def read_with(data: DataFrame | RDD, function: Callable[..., object]) -> ReadWith:
    """Data for :meth:`dps.ParameterServer.run` with a function that makes each partition from its records or batches.

    Executors call the function while records or batches arrive. So these need not all be in memory, and dps makes
    neither lists nor pandas frames of them: the fast way to read columns of lists.

    Parameters
    ----------
    data : RDD or DataFrame
    function : callable
        Called as ``function(number of the partition, iterator)``, with an iterator of records or of
        ``pyarrow.RecordBatch``. If it raises, Spark treats that as an error of the data and runs the stage again.

    Returns
    -------
    object
        For ``ps.run(train, ...)``; `train` gets a list of the function's results.

    Examples
    --------
    >>> def longest(number, batches):
    ...     return max((batch["words"].value_lengths().to_numpy().max() for batch in batches if len(batch)), default=0)
    >>> def train_on(ps, frame, train):
    ...     return ps.run(train, dps.spark.read_with(frame, longest), staleness=1)
    """
    if not is_spark(data) or isinstance(data, ReadWith):
        raise InputTypeError(f"an RDD or a DataFrame of Spark's, not a {type(data).__name__}")
    return ReadWith(data, function)


def end_run(data: DataFrame | RDD) -> None:
    """Say that a result of :func:`map_partitions_with_ps` will not be computed again, so that dps can forget its run.

    Without this call, the servers keep a few hundred bytes for each partition until the parameter server is closed.

    Parameters
    ----------
    data : RDD or DataFrame
        The returned object itself. Results that derive from it fail if Spark computes it again.

    Examples
    --------
    >>> def total(numbers, ps):
    ...     counted = dps.spark.map_partitions_with_ps(numbers, count, ps)
    ...     result = counted.sum()
    ...     dps.spark.end_run(counted)
    ...     return result
    """
    run = getattr(data, "__dict__", {}).get(RUN_ATTRIBUTE)
    if run is None:
        raise InputError("this is not a result of map_partitions_with_ps, as it was returned (of a cached one, too)")
    run.close()


def get_or_create(session: SparkSession, servers: int = 2, **options: Any) -> ParameterServer:
    """The parameter server of a Spark application: the one that an earlier call has started, or a new one.

    So any cell of a notebook, and any function of a program, can ask for it. It is stopped with the application.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
        Any session of the application.
    servers : int
        The number of server processes, if it has to be started.
    **options
        As for :func:`start`, if it has to be started.

    Returns
    -------
    ParameterServer
        The same object until it is closed, by ``close()`` or with the application.

    Examples
    --------
    >>> def cell(spark):
    ...     ps = dps.spark.get_or_create(spark)
    ...     return ps.table("w", optimizer=dps.SGD(0.1), exist_ok=True)
    """
    application = _application(session)
    with _creating:
        ps = _created.get(application)
        if ps is None or ps.closed:
            ps = _created[application] = start(session, servers, **options)
        return ps


def _application(session: Any) -> str:
    """The id of the application; of Spark Connect, that of the session."""
    return str(session.session_id if ".connect." in type(session).__module__ else session.sparkContext.applicationId)


def start(session: SparkSession, servers: int = 2, *, host: str | None = None, **options: Any) -> ParameterServer:
    """Start a parameter server for a Spark application, in processes on the driver's machine.

    It is for applications without a Dask cluster. With a cluster, a driver uses
    ``dps.ParameterServer("tcp://scheduler:8786", servers=2)``.

    Parameters
    ----------
    session : pyspark.sql.SparkSession
    servers : int
        The number of server processes.
    host : str, optional
        The address of this machine that executors can reach; by default that of Spark's driver
        (``spark.driver.host``).
    **options
        As for :class:`dps.ParameterServer`: ``copies``, ``name``, ``timeout``.

    Returns
    -------
    ParameterServer
        It closes at the end of a ``with`` block, in :meth:`dps.ParameterServer.close`, and within seconds after
        ``spark.stop()``, because a thread checks for that.

    Examples
    --------
    >>> def train_on(spark, rdd, function):
    ...     with dps.spark.start(spark, servers=2) as ps:
    ...         ps.table("w", optimizer=dps.SGD(0.1))
    ...         return ps.run(function, rdd, staleness=1)
    """
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise InputError(f"servers is a whole number from 1, not {servers!r}")
    host = host or session.conf.get("spark.driver.host", None) or "127.0.0.1"
    cluster = LocalCluster(servers=servers, trainers=0, host=host, dashboard_address=None)
    try:
        ps = ParameterServer(cluster, servers, **options)
    except BaseException:
        cluster.close()
        raise
    over = threading.Event()
    ps.connection.when_released(over.set, cluster.close)
    watch = threading.Thread(target=_watch, args=(weakref.ref(ps), session, over), name="dps-spark-watch", daemon=True)
    watch.start()
    return ps


def _watch(ps: weakref.ref[ParameterServer], session: SparkSession, over: threading.Event) -> None:
    while not over.wait(POLL_SECONDS):
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
