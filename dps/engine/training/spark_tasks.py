"""What Spark's Python workers do for dps. All they need is the ticket: there is no Dask client here.

An attempt that another one has replaced (Spark has begun the partition again, or a second time at once) may neither
give a result, for Spark might take it for the partition's, nor fail, for that might end the job while the other is at
work. It waits until Spark kills it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import cloudpickle

from dps import config
from dps.engine.client.client import Client, Ticket
from dps.engine.client.environment import ProcessEnvironment
from dps.engine.training.leased_batches import LeasedBatches
from dps.engine.training.participant import Participant
from dps.engine.training.partition_peer import PartitionPeer
from dps.engine.training.trainer import Trainer
from dps.engine.training.types import Batch, Function, Options, Partition, Result
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Peek, TrainerStanding, decode, encode
from dps.engine.wire.pool import Pool
from dps.errors import DPSError, InputTypeError, StoppedError, TrainerLostError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

__all__ = [
    "Failed",
    "SparkJob",
    "StoppedOnSpark",
    "batches_of",
    "elastic",
    "elastic_frames",
    "frame_pieces",
    "one_partition",
    "pandas_frame",
    "record_list",
    "record_pieces",
    "sorted_pieces",
    "train",
    "train_frames",
]

PIECE_BYTES = 1 << 20  # of records that travel together, about
LOOK_SECONDS = 0.5  # between two questions after a successor
pool = Pool()  # the connections of this process, which outlive its tasks

Read = Callable[[int, Iterator[Batch]], list[Partition]]  # the partitions of a trainer, out of what Spark hands over
Build = Callable[[int, Iterator[Batch]], Partition]  # one of them: (its number, its records or Arrow batches)


class SparkJob(NamedTuple):
    """What all trainers of a run are to do."""

    ticket: Ticket
    run: int
    first: int  # the trainer that Spark's partition 0 is
    function: Function
    args: tuple
    kwargs: Options
    retries: int = 0
    shares: list[list[int]] | None = None  # of each trainer of a barrier stage: the numbers of its partitions
    # Secret with which its trainers lend each other partitions, where work is re-assigned. Only they and the driver
    # know it, because what they fetch is unpickled.
    lending: str | None = None


class StoppedOnSpark(NamedTuple):
    """What a trainer that was told to stop gives back."""

    reason: str


class Failed(NamedTuple):
    """What a trainer gives back whose function has raised: Spark does not try again what ends with a result."""

    error: Exception


# -- all at once, in a barrier stage


def train(job: SparkJob, read: Read, index: int, data: Iterator[Batch]) -> Iterator[bytes]:
    """The task of one trainer: join, call the user's function, leave. Gives (its number, what came of it), pickled."""
    number = job.first + index
    outcome = _attempt(job, number, lambda: read(index, data))
    try:
        result = cloudpickle.dumps((number, outcome))
    except Exception as error:
        text = f"what the function of trainer {number} returned cannot be pickled: {error!r}"
        result = cloudpickle.dumps((number, Failed(InputTypeError(text))))
    yield result


def train_frames(job: SparkJob, read: Read, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same for the Arrow batches of a DataFrame."""
    import pyarrow as pa

    for result in train(job, read, _context().partitionId(), batches):
        yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


def _attempt(job: SparkJob, number: int, read: Callable[[], list]) -> Result:
    incarnation = _context().taskAttemptId()
    trainer = partitions = peer = None
    mine = [] if job.shares is None else job.shares[number - job.first]
    try:
        environment = ProcessEnvironment(pool)
        leased = job.lending is not None
        participant = Participant(
            job.ticket, job.run, number, incarnation, _where(), environment=environment, leased=leased
        )
        trainer = Trainer(participant, mine)
        partitions = read()  # which may take long: a trainer that comes again is to be back before
        if job.lending is not None and job.shares is not None:
            lent = dict(zip(mine, partitions, strict=True))
            peer = PartitionPeer(job.ticket, job.lending, environment, job.run, lent)
            trainer = Trainer(participant, mine, LeasedBatches(participant, job.shares, partitions, peer))
        result = job.function(trainer, partitions, *job.args, **job.kwargs)
        trainer.leave()
        return result
    except Exception as error:
        _linger_if_replaced(job, number, incarnation)
        stopped = isinstance(error, (StoppedError, TrainerLostError))  # the latter tells of another one
        if trainer is not None and not stopped and (partitions is None or trainer.attempt < job.retries):
            raise  # and Spark runs the whole stage again: always, where it was its data that could not be read
        _leave(trainer, error)
        return StoppedOnSpark(str(error)) if stopped else Failed(_portable(error, number))
    finally:
        if peer is not None:
            peer.close()
        if trainer is not None:
            trainer.close()


# -- one after the other, as Spark schedules them


def elastic(job: SparkJob, index: int, data: Iterator[Batch]) -> Iterator[Batch]:
    """The task of one partition in an ordinary stage."""
    number, incarnation = job.first + index, _context().taskAttemptId()
    trainer = None
    try:
        environment = ProcessEnvironment(pool)
        trainer = Trainer.join(
            job.ticket, job.run, number, incarnation, _where(), environment=environment, partition_numbers=[index]
        )
        results = job.function(trainer, data, *job.args, **job.kwargs)
        yield from () if results is None else results
        trainer.leave()
    except GeneratorExit:  # the rest is not needed (first, take): should it be computed again, this part is replayed
        if trainer is not None:
            with contextlib.suppress(DPSError):
                trainer.leave()
        raise
    except Exception as error:
        _linger_if_replaced(job, number, incarnation)
        _leave(trainer, error)
        raise
    finally:
        if trainer is not None:
            trainer.close()


def elastic_frames(job: SparkJob, data: Iterator[Batch]) -> Iterator[Batch]:
    """The same for a DataFrame, where Spark does not tell which partition it is, but the task's, which is the same."""
    return elastic(job, _context().partitionId(), data)


# -- what both need


def _context() -> TaskContext:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "not in a task of Spark's"
    return context


def _where() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}, Spark's task {_context().taskAttemptId()}"


