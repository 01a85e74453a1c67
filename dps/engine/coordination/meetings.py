"""Collectives (barrier, allreduce, ...): every trainer that has not left brings a payload; all get one answer. Pure.

One collective operation is a **meeting**. One meeting is open at a time: a trainer that has brought its payload waits
for the others. The tag names the operation. The tags of one meeting must be equal; if they are not, the trainers'
programs differ.

A trainer that is run again repeats its collective calls from the first one on, while the others have gone ahead. So
each call has a **place** in its trainer's program: (clock, how many calls before it at that clock). The places of one
trainer only grow; the places of different trainers are independent. A call at a place where the trainer has met the
others already is answered from the kept answer of that meeting (:meth:`Meetings.recall`), and so is a call whose answer
was lost on its way. A call at a later place is for the open meeting, where it replaces the call of the trainer's
earlier attempt, if there was one. A call at any other place is an error, because the program took another path than
before.

The kept meetings are bounded; the oldest is dropped first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from dps.errors import InputError

__all__ = ["CallPlace", "Meeting", "Meetings"]

KEPT_PLACES = 1 << 18  # places of all trainers in all kept meetings together
KEPT_BYTES = 1 << 26  # bytes of the tags and answers of all kept meetings

Payload = TypeVar("Payload")
Result = TypeVar("Result")
# Place of a collective call: the clock, and the number of calls before it at that clock.
CallPlace = tuple[int, int]


class Meeting(NamedTuple, Generic[Result]):
    """A meeting to which all trainers came."""

    tag: str
    places: dict[int, CallPlace]  # trainer -> the place of its call
    answer: Result


class Meetings(Generic[Payload, Result]):
    """The rule of a run's collectives: see the module's docstring.

    `combine` makes the answer of (tag, payloads by trainer).

    Examples
    --------
    >>> meetings = Meetings(2, lambda tag, payloads: "".join(payloads.values()))
    >>> meetings.arrive("sum", 1, (0, 0), "b")
    >>> meetings.arrive("sum", 0, (0, 0), "a").answer
    'ab'
    >>> meetings.recall("sum", 1, (0, 0)).answer  # trainer 1 was run again, and repeats its call
    'ab'
    """

    def __init__(self, parties: int, combine: Callable[[str, dict[int, Payload]], Result]):
        if parties < 1:
            raise InputError(f"a meeting needs at least one party, not {parties}")
        self.parties = parties
        self._combine = combine
        self._absent: set[int] = set()  # trainers that have left
        self._tag: str | None = None  # tag of the open meeting
        self._payloads: dict[int, Payload] = {}  # payloads of the open meeting, by trainer
        self._places: dict[int, CallPlace] = {}  # places of the calls that brought these payloads, by trainer
        self._last: list[CallPlace] = [(-1, 0)] * parties  # place of the latest complete meeting of each trainer
        self._kept: deque[Meeting[Result]] = deque()  # the oldest first
        # The same, by trainer and place.
        self._met: list[dict[CallPlace, Meeting[Result]]] = [{} for _ in range(parties)]
        self._bytes = self._entries = 0  # bytes of the kept meetings, and places in them

    def recall(self, tag: str, trainer: int, place: CallPlace) -> Meeting[Result] | None:
        """The meeting that `trainer` has come to at `place` before; None if it has not been there yet."""
        self._check(trainer)
        met = self._met[trainer].get(place)
        if met is not None and met.tag == tag:
            return met
        if met is None and place > self._last[trainer]:
            return None
        earlier_tag = "none" if met is None else repr(met.tag)
        raise InputError(
            f"trainer {trainer}, run again, is at {tag!r} (clock {place[0]}, call {place[1]}), where it made "
            f"{earlier_tag} before: it must make the same collective calls again. (Of very many calls only the last "
            "are remembered.)"
        )

    def arrive(self, tag: str, trainer: int, place: CallPlace, payload: Payload) -> Meeting[Result] | None:
        """`trainer` brings `payload` to the open meeting. Returns the meeting if this completes it, else None.

        If a trainer brings two payloads to one meeting, the later one replaces the earlier one.
        """
        self._check(trainer)
        if self._payloads.keys() - {trainer} and tag != self._tag:
            raise InputError(
                f"trainer {trainer} is at {tag!r} while {_trainers(sorted(self._payloads))} at {self._tag!r}: "
                "all trainers must make the same collective calls in the same order"
            )
        self._absent.discard(trainer)
        self._tag = tag
        self._payloads[trainer] = payload
        self._places[trainer] = place
        return self._complete()

    def leave(self, trainer: int) -> Meeting[Result] | None:
        """No meeting waits for `trainer` any more. Returns the meeting that this completes, or None.

        Its payload is removed from a meeting that stays open.
        """
        self._absent.add(trainer)
        self._payloads.pop(trainer, None)
        return self._complete()

    def join(self, trainer: int) -> None:
        """`trainer`, which had left, is back: meetings wait for it again."""
        self._absent.discard(trainer)

    def _complete(self) -> Meeting[Result] | None:
        if self._tag is None or not self._payloads or len(self._payloads) + len(self._absent) < self.parties:
            return None
        payloads = {n: self._payloads[n] for n in sorted(self._payloads)}
        places = {n: self._places[n] for n in payloads}
        meeting = Meeting(self._tag, places, self._combine(self._tag, payloads))
        self._tag = None
        self._payloads = {}
        self._places = {}
        self._keep(meeting)
        return meeting

    def _keep(self, meeting: Meeting[Result]) -> None:
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
