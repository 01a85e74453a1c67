"""Checkpoint writer: a server's part in checkpoints. It cuts primary shards, and writes them while training goes on.

The controller leads (`controller/checkpoint_procedures.py`): *cut* at a clock that no trainer has reached, *complete*
when every trainer has, *save*, *end*. The endpoint's thread makes the cuts and reads their pieces between requests. A
writing thread writes the files; while it writes a piece, the endpoint's thread reads the next.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dps.engine.checkpoints.shard_file import FileRecord, write_shard
from dps.engine.server.replicas import Replica
from dps.engine.server.requests import ServerRole
from dps.engine.state.ages import stored_ages
from dps.engine.wire.endpoint import Endpoint
from dps.errors import CheckpointError, DPSError, MovedError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dps.engine.checkpoints.shard_file import Piece
    from dps.engine.state.snapshot import Cut

__all__ = ["CheckpointWriter", "Writing", "WritingThread"]

R = TypeVar("R")

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # read at a time, between two requests
CORE_SHARE = 0.06  # of one core: what reading and writing may use while clients send requests
RECENT_SECONDS = 0.1  # without a request: then no client counts as waiting
MAX_REST_SECONDS = 0.25
STOP_CHECK_SECONDS = 0.5  # between two checks whether the checkpoint was given up
STOP_SECONDS = 10.0  # that a writing thread may take to stop


class CheckpointWriter:
    """Cuts and writes the primary shards of one server; one checkpoint at a time.

    `new_writing` makes a `Writing`, given the replicas and a function that writes the file of one of them.
    """

    def __init__(
        self,
        role: ServerRole,
        new_writing: Callable[[list[Replica], Callable[[Replica, Writing], FileRecord]], Writing],
    ):
        self.role, self._new_writing = role, new_writing
        self._replicas: list[Replica] = []
        self._clock: int | None = None
        self._track = False
        self._bases: dict[Replica, str] = {}  # replica -> the checkpoint since which its changes are tracked
        self._writing: Writing | None = None

    # -- in the endpoint's thread

    def cut(self, tables: Sequence[int], clock: int | None, parent: str | None, track: bool) -> list[tuple[int, int]]:
        """Begin to cut every primary shard of these tables at `clock` (None: now); returns (table, shard) of each.

        A replica whose changes are tracked since the checkpoint `parent` writes those changes only. With `track`, the
        replicas track their changes from now on.

        Raises InputError if an op of that clock was applied already. Nothing is cut then.
        """
        self.end(None)
        self._clock, self._track = clock, track
        try:
            for table in [self.role.tables[number] for number in tables if number in self.role.tables]:
                for _, replica in sorted(table.replicas.items()):
                    if replica.primary and not replica.deposed:
                        if replica.shard.changed is None:  # so many rows were deleted that tracking has ended
                            self._bases.pop(replica, None)
                        known = parent is not None and self._bases.get(replica) == parent
                        if track:
                            replica.shard.track_changes()
                        replica.shard.begin_cut(clock, changed_only=known)
                        self._replicas.append(replica)
        except DPSError:
            self.end(None)
            raise
        return [(replica.spec.id, replica.number) for replica in self._replicas]

    def complete(self) -> None:
        """Every op of an earlier clock is acknowledged: the cut takes no later op in.

        Raises MovedError if a shard has another primary by now, or its table was dropped: the controller begins the
        checkpoint anew.
        """
        for replica in self._replicas:
            gone = replica.spec.id not in self.role.tables or replica.shard.cut is None
            if gone or not replica.serves or not self.role.leads(replica):
                raise MovedError(f"shard {replica.number} of table {replica.spec.name!r} has moved while it was cut")
        for replica in self._replicas:
            if self._clock is not None:
                self.role.close_before(replica, self._clock)
            replica.shard.cut.complete()

    def end(self, name: str | None) -> None:
        """The controller has committed the checkpoint `name`, or (None) given it up."""
        if self._writing is not None:
            self._writing.stop = True
        replicas, self._replicas = self._replicas, []
        for replica in replicas:
            if replica.shard.cut is not None:
                if name is not None and self._track:
                    replica.shard.cut.commit()
                    self._bases[replica] = name
                replica.shard.end_cut()
        self._bases = {replica: base for replica, base in self._bases.items() if self._holds(replica)}

    def _holds(self, replica: Replica) -> bool:
        table = self.role.tables.get(replica.spec.id)
        return table is not None and table.replicas.get(replica.number) is replica and not replica.deposed

    # -- in the actor's thread

    def save(self, url: str, name: str, storage_options: dict[str, object]) -> None:
        """Begin to write the cuts into the checkpoint `name`; `saved` says when they are written."""
        self.wait_for_writing()

        def write(replica: Replica, writing: Writing) -> FileRecord:
            cut = replica.shard.cut
            waiting = {} if cut.admission is None else writing.wait(cut.admission.stored)
            return write_shard(
                url,
                name,
                replica.spec,
                replica.number,
                cut.rows,
                writing.pieces(cut),
                increment=cut.changed_only,
                ledger=writing.wait(cut.ledger.to_arrays, False) | {"removed": cut.removed} | waiting,
                metadata={"latest": cut.latest, "clock": cut.clock} | writing.wait(stored_ages, replica.shard),
                storage_options=storage_options,
            )

        self._writing = self._new_writing(self._replicas, write)
        self._writing.start()

    def saved(self) -> list[FileRecord] | None:
        """The records of the files once all are written, None before. Raises the error of the writing thread."""
        writing = self._writing
        if writing is None:
            raise MovedError(f"server {self.role.number} has nothing to write")
        if writing.error is not None:
            raise writing.error
        return None if writing.is_alive() else writing.files

    def wait_for_writing(self) -> None:
        """Wait until the thread that writes an earlier checkpoint, which was given up, has ended."""
        if self._writing is not None:
            self._writing.join(STOP_SECONDS)
            if self._writing.is_alive():
                raise CheckpointError(
                    f"server {self.role.number} still writes an earlier checkpoint that was given up: is its disk hung?"
                )

    def close(self) -> None:
        if self._writing is not None:
            self._writing.stop = True
            self._writing.join(STOP_SECONDS)


class Writing(abc.ABC):
    """The writing of the files of one checkpoint on one server. It ends soon after `stop` is set.

    A subclass says what carries it out: it calls :meth:`work`, and reads the pieces of cuts between two requests.
    """

    def __init__(self, number: int, replicas: list[Replica], write: Callable[[Replica, Writing], FileRecord]):
        self.number, self.replicas, self.write = number, replicas, write
        self.files: list[FileRecord] = []
        self.error: DPSError | None = None
        self.stop = False

    def work(self) -> None:
        try:
            for replica in self.replicas:
                self.files.append(self.write(replica, self))
        except DPSError as error:
            self.error = error
        except Exception as error:
            self.error = CheckpointError(f"server {self.number} could not write: {error!r:.500}")

    @abc.abstractmethod
    def pieces(self, cut: Cut) -> Iterator[Piece]: ...

    @abc.abstractmethod
    def wait(self, function: Callable[..., R], *args: object) -> R:
        """Run a function in the endpoint's thread, and wait for its result."""

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def is_alive(self) -> bool: ...

    @abc.abstractmethod
    def join(self, seconds: float) -> None: ...


