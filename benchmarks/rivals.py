"""Ray actors and torch.distributed.rpc doing what dps does: the same shard class behind them, in another process.

The calls are made from a training task, in turns with those of dps. The rivals' table is one shard, so they need not
group keys. Each is left out, and that is said, where it is not installed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import ROOT, Report, installed, interleave
from benchmarks.exchange import Local, Plan, Wanted, dps_call, fill, pick, values_for
from dps.state.ops import TableSpec

__all__ = ["RIVALS", "compare"]


class Table:
    """A table of one shard, behind the calls of another framework."""

    def __init__(self, spec: dict[str, Any]):
        self.spec = TableSpec.from_dict({**spec, "shards": 1})
        self.local = Local(self.spec)

    def pull(self, keys: np.ndarray | None) -> np.ndarray:
        """Values of these keys; of a dense table, all."""
        out = np.empty((self.spec.rows if keys is None else len(keys), self.spec.dim), self.spec.dtype)
        (self.local.pull_all(out) if keys is None else self.local.pull(keys, out))()
        return out

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        """Hand values to the optimizer."""
        (self.local.push_all(values) if keys is None else self.local.push(keys, values))()


class Ray:
    """A Ray actor that holds the table."""

    name = "ray"
    what = "Ray actor"

    def start(self) -> Any:
        """In the driver; returns what `connect` needs."""
        import ray

        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return ray.get_runtime_context().gcs_address

    def stop(self) -> None:
        """In the driver."""
        import ray

        ray.shutdown()

    def connect(self, address: Any) -> None:
        """In the trainer."""
        import ray

        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._ray, self._actor = ray, None

    def make(self, spec: dict[str, Any]) -> None:
        """A new table in the place of the last one."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor = self._ray.remote(Table).remote(spec)

    def pull(self, keys: np.ndarray | None) -> Any:
        return self._ray.get(self._actor.pull.remote(keys))

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        self._ray.get(self._actor.push.remote(keys, values))

    def close(self) -> None:
        """In the trainer."""
        self._ray.shutdown()


class Torch:
    """torch.distributed.rpc with its TensorPipe agent."""

    name = "torch"
    what = "torch rpc_sync"

    def start(self) -> Any:
        """In the driver; returns what `connect` needs."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        code = f"from benchmarks.rivals import torch_serve; torch_serve({port})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return port

    def stop(self) -> None:
        """In the driver."""
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def connect(self, port: Any) -> None:
        """In the trainer."""
        self._torch, self._rpc = torch_join(port, 0)

    def make(self, spec: dict[str, Any]) -> None:
        """A new table in the place of the last one."""
        self._rpc.rpc_sync("server", torch_make, (spec,))

    def pull(self, keys: np.ndarray | None) -> Any:
        asked = None if keys is None else self._torch.from_numpy(keys)
        return self._rpc.rpc_sync("server", torch_pull, (asked,))

    def push(self, keys: np.ndarray | None, values: np.ndarray) -> None:
        asked = None if keys is None else self._torch.from_numpy(keys)
        self._rpc.rpc_sync("server", torch_push, (asked, self._torch.from_numpy(values)))

    def close(self) -> None:
        """In the trainer."""
        self._rpc.shutdown()


RIVALS: tuple[type, ...] = (Ray, Torch)
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


def measure(trainer: Any, partitions: list, rival: Any, address: Any, plans: list[Plan]) -> list[list[dict]]:
    """The task: every plan, dps and the rival in turns."""
    rival.connect(address)
    try:
        return [measure_table(trainer, rival, plan) for plan in plans]
    finally:
        rival.close()


def measure_table(trainer: Any, rival: Any, plan: Plan) -> list[dict]:
    spec = plan.spec
    rival.make({**spec.to_dict(), "id": 0})
    if spec.keyed:
        fill(lambda keys, values: trainer.push(spec.name, keys, values), spec, plan.born)
        fill(rival.push, spec, plan.born)
    results = []
    for wanted in plan.wanted:
        keys = None if spec.rows is not None else pick(plan, wanted)
        rows = wanted.keys if spec.rows is None else spec.rows
        call = rival_call(rival, spec, wanted, keys, rows)
        cases = {"dps": dps_call(trainer, spec, wanted, keys, rows), "rival": call}
        results.append(interleave(cases, plan.rounds, plan.turn))
    return results


def rival_call(rival: Any, spec: TableSpec, wanted: Wanted, keys: Any, rows: int) -> Callable[[], Any]:
    if wanted.verb == "pull":
        return lambda: rival.pull(keys)
    values = values_for(spec, rows)
    return lambda: rival.push(keys, values)


def compare(report: Report, quick: bool, plans: Callable[[Any, bool], Iterator[Plan]]) -> None:
    """Rows for each rival that is installed."""
    for kind in RIVALS:
        rival = kind()
        version = installed(rival.name)
        if version is None:
            report.note(f"{rival.what}: {rival.name} is not installed (`make rivals`), left out")
            continue
        address = rival.start()
        try:
            one(report, quick, plans, rival, f"{rival.what} {version}", address)
        finally:
            rival.stop()


def one(report: Report, quick: bool, plans: Any, rival: Any, against: str, address: Any) -> None:
    with (
        dps.LocalCluster(servers=1, trainers=1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        wanted = list(plans(ps, quick))
        fresh = type(rival)()  # the one here may hold a process
        (results,) = ps.run(measure, client.scatter([0]), args=(fresh, address, wanted), progress=False)
        for plan, table in zip(wanted, results, strict=True):
            for each, seconds in zip(plan.wanted, table, strict=True):
                report.duration(each.case, seconds["dps"], against, seconds["rival"], "< 1 x")
