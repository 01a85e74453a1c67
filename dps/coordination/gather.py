"""Collectives (barrier, allreduce, ...): all who have not left bring something, then all get everything. Pure.

One meeting at a time: who has brought something waits for the others. The tag says what is done, and those of one
meeting are equal, else somebody's program differs. The shell puts the number of the meeting into its tag: a repeat of
the meeting before (the answer was lost on its way) is then known by :attr:`Gather.last`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dps.errors import InputError

__all__ = ["Gather"]


class Gather:
    """The rule of a run's collectives: see the module's docstring.

    Parameters
    ----------
    parties : int
        How many trainers, numbered from 0.

    Examples
    --------
    >>> gather = Gather(2)
    >>> gather.arrive("1 sum", 1, "b")
    >>> gather.arrive("1 sum", 0, "a")
    {0: 'a', 1: 'b'}
    """

    def __init__(self, parties: int):
        if parties < 1:
            raise InputError(f"a meeting needs at least one party, not {parties}")
        self.parties = parties
        self.last: tuple[str, dict[int, Any]] | None = None  #: tag and payloads of the last complete meeting
        self._absent: set[int] = set()
        self._tag: str | None = None
        self._brought: dict[int, Any] = {}

    def arrive(self, tag: str, trainer: int, payload: Any) -> dict[int, Any] | None:
        """`trainer` brings `payload`. The payloads in trainer order when it was the last to come, else None.

        Twice in one meeting is once: the later payload counts.
        """
        if not 0 <= trainer < self.parties:
            raise InputError(f"there is no trainer {trainer}: the meeting has {self.parties}, numbered from 0")
        if self._brought and tag != self._tag:
            raise InputError(
                f"trainer {trainer} is at {tag!r} while {_trainers(sorted(self._brought))} at {self._tag!r}: "
                "all trainers must make the same collective calls in the same order"
            )
        self._absent.discard(trainer)
        self._tag = tag
        self._brought[trainer] = payload
        return self._complete()[1]

    def leave(self, trainer: int) -> tuple[str | None, dict[int, Any] | None]:
        """`trainer` is not waited for any more. Tag and payloads of the meeting that this completes, or (None, None).

        What it had brought to a meeting that goes on is forgotten.
        """
        self._absent.add(trainer)
        self._brought.pop(trainer, None)
        return self._complete()

    def join(self, trainer: int) -> None:
        """`trainer`, which had left, is waited for again."""
        self._absent.discard(trainer)

    def _complete(self) -> tuple[str | None, dict[int, Any] | None]:
        if self._tag is None or not self._brought or len(self._brought) + len(self._absent) < self.parties:
            return None, None
        self.last = self._tag, {n: self._brought[n] for n in sorted(self._brought)}
        self._tag, self._brought = None, {}
        return self.last


def _trainers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"trainer {numbers[0]} is"
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"trainers {shown} are"
