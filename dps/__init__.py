"""dps: the parameter server that lives inside a Dask cluster.

The map: what users import stands on the street, everything else in rooms. Each room's ``__init__.py`` lists its files.

================ ======================================================================================
errors, config   every error; settings from ``dps.yaml``
kernels          loops over sparse batches: margins, gradients, residuals
spark, yarn      a parameter server beside Spark; a cluster on YARN
opentelemetry    spans around calls, for processes that ask for them
---------------- --------------------------------------------------------------------------------------
core/            compiled loops over keys and rows, and the classes that own their memory. Cython and C
state/           what a server holds: tables, shards, key index, optimizers, ledgers. Pure
coordination/    which server holds a shard, which trainer may go on: placement, clocks, leases, meetings. Pure
wire/            how bytes travel: frames, the endpoint that listens, channels and links that connect
daskapi/         everything that touches Dask's own processes and private interfaces
features/        raw data to int64 keys: hashing, ``localize``
sampling/        random draws for training: negatives by weight, items that a user has not seen
functions/       functions that run on the servers: what a user writes, what they see, those that come with dps
checkpoints/     a model as files: shards, manifests, the store of them; export
telemetry/       count, report, keep, diagnose
---------------- --------------------------------------------------------------------------------------
client/          pull, push, add, assign, push_pull; again after failures   ] the three parties:
server/          the Dask actor that holds shards, and answers frames       ] they never import
controller/      the scheduler plugin: failover, runs, checkpoints, scaling ] each other
---------------- --------------------------------------------------------------------------------------
training/        the loop on each partition: trainers, batches, tasks, Spark
driver/          the user's handle: start, tables, run, status, checkpoint, close; lazy stages
arrays/          vectors and matrices whose elements lie on the servers and compute there
dashboard/       pages on the scheduler's dashboard, metrics, reports; the notebook and the terminal
deploy/          LocalCluster, YarnCluster
graph/           PageRank and other algorithms over edges on trainers
torch/           embeddings, dense parameters and gradients of torch on the servers
optimize/        solvers for numpy arrays and for vectors on parameter servers
models/          scikit-learn estimators, on the public API only
cli/             ``dask ps``
testing/         the same roles in one thread, on virtual time, with faults
================ ======================================================================================

Imports run downwards in ``tests/project/test_style.py`` (ROOMS); ``docs/design.md`` walks a push, a tick and a failover
through these files.
"""

from __future__ import annotations

import importlib
from typing import Any

from dps import spark
from dps.checkpoints.export import export_checkpoint
from dps.client.client import Client, Pending, Ticket
from dps.client.table import Table
from dps.client.ticket import Certificate
from dps.deploy.local import LocalCluster
from dps.driver.lazy import end_run, map_partitions_with_ps
from dps.driver.parameter_server import ParameterServer
from dps.errors import DPSError
from dps.features.hashing import hash_columns, hash_strings
from dps.features.localize import localize
from dps.functions.definition import Function, function
from dps.state.columns import Column
from dps.state.initializers import Constant, Normal, Uniform, Xavier, Zeros
from dps.state.ops import TableSpec
from dps.state.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, Add, Assign, Momentum, Optimizer, RMSprop
from dps.state.partitioning import BlockPartition, FieldPartition, HashPartition, RangePartition
from dps.state.schedules import Cosine, Exponential, InverseSqrt, InverseTime, Step, Warmup
from dps.training.open_run import OpenRun
from dps.training.pulled_rows import PulledRows
from dps.training.trainer import Trainer

__version__ = "0.9.0"

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Assign",
    "BlockPartition",
    "Certificate",
    "Client",
    "Column",
    "Constant",
    "Cosine",
    "DPSError",
    "Exponential",
    "FieldPartition",
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
    "Step",
    "Table",
    "TableSpec",
    "Ticket",
    "Trainer",
    "Uniform",
    "Warmup",
    "Xavier",
    "Zeros",
    "end_run",
    "export_checkpoint",
    "function",
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
        return getattr(importlib.import_module("dps.driver.preload"), name)
    if name in ("YarnCluster", "yarn"):  # need skein
        module = importlib.import_module("dps.yarn")
        return module if name == "yarn" else module.YarnCluster
    raise AttributeError(f"module 'dps' has no attribute {name!r}")
