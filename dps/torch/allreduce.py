"""Data-parallel training: a model in each trainer, and gradients that are averaged over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dps.errors import InputError
from dps.torch.dense import flat, trained_parameters

if TYPE_CHECKING:
    from dps import Trainer

__all__ = ["allreduce_gradients", "broadcast_parameters"]


def sum_dtype(parameters: list[torch.nn.Parameter]) -> type:
    return np.float64 if any(each.dtype == torch.float64 for each in parameters) else np.float32


def parts(values: np.ndarray, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """An array of one axis, cut into tensors of the shapes and dtypes of parameters."""
    cut = np.split(values, np.cumsum([each.numel() for each in parameters])[:-1])
    pairs = zip(cut, parameters, strict=True)
    return [torch.from_numpy(np.array(part)).view(each.shape).to(each) for part, each in pairs]


def allreduce_gradients(module: torch.nn.Module, trainer: Trainer, weight: float = 1.0) -> None:
    """Replace the gradients of a module by their mean over all trainers; each then takes the same step of its own.

    A collective call: all trainers make it at the same step. Large modules go round a ring, past the scheduler
    (:meth:`dps.Trainer.allreduce`). No server is needed, and the model has to fit into each trainer.

    Parameters
    ----------
    module : torch.nn.Module
        After backward. A parameter without a gradient counts as one of zeros. A trainer that has no batch left calls
        it with a `weight` of 0.
    trainer : dps.Trainer
    weight : float
        What this trainer's gradients count for: the rows of its batch, if the loss is their mean and trainers have
        batches of several sizes. Then the result is the gradient of the joint batch.

    Raises
    ------
    InputError
        A weight that is negative or not finite, or weights that are 0 on all trainers.

    Examples
    --------
    >>> import torch
    >>> def train(trainer, partitions):
    ...     line = torch.nn.Linear(1, 1)
    ...     dps.torch.broadcast_parameters(line, trainer)
    ...     descent = torch.optim.SGD(line.parameters(), lr=0.5)
    ...     for batch in 60 * list(dps.torch.PartitionDataset(partitions, batch_size=5)):
    ...         descent.zero_grad()
    ...         (line(batch) - 3 * batch - 1).square().mean().backward()
    ...         dps.torch.allreduce_gradients(line, trainer, weight=len(batch))
    ...         descent.step()
    ...         trainer.tick()
    ...     return line.weight.item(), line.bias.item()
    >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         np.round(ps.run(train, np.linspace(-1, 1, 20, dtype="float32")[:, None]), 2)
    array([[3., 1.],
           [3., 1.]])
    """
    if not 0 <= weight < np.inf:
        raise InputError(f"allreduce_gradients: weight is a finite number, 0 or more; not {weight!r}")
    parameters = list(trained_parameters(module).values())
    dtype = sum_dtype(parameters)
    values = flat([torch.zeros_like(each) if each.grad is None else each.grad for each in parameters], dtype)
    total = trainer.allreduce(np.append(values * dtype(weight), dtype(weight)))
    if not total[-1]:
        raise InputError("allreduce_gradients: the weights are 0 on all trainers, so there is no mean")
    for each, gradient in zip(parameters, parts(total[:-1] / total[-1], parameters), strict=True):
        each.grad = gradient


def broadcast_parameters(module: torch.nn.Module, trainer: Trainer, root: int = 0) -> None:
    """Give all trainers the parameters of one of them, before the first step. A collective call.

    Parameters
    ----------
    module : torch.nn.Module
    trainer : dps.Trainer
    root : int
        The number of the trainer whose parameters count.
    """
    if not 0 <= root < trainer.trainers:
        raise InputError(f"broadcast from trainer {root}: the run has trainers 0 to {trainer.trainers - 1}")
    parameters = list(trained_parameters(module).values())
    values = flat(parameters, sum_dtype(parameters))
    if trainer.number != root:
        values[:] = 0  # because an allreduce takes arrays of any size, round a ring
    with torch.no_grad():
        for each, part in zip(parameters, parts(trainer.allreduce(values), parameters), strict=True):
            each.copy_(part)
