"""What else a Python program could use for what dps does, in another process, called from a training task.

Dask's actors, Ray's actors and torch.distributed.rpc have the same shard class behind them, as a table of one shard, so
that they need not group keys. Redis has no optimizers: it stores the same bytes, one key for each row, and a push is a
pipelined SET. The calls take turns with those of dps. A rival that is not installed is left out, and that is said.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import ROOT, Cost, Report, costs, installed
from benchmarks.exchange import Local, Plan, Wanted, dps_call, fill, pick, values_for
from dps.engine.state.ops import TableSpec

__all__ = ["RIVALS", "compare"]


class Table:
    """A table of one shard, behind the calls of another framework."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = TableSpec.from_dict({**spec, "shards": 1})
        self.local = Local(self.spec)

    def pull(self, keys: np.ndarray | None) -> np.ndarray:
        """Values of these keys; of a dense table, all."""
        keys = None if keys is None else aligned(keys)
        out = np.empty((self.spec.rows if keys is None else len(keys), self.spec.dim), self.spec.dtype)
        (self.local.pull_all(out) if keys is None else self.local.pull(keys, out))()
        return out

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        """Hand values to the optimizer."""
        keys, values = None if keys is None else aligned(keys), aligned(values)
        (self.local.push_all(values) if keys is None else self.local.push(keys, values))()

    def pid(self) -> int:
        """The process that holds the table."""
        return os.getpid()


def aligned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy where it is not aligned, as those that come with a Dask message."""
    return np.require(array, requirements="A")


class DaskActor:
    """A Dask actor that holds the table."""

    name = "distributed"
    what = "Dask actor"

    def start(self, spare: str) -> Any:
        """In the driver; returns what `connect` needs.

        Parameters
        ----------
        spare : str
            Address of a Dask worker that does nothing else.
        """
        return spare

    def stop(self) -> None:
        """In the driver."""

    def connect(self, address: Any) -> None:
        """In the trainer."""
        from distributed import get_client

        self._client, self._worker = get_client(), address

    def make(self, spec: dict[str, Any]) -> None:
        """A new table in the place of the last one."""
        future = self._client.submit(Table, spec, actor=True, workers=[self._worker], pure=False)
        self._actor = future.result(60)

    def pid(self) -> int:
        return self._actor.pid().result(60)

    def pull(self, keys: np.ndarray | None) -> Any:
        return self._actor.pull(keys).result(60)

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        self._actor.push(keys, values).result(60)

    def close(self) -> None:
        """In the trainer."""
        del self._actor


class Redis:
    """A Redis server on a Unix socket, asked by redis-py with hiredis."""

    name = "redis"
    what = "Redis, redis-py"

    def start(self, spare: str) -> Any:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "socket")
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(["redis-server", *options], cwd=self._folder.name, stdout=subprocess.DEVNULL)
        return str(path)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def connect(self, path: Any) -> None:
        from redis import Redis as Connection
        from redis.backoff import ConstantBackoff
        from redis.retry import Retry

        patient = Retry(ConstantBackoff(0.1), 50)  # the server may not listen yet
        self._redis = Connection(unix_socket_path=path, retry=patient)
        self._redis.ping()

    def make(self, spec: dict[str, Any]) -> None:
        self._redis.flushall()
        self._spec = TableSpec.from_dict(spec)
        if self._spec.rows is not None:
            self.push(None, values_for(self._spec, self._spec.rows))

    def pid(self) -> int:
        return int(self._redis.info("server")["process_id"])

    def pull(self, keys: np.ndarray | None) -> Any:
        if keys is None:
            found = self._redis.get("all")
        elif len(keys) == 1:
            found = self._redis.get(int(keys[0]))
        else:
            found = b"".join(self._redis.mget(keys.tolist()))
        return np.frombuffer(found, self._spec.dtype).reshape(-1, self._spec.dim)

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        if keys is None:
            self._redis.set("all", values.data.cast("B"))
        elif len(keys) == 1:
            self._redis.set(int(keys[0]), values.tobytes())
        else:
            pipeline = self._redis.pipeline(transaction=False)
            for key, row in zip(keys.tolist(), values, strict=True):
                pipeline.set(key, row.data.cast("B"))
            pipeline.execute()

    def close(self) -> None:
        self._redis.close()


class Ray:
    """A Ray actor that holds the table."""

    name = "ray"
    what = "Ray actor"

    def start(self, spare: str) -> Any:
        import ray

        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # because the trainer, which connects, has no token
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return ray.get_runtime_context().gcs_address

    def stop(self) -> None:
        import ray

        ray.shutdown()

    def connect(self, address: Any) -> None:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._ray, self._actor = ray, None

    def make(self, spec: dict[str, Any]) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor = self._ray.remote(Table).remote(spec)

    def pid(self) -> int:
        return int(self._ray.get(self._actor.pid.remote()))

    def pull(self, keys: np.ndarray | None) -> Any:
        return self._ray.get(self._actor.pull.remote(keys))

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        self._ray.get(self._actor.push.remote(keys, values))

    def close(self) -> None:
        self._ray.shutdown()


class Torch:
    """torch.distributed.rpc with its TensorPipe agent."""

    name = "torch"
    what = "torch rpc_sync"

    def start(self, spare: str) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        code = f"from benchmarks.rivals import torch_serve; torch_serve({port})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return port

    def stop(self) -> None:
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connect(self, port: Any) -> None:
        self._torch, self._rpc = torch_join(port, 0)

    def make(self, spec: dict[str, Any]) -> None:
        self._rpc.rpc_sync("server", torch_make, (spec,))

    def pid(self) -> int:
        return int(self._rpc.rpc_sync("server", os.getpid))

    def pull(self, keys: np.ndarray | None) -> Any:
        asked = None if keys is None else self._torch.from_numpy(keys)
        return self._rpc.rpc_sync("server", torch_pull, (asked,))

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        asked = None if keys is None else self._torch.from_numpy(keys)
        self._rpc.rpc_sync("server", torch_push, (asked, self._torch.from_numpy(values)))

    def close(self) -> None:
        self._rpc.shutdown()


RIVALS: tuple[type, ...] = (DaskActor, Redis, Ray, Torch)
torch_table: Table | None = None


def torch_join(port: int, rank: int) -> tuple[Any, Any]:
    import torch
    from torch.distributed import rpc

    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return torch, rpc


def torch_serve(port: int) -> None:
    """The server's process; it ends when the trainer shuts down."""
    torch_join(port, 1)[1].shutdown()


