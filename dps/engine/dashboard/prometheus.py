"""The metrics of parameter servers in ``/metrics``, for Prometheus. grafana.json draws them.

The number of series is bounded: up to `ONE_BY_ONE` trainers and as many tables have series of their own; sums,
quantiles and counts are always there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from distributed.http.prometheus import PrometheusCollector

from dps.engine.dashboard.rows import shares_of
from dps.engine.telemetry.findings import KINDS
from dps.engine.telemetry.snapshot import (
    PARTS,
    RunPhase,
    RunStatus,
    ServerPhase,
    ServerStatus,
    Status,
    TableStatus,
    TrainerPhase,
    TrainerStatus,
)

if TYPE_CHECKING:  # prometheus_client is optional
    from distributed import Scheduler
    from prometheus_client.core import Metric

__all__ = ["METRICS", "ONE_BY_ONE", "HasSessions", "Metrics", "snapshots"]

logger = logging.getLogger("distributed.dps.dashboard")

# Number of trainers, and of tables, up to which each has series of its own.
ONE_BY_ONE = 128
QUANTILES = (0.05, 0.5, 0.95)

# name -> (help text, labels after "session"). A name that ends in _total is a counter.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "epoch": ("Number of the placement, which changes when shards move or servers come and go", ()),
    "moves": ("Shards on their way to another server", ()),
    "server_failures_total": ("Servers that were lost or fell silent, so that others took over", ()),
    "rebalanced_total": ("Shards that were moved, and tables that were split, because of their load", ("what",)),
    "servers": ("Servers by state", ("state",)),
    "servers_wanted": ("Servers that there should be", ()),
    "checkpoint_failed": ("Whether the last checkpoint failed", ()),
    "run": ("Number of the newest run", ()),
    "run_running": ("Whether the newest run goes on", ()),
    "run_seconds": ("How long the newest run has gone on", ()),
    "run_planned_clocks": ("Clocks that the newest run will have, as far as is known; 0: unknown", ()),
    "staleness": ("How many clocks a trainer that begins one may be ahead of the slowest; +Inf: no bound", ()),
    "clock": ("Clock of the slowest and of the fastest trainer", ("end",)),
    "trainers": ("Trainers by state", ("state",)),
    "stragglers": ("Trainers, servers and machines that slow the others down, by kind", ("kind",)),
    "time_seconds_total": ("Time of all trainers of the newest run, by what they did", ("activity",)),
    "share": ("Part of the trainers' time in the last 10 s, mean over trainers", ("activity",)),
    "share_quantile": ("The same, quantiles over trainers", ("activity", "quantile")),
    "step_seconds": ("Work for one clock, waits not counted: quantiles over trainers", ("quantile",)),
    "metric": ("What training functions log: last mean over trainers", ("metric",)),
    "portions": ("Portions of work that are leased to trainers", ("state",)),
    "trainer_clock": ("Clocks that a trainer has done", ("trainer",)),
    "trainer_clocks_per_second": ("A trainer's speed", ("trainer",)),
    "trainer_share": ("Part of a trainer's time in the last 10 s", ("trainer", "activity")),
    "trainer_step_seconds": ("A trainer's work for one clock, waits not counted", ("trainer",)),
    "trainer_age_seconds": ("Time since a trainer's last sign of life", ("trainer",)),
    "trainer_processor_share": ("Part of a trainer's computing in which its thread runs", ("trainer",)),
    "trainer_starved_share": ("Part of a trainer's time in which it waits for a processor", ("trainer",)),
    "host_processors": ("A machine's processors", ("host",)),
    "host_threads": ("Threads that run or are ready to run on a machine, of all programs", ("host",)),
    "host_busy": ("Part of a machine's processors' time that is in use", ("host",)),
    "host_overloaded": ("Whether a machine slows what runs on it: 1 if it does", ("host",)),
    "server_cpu_cores": ("Cores that a server keeps busy", ("server",)),
    "server_memory_bytes": ("A server's memory", ("server",)),
    "server_taken_bytes": ("Memory that a server's tables take, as dps.memory counts it", ("server",)),
    "server_budget_bytes": ("Memory that a server's tables may take, dps.memory", ("server",)),
    "server_lag_seconds": ("How late a server's event loop is, at worst", ("server",)),
    "server_busy": ("Part of its time that the thread which serves is at work", ("server",)),
    "server_polled_share": ("Part of its time in which that thread polls, see dps.server-polling", ("server",)),
    "server_starved_share": ("Part of its time in which that thread waits for a processor", ("server",)),
    "server_connections": ("Open connections of a server", ("server",)),
    "server_requests_per_second": ("Requests that a server answers", ("server",)),
    "server_keys_per_second": ("Keys pulled from and pushed to a server", ("server",)),
    "server_bytes_per_second": ("Bytes that go in and out of a server", ("server",)),
    "server_latency_seconds": ("Time a server takes for a request", ("server", "quantile")),
    "server_unconfirmed": ("Pushes that the backups have not confirmed yet", ("server",)),
    "server_behind_seconds": ("Age of the oldest push that the backups have not confirmed", ("server",)),
    "server_rows": ("Rows of the shards that a server answers for", ("server",)),
    "server_shards": ("Shards on a server, by role", ("server", "role")),
    "table_rows": ("Rows of a table", ("table",)),
    "table_bytes": ("Memory of a table, copies included", ("table",)),
    "table_traffic_bytes": ("Bytes between clients and the servers that are there now for a table", ("table", "what")),
    "table_backup_share": ("Share of the pulls of a table that backups have answered", ("table",)),
    "table_requests_per_second": ("Requests for a table", ("table",)),
    "table_keys_per_second": ("Keys pulled from and pushed to a table", ("table",)),
    "table_latency_seconds": ("Time servers take for a request to a table", ("table", "quantile")),
    "table_hottest_shard": ("Keys per second of a table's busiest shard, over the mean of its shards", ("table",)),
    "table_full": ("Part of max_bytes that the rows of a table's fullest shard take", ("table",)),
    "table_turnover_total": ("Rows of a table that came and went, by how", ("table", "how")),
    "table_waiting_keys": ("Keys that wait until they were pushed often enough to have a row", ("table",)),
    "table_spilled_rows": ("Rows of a table that are in files of servers", ("table",)),
    "table_spill_bytes": ("Bytes of these files", ("table",)),
    "table_hot_share": (
        "Part of a table's accesses that so many of its hottest keys have, at least",
        ("table", "keys"),
    ),
}

Sample = tuple[str, tuple[object, ...], float | None]
logged: set[str] = set()  # failures that were logged already


class Snapshots(Protocol):
    """The monitor of a parameter server."""

    def view(self) -> Status | None:
        """The newest snapshot; None before the first."""


class HasMonitor(Protocol):
    """The controller's part for one parameter server."""

    @property
    def monitor(self) -> Snapshots: ...


