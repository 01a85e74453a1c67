"""The arrays of a parameter server."""

from __future__ import annotations

from dps import ParameterServer
from dps.arrays.namespace import ArrayNamespace
from dps.arrays.server_store import ServerStore
from dps.arrays.space import Space

__all__ = ["on"]


def on(ps: ParameterServer) -> ArrayNamespace:
    """The namespace whose vectors and matrices lie on the servers of a parameter server, and compute there.

    Parameters
    ----------
    ps : ParameterServer

    Returns
    -------
    ArrayNamespace
        The same for each call: arrays of one parameter server may be computed with each other. It has the names of the
        array API standard, and some more.

    Examples
    --------
    >>> import dps
    >>> import numpy as np
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         xp = dps.arrays.on(ps)
    ...         w = xp.asarray([3.0, 0.0, 4.0])
    ...         w += xp.ones(3)
    ...         w.tolist(), np.linalg.norm(w)
    ([4.0, 1.0, 5.0], np.float64(6.48074069840786))
    """
    if "arrays" not in ps.kept:
        adapt = ps.status().adapt
        most = max(ps.servers(), (adapt and adapt.maximum) or 1)  # a pool has a shard for each server that may come
        ps.kept.setdefault("arrays", ArrayNamespace(Space(ServerStore(ps.client, most, ps.table, ps.register))))
    namespace: ArrayNamespace = ps.kept["arrays"]
    return namespace
