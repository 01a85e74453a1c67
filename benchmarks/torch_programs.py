"""Models in torch, and how torch alone, DDP and torch RPC train them: what `model_torch` compares dps with.

A process of a rival runs `main` with a task, its rank and a port, and prints what it has measured. Nothing of dps is
imported here, because each turn starts processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil

__all__ = ["Arrays", "Task", "Turn", "first_rows", "loss_of", "network", "resident", "share", "warm", "with_torch"]

SECONDS = 300.0  # a limit for the processes of one turn

Arrays = dict[str, np.ndarray]


class Task(NamedTuple):
    """Data, and the model that is trained on it."""

    name: str
    path: str  # of its data: ids (rows, fields), numbers (rows, any), label
    rows: int  # of the embeddings
    dim: int
    kind: str  # the model: "ncf", "wide and deep" or "bag"
    batch: int  # of all processes together
    steps: int
    rate: float
    deviation: float  # of the embeddings at the beginning

    @property
    def data(self) -> Arrays:
        with np.load(self.path) as file:
            return dict(file)

    @property
    def optimizer(self) -> str:
        return "sgd" if self.kind == "bag" else "adagrad"


class Turn(NamedTuple):
    """What a process tells of its turn."""

    losses: list[float]
    seconds: float
    processor: float
    memory: int  # bytes, of the process at the end


def share(task: Task, number: int, processes: int) -> Arrays:
    """The rows of one of several processes, so that the n-th batches of all are the n-th batch of one."""
    return {name: column[number::processes] for name, column in task.data.items()}


def first_rows(task: Task) -> np.ndarray:
    """The embeddings before the first step; zeros take no memory before they are written to."""
    if not task.deviation:
        return np.zeros((task.rows, task.dim), np.float32)
    return np.random.default_rng(1).normal(0, task.deviation, (task.rows, task.dim)).astype(np.float32)


def network(task: Task) -> Any:
    """The part of the model that is no embedding; it takes embeddings (rows, fields, dim) and numbers."""
    import torch

    data = task.data
    width = {"ncf": 3, "bag": 1}.get(task.kind, data["ids"].shape[1]) * task.dim + data["numbers"].shape[1]
    drawn = torch.Generator().manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    with torch.no_grad():
        for each in layers.parameters():
            each.copy_(torch.randn(each.shape, generator=drawn) / max(each.shape[-1], 1) ** 0.5)
    return layers


def loss_of(task: Task, tower: Any, embedded: Any, batch: Arrays) -> Any:
    """The log-loss of a batch; the last number of a wide-and-deep model's rows is the weight of its wide part."""
    import torch

    features = embedded.flatten(1)
    if task.kind == "ncf":
        features = torch.cat([features, embedded[:, 0] * embedded[:, 1]], 1)
    if task.kind == "bag":
        features = embedded.mean(1)
    logits = tower(torch.cat([features, torch.from_numpy(batch["numbers"])], 1))[:, 0]
    if task.kind == "wide and deep":
        logits = logits + embedded[:, :, -1].sum(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch["label"]))


def batches(task: Task, data: Arrays, processes: int) -> Iterator[Arrays]:
    """What a process trains on, step by step."""
    size = task.batch // processes
    for start in range(0, task.steps * size, size):
        yield {name: np.ascontiguousarray(column[start : start + size]) for name, column in data.items()}


def warm(task: Task) -> None:
    """Two steps that nobody times, because torch prepares much at the first ones of a process."""
    import torch

    batch = {name: column[: task.batch] for name, column in task.data.items()}
    tower, rows = network(task), torch.zeros(2, task.dim, requires_grad=True)
    for _ in range(2):
        ids = torch.zeros(batch["ids"].shape, dtype=torch.int64)
        loss_of(task, tower, torch.nn.functional.embedding(ids, rows), batch).backward()


def resident() -> int:
    """Bytes of memory of this process."""
    return int(psutil.Process().memory_info().rss)


def model(task: Task) -> tuple[Any, list[Any]]:
    """The whole model as a module of torch that returns the loss of a batch, and its optimizers."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding.from_pretrained(
                torch.from_numpy(first_rows(task)), freeze=False, sparse=True
            )
            self.tower = network(task)

        def forward(self, batch: Arrays) -> Any:
            return loss_of(task, self.tower, self.embedding(torch.from_numpy(batch["ids"])), batch)

    made = Model()
    kind = torch.optim.SGD if task.optimizer == "sgd" else torch.optim.Adagrad
    return made, [kind(part.parameters(), lr=task.rate) for part in (made.embedding, made.tower)]


def trained(task: Task, module: Any, optimizers: list[Any], data: Arrays, processes: int) -> Turn:
    """Steps of torch's own optimizers."""
    losses = []
    clock, processor = time.perf_counter(), time.process_time()
    for batch in batches(task, data, processes):
        for each in optimizers:
            each.zero_grad()
        loss = module(batch)
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return Turn(losses, time.perf_counter() - clock, time.process_time() - processor, resident())


