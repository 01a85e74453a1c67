"""Columns with roles: rows of one table whose columns have names, and initializers and optimizers of their own.

The values of a row lie side by side in the order of the columns, and the state of all columns follows in this order:

    w | v0 v1 v2 v3 | state of w | state of v          columns={"w": Column(1), "v": Column(4)}

So a row is pulled, pushed to, replicated, moved and stored as any other row. The table's optimizer is a
:class:`ColumnOptimizers`, which steps each column as an optimizer steps the rows of a table with this column alone, and
its initializer a :class:`ColumnInitializers`, which does the same for initial values. The numbers are those of several
tables, bit for bit: column j of v has the initial value that column j has in a table of v alone.
"""

from __future__ import annotations

import functools
import itertools
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dps.engine.core.shards.initializers import RowStart
from dps.engine.core.shards.optimizers import ColumnKernel
from dps.engine.state.initializers import Initializer, Zeros, initializer_from_dict
from dps.engine.state.optimizers import Add, Assign, Optimizer, is_of_dps, optimizer_from_dict
from dps.engine.state.recipes import Description, Recipe, converted, number
from dps.errors import InputError, InputTypeError, UnknownColumnError

__all__ = ["Column", "ColumnInitializers", "ColumnLayout", "ColumnOptimizers", "of_columns"]
__all__ += ["parts_of_table", "row_start"]

R = TypeVar("R", bound=Recipe)
MAX_DIM = 1 << 16  # of a row, see `dps.engine.state.ops`


@dataclass(frozen=True)
class Column:
    """A part of the rows of a table that has an initializer and an optimizer of its own.

    Parameters
    ----------
    dim : int
        Values in the column, 1 or more.
    init : Initializer
        The values before the first push; zeros by default.
    optimizer : Optimizer
        What the servers do with what is pushed to the column: ``dps.Add()`` by default.

    Raises
    ------
    InputError, InputTypeError
        A `dim` that is no whole number of 1 or more; an initializer or optimizer that columns do not have.

    Examples
    --------
    >>> import dps
    >>> dps.Column(8, init=dps.Normal(0.05), optimizer=dps.Adagrad(0.05, l2=1e-4)).dim
    8
    """

    dim: int = 1
    init: Initializer = Zeros()
    optimizer: Optimizer = Add()

    def __post_init__(self) -> None:
        dim = self.dim
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not 1 <= dim <= MAX_DIM:
            raise InputError(f"Column: dim is a whole number from 1 to {MAX_DIM}, not {dim!r}")
        object.__setattr__(self, "dim", int(dim))
        if not isinstance(self.init, Initializer) or isinstance(self.init, ColumnInitializers):
            raise InputTypeError(f"Column: init must be one of dps's, such as dps.Normal(0.01), not {self.init!r}")
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, ColumnOptimizers):
            wanted = "a dps.Optimizer, such as dps.Adagrad(0.1)"
            raise InputTypeError(f"Column: optimizer must be {wanted}, not {optimizer!r}")
        if isinstance(optimizer, Assign):
            raise InputError(
                "Column: Assign keeps the last of the values of a repeated key, and the other columns sum them: give "
                "the column a table of its own"
            )
        if not is_of_dps(type(optimizer)):
            raise InputTypeError(
                f"Column: {optimizer.kind} is an optimizer of the user, which steps whole rows: give the column a "
                "table of its own, or write update() for all columns of the table"
            )


