"""Settings of dask-gateway's server, for clusters with dps: ``dask-gateway-server --config dask_gateway_config.py``.

A cluster of dask-gateway has one kind of worker. Its workers carry no resource `dps` here, so servers start beside
trainers, on as many workers as ``dps.ParameterServer(client, servers=...)`` asks for.
"""

from dask_gateway_server.options import Float, Integer, Options

c = get_config()  # noqa: F821  (dask-gateway defines it)

# The commands that dask-gateway has by default went away from Dask.
c.ClusterConfig.scheduler_cmd = ["dask", "scheduler"]
c.ClusterConfig.worker_cmd = ["dask", "worker"]
c.ClusterConfig.scheduler_memory = "2 G"


def settings(options):
    return {"worker_cores": options.worker_cores, "worker_memory": int(options.worker_memory * 2**30)}


c.Backend.cluster_options = Options(
    Integer("worker_cores", default=2, min=1, max=16, label="Cores of a worker"),
    Float("worker_memory", default=8, min=1, max=64, label="Memory of a worker, with the rows of its server (GiB)"),
    handler=settings,
)
