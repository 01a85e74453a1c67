"""Ring: which chunk of an array a trainer passes on in each step of a ring allreduce. Pure.

The n members of a ring stand in a circle, and the array is cut into n chunks. In n - 1 steps each member adds the chunk
that it has got to its own, and passes the sum on; then chunk c is whole at member c - 1. In n - 1 further steps the
whole chunks go round. A member sends and receives 2 (n - 1) / n of the array, however many members there are, which is
the least that is possible.

References
----------
P. Patarasu, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib. Comput.
69 (2009), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["RingStep", "Span", "pieces", "ring_steps"]


class RingStep(NamedTuple):
    """What one member does in one step.

    Attributes
    ----------
    sent, received : range
        Elements of the flat array.
    is_sum : bool
        Whether what is received is to be combined with the member's own elements, or takes their place.
    """

    sent: range
    received: range
    is_sum: bool


class Span(NamedTuple):
    """Elements that travel in one frame: the step in which they are sent, and where they belong."""

    step: int
    start: int
    stop: int


def ring_steps(rank: int, members: int, size: int) -> list[RingStep]:
    """The steps of one member in an allreduce of `size` elements.

    What a member receives in a step is what the member before it sends in the same step.

    Examples
    --------
    >>> for step in ring_steps(0, 2, 10):
    ...     print(step.sent, step.received, step.is_sum)
    range(0, 5) range(5, 10) True
    range(5, 10) range(0, 5) False
    """
    chunks = [range(c * size // members, (c + 1) * size // members) for c in range(members)]
    adding = [
        RingStep(chunks[(rank - s) % members], chunks[(rank - s - 1) % members], True) for s in range(members - 1)
    ]
    copying = [
        RingStep(chunks[(rank + 1 - s) % members], chunks[(rank - s) % members], False) for s in range(members - 1)
    ]
    return adding + copying


def pieces(step: int, elements: range, most: int) -> Iterator[Span]:
    """Cut the elements of a step into pieces of at most `most`.

    >>> list(pieces(0, range(0, 5), 2))
    [Span(step=0, start=0, stop=2), Span(step=0, start=2, stop=4), Span(step=0, start=4, stop=5)]
    """
    for start in range(elements.start, elements.stop, most):
        yield Span(step, start, min(start + most, elements.stop))
