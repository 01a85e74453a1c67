"""PSMatrix: a matrix whose rows lie together on the servers, each cut by columns as vectors are.

So row operations, products with vectors of the same length, and products of rows compute where the elements are. What
has an element for each row is an array of numpy, and what has one for each column is a vector on the servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dps.arrays import indexing, statistics
from dps.arrays.array import PSArray, are_vectors, implements, made, operands_of, sent
from dps.arrays.expressions import Literal, Node, applied, converted
from dps.arrays.pools import BorrowedBlock
from dps.arrays.programs import Wish
from dps.arrays.statistics import DType
from dps.errors import InputError, InputTypeError, KeyRangeError

if TYPE_CHECKING:
    from dps.arrays.space import Space

__all__ = ["PSMatrix", "Transposed", "eye"]


class PSMatrix(PSArray):
    """A matrix on the servers; made by ``dps.arrays.on(ps).zeros((rows, columns))`` and the like.

    Attributes
    ----------
    space : Space
        The arrays of its parameter server.
    node : Node
        What it is computed from.
    """

    __slots__ = ()
    dimensions = 2

    @property
    def T(self) -> Transposed:
        """The transpose, for products."""
        return Transposed(self)

    def __getitem__(self, index: object) -> Any:
        row, column = self._places(index)
        if isinstance(row, int):
            if indexing.is_whole(column):
                return made(self.space, Node(self.shape[1:], self.dtype, "row", [self.node, _number(row)]))
            pool, first = indexing.stored_at(self)
            node = Node(self.shape[1:], self.dtype)
            node.put(BorrowedBlock(pool, first + row))  # no copy of the row is made for some of its elements
            return made(self.space, node)[column]
        if isinstance(column, int):
            pool, first = indexing.stored_at(self)
            if pool.dtype.itemsize != self.itemsize:
                return self.to_numpy()[:, column]
            key = int(pool.layout.keys(first, np.array([column]))[0])
            keys = key + np.arange(self.shape[0]) * pool.layout.part
            return pool.store.pull(pool.table, keys).view(self.dtype)
        return self.copy()

    def __setitem__(self, index: object, value: Any) -> None:
        if isinstance(index, PSMatrix):
            chosen: Any = np.where(index, value, self)
            self.assign(chosen.astype(self.dtype).node)
            return
        row, column = self._places(index)
        if not isinstance(row, int) or not indexing.is_whole(column):
            if isinstance(row, int) or isinstance(column, int):
                raise InputTypeError("a matrix on the servers is written whole or by rows: matrix[row] = vector")
            (value,) = operands_of(self.space, [value])
            self.assign(_spread(value, self.shape, self.dtype))
            return
        pool, first = indexing.owned(self)
        (value,) = operands_of(self.space, [value])
        self.space.put(_spread(value, self.shape[1:], self.dtype), BorrowedBlock(pool, first + row))

    def __iter__(self) -> Iterator[PSArray]:
        return (self[row] for row in range(self.shape[0]))

    def dot(self, other: npt.ArrayLike) -> Any:
        """The product with a vector, a matrix, or a number."""
        return np.dot(self, other)

    def diagonal(self, offset: int = 0) -> np.ndarray:
        """The elements whose column is their row and `offset`."""
        pool, first = indexing.stored_at(self)
        rows = np.arange(max(-offset, 0), max(min(self.shape[0], self.shape[1] - offset), max(-offset, 0)))
        if pool.dtype.itemsize != self.itemsize:
            return np.diagonal(self.to_numpy(), offset)
        keys = pool.layout.keys(first, rows + offset) + rows * pool.layout.part
        return pool.store.pull(pool.table, keys).view(self.dtype)

    def _places(self, index: object) -> tuple[Any, object]:
        """Row and column: each a number, or all."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > 2:
            raise KeyRangeError(f"too many indices: a matrix has 2 axes, and {len(parts)} were indexed")
        row, column = (*parts, slice(None))[:2]
        row = slice(None) if indexing.is_whole(row) else indexing.positions(self.shape[0], row)
        if isinstance(row, int):
            return row, column
        column = slice(None) if indexing.is_whole(column) else indexing.positions(self.shape[1], column)
        if not indexing.is_whole(row) or not (isinstance(column, int) or indexing.is_whole(column)):
            raise InputTypeError(
                "a matrix on the servers is indexed by one row, one column, or an element of a row: matrix[2], "
                "matrix[:, 3], matrix[2, 5:8]; for all else use to_numpy()"
            )
        return row, column


