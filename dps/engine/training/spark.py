"""Spark: the same training functions on the partitions of RDDs and DataFrames. The driver's side.

`ps.run` is one barrier stage, with a trainer for each of its tasks; `map_partitions_with_ps` is an ordinary stage, with
a trainer for each partition. Where there are more partitions than trainers, whole partitions are shuffled together in
pieces that know their places (`spark_tasks.py`), so that a second reader finds them in the same order.

PySpark itself is imported in functions only, because dps works without it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn

import cloudpickle
import msgspec
from dask.utils import parse_timedelta

from dps import config
from dps.engine.client.client import Ticket
from dps.engine.telemetry.snapshot import RunStatus
from dps.engine.training import spark_tasks
from dps.engine.training.data import ReadWith, arrays, names_in, refuse_missing
from dps.engine.training.launch import RunOptions, begin, resumed
from dps.engine.training.open_run import OpenRun
from dps.engine.training.progress_bar import ProgressBar
from dps.engine.training.spark_tasks import Failed, SparkJob, StoppedOnSpark
from dps.engine.training.types import Batch, Columns, Control, Data, Function, Partition, Result
from dps.engine.wire.handshake import new_secret
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, InputTypeError, StoppedError, TooFewWorkersError, by_name

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["chosen", "elastic", "launch"]

SHOW_SECONDS = 0.25  # between two looks at the trainers' clocks
CHECK = "spark.scheduler.barrier.maxConcurrentTasksCheck"


def is_rdd(data: Data) -> bool:
    """Which of them it is. (A DataFrame has an attribute of every name: it might be a column.)"""
    return any(kind.__name__ == "RDD" for kind in type(data).__mro__)


class Records:
    """An RDD."""

    opened: Callable[[bytes], Iterable[Batch]] = staticmethod(pickle.loads)  # what is in a piece that was shuffled

    def __init__(self, rdd: Data, read: spark_tasks.Build | None):
        self.rdd, self.context = rdd, rdd.context
        self.read = read or spark_tasks.record_list
        self.partitions = int(rdd.getNumPartitions())

    def setting(self, name: str, default: str) -> str:
        return str(self.context.getConf().get(name, default))

    def patience(self) -> float:
        """Seconds that Spark lets a barrier stage wait for slots: so long may lost trainers take to be back.

        Spark runs the whole stage again, when it has executors again. When it gives up, its job fails, and that ends
        the run: the limit is only for a stage that Spark would wait with for ever.
        """
        interval, failures = self.setting(f"{CHECK}.interval", "15s"), self.setting(f"{CHECK}.maxFailures", "40")
        return float(parse_timedelta(interval)) * int(failures)

    def slots(self) -> int:
        """How many tasks can run at once, as far as the driver knows."""
        with contextlib.suppress(Exception):  # what Spark itself goes by before a barrier stage, but not in its API
            java = self.context._jsc.sc()
            if slots := int(java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile())):
                return slots
        return max(1, self.context.defaultParallelism // int(self.setting("spark.task.cpus", "1")))

    def one(self) -> spark_tasks.Read:
        return functools.partial(spark_tasks.one_partition, self.read)

    def pieces(self) -> Data:
        return self.rdd.mapPartitionsWithIndex(spark_tasks.record_pieces)

    def whole(self, job: SparkJob) -> list[bytes]:
        """Each partition a trainer."""
        return collected(self.rdd, functools.partial(spark_tasks.train, job, self.one()))

    def shared(self, job: SparkJob, shares: list[list[int]]) -> list[bytes]:
        """Several partitions a trainer."""
        owners = {part: trainer for trainer, parts in enumerate(shares) for part in parts}
        pieces = self.pieces().partitionBy(len(shares), owners.__getitem__)
        read = functools.partial(spark_tasks.sorted_pieces, shares, self.opened, self.read)
        return collected(pieces, functools.partial(spark_tasks.train, job, read))

    def tagged(self, tag: str, action: Callable[[], list[bytes]]) -> Callable[[], list[bytes]]:
        """For another thread: `action`, with what this thread has set for its jobs, and a tag."""
        from pyspark import inheritable_thread_target

        def act() -> list[bytes]:
            self.context.addJobTag(tag)
            return action()

        with warnings.catch_warnings():  # that tags are not inherited
            warnings.simplefilter("ignore")
            return inheritable_thread_target(act)

    def cancel(self, tag: str) -> None:
        self.context.cancelJobsWithTag(tag)


class Frames(Records):
    """A DataFrame."""

    opened = staticmethod(spark_tasks.batches_of)

    def __init__(self, frame: Data, read: spark_tasks.Build | None):
        self.session = frame.sparkSession
        self.read = read or as_pandas(frame)
        self.context = self.session.sparkContext
        self.frame, self.partitions = planned(frame)

    def setting(self, name: str, default: str) -> str:
        return str(self.session.conf.get(name, default))

    def pieces(self) -> Data:
        rows = self.frame.mapInArrow(spark_tasks.frame_pieces, "index int, number int, rows binary").rdd
        return rows.map(lambda row: (row[0], (row[1], bytes(row[2]))))

    def whole(self, job: SparkJob) -> list[bytes]:
        task = functools.partial(spark_tasks.train_frames, job, self.one())
        results = self.frame.mapInArrow(task, "result binary", barrier=True)
        return [bytes(row[0]) for row in results.repartition(1).collect()]  # as in `collected`


class ConnectFrames(Frames):
    """A DataFrame of a session that speaks Spark Connect: it does not tell how many partitions it has."""

    def __init__(self, frame: Data, read: spark_tasks.Build | None, trainers: int | None):
        if trainers is None:
            raise InputError("with Spark Connect one cannot see how many tasks run at once: say trainers=...")
        self.session, self.partitions = frame.sparkSession, trainers
        self.frame = frame.repartition(trainers)
        self.read = read or as_pandas(frame)

    def slots(self) -> int:
        return self.partitions

    def tagged(self, tag: str, action: Callable[[], list[bytes]]) -> Callable[[], list[bytes]]:
        def act() -> list[bytes]:
            self.session.addTag(tag)  # of this thread's jobs only
            return action()

        return act

    def cancel(self, tag: str) -> None:
        self.session.interruptTag(tag)


def planned(frame: Data) -> tuple[Data, int]:
    """A DataFrame by the physical plan that it has now, and the number of its partitions.

    To tell the number Spark runs the stages before the last shuffle (adaptive execution goes by their sizes). Whatever
    is made of `frame` itself is planned anew, and would run them again.
    """
    from pyspark.sql import DataFrame

    rows = frame._jdf.queryExecution().toRdd()
    again = frame.sparkSession._jsparkSession.internalCreateDataFrame(rows, frame._jdf.schema(), False)
    return DataFrame(again, frame.sparkSession), int(rows.getNumPartitions())


def as_pandas(frame: Data) -> spark_tasks.Build:
    """How partitions of a DataFrame are read, unless told otherwise."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return functools.partial(spark_tasks.pandas_frame, to_arrow_schema(frame.schema))


