"""Custom: an optimizer of the user, as it travels from the driver to the servers and into checkpoints. Pure.

The user's class goes along by value (`user_code.py`), and only servers open it. All other processes see its name, its
fields and what it says of itself, which is all that they need.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable
from dataclasses import field
from types import FunctionType
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np

from dps.engine.state.dtypes import is_half, narrowed, widened
from dps.engine.state.optimizers import Optimizer, is_of_dps
from dps.engine.state.recipes import Description, Recipe
from dps.engine.state.user_code import UserCode, add_code, last_lines, opened, packed
from dps.errors import FunctionError, InputError, InputTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Custom", "custom"]


def _as_tuple(value: Iterable[str], label: str, default: object) -> tuple[str, ...]:
    return tuple(value)


@dataclasses.dataclass(frozen=True, repr=False)
class Custom(Optimizer):
    """An optimizer of the user in a process that need not have its class; made by :func:`custom`.

    Attributes
    ----------
    parameters : dict
        Its fields, as values for JSON.
    columns : int
        Columns of state beside the values of a row.
    first : float
        Their value in a new row.
    merging : str
        What happens to repeated keys: ``"sum"`` or ``"last"``.
    types : tuple of str
        The dtypes of tables on which it works.
    follows : bool
        Its values follow from its state: see `derived` of :class:`Optimizer`.
    code : str
        A hash of what its methods do. Two classes with the same one are the same, wherever they were defined.
    sha256, pickled : str
        The hash of the pickled optimizer, and the pickled optimizer in base64.
    opened : Optimizer or None
        The user's optimizer, on a server.
    """

    class_name: str
    parameters: dict[str, object] = field(hash=False)
    columns: int
    first: float
    merging: str
    types: tuple[str, ...] = field(metadata={"convert": _as_tuple})
    follows: bool
    code: str
    sha256: str = field(compare=False, repr=False)
    pickled: str = field(compare=False, repr=False)
    opened: Optimizer | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.parameters.items())})"

    @property
    def kind(self) -> str:
        return self.class_name

    @property
    def dtypes(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.types

    @property
    def repeats(self) -> str:
        return self.merging

    @property
    def derived(self) -> bool:
        return self.follows

    @property
    def slot_start(self) -> float:
        return self.first

    def init(self, dim: int) -> int:
        return self.columns

    def numbers(self, clock: int, lag: int = 0) -> np.ndarray:
        """The clock alone."""
        return np.array([clock], np.float64)

    def to_dict(self) -> Description:
        description = super().to_dict()
        del description["opened"]
        return {**description, "types": list(self.types)}

    def open(self) -> Custom:
        """The same with the user's class at hand. This unpickles, and so runs code of the user: only servers do it.

        Raises FunctionError if the class cannot be opened here. The message has the cause.
        """
        found = opened(UserCode(self.sha256, self.pickled), f"optimizer {self.kind}")
        return dataclasses.replace(self, opened=found)

    def kernel(self, rows: np.ndarray, index: np.ndarray, start: int, updates: np.ndarray, numbers: np.ndarray) -> None:
        """Run the user's `update` on a copy of the rows, then put the copy in their place.

        Raises FunctionError if `update` has failed, or did what it must not. No row has changed.
        """
        if not len(updates):
            return
        chosen = index if len(index) else slice(start, start + len(updates))
        dim, half = updates.shape[1], is_half(rows.dtype)
        end = dim + self.columns * (2 if half else 1)  # behind it, rows may have records
        values, state = rows[chosen, :dim].copy(), rows[chosen, dim:end].copy()
        if not half:
            self._update(values, state, updates, int(numbers[0]))
            rows[chosen, :dim], rows[chosen, dim:end] = values, state
            return
        wide = widened(values)
        self._update(wide, state.view(np.float32), widened(updates), int(numbers[0]))
        rows[chosen, :dim], rows[chosen, dim:end] = narrowed(wide, rows.dtype), state

    def _update(self, values: np.ndarray, state: np.ndarray, gradients: np.ndarray, clock: int) -> None:
        if self.opened is None:
            raise FunctionError(f"optimizer {self.kind} was not opened: only servers run it")
        shown = values.view(), state.view(), gradients.view()
        shown[2].flags.writeable = False  # the request's own memory, which backups get, too
        shapes = [(each.shape, each.dtype) for each in shown]
        update: Callable[..., object] = self.opened.update
        try:
            result = update(*shown, clock)
        except Exception as error:
            raise FunctionError(f"{self.kind}.update failed: {last_lines(error)}") from None
        if result is not None:
            raise FunctionError(
                f"{self.kind}.update returned {type(result).__name__}: it has to change values and state in place, and "
                "to return None"
            )
        for name, each, (shape, dtype) in zip(("values", "state", "gradients"), shown, shapes, strict=True):
            if (each.shape, each.dtype) != (shape, dtype):
                raise FunctionError(
                    f"{self.kind}.update has made {name} {each.dtype} {each.shape}, and it was {dtype} {shape}"
                )


def custom(optimizer: Optimizer, dim: int) -> Optimizer:
    """An optimizer as a table of that `dim` keeps it: dps's own ones as they are, the user's as a :class:`Custom`.

    Raises InputError or InputTypeError if the class does not keep the contract of :class:`Optimizer`, or cannot be
    pickled.
    """
    kind = type(optimizer)
    if is_of_dps(kind):
        return optimizer
    if kind.update is Optimizer.update:
        raise InputTypeError(f"optimizer {kind.__name__} has no method update(self, values, state, gradients, clock)")
    if optimizer.uses_lag:
        raise InputError(
            f"optimizer {kind.__name__} has a learning rate of StalenessAware, and its update() gets the clock alone: "
            "give it a rate that depends on the clock only, or use an optimizer of dps"
        )
    columns = optimizer.init(dim)
    if isinstance(columns, bool) or not isinstance(columns, (int, np.integer)) or columns < 0:
        raise InputTypeError(f"{kind.__name__}.init({dim}) is a number of columns of state, not {columns!r}")
    if optimizer.repeats not in ("sum", "any", "last"):
        raise InputError(f"{kind.__name__}.repeats is 'sum' or 'last', not {optimizer.repeats!r}")
    code = packed(optimizer, kind.__module__, f"optimizer {kind.__name__}", _Pickler)
    return Custom(
        class_name=kind.__name__,
        parameters=_parameters(optimizer),
        columns=int(columns),
        first=float(optimizer.slot_start),
        merging="last" if optimizer.repeats == "last" else "sum",
        types=tuple(optimizer.dtypes),
        follows=bool(optimizer.derived),
        code=_code_of(kind),
        sha256=code.sha256,
        pickled=code.pickled,
    )


class _Pickler(cloudpickle.CloudPickler):
    """Pickles the classes of optimizers as recipes of new classes.

    cloudpickle itself would change a class that this process has in the place of making one, and loses the identity of
    the sentinels by which a dataclass knows its fields.
    """

    def reducer_override(self, obj: object) -> object:
        if not (isinstance(obj, type) and issubclass(obj, Optimizer)) or is_of_dps(obj):
            return super().reducer_override(obj)
        names = {each.name for each in dataclasses.fields(obj)} & inspect.get_annotations(obj).keys()
        defaults = {name: vars(obj).get(name) for name in sorted(names)}
        rest = {name: member for name, member in vars(obj).items() if name not in names and name not in _generated()}
        return _new_class, (obj.__name__, obj.__bases__, defaults), rest, None, None, _fill_class


@functools.cache
def _generated() -> frozenset[str]:
    """The attributes that each class has, or that `dataclass` makes."""
    return frozenset(vars(type("Empty", (Optimizer,), {}))) | {"__annotations__"}


def _new_class(name: str, bases: tuple[type, ...], defaults: dict[str, object]) -> type:
    """A class without members that has these fields. Only servers have it, and instances bring their own values."""
    namespace = {**defaults, "__annotations__": dict.fromkeys(defaults, object), "__module__": "user"}
    return types.new_class(name, bases, exec_body=lambda space: space.update(namespace))


def _fill_class(kind: type, members: dict[str, object]) -> None:
    for name, member in members.items():
        setattr(kind, name, member)


def _parameters(optimizer: Optimizer) -> dict[str, object]:
    """The fields as values for JSON."""

    def plain(value: object) -> object:
        if isinstance(value, Recipe):
            return value.to_dict()
        if isinstance(value, (np.ndarray, np.generic)):
            return value.tolist()
        raise InputTypeError(
            f"optimizer {type(optimizer).__name__}: a field is {value!r}, but must be a number, a string, an array, or "
            "lists and dicts of these"
        )

    fields = {each.name: getattr(optimizer, each.name) for each in dataclasses.fields(optimizer)}
    parameters: dict[str, object] = json.loads(json.dumps(fields, default=plain))
    return parameters


def _code_of(kind: type[Optimizer]) -> str:
    """A hash of the user's classes, whatever the files and lines in which they stand."""
    sums = hashlib.sha256()
    for each in kind.__mro__:
        if not is_of_dps(each) and each is not object:
            for name, member in sorted(vars(each).items()):
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if isinstance(function, FunctionType):
                    sums.update(f"{name}: {function.__defaults__}".encode())
                    add_code(sums, function.__code__)
                elif isinstance(member, (bool, int, float, str, tuple)) and not name.startswith("__"):
                    sums.update(f"{name} = {member!r}".encode())
    return sums.hexdigest()