def torch_make(spec: dict[str, Any]) -> None:
    global torch_table
    torch_table = Table(spec)


def torch_pull(keys: Any) -> Any:
    import torch

    assert torch_table is not None
    return torch.from_numpy(torch_table.pull(None if keys is None else keys.numpy()))


def torch_push(keys: Any, values: Any) -> None:
    assert torch_table is not None
    torch_table.push(None if keys is None else keys.numpy(), values.numpy())


def measure(trainer: Any, partitions: list, rival: Any, address: Any, plans: list[Plan], pid: int) -> list[list[dict]]:
    """The task: every plan, dps and the rival in turns; `pid` is the dps server's process."""
    rival.connect(address)
    try:
        return [measure_table(trainer, rival, plan, pid) for plan in plans]
    finally:
        rival.close()


def measure_table(trainer: Any, rival: Any, plan: Plan, pid: int) -> list[dict[str, Cost]]:
    spec = plan.spec
    rival.make({**spec.to_dict(), "id": 0})
    if spec.keyed:
        fill(lambda keys, values: trainer.push(spec.name, keys, values), spec, plan.born)
        fill(rival.push, spec, plan.born)
    helpers = {"dps": [pid], "rival": [rival.pid()]}
    results = []
    for wanted in plan.wanted:
        keys = None if spec.rows is not None else pick(plan, wanted)
        rows = wanted.keys if spec.rows is None else spec.rows
        call = rival_call(rival, spec, wanted, keys, rows)
        cases = {"dps": dps_call(trainer, spec, wanted, keys, rows), "rival": call}
        results.append(costs(cases, helpers, plan.rounds, plan.turn))
    return results


def rival_call(rival: Any, spec: TableSpec, wanted: Wanted, keys: Any, rows: int) -> Callable[[], Any]:
    if wanted.verb == "pull":
        return lambda: rival.pull(keys)
    values = values_for(spec, rows)
    return lambda: rival.push(keys, values)


def compare(report: Report, names: list[str] | None, plans: Callable[[Any], Iterator[Plan]]) -> None:
    """Rows for each rival that is installed, or of these only whose package has one of these names."""
    for kind in RIVALS:
        rival = kind()
        if names and rival.name not in names:
            continue
        version = installed(rival.name)
        if version is None or (rival.name == "redis" and shutil.which("redis-server") is None):
            report.note(f"{rival.what}: {rival.name} is not installed (`make rivals`), left out")
            continue
        one(report, plans, rival, f"{rival.what} {version}")


def one(report: Report, plans: Callable[[Any], Iterator[Plan]], rival: Any, against: str) -> None:
    # the second trainer's worker is there for the Dask actor
    with (
        dps.LocalCluster(servers=1, trainers=2) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        (server,) = (server.worker for server in ps.status().servers)
        trainer, spare = (w for w in client.scheduler_info(n_workers=-1)["workers"] if w != server)
        pid = client.run(os.getpid, workers=[server])[server]
        wanted = list(plans(ps))
        address = rival.start(spare)
        try:
            fresh = type(rival)()  # the one here may hold a process
            data = [client.submit(int, workers=[trainer])]
            (results,) = ps.run(measure, data, args=(fresh, address, wanted, pid), progress=False)
        finally:
            rival.stop()
        for plan, table in zip(wanted, results, strict=True):
            for each, found in zip(plan.wanted, table, strict=True):
                report.duration(each.case, found["dps"].seconds, against, found["rival"].seconds, "< 1 x")
                report.processor(each.case, found["dps"].cpu, against, found["rival"].cpu)
