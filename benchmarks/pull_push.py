"""Pull and push, from a trainer's process to the servers' processes, beside the floor under them.

Every figure is taken inside a training task (`ps.run`) on a `dps.LocalCluster`. See exchange.py for what the floor is.
Ray and torch.distributed.rpc do the same with the same shard class, where they are installed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed import Client

import dps
from benchmarks import rivals
from benchmarks.common import Report, cores, parser
from benchmarks.exchange import Plan, Wanted, measure
from benchmarks.peers import Peers

BORN, KEYS = 1_000_000, 100_000
DENSE = {"4 KB": 16, "1 MB": 4096, "64 MB": 262_144}  # rows of 64 float32
ROUNDS, TURN = 7, 0.06


def optimizers() -> dict[str, Any]:
    return {"Add": dps.Add(), "Adagrad": dps.Adagrad(0.1)}


def keyed_cases(dim: int, optimizer: str, quick: bool) -> Iterator[Wanted]:
    """What is measured of a keyed table."""
    verbs = ["pull", "push"] if optimizer == "Add" else ["push"]
    for verb in verbs:
        what = verb if verb == "pull" else f"push {optimizer}"
        if dim == 1:
            yield Wanted(f"1 key x 1, {what}", verb, 1)
        if dim == 16:
            yield Wanted(f"keyed 1,000 x 16, {what}", verb, 1000)
        keys = KEYS // 10 if quick else KEYS
        yield Wanted(f"keyed {keys:,} x {dim}, random order, {what}", verb, keys)
        yield Wanted(f"keyed {keys:,} x {dim}, localize's order, {what}", verb, keys, "localize")


def plans(ps: Any, quick: bool, drop: bool = True) -> Iterator[Plan]:
    """Tables, made one after another; with `drop`, each goes when the next one is asked for."""
    rounds, turn = (5, 0.01) if quick else (ROUNDS, TURN)
    born = BORN // 10 if quick else BORN
    for name, optimizer in optimizers().items():
        for dim in (1, 16, 64):
            spec = ps.table(f"keyed-{dim}-{name}", dim=dim, optimizer=optimizer).spec
            wanted = tuple(w for w in keyed_cases(dim, name, quick) if w.keys > 1 or ps.servers() == 1)
            yield Plan(spec, born, wanted, ps.servers(), rounds, turn)
            if drop:
                ps.drop_table(spec.name)
        for size, rows in list(DENSE.items())[: 2 if quick else None]:
            spec = ps.table(f"dense-{rows}-{name}", dim=64, rows=rows, optimizer=optimizer).spec
            verbs = ["pull", "push"] if name == "Add" else ["push"]
            wanted = tuple(Wanted(f"dense {size}, {v if v == 'pull' else f'push {name}'}", v) for v in verbs)
            yield Plan(spec, 0, wanted, ps.servers(), rounds, turn)
            if drop:
                ps.drop_table(spec.name)


def rival_plans(ps: Any, quick: bool) -> Iterator[Plan]:
    """The same, shorter: fewer rows, one order of keys."""
    for plan in plans(ps, quick, drop=False):
        wanted = tuple(w for w in plan.wanted if w.order == "random")
        yield dataclasses.replace(plan, born=min(plan.born, 2 * KEYS), wanted=wanted, rounds=5)


def one_key_plans(ps: Any, quick: bool) -> Iterator[Plan]:
    """One key of small tables."""
    for name, optimizer in optimizers().items():
        spec = ps.table(f"one-{name}", optimizer=optimizer).spec
        wanted = tuple(w for w in keyed_cases(1, name, quick) if w.keys == 1)
        yield Plan(spec, 10_000, wanted, ps.servers(), ROUNDS, TURN)
        ps.drop_table(spec.name)


def floors(report: Report, servers: int, quick: bool) -> None:
    """Every row beside its floor; with one server, one key beside an echo and an actor call too."""
    # the second trainer's worker holds the idle actor, and nothing else
    with (
        dps.LocalCluster(servers=servers, trainers=2 if servers == 1 else 1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=servers) as ps,
        Peers(servers) as peers,
    ):
        role = [server.worker for server in ps.status().servers]
        trainers = [worker for worker in client.scheduler_info(n_workers=-1)["workers"] if worker not in role]
        data = [client.submit(int, workers=[trainers[0]])]
        spare = trainers[1] if servers == 1 else None

        def run(plans: Iterator[Plan], where: str) -> None:
            for plan in plans:
                (results,) = ps.run(measure, data, args=(plan, peers.addresses, spare), progress=False)
                for wanted, seconds in zip(plan.wanted, results, strict=True):
                    rows_of(report, wanted, seconds, servers, where)

        if servers == 1:
            run(one_key_plans(ps, quick), ", cores as they come")
        pids = client.run(os.getpid, workers=[trainers[0], *role])
        if pin([[pids[trainers[0]]], *([pids[w], peer] for w, peer in zip(role, peers.pids, strict=True))]):
            report.note("from here on the trainer has a core of its own; a server and its bare peer share another")
        else:
            report.note(f"{servers} servers and a trainer on {cores()} cores: all run where the system puts them")
        run(plans(ps, quick), "")


def pin(groups: list[list[int]]) -> bool:
    """Keep each group of processes on a core of its own; False, and nothing done, where there are not enough.

    Two processes that share a core pass the word in a few microseconds; on two cores, as on two machines, one must
    wake the other. Which of it happens is otherwise the system's choice, and changes from second to second.
    """
    if not hasattr(os, "sched_setaffinity") or cores() < len(groups):
        return False
    for core, pids in zip(sorted(os.sched_getaffinity(0)), groups, strict=False):
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
    return True


def rows_of(report: Report, wanted: Wanted, seconds: dict[str, float], servers: int, where: str) -> None:
    """One measurement as rows."""
    case = f"{wanted.case}, {servers} server{'s' * (servers > 1)}{where}"
    if wanted.keys == 1:
        report.duration(case, seconds["dps"], "bare echo", seconds["sockets"], "<= 1.2 x")
        report.duration(case, seconds["dps"], "bare echo, client spinning", seconds["spinning"])
        if "actor" in seconds:
            report.duration(case, seconds["dps"], "Dask actor call", seconds["actor"], "<= 0.1 x")
        return
    kernels = seconds["kernels"] / servers
    factor = 1e3 if seconds["dps"] >= 1e-3 else 1e6
    floor = f"floor: sockets {factor * seconds['sockets']:.3g} + kernels {factor * kernels:.3g}"
    report.duration(case, seconds["dps"], floor, seconds["sockets"] + kernels, "<= 1.5 x")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--servers", type=int, choices=(1, 2), help="only with so many servers")
    options.add_argument("--no-rivals", action="store_true", help="only dps and its floor")
    options.add_argument("--rivals", action="store_true", help="only dps and its rivals")
    args = options.parse_args(argv)
    with Report("pull and push; floor = bare sockets + kernels in process", args.json) as report:
        for servers in () if args.rivals else (args.servers,) if args.servers else (1, 2):
            floors(report, servers, args.quick)
        if not args.no_rivals:
            rivals.compare(report, args.quick, rival_plans)


if __name__ == "__main__":
    from benchmarks.pull_push import main as run  # so that workers find our functions by name

    run()
