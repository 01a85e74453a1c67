"""Models of torch whose parameters lie on the servers. Needs torch and safetensors: ``pip install 'dps[torch]'``.

========== ======================================================================================
embedding  `Embedding` and `EmbeddingBag`: rows of a table, looked up by the ids of a batch
gradients  gradients of pulled rows, from backward to their push; `push_gradients`
dense      `DenseParameters`: the parameters of a module in one table
allreduce  gradients and parameters that lie in the trainers, averaged and sent round
files      rows and parameters as files, in the format safetensors
data       batches of partitions as tensors, for `torch.utils.data.DataLoader`
inputs     tables and ids, checked
========== ======================================================================================
"""

from dps.errors import needing

with needing("torch"):
    from dps.torch.allreduce import allreduce_gradients, broadcast_parameters
    from dps.torch.data import PartitionDataset
    from dps.torch.dense import DenseParameters, dense_table
    from dps.torch.embedding import Embedding, EmbeddingBag
    from dps.torch.files import load, save
    from dps.torch.gradients import push_gradients

__all__ = [
    "DenseParameters",
    "Embedding",
    "EmbeddingBag",
    "PartitionDataset",
    "allreduce_gradients",
    "broadcast_parameters",
    "dense_table",
    "load",
    "push_gradients",
    "save",
]
