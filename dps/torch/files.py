"""Rows and parameters as files, in the format safetensors, which torch reads without dps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import safetensors
import safetensors.torch
import torch

from dps.errors import InputError, InputTypeError
from dps.torch.dense import DenseParameters
from dps.torch.embedding import TableRows
from dps.torch.inputs import checked_table, trainable

__all__ = ["load", "save"]

FORMAT = "dps.torch 1"
# As text, because torch is a stand-in without operators where the pages are built without it.
Savable: TypeAlias = "torch.nn.Module | DenseParameters"  # embeddings are modules of torch, too
Tensors: TypeAlias = dict[str, torch.Tensor]


def save(path: str | os.PathLike[str], *modules: Savable) -> None:
    """Write modules, and what lies on the servers of them, to a file, in the format safetensors.

    Its tensors: for an embedding of the keyed table T, ``T.keys`` int64 [m], ascending, and ``T.values`` [m, dim]; of a
    dense table, ``T.values`` alone; for `DenseParameters`, ``T.NAME`` for each parameter, of its shape. Of another
    module of torch, those of the embeddings in it, and its ``state_dict`` under the names that this has. The states of
    the optimizers are not in it; *checkpoints* have these. The rows are read into this process, so they have to fit.

    Parameters
    ----------
    path : str or path
    *modules : Embedding, EmbeddingBag, DenseParameters or torch.nn.Module
        Of a client or a trainer, after the run or between two clocks. Where the parameters of a module lie on the
        servers, these are the `DenseParameters` of it; the module itself has them as they were when they were pulled.

    Raises
    ------
    InputError
        Two of the modules have a tensor of one name.

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
    for part in parts_of(modules):
        more = contents_of(part)
        if twice := sorted(contents.keys() & more.keys()):
            raise InputError(f"two of the modules have a tensor {twice[0]!r}: save them in files of their own")
        contents |= more
    content = safetensors.torch.save(contents, {"format": FORMAT})
    with open(path, "wb") as file:
        file.write(content)


def load(path: str | os.PathLike[str], *modules: Savable) -> None:
    """Assign what :func:`save` has written to some modules and their tables; one process does it, before the run.

    Rows that the file does not have stay as they are, and so do the states of the optimizers. Nothing is assigned
    unless the file has all that is asked for.

    Parameters
    ----------
    path : str or path
    *modules : Embedding, EmbeddingBag, DenseParameters or torch.nn.Module
        Their tables have the names that they had when the file was written.

    Raises
    ------
    InputError
        Another kind of file; no tensor of a table or module in it, or one of another shape.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            contents = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InputError(f"{path} is no file that dps.torch.save has written, or it is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} is of the format {metadata.get('format')!r}, not {FORMAT!r}, which dps.torch.save writes"
        )
    for assign in [assignment(path, part, contents) for part in parts_of(modules)]:
        assign()


def parts_of(modules: tuple[object, ...]) -> Iterator[Savable]:
    """Embeddings, also those within modules; dense parameters; modules with a state of their own. Each once."""
    parts: dict[Savable, None] = {}
    for module in modules:
        if isinstance(module, (TableRows, DenseParameters)):
            parts[module] = None
        elif isinstance(module, torch.nn.Module):
            inside = [each for each in module.modules() if isinstance(each, TableRows)]
            parts |= dict.fromkeys(inside)
            if not inside and not module.state_dict():
                raise InputError(
                    f"the module {type(module).__name__} has no embedding of dps and no state: leave it out"
                )
            parts[module] = None
        else:
            raise InputTypeError(
                f"dps.torch.save and load take modules of torch and DenseParameters, not {type(module).__name__}"
            )
    return iter(parts)


def contents_of(part: Savable) -> Tensors:
    """The tensors of a part, by the names that they have in the file."""
    if isinstance(part, TableRows):
        return rows_of(part)
    if isinstance(part, DenseParameters):
        return parameters_of(part)
    return {name: each.detach().clone().contiguous() for name, each in part.state_dict().items()}


def rows_of(module: TableRows) -> Tensors:
    caller, table = module.caller, module.table
    if not checked_table(caller, table).keyed:
        return {f"{table}.values": torch.from_numpy(trainable(caller.pull(table)).reshape(-1, module.dim))}
    blocks = list(caller.keys(table))
    keys = np.unique(np.concatenate(blocks)) if blocks else np.empty(0, np.int64)
    values = trainable(caller.pull(table, keys)).reshape(-1, module.dim)
    return {f"{table}.keys": torch.from_numpy(keys), f"{table}.values": torch.from_numpy(values)}


def parameters_of(module: DenseParameters) -> Tensors:
    """All parameters of a module's table, by name, in their shapes."""
    values = torch.from_numpy(trainable(module.caller.pull(module.table)))
    cut = values.split([each.numel() for each in module.parameters.values()])
    named = zip(module.parameters.items(), cut, strict=True)
    return {f"{module.table}.{name}": part.reshape(each.shape).clone() for (name, each), part in named}


def assignment(path: object, part: Savable, contents: Tensors) -> Callable[[], object]:
    """What assigns the tensors of a part; all that it needs is there, and of the right shape."""
    if isinstance(part, TableRows):
        keys, values = saved_rows(path, part, contents)
        return functools.partial(part.caller.assign, part.table, keys, values) if len(values) else list
    if isinstance(part, DenseParameters):
        return functools.partial(part.caller.assign, part.table, None, saved_parameters(path, part, contents))
    state = {name: found(path, name, contents, tuple(each.shape)) for name, each in part.state_dict().items()}
    return functools.partial(part.load_state_dict, state)


def saved_rows(path: object, module: TableRows, contents: Tensors) -> tuple[np.ndarray | None, np.ndarray]:
    """Keys (None for all rows) and rows to assign."""
    spec = checked_table(module.caller, module.table)
    keys = found(path, f"{module.table}.keys", contents).numpy() if spec.keyed else None
    shape = (spec.rows if keys is None else len(keys), module.dim)
    values = found(path, f"{module.table}.values", contents, shape).numpy()
    return keys, values


def saved_parameters(path: object, module: DenseParameters, contents: Tensors) -> np.ndarray:
    """The parameters to assign, one after the other."""
    named = module.parameters.items()
    parts = [found(path, f"{module.table}.{name}", contents, tuple(each.shape)) for name, each in named]
    return np.concatenate([part.numpy().reshape(-1) for part in parts])


def found(path: object, name: str, contents: Tensors, shape: tuple[int | None, ...] | None = None) -> torch.Tensor:
    """A tensor of the file, of this shape if one is given."""
    if name not in contents:
        raise InputError(f"{path} has no tensor {name!r}; it has {', '.join(sorted(contents)) or 'none'}")
    tensor = contents[name]
    if shape is not None and tuple(tensor.shape) != shape:
        raise InputError(f"{path}: the tensor {name!r} is of the shape {tuple(tensor.shape)}, and {shape} is wanted")
    return tensor
