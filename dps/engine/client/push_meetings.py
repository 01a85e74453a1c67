"""PushMeetings: where the trainers of one process put together what they have pushed in a clock.

The processes of a machine meet by the same rules (`machine_meeting.py`); a trainer is a process then.

A *round* collects the pushes of one clock. Each trainer brings its part at the end of its clock. One trainer *leads* a
round: it sends the sums, and says for which tables the servers have taken them. The last member of the meeting to come
leads, because then all parts are there. If a member is late, the first trainer whose patience ends leads with what is
there. A trainer that comes to that clock later leads a round of its own at once, because no other comes.

Nothing here knows servers or time. A trainer that leads may fail, and one that waits may stop waiting, because what a
round has not sent, or perhaps not, each trainer sends itself, and servers tell the repeats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from dps.engine.client.verbs import Keys

if TYPE_CHECKING:
    from dps.engine.client.machine_meeting import MachineMeeting
    from dps.engine.client.sum_choice import SumChoice

__all__ = ["Brought", "KeptPush", "PushMeeting", "PushMeetings", "Round", "RunMeetings"]

Part = TypeVar("Part")  # what a member brings
MOST_MEETINGS = 16  # A process keeps so many, which is more than the runs that it has at once.


class KeptPush(NamedTuple):
    """A push to a table that has not been sent yet."""

    named: Keys  # its keys as they were given, where these are a slice, or None for all rows; else `keys`
    keys: np.ndarray
    values: np.ndarray  # [m, dim]
    first: int  # number of its first op
    end: int  # number behind its last op


class Brought(NamedTuple):
    """A trainer's part of a round: the origin of its ops, and its pushes by table, ordered by their numbers."""

    origin: int
    attempt: int
    pushes: dict[str, list[KeptPush]]


class Round(Generic[Part]):
    """The pushes of some trainers at one clock.

    Attributes
    ----------
    brought : dict
        By trainer.
    led : bool
        A trainer leads the round, so no other brings anything more.
    late : bool
        A trainer has led a round of this clock, or of a later one, before.
    is_left : bool
        A trainer of the round waits for the outcome no more.
    sent : frozenset of str or None
        The tables whose sums servers have taken; None while that is not known.
    """

    def __init__(self, clock: int, late: bool = False):
        self.clock, self.late = clock, late
        self.brought: dict[object, Part] = {}
        self.led = self.is_left = False
        self.sent: frozenset[str] | None = None


class PushMeeting(Generic[Part]):
    """The trainers of one run in one process, and their rounds.

    Attributes
    ----------
    changed : threading.Condition
        A trainer that waits is told where a round is settled, and where another trainer has left.

    Examples
    --------
    >>> meeting: PushMeeting[Brought] = PushMeeting()
    >>> for trainer in ("a", "b"):
    ...     meeting.join(trainer)
    >>> round = meeting.bring("a", 3, Brought(7, 0, {}))
    >>> meeting.leads(round, late=False), meeting.bring("b", 3, Brought(8, 0, {})) is round
    (False, True)
    >>> meeting.leads(round, late=False), meeting.leads(round, late=True)
    (True, False)
    >>> late = meeting.bring("c", 3, Brought(9, 0, {}))
    >>> late is round, meeting.leads(late, late=False)
    (False, True)
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._members: set[object] = set()  # the trainers for which a round waits
        self._rounds: dict[int, Round[Part]] = {}  # by clock, the rounds that no trainer leads yet
        self._latest = -1  # the clock of the latest round that a trainer has led

    def join(self, trainer: object) -> None:
        """From now on rounds wait for this trainer, too."""
        with self.changed:
            self._members.add(trainer)

    def leave(self, trainer: object) -> None:
        """No round waits for this trainer any more. What it has brought to one that no trainer leads goes with it,
        because another attempt at it may have pushed other rows meanwhile."""
        with self.changed:
            self._members.discard(trainer)
            for clock, joined in list(self._rounds.items()):
                joined.brought.pop(trainer, None)
                if not joined.brought:
                    del self._rounds[clock]
            self.changed.notify_all()  # because all others of a round may be there now

    def withdraw(self, trainer: object, joined: Round[Part]) -> bool:
        """Take what a trainer has brought back, unless some trainer leads the round; whether that was so."""
        with self.changed:
            if joined.led or joined.late or trainer not in joined.brought:
                return False
            del joined.brought[trainer]
            if not joined.brought:
                del self._rounds[joined.clock]
            return True

    def bring(self, trainer: object, clock: int, brought: Part) -> Round[Part]:
        """The round to which the trainer has brought its part."""
        with self.changed:
            self._members.add(trainer)
            joined = self._rounds.get(clock)
            if joined is None:
                joined = Round[Part](clock, late=clock <= self._latest)
                if not joined.late:
                    self._rounds[clock] = joined
            joined.brought[trainer] = brought
            return joined

    def leads(self, joined: Round[Part], late: bool) -> bool:
        """Whether the caller is to lead a round to which it has brought its part; `late`: it waits for no other.

        A trainer that has kept the others waiting is no member until it comes again, so it does so once.
        """
        with self.changed:
            if joined.led or not (late or joined.late or self._members <= joined.brought.keys()):
                return False
            joined.led = True
            if not joined.late:
                self._members &= joined.brought.keys()
                self._latest = max(self._latest, joined.clock)
                del self._rounds[joined.clock]
            return True

    def settle(self, joined: Round[Part], sent: frozenset[str]) -> None:
        """The round is over: servers have taken the sums for these tables."""
        with self.changed:
            joined.sent = sent
            self.changed.notify_all()


class RunMeetings(NamedTuple):
    """What the trainers of one run in one process share: where they meet, where their process meets those of its
    machine, and whether they sum where that is measured."""

    trainers: PushMeeting[Brought]
    machine: MachineMeeting
    choice: SumChoice


class PushMeetings:
    """The meetings of a process, by run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[tuple[object, ...], RunMeetings] = {}

    def of_run(self, run: tuple[object, ...], make: Callable[[], RunMeetings]) -> RunMeetings:
        """The meetings of a run. A process keeps those of a few runs, because a run that is over needs none."""
        with self._lock:
            meetings = self._meetings.pop(run, None) or make()
            self._meetings[run] = meetings
            while len(self._meetings) > MOST_MEETINGS:
                del self._meetings[next(iter(self._meetings))]
            return meetings
