"""What a server does beside its loop, on virtual time: functions, large ops, and the files of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from dps.engine.checkpoints.shard_file import FileRecord
from dps.engine.server.beside_thread import Outcome
from dps.engine.server.checkpoint_writer import Writing
from dps.engine.server.replicas import Replica
from dps.engine.simulation.world import Party, Task
from dps.engine.state.snapshot import Cut, Piece
from dps.errors import CheckpointError

__all__ = ["MAX_PIECE_SECONDS", "SimRunner", "SimWriting"]

T = TypeVar("T")
POLL_SECONDS = 0.01  # between two checks whether a writing has ended
MAX_PIECE_SECONDS = 0.02  # that a server takes for a piece of a shard
MAX_FUNCTION_SECONDS = 0.02  # before and after a function
PIECE_BYTES = 256  # so small that a shard has several


class SimRunner:
    """Runs functions and large ops at some moment of virtual time; the server goes on meanwhile."""

    def __init__(self, party: Party):
        self._party = party

    def run(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]) -> None:
        def begin() -> None:
            try:
                outcome = Outcome(work(), None)
            except Exception as error:
                outcome = Outcome(None, error)
            self._party.later(self._party.world.random.uniform(0.0, MAX_FUNCTION_SECONDS), done, outcome)

        self._party.later(self._party.world.random.uniform(0.0, MAX_FUNCTION_SECONDS), begin)

    def close(self) -> None:
        pass


class SimWriting(Writing):
    """The writing of a checkpoint's files, as a task of the server's party. The server goes on between two pieces."""

    def __init__(
        self, party: Party, number: int, replicas: list[Replica], write: Callable[[Replica, Writing], FileRecord]
    ):
        super().__init__(number, replicas, write)
        self._party = party
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._party.spawn(self.work)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, seconds: float) -> None:
        until = self._party.now() + seconds
        while self.is_alive() and self._party.now() < until:
            self._party.sleep(POLL_SECONDS)

    def pieces(self, cut: Cut) -> Iterator[Piece]:
        cut.fetch_keys()
        for piece in cut.pieces(PIECE_BYTES):
            if self.stop:
                raise CheckpointError("the checkpoint was given up")
            yield piece
            self._party.sleep(self._party.world.random.uniform(0.0, MAX_PIECE_SECONDS))

    def wait(self, function: Callable[..., T], *args: object) -> T:
        return function(*args)
