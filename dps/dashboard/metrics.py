"""What ``/metrics`` says of parameter servers, for Prometheus. grafana.json draws these.

The number of series is bounded: trainers and tables are told one by one up to `ONE_BY_ONE`; sums, quantiles and counts
are told always.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from distributed.http.prometheus import PrometheusCollector

from dps.dashboard.palette import PARTS
from dps.dashboard.terminal import current_run

__all__ = ["METRICS", "ONE_BY_ONE", "Metrics", "snapshots"]

logger = logging.getLogger("distributed.dps.dashboard")

ONE_BY_ONE = 128
STATES = ("running", "waiting", "lost", "left", "expected")
KINDS = ("transient", "permanent", "skew", "server", "network", "dead", "overloaded")
QUANTILES = (0.05, 0.5, 0.95)

# name: (what it is, labels after session). A name that ends in _total is a counter.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "epoch": ("Number of the placement, which changes when shards move or servers come and go", ()),
    "moves": ("Shards on their way to another server", ()),
    "server_failures_total": ("Servers that were lost or fell silent, so that others took over", ()),
    "servers": ("Servers by state", ("state",)),
    "servers_wanted": ("Servers that there should be", ()),
    "checkpoint_failed": ("Whether the last checkpoint failed", ()),
    "run": ("Number of the newest run", ()),
    "run_running": ("Whether the newest run goes on", ()),
    "run_seconds": ("How long the newest run has gone on", ()),
    "run_planned_clocks": ("Clocks that the newest run will have, as far as is known; 0: unknown", ()),
    "staleness": ("How many clocks a trainer may be ahead of the slowest; +Inf: no bound", ()),
    "clock": ("Clock of the slowest and of the fastest trainer", ("end",)),
    "trainers": ("Trainers by state", ("state",)),
    "stragglers": ("Who holds the others up, by the kind of trouble", ("kind",)),
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
    "server_lag_seconds": ("How late a server's event loop is, at worst", ("server",)),
    "server_busy": ("Part of its time that the thread which serves is at work", ("server",)),
    "server_starved_share": ("Part of its time in which that thread waits for a processor", ("server",)),
    "server_queue": ("Requests that wait while a server serves others, on the average", ("server",)),
    "server_queue_worst": ("Most requests that waited at once, of late", ("server",)),
    "server_queue_bytes": ("Most bytes of requests that waited at once, of late", ("server",)),
    "server_wait_seconds": ("How long a request waits for those that came before it, on the average", ("server",)),
    "server_untaken": ("Most clients at once that had yet to take an answer, of late", ("server",)),
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
    "table_requests_per_second": ("Requests for a table", ("table",)),
    "table_keys_per_second": ("Keys pulled from and pushed to a table", ("table",)),
    "table_latency_seconds": ("Time servers take for a request to a table", ("table", "quantile")),
    "table_hottest_shard": ("Keys per second of a table's busiest shard, over the mean of its shards", ("table",)),
}

Sample = tuple[str, tuple[Any, ...], float | None]
told: set[str] = set()  # what has failed and been logged


def snapshots(controller: Any) -> dict[str, dict[str, Any] | None]:
    """What the monitors of all parameter servers of a controller saw last, by name; None: nothing yet."""
    found: dict[str, dict[str, Any] | None] = {}
    for name, session in sorted(getattr(controller, "sessions", {}).items()):
        try:
            found[name] = session.monitor.view()
        except Exception:
            complain("the monitor of a parameter server")
    return found


def complain(what: str) -> None:
    """Log the error at hand: once, for what is broken is broken every second."""
    if what not in told:
        told.add(what)
        logger.warning("%s fails; this is said once", what, exc_info=True)


class Metrics(PrometheusCollector):
    """Asked by ``/metrics``, with `server` set to the scheduler that is asked."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.subsystem = "dps"

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        controller = None if self.server is None else self.server.plugins.get("dps-controller")
        families = {}
        for name, (what, labels) in METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(self.build_name(name), what, labels=("session", *labels))
        for session, view in snapshots(controller).items():
            try:
                for name, labels, value in list(samples(view) if view else ()):
                    if value is not None:
                        families[name].add_metric([session, *map(str, labels)], value)
            except Exception:
                complain("making metrics of a snapshot")
        yield from (family for family in families.values() if family.samples)


def samples(view: Mapping[str, Any]) -> Iterator[Sample]:
    """The values of a snapshot: (name, labels, value)."""
    yield "epoch", (), view["epoch"]
    yield "moves", (), view["moves"]
    yield "server_failures_total", (), view["failures"]
    yield "servers_wanted", (), view["wanted"]
    yield "checkpoint_failed", (), float(bool(view["checkpoints"].get("error")))
    servers = view["servers"]
    for state in ("alive", "leaving"):
        yield "servers", (state,), sum(bool(server[state]) for server in servers)
    yield "servers", ("dead",), sum(not server["alive"] for server in servers)
    for server in servers:
        yield from _of_server(server)
    for host in view["hosts"][:ONE_BY_ONE]:
        for metric, field in (("processors", "cores"), ("threads", "tasks"), ("busy", "busy")):
            yield f"host_{metric}", (host["host"],), host[field]
        yield "host_overloaded", (host["host"],), float(host["overloaded"])
    for name, table in list(view["tables"].items())[:ONE_BY_ONE]:
        yield from _of_table(name, table)
    if (run := current_run(view)) is not None:
        yield from _of_run(run)


