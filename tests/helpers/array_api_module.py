"""The namespace of vectors on a cluster in this process, as a module, for the suite of the array API standard."""

from __future__ import annotations

import atexit
from typing import Any

import dps

_cluster = dps.LocalCluster(servers=2, trainers=1, processes=False)
_ps = dps.ParameterServer(_cluster, servers=2)


def close() -> None:
    """End the cluster, before the process does."""
    _ps.close()
    _cluster.close()


atexit.register(close)


def __getattr__(name: str) -> Any:
    return getattr(dps.arrays.on(_ps), name)
