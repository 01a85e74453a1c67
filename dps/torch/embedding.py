"""Embeddings whose rows lie in a table on the servers: each batch pulls the rows of its distinct ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from dps import PulledRows, Table, distinct_keys
from dps.errors import InputError, InputTypeError
from dps.torch.gradients import UnpushedGradients, push_gradients
from dps.torch.inputs import checked_ids, checked_table, is_sparse, stepping_spec, trainable

if TYPE_CHECKING:
    from dps import Client, Trainer

__all__ = ["Embedding", "EmbeddingBag", "TableRows"]


class TableRows(torch.nn.Module):
    """What the embeddings share: rows of a table, pulled by ids, whose gradients are pushed.

    Attributes
    ----------
    caller : dps.Trainer or dps.Client
        What pulls and pushes.
    table : str
        The table's name.
    dim : int
        Numbers in a row.
    """

    def __init__(self, caller: Client | Trainer, table: str | Table, dim: int):
        super().__init__()
        spec = stepping_spec(checked_table(caller, table))
        if dim != spec.dim:
            raise InputError(
                f"table {spec.name!r} has rows of {spec.dim} numbers, and the embedding was asked for dim={dim!r}"
            )
        self.caller = caller
        self.table = spec.name
        self.dim = spec.dim
        self._unpushed = UnpushedGradients(spec.name)

    def extra_repr(self) -> str:
        """What torch prints of the module."""
        return f"table={self.table!r}, dim={self.dim}"

    def push(self, rows: int | None = None) -> None:
        """Push the gradients that backward has computed since the last push; see :func:`dps.torch.push_gradients`."""
        push_gradients(self, rows=rows)

    def gradients(self) -> dict[str, tuple[np.ndarray | None, np.ndarray]]:
        """The distinct keys and their summed gradients, by table."""
        return {self.table: self._unpushed.summed()}

    def spent(self) -> None:
        """The gradients are pushed: a backward through the same rows is an error from now on."""
        self._unpushed.spend()

    def looked_up(self, ids: Any) -> tuple[torch.Tensor, Any]:
        """The rows of the ids, each once, and for each id the position of its row."""
        if not isinstance(ids, PulledRows):
            named = ids if is_sparse(ids) else checked_ids(ids, self.table)
            keys, codes = distinct_keys(named, self.table)
            ids = PulledRows(keys, self.caller.pull(self.table, keys), codes)
        values = trainable(np.ascontiguousarray(ids.values))
        dim = values.shape[1] if values.ndim > 1 else 1
        if dim != self.dim:
            raise InputError(
                f"table {self.table!r} has rows of {self.dim} numbers, and these pulled rows have {dim}: they are of "
                "another table"
            )
        return self._unpushed.leaf(ids.keys, values.reshape(-1, self.dim)), ids.codes


def as_codes(codes: object) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes))


class Embedding(TableRows):
    """Rows of a table, looked up by ids: ``torch.nn.Embedding`` whose weight lies on the servers.

    The forward pass pulls the rows of the distinct ids of a batch, backward computes their gradient, and :meth:`push`
    hands it to the optimizer of the table. The ids of a keyed table are any int64, so there is no number of embeddings
    to choose; a row is `init` of the table until its first push. The module has no parameters of torch: no optimizer of
    torch steps it, and ``state_dict`` is empty; :func:`dps.torch.save` writes the rows.

    Parameters
    ----------
    caller : dps.Trainer or dps.Client
        What pulls and pushes. A client is for prediction and for loading; a trainer's pushes count once.
    table : str or Table
        A table of float32 or float64 with an optimizer, ``ps.table("items", dim=16, init=dps.Normal(0.1),
        optimizer=dps.Adagrad(0.1))``.
    dim : int
        Numbers in a row.

    Raises
    ------
    UnknownTableError
        There is no such table.
    InputError
        A table with rows of another length, of integers, or whose optimizer is ``dps.Add()`` or ``dps.Assign()``.

    Examples
    --------
    >>> import torch
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         _ = ps.table("items", dim=2, init=dps.Constant(1.0), optimizer=dps.SGD(0.5))
    ...         items = dps.torch.Embedding(ps.client(), "items", 2)
    ...         items(torch.tensor([[7, 900], [7, 7]])).sum().backward()
    ...         items.push()
    ...         items(torch.tensor([7, 900, 5]))
    tensor([[-0.5000, -0.5000],
            [ 0.5000,  0.5000],
            [ 1.0000,  1.0000]], grad_fn=<EmbeddingBackward0>)
    """

    def forward(self, ids: object) -> torch.Tensor:
        """The rows of the ids.

        Parameters
        ----------
        ids : tensor or array_like of int, or PulledRows
            Of any shape. Rows that ``trainer.iterate(pull=)`` has pulled are taken as they are.

        Returns
        -------
        Tensor
            ``ids.shape + (dim,)``, of the dtype of the table; of float32 if that has 16 bits.

        Raises
        ------
        InputTypeError
            Ids that are no integers.
        """
        if is_sparse(ids):
            raise InputTypeError(
                f"Embedding of table {self.table!r} takes ids, not a sparse matrix: dps.torch.EmbeddingBag "
                "sums the rows of its columns"
            )
        rows, codes = self.looked_up(ids)
        return functional.embedding(as_codes(codes), rows)


class EmbeddingBag(TableRows):
    """Sums or means of rows of a table: ``torch.nn.EmbeddingBag`` whose weight lies on the servers.

    Parameters
    ----------
    caller, table, dim
        As for :class:`Embedding`.
    mode : {"sum", "mean"}
        What is made of the rows of a bag.

    Examples
    --------
    >>> import scipy.sparse
    >>> clicks = scipy.sparse.csr_array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         _ = ps.table("wide", init=dps.Constant(1.0), optimizer=dps.SGD(0.5))
    ...         wide = dps.torch.EmbeddingBag(ps.client(), "wide", 1)
    ...         wide([[7, 9, 7], [5, 6, 7]]).tolist(), wide(clicks).tolist()
    ([[3.0], [3.0]], [[3.0], [0.0]])
    """

    def __init__(self, caller: Client | Trainer, table: str | Table, dim: int, mode: str = "sum"):
        super().__init__(caller, table, dim)
        if mode not in ("sum", "mean"):
            raise InputError(f"EmbeddingBag of table {self.table!r}: mode is 'sum' or 'mean', not {mode!r}")
        self.mode = mode

    def extra_repr(self) -> str:
        """What torch prints of the module."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, ids: object, offsets: object = None, per_sample_weights: object = None) -> torch.Tensor:
        """The sum or mean of the rows of each bag.

        Parameters
        ----------
        ids : tensor or array_like of int, sparse matrix, or PulledRows
            ``(bags, ids)``; or of one axis, with `offsets`; or a sparse matrix with a bag in each row, whose columns
            are ids and whose values are weights. Rows that ``trainer.iterate(pull=)`` has pulled are taken as they are.
        offsets : tensor or array_like of int, optional
            Where in `ids` each bag begins; a bag may be empty, and is then 0.
        per_sample_weights : Tensor, optional
            A factor for each id, in the shape of `ids`; for mode "sum".

        Returns
        -------
        Tensor
            ``(bags, dim)``.
        """
        rows, codes = self.looked_up(ids)
        if hasattr(codes, "tocsr"):
            if self.mode == "mean" or offsets is not None or per_sample_weights is not None:
                raise InputError(
                    f"EmbeddingBag of table {self.table!r}: a sparse matrix has bags and weights of its own, "
                    "which mode 'sum' adds up; no mode 'mean', offsets or per_sample_weights beside it"
                )
            matrix = codes.tocsr()
            codes, offsets = matrix.indices, matrix.indptr[:-1]
            per_sample_weights = torch.from_numpy(np.ascontiguousarray(matrix.data)).to(rows.dtype)
        where = as_codes(codes)
        if (where.ndim == 1) != (offsets is not None) or where.ndim not in (1, 2):
            raise InputError(
                f"EmbeddingBag of table {self.table!r} takes ids of the shape (bags, ids), or of one axis with "
                f"offsets; these have {where.ndim} axes, {'no' if offsets is None else 'and there are'} offsets"
            )
        if offsets is not None:
            offsets = torch.as_tensor(offsets).to(where.dtype)
        return functional.embedding_bag(where, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)
