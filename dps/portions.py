"""Portions: the controller's part of re-assigning work. The rules are those of `coordination/leases.py`; here they meet
the frames of trainers.

======== ======================================= =========================================================
frame    from the trainer, JSON                  answer, JSON
======== ======================================= =========================================================
LEASE    epoch; and any of these, in this order:
         declare: [[partition, batches], ...]    (it begins, and holds nothing)
         how: {epochs, batch_size, shuffle}
         fetched: seconds for a partition
         done: [portion, seconds a batch]
         at: [portion, batches completed]        wanted: whether it is to go on with it
         next: {have, without: partitions}       portion: a `Portion`, or null;
                                                 again: seconds after which to ask again, or null:
                                                 the epoch is over for it
                                                 missing: a `Missing` (it may not go on), or null
         report, as with a tick
======== ======================================= =========================================================

Every request is answered at once, and all of it may be said twice: what was declared, done or given back stays so, and
whoever asks for the next portion while it has one, by our books, is given that one again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dps.coordination.leases import Leases
from dps.errors import DPSError, ProtocolError

__all__ = ["Portions"]

LOOK = 0.002, 0.05  # seconds after which a trainer without a portion asks again: at least, and as a rule at most
RATE = 500  # such questions in a second, of all trainers together
MOST_SECONDS = 1e9


class Portions:
    """The portions of one run.

    Parameters
    ----------
    shares : sequence of sequences of int
        The partitions of each trainer.
    start : int
        The clock that the run begins at.
    allot : callable
        Given a number, the first of so many origins in a row.

    Attributes
    ----------
    origin : int
        Of the ops made in portion 0; the others follow.
    """

    def __init__(self, shares: Sequence[Sequence[int]], start: int, allot: Callable[[int], int]):
        self.leases = Leases(shares, start)
        self.origin = allot(self.total)

    @property
    def total(self) -> int:
        """How many origins it takes."""
        return self.leases.total

    def asked(self, trainer: int, wish: Any, now: float, held_back: Callable[[], bool] = bool) -> dict[str, Any]:
        """The answer to a LEASE; `held_back` says whether the trainer would have to wait if it ticked now."""
        try:
            return self._answer(trainer, wish, now, held_back)
        except DPSError:
            raise
        except (AttributeError, TypeError, KeyError, ValueError, IndexError, OverflowError):
            raise ProtocolError(f"a trainer's LEASE that cannot be read: {wish!r:.200}") from None

    def _answer(self, trainer: int, wish: dict[str, Any], now: float, held_back: Callable[[], bool]) -> dict[str, Any]:
        epoch = int(wish["epoch"])
        told: dict[str, Any] = {}
        if "declare" in wish:
            self.leases.declare(trainer, {int(partition): int(count) for partition, count in wish["declare"]})
        if "how" in wish:
            self.leases.agree(trainer, epoch, dict(wish["how"]))
        if "fetched" in wish:
            self.leases.fetched(trainer, _seconds(wish["fetched"]))
        if "done" in wish:
            self.leases.report(trainer, int(wish["done"][0]), epoch, _seconds(wish["done"][1]))
        if "at" in wish:
            portion, at = wish["at"]
            told["wanted"] = self.leases.wanted(trainer, int(portion), epoch, int(at), now)
        if "next" in wish:
            have, without = ({int(n) for n in wish["next"][name]} for name in ("have", "without"))
            told |= {"portion": self.leases.next(trainer, epoch, now, have, without), "again": None, "missing": None}
            if told["portion"] is None:
                told["missing"] = self.leases.missing(trainer, epoch, without) if without else None
                again = self.leases.pending(epoch, now)
                stays = told["missing"] is not None or held_back() or self.leases.stays(trainer, epoch, without)
                if again is not None and stays:
                    told["again"] = max(LOOK[0], len(self.leases.shares) / RATE, min(again, LOOK[1]))
                else:
                    self.leases.over(trainer, epoch)
        return told

    def ticked(self, trainer: int, clock: int, lowest: int) -> None:
        """A trainer has completed an epoch; none that counts has completed fewer than `lowest`."""
        self.leases.ticked(trainer, clock, lowest)

    def lost(self, trainer: int, for_good: bool = False) -> None:
        """A trainer is lost, or has left."""
        self.leases.lost(trainer, for_good)

    def describe(self) -> dict[str, int]:
        """For the driver and the dashboard: `left` of the earliest epoch under way, the others of the whole run."""
        rules = self.leases
        return {"left": rules.left(), "done": rules.done, "twice": rules.twice, "moved": rules.moved}


def _seconds(value: Any) -> float:
    """What a trainer says that something took; what cannot be, counts as nothing."""
    seconds = float(value)
    return min(seconds, MOST_SECONDS) if seconds >= 0 else 0.0
