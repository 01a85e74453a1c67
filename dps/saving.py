"""Saver: a server's part in checkpoints. It cuts its primaries' shards, and writes the cuts while training goes on.

The controller leads (`checkpointing.py`): *cut* at a clock that nobody has reached, *complete* when everybody has,
*save*, *end*. Cutting and reading pieces happen in the endpoint's thread, between requests; files are written by a
thread of their own, which has the next piece read while it writes one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dps.copies import Copy
from dps.errors import CheckpointError, DPSError, MovedError
from dps.serving import Serving
from dps.shard_files import FileRecord, write_shard

__all__ = ["Saver"]

logger = logging.getLogger(__name__)

PIECE = 1 << 20  # bytes that are read in one go, between two requests
SHARE = 0.06  # of one core: what reading and writing may take, while there are requests;
RECENT = 0.1  # seconds after the last one: there are none any more
LONGEST_REST = 0.25  # seconds
LOOK = 0.5  # seconds between two looks whether somebody still wants the files
PATIENCE = 10.0  # seconds for a thread to stop writing


class Saver:
    """What one server does for checkpoints; one at a time.

    Parameters
    ----------
    serving : Serving
        Whose shards.
    endpoint
        Offers `call` and `ask`, which run a function in its thread.
    """

    def __init__(self, serving: Serving, endpoint: Any):
        self.serving, self.endpoint = serving, endpoint
        self._copies: list[Copy] = []
        self._clock: int | None = None
        self._track = False
        self._bases: dict[Copy, str] = {}  # copy -> the checkpoint that its changes are counted from
        self._writing: Writing | None = None

    # -- in the endpoint's thread

    def cut(self, tables: Sequence[int], clock: int | None, parent: str | None, track: bool) -> list[tuple[int, int]]:
        """Begin to cut every primary of these tables at `clock` (None: now); (table, shard) of each.

        `parent` is the checkpoint since which changes suffice; with `track`, changes are kept track of from now on.

        Raises
        ------
        InputError
            Too late: an op of that clock was applied already. Nothing is cut then.
        """
        self.end(None)
        self._clock, self._track = clock, track
        try:
            for table in [self.serving.tables[number] for number in tables if number in self.serving.tables]:
                for _, copy in sorted(table.copies.items()):
                    if copy.primary and not copy.deposed:
                        if track:
                            copy.shard.track_changes()
                        known = parent is not None and self._bases.get(copy) == parent
                        copy.shard.begin_cut(clock, changed_only=known)
                        self._copies.append(copy)
        except DPSError:
            self.end(None)
            raise
        return [(copy.spec.id, copy.number) for copy in self._copies]

    def complete(self) -> None:
        """Every op of an earlier clock has been acknowledged: what comes now is outside.

        Raises
        ------
        MovedError
            A shard has another primary since, or its table was dropped; the checkpoint is to be begun anew.
        """
        for copy in self._copies:
            gone = copy.spec.id not in self.serving.tables or copy.shard.cut is None
            if gone or not copy.serves or not self.serving.leads(copy):
                raise MovedError(f"shard {copy.number} of table {copy.spec.name!r} has moved while it was cut")
        for copy in self._copies:
            if self._clock is not None:
                self.serving.close_before(copy, self._clock)
            copy.shard.cut.complete()

    def end(self, name: str | None) -> None:
        """The checkpoint `name` was committed; or (None) it was given up."""
        if self._writing is not None:
            self._writing.stop = True
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.shard.cut is not None:
                if name is not None and self._track:
                    copy.shard.cut.commit()
                    self._bases[copy] = name
                copy.shard.end_cut()
        self._bases = {copy: base for copy, base in self._bases.items() if self._holds(copy)}

    def _holds(self, copy: Copy) -> bool:
        table = self.serving.tables.get(copy.spec.id)
        return table is not None and table.copies.get(copy.number) is copy and not copy.deposed

    # -- in the actor's thread

    def save(self, url: str, name: str, storage_options: dict[str, Any]) -> None:
        """Begin to write the cuts into the checkpoint `name`; `saved` tells how far it is."""
        self.rest()

        def write(copy: Copy, writing: Writing) -> FileRecord:
            cut = copy.shard.cut
            return write_shard(
                url,
                name,
                copy.spec,
                copy.number,
                cut.rows,
                writing.pieces(cut),
                increment=cut.changed_only,
                ledger=writing.wait(cut.ledger.to_arrays, False),
                metadata={"latest": cut.latest, "clock": cut.clock},
                storage_options=storage_options,
            )

        self._writing = Writing(self.serving, self.endpoint, self._copies, write)
        self._writing.start()

    def saved(self) -> list[FileRecord] | None:
        """The files, when all are written; None before. Raises what went wrong."""
        writing = self._writing
        if writing is None:
            raise MovedError(f"server {self.serving.number} has nothing to write")
        if writing.error is not None:
            raise writing.error
        return None if writing.is_alive() else writing.files

    def rest(self) -> None:
        """Wait until the thread of an earlier checkpoint, which was given up, has stopped writing."""
        if self._writing is not None:
            self._writing.join(PATIENCE)
            if self._writing.is_alive():
                raise CheckpointError(f"server {self.serving.number} still writes an earlier one: is the disk hung?")

    def close(self) -> None:
        if self._writing is not None:
            self._writing.stop = True
            self._writing.join(PATIENCE)


class Writing(threading.Thread):
    """The files of one checkpoint on one server, being written. Stops soon after `stop` was set."""

    def __init__(
        self, serving: Serving, endpoint: Any, copies: list[Copy], write: Callable[[Copy, Writing], FileRecord]
    ):
        super().__init__(name=f"dps-saver-{serving.number}", daemon=True)
        self.serving, self.endpoint, self.copies, self.write = serving, endpoint, copies, write
        self.files: list[FileRecord] = []
        self.error: DPSError | None = None
        self.stop = False
        self._reading = 0.0  # seconds on a core, in the endpoint's thread
        self._requests, self._asked = serving.requests, -RECENT  # so many there were, the last at that time
        self._rested, self._spent = time.monotonic(), 0.0  # when we rested last, and what we had cost by then

    def run(self) -> None:
        try:
            for copy in self.copies:
                self.files.append(self.write(copy, self))
        except DPSError as error:
            self.error = error
        except Exception as error:
            self.error = CheckpointError(f"server {self.serving.number} could not write: {error!r:.500}")

    def pieces(self, cut: Any) -> Iterator[Any]:
        """The cut's pieces; the next is read while one is written."""
        cut.fetch_keys()
        pieces = cut.pieces(PIECE)
        coming = self.endpoint.ask(self._next, pieces)
        while (piece := self._result(coming)) is not None:
            coming = self.endpoint.ask(self._next, pieces)
            yield piece
            self._rest()

    def _next(self, pieces: Iterator[Any]) -> Any:
        """In the endpoint's thread: the next piece, at a cost."""
        began = time.thread_time()
        piece = next(pieces, None)
        self._reading += time.thread_time() - began
        return piece

    def _rest(self) -> None:
        """Training comes first: of the time since the last rest we, and those who read for us, have a `SHARE`.

        What counts is time on a core, not how long it took: where cores are short, who waits for one takes none.
        """
        now, spent = time.monotonic(), time.thread_time() + self._reading
        due = self._rested + (spent - self._spent) / SHARE
        if self.serving.requests != self._requests:
            self._requests, self._asked = self.serving.requests, now
        if now - self._asked < RECENT:
            time.sleep(min(max(due - now, 0), LONGEST_REST))
        else:
            due = now  # nobody has waited for us
        self._rested, self._spent = max(due, time.monotonic()), spent  # what was not rested yet is owed

    def wait(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function gives in the endpoint's thread."""
        return self._result(self.endpoint.ask(function, *args))

    def _result(self, coming: Any) -> Any:
        while True:
            if self.stop:
                coming.cancel()
                raise CheckpointError("the checkpoint was given up")
            try:
                return coming.result(LOOK)
            except TimeoutError:
                pass  # a busy endpoint, or one that has ended