def chosen(data: Data, columns: Columns) -> ReadWith:
    """A DataFrame, with partitions that are tuples of arrays: these columns of each."""
    names = names_in(columns)
    if isinstance(data, ReadWith) or not hasattr(data, "mapInArrow"):
        raise InputTypeError(f"columns= names columns of a Spark DataFrame; a {type(data).__name__} has none: .toDF()")
    refuse_missing(data.columns, names)
    frame = data.select(*("`" + str(name).replace("`", "``") + "`" for name in names))
    frame = frame.toDF(*(f"c{n}" for n in range(len(names))))  # a dot in a name stops Spark from passing the frame on
    return ReadWith(frame, functools.partial(_pick_from_arrow, as_pandas(frame), names, columns))


def _pick_from_arrow(
    read: spark_tasks.Build, names: list[Hashable], columns: Columns, index: int, batches: Iterator[Batch]
) -> Partition:
    frame = read(index, batches)
    return arrays({name: frame[f"c{n}"] for n, name in enumerate(names)}, columns)


def collected(rdd: Data, task: Function) -> list[bytes]:
    """The results of a barrier stage, behind a shuffle: Spark never runs a job's last stage again, if it is one."""
    return rdd.barrier().mapPartitionsWithIndex(task).repartition(1).collect()