class WritingThread(Writing):
    """Writes in a thread of its own. While it writes a piece, the endpoint's thread reads the next."""

    def __init__(
        self,
        role: ServerRole,
        endpoint: Endpoint,
        replicas: list[Replica],
        write: Callable[[Replica, Writing], FileRecord],
    ):
        super().__init__(role.number, replicas, write)
        self.role, self.endpoint = role, endpoint
        self._reading = 0.0  # seconds of CPU time that the endpoint's thread has spent on reading pieces
        self._requests = role.requests
        self._last_request_at = -RECENT_SECONDS
        self._rested, self._spent = time.monotonic(), 0.0  # end of the last rest, and CPU seconds used by then
        self._thread = threading.Thread(target=self.work, name=f"dps-saver-{role.number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def pieces(self, cut: Cut) -> Iterator[Piece]:
        cut.fetch_keys()
        pieces = cut.pieces(PIECE_BYTES)
        future = self.endpoint.submit(self._next, pieces)
        while (piece := self._result(future)) is not None:
            future = self.endpoint.submit(self._next, pieces)
            yield piece
            self._throttle()
            self._wait_for_link(sum(array.nbytes for array in piece if isinstance(array, np.ndarray)))

    def _next(self, pieces: Iterator[Piece]) -> Piece | None:
        """The next piece; runs in the endpoint's thread, and counts the CPU time that it takes."""
        began = time.thread_time()
        piece = next(pieces, None)
        self._reading += time.thread_time() - began
        return piece

    def _throttle(self) -> None:
        """Sleep until reading and writing have used no more than `CORE_SHARE` of the time since the last rest.

        What counts is CPU time and not elapsed time, because a thread that waits for a core takes none from training.
        """
        now, spent = time.monotonic(), time.thread_time() + self._reading
        due = self._rested + (spent - self._spent) / CORE_SHARE
        if self.role.requests != self._requests:
            self._requests, self._last_request_at = self.role.requests, now
        if now - self._last_request_at < RECENT_SECONDS:
            time.sleep(min(max(due - now, 0), MAX_REST_SECONDS))
        else:
            due = now  # no client waits, so writing goes on at full speed
        self._rested, self._spent = max(due, time.monotonic()), spent  # a rest cut short at its maximum is still due

    def _wait_for_link(self, nbytes: int) -> None:
        """Sleep until the next piece may leave, as `dps.limits.bandwidth` allows."""
        budget = self.role.relay.budget
        budget.spend(nbytes, self.endpoint.now())
        while not self.stop and (left := budget.due(now := self.endpoint.now()) - now) > 0:
            time.sleep(min(left, STOP_CHECK_SECONDS))

    def wait(self, function: Callable[..., R], *args: object) -> R:
        return self._result(self.endpoint.submit(function, *args))

    def _result(self, future: Future[R]) -> R:
        while True:
            if self.stop:
                future.cancel()
                raise CheckpointError("the checkpoint was given up")
            try:
                return future.result(STOP_CHECK_SECONDS)
            except TimeoutError:
                pass  # the endpoint is busy, or has ended: check `stop` again
