"""Rows and parameters as files, in the format safetensors, which torch reads without dps."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import numpy as np
import safetensors
import safetensors.numpy

from dps.errors import InputError, InputTypeError
from dps.torch.dense import DenseParameters
from dps.torch.embedding import TableRows
from dps.torch.inputs import checked_table

__all__ = ["load", "save"]

FORMAT = "dps.torch 1"
Savable: TypeAlias = TableRows | DenseParameters
Tensors: TypeAlias = dict[str, np.ndarray]


def save(path: str | os.PathLike[str], *modules: Savable) -> None:
    """Write what lies on the servers of some modules to a file, in the format safetensors.

    Its tensors: for an embedding of the keyed table T, ``T.keys`` int64 [m], ascending, and ``T.values`` [m, dim]; of a
    dense table, ``T.values`` alone; for `DenseParameters`, ``T.NAME`` for each parameter, of its shape. The states of
    the optimizers are not in it; *checkpoints* have these. The rows are read into this process, so they have to fit.

    Parameters
    ----------
    path : str or path
    *modules : Embedding, EmbeddingBag or DenseParameters
        Of a client or a trainer, after the run or between two clocks.

    Examples
    --------
    >>> import tempfile, safetensors.torch
    >>> path = tempfile.mkdtemp() + "/items.safetensors"
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         ps.table("items", dim=2, optimizer=dps.SGD(1.0)).push([7, 5], [[-1.0, -2.0], [-3.0, -4.0]])
    ...         dps.torch.save(path, dps.torch.Embedding(ps.client(), "items", 2))
    >>> safetensors.torch.load_file(path)
    {'items.keys': tensor([5, 7]), 'items.values': tensor([[3., 4.], [1., 2.]])}
    """
    contents: Tensors = {}
    for module in checked_modules(modules):
        contents |= parameters_of(module) if isinstance(module, DenseParameters) else rows_of(module)
    content = safetensors.numpy.save(contents, {"format": FORMAT})
    with open(path, "wb") as file:
        file.write(content)


def load(path: str | os.PathLike[str], *modules: Savable) -> None:
    """Assign what :func:`save` has written to the tables of some modules; one process does it, before the run.

    Rows that the file does not have stay as they are, and so do the states of the optimizers. Nothing is assigned
    unless the file has all that is asked for.

    Parameters
    ----------
    path : str or path
    *modules : Embedding, EmbeddingBag or DenseParameters
        Their tables have the names that they had when the file was written.

    Raises
    ------
    InputError
        Another kind of file; no tensor of a table in it, or one of another shape.
    """
    try:
        with safetensors.safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            contents = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InputError(f"{path} is no file that dps.torch.save has written, or it is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} is of the format {metadata.get('format')!r}, not {FORMAT!r}, which dps.torch.save writes"
        )
    changes = [change_of(path, module, contents) for module in checked_modules(modules)]
    for module, (keys, values) in zip(modules, changes, strict=True):
        if len(values):
            module.caller.assign(module.table, keys, values)


def checked_modules(modules: tuple[Any, ...]) -> tuple[Savable, ...]:
    """The modules, if they are such."""
    for module in modules:
        if not isinstance(module, (TableRows, DenseParameters)):
            raise InputTypeError(
                "dps.torch.save and load take Embedding, EmbeddingBag and DenseParameters, not "
                f"{type(module).__name__}; a torch.nn.Module of your own: name these of its parts"
            )
    return modules


def rows_of(module: TableRows) -> Tensors:
    """All rows of a module's table."""
    caller, table = module.caller, module.table
    if not checked_table(caller, table).keyed:
        return {f"{table}.values": caller.pull(table).reshape(-1, module.dim)}
    blocks = list(caller.keys(table))
    keys = np.unique(np.concatenate(blocks)) if blocks else np.empty(0, np.int64)
    return {f"{table}.keys": keys, f"{table}.values": caller.pull(table, keys).reshape(-1, module.dim)}


def parameters_of(module: DenseParameters) -> Tensors:
    """All parameters of a module's table, by name, in their shapes."""
    values = module.caller.pull(module.table)
    cut = np.split(values, np.cumsum([each.numel() for each in module.parameters.values()])[:-1])
    named = zip(module.parameters.items(), cut, strict=True)
    return {f"{module.table}.{name}": part.reshape(tuple(each.shape)) for (name, each), part in named}


def change_of(path: Any, module: Savable, contents: Tensors) -> tuple[np.ndarray | None, np.ndarray]:
    """Keys (None for all rows) and values to assign."""
    if isinstance(module, DenseParameters):
        return dense_change(path, module, contents)
    return row_change(path, module, contents)


def row_change(path: Any, module: TableRows, contents: Tensors) -> tuple[np.ndarray | None, np.ndarray]:
    """Keys and rows to assign."""
    spec = checked_table(module.caller, module.table)
    values = found(path, f"{module.table}.values", contents)
    keys = found(path, f"{module.table}.keys", contents) if spec.keyed else None
    shape = (spec.rows if keys is None else len(keys), module.dim)
    check_shape(path, f"{module.table}.values", values, shape)
    return keys, values.astype(spec.dtype, copy=False)


def dense_change(path: Any, module: DenseParameters, contents: Tensors) -> tuple[None, np.ndarray]:
    """The parameters to assign, one after the other."""
    parts = []
    for name, parameter in module.parameters.items():
        values = found(path, f"{module.table}.{name}", contents)
        check_shape(path, f"{module.table}.{name}", values, tuple(parameter.shape))
        parts.append(values.reshape(-1))
    return None, np.concatenate(parts)


def found(path: Any, name: str, contents: Tensors) -> np.ndarray:
    """A tensor of the file."""
    if name not in contents:
        raise InputError(f"{path} has no tensor {name!r}; it has {', '.join(sorted(contents)) or 'none'}")
    return contents[name]


def check_shape(path: Any, name: str, values: np.ndarray, shape: tuple[Any, ...]) -> None:
    """Raise InputError for a tensor of another shape."""
    if values.shape != shape:
        raise InputError(f"{path}: the tensor {name!r} is of the shape {values.shape}, and {shape} is wanted")
