"""Gradients of pulled rows, from backward to their push.

A forward pass pulls rows, and makes them a leaf of torch's graph: `UnpushedGradients.leaf`. When backward has computed
the leaf's gradient, torch calls a hook, which notes it with the keys of the rows. A push takes what is noted, adds up
the gradients of keys that several forward passes had, and sends each key once. Then the leaves are spent: a second
backward through them is an error, because its gradient would belong to rows from before the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dps import gather_sum
from dps.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from dps import Client, Trainer

__all__ = ["PushesGradients", "UnpushedGradients", "push_gradients"]


class PushesGradients(Protocol):
    """A module whose gradients go to tables."""

    caller: Client | Trainer  # a trainer or a client

    def gradients(self) -> Mapping[str, tuple[np.ndarray | None, np.ndarray]]:
        """Keys and gradients, by table."""

    def spent(self) -> None:
        """The gradients are pushed."""


class Lookup:
    """The rows of one forward pass: their keys, and their gradient once backward has computed it."""

    __slots__ = ("gradient", "keys", "pushed")

    def __init__(self, keys: np.ndarray):
        self.keys = keys
        self.gradient: torch.Tensor | None = None
        self.pushed = False


class UnpushedGradients:
    """Gradients of the rows of a table that are computed, and not pushed.

    Examples
    --------
    >>> unpushed = UnpushedGradients("items")
    >>> rows = unpushed.leaf(np.array([7, 9]), np.ones((2, 1)))
    >>> (rows[[0, 1, 0]] ** 2).sum().backward()
    >>> keys, gradients = unpushed.summed()
    >>> gradients[keys == 7], gradients[keys == 9]
    (array([[4.]]), array([[2.]]))
    """

    def __init__(self, table: str):
        self._table = table
        self._lookups: list[Lookup] = []

    def leaf(self, keys: np.ndarray, values: np.ndarray) -> torch.Tensor:
        """Rows as a leaf of torch's graph, whose gradient is noted; a plain tensor where no gradient is wanted."""
        rows = torch.from_numpy(values)
        if not torch.is_grad_enabled():
            return rows
        lookup = Lookup(keys)

        def note(leaf: torch.Tensor) -> None:
            if lookup.pushed:
                raise InputError(
                    f"backward has come a second time to rows of table {self._table!r} whose gradient is pushed: call "
                    "the module again, so that it pulls the rows as they are now, or push after the last backward"
                )
            if lookup.gradient is None:
                self._lookups.append(lookup)
            lookup.gradient = leaf.grad

        rows.requires_grad_().register_post_accumulate_grad_hook(note)
        return rows

    def summed(self) -> tuple[np.ndarray, np.ndarray]:
        """Each key once, and the sum of its gradients."""
        if not self._lookups:
            raise InputError(
                f"there is no gradient of table {self._table!r} to push: call loss.backward() first, once for each "
                "push, with a loss that depends on the module's output"
            )
        keys = [lookup.keys for lookup in self._lookups]
        gradients = [lookup.gradient.numpy() for lookup in self._lookups if lookup.gradient is not None]
        if len(keys) == 1:
            return keys[0], gradients[0]
        return gather_sum(np.concatenate(keys), np.concatenate(gradients))

    def spend(self) -> None:
        for lookup in self._lookups:
            lookup.pushed, lookup.gradient = True, None
        self._lookups = []


def push_gradients(*modules: PushesGradients, rows: int | None = None) -> None:
    """Push the gradients of several modules in one round trip: one step of the optimizers on the servers.

    A client waits until the servers have them. A trainer does not: it goes on once they are sent, its later pulls
    contain them, and its next tick waits for them. So the rows of the next batch are pulled at the same time.

    Parameters
    ----------
    *modules : Embedding, EmbeddingBag or DenseParameters
        All of one trainer or client. Modules of one table are one push: the gradients of a key are summed.
    rows : int, optional
        For tables with ``aggregate="mean"``: of how many rows of data the gradients are the sum, see
        :meth:`dps.Client.push`. By default each trainer's gradients count alike.

    Raises
    ------
    InputError
        A module has no gradient, because there was no backward since its last push; modules of several trainers; two
        `DenseParameters` of one table.

    Examples
    --------
    >>> import torch
    >>> def train(trainer, partitions):
    ...     users, items = dps.torch.Embedding(trainer, "users", 4), dps.torch.Embedding(trainer, "items", 4)
    ...     for pairs in trainer.iterate(partitions, batch_size=2, epochs=50):
    ...         loss = (1 - (users(pairs[:, 0]) * items(pairs[:, 1])).sum(1)).square().mean()
    ...         loss.backward()
    ...         dps.torch.push_gradients(users, items)
    ...     return round(loss.item(), 3)
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         for name in ("users", "items"):
    ...             _ = ps.table(name, dim=4, init=dps.Normal(0.5), optimizer=dps.Adagrad(0.3))
    ...         ps.run(train, np.array([[1, 7], [2, 7], [1, 8], [3, 9]]))
    [0.0]
    """
    if not modules:
        raise InputTypeError("push_gradients takes the modules whose gradients are to be pushed")
    caller = modules[0].caller
    if any(module.caller is not caller for module in modules):
        raise InputError("push_gradients sends one request, and these modules belong to several trainers or clients")
    changes: dict[str, tuple[np.ndarray | None, np.ndarray]] = {}
    for module in dict.fromkeys(modules):  # a module that is given twice counts once
        for table, (keys, gradients) in module.gradients().items():
            if table not in changes:
                changes[table] = keys, gradients
                continue
            others, sums = changes[table]
            if keys is None or others is None:
                raise InputError(f"table {table!r} is that of two DenseParameters: each needs a table of its own")
            changes[table] = gather_sum(np.concatenate([others, keys]), np.concatenate([sums, gradients]))
    if hasattr(caller, "tick"):
        caller.push_async(changes, rows=rows)
    else:
        caller.push(changes, rows=rows)
    for module in modules:
        module.spent()