def _of_server(server: Mapping[str, Any]) -> Iterator[Sample]:
    number = server["number"]
    for metric, field in (
        *(("cpu_cores", "cpu"), ("memory_bytes", "memory"), ("lag_seconds", "lag"), ("connections", "connections")),
        *(
            ("requests_per_second", "requests_rate"),
            ("keys_per_second", "keys_rate"),
            ("bytes_per_second", "bytes_rate"),
        ),
        *(
            ("busy", "busy"),
            ("starved_share", "starved"),
            ("queue", "queue"),
            ("queue_worst", "queue_worst"),
            ("queue_bytes", "queue_bytes"),
        ),
        ("starved_share", "starved"),
        *(("wait_seconds", "wait"), ("untaken", "untaken")),
        *(("unconfirmed", "unconfirmed"), ("behind_seconds", "behind"), ("rows", "rows")),
    ):
        yield f"server_{metric}", (number,), server[field]
    for quantile, field in (("0.5", "p50"), ("0.99", "p99")):
        yield "server_latency_seconds", (number, quantile), server[field]
    for role, field in (("primary", "shards"), ("backup", "copies")):
        yield "server_shards", (number, role), server[field]


def _of_table(name: str, table: Mapping[str, Any]) -> Iterator[Sample]:
    yield "table_rows", (name,), table["rows"]
    yield "table_bytes", (name,), table["bytes"]
    yield "table_requests_per_second", (name,), table["requests_rate"]
    yield "table_keys_per_second", (name,), table["keys_rate"]
    for quantile, field in (("0.5", "p50"), ("0.99", "p99")):
        yield "table_latency_seconds", (name, quantile), table[field]
    load = table["load"]
    if load and sum(load) > 0:
        yield "table_hottest_shard", (name,), max(load) * len(load) / sum(load)


def _of_run(run: Mapping[str, Any]) -> Iterator[Sample]:
    trainers = run["trainers"]
    states = trainers["state"]
    yield "run", (), run["run"]
    yield "run_running", (), float(run["state"] == "running")
    yield "run_seconds", (), run["seconds"]
    yield "run_planned_clocks", (), run["planned"]
    yield "staleness", (), math.inf if run["staleness"] is None else run["staleness"]
    yield "clock", ("slowest",), run["minimum"]
    yield "clock", ("fastest",), run["maximum"]
    for state in STATES:
        yield "trainers", (state,), states.count(state)
    for kind in KINDS:
        yield "stragglers", (kind,), sum(finding["kind"] == kind for finding in run["stragglers"])
    for part, seconds in run["totals"].items():
        yield "time_seconds_total", (part,), seconds
    shares = np.array([trainers[part] for part in PARTS if part in trainers], float)
    if len(shares) == len(PARTS) and (at_work := shares.sum(0) > 0).any():
        yield from (
            ("share", (part,), float(share)) for part, share in zip(PARTS, shares[:, at_work].mean(1), strict=True)
        )
        for quantile, row in zip(QUANTILES, np.quantile(shares[:, at_work], QUANTILES, axis=1), strict=True):
            yield from (("share_quantile", (part, quantile), float(x)) for part, x in zip(PARTS, row, strict=True))
    steps = [step for step in trainers.get("step", ()) if step]
    if steps:
        for quantile, step in zip(QUANTILES, np.quantile(steps, QUANTILES), strict=True):
            yield "step_seconds", (quantile,), float(step)
    for name, series in run["metrics"].items():
        yield "metric", (name,), series["value"][-1] if series["value"] else None
    for state, count in (run["portions"] or {}).items():
        yield "portions", (state,), count
    if len(states) <= ONE_BY_ONE:
        yield from _of_trainers(trainers)


def _of_trainers(trainers: Mapping[str, Any]) -> Iterator[Sample]:
    for metric, field in (
        *(("trainer_clock", "clock"), ("trainer_clocks_per_second", "rate")),
        *(("trainer_step_seconds", "step"), ("trainer_age_seconds", "age")),
        *(("trainer_processor_share", "cpu"), ("trainer_starved_share", "starved")),
    ):
        yield from ((metric, (n,), value) for n, value in enumerate(trainers.get(field, ())))
    for part in PARTS:
        yield from (("trainer_share", (n, part), value) for n, value in enumerate(trainers.get(part, ())))