class ColumnLayout(Mapping[str, slice]):
    """Where the columns of a table with ``columns=`` lie in its rows: the name of each, and its slice of a row.

    Tables without such columns have an empty one.

    Parameters
    ----------
    names : sequence of str
    dims : sequence of int
        Values in each column.
    table : str
        For messages.

    Attributes
    ----------
    dim : int
        Values in a row.

    Examples
    --------
    >>> columns = ColumnLayout(["w", "v"], [1, 2])
    >>> columns
    <columns w (1), v (2)>
    >>> columns["v"], np.arange(6).reshape(2, 3)[:, columns["v"]].tolist()
    (slice(1, 3, None), [[1, 2], [4, 5]])
    """

    def __init__(self, names: Iterable[str], dims: Iterable[int], table: str = ""):
        ends = list(itertools.accumulate(dims, initial=0))
        self._slices = {name: slice(a, b) for name, a, b in zip(names, ends[:-1], ends[1:], strict=True)}
        self._table, self.dim = table, ends[-1]

    def __getitem__(self, name: str) -> slice:
        if name in self._slices:
            return self._slices[name]
        if not self:
            raise UnknownColumnError(f"table {self._table!r} was made without columns=, so it has no column {name!r}")
        raise UnknownColumnError(f"table {self._table!r} has no column {name!r}; it has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        return f"<columns {', '.join(f'{name} ({each.stop - each.start})' for name, each in self._slices.items())}>"

    def split(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The values of each column, as views of rows.

        Parameters
        ----------
        rows : ndarray
            [..., dim], as a pull returns it.

        Returns
        -------
        dict of ndarray
            By name [..., dim of the column]; without the last axis where that is 1, as a table of dim 1 has them.

        Raises
        ------
        InputError
            The rows have another number of values.

        Examples
        --------
        >>> ColumnLayout(["w", "v"], [1, 2]).split(np.arange(6).reshape(2, 3))
        {'w': array([0, 3]), 'v': array([[1, 2],
               [4, 5]])}
        """
        if self.dim == 1 == len(self):
            return dict.fromkeys(self, rows)
        if not self or rows.shape[-1:] != (self.dim,):
            raise InputError(f"table {self._table!r}: rows of shape {rows.shape} do not split into {self!r}")
        wholes = {name: rows[..., each] for name, each in self._slices.items()}
        return {name: each[..., 0] if each.shape[-1] == 1 else each for name, each in wholes.items()}


def _names(value: Iterable[str], label: str, default: object) -> tuple[str, ...]:
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"the name of a column is an identifier, such as v or bias_2, not {name!r}")
    if not names or len(set(names)) < len(names):
        raise InputError(f"a table with columns has one or more of them, each with a name of its own, not {names}")
    return names


def _dims(value: Iterable[object], label: str, default: object) -> tuple[int, ...]:
    check = number(least=1, most=MAX_DIM, whole=True).metadata["convert"]
    return tuple(check(each, label, default) for each in value)


def _recipes(
    from_dict: Callable[[Mapping[str, object]], R],
) -> Callable[[Iterable[R | Mapping[str, object]], str, object], tuple[R, ...]]:
    def convert(value: Iterable[R | Mapping[str, object]], label: str, default: object) -> tuple[R, ...]:
        return tuple(from_dict(each) if isinstance(each, Mapping) else each for each in value)

    return convert


def _check_lengths(*parts: tuple[object, ...]) -> None:
    if len(set(map(len, parts))) > 1:
        raise InputError(f"names, dims and recipes of columns are {[*map(len, parts)]}, but must be as many")


def _described(recipe: Recipe, names: tuple[str, ...], parts: tuple[Recipe, ...]) -> str:
    return f"{type(recipe).__name__}({', '.join(f'{n}={part!r}' for n, part in zip(names, parts, strict=True))})"


@dataclass(frozen=True, repr=False)
class ColumnOptimizers(Optimizer):
    """The optimizers of the columns of a table, as one optimizer of its rows; made by :func:`of_columns`.

    Examples
    --------
    >>> from dps.engine.state.optimizers import SGD, Adagrad
    >>> rows = np.zeros((1, 5))  # one row: w, v of two columns, and the n of these
    >>> ColumnOptimizers(("w", "v"), (1, 2), (SGD(0.5), Adagrad(0.5))).step(rows, np.array([[1.0, 2.0, 4.0]]))
    >>> rows
    array([[-0.5, -0.5, -0.5,  4. , 16. ]])
    """

    names: tuple[str, ...] = converted((), _names)
    dims: tuple[int, ...] = converted((), _dims)
    optimizers: tuple[Optimizer, ...] = converted((), _recipes(optimizer_from_dict))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_lengths(self.names, self.dims, self.optimizers)

    def __repr__(self) -> str:
        return _described(self, self.names, self.optimizers)

    def __reduce__(self) -> tuple[object, ...]:
        return ColumnOptimizers, (self.names, self.dims, self.optimizers)  # without the kernel

    @property
    def kind(self) -> str:
        kinds = [f"{name}={each.kind}" for name, each in zip(self.names, self.optimizers, strict=True)]
        return f"{type(self).__name__}({', '.join(kinds)})"

    @functools.cached_property
    def kernel(self) -> ColumnKernel:  # type: ignore[override]
        numbers = [len(each.numbers(0)) for each in self.optimizers]
        kernels: list[Any] = [each.kernel for each in self.optimizers]
        return ColumnKernel([*zip(kernels, self.dims, numbers, strict=True)])

    @property
    def dtypes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(d for d in Add.dtypes if all(d in each.dtypes for each in self.optimizers))

    @property
    def repeats(self) -> str:
        """What happens to the repeated keys of one push: they are summed, unless no optimizer needs it."""
        return "any" if all(each.repeats == "any" for each in self.optimizers) else "sum"

    @property
    def derived(self) -> bool:
        return any(each.derived for each in self.optimizers)

    @property
    def slot_start(self) -> float | np.ndarray:  # type: ignore[override]
        return np.repeat([each.slot_start for each in self.optimizers], self.slots())

    def slots(self) -> list[int]:
        return [each.init(dim) for each, dim in zip(self.optimizers, self.dims, strict=True)]

    def init(self, dim: int) -> int:
        if dim != sum(self.dims):
            raise InputError(f"{self.kind} steps rows of dim {sum(self.dims)}, not {dim}")
        return sum(self.slots())

    @property
    def uses_lag(self) -> bool:
        return any(each.uses_lag for each in self.optimizers)

    def numbers(self, clock: int, lag: int = 0) -> np.ndarray:
        return np.concatenate([each.numbers(clock, lag) for each in self.optimizers])

    def to_dict(self) -> Description:
        parts = [each.to_dict() for each in self.optimizers]
        return {"name": type(self).__name__, "names": [*self.names], "dims": [*self.dims], "optimizers": parts}


@dataclass(frozen=True, repr=False)
class ColumnInitializers(Initializer):
    """The initializers of the columns of a table, as one initializer of its rows; made by :func:`of_columns`."""

    names: tuple[str, ...] = converted((), _names)
    dims: tuple[int, ...] = converted((), _dims)
    initializers: tuple[Initializer, ...] = converted((), _recipes(initializer_from_dict))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_lengths(self.names, self.dims, self.initializers)

    def __repr__(self) -> str:
        return _described(self, self.names, self.initializers)

    def numbers(self) -> np.ndarray:
        """float64[columns, 3]: kind, a and b of each column."""
        return np.array([each.numbers() for each in self.initializers])

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(d for d in Zeros().dtypes if all(d in each.dtypes for each in self.initializers))

    @property
    def is_zero(self) -> bool:
        return all(each.is_zero for each in self.initializers)

    def to_dict(self) -> Description:
        parts = [each.to_dict() for each in self.initializers]
        return {"name": type(self).__name__, "names": [*self.names], "dims": [*self.dims], "initializers": parts}


def of_columns(columns: Mapping[str, Column]) -> tuple[int, ColumnOptimizers, ColumnInitializers]:
    """The dim, the optimizer and the initializer of a table with these columns.

    Raises InputError or InputTypeError for a name that is no identifier; a column that is no :class:`Column`; no column
    at all.
    """
    if not isinstance(columns, Mapping):
        raise InputTypeError(f"columns is a dict, such as {{'v': dps.Column(8)}}, not {columns!r}")
    for name, column in columns.items():
        if not isinstance(column, Column):
            raise InputTypeError(f"column {name!r} is a dps.Column, such as dps.Column(8), not {column!r}")
    names, parts = tuple(columns), columns.values()
    dims = tuple(each.dim for each in parts)
    optimizers = ColumnOptimizers(names, dims, tuple(each.optimizer for each in parts))
    return sum(dims), optimizers, ColumnInitializers(names, dims, tuple(each.init for each in parts))


def parts_of_table(
    name: str,
    dim: int | None,
    optimizer: Optimizer | None,
    init: Initializer | None,
    columns: Mapping[str, Column] | None,
) -> tuple[int, Optimizer, Initializer]:
    """The dim, the optimizer and the initializer of a table, from what its maker has said of them or of its columns.

    Raises InputError if both were said.
    """
    if columns is None:
        return 1 if dim is None else dim, Add() if optimizer is None else optimizer, init or Zeros()
    given = {"dim": dim, "optimizer": optimizer, "init": init}
    if both := [word for word, value in given.items() if value is not None]:
        raise InputError(f"table {name!r}: columns= says {', '.join(both)} for each column, so leave it out")
    return of_columns(columns)


def row_start(dim: int, optimizer: Optimizer, init: Initializer, record: int = 0, half: bool = False) -> RowStart:
    """What a new row of a table of that `dim` holds, with so many columns of a record, which is zero.

    Where values are halves, a number of state takes two columns.

    Raises InputError if the columns of the optimizer are not those of the initializer, or have another dim together.
    """
    optimizer.init(dim)  # raises where the columns of the optimizer have another dim
    width = 2 if half else 1
    if isinstance(optimizer, ColumnOptimizers) and isinstance(init, ColumnInitializers):
        if (optimizer.names, optimizer.dims) == (init.names, init.dims):
            parts = zip(optimizer.dims, init.initializers, optimizer.optimizers, strict=True)
            return RowStart([*(_start_of(*part) for part in parts), *_record_start(record // width)], width)
    elif not isinstance(optimizer, ColumnOptimizers) and not isinstance(init, ColumnInitializers):
        return RowStart([_start_of(dim, init, optimizer), *_record_start(record // width)], width)
    raise InputError(f"the columns of {optimizer!r} are not those of {init!r}: make the table with columns=")


def _record_start(numbers: int) -> list[tuple[int, int, np.ndarray, int, float]]:
    return [(0, 0, np.zeros(3), numbers, 0.0)] if numbers else []


def _start_of(dim: int, init: Initializer, optimizer: Optimizer) -> tuple[int, int, np.ndarray, int, float]:
    return dim, init.seed, init.numbers(), optimizer.init(dim), float(optimizer.slot_start)
