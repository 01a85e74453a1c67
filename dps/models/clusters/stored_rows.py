"""Rows of unit length in a table: dense, or sparse and packed; written from this process or by trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from dask.base import is_dask_collection

import dps
from dps.errors import InputError
from dps.features import as_pandas
from dps.functions.neighbours import packed
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece
from dps.models.inputs.pieces import Pieces, pieces_of
from dps.models.inputs.source import lazy_parts
from dps.models.types import Block, Features
from dps.spark import is_spark

__all__ = ["StoredRows", "block_for_rows", "stored_rows", "table_rows", "unit_rows"]

WRITE_BYTES = 64 << 20  # of rows that are written at a time


class StoredRows(NamedTuple):
    """The table of the rows that a model was fitted to."""

    client: dps.Client
    table: str
    layout: Layout
    size: int  # rows
    width: int  # values of a row of the table
    sparse: bool


class PartSize(NamedTuple):
    layout: Layout
    rows: int
    widest: int | None  # most elements of a sparse row; None: the rows are dense
    number: int  # of the partition


class PutPlan(NamedTuple):
    table: str
    width: int
    sparse: bool
    starts: dict[int, int]  # the number of the first row of each partition that has rows
    sizes: dict[int, PartSize]  # of these partitions


def block_for_rows(X: Features, layout: Layout) -> Block:
    X = X if hasattr(X, "shape") else np.asarray(X)
    if len(X.shape) == 2 and not hasattr(X, "columns") and X.shape[1] != layout.features:
        raise InputError(
            f"X has {X.shape[1]} features, but Similarity is expecting {layout.features} features as input"
        )
    return layout.block(X)


def unit_rows(block: Block) -> Block:
    """Each row divided by its norm; rows of zeros as they are."""
    if scipy.sparse.issparse(block):
        norms = np.sqrt(np.asarray(block.astype(np.float64).multiply(block).sum(axis=1)).ravel())
        made = block.astype(np.float64)
        made.data /= np.repeat(np.where(norms > 0, norms, 1.0), np.diff(made.indptr))
        return made.astype(np.float32)
    rows = np.asarray(block, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def table_rows(block: Block, sparse: bool, width: int | None = None) -> np.ndarray:
    """Rows as they lie in the table, or as queries: dense, or packed."""
    if not sparse:
        return np.ascontiguousarray(block.toarray() if scipy.sparse.issparse(block) else block)
    matrix = scipy.sparse.csr_matrix(block)
    matrix.sum_duplicates()
    widest = int(np.diff(matrix.indptr).max(initial=1))
    return packed(matrix.indptr, matrix.indices, matrix.data, widest if width is None else width)


def size_of(piece: Piece) -> PartSize:
    """The number of rows of a piece, and of the elements of its widest row."""
    block = piece.block
    if not scipy.sparse.issparse(block):
        return PartSize(piece.layout, block.shape[0], None, piece.number)
    block.sum_duplicates()
    return PartSize(piece.layout, block.shape[0], int(np.diff(block.indptr).max(initial=1)), piece.number)


def stored_rows(ps: dps.ParameterServer, table: str, X: Features) -> StoredRows:
    """Put rows into a new table."""
    if is_dask_collection(X) or lazy_parts(X) or is_spark(X):
        with contextlib.closing(pieces_of(ps, (X, None, None), None, 0, None, labelled=False)) as pieces:
            return stored_pieces(ps, table, pieces)
    X = as_pandas(X)
    X = X if hasattr(X, "shape") else np.asarray(X)
    layout = Layout.of(X if len(X.shape) == 2 else np.atleast_2d(X), 0)
    block = layout.block(X)
    rows = new_table(ps, table, [size_of(Piece(block, np.zeros(0), layout))])
    write(rows.client, rows, block, 0)
    return rows


def new_table(ps: dps.ParameterServer, table: str, sizes: Sequence[PartSize]) -> StoredRows:
    layouts, count = {size.layout for size in sizes}, sum(size.rows for size in sizes)
    if len(layouts) > 1:
        raise InputError(f"partitions differ: {' and '.join(map(str, sorted(layouts, key=str)[:2]))}")
    if not count:
        raise InputError("X has 0 rows: there are none to find")
    (layout,) = layouts
    widths = [size.widest for size in sizes if size.widest is not None]
    sparse = bool(widths)
    if sparse and len(widths) < len(sizes):
        widths.append(layout.features)  # because a dense partition is among them
    width = max(widths) if sparse else layout.features
    ps.table(table, width, rows=count, dtype="int64" if sparse else "float32")
    return StoredRows(ps.client(), table, layout, count, width, sparse)


def stored_pieces(ps: dps.ParameterServer, table: str, pieces: Pieces) -> StoredRows:
    """Put the rows of partitions into a new table, from where they lie."""
    sizes = sorted(pieces.mapped(size_of), key=lambda size: size.number)
    rows = new_table(ps, table, sizes)
    starts = np.cumsum([0, *(size.rows for size in sizes)]).tolist()
    plan = PutPlan(
        table, rows.width, rows.sparse, {size.number: start for size, start in zip(sizes, starts, strict=False)},
        {size.number: size for size in sizes},
    )  # fmt: skip
    pieces.run(plan, put, staleness=0, progress=False)
    return rows


def put(trainer: dps.Trainer, pieces: Sequence[Piece], plan: PutPlan) -> None:
    """The training function: write the rows of this trainer's partitions, if they are as large as they were."""
    for piece in pieces:
        there, planned = size_of(piece), plan.sizes.get(piece.number)
        if there != planned:
            raise InputError(
                f"partition {piece.number} was read twice and has changed, from {_text(planned)} to {_text(there)}: "
                f"cache or checkpoint X, so that its rows keep their numbers"
            )
    total, found = sum(size.rows for size in plan.sizes.values()), sum(piece.block.shape[0] for piece in pieces)
    found = int(trainer.allreduce(found))
    if found != total:
        raise InputError(
            f"X was read twice and has changed, from {total} rows to {found}: cache or checkpoint it, so that its rows "
            f"keep their numbers"
        )
    for piece in pieces:
        write(trainer, plan, piece.block, plan.starts[piece.number])


def _text(size: PartSize | None) -> str:
    if size is None:
        return "0 rows"
    return f"{size.rows} rows" + ("" if size.widest is None else f" of at most {size.widest} elements")


def write(client: dps.Client | dps.Trainer, rows: StoredRows | PutPlan, block: Block, start: int) -> None:
    step = max(1, WRITE_BYTES // (8 * rows.width))
    for first in range(0, block.shape[0], step):
        part = table_rows(unit_rows(block[first : first + step]), rows.sparse, rows.width)
        client.assign(rows.table, slice(start + first, start + first + len(part)), part)
