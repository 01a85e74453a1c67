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
from typing import Any, NamedTuple

import cloudpickle

from dps import config
from dps.client import Client, Ticket
from dps.errors import DPSError, InputTypeError, StoppedError, TrainerLostError
from dps.training.trainer import Trainer
from dps.wire import frames
from dps.wire.frames import Header
from dps.wire.pool import Pool

__all__ = [
    "Failed",
    "Job",
    "Stopped",
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

PIECE = 1 << 20  # bytes of records that travel together, about
LOOK = 0.5  # seconds between two questions after a successor
pool = Pool()  # the connections of this process, which outlive its tasks

Read = Callable[[int, Iterator[Any]], list]  # the partitions of a trainer, out of what Spark hands over
Build = Callable[[int, Iterator[Any]], Any]  # one of them: (its number, its records or Arrow batches)


class Job(NamedTuple):
    """What all trainers of a run are to do."""

    ticket: Ticket
    run: int
    first: int  # the trainer that Spark's partition 0 is
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    retries: int = 0
    shares: list[list[int]] | None = None  # of each trainer of a barrier stage: the numbers of its partitions


class Stopped(NamedTuple):
    """What a trainer that was told to stop gives back."""

    reason: str


class Failed(NamedTuple):
    """What a trainer gives back whose function has raised: Spark does not try again what ends with a result."""

    error: Exception


# -- all at once, in a barrier stage


def train(job: Job, read: Read, index: int, data: Iterator[Any]) -> Iterator[bytes]:
    """The task of one trainer: join, call the user's function, leave. Gives (its number, what came of it), pickled."""
    number = job.first + index
    outcome = _attempt(job, number, lambda: read(index, data))
    try:
        result = cloudpickle.dumps((number, outcome))
    except Exception as error:
        text = f"what the function of trainer {number} returned cannot be pickled: {error!r}"
        result = cloudpickle.dumps((number, Failed(InputTypeError(text))))
    yield result


def train_frames(job: Job, read: Read, batches: Iterator[Any]) -> Iterator[Any]:
    """The same for the Arrow batches of a DataFrame."""
    import pyarrow as pa

    for result in train(job, read, _context().partitionId(), batches):
        yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


def _attempt(job: Job, number: int, read: Callable[[], list]) -> Any:
    incarnation = _context().taskAttemptId()
    trainer = partitions = None
    mine = [] if job.shares is None else job.shares[number - job.first]
    try:
        trainer = Trainer(job.ticket, job.run, number, incarnation, _where(), pool=pool, partition_numbers=mine)
        partitions = read()  # which may take long: who comes again is to be back before
        result = job.function(trainer, partitions, *job.args, **job.kwargs)
        trainer.leave()
        return result
    except Exception as error:
        _linger_if_replaced(job, number, incarnation)
        stopped = isinstance(error, (StoppedError, TrainerLostError))  # the latter tells of another one
        if trainer is not None and not stopped and (partitions is None or trainer.attempt < job.retries):
            raise  # and Spark runs the whole stage again: always, where it was its data that could not be read
        _leave(trainer, error)
        return Stopped(str(error)) if stopped else Failed(_portable(error, number))
    finally:
        if trainer is not None:
            trainer.close()


# -- one after the other, as Spark schedules them


def elastic(job: Job, index: int, data: Iterator[Any]) -> Iterator[Any]:
    """The task of one partition in an ordinary stage."""
    number, incarnation = job.first + index, _context().taskAttemptId()
    trainer = None
    try:
        about = (job.ticket, job.run, number, incarnation, _where())
        trainer = Trainer(*about, pool=pool, partition_numbers=[index])
        results = job.function(trainer, data, *job.args, **job.kwargs)
        yield from () if results is None else results
        trainer.leave()
    except GeneratorExit:  # nobody needs the rest (first, take): should it be computed again, this part is replayed
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


def elastic_frames(job: Job, data: Iterator[Any]) -> Iterator[Any]:
    """The same for a DataFrame, where Spark does not tell which partition it is, but the task's, which is the same."""
    return elastic(job, _context().partitionId(), data)


# -- what both need


def _context() -> Any:
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


def _linger_if_replaced(job: Job, number: int, incarnation: int) -> None:
    """Return if this attempt is the latest (or the run has ended); else wait to be killed while another one lives."""
    gone = None  # since when the successor is
    with Client(job.ticket, pool) as client:
        while True:
            try:
                told = client._ask_controller(Header(frames.PEEK), {"run": job.run, "trainer": number})
            except DPSError:  # the run was forgotten, or the controller has gone: there is nobody to wait for
                return
            if told["stopped"] is not None or told["incarnation"] in (None, incarnation):
                return
            now = time.monotonic()
            gone = None if told["state"] == "joined" else gone or now
            if gone is not None and now - gone > config.seconds("stop"):
                raise StoppedError(
                    f"trainer {number}: attempt {incarnation} was replaced by attempt {told['incarnation']} (which is "
                    f"{told['state']!r} now), and still Spark waits for this one: it is to begin another"
                )
            time.sleep(LOOK)


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


def one_partition(read: Build, index: int, content: Iterator[Any]) -> list[Any]:
    """A partition, whole."""
    return [read(index, content)]


def record_list(index: int, records: Iterable[Any]) -> list[Any]:
    """A partition of an RDD as a list."""
    return list(records)


def pandas_frame(schema: Any, index: int, batches: Iterable[Any]) -> Any:
    """A partition of a DataFrame as a pandas frame."""
    import pyarrow as pa

    found = list(batches)
    return (pa.Table.from_batches(found) if found else schema.empty_table()).to_pandas()


def record_pieces(index: int, records: Iterable[Any]) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """A partition of an RDD as pieces that can be put together again: (partition, (how many before it, a pickle))."""
    records, number, count = iter(records), 0, 1
    while found := list(islice(records, count)):
        piece = cloudpickle.dumps(found)
        yield index, (number, piece)
        number, count = number + 1, 2 * count if len(piece) < PIECE else max(1, count // 2)


def frame_pieces(batches: Iterator[Any]) -> Iterator[Any]:
    """A partition of a DataFrame as rows (partition, how many before it, an Arrow stream of one batch)."""
    import pyarrow as pa

    for number, batch in enumerate(batches):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        rows = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        index = pa.array([_context().partitionId()], pa.int32())
        yield pa.RecordBatch.from_arrays([index, pa.array([number], pa.int32()), rows], ["index", "number", "rows"])


def batches_of(stream: bytes) -> Iterator[Any]:
    """The batches in an Arrow stream."""
    import pyarrow as pa

    yield from pa.ipc.open_stream(stream)


def sorted_pieces(
    shares: list[list[int]], opened: Callable[[bytes], Iterable[Any]], read: Build, index: int, pieces: Iterator[Any]
) -> list[Any]:
    """What `read` makes of the partitions of trainer `index`, out of pieces in any order."""
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for part, piece in pieces:
        found[part].append(piece)
    partitions = []
    for part in shares[index]:
        ordered = sorted(found.pop(part, []))
        partitions.append(read(part, (each for _, piece in ordered for each in opened(piece))))
    return partitions
