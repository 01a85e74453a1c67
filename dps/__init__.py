"""dps: the parameter server that lives inside a Dask cluster.

The map of the package; imports run downwards only:

==================== ===================================================================================
errors, config       every error; settings from ``dps.yaml``
state/               what a server holds: tables, shards, key index, optimizers, ledgers. Pure numpy and numba
coordination/        who holds what, who may go on, who is slow: placement, clocks, progress, leases. Pure
wire/                how bytes travel: frames, the endpoint that listens, channels and links that connect
serving, replication what a server does with frames; passing ops on along a chain of copies
server, saving       the Dask actor around that; its part in checkpoints       ] the roles: they
controller, crew     the scheduler plugin; servers as Dask workers and actors  ] never import
fleet, runs          who serves what, failover, moves; clocks and joins        ] each other
client, delivery     pull, push, add, assign, push_pull; again after failures  ]
reports, monitor     what trainers and servers tell of their work, and what the controller makes of it
checkpoint, restore  files: shards, manifests, which checkpoint is whole; export
parameter_server     the user's handle: start, tables, run, status, checkpoint, close
display, templates/  what all of it looks like in a notebook
dashboard/           pages on the scheduler's dashboard, JSON, metrics; the terminal; reports, timelines
training/            ps.run: the trainers, their batches; lazy stages; ``localize``
deploy/, yarn        LocalCluster, YarnCluster
spark                a parameter server beside Spark; its lazy stages
models/              scikit-learn estimators, on the public API only
cli/, preload        ``dask ps``; ``dask scheduler --preload dps``
testing/             the same roles in one thread, on virtual time, with faults
==================== ===================================================================================

``docs/design.md`` walks a pull, a push and a tick through these files.
"""

from __future__ import annotations

import importlib
from typing import Any

from dps import spark
from dps.calls import Certificate
from dps.client import Client, Pending, Ticket
from dps.deploy.local import LocalCluster
from dps.errors import DPSError
from dps.export import export_checkpoint
from dps.hashing import hash_columns, hash_strings
from dps.parameter_server import ParameterServer
from dps.state.initializers import Constant, Normal, Uniform, Xavier, Zeros
from dps.state.ops import TableSpec
from dps.state.optimizers import FTRL, SGD, Adagrad, Adam, AdamW, Add, Assign, Momentum, RMSprop
from dps.state.schedules import Cosine, Exponential, InverseSqrt, InverseTime, Step, Warmup
from dps.training.lazy import finished, map_partitions_with_ps
from dps.training.localize import localize
from dps.training.open_run import OpenRun
from dps.training.trainer import Trainer

__version__ = "0.5.0"

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Assign",
    "Certificate",
    "Client",
    "Constant",
    "Cosine",
    "DPSError",
    "Exponential",
    "InverseSqrt",
    "InverseTime",
    "LocalCluster",
    "Momentum",
    "Normal",
    "OpenRun",
    "ParameterServer",
    "Pending",
    "RMSprop",
    "Step",
    "TableSpec",
    "Ticket",
    "Trainer",
    "Uniform",
    "Warmup",
    "Xavier",
    "Zeros",
    "export_checkpoint",
    "finished",
    "hash_columns",
    "hash_strings",
    "localize",
    "map_partitions_with_ps",
    "spark",
]


def __getattr__(name: str) -> Any:
    if name == "models":  # needs scikit-learn and scipy, which `import dps` does not
        return importlib.import_module("dps.models")
    if name in ("dask_setup", "dask_teardown"):  # of `--preload dps`
        return getattr(importlib.import_module("dps.preload"), name)
    if name in ("YarnCluster", "yarn"):  # need skein
        module = importlib.import_module("dps.yarn")
        return module if name == "yarn" else module.YarnCluster
    raise AttributeError(f"module 'dps' has no attribute {name!r}")
