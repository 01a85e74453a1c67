"""The tables of a vocabulary, made where they are not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dps.engine.client.client import Client
from dps.engine.client.table import Table
from dps.engine.client.word_table import WordTable, counts_of
from dps.engine.functions.words import WordLayout
from dps.errors import NameInUseError

__all__ = ["made_vocabulary"]

DEFAULT_LANES, DEFAULT_WIDTH = 32, 56


class Maker(Protocol):
    """The part of :class:`dps.ParameterServer` by which tables are made."""

    def tables(self) -> Mapping[str, Table]: ...
    def client(self) -> Client: ...

    @property
    def table(self) -> Callable[..., Table]: ...


def made_vocabulary(
    ps: Maker,
    name: str,
    width: int | None,
    lanes: int | None,
    counts: bool,
    copies: int | None,
) -> WordTable:
    """The vocabulary, whose tables are made where they are not there; see :meth:`dps.ParameterServer.vocabulary`.

    Two processes may make the same vocabulary at once.
    """
    tables = ps.tables()
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
        one = {"shards": 1, "fixed_shards": True} if lanes == 1 else {}  # a lane lies in one shard
        ps.table(name, **wanted.of_table, **one, copies=copies, exist_ok=True)
    if counts and counts_of(name) not in tables:
        ps.table(counts_of(name), dtype="int64", copies=copies, exist_ok=True)
    return ps.client().vocabulary(name)