class HasSessions(Protocol):
    """The controller: its parts for each parameter server, by name."""

    @property
    def sessions(self) -> Mapping[str, HasMonitor]: ...


def snapshots(controller: HasSessions | None) -> dict[str, Status | None]:
    """The newest snapshots of all parameter servers of a controller, by name; None where there is none yet."""
    views: dict[str, Status | None] = {}
    for name, session in sorted(getattr(controller, "sessions", {}).items()):
        try:
            views[name] = session.monitor.view()
        except Exception:
            log_once("the monitor of a parameter server")
    return views


def log_once(what: str) -> None:
    """Log the present exception. It is logged once, because a failure repeats every second."""
    if what not in logged:
        logged.add(what)
        logger.warning("%s fails; this is said once", what, exc_info=True)


class Metrics(PrometheusCollector):
    """The collector that ``/metrics`` calls, with `server` set to the scheduler that answers."""

    def __init__(self, server: Scheduler | None) -> None:
        super().__init__(server)
        self.subsystem = "dps"

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        controller = None if self.server is None else self.server.plugins.get("dps-controller")
        families = {}
        for name, (help_text, labels) in METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(self.build_name(name), help_text, labels=("session", *labels))
        for session, view in snapshots(controller).items():
            try:
                for name, label_values, value in list(samples(view) if view else ()):
                    if value is not None:
                        families[name].add_metric([session, *map(str, label_values)], value)
            except Exception:
                log_once("making metrics of a snapshot")
        yield from (family for family in families.values() if family.samples)


def samples(view: Status) -> Iterator[Sample]:
    """The values of a snapshot, as (name, labels, value)."""
    yield "epoch", (), view.epoch
    yield "moves", (), view.moves
    yield "server_failures_total", (), view.failures
    if view.rebalancing is not None:
        yield "rebalanced_total", ("moves",), view.rebalancing.moves
        yield "rebalanced_total", ("splits",), view.rebalancing.splits
    yield "servers_wanted", (), view.wanted
    yield "checkpoint_failed", (), float(bool(view.checkpoints.error))
    servers = view.servers
    for phase in ServerPhase:
        yield "servers", (phase,), sum(server.state is phase for server in servers)
    for server in servers:
        yield from _of_server(server)
    for host in view.hosts[:ONE_BY_ONE]:
        for metric, field in (("processors", "cores"), ("threads", "tasks"), ("busy", "busy")):
            yield f"host_{metric}", (host.host,), getattr(host, field)
        yield "host_overloaded", (host.host,), float(host.overloaded)
    for name, table in list(view.tables.items())[:ONE_BY_ONE]:
        yield from _of_table(name, table)
    if (run := view.current_run) is not None:
        yield from _of_run(run)


