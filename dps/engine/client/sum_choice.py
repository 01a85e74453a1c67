"""SumChoice: whether the trainers of a process sum their pushes, by what clocks take with sums and without. Pure.

It is for tables with ``Wire(merge=True, measured=True)``. The trainers sum for some clocks, and send each push by
itself for as many, in turns, by the rules of `wire_choice.py`. Turns begin at the same clocks in all processes, so that
those of one machine sum in the same turns, unless they have come to different choices.
"""

from __future__ import annotations

from dps.engine.client.wire_choice import WireChoice, WireTurn, cost

__all__ = ["SumChoice"]

TURN_CLOCKS = 4  # A turn is so long, because other trainers and the system make single clocks longer or shorter.
SUMMED, ALONE = 0, 1  # The first of the two ways is taken where both are as fast, because it sends fewer bytes.
LABELS = ("as sums of a process", "push by push")


class SumChoice:
    """The choice of one process for one run.

    Attributes
    ----------
    chosen : str
        How pushes travel, in words, since the last choice; "" before the first one.

    Examples
    --------
    >>> choice, now = SumChoice(), 0.0
    >>> for clock in range(1000):
    ...     now += 3.0 if choice.ended(clock, now) else 2.0
    >>> choice.ended(1000, now), choice.chosen
    (False, 'push by push')
    """

    def __init__(self) -> None:
        self._choice = WireChoice(len(LABELS))
        self._turn, self._began = -1, 0.0
        self.chosen = ""

    def ended(self, clock: int, now: float) -> bool:
        """A clock ends at that time: whether its pushes are to be summed."""
        choice, turn = self._choice, clock // TURN_CLOCKS
        if turn != self._turn:
            if turn == self._turn + 1 and clock % TURN_CLOCKS == 0:  # else clocks are missing
                seconds = now - self._began
                choice.ended(WireTurn(seconds, TURN_CLOCKS, 0, TURN_CLOCKS), seconds)
            if choice.is_due():
                choice.begin()
            self._turn, self._began = turn, now
            if not choice.trying and choice.chosen is not None:
                self.chosen = LABELS[choice.chosen]
        return choice.current == SUMMED

    @property
    def is_off(self) -> bool:
        """Whether pushes travel one by one, and no turn tries otherwise."""
        return self.chosen == LABELS[ALONE] and not self._choice.trying

    def found(self) -> dict[str, str]:
        """What the clocks of each way have taken."""
        turns = zip(LABELS, self._choice.turns, strict=True)
        return {label: f"{1e3 * sum(cost(each)) / max(len(each), 1):.3g} ms a clock" for label, each in turns}
