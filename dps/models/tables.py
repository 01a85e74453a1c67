"""Tables that belong to a model: dropped after a fit, or with the model, on servers that go on."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable

import dps
from dps.errors import DPSError
from dps.models.types import ClusterLike
from dps.models.where import Address

__all__ = ["ModelTables", "drop"]


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
