"""dps: the parameter server that lives inside a Dask cluster.

The map: what users import stands here, and the engine that makes it work stands in one folder.

================ ======================================================================================
models/          scikit-learn estimators
graph/           PageRank and other algorithms over edges on trainers
arrays/          vectors and matrices whose elements lie on the servers and compute there
optimize/        solvers for numpy arrays and for vectors on parameter servers
torch/           embeddings, dense parameters and gradients of torch on the servers
kernels/         loops over sparse batches: margins, gradients, residuals; compiled loops of models
sampling/        random draws for training: negatives by weight, items that a user has not seen
features/        raw data to int64 keys: hashing, ``localize``
functions/       functions that run on the servers, and those that come with dps
spark, yarn      a parameter server beside Spark; a cluster on YARN
opentelemetry    spans around calls, for processes that ask for them
testing          a cluster in one thread, on virtual time, with faults, for tests of training functions
errors, config   every error; settings from ``dps.yaml``
---------------- --------------------------------------------------------------------------------------
engine/          clients, servers, the controller and all that they are made of; it knows no model
================ ======================================================================================

The rooms of the library import public names only, so they are written as users' programs are. Imports run one way:
``tests/project/test_style.py`` has the table, and ``docs/design.md`` walks a push, a tick and a failover through the
engine.
"""

from __future__ import annotations

import importlib
from typing import Any

from dps import spark
from dps.engine.checkpoints.export import export_checkpoint
from dps.engine.client.client import Client, Pending, Ticket
from dps.engine.client.forgotten import ForgottenBatch, ForgottenKeys
from dps.engine.client.table import Table
from dps.engine.client.ticket import Certificate
from dps.engine.client.word_table import WordTable
from dps.engine.deploy.local import LocalCluster
from dps.engine.driver.lazy import end_run, map_partitions_with_ps
from dps.engine.driver.parameter_server import ParameterServer
from dps.engine.functions.definition import Function, function
from dps.engine.state.caching import Cache
from dps.engine.state.columns import Column
from dps.engine.state.initializers import Constant, Normal, Uniform, Xavier, Zeros
from dps.engine.state.life import AdmitByCount, ExpireSmall, ExpireUnused
from dps.engine.state.ops import TableSpec
from dps.engine.state.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, Add, Assign, Momentum, Optimizer, RMSprop
from dps.engine.state.partitioning import BlockPartition, FieldPartition, HashPartition, RangePartition
from dps.engine.state.schedules import Cosine, Exponential, InverseSqrt, InverseTime, StalenessAware, Step, Warmup
from dps.engine.state.wire_format import Wire
from dps.engine.training.batches import Batches
from dps.engine.training.localize import localize
from dps.engine.training.open_run import OpenRun
from dps.engine.training.pulled_rows import PulledRows, distinct_keys
from dps.engine.training.row_sums import gather_sum
from dps.engine.training.trainer import Trainer
from dps.errors import DPSError
from dps.features.hashing import hash_columns, hash_strings

__version__ = "0.9.0"

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "AdmitByCount",
    "Assign",
    "Batches",
    "BlockPartition",
    "Cache",
    "Certificate",
    "Client",
    "Column",
    "Constant",
    "Cosine",
    "DPSError",
    "ExpireSmall",
    "ExpireUnused",
    "Exponential",
    "FieldPartition",
    "ForgottenBatch",
    "ForgottenKeys",
    "Function",
    "HashPartition",
    "InverseSqrt",
    "InverseTime",
    "LocalCluster",
    "Momentum",
    "Normal",
    "OpenRun",
    "Optimizer",
    "ParameterServer",
    "Pending",
    "PulledRows",
    "RMSprop",
    "RangePartition",
    "StalenessAware",
    "Step",
    "Table",
    "TableSpec",
    "Ticket",
    "Trainer",
    "Uniform",
    "Warmup",
    "Wire",
    "WordTable",
    "Xavier",
    "Zeros",
    "distinct_keys",
    "end_run",
    "export_checkpoint",
    "function",
    "gather_sum",
    "hash_columns",
    "hash_strings",
    "localize",
    "map_partitions_with_ps",
    "spark",
]


def __getattr__(name: str) -> Any:
    if name == "models":  # needs scikit-learn and scipy, which `import dps` does not
        return importlib.import_module("dps.models")
    if name == "arrays":  # most programs use tables only
        return importlib.import_module("dps.arrays")
    if name == "kernels":  # loads compiled loops, and most programs use none of them
        return importlib.import_module("dps.kernels")
    if name == "sampling":  # most programs draw nothing
        return importlib.import_module("dps.sampling")
    if name == "graph":  # needs scipy
        return importlib.import_module("dps.graph")
    if name == "torch":  # needs torch
        return importlib.import_module("dps.torch")
    if name == "optimize":  # needs scipy
        return importlib.import_module("dps.optimize")
    if name in ("dask_setup", "dask_teardown"):  # of `--preload dps`
        return getattr(importlib.import_module("dps.engine.driver.preload"), name)
    if name in ("YarnCluster", "yarn"):  # need skein
        module = importlib.import_module("dps.yarn")
        return module if name == "yarn" else module.YarnCluster
    raise AttributeError(f"module 'dps' has no attribute {name!r}")
