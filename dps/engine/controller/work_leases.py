"""Work leases: the controller's part of re-assigning work. `coordination/leases.py` has the rules; this file applies
them to the LEASE frames of trainers.

`wire/messages.py` has the fields: a `LeaseRequest` brings news of a trainer's portions and asks for one, or whether
one is still wanted. `LeaseAnswer` is the answer.

Trainers that *lend* each other their partitions (Spark) say where they listen, and a trainer that is given a portion of
another one's partition is told that. A controller that has taken the run over knows nothing of all this. So it asks a
trainer to declare its partitions again before it gives it a portion, and gives no trainer a portion whose partition
no trainer lends at present.

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
    `lends` says whether trainers fetch partitions from each other.
    """

    def __init__(self, shares: Sequence[Sequence[int]], start: int, allot: Callable[[int], int], lends: bool = False):
        self.leases, self.lends = Leases(shares, start), lends
        self.peers: dict[int, str] = {}  # trainer -> where it lends its partitions
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
        if self.lends:
            self.leases.completed(trainer, epoch)
        if request.declare is not None:
            self.leases.declare(trainer, dict(request.declare))
        if request.declare is not None and request.peer is not None:
            self.peers[trainer] = request.peer
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
        if request.next is not None and request.declare is None and not self._knows(trainer):
            answer.declare = True
        elif request.next is not None:
            have, without = set(request.next.have), set(request.next.without)
            given = self.leases.next(trainer, epoch, now, have, without | (self._unlent(trainer) - have))
            if given is not None:
                answer.portion = LeasableBatches(*given)
                answer.peer = self._lender(trainer, given.partition)
            else:
                answer.missing = self.leases.missing(trainer, epoch, without) if without else None
                if answer.missing is None and self.lends:
                    answer.missing = self.leases.owed(trainer, epoch)
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

    def _knows(self, trainer: int) -> bool:
        """Whether a trainer has declared its partitions to this controller, as far as that may be in doubt."""
        return not self.lends or trainer in self.peers

    def _unlent(self, trainer: int) -> set[int]:
        """The partitions of other trainers that cannot be fetched now, because their owners are lost or not back."""
        if not self.lends or len(self.peers) == len(self.leases.shares):
            return set()
        shares = enumerate(self.leases.shares)
        return {n for owner, share in shares if owner != trainer and owner not in self.peers for n in share}

    def _lender(self, trainer: int, partition: int) -> str | None:
        """Where the owner of a partition lends it to `trainer`; None for its own, or without such an address."""
        owner = self.leases.owner_of(partition)
        return None if owner == trainer else self.peers.get(owner)

    def ticked(self, trainer: int, clock: int, lowest: int) -> None:
        self.leases.ticked(trainer, clock, lowest)

    def lost(self, trainer: int, for_good: bool = False) -> None:
        self.leases.lost(trainer, for_good)
        self.peers.pop(trainer, None)

    def describe(self) -> dict[str, int]:
        """For the driver and the dashboard: `left` of the earliest epoch under way, the others of the whole run."""
        rules = self.leases
        return {"left": rules.left(), "done": rules.done, "twice": rules.twice, "moved": rules.moved}


def _seconds(seconds: float) -> float:
    """A time that a trainer reports; a negative one, or NaN, counts as 0."""
    return min(seconds, MAX_SECONDS) if seconds >= 0 else 0.0
