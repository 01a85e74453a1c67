"""Holding: what a worker's process does with its servers when the worker has lost its scheduler. Pure.

Theory of operation
-------------------
A Dask worker closes when the connection to its scheduler breaks, and the rows of its servers would end with its
process. So the process is *held*: it goes on without a worker, looks for a scheduler, and joins the one that it finds
with another worker. A `SchedulerLoss` says what is next. What it holds to, and why:

* A process is held only if its setting allows a time of grace, it has servers, and the scheduler is lost. A worker that
  is told to close is still connected. Servers that were told of a planned end (*released*) are not counted.
* A scheduler that answers with the id of the lost one was not lost: it has removed this worker, and its controller has
  replaced the servers. So the process ends, and joins nothing.
* A *planned* restart of the scheduler is a loss, too, although the worker is told to close: the servers were told
  before. The scheduler that answers with the known id has only not ended yet.
* The time of grace counts from the loss. It bounds all waiting: for a scheduler, for the worker to join it, and until a
  controller there has taken up the servers.
* A server that no controller has taken up within that time is closed. Where the process has joined a scheduler, its
  worker stays, because it is a worker like all others then.
* Without servers there is nothing to hold, at any time.
"""

from __future__ import annotations

import enum

__all__ = ["HoldStep", "SchedulerLoss"]


class HoldStep(enum.Enum):
    """The next thing that a held process does, because of what it has found."""

    LOOK = "pause, and look for a scheduler again"
    JOIN = "join the scheduler that was found"
    WAIT = "pause until a controller takes the servers up"
    CLOSE = "close the servers that no controller has taken up, and keep the worker"
    STAY = "keep the worker: nothing is left to decide"
    END = "let the process end, and the servers with it"


class SchedulerLoss:
    """One loss of a scheduler.

    Parameters
    ----------
    began : float
        Time of the loss, in seconds.
    grace : float
        Seconds for which servers may be without a controller; 0: none, so nothing is held.
    lost : str or None
        Id of the lost scheduler; None: it is not known, so each scheduler counts as another one.
    planned : bool
        Whether the scheduler said before it ended that another one would follow.

    Examples
    --------
    >>> loss = SchedulerLoss(0.0, 60.0, "Scheduler-a")
    >>> loss.holds(servers=1, cut_off=True), loss.holds(servers=1, cut_off=False)
    (True, False)
    >>> [loss.look(now, 1, found).name for now, found in ((1, None), (2, "Scheduler-b"), (3, "Scheduler-a"))]
    ['LOOK', 'JOIN', 'END']
    >>> [loss.wait(now, unclaimed).name for now, unclaimed in ((3, 1), (3, 0), (60, 1))]
    ['WAIT', 'STAY', 'CLOSE']
    >>> loss = SchedulerLoss(0.0, 60.0, "Scheduler-a", planned=True)
    >>> loss.holds(servers=1, cut_off=False), loss.look(1, 1, "Scheduler-a").name
    (True, 'LOOK')
    """

    def __init__(self, began: float, grace: float, lost: str | None, planned: bool = False):
        self.began, self.grace, self.lost, self.planned = began, grace, lost, planned

    def holds(self, servers: int, cut_off: bool) -> bool:
        """Whether a closing worker with that many servers is held; `cut_off`: its connection broke before it closed."""
        return self.grace > 0 and servers > 0 and (cut_off or self.planned)

    def left(self, now: float) -> float:
        """Seconds of the grace that are left."""
        return max(0.0, self.began + self.grace - now)

    def look(self, now: float, servers: int, found: str | None) -> HoldStep:
        """The next step of a process without a worker; `found` is the id of the scheduler that answers, if one does."""
        lives = found is not None and found == self.lost
        if servers == 0 or self.left(now) == 0 or (lives and not self.planned):
            return HoldStep.END
        return HoldStep.LOOK if found is None or lives else HoldStep.JOIN

    def wait(self, now: float, unclaimed: int) -> HoldStep:
        """The next step of a process that has joined; `unclaimed` of its servers have no controller yet."""
        if unclaimed == 0:
            return HoldStep.STAY
        return HoldStep.WAIT if self.left(now) > 0 else HoldStep.CLOSE