class Transposed:
    """The transpose of a matrix on the servers: an operand of ``@``, and nothing else."""

    def __init__(self, matrix: Any):
        self.T: PSMatrix = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """(columns, rows) of the matrix."""
        return self.T.shape[::-1]

    @property
    def dtype(self) -> np.dtype:
        return self.T.dtype

    @property
    def ndim(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def __getitem__(self, index: object) -> Any:
        row, column = index if isinstance(index, tuple) else (index, slice(None))
        return self.T[column, row]

    def to_numpy(self) -> np.ndarray:
        return self.T.to_numpy().T

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.T, dtype).T

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> Any:
        if ufunc is not np.matmul or method != "__call__" or options:
            raise InputTypeError(f"np.{ufunc.__name__}: a transposed matrix is an operand of @ only; use to_numpy()")
        return _matmul(*inputs)

    def __matmul__(self, other: object) -> Any:
        return _matmul(self, other)

    def __rmatmul__(self, other: object) -> Any:
        return _matmul(other, self)


@implements(np.matmul, np.linalg.matmul)
def _matmul(first: Any, second: Any) -> Any:
    """Products of which the servers hold one operand by columns, or both."""
    if are_vectors(first, second):
        return statistics.dotted(first, second)
    if np.ndim(first) == 0 or np.ndim(second) == 0:
        raise InputError("matmul: an operand has no axis; use * for numbers")
    if first.shape[-1] != second.shape[0]:
        raise InputError(
            f"matmul: shapes {first.shape} and {second.shape} do not fit: {first.shape[-1]} != {second.shape[0]}"
        )
    if isinstance(first, Transposed):
        if isinstance(second, Transposed):
            return _matmul(second.T, first.T).T
        if np.ndim(second) == 2:
            return Transposed(_combined(second.T, first.T))  # M' Y = (Y' M)'
        return _combined(second, first.T)
    if isinstance(second, Transposed):
        second = second.T  # the sums of products run along both rows
    elif np.ndim(second) == 2:
        if isinstance(second, PSMatrix):
            return _combined(first, second)
        # The columns go to the servers, because sums of products run along rows there.
        second = sent(first.space, np.asarray(second).T)
    if np.ndim(first) == 1 and np.ndim(second) == 1:
        return np.dot(first, second)  # one of them is of numpy
    space = first.space if isinstance(first, PSArray) else second.space
    operands = operands_of(space, [first, second])
    dtype = np.result_type(*[each.dtype for each in operands])
    pair = tuple(converted(each, dtype) for each in operands)
    (partial,) = space.reduce([Wish("matmul", pair)])  # type: ignore[arg-type]
    return statistics.typed(partial, dtype)


def _combined(weights: object, matrix: PSMatrix) -> PSArray:
    """Sums of the rows of a matrix: a vector, or a matrix with a row for each row of the weights.

    Every server needs all weights, so those that lie on the servers are brought here, if they are small.
    """
    weights = np.asarray(weights)
    dtype = np.result_type(weights.dtype, matrix.dtype)
    shape = (*weights.shape[:-1], matrix.shape[1])
    operands = [converted(weights, dtype), converted(matrix.node, dtype)]
    return made(matrix.space, Node(shape, dtype, "weighted", operands))


def eye(space: Space, rows: int, columns: int | None = None, k: int = 0, dtype: npt.DTypeLike = np.float64) -> PSArray:
    index = Node((columns or rows,), np.dtype(np.int64), "index")
    node = applied("equal", [index, np.arange(k, rows + k)[:, None]])
    return made(space, converted(node, np.dtype(dtype)))


@implements(np.diag, np.diagonal, np.linalg.diagonal)
def _diagonal(a: PSArray, k: int = 0, *axes: object, offset: int = 0) -> np.ndarray:
    if not isinstance(a, PSMatrix) or axes not in ((), (0, 1)):
        raise InputTypeError("np.diag on the servers takes a matrix, and gives one of its diagonals")
    return a.diagonal(k or offset)


@implements(np.trace, np.linalg.trace)
def _trace(a: PSArray, offset: int = 0, *axes: object, dtype: DType = None) -> object:
    return _diagonal(a, offset, *axes).sum(dtype=dtype)


@implements(np.tril)
def _tril(m: PSMatrix, k: int = 0) -> object:
    return np.where(_columns(m) <= np.arange(m.shape[0])[:, None] + k, m, m.dtype.type(0))


@implements(np.triu)
def _triu(m: PSMatrix, k: int = 0) -> object:
    return np.where(_columns(m) >= np.arange(m.shape[0])[:, None] + k, m, m.dtype.type(0))


def _columns(matrix: PSMatrix) -> PSArray:
    return made(matrix.space, Node(matrix.shape[1:], np.dtype(np.int64), "index"))


def _spread(value: Node | np.ndarray | bool | int | float, shape: tuple[int, ...], dtype: np.dtype) -> Node:
    if isinstance(value, Node) and value.shape[-1] != shape[-1]:
        raise InputError(f"could not broadcast input array from shape {value.shape} into shape {shape}")
    return Node(shape, dtype, "cast", [converted(value, dtype)])


def _number(number: int) -> Literal:
    return Literal(np.asarray(number), np.dtype(np.int64))