def source(data: Data, trainers: int | None = None) -> Records:
    data, read = (data.data, data.read) if isinstance(data, ReadWith) else (data, None)
    if is_rdd(data):
        return Records(data, read)
    return ConnectFrames(data, read, trainers) if ".connect." in type(data).__module__ else Frames(data, read)


def launch(
    ticket: Ticket,
    call: Control,
    call_patiently: Control,
    function: Callable,
    data: Data,
    options: RunOptions,
    restored: SavedRun | None,
) -> list[Result]:
    """Run `function` on trainers over Spark's data; what :meth:`dps.ParameterServer.run` does.

    `call` reaches the controller, and `call_patiently` also one that takes over from it while the trainers are at work,
    because these outlive the scheduler. `restored` is what there is to go on with.
    """
    where = source(data, options.count)
    count = where.partitions
    if not count:
        raise InputError("the data has no partitions")
    _check_retries(where, options.retries)
    if options.resume:
        shares = resumed(restored, options, count)
    else:
        number = _trainers(where, options.count)
        shares = [list(range(n, count, number)) for n in range(number)]
    run, first = begin(call, shares, options, lends=True)
    called = options.wrapped(function), options.args, dict(options.kwargs), options.retries
    job = SparkJob(ticket, run, first, *called, shares, new_secret() if options.is_leased else None)
    numbers = set(range(first, first + len(shares)))
    work = None

    def seen() -> RunStatus:
        return msgspec.msgpack.decode(call_patiently("progress", run=run), type=RunStatus)

    try:
        limit = f"{CHECK}.interval times maxFailures"
        call("set_rejoin", run=run, seconds=where.patience(), setting=f"{limit}, or dps.timeouts.rejoin if longer")
        whole = shares == [[n] for n in range(count)]
        action = functools.partial(where.whole, job) if whole else functools.partial(where.shared, job, shares)
        work = Work(where, action)
        with ProgressBar(options.progress) as bar:
            results = watch(work, seen, numbers, bar)
        return options.listed(results, shares)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error is the one to raise
            call("stop_run", run=run, reason=f"the run was stopped: {error!r}"[:500])
            if work is not None:
                work.wait(lambda: bool(numbers.intersection(seen().connected)))
        raise


