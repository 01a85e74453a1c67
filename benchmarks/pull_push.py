"""Pull and push, from a trainer's process to the servers' processes, beside the floor under them and beside rivals.

Every figure is taken inside a training task (`ps.run`) on a `dps.LocalCluster`. See exchange.py for what the floor is,
and rivals.py for the rivals, which are left out where they are not installed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from distributed import Client

import dps
from benchmarks import rivals
from benchmarks.common import Cost, Report, cores, parser
from benchmarks.exchange import Parties, Plan, Wanted, measure
from benchmarks.peers import KINDS, Peers

BORN, KEYS = 1_000_000, 100_000
TABLES = {1: (KEYS,), 16: (1_000, 10_000, KEYS), 64: (KEYS,)}  # dim of a keyed table: keys of a request
DENSE = {"4 KB": 16, "1 MB": 4096, "64 MB": 262_144}  # rows of 64 float32
ROUNDS, TURN = 7, 0.06
REACH = {"1 key": "<= 1.3 x", "keyed": "<= 1.5 x", "dense": "<= 1.3 x"}  # by the beginning of a case
# Milliseconds, on the machine of the first figures (two cores of an AMD EPYC).
AT_MOST = {"keyed 1,000 x 16": 0.12, "keyed 10,000 x 16": 0.8, "dense 1 MB": 0.6}


def optimizers() -> dict[str, Any]:
    return {"Add": dps.Add(), "Adagrad": dps.Adagrad(0.1)}


def verbs(optimizer: str) -> list[tuple[str, str]]:
    """(verb, its name in a case); pulls are the same for all optimizers."""
    return [("pull", "pull"), ("push", "push Add")] if optimizer == "Add" else [("push", f"push {optimizer}")]


def keyed_cases(dim: int, optimizer: str, dtype: str = "") -> Iterator[Wanted]:
    """What is measured of a keyed table; its dtype is named where it is not float32."""
    for keys in TABLES[dim]:
        for order in ("random", "localize"):
            for verb, what in verbs(optimizer):
                name = "random order" if order == "random" else "localize's order"
                yield Wanted(f"keyed {keys:,} x {dim}{dtype}, {name}, {what}", verb, keys, order)


def plans(ps: Any, quick: bool, rows: list[str], drop: bool = True) -> Iterator[Plan]:
    """Tables, made one after another; with `drop`, each goes when the next one is asked for.

    Parameters
    ----------
    rows : list of str
        Only cases whose names contain one of these; all, if it is empty.
    """
    born = BORN // 10 * 2 if quick else BORN
    tables: list[tuple[str, dict[str, Any], int, list[Wanted]]] = []
    for name, optimizer in optimizers().items():
        if ps.servers() == 1:
            one = [Wanted(f"1 key, {what}", verb, 1) for verb, what in verbs(name)]
            tables.append((f"one-{name}", {"optimizer": optimizer}, 10_000, one))
        for dim in TABLES:
            options = {"dim": dim, "optimizer": optimizer}
            tables.append((f"keyed-{dim}-{name}", options, born, list(keyed_cases(dim, name))))
        for size, count in DENSE.items():
            options = {"dim": 64, "rows": count, "optimizer": optimizer}
            tables.append(
                (f"dense-{count}-{name}", options, 0, [Wanted(f"dense {size}, {w}", v) for v, w in verbs(name)])
            )
    options = {"dim": 64, "dtype": "int16"}  # half the bytes of float32
    tables.append(("keyed-64-int16", options, born, list(keyed_cases(64, "Add", " int16"))))
    rounds, turn = (5, 0.01) if quick else (ROUNDS, TURN)
    for table, options, first, cases in tables:
        wanted = tuple(case for case in cases if not rows or any(row in case.case for row in rows))
        if wanted:
            spec = ps.table(table, **options).spec
            yield Plan(spec, first, wanted, ps.servers(), rounds, turn)
            if drop:
                ps.drop_table(table)


def placed_plans(ps: Any, quick: bool, rows: list[str]) -> Iterator[Plan]:
    """The same; one key both on one core and on two, all else on two where there are enough for all parties."""
    usual = "two cores" if cores() > ps.servers() else "free"
    for plan in plans(ps, quick, rows):
        wanted = [
            dataclasses.replace(case, place=place)
            for case in plan.wanted
            for place in (("one core", usual) if case.keys == 1 else (usual,))
        ]
        yield dataclasses.replace(plan, wanted=tuple(wanted))


def rival_plans(ps: Any, quick: bool, rows: list[str]) -> Iterator[Plan]:
    """The same, shorter: fewer rows, one order of keys."""
    for plan in plans(ps, quick, rows, drop=False):
        wanted = tuple(w for w in plan.wanted if w.order == "random")
        yield dataclasses.replace(plan, born=min(plan.born, 2 * KEYS), wanted=wanted, rounds=5)


def floors(report: Report, servers: int, quick: bool, rows: list[str]) -> None:
    """Every row beside its floor."""
    with (
        dps.LocalCluster(servers=servers, trainers=1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=servers) as ps,
        Peers(servers) as peers,
    ):
        role = [server.worker for server in ps.status().servers]
        (trainer,) = (worker for worker in client.scheduler_info(n_workers=-1)["workers"] if worker not in role)
        data = [client.submit(int, workers=[trainer])]
        pids = client.run(os.getpid, workers=role)
        parties = Parties(tuple(pids[worker] for worker in role), tuple(peers.pids), tuple(peers.ports))
        for plan in placed_plans(ps, quick, rows):
            (results,) = ps.run(measure, data, args=(plan, parties), progress=False)
            for wanted, costs in zip(plan.wanted, results, strict=True):
                case = f"{wanted.case}, {servers} server{'s' * (servers > 1)}, {wanted.place}"
                (one_key_rows if wanted.keys == 1 else rows_of)(report, case, costs, servers)


def one_key_rows(report: Report, case: str, costs: dict[str, Cost], servers: int) -> None:
    """One key beside an echo: over the kind of socket that dps uses, and with the same way of waiting, it counts."""
    found = costs["dps"]
    report.duration(case, found.seconds, "echo, Unix socket, polling", costs["unix"].seconds, REACH["1 key"])
    for kind, what in (("tcp", "TCP, polling"), ("unix sleeping", "Unix socket"), ("tcp sleeping", "TCP")):
        report.duration(case, found.seconds, f"echo, {what}", costs[kind].seconds)
    report.processor(case, found.cpu, "echo, Unix socket, polling", costs["unix"].cpu, "<= 45 us")


def rows_of(report: Report, case: str, costs: dict[str, Cost], servers: int) -> None:
    """One measurement as rows."""
    found, kernels, used = costs["dps"], costs["kernels"], min(servers, cores())
    factor = 1e3 if found.seconds >= 1e-3 else 1e6
    for kind in KINDS:
        sockets = costs[kind].seconds
        floor = f"{kind} {factor * sockets:.3g} + kernels {factor * kernels.seconds / used:.3g}"
        reach = REACH["keyed" if servers > 1 else case.split()[0]] if kind == "unix" else None
        report.duration(case, found.seconds, floor, sockets + kernels.seconds / used, reach)
    for row, most in AT_MOST.items():
        if case.startswith(f"{row},") and servers == 1:
            report.add(f"{case}: at most", found.seconds * 1e3, "ms", reach=f"<= {most} ms")
    report.processor(case, found.cpu, "unix + kernels", costs["unix"].cpu + kernels.cpu)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--servers", type=int, choices=(1, 2), help="only with so many servers")
    options.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only cases with one of these in them")
    options.add_argument("--no-rivals", action="store_true", help="only dps and its floor")
    options.add_argument("--rivals", nargs="*", metavar="NAME", help="only dps and its rivals, or these of them")
    args = options.parse_args(argv)
    with Report("pull and push; floor = bare sockets + kernels in process", args.json) as report:
        for servers in () if args.rivals is not None else (args.servers,) if args.servers else (1, 2):
            floors(report, servers, args.quick, args.rows)
        if not args.no_rivals:
            rivals.compare(report, args.rivals, lambda ps: rival_plans(ps, args.quick, args.rows))


if __name__ == "__main__":
    from benchmarks.pull_push import main as run  # so that workers find our functions by name

    run()
