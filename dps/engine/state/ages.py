"""Ages: what time and what clock it was when a row was used, from the moment in its record. Pure.

``docs/design/rows.md`` says what moments are. Here they are whole numbers that never begin again; records have their
lowest 24 bits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from dps.engine.core.shards.records import MOMENTS
from dps.engine.state.op_views import AgeOp
from dps.engine.state.recipes import Description

__all__ = ["MAX_MARKS", "Aged", "Ages", "Mark", "ages_to_dict", "begin_moment", "distance", "moment_of", "restore_ages"]
__all__ += ["stored_ages"]

MAX_MARKS = 256
RECENT_MARKS = 128  # that are not thinned


class Mark(NamedTuple):
    """An AGE of the shard: from this moment on, it was this time or later."""

    moment: int
    time: int  # milliseconds since 1970
    clock: int  # the latest of the trainers


class Ages:
    """The marks of a shard, in their order.

    Examples
    --------
    >>> ages = Ages()
    >>> for second in range(10):
    ...     ages.add(Mark(moment=7 * second, time=1000 * second, clock=second))
    >>> ages.before(time=4500), ages.before_clock(2), ages.before(time=-1)
    (28, 14, None)
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self.marks = list(marks)

    def add(self, mark: Mark) -> None:
        """Note a mark. Time and moment never go back, whatever a machine's clock does."""
        if self.marks:
            last = self.marks[-1]
            mark = Mark(max(mark.moment, last.moment), max(mark.time, last.time), max(mark.clock, last.clock))
        self.marks.append(mark)
        if len(self.marks) > MAX_MARKS:
            self.marks = [*self.marks[:-RECENT_MARKS:2], *self.marks[-RECENT_MARKS:]]

    def before(self, time: int) -> int | None:
        """A moment such that rows that were used before it were used before that time; None: no row is known to be."""
        return self._moment(bisect.bisect_right(self.marks, time, key=lambda mark: mark.time))

    def before_clock(self, clock: int) -> int | None:
        """A moment such that rows that were used before it were used before that clock."""
        return self._moment(bisect.bisect_right(self.marks, clock, key=lambda mark: mark.clock))

    def seconds_since(self, moments: np.ndarray) -> np.ndarray:
        """How long ago moments were, float64 seconds: from the last mark; between two marks, estimated."""
        if not self.marks:
            return np.zeros(len(moments))
        known, times, _ = np.array(self.marks, np.float64).T
        return (times[-1] - np.interp(moments, known, times)) / 1000

    def _moment(self, marks: int) -> int | None:
        return self.marks[marks - 1].moment if marks else None


class Aged(Protocol):
    """A shard as far as its ages go: see `ShardState`."""

    version: int
    moment_at_base: int
    base_version: int
    ops_of_moment: int
    record_at: int
    ages: Ages


def moment_of(shard: Aged) -> int:
    """The moment of the shard's last op; records have its lowest 24 bits."""
    passed = (shard.version - shard.base_version) // shard.ops_of_moment if shard.ops_of_moment else 0
    return shard.moment_at_base + passed


def begin_moment(shard: Aged, age: AgeOp) -> None:
    """Begin a new moment, of which the shard's ages note when it was."""
    shard.moment_at_base, shard.base_version = moment_of(shard) + 1, shard.version
    shard.ops_of_moment = age.ops
    shard.ages.add(Mark(shard.moment_at_base, age.time, age.clock))


def ages_to_dict(shard: Aged) -> Description:
    """What :func:`restore_ages` needs, as plain values."""
    moment = [shard.version, shard.moment_at_base, shard.base_version, shard.ops_of_moment]
    return {"moment": moment, "marks": [list(mark) for mark in shard.ages.marks]}


def stored_ages(shard: Aged) -> Description:
    """What the file of a stored shard says of its ages: nothing, where its rows have no records."""
    return {"ages": ages_to_dict(shard)} if shard.record_at else {}


def restore_ages(shard: Aged, fields: Description) -> None:
    """Take over the ages of another replica, or of a shard that was stored, with its version."""
    shard.version, shard.moment_at_base, shard.base_version, shard.ops_of_moment = fields["moment"]
    shard.ages = Ages(Mark(*mark) for mark in fields["marks"])


def distance(moment: int, before: int) -> int:
    """How many moments lie between two, as far as records can tell."""
    return min(moment - before, MOMENTS // 2)
