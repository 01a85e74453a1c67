"""A push that was checked and grouped, and its requests, written the general way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from dps.client.inputs import check_out, row_shape
from dps.client.requests import Call, TableRoute
from dps.client.session import ClientSession
from dps.client.table import Keys, Outs, T
from dps.client.ticket import SentCall
from dps.core.blocks import empty
from dps.errors import InputError
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec
from dps.state.partition import Grouping, coalesce, sum_repeats
from dps.wire import frames
from dps.wire.frames import Header

__all__ = ["FLAGS", "NO_ROWS", "Change", "SendChange", "Sent"]
__all__ += ["header_of", "nothing", "outs_of", "range_of", "room_for", "send_change"]

FLAGS = {PUSH: 0, ADD: frames.RULE_ADD, ASSIGN: frames.RULE_ASSIGN}
NO_ROWS = (0, 0)


class Change(NamedTuple):
    """A push that has been checked and grouped, ready to be sent."""

    route: TableRoute
    rule: int
    target: Grouping | tuple[int, int]  # keys by shard, or (first row, end) of a dense table
    values: np.ndarray
    answered: np.ndarray | None  # where the new values go, if they were asked for
    rows: int = -1  # of data that it stands for, in a mean over rows


Sent: TypeAlias = tuple[SentCall, Callable[[], "np.ndarray | None"]]  # what was sent, and what makes its result
SendChange: TypeAlias = Callable[[ClientSession, Change, bool], Sent]


def nothing() -> None:
    """The result of a push to several tables."""


def send_change(session: ClientSession, change: Change, keep: bool) -> Sent:
    """Write the requests of a prepared push."""
    route, rule, target, values, answered, weight = change
    spec = route.spec
    flags = FLAGS[rule] | (0 if answered is None else frames.ANSWER)
    rows = None if answered is None else answered.reshape(-1, spec.dim)
    if not isinstance(target, Grouping):
        header = header_of(session, frames.PUSH, flags | frames.RANGE, spec, weight)
        requests = session.start(route, Call(header, None, target, values, rows), keep)
        return SentCall(session, "push", requests), lambda: answered
    at_once = spec.aggregate is None or session.own.clock == NO_CLOCK  # else the servers sum, also repeats
    if rule == PUSH and at_once and spec.optimizer.repeats == "sum":
        merged = coalesce(target)
        if merged is not None:
            return send_merged(session, route, flags, target, merged, values, answered)
    call = Call(header_of(session, frames.PUSH, flags, spec, weight), target, NO_ROWS, values, rows)
    if answered is not None and len(target.keys) * (8 + route.row_bytes) > session.chunk:
        # cut into several requests, a key may be repeated in a later one: ask when all have been applied
        header = header_of(session, frames.PUSH, FLAGS[rule], spec)
        requests = session.start(route, call._replace(header=header, out=None), keep)
        pull = call._replace(header=header_of(session, frames.PULL, 0, spec), values=None)
        requests += session.start(route, pull, keep)
    else:
        requests = session.start(route, call, keep)
    return SentCall(session, "push", requests), lambda: answered


def send_merged(
    session: ClientSession,
    route: TableRoute,
    flags: int,
    grouping: Grouping,
    merged: tuple[Grouping, np.ndarray],
    values: np.ndarray,
    answered: np.ndarray | None,
) -> Sent:
    """Push the sums of repeated keys; an answer is spread out to all the places that asked."""
    distinct, target = merged
    dim = route.spec.dim
    sums = np.empty((len(distinct.keys), dim), route.spec.dtype)
    sum_repeats(values, grouping.order, target, sums)
    results = None if answered is None else np.empty_like(sums)
    call = Call(header_of(session, frames.PUSH, flags, route.spec), distinct, NO_ROWS, sums, results)
    sent = SentCall(session, "push", session.start(route, call))
    if answered is None:
        return sent, nothing
    place = np.empty(len(target), np.int64)
    place[slice(None) if grouping.order is None else grouping.order] = target

    def spread() -> np.ndarray:
        assert results is not None
        answered.reshape(-1, dim)[:] = results[place]
        return answered

    return sent, spread


def range_of(route: TableRoute, keys: Keys) -> tuple[int, int] | None:
    """(first, end) where `keys` names a range of rows of a dense table."""
    if keys is not None and not isinstance(keys, slice):
        return None
    rows = route.spec.rows
    if rows is None:
        raise InputError(f"table {route.spec.name!r} is keyed: name the keys")
    start, stop, step = (keys or slice(None)).indices(rows)
    if step != 1:
        raise InputError(f"table {route.spec.name!r}: a slice of rows has step 1, not {step}; name the keys")
    return start, max(start, stop)


def outs_of(out: np.ndarray | Outs[T]) -> Mapping[T, np.ndarray]:
    """Where the answers of several tables go."""
    if isinstance(out, np.ndarray):
        raise InputError("out of several tables is a mapping {table: array}, as the tables are")
    return out or {}


def room_for(out: object, shape: tuple[int, ...], spec: TableSpec) -> np.ndarray:
    """Where the values of keys of that shape go: `out`, or a new array."""
    full = row_shape(shape, spec)
    if out is None:
        return empty(full, spec.dtype)
    return check_out(out, full, spec)


def header_of(session: ClientSession, kind: int, flags: int, spec: TableSpec, rows: int = -1) -> Header:
    """The header of a call, in the name of the origin that the session acts as."""
    origin = session.acting
    place = (origin.id, 0, origin.clock)
    return Header(
        kind,
        flags,
        0,
        spec.id,
        session.epoch,
        *place,
        rows=rows,
        parties=origin.parties,
        attempt=origin.attempt,
    )
