"""Work leases: the controller's part of re-assigning work. `coordination/leases.py` has the rules; this file applies
them to the LEASE frames of trainers.

`wire/messages.py` has the fields: a `LeaseRequest` brings news of a trainer's portions and asks for one, or whether
one is still wanted. `LeaseAnswer` is the answer.

Every request is answered at once, and is idempotent: a portion that was declared, done or given back stays so, and a
trainer that asks for the next portion while it holds one is given that one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dps.engine.coordination.leases import Leases
from dps.engine.wire.messages import LeasableBatches, LeaseAnswer, LeaseRequest
from dps.errors import DPSError, ProtocolError

__all__ = ["WorkLeases"]

# Pauses until a trainer without a portion asks again: the least and, with few trainers, the longest.
ASK_AGAIN_SECONDS = 0.002, 0.05
# Requests of all trainers that ask again, together.
MAX_REQUESTS_PER_SECOND = 500
# Longest time that a trainer may claim for a step.
MAX_SECONDS = 1e9


class WorkLeases:
    """The portions of one run.

    `allot`, given a number, returns the first of so many new origins in a row.
    `origin` is that of ops made in portion 0; those of the other portions follow.
    """

    def __init__(self, shares: Sequence[Sequence[int]], start: int, allot: Callable[[int], int]):
        self.leases = Leases(shares, start)
        self.origin = allot(self.total)

    @property
    def total(self) -> int:
        return self.leases.total

    def asked(
        self, trainer: int, request: LeaseRequest, now: float, held_back: Callable[[], bool] = bool
    ) -> LeaseAnswer:
        """The answer to a LEASE; `held_back` says whether the trainer would have to wait if it ticked now."""
        try:
            return self._answer(trainer, request, now, held_back)
        except DPSError:
            raise
        except (TypeError, KeyError, ValueError, IndexError, OverflowError):  # numbers that mean nothing in this run
            raise ProtocolError(f"a trainer's LEASE that makes no sense: {request!r:.200}") from None

    def _answer(self, trainer: int, request: LeaseRequest, now: float, held_back: Callable[[], bool]) -> LeaseAnswer:
        epoch, answer = request.epoch, LeaseAnswer()
        if request.declare is not None:
            self.leases.declare(trainer, dict(request.declare))
        if request.how is not None:
            self.leases.agree(trainer, epoch, request.how)
        if request.fetched is not None:
            self.leases.fetched(trainer, _seconds(request.fetched))
        if request.done is not None:
            portion, pace = request.done
            self.leases.report(trainer, portion, epoch, _seconds(pace))
        if request.at is not None:
            portion, completed = request.at
            answer.wanted = self.leases.wanted(trainer, portion, epoch, completed, now)
        if request.next is not None:
            have, without = set(request.next.have), set(request.next.without)
            given = self.leases.next(trainer, epoch, now, have, without)
            if given is not None:
                answer.portion = LeasableBatches(*given)
            else:
                answer.missing = self.leases.missing(trainer, epoch, without) if without else None
                again = self.leases.pending(epoch, now)
                stays = answer.missing is not None or held_back() or self.leases.stays(trainer, epoch, without)
                if again is not None and stays:
                    answer.again = max(
                        ASK_AGAIN_SECONDS[0],
                        self.leases.present / MAX_REQUESTS_PER_SECOND,
                        min(again, ASK_AGAIN_SECONDS[1]),
                    )
                else:
                    self.leases.over(trainer, epoch)
        return answer

    def ticked(self, trainer: int, clock: int, lowest: int) -> None:
        self.leases.ticked(trainer, clock, lowest)

    def lost(self, trainer: int, for_good: bool = False) -> None:
        self.leases.lost(trainer, for_good)

    def describe(self) -> dict[str, int]:
        """For the driver and the dashboard: `left` of the earliest epoch under way, the others of the whole run."""
        rules = self.leases
        return {"left": rules.left(), "done": rules.done, "twice": rules.twice, "moved": rules.moved}


def _seconds(seconds: float) -> float:
    """A time that a trainer reports; a negative one, or NaN, counts as 0."""
    return min(seconds, MAX_SECONDS) if seconds >= 0 else 0.0
