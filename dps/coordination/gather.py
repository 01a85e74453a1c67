"""Collectives (barrier, allreduce, ...): all who have not left bring something, then all get one answer. Pure.

One meeting at a time: who has brought something waits for the others. The tag says what is done, and those of one
meeting are equal, else somebody's program differs.

A trainer that is run again repeats its collective calls from the first one on, while the others have gone ahead. So
each call has a **place** in its trainer's program: (clock, how many calls before it at that clock). Places of one
trainer only grow, whatever the others' are. A call at a place where the trainer has met the others already is
answered from what is kept of that meeting (:meth:`Gather.recall`); so is one whose answer was lost on its way. A later
one is for the open meeting, where it replaces its predecessor's, if there was one. Any other is an error: the program
went another way than before.

What is kept is bounded, the oldest goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dps.errors import InputError

__all__ = ["Gather", "Meeting", "Place"]

KEPT_PLACES = 1 << 18  # places of all trainers in all meetings that are remembered,
KEPT_BYTES = 1 << 26  # and the answers to them

Place = tuple[int, int]  # clock, calls before at that clock


class Meeting(NamedTuple):
    """A meeting that is complete."""

    tag: str
    places: dict[int, Place]  # trainer -> where in its program it was
    answer: Any


class Gather:
    """The rule of a run's collectives: see the module's docstring.

    Parameters
    ----------
    parties : int
        How many trainers, numbered from 0.
    combine : callable, optional
        Makes the answer of (tag, payloads by trainer); the payloads themselves by default.

    Examples
    --------
    >>> gather = Gather(2, lambda tag, brought: "".join(brought.values()))
    >>> gather.arrive("sum", 1, (0, 0), "b")
    >>> gather.arrive("sum", 0, (0, 0), "a").answer
    'ab'
    >>> gather.recall("sum", 1, (0, 0)).answer  # it was run again, and repeats its call
    'ab'
    """

    def __init__(self, parties: int, combine: Callable[[str, dict[int, Any]], Any] | None = None):
        if parties < 1:
            raise InputError(f"a meeting needs at least one party, not {parties}")
        self.parties = parties
        self._combine = combine or (lambda tag, brought: brought)
        self._absent: set[int] = set()
        self._tag: str | None = None
        self._brought: dict[int, Any] = {}
        self._places: dict[int, Place] = {}  # of those who have brought something
        self._last: list[Place] = [(-1, 0)] * parties  # the latest place at which each has met the others
        self._kept: deque[Meeting] = deque()
        self._met: list[dict[Place, Meeting]] = [{} for _ in range(parties)]  # the same, by trainer and place
        self._bytes = self._entries = 0  # of what is kept

    def recall(self, tag: str, trainer: int, place: Place) -> Meeting | None:
        """The meeting that `trainer` has been to at `place` already; None if that is still to come."""
        self._check(trainer)
        met = self._met[trainer].get(place)
        if met is not None and met.tag == tag:
            return met
        if met is None and place > self._last[trainer]:
            return None
        went = "none" if met is None else repr(met.tag)
        raise InputError(
            f"trainer {trainer}, run again, is at {tag!r} (clock {place[0]}, call {place[1]}), where it made {went} "
            f"before: it must make the same collective calls again. (Of very many calls only the last are remembered.)"
        )

    def arrive(self, tag: str, trainer: int, place: Place, payload: Any) -> Meeting | None:
        """`trainer` brings `payload` to the open meeting. The meeting, when it was the last to come, else None.

        Twice in one meeting is once: the later payload counts.
        """
        self._check(trainer)
        if self._brought.keys() - {trainer} and tag != self._tag:
            raise InputError(
                f"trainer {trainer} is at {tag!r} while {_trainers(sorted(self._brought))} at {self._tag!r}: "
                "all trainers must make the same collective calls in the same order"
            )
        self._absent.discard(trainer)
        self._tag = tag
        self._brought[trainer], self._places[trainer] = payload, place
        return self._complete()

    def leave(self, trainer: int) -> Meeting | None:
        """`trainer` is not waited for any more. The meeting that this completes, or None.

        What it had brought to a meeting that goes on is forgotten.
        """
        self._absent.add(trainer)
        self._brought.pop(trainer, None)
        return self._complete()

    def join(self, trainer: int) -> None:
        """`trainer`, which had left, is waited for again."""
        self._absent.discard(trainer)

    def _complete(self) -> Meeting | None:
        if self._tag is None or not self._brought or len(self._brought) + len(self._absent) < self.parties:
            return None
        brought = {n: self._brought[n] for n in sorted(self._brought)}
        places = {n: self._places[n] for n in brought}
        meeting = Meeting(self._tag, places, self._combine(self._tag, brought))
        self._tag, self._brought, self._places = None, {}, {}
        self._keep(meeting)
        return meeting

    def _keep(self, meeting: Meeting) -> None:
        self._kept.append(meeting)
        self._entries += len(meeting.places)
        self._bytes += _size(meeting)
        for trainer, place in meeting.places.items():
            self._last[trainer] = place
            self._met[trainer][place] = meeting
        while len(self._kept) > 1 and (self._entries > KEPT_PLACES or self._bytes > KEPT_BYTES):
            oldest = self._kept.popleft()
            self._entries -= len(oldest.places)
            self._bytes -= _size(oldest)
            for trainer, place in oldest.places.items():
                del self._met[trainer][place]

    def _check(self, trainer: int) -> None:
        if not 0 <= trainer < self.parties:
            raise InputError(f"there is no trainer {trainer}: the meeting has {self.parties}, numbered from 0")


def _size(meeting: Meeting) -> int:
    return len(meeting.tag) + (len(meeting.answer) if isinstance(meeting.answer, bytes) else 0)


def _trainers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"trainer {numbers[0]} is"
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"trainers {shown} are"
