"""Snapshots and histories as the controller's monitor makes them, of any size, without a cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from dps.engine.telemetry.rebalance_report import RebalancingStatus
from dps.engine.telemetry.snapshot import (
    PARTS,
    Curve,
    HostStatus,
    HotKey,
    HotShare,
    RunPhase,
    RunStatus,
    ServerPhase,
    ServerStatus,
    Status,
    Straggler,
    TableStatus,
    Throughput,
    TimeSplit,
    TrainerPhase,
    TrainerStatus,
    TrainerStrip,
    Turnover,
)

COUNTED = ("pulls", "pushes", "keys_pulled", "keys_pushed", "bytes_in", "bytes_out", "rows", "again", "cpu", "starved")
BEGAN = 1_795_000_000.0


def shares(rng: np.random.Generator, count: int, slow: int | None) -> np.ndarray:
    """[count, 5]: where the time went; one trainer computes, the others wait for it."""
    found = rng.dirichlet([40, 10, 25, 8, 3], count)
    if slow is not None and count > 1:
        found[slow] = rng.dirichlet([80, 10, 0.5, 8, 3])
    return found


def strip(rng: np.random.Generator, trainer: int, slow: int | None, now: float, points: int = 40) -> TrainerStrip:
    rows = np.array([shares(rng, 2, 0 if trainer == slow else None)[0] for _ in range(points)])
    ends = now - 0.25 * np.arange(points)[::-1]
    columns = (rows[:, i].round(4).tolist() for i in range(len(PARTS)))
    return TrainerStrip(trainer, ends.tolist(), [0.25] * points, *columns)


def metrics(rng: np.random.Generator, now: float, points: int = 100) -> dict[str, Curve]:
    values = 0.1 + 0.6 * np.exp(-np.arange(points) / 30) + rng.normal(0, 0.005, points)
    times = BEGAN + (now - BEGAN) * np.arange(1, points + 1) / points
    return {"loss": Curve(times.tolist(), (4.0 * np.arange(points)).tolist(), values.tolist())}


def run_of(rng: np.random.Generator, trainers: int, now: float) -> RunStatus:
    slow = trainers - 1 if trainers > 1 else None
    clocks = 400 + rng.integers(0, 3, trainers)
    parts = shares(rng, trainers, slow)
    states = [TrainerPhase.WAITING if share > 0.2 else TrainerPhase.RUNNING for share in parts[:, 2]]
    if trainers > 2:
        states[1] = TrainerPhase.LOST
    if slow is not None:
        clocks[slow] = 399
    columns = {
        "rate": rng.normal(20, 1, trainers).round(3).tolist(),
        "keys_rate": rng.normal(2e5, 1e4, trainers).round(1).tolist(),
        "bytes_rate": rng.normal(4e6, 1e5, trainers).round(1).tolist(),
        "rows_rate": rng.normal(1e4, 5e2, trainers).round(1).tolist(),
        "age": rng.uniform(0, 0.3, trainers).round(3).tolist(),
        "step": rng.normal(0.04, 0.002, trainers).round(5).tolist(),
    }
    losses = rng.normal(0.12, 0.01, trainers).round(5).tolist()
    rows = [
        TrainerStatus(
            number=n,
            state=states[n],
            clock=int(clocks[n]),
            planned=1000,
            where=f"tcp://10.0.{n // 250}.{n % 250}:{40000 + n}",
            attempts=1,
            host=f"node-{n % 4}",
            split=TimeSplit(*parts[n].round(4).tolist()),
            cpu=0.97,
            starved=0.01,
            **{name: column[n] for name, column in columns.items()},
        )
        for n in range(trainers)
    ]
    stragglers = []
    if slow is not None:
        stragglers = [
            Straggler(
                kind="permanent",
                trainer=slow,
                factor=2.04,
                since=now - 12,
                share=0.51,
                why=f"trainer {slow} computes 0.08 s a clock, the others 0.039 s, for 12 s now",
                remedy="staleness does not help; lease its work out: ps.run(..., reassign=True)",
                run=1,
            )
        ]
    shown = [n for n in (slow, *range(min(trainers, 32) - 1)) if n is not None]
    return RunStatus(
        run=1,
        state=RunPhase.RUNNING,
        staleness=2,
        auto=False,
        began=BEGAN,
        seconds=round(now - BEGAN, 3),
        stopped=None,
        stopped_by=None,
        trainers=rows,
        minimum=int(clocks.min()),
        totals=TimeSplit(*(round(float(seconds), 3) for seconds in parts.sum(0) * (now - BEGAN))),
        stragglers=stragglers,
        strips=[strip(rng, n, slow, now) for n in shown],
        metrics=metrics(rng, now),
        logged={"loss": losses},
    )


def sample_run(clocks, planned: int = 0, waiting=(), left=(), lost=(), expected=(), **more: Any) -> RunStatus:
    """A run of trainers with these clocks, in these states; the others run."""
    states = {
        n: phase
        for phase, numbers in (
            (TrainerPhase.WAITING, waiting),
            (TrainerPhase.LEFT, left),
            (TrainerPhase.LOST, lost),
            (TrainerPhase.EXPECTED, expected),
        )
        for n in numbers
    }
    trainers = [
        TrainerStatus(n, states.get(n, TrainerPhase.RUNNING), clock, planned, attempts=1)
        for n, clock in enumerate(clocks)
    ]
    stopped = more.get("stopped")
    over = RunPhase.FINISHED if clocks and len(left) == len(clocks) else RunPhase.RUNNING
    fields = {"run": 1, "staleness": 0, "auto": False, "began": BEGAN, "seconds": 1.0, "trainers": trainers}
    fields |= {"state": over if stopped is None else RunPhase.FAILED, "stopped": None, "stopped_by": None}
    return RunStatus(**fields | more)


def server_of(rng: np.random.Generator, number: int) -> ServerStatus:
    return ServerStatus(
        number=number,
        worker=f"tcp://10.1.0.{number}:45000",
        state=ServerPhase.UP,
        cpu=round(float(rng.uniform(0.2, 0.9)), 3),
        host=f"node-{number % 4}",
        starved=0.01,
        memory=int(rng.integers(2e8, 3e8)),
        lag=round(float(rng.uniform(0, 0.004)), 5),
        connections=9,
        requests_rate=round(float(rng.normal(8000, 300)), 1),
        keys_rate=round(float(rng.normal(4e6, 1e5)), 1),
        bytes_rate=round(float(rng.normal(3e7, 1e6)), 1),
        p50=64e-6,
        p99=512e-6,
        busy=round(float(rng.uniform(0.4, 0.6)), 4),
        unconfirmed=int(rng.integers(0, 5)),
        behind=round(float(rng.uniform(0, 0.003)), 5),
        rows=int(rng.integers(1e5, 2e5)),
        bytes=int(rng.integers(1e6, 2e6)),
        taken=1_950_000 if number == 1 else 600_000,
        budget=2_000_000,
        shards=8,
        copies=8,
    )


def host_of(number: int, trainers: int, servers: int) -> HostStatus:
    mine = list(range(number, servers, 4))
    return HostStatus(f"node-{number}", 8, 3.5, 0.45, servers=mine, trainers=len(range(number, trainers, 4)))


def table_of(rng: np.random.Generator, name: str, servers: int, shards: int = 16) -> TableStatus:
    owners = [n * servers // shards for n in range(shards)]
    load = rng.gamma(4, 1e4, shards)
    load[shards // 3] *= 6  # a hot one
    return TableStatus(
        name=name,
        id=1,
        keys=None,
        rows=300_000,
        bytes=3_000_000,
        dim=8,
        dtype="float32",
        optimizer="Adagrad(0.1)",
        copies=min(2, servers),
        requests_rate=9000.0,
        keys_rate=round(float(load.sum()), 1),
        bytes_rate=3.1e7,
        p50=64e-6,
        p99=512e-6,
        load=load.round(1).tolist(),
        chains=[[n, (n + 1) % servers][: min(2, servers)] for n in owners],
        joiners=[None] * shards,
        hot_keys=[HotKey(17, 81_000.0, 0.091), HotKey(-4, 40_500.0, 0.0455, 0.001)],
        hot_shares=[HotShare(1, 0.091), HotShare(8, 0.25, 0.002), HotShare(64, 0.41, 0.0423)],
        turnover=Turnover(0.991, evicted=120_000, expired=300, admitted=90_000, dropped=800_000, waiting=410_000),
        backup_share=0.62,
    )


def snapshot(trainers: int = 4, servers: int = 2, seed: int = 0) -> Status:
    """What `dps_snapshot` answers, decoded."""
    rng, now = np.random.default_rng(seed), BEGAN + 65.0
    points = 120
    return Status(
        name="dps",
        time=now,
        epoch=12,
        wanted=servers,
        runs=[run_of(rng, trainers, now)],
        servers=[server_of(rng, n) for n in range(servers)],
        hosts=[host_of(n, trainers, servers) for n in range(min(4, max(trainers, servers)))],
        tables={"weights": table_of(rng, "weights", servers), "bias": table_of(rng, "bias", servers, servers)},
        throughput=Throughput(
            time=(now - 0.5 * np.arange(points)[::-1]).tolist(),
            requests=rng.normal(16000, 400, points).round(1).tolist(),
            keys=rng.normal(8e6, 2e5, points).round(1).tolist(),
            bytes=rng.normal(6e7, 1e6, points).round(1).tolist(),
            p50=[64e-6] * points,
            p99=rng.choice([256e-6, 512e-6], points).tolist(),
        ),
        rebalancing=RebalancingStatus(True, 3, 1, "in balance"),
        events=[
            (BEGAN + 3, "server 0 holds shard 3 of table 'weights'"),
            (BEGAN + 40, "trainer 3 is slow: permanent"),
        ],
    )


def typed(plain: dict[str, Any]) -> Status:
    """A snapshot of plain values, as `Status.to_dict` has them."""
    return msgspec.convert(plain, Status)


def history(trainers: int = 4, servers: int = 2, seed: int = 0) -> dict[str, Any]:
    """What `dps_history` answers."""
    rng, now, points = np.random.default_rng(seed), BEGAN + 65.0, 60
    run = run_of(rng, trainers, now)
    told = []
    for n in range(trainers):
        one = strip(rng, n, trainers - 1 if trainers > 1 else None, now, points)
        rows = {name: (0.25 * np.array(one.part(name))).round(6).tolist() for name in PARTS}
        rows |= {"clocks": [5.0] * points, "total": [0.25] * points}
        rows |= {name: rng.integers(0, 100, points).astype(float).tolist() for name in COUNTED}
        clocks = (5 * np.arange(1, points + 1)).tolist()
        told.append({"trainer": n, "where": run.trainers[n].where, "time": one.time, "clock": clocks, "rows": rows})
    made = snapshot(trainers, servers, seed)
    curves = msgspec.structs.asdict(made.throughput)
    curves |= {"busy": rng.uniform(0, 1, 120).round(4).tolist()}
    return {
        "name": "dps",
        "run": 1,
        "began": BEGAN,
        "ended": None,
        "state": "running",
        "error": None,
        "staleness": 2,
        "trainers": told,
        "metrics": msgspec.to_builtins(run.metrics),
        "totals": msgspec.structs.asdict(run.totals),
        "stragglers": msgspec.to_builtins(run.stragglers),
        "servers": [{"number": n, **curves} for n in range(servers)],
        "events": [list(event) for event in made.events],
    }
