"""Tables that belong to a model: how their rows travel, and when they are dropped.

They are dropped after a fit, or with the model, on servers that go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import TypeAlias

import dps
from dps.errors import DPSError, InputError
from dps.models.types import ClusterLike
from dps.models.where import Address

__all__ = ["WIRE", "ModelTables", "WireLike", "drop", "wire_of_counts", "wire_of_rows"]

WireLike: TypeAlias = "dps.Wire | str | None"
DEFAULT_WIRE = "lists"  # because it loses nothing


class WireRule:
    """The setting `wire` of estimators: what :meth:`dps.ParameterServer.table` takes; None: what loses nothing."""

    def allows(self, value: object) -> bool:
        return value is None or isinstance(value, dps.Wire) or (isinstance(value, str) and value in ("auto", "lists"))

    def text(self) -> str:
        return "'auto', 'lists' or a dps.Wire, such as dps.Wire(pull='bfloat16', push='bfloat16', lists=True), or None"


WIRE = WireRule()


def wire_of_rows(wire: WireLike, dim: int) -> dps.Wire | str:
    """The wire of a model's table with rows of `dim` float32, given the model's setting `wire`.

    Tables of one row get none: it travels as it is.

    Examples
    --------
    >>> wire_of_rows(None, 1)
    'lists'

    Raises
    ------
    InputError
        Rows of so few numbers cannot travel so.
    """
    if wire is None or isinstance(wire, str):
        return wire or DEFAULT_WIRE
    try:
        dps.TableSpec("rows", dim=dim, wire=wire)
    except InputError:
        pull, push = ("bfloat16" if side == "int8" else side for side in (wire.pull, wire.push))
        other = dataclasses.replace(wire, pull=pull, push=push)
        numbers = "1 number" if dim == 1 else f"{dim} numbers"
        raise InputError(
            f"wire=dps.{wire!r} is for rows of more than 4 numbers, and this model has rows of {numbers}, of which "
            f"int8 saves nothing: set wire=dps.{other!r}"
        ) from None
    return wire


def wire_of_counts(wire: WireLike) -> dps.Wire | str:
    """The wire of a model's table of whole numbers, which travel as they are: lists of keys, or nothing.

    Examples
    --------
    >>> wire_of_counts(None)
    'lists'

    Raises
    ------
    InputError
        Numbers are to travel narrow, or in part.
    """
    if wire is None or wire == "lists":
        return DEFAULT_WIRE
    if isinstance(wire, dps.Wire) and wire == dps.Wire(local=wire.local, lists=wire.lists):
        return wire
    raise InputError(
        f"wire={wire!r} is for rows of fractions, and this model counts in whole numbers, which travel as they are: "
        "set wire='lists', or leave it out"
    )


class ModelTables:
    """Tables on a parameter server that goes on after `fit`. They are dropped when `owner` is collected, or by `drop`.

    At the end of the process they stay, as the user's parameter server does.
    """

    def __init__(self, ps: dps.ParameterServer, names: tuple[str, ...], owner: object, client: ClusterLike):
        self.ps, self.names = ps, names
        self._dropping = weakref.finalize(owner, drop_later, ps, names, isinstance(client, Address))
        self._dropping.atexit = False

    def drop(self) -> None:
        """Drop the tables now, and detach a parameter server to which `fit` has connected."""
        found = self._dropping.detach()
        if found is not None:
            drop(*found[2])


def drop(ps: dps.ParameterServer, tables: Iterable[str], attached: bool) -> None:
    """Drop a model's tables, and detach a parameter server that was attached for them, also if it is gone."""
    with contextlib.suppress(DPSError, OSError):
        if not ps.closed:
            for table in set(tables) & set(ps.tables()):
                ps.drop_table(table)
    if attached:
        ps.detach()


def drop_later(ps: dps.ParameterServer, tables: Iterable[str], attached: bool) -> None:
    """`drop` in a new thread, because a model may be collected in any thread, and Dask's own threads must not wait."""
    if not ps.closed:
        threading.Thread(target=drop, args=(ps, tables, attached), name="dps-drop", daemon=True).start()