def _of_server(server: ServerStatus) -> Iterator[Sample]:
    number = server.number
    for metric, field in (
        *(("cpu_cores", "cpu"), ("memory_bytes", "memory"), ("lag_seconds", "lag"), ("connections", "connections")),
        *(
            ("requests_per_second", "requests_rate"),
            ("keys_per_second", "keys_rate"),
            ("bytes_per_second", "bytes_rate"),
        ),
        *(("busy", "busy"), ("polled_share", "polled"), ("starved_share", "starved")),
        *(("unconfirmed", "unconfirmed"), ("behind_seconds", "behind"), ("rows", "rows")),
    ):
        yield f"server_{metric}", (number,), getattr(server, field)
    if server.budget:
        yield "server_taken_bytes", (number,), server.taken
        yield "server_budget_bytes", (number,), server.budget
    for quantile, field in (("0.5", "p50"), ("0.99", "p99")):
        yield "server_latency_seconds", (number, quantile), getattr(server, field)
    for role, field in (("primary", "shards"), ("backup", "copies")):
        yield "server_shards", (number, role), getattr(server, field)


def _of_table(name: str, table: TableStatus) -> Iterator[Sample]:
    yield "table_rows", (name,), table.rows
    yield "table_bytes", (name,), table.bytes
    for what in ("keys", "pushed", "pulled", "headers"):
        yield "table_traffic_bytes", (name, what), getattr(table.traffic, what)
    if table.backup_share is not None:
        yield "table_backup_share", (name,), table.backup_share
    yield "table_requests_per_second", (name,), table.requests_rate
    yield "table_keys_per_second", (name,), table.keys_rate
    for quantile, field in (("0.5", "p50"), ("0.99", "p99")):
        yield "table_latency_seconds", (name, quantile), getattr(table, field)
    load = table.load
    if load and sum(load) > 0:
        yield "table_hottest_shard", (name,), max(load) * len(load) / sum(load)
    if table.turnover is not None:
        yield "table_full", (name,), table.turnover.full
        for how in ("evicted", "expired", "refused", "admitted", "dropped", "brought"):
            yield "table_turnover_total", (name, how), getattr(table.turnover, how)
        yield "table_waiting_keys", (name,), table.turnover.waiting
        yield "table_spilled_rows", (name,), table.turnover.spilled
        yield "table_spill_bytes", (name,), table.turnover.spill_bytes
    for hot in table.hot_shares:
        yield "table_hot_share", (name, hot.keys), hot.share


def _of_run(run: RunStatus) -> Iterator[Sample]:
    yield "run", (), run.run
    yield "run_running", (), float(run.state is RunPhase.RUNNING)
    yield "run_seconds", (), run.seconds
    yield "run_planned_clocks", (), run.planned
    yield "staleness", (), math.inf if run.staleness is None else run.staleness
    yield "clock", ("slowest",), run.minimum
    yield "clock", ("fastest",), run.maximum
    for phase in TrainerPhase:
        yield "trainers", (phase,), len(run.in_state(phase))
    for kind in KINDS:
        yield "stragglers", (kind,), sum(finding.kind == kind for finding in run.stragglers)
    if run.totals is not None:
        yield from (("time_seconds_total", (part,), getattr(run.totals, part)) for part in PARTS)
    shares = shares_of(run)
    if (at_work := shares.sum(0) > 0).any():
        yield from (
            ("share", (part,), float(share)) for part, share in zip(PARTS, shares[:, at_work].mean(1), strict=True)
        )
        for quantile, row in zip(QUANTILES, np.quantile(shares[:, at_work], QUANTILES, axis=1), strict=True):
            yield from (("share_quantile", (part, quantile), float(x)) for part, x in zip(PARTS, row, strict=True))
    steps = [trainer.step for trainer in run.trainers if trainer.step]
    if steps:
        for quantile, step in zip(QUANTILES, np.quantile(steps, QUANTILES), strict=True):
            yield "step_seconds", (quantile,), float(step)
    for name, series in run.metrics.items():
        yield "metric", (name,), series.value[-1] if series.value else None
    if run.portions is not None:
        yield from (("portions", (state,), count) for state, count in msgspec.structs.asdict(run.portions).items())
    if len(run.trainers) <= ONE_BY_ONE:
        yield from _of_trainers(run.trainers)


def _of_trainers(trainers: Sequence[TrainerStatus]) -> Iterator[Sample]:
    for metric, field in (
        *(("trainer_clock", "clock"), ("trainer_clocks_per_second", "rate")),
        *(("trainer_step_seconds", "step"), ("trainer_age_seconds", "age")),
        *(("trainer_processor_share", "cpu"), ("trainer_starved_share", "starved")),
    ):
        yield from ((metric, (trainer.number,), getattr(trainer, field)) for trainer in trainers)
    for part in PARTS:
        for trainer in trainers:
            if trainer.split is not None:
                yield "trainer_share", (trainer.number, part), getattr(trainer.split, part)
