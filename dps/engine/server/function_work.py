"""FunctionWork: a function on the shards of one call, wherever it runs; and what a client is told of its errors."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from dps.engine.functions.definition import Part
from dps.engine.functions.rows import Effect, Rows
from dps.engine.state.ops import Selected, TableSpec
from dps.engine.wire.messages import FunctionCall, PartAnswer
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import DPSError, FunctionError, FunctionTimeoutError

__all__ = ["FunctionWork", "Made", "Repeated", "ToldError", "failure"]

TRACEBACK_LINES = 6  # of a user's function, in errors


class OfShard(Protocol):
    """What the work needs of a replica."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def number(self) -> int: ...


R = TypeVar("R", bound=OfShard)


class Made(NamedTuple, Generic[R]):
    """What a function has made for a shard, and what it returned there, encoded."""

    replica: R
    effect: Effect | None
    result: bytes


Repeated: TypeAlias = dict[int, bytes | None]  # from a shard to a result; None: the ledger has kept none


class ToldError(Exception):
    """An error in a function that was put into words already, in the process in which the function ran."""

    def __init__(self, told: DPSError):
        super().__init__(str(told))
        self.told = told


class FunctionWork(Generic[R]):
    """A function on the shards of one call, to be run beside the loop; its effects.

    Called, it runs the function. It is a value as well: what it was made of, a process can make it of again.

    Parameters
    ----------
    replicas : sequence
        The shards: their tables and numbers.
    selections : list of Selection
        For each shard, the rows that the function sees.
    repeated : dict of int to bytes or None
        Shards on which its effect counts already, with what it returned there; it runs again where that is None.
    code : bytes
        The function as cloudpickle; empty for one of dps itself.
    """

    def __init__(
        self,
        part: Part,
        call: FunctionCall,
        replicas: Sequence[R],
        selections: list[Selected],
        changes: bool,
        repeated: Repeated,
        code: bytes = b"",
    ):
        self.name = getattr(part, "__qualname__", "?")
        self.call, self.changes, self.repeated, self.code = call, changes, repeated, code
        self.replicas, self.selections = replicas, selections
        self.effects: list[Made[R]] = []
        self.views = [
            Rows(replica.spec, replica.number, selection, changes, call.seed, call.time)
            for replica, selection in zip(replicas, selections, strict=True)
        ]
        self._part = part
        self._decoded: dict[str, object] | None = None  # for the first part; each has arguments of its own

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that the function sees; of a function of dps that says so, those that it uses."""
        touched = getattr(self._part, "touched", None)
        if touched is None:
            return sum(selection.nbytes for selection in self.selections)
        self._decoded = decode_values(self.call.arguments)
        return sum(touched(rows, **self._decoded) for rows in self.views)

    def __call__(self) -> list[PartAnswer]:
        answers = []
        for replica, rows in zip(self.replicas, self.views, strict=True):
            repeated, value = rows.shard in self.repeated, self.repeated.get(rows.shard)
            if value is None:
                where = f"the result of function {self.name!r}"
                arguments, self._decoded = self._decoded or decode_values(self.call.arguments), None
                value = encode_values(self._part(rows, **arguments), where)
            if self.changes and not repeated:
                self.effects.append(Made(replica, rows.effect(), value))
            answers.append(PartAnswer(rows.shard, value, repeated))
        return answers

    def release(self) -> None:
        self.views.clear()
        self.selections.clear()


def failure(error: BaseException, name: str) -> DPSError:
    """What a client is told of an error in a function. The error loses its traceback, whose frames have the rows."""
    told = _told(error, name)
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return told


def _told(error: BaseException, name: str) -> DPSError:
    if isinstance(error, ToldError):
        return error.told
    if isinstance(error, FunctionTimeoutError):
        return FunctionTimeoutError(f"function {name!r}: {error}")
    if isinstance(error, DPSError):
        return type(error)(f"function {name!r}: {error}")
    inner, here = error.__traceback__, os.path.dirname(__file__)
    while inner is not None and os.path.dirname(inner.tb_frame.f_code.co_filename) == here:
        inner = inner.tb_next
    lines = "".join(traceback.format_exception(type(error), error, inner)).rstrip().splitlines()[-TRACEBACK_LINES:]
    return FunctionError(
        f"function {name!r} failed on a server, and no row was changed: {type(error).__name__}: {error}\n"
        + "\n".join(lines)
    )