def _leave(trainer: Trainer | None, error: Exception) -> None:
    if trainer is not None:
        with contextlib.suppress(DPSError):  # the run is over, or the controller is: what counts is the first error
            trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])


def _linger_if_replaced(job: SparkJob, number: int, incarnation: int) -> None:
    """Return if this attempt is the latest (or the run has ended); else wait to be killed while another one lives."""
    gone = None  # since when the successor is
    with Client(job.ticket, ProcessEnvironment(pool)) as client:
        while True:
            try:
                answer = client.session.ask_controller(Header(frames.PEEK), encode(Peek(job.run, number)))
                latest = decode(TrainerStanding, answer.body)
            except DPSError:  # the run was forgotten, or the controller has gone: there is no successor to wait for
                return
            if latest.stopped is not None or latest.incarnation in (None, incarnation):
                return
            now = time.monotonic()
            gone = None if latest.state == "joined" else gone or now
            if gone is not None and now - gone > config.seconds("stop"):
                raise StoppedError(
                    f"trainer {number}: attempt {incarnation} was replaced by attempt {latest.incarnation} (which "
                    f"is {latest.state!r} now), and still Spark waits for this one: it is to begin another"
                )
            time.sleep(LOOK_SECONDS)


def _portable(error: Exception, number: int) -> Exception:
    """An error that the driver can unpickle, with where it happened."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"\nIn trainer {number} ({_where()}):\n{trace}")
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return DPSError(f"trainer {number} failed with an error that cannot be pickled: {trace}")
    return error


# -- partitions as they come, and as pieces that were shuffled


def one_partition(read: Build, index: int, content: Iterator[Batch]) -> list[Partition]:
    return [read(index, content)]


def record_list(index: int, records: Iterable[Batch]) -> list[Batch]:
    return list(records)


def pandas_frame(schema: pa.Schema, index: int, batches: Iterable[Batch]) -> Partition:
    import pyarrow as pa

    found = list(batches)
    return (pa.Table.from_batches(found) if found else schema.empty_table()).to_pandas()


def record_pieces(index: int, records: Iterable[Batch]) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """A partition of an RDD as pieces that can be put together again: (partition, (how many before it, a pickle))."""
    records, number, count = iter(records), 0, 1
    while found := list(islice(records, count)):
        piece = cloudpickle.dumps(found)
        yield index, (number, piece)
        number, count = number + 1, 2 * count if len(piece) < PIECE_BYTES else max(1, count // 2)


def frame_pieces(batches: Iterator[Batch]) -> Iterator[Batch]:
    """A partition of a DataFrame as rows (partition, how many before it, an Arrow stream of one batch)."""
    import pyarrow as pa

    for number, batch in enumerate(batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        rows = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        index = pa.array([_context().partitionId()], pa.int32())
        yield pa.RecordBatch.from_arrays([index, pa.array([number], pa.int32()), rows], ["index", "number", "rows"])


def batches_of(stream: bytes) -> Iterator[Batch]:
    import pyarrow as pa

    yield from pa.ipc.open_stream(stream)


def sorted_pieces(
    shares: list[list[int]],
    opened: Callable[[bytes], Iterable[Batch]],
    read: Build,
    index: int,
    pieces: Iterator[Batch],
) -> list[Partition]:
    """What `read` makes of the partitions of trainer `index`, out of pieces in any order."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for part, piece in pieces:
        found[part].append(piece)
    partitions = []
    for part in shares[index]:
        ordered = sorted(found.pop(part, []))
        partitions.append(read(part, (each for _, piece in ordered for each in opened(piece))))
    return partitions