class Work:
    """A job of Spark's, in a thread of its own, so that the driver's can look how the trainers are."""

    def __init__(self, where: Records, action: Callable[[], list[bytes]]):
        self._where, self._tag = where, f"dps-{uuid.uuid4().hex}"
        self._act = where.tagged(self._tag, action)
        self.results: list[bytes] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dps-spark-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results = self._act()
        except BaseException as error:
            self.error = error

    def over(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def wait(self, connected: Callable[[], bool]) -> None:
        """The run was stopped: let its trainers end by themselves, then have Spark end them. No trainer pushes any
        more."""
        until = time.monotonic() + config.seconds("stop")
        while not self.over(SHOW_SECONDS) and connected() and time.monotonic() < until:
            pass
        if not self.over(0):
            self._where.cancel(self._tag)
            self.over(config.seconds("stop"))


def watch(work: Work, progress: Callable[[], RunStatus], numbers: set[int], bar: ProgressBar) -> list[Result]:
    """Wait for the job; the results of all trainers, or the error that began it."""
    stopped = None
    while not work.over(SHOW_SECONDS):
        seen = progress()
        bar.show(seen)
        if seen.stopped is not None:  # by one of us, whose error is about to arrive, or by another caller
            stopped = stopped or time.monotonic()
            if time.monotonic() - stopped > config.seconds("stop"):
                break
    seen = progress()
    bar.show(seen)
    outcomes = dict(map(cloudpickle.loads, work.results))
    for number in sorted(outcomes):
        if isinstance(outcomes[number], Failed):
            raise outcomes[number].error
    if seen.stopped is not None:
        raise by_name(str(seen.stopped_by))(seen.stopped)
    if work.error is not None:
        raise_explained(work.error)
    lost = [number for number in sorted(numbers) if isinstance(outcomes[number], StoppedOnSpark)]
    if lost:
        raise StoppedError(f"trainer {lost[0]} was stopped: {outcomes[lost[0]].reason}")
    return [outcomes[number] for number in sorted(numbers)]


def raise_explained(error: BaseException) -> NoReturn:
    """Spark's error, and what to do where we know."""
    text = str(error)
    if "SPARK-24819" in text or "BARRIER_EXECUTION_REQUIRES" in text or "more slots" in text:
        raise TooFewWorkersError(
            f"Spark has not as many slots as trainers were asked for, and all must run at once: trainers=n takes fewer "
            f"(and shares the partitions among them). Spark says: {text[:500]}"
        ) from error
    if "SPARK-24820" in text:
        error.add_note("dps: a barrier stage reads no union or coalesce; .repartition(n), or .checkpoint(), before")
    raise error


def _trainers(where: Records, wish: int | None) -> int:
    slots = where.slots()
    if wish is not None and wish > slots:
        raise TooFewWorkersError(
            f"{wish} trainers asked for, and Spark can run {slots} tasks at once: all trainers of a run must run at "
            f"once; add executors or cores, or ask for fewer"
        )
    return min(wish or slots, where.partitions)


def _check_retries(where: Records, retries: int) -> None:
    """Refuse more than Spark is willing to do: it would end the job with an error of its own."""
    master = where.setting("spark.master", "")
    failures = int(where.setting("spark.task.maxFailures", "4"))
    if master.startswith("local[") or master == "local":  # local[cores, failures]
        failures = int(master.strip("]").partition(",")[2] or 1)
    stages = int(where.setting("spark.stage.maxConsecutiveAttempts", "4"))
    most = stages - 1 if failures > 1 else 0
    if retries > most:
        raise InputError(
            f"retries={retries}, and Spark would run the stage again {most} times: its tasks may fail {failures} times "
            f"(spark.task.maxFailures, or local[2,4] as the master), its stages {stages} times "
            f"(spark.stage.maxConsecutiveAttempts)"
        )


def elastic(
    call: Control,
    ticket: Ticket,
    data: Data,
    function: Callable,
    schema: StructType | str | None,
    trainers: int | None,
    args: tuple,
    kwargs: dict,
) -> tuple[Data, OpenRun]:
    """An ordinary, lazy stage over Spark's data, and the run of its trainers."""
    records = is_rdd(data)
    if records != (schema is None):
        what = "an RDD has no schema" if records else "a DataFrame needs the schema= of what the function gives"
        raise InputError(f"map_partitions_with_ps: {what}")
    if trainers is None:
        if ".connect." in type(data).__module__:
            raise InputError("with Spark Connect one cannot see how many partitions there are: say trainers=, at least")
        data, trainers = (data, int(data.getNumPartitions())) if records else planned(data)
    number = call("start_run", trainers=max(1, trainers), staleness=None, elastic=True)
    job = SparkJob(ticket, number, 0, function, args, kwargs)
    if records:
        result = data.mapPartitionsWithIndex(functools.partial(spark_tasks.elastic, job))
    else:
        result = data.mapInPandas(functools.partial(spark_tasks.elastic_frames, job), schema)
    return result, OpenRun(ticket, number, trainers, math.inf, call)
