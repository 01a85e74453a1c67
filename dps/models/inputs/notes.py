"""Surveys and plans as plain values, which trainers and the driver send each other in Spark's runs. Pure.

They travel as data and not as pickles, because unpickling what comes from the network would run whatever is in it.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np

import dps
from dps.errors import ProtocolError

__all__ = ["from_plain", "sendable", "to_plain"]

T = TypeVar("T", bound=type)

KIND = "kind"  # the key of a dict that stands for an object of KINDS
KINDS: dict[str, type] = {}  # the classes whose objects may travel, by their names
OBJECTS = "objects"  # the kind of an array of Python's objects: labels that are texts
MAX_DEPTH = 8  # objects within objects


def sendable(kind: T) -> T:
    """Let objects of a class travel: a dataclass or named tuple of plain values, arrays, tuples, sendable objects."""
    KINDS[kind.__name__] = kind
    return kind


sendable(dps.FTRL)


def to_plain(thing: object) -> object:
    """A survey or a plan, or a field of it, as values that :meth:`dps.Trainer.allgather` takes.

    Examples
    --------
    >>> to_plain((dps.FTRL(0.5), "x"))
    [{'kind': 'FTRL', 'alpha': 0.5, 'beta': 1.0, 'l1': 0.0, 'l2': 0.0}, 'x']
    >>> from_plain(to_plain(dps.FTRL(0.5))) == dps.FTRL(0.5)
    True
    """
    name = type(thing).__name__
    if KINDS.get(name) is type(thing):
        return {KIND: name} | {field: to_plain(getattr(thing, field)) for field in _fields(type(thing))}
    if isinstance(thing, np.ndarray) and thing.dtype.kind == "O":
        return {KIND: OBJECTS, "items": thing.tolist()}
    if isinstance(thing, (list, tuple)):
        return [to_plain(part) for part in thing]
    return thing


def from_plain(plain: object, depth: int = MAX_DEPTH) -> object:
    """What :func:`to_plain` made plain; lists have become tuples.

    Raises ProtocolError if the values stand for nothing that :func:`to_plain` makes.
    """
    if not depth:
        raise ProtocolError(f"a survey or a plan with objects that are {MAX_DEPTH} deep")
    if isinstance(plain, (list, tuple)):
        return tuple(from_plain(part, depth - 1) for part in plain)
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {KIND, "items"} and plain[KIND] == OBJECTS:
        made = np.empty(len(plain["items"]), object)
        made[:] = plain["items"]
        return made
    name = plain.get(KIND)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or plain.keys() != {KIND, *_fields(kind)}:
        raise ProtocolError(f"neither a survey nor a plan: {plain!r:.200}")
    return kind(**{field: from_plain(part, depth - 1) for field, part in plain.items() if field != KIND})


def _fields(kind: type) -> tuple[str, ...]:
    named: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return named if named is not None else tuple(field.name for field in dataclasses.fields(kind))