def prepared(task: Task, rank: int, port: int) -> None:
    """Settings of a process of torch."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warm(task)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")


def alone(task: Task, rank: int, port: int) -> Turn:
    """One process with the whole model."""
    prepared(task, rank, port)
    return trained(task, *model(task), share(task, 0, 1), 1)


def in_ddp(task: Task, rank: int, port: int) -> Turn:
    """One of two processes whose gradients gloo averages."""
    prepared(task, rank, port)
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", rank=rank, world_size=2)
    module, optimizers = model(task)
    data = share(task, rank, 2)
    module = DistributedDataParallel(module, init_sync=False)  # because the models are equal
    dist.barrier()
    turn = trained(task, module, optimizers, data, 2)
    dist.destroy_process_group()
    return turn


class RpcServer:
    """All parameters, and the steps of the optimizer, in the process that serves them."""

    def __init__(self, task: Task):
        import threading

        import torch

        self.task, self.lock = task, threading.Lock()
        self.rows = torch.from_numpy(first_rows(task))
        self.dense = torch.nn.utils.parameters_to_vector(network(task).parameters()).detach()
        if task.optimizer == "adagrad":
            self.states = torch.zeros_like(self.rows), torch.zeros_like(self.dense)

    def step(self, ids: Any, gradient: Any, dense_gradient: Any) -> None:
        """A push."""
        with self.lock:
            if self.task.optimizer == "sgd":
                self.rows.index_add_(0, ids, gradient, alpha=-self.task.rate)
                self.dense.add_(dense_gradient, alpha=-self.task.rate)
                return
            rows, dense = self.states
            rows.index_add_(0, ids, gradient * gradient)
            self.rows.index_add_(0, ids, gradient / (rows[ids].sqrt() + 1e-10), alpha=-self.task.rate)
            dense.addcmul_(dense_gradient, dense_gradient)
            self.dense.addcdiv_(dense_gradient, dense.sqrt() + 1e-10, value=-self.task.rate)


rpc_server: RpcServer | None = None


def rpc_make(task: Task) -> None:
    """In the server."""
    global rpc_server
    rpc_server = RpcServer(task)


def rpc_pull(ids: Any) -> tuple[Any, Any]:
    """In the server: rows, and the parameters of the network."""
    assert rpc_server is not None
    with rpc_server.lock:
        return rpc_server.rows[ids], rpc_server.dense.clone()


def rpc_push(ids: Any, gradient: Any, dense_gradient: Any) -> None:
    """In the server."""
    assert rpc_server is not None
    rpc_server.step(ids, gradient, dense_gradient)


def in_rpc(task: Task, rank: int, port: int) -> Turn:
    """Ranks 0 and 1 train, and rank 2 serves."""
    prepared(task, rank, port)
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"tcp://127.0.0.1:{port}")
    before = time.process_time()
    if rank == 2:
        rpc_make(task)
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    turn = Turn([], 0.0, 0.0, resident())
    if rank < 2:
        turn = trained_by_rpc(task, rpc, share(task, rank, 2))
    rpc.shutdown()
    return turn if rank < 2 else turn._replace(processor=time.process_time() - before, memory=resident())


def trained_by_rpc(task: Task, rpc: Any, data: Arrays) -> Turn:
    """The loop of a trainer; the rows of the next batch are pulled ahead, and pushes are waited for at the end."""
    import torch

    def pulled(batch: Arrays) -> tuple[Any, Any, Any, Any]:
        ids, codes = np.unique(batch["ids"], return_inverse=True)
        named = torch.from_numpy(ids)
        return batch, named, torch.from_numpy(codes), rpc.rpc_async("process2", rpc_pull, (named,))

    tower, losses, pushes = network(task), [], []
    parameters = list(tower.parameters())
    clock, processor = time.perf_counter(), time.process_time()
    coming = map(pulled, batches(task, data, 2))
    ahead = next(coming, None)
    while ahead is not None:
        (batch, ids, codes, answer), ahead = ahead, next(coming, None)
        rows, dense = answer.wait()
        torch.nn.utils.vector_to_parameters(dense, parameters)
        rows.requires_grad_()
        loss = loss_of(task, tower, torch.nn.functional.embedding(codes.view(batch["ids"].shape), rows), batch)
        tower.zero_grad()
        loss.backward()
        gradient = torch.nn.utils.parameters_to_vector([each.grad for each in parameters])
        pushes.append(rpc.rpc_async("process2", rpc_push, (ids, rows.grad, gradient)))
        losses.append(loss.item())
    torch.futures.wait_all(pushes)
    return Turn(losses, time.perf_counter() - clock, time.process_time() - processor, resident())


PROGRAMS: dict[str, tuple[Callable[[Task, int, int], Turn], int]] = {
    "torch alone": (alone, 1),
    "DDP": (in_ddp, 2),
    "torch RPC": (in_rpc, 3),
}


def main() -> None:
    """One process of a rival."""
    way, task, rank, port = json.loads(sys.argv[1])
    print(json.dumps(PROGRAMS[way][0](Task(*task), rank, port)))


def with_torch(way: str, task: Task) -> list[Turn]:
    """A turn of a rival, in fresh processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "from benchmarks.torch_programs import main; main()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, json.dumps([way, task, rank, port])], stdout=subprocess.PIPE)
        for rank in range(PROGRAMS[way][1])
    ]
    try:
        outputs = [each.communicate(timeout=SECONDS)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    if any(each.returncode for each in processes):
        raise RuntimeError(f"{way}: processes ended with {[each.returncode for each in processes]}")
    return [Turn(*json.loads(output.splitlines()[-1])) for output in outputs]
