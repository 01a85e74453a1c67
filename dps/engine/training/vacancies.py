"""Vacancies: how a driver seats trainers while a run goes on, and goes on without those that are lost.

``ps.run(..., trainers="all")`` begins with a trainer on each free thread, and with more seats than trainers. Whenever
the driver looks at the workers, it seats a new trainer on each thread that has become free: of a worker that has come,
or of a task that has ended. The new trainer has no partitions of its own. It takes portions of those of others
(`leased_batches.py`), from the clock on at which the slowest trainer is. A trainer whose worker is gone is not begun
again elsewhere if the others can do its work, which the controller knows (`Leases.needs`); otherwise it is, as in any
run (`tasks.py`).
"""

from __future__ import annotations

import dask

from dps.engine.training.types import Control
from dps.errors import TrainerLostError

__all__ = ["SPARE_SEATS", "Vacancies"]

# Number of vacant seats of a run, beside one for each trainer that it begins with.
SPARE_SEATS = 16


class Vacancies:
    """The vacant seats of a run, by their numbers.

    `call` reaches the controller. The run began with `begun` trainers, and has so many `seats`.

    Examples
    --------
    >>> vacancies = Vacancies(lambda verb, **fields: True, run=1, begun=2, seats=4)
    >>> vacancies.take(3), vacancies.give_up(2, has_partitions=False), vacancies.take(3)
    ([2, 3], True, [2])
    """

    def __init__(self, call: Control, run: int, begun: int, seats: int):
        self._call, self._run = call, run
        self._taken = begun  # seats that trainers have had
        self._free = list(range(begun, seats))
        self._losses = 0  # trainers that were lost since a portion was done last
        self._done = 0  # portions

    @property
    def free(self) -> int:
        """How many seats are vacant."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The numbers of so many vacant seats, or of all, which are vacant no more."""
        taken, self._free = self._free[:count], self._free[count:]
        self._taken = max(self._taken, *(number + 1 for number in taken), 0)
        return taken

    def give_up(self, trainer: int, has_partitions: bool) -> bool:
        """Whether the run goes on without a trainer that is gone. The seat of one without partitions is vacant then."""
        if not self._call("give_up_trainer", run=self._run, trainer=trainer):
            return False
        if not has_partitions:
            self._free.append(trainer)
        return True

    def note_loss(self, done: int) -> None:
        """A trainer was lost, when so many portions were done; TrainerLostError where trainers do nothing but end.

        Many may be lost at once, because a cluster shrinks. So as many losses are allowed as if each seat had been
        taken again and again.
        """
        self._losses, self._done = 1 + self._losses * (done == self._done), done
        allowed = int(dask.config.get("distributed.scheduler.allowed-failures")) * self._taken
        if self._losses > allowed:
            raise TrainerLostError(
                f"{self._losses} trainers were lost with their workers since the last portion of the data was done: do "
                f"their workers run out of memory, or crash? ({allowed} are allowed: "
                f"distributed.scheduler.allowed-failures for each of the {self._taken} seats that trainers have had)"
            )
