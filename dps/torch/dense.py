"""DenseParameters: the parameters of a module of torch in one dense table, stepped by its optimizer on the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dps import Optimizer, PulledRows, Table, Wire
from dps.errors import InputError, InputTypeError
from dps.torch.gradients import push_gradients
from dps.torch.inputs import checked_table, stepping_spec, trainable

if TYPE_CHECKING:
    from dps import Client, ParameterServer, Trainer

__all__ = ["DenseParameters", "dense_table", "flat", "trained_parameters"]


def trained_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that want a gradient, by name; one that several modules share is there once."""
    if not isinstance(module, torch.nn.Module):
        raise InputTypeError(f"the parameters are those of a torch.nn.Module, not {type(module).__name__}")
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not parameters:
        raise InputError(f"the module {type(module).__name__} has no parameters that want a gradient")
    return parameters


def flat(tensors: list[torch.Tensor], dtype: npt.DTypeLike) -> np.ndarray:
    """Tensors one after the other, as an array of one axis."""
    wanted = torch.float64 if np.dtype(dtype) == np.float64 else torch.float32
    values: np.ndarray = torch.cat([each.detach().cpu().to(wanted).reshape(-1) for each in tensors]).numpy()
    return values


def dense_table(
    ps: ParameterServer,
    name: str,
    module: torch.nn.Module,
    *,
    optimizer: Optimizer,
    wire: Wire | str | None = None,
    **options: Any,
) -> Table:
    """Make the table of a module's parameters, with their values as they are.

    Parameters
    ----------
    ps : dps.ParameterServer
    name : str
        The table's name.
    module : torch.nn.Module
        Its parameters that want a gradient make the rows, a number in each.
    optimizer : Optimizer
        What a pushed gradient does, ``dps.Adagrad(0.1)`` say.
    wire : Wire, "auto" or "lists", optional
        How parameters and gradients travel between trainers and servers, as of :meth:`dps.ParameterServer.table`. By
        default ``"lists"``, which loses nothing.
    **options
        More for :meth:`dps.ParameterServer.table`, such as ``aggregate="mean"`` or ``copies=2``.

    Returns
    -------
    Table

    Examples
    --------
    >>> import torch
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         len(dps.torch.dense_table(ps, "dense", torch.nn.Linear(3, 2), optimizer=dps.SGD(0.1)))
    8
    """
    parameters = list(trained_parameters(module).values())
    options.setdefault("dtype", "float64" if any(each.dtype == torch.float64 for each in parameters) else "float32")
    values = flat(parameters, options["dtype"])
    wire = "lists" if wire is None else wire
    table: Table = ps.table(name, rows=len(values), optimizer=optimizer, wire=wire, **options)
    stepping_spec(table.spec)
    table.assign(None, values)
    return table


class DenseParameters:
    """The parameters of a module in a table that :func:`dense_table` has made.

    :meth:`pull` loads them into the module, and :meth:`push` hands the gradients that backward has left in it to the
    table's optimizer. Buffers, such as the running means of a batch normalisation, stay in the trainer.

    Parameters
    ----------
    caller : dps.Trainer or dps.Client
        What pulls and pushes.
    table : str or Table
        The table of the parameters.
    module : torch.nn.Module
        A module with the same parameters, in the same order, as the one that the table was made for.

    Raises
    ------
    UnknownTableError
        There is no such table.
    InputError
        A table with another number of rows than the module has parameters.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> def train(trainer, partitions):
    ...     line = torch.nn.Linear(1, 1)
    ...     dense = dps.torch.DenseParameters(trainer, "line", line)
    ...     for x in trainer.iterate(partitions, batch_size=5, epochs=50):
    ...         dense.pull()
    ...         x = torch.from_numpy(x)
    ...         (line(x) - 3 * x - 1).square().mean().backward()
    ...         dense.push()
    ...     return line.weight.item(), line.bias.item()
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         _ = dps.torch.dense_table(ps, "line", torch.nn.Linear(1, 1), optimizer=dps.Adagrad(0.5))
    ...         np.round(ps.run(train, np.linspace(-1, 1, 20, dtype="float32")[:, None]), 2)
    array([[3., 1.]])
    """

    def __init__(self, caller: Client | Trainer, table: str | Table, module: torch.nn.Module):
        spec = stepping_spec(checked_table(caller, table))
        self.parameters = trained_parameters(module)
        sizes = [each.numel() for each in self.parameters.values()]
        if spec.dim != 1 or spec.rows != sum(sizes):
            shape = "a keyed table" if spec.keyed else f"{spec.rows} rows of {spec.dim}"
            raise InputError(
                f"table {spec.name!r} is {shape}, and the module {type(module).__name__} has {sum(sizes)} "
                "parameters that want a gradient: make the table with dps.torch.dense_table(ps, name, module, ...)"
            )
        self.caller = caller
        self.table = spec.name
        self.module = module
        self._dtype = spec.dtype
        self._ends = np.cumsum(sizes)

    def __repr__(self) -> str:
        return f"<dps.torch.DenseParameters: {self._ends[-1]} in table {self.table!r}>"

    def __call__(self, *inputs: object, **options: object) -> object:
        """What the module makes of its inputs, with the parameters as they are in it."""
        return self.module(*inputs, **options)

    def pull(self, rows: PulledRows | None = None) -> None:
        """Load the parameters into the module, and forget its gradients.

        Parameters
        ----------
        rows : PulledRows, optional
            All rows of the table, if ``trainer.iterate(pull=)`` has pulled them: with the rows of the embeddings, in
            one round trip. By default they are pulled now.

        Raises
        ------
        InputError
            The rows are not all of the table, in their order.
        """
        pulled = self.caller.pull(self.table) if rows is None else self._values(rows)
        values = torch.from_numpy(trainable(pulled))
        with torch.no_grad():
            for each, end in zip(self.parameters.values(), self._ends.tolist(), strict=True):
                each.copy_(values[end - each.numel() : end].view(each.shape))
                each.grad = None

    def _values(self, rows: PulledRows) -> np.ndarray:
        if not np.array_equal(rows.keys, np.arange(self._ends[-1])) or rows.values.ndim != 1:
            raise InputError(
                f"table {self.table!r} has {self._ends[-1]} parameters, and these are {rows!r}: pull all rows of the "
                f"table in their order, pull=lambda batch: {{{self.table!r}: None}}"
            )
        return np.ascontiguousarray(rows.values)

    def push(self, rows: int | None = None) -> None:
        """Push the gradients, and forget them; see :func:`dps.torch.push_gradients`.

        A parameter without a gradient, because the loss did not depend on it, is not stepped; nor is it by torch.
        """
        push_gradients(self, rows=rows)

    def gradients(self) -> dict[str, tuple[np.ndarray | None, np.ndarray]]:
        """The keys (None for all rows) and the gradients, by table."""
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        if not gradients:
            raise InputError(
                f"there is no gradient of table {self.table!r} to push: call loss.backward() first, once for each push"
            )
        values = flat(gradients, self._dtype)
        if len(gradients) == len(self.parameters):
            return {self.table: (None, values)}
        ends = zip(self.parameters.values(), self._ends.tolist(), strict=True)
        keys = [np.arange(end - each.numel(), end) for each, end in ends if each.grad is not None]
        return {self.table: (np.concatenate(keys), values)}

    def spent(self) -> None:
        """The gradients are pushed: forget them."""
        for each in self.parameters.values():
            each.grad = None
