"""The threads of a run, as its driver asks the controller for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

from dps.engine.training.types import Control, Json
from dps.errors import DPSError, TooFewWorkersError

__all__ = ["Threads"]

TRIES = 5  # because the tasks of a run that has just ended may still be on their threads
PAUSE_SECONDS = 0.25  # between two tries


class Threads:
    """What a run has reserved, from the first of its trainers to its end.

    `driver` is the id of the Dask client that will submit the tasks.
    """

    def __init__(self, call: Control, driver: str):
        self._call, self._driver = call, driver
        self.keys: list[str] = []  # of the tasks that they are reserved for

    def ask(self, trainers: int | None, most: int, holding: Sequence[str], seconds: float) -> Json:
        """Threads for so many trainers, if so many are free now; see `Seating.take`."""
        request: Json = {"trainers": trainers, "most": most, "holding": sorted(set(holding)), "seconds": seconds}
        found: Json = self._call("take_threads", driver=self._driver, **request)
        self.keys += [key for _, key in found["seats"]]
        return found

    def take(
        self, session: str, trainers: int | None, holders: list[list[str]], seconds: float
    ) -> list[tuple[str, str]]:
        """(worker, key of the task) for each trainer, reserved for `seconds`; `holders` are those of each partition.

        Raises TooFewWorkersError if so many threads are not free, after a few tries.
        """
        holding = [worker for workers in holders for worker in workers]
        for tries in range(1, TRIES + 1):
            found = self.ask(trainers, len(holders), holding, seconds)
            if found["seats"]:
                return list(found["seats"])
            if not found["later"]:
                break
            if tries < TRIES:
                time.sleep(PAUSE_SECONDS)
        many = f" ({tries} tries within {PAUSE_SECONDS * (tries - 1):g} s)" if tries > 1 else ""
        if found["free"]:
            raise TooFewWorkersError(
                f"{trainers} trainers asked for and {found['free']} threads are free for them{many}: "
                f"{found['numbers']}. All trainers of a run must run at once; add workers or threads, or ask for fewer"
            )
        raise TooFewWorkersError(
            f"no thread is free for trainers of parameter server {session!r}{many}: {found['numbers']}. Add workers, "
            f"or wait for the tasks to end"
        )

    def give_back(self, keys: Collection[str]) -> None:
        """These tasks are over, or will not come: threads that are still reserved for them are free for others."""
        over = [key for key in self.keys if key in keys]
        if over:
            self.keys = [key for key in self.keys if key not in keys]
            with contextlib.suppress(DPSError):  # because a reservation ends by itself
                self._call("release_threads", keys=over)
