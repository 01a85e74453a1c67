"""Cache: how many rows of a table trainers keep, and for how long. Pure.

`client/row_cache.py` keeps the rows; docs/design/training.md says which of them a trainer may use.
"""

from __future__ import annotations

import dataclasses
import math

from dps.engine.state.life import bytes_of, seconds_of
from dps.engine.state.recipes import Description, Recipe, converted
from dps.errors import InputError

__all__ = ["Cache", "cache_of"]

UNBOUNDED_SECONDS = 1.0  # a row is kept for so long where neither `age` nor a staleness bounds it


def _nbytes(value: object, label: str, default: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else bytes_of(value, label)


def _age(value: object, label: str, default: object) -> float | None:
    return None if value is None else seconds_of(value, label)


@dataclasses.dataclass(frozen=True, repr=False)
class Cache(Recipe):
    """How many bytes of a table's rows the trainers of a process keep, so that they need not pull these rows again.

    The promise of the run holds for rows from the cache, too: a pull at clock c sees every push that any trainer made
    before its clock c minus the staleness, and all of the trainer's own pushes. So at staleness 0 a trainer asks for a
    row once in each clock, and at staleness s about once in s + 1 clocks. Of rows of more than 16 bytes that are there,
    the servers send those that have changed. A cache is for links between machines, and for tables without an optimizer
    or with ``dps.SGD``, whose pushes a trainer can add to the rows that it keeps. Any other optimizer has a state on
    the servers. A trainer that pushes to a row of such a table pulls it again.

    Parameters
    ----------
    nbytes : int or str
        Bytes in each process that has trainers, ``"64 MiB"``, say: the rows and about 45 bytes for each of them. Where
        they are full, the rows go that were not used for longest; those that the coming batches of a loop with
        ``pull=`` and ``ahead=`` name go last. 0: no row is kept.
    age : float or str, optional
        Seconds, or a text such as ``"500 ms"``, after which a row is pulled again, whatever the staleness. By default
        the staleness alone decides; in a run without a bound, a second. What clients without a clock change, a
        trainer sees only as its rows are pulled again.

    Raises
    ------
    InputError
        No number of bytes or seconds, or none above 0.

    Examples
    --------
    >>> import dps
    >>> dps.Cache("64 MiB", age="500 ms")
    Cache(nbytes=67108864, age=0.5)
    """

    nbytes: int = converted(0, _nbytes)
    age: float | None = converted(None, _age)

    @staticmethod
    def from_dict(description: Description) -> Cache:
        """The value that :meth:`to_dict` described."""
        return Cache(description["nbytes"], description["age"])

    def seconds(self, bounded: bool) -> float:
        """How long a row is kept, in a run whose staleness is `bounded` or not.

        >>> Cache("1 MB").seconds(bounded=True), Cache("1 MB").seconds(bounded=False), Cache("1 MB", 9).seconds(True)
        (inf, 1.0, 9.0)
        """
        if self.age is not None:
            return self.age
        return math.inf if bounded else UNBOUNDED_SECONDS


def cache_of(cache: Cache | str | int | None) -> Cache:
    """The Cache that ``cache=`` of :meth:`dps.ParameterServer.table` stands for: bytes may stand alone.

    >>> cache_of("64 MiB"), cache_of(None)
    (Cache(nbytes=67108864), Cache())
    """
    if cache is None:
        return Cache()
    if isinstance(cache, bool):
        raise InputError(f"cache is bytes, such as '64 MiB', or a dps.Cache, not {cache!r}")
    return cache if isinstance(cache, Cache) else Cache(cache)  # type: ignore[arg-type]
