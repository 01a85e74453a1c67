"""The tables of a vocabulary, made where they are not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dps.engine.client.table import Table
from dps.engine.client.word_table import counts_of
from dps.engine.functions.words import WordLayout
from dps.errors import NameInUseError

__all__ = ["make_vocabulary"]

DEFAULT_LANES, DEFAULT_WIDTH = 32, 56


def make_vocabulary(
    tables: Mapping[str, Table],
    make: Callable[..., Table],
    name: str,
    width: int | None,
    lanes: int | None,
    counts: bool,
    copies: int | None,
) -> None:
    """Have the tables of a vocabulary there; see :meth:`dps.ParameterServer.vocabulary`, whose arguments these are.

    `make` makes a table, as :meth:`dps.ParameterServer.table`. Two processes may make the same vocabulary at once.
    """
    found = WordLayout.of(tables[name].spec) if name in tables else None
    lanes = (found.lanes if found else DEFAULT_LANES) if lanes is None else lanes
    width = (found.width if found else DEFAULT_WIDTH) if width is None else width
    wanted = WordLayout.made(lanes, width)
    if found is not None and found != wanted:
        raise NameInUseError(
            f"vocabulary {name!r} has lanes={found.lanes} and width={found.width}, not lanes={lanes} and "
            f"width={width}: leave them out, or take another name"
        )
    if found is None:
        make(name, **wanted.of_table, shards=None if lanes > 1 else 1, copies=copies, exist_ok=True)
    if counts and counts_of(name) not in tables:
        make(counts_of(name), dtype="int64", copies=copies, exist_ok=True)
