"""Rows that a trainer changes in place, for as many steps as it likes, and whose changes it pushes as differences.

Local steps on pulled rows: a trainer pulls the distinct rows of some ids, once, takes many steps on its own copy, and
pushes for each row how far it has come, new - old. What other trainers have added meanwhile stays, because differences
add up.

Replay
------
A trainer that is run again repeats its pushes under the same numbers (clock, how many before), and pulls other values,
so other rows may have changed. The number of ops in which a push travels depends on how many rows it has. So a block
takes as many numbers for each table as it has rows there, however many of them have changed, and takes them also where
it ends by an exception: what comes behind it has the same numbers in each attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dps.engine.client.client import Client
from dps.engine.client.inputs import as_rows
from dps.engine.client.table import name_of
from dps.engine.client.verbs import Keys, T, TableLike
from dps.engine.core.differences import take_differences
from dps.engine.state.ops import TableSpec
from dps.engine.state.optimizers import Add
from dps.engine.training.pulled_rows import PulledRows, pull_rows
from dps.errors import InputError

__all__ = ["local_rows"]


class Change(NamedTuple):
    """What is to be pushed to a table: the rows that have changed, and how far."""

    table: TableLike
    keys: np.ndarray
    values: np.ndarray


@contextlib.contextmanager
def local_rows(client: Client, ids: Mapping[T, Keys]) -> Iterator[tuple[PulledRows, ...]]:
    """Within the block, rows that may be changed in place; at its end their differences are pushed.

    `ids` are as :class:`dps.engine.training.pulled_rows.WantedRows` takes them.
    """
    specs = {table: spec_of(client, table) for table in ids} if isinstance(ids, Mapping) else {}
    rows = pull_rows(client, ids)
    before = {table: each.values.copy() for table, each in rows.items()}
    changes: list[Change] = []
    try:
        yield tuple(rows.values())
        changes = [change_of(table, specs[table], each, before[table]) for table, each in rows.items()]
    finally:
        push(client, changes, [len(values) for values in before.values()])


def spec_of(client: Client, table: TableLike) -> TableSpec:
    name = name_of(table)
    spec = client.table(name).spec
    if type(spec.optimizer) is not Add:
        raise InputError(
            f"table {name!r} has the optimizer {spec.optimizer.kind}, which takes gradients, and trainer.rows pushes "
            "differences that are to be added: make the table without optimizer=, and step in the block; or pull, and "
            "push gradients"
        )
    return spec


def change_of(table: TableLike, spec: TableSpec, rows: PulledRows, before: np.ndarray) -> Change:
    """Which rows differ from what they were, and by how much; checked as a push is. `before` is used up."""
    values = np.asarray(rows.values)
    if values.shape != before.shape:
        raise InputError(
            f"table {spec.name!r}: the values of trainer.rows had shape {before.shape}, and have {values.shape} at the "
            "end of the block: change them in place, rows.values[...] = new"
        )
    count, shape = len(before), (len(before), spec.dim)
    if values.dtype != before.dtype:
        values = as_rows(values, rows.keys.shape, count, spec)
    numbers = np.empty(count, np.int64)
    found = take_differences(np.ascontiguousarray(values).reshape(shape), before.reshape(shape), numbers)
    keys = rows.keys if found == count else rows.keys[numbers[:found]]
    as_rows(before[:found], keys.shape, found, spec)  # a difference of infinities is NaN, which the table may refuse
    return Change(table, keys, before[:found])


def push(client: Client, changes: list[Change], counts: list[int]) -> None:
    """Push to all tables at once, and wait; without changes, only take the numbers of their ops.

    `changes` has one for each table, or none at all.
    `counts` has the number of rows of each table in the block.
    """
    session = client.session
    with session.lock:
        origin, sent = session.acting, []
        for n, count in enumerate(counts):
            first = origin.number
            if changes:
                sent.append(client.push_async(*changes[n]))
            origin.number = first + count
    for pending in sent:
        pending.result()
