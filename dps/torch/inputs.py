"""Tables and ids as the modules take them, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dps import Add, Assign, Table, TableSpec
from dps.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from dps import Client, Trainer

__all__ = ["checked_ids", "checked_table", "is_sparse", "stepping_spec", "trainable"]


def checked_table(caller: Client | Trainer, table: str | Table) -> TableSpec:
    """The definition of a table of floats, as a trainer or a client knows it."""
    if not (hasattr(caller, "table") and hasattr(caller, "pull") and hasattr(caller, "keys")):
        raise InputTypeError(
            f"the parameters are pulled through a dps.Trainer or dps.Client, not {type(caller).__name__}"
        )
    handle: Table = caller.table(table)
    spec = handle.spec
    if spec.dtype not in ("float32", "float64", "float16", "bfloat16"):
        raise InputError(f"table {spec.name!r} is of {spec.dtype}, and torch trains fractions: make it of float32, say")
    return spec


def stepping_spec(spec: TableSpec) -> TableSpec:
    """The definition of a table, if a pushed gradient is a step of its optimizer."""
    if isinstance(spec.optimizer, (Add, Assign)):
        raise InputError(
            f"table {spec.name!r} has the optimizer dps.{spec.optimizer.kind}(), so a pushed gradient would be "
            f"{'added to' if isinstance(spec.optimizer, Add) else 'put in the place of'} the rows: make it with one "
            "that takes steps, such as optimizer=dps.SGD(0.1) or dps.Adagrad(0.1)"
        )
    return spec


def trainable(values: np.ndarray) -> np.ndarray:
    """Pulled values as torch trains them: halves as float32, because torch has no gradients of numpy's bfloat16."""
    return values.astype(np.float32) if values.dtype.itemsize == 2 else values


def is_sparse(ids: object) -> bool:
    """Whether the ids are a sparse matrix of scipy, whose columns they are."""
    return hasattr(ids, "nnz") and hasattr(ids, "tocsr") and not isinstance(ids, torch.Tensor)


def checked_ids(ids: object, table: str) -> np.ndarray:
    """Ids as an array of integers of any shape."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if not array.size and not isinstance(ids, (torch.Tensor, np.ndarray)):
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        kind = ids.dtype if isinstance(ids, torch.Tensor) else array.dtype
        raise InputTypeError(
            f"table {table!r} is looked up by integer ids, not by {kind}; text and categories: dps.hash_strings first"
        )
    return array
