"""Monitor: what the controller knows of trainers, servers and tables, put together for whoever looks.

Theory of operation
-------------------
Nobody sends anything for this page's sake. A trainer's report rides on its tick (`RunWatch` takes it), a server's on
its beat (`ServerWatch`); both at most a few times a second, whatever the work. Once a second, while a run goes on, the
rules of `coordination/progress.py` look who is slow, and news goes to the events.

Reports, rules and the making of a *snapshot* (plain values, for pages, JSON, Prometheus and terminals) happen in the
endpoint's thread, which owns all that is read. The pages live on the scheduler's loop: they are handed the snapshot
that was made last, an object that is replaced whole, and that is made anew only while somebody looks.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from dps.coordination.hosts import Hosts
from dps.coordination.progress import AutoStaleness, Finding, Server
from dps.errors import InputError
from dps.run_watch import plain, same
from dps.server_watch import Rates, ServerWatch

__all__ = ["Monitor", "history_json"]

logger = logging.getLogger(__name__)

DIAGNOSE = 1.0  # seconds between two looks at who is slow
RENEW = 1.0  # between two snapshots, while somebody looks
DRAW = 0.5  # between two points of the curve of all servers
RESTS = 60.0  # after something in here has failed
LOOKED = 10.0  # for so long after somebody has;
SLOW, LONG_AGO = 5.0, 300.0  # more rarely for some minutes: Prometheus comes every now and then
RUNS, EVENTS, POINTS = 4, 64, 240  # in a snapshot
MOST_AUTO = 16  # staleness that is set automatically
NEWS = 8  # findings of one look that are told one by one
SILENT = 2.0  # seconds after which a server's last rates are no longer told
COLUMNS = ("time", "requests", "keys", "bytes", "p50", "p99")


class Monitor:
    """See the module's docstring.

    Parameters
    ----------
    runs : Runs
    fleet : Fleet
    now, wall : callable
        Time as runs and fleet measure it, and as people do.
    """

    def __init__(self, runs: Any, fleet: Any, now: Callable[[], float], wall: Callable[[], float] = time.time):
        self.runs, self.fleet, self.now, self.wall = runs, fleet, now, wall
        self.checkpoints: Callable[[], dict[str, Any]] = lambda: {"last": None, "error": None}
        self.wanted: Callable[[], int] = lambda: 0
        self.hosts = Hosts()
        self._servers: dict[int, ServerWatch] = {}
        self._diagnosed = self._made = self._viewed = -math.inf
        self._snapshot: dict[str, Any] | None = None
        self._curve: collections.deque[tuple[float, ...]] = collections.deque(maxlen=POINTS)
        self._drawn = self._rests_until = -math.inf
        self._finished: dict[int, dict[str, Any]] = {}  # runs that are over, as they are shown

    # -- the endpoint's thread

    def beaten(self, number: int, report: dict[str, Any]) -> None:
        """A server's beat has brought a report."""
        self._servers.setdefault(number, ServerWatch()).reported(report, self.now(), self.wall())
        if report.get("host") is not None:
            self.hosts.told(report["host"], self.now())

    def look(self) -> None:
        """Now and then: who is slow, is somebody looking. Never fails: whoever calls looks after servers, too."""
        now = self.now()
        if now >= self._rests_until:
            try:
                self._look(now)
            except Exception:
                self._rests_until = now + RESTS
                logger.exception("parameter server %r: what is to be seen will be old", self.runs.session)

    def _look(self, now: float) -> None:
        if now - self._drawn >= DRAW:
            self._drawn = now
            for watch in self._servers.values():
                watch.quiet = now - watch.age > SILENT
            rates = _together([watch.rates() for watch in self._servers.values()])
            self._curve.append((round(self.wall(), 3), *(round(value, 6) for value in rates[:5])))
        if now - self._diagnosed >= DIAGNOSE:
            self._diagnosed = now
            for number in set(self._servers) - set(self.fleet.servers):
                del self._servers[number]
            there = {spec["id"] for spec in self.fleet.specs.values()}
            for watch in self._servers.values():
                watch.keep(there)
            for run in self.runs.runs.values():
                for at, load in run.watch.loads() if run.watch is not None else ():
                    self.hosts.told(load, at)
            for run in self.runs.runs.values():
                self._attend(run, now)
        viewed = now - self._viewed
        if now - self._made >= (RENEW if viewed < LOOKED else SLOW) and viewed < LONG_AGO:
            self._made = now  # also where it fails
            self._snapshot = self.snapshot()

    def _attend(self, run: Any, now: float) -> None:
        """Look at one run."""
        if run.over:
            self._end(run)
            if run.watch is not None and sum(_counts(other) for other in self._newer(run)) >= RUNS:
                run.watch = None  # megabytes, if it had many trainers
        elif run.watch is not None and (run.active or run.watch.found):
            try:
                self._diagnose(run, now)
            except Exception:
                run.unwatched()

    def _visible(self) -> list[Any]:
        return [run for run in self.runs.runs.values() if _counts(run) or not run.over]

    def _newer(self, run: Any) -> Iterator[Any]:
        return (other for other in self.runs.runs.values() if other.number > run.number)

    def _diagnose(self, run: Any, now: float) -> None:
        servers = [self._server(number, now) for number in sorted(self.fleet.servers)]
        states = [run.working(n) for n in range(run.trainers)]
        if run.elastic:  # nobody waits for those that have not come, or are gone
            states = ["left" if state in ("expected", "lost") else state for state in states]
        clocks = [run.clock.clock_of(n) for n in range(run.trainers)]
        args = (now, self.wall(), clocks, states, run.clock.ages(now), servers, run.staleness)
        new, over = run.watch.look(*args, self.hosts.lately(now))
        self._tell(run.number, new, over)
        wish = run.watch.wish(now, _waiting(run))
        if wish is not None and wish != run.staleness:
            self.runs.set_staleness(wish, run.number, "by the automatic setting")

    def _tell(self, run: int, new: list[Finding], over: list[Finding]) -> None:
        """What has changed; what passes is not worth a place among the events that a controller remembers."""
        for finding in new[:NEWS]:
            text = f"run {run}: {_title(finding)}: {finding.why}; {finding.remedy}"
            if finding.kind == "transient":
                self.fleet.mention(text)
            else:
                self.fleet.note(text, stands=functools.partial(self._holds, run, finding))
        if len(new) > NEWS:
            kinds = collections.Counter(finding.kind for finding in new[NEWS:])
            text = f"run {run}: and more: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
            self.fleet.note(text, stands=lambda: self._goes_on(run))
        for finding in over[:NEWS]:
            self.fleet.mention(f"run {run}: no longer: {_title(finding)}")

    def _goes_on(self, run: int) -> bool:
        """Whether that run is not over."""
        return run in self.runs.runs and not self.runs.runs[run].over

    def _holds(self, run: int, finding: Finding) -> bool:
        """Whether a finding of that run still does."""
        watch = self.runs.runs[run].watch if self._goes_on(run) else None
        return watch is not None and any(same(finding, found) for found in watch.found)

    def _end(self, run: Any) -> None:
        """The run is over: note when."""
        if run.finish is None:
            run.finish = self.wall()
            if run.watch is not None:
                run.watch.ended(self.now(), run.finish)

    def _server(self, number: int, now: float) -> Server:
        recruit, watch = self.fleet.servers[number], self._servers.get(number)
        if watch is None:
            return Server(number, 0.0, 0.0, 0.0, recruit.up, 0.0)
        rates = watch.rates()
        age, ran = now - watch.age, watch.busy()
        cost = ran / rates.requests if rates.requests else math.inf
        about = watch.about["lag"], recruit.up, age, watch.host, ran, watch.starved(), cost
        return Server(number, rates.service, rates.p99, *about)

    def loads(self, since: float) -> dict[int, tuple[float, float]]:
        """The part of its time that a server is at work, and bytes of its rows; of those that have told since then."""
        watches = {n: watch for n, watch in self._servers.items() if watch.steady(since) and n in self.fleet.servers}
        return {n: (w.busy(since), sum(table["bytes"] for table in w.tables().values())) for n, w in watches.items()}

    def snapshot(self) -> dict[str, Any]:
        """All of it, now."""
        now, wall = self.now(), self.wall()
        self._made = now
        fleet = self.fleet.describe()
        return {
            "name": self.runs.session,
            "time": round(wall, 3),
            "epoch": fleet["epoch"],
            "wanted": self.wanted(),
            "failures": self.fleet.failures,
            "moves": sum(joiner is not None for table in fleet["tables"].values() for joiner in table["joiners"]),
            "runs": [self._shown(run, now, wall) for run in sorted(self._visible(), key=_number, reverse=True)[:RUNS]],
            "servers": [self._about_server(about, fleet["tables"]) for about in fleet["servers"]],
            "hosts": self.machines(),
            "tables": {name: self._about_table(about) for name, about in fleet["tables"].items()},
            "throughput": self._throughput(),
            "events": [[round(when, 3), text] for when, text in fleet["events"][-EVENTS:]],
            "checkpoints": self.checkpoints(),
        }

    def history(self, number: int = 0) -> dict[str, Any]:
        """All that is remembered of a run; 0 is the last one that is shown."""
        last = max(map(_number, self._visible() or self.runs.runs.values()), default=0)
        run, now, wall = self.runs.known(number or last), self.now(), self.wall()
        watch = run.watch
        if run.over:
            self._end(run)
        ended = math.inf if run.finish is None else run.finish
        return {
            "name": self.runs.session,
            "run": run.number,
            "began": round(run.began, 3),
            "ended": None if run.finish is None else round(run.finish, 3),
            "state": _state(run),
            "error": None if run.stopped is None or run.ended else str(run.stopped),
            "staleness": None if math.isinf(run.staleness) else run.staleness,
            "trainers": [] if watch is None else watch.rows(wall - now, run.where),  # arrays: see `plain`
            "metrics": {} if watch is None else watch.curves(1024),
            "totals": {} if watch is None else watch.totals(),
            "stragglers": [] if watch is None else watch.findings(),
            "servers": [{"number": n, **watched.curves.columns()} for n, watched in sorted(self._servers.items())],
            "events": [[round(at, 3), text] for at, text in self.fleet.events if run.began - 1 <= at <= ended + 1],
        }

    def set_staleness(self, staleness: float, number: int = 0) -> None:
        """A bound for a run, or for all that go on (0): the automatic setting ends."""
        for run in self.runs.set_staleness(staleness, number):
            if self.runs.runs[run].watch is not None:
                self.runs.runs[run].watch.auto = None

    def automatic(self, number: int = 0) -> None:
        """From now on, set the bound by what is seen."""
        for run in self.runs.going(number):
            if run.watch is None:
                raise InputError(f"nothing is kept of the reports of run {run.number}: {run.trainers} are too many")
            if run.watch.auto is None:
                run.watch.auto = AutoStaleness(start=int(min(run.staleness, MOST_AUTO)))
                text = f"run {run.number}: staleness {run.staleness:g}, set automatically from now on"
                self.fleet.note(text, stands=functools.partial(self._goes_on, run.number))

    # -- any thread

    def view(self) -> dict[str, Any] | None:
        """The snapshot that was made last, which others follow while this is called; None before the first."""
        self._viewed = self.now()
        return self._snapshot

    # -- inside

    def _shown(self, run: Any, now: float, wall: float) -> dict[str, Any]:
        """A run; of one that is over nothing changes any more."""
        if not run.over:
            self._finished.pop(run.number, None)  # somebody was run again
            return self._run(run, now, wall)
        if run.number not in self._finished:
            kept = sorted(self._finished)[-RUNS + 1 :]
            self._finished = {number: self._finished[number] for number in kept}
            self._finished[run.number] = self._run(run, now, wall)
        return self._finished[run.number]

    def _run(self, run: Any, now: float, wall: float) -> dict[str, Any]:
        if run.over:
            self._end(run)
        clocks = [run.clock.clock_of(n) for n in range(run.trainers)]
        columns: dict[str, Any] = {
            "where": [run.where.get(n, "") for n in range(run.trainers)],
            "state": [run.working(n) for n in range(run.trainers)],
            "clock": clocks,
            "age": [round(age, 3) for age in run.clock.ages(now)],
            "attempts": [run.attempts.get(n, -1) + 1 for n in range(run.trainers)],
        }
        portions = getattr(run, "portions", None)
        about: dict[str, Any] = {
            "run": run.number,
            "state": _state(run),
            "staleness": None if math.isinf(run.staleness) else run.staleness,
            "auto": run.watch is not None and run.watch.auto is not None,
            "began": round(run.began, 3),
            "seconds": round((wall if run.finish is None else run.finish) - run.began, 3),
            "error": None if run.stopped is None or run.ended else str(run.stopped),
            "minimum": run.clock.minimum,
            "maximum": max(clocks),
            "planned": max(run.planned.values(), default=0),
            "trainers": columns,
            "portions": None if portions is None else portions.describe(),
            "reassign": portions is not None,
        }
        if run.watch is None:
            return about | {"totals": {}, "stragglers": [], "strip": [], "metrics": {}, "logged": {}}
        columns |= {"host": list(run.watch.hosts), **run.watch.columns(now, _waiting(run), run.left)}
        about |= {"totals": run.watch.totals(), "stragglers": run.watch.stragglers()}
        about |= {"strip": run.watch.strips(wall - now), "metrics": run.watch.curves()}
        return about | {"logged": run.watch.logged()}

    def machines(self) -> list[dict[str, Any]]:
        """How loaded the machines are, and what runs on them."""
        found = []
        watches = [run.watch for run in self.runs.runs.values() if run.watch is not None and not run.over]
        over = {finding.host for watch in watches for finding in watch.found if finding.kind == "overloaded"}
        for host in self.hosts.lately(self.now()):
            numbers = [n for n, watch in sorted(self._servers.items()) if watch.host == host.name]
            about = {"host": host.name, "cores": host.cores, "tasks": round(host.tasks, 2), "busy": round(host.busy, 4)}
            about |= {"stolen": round(host.stolen, 4), "overloaded": host.name in over, "servers": numbers}
            found.append(about | {"trainers": sum(watch.hosts.count(host.name) for watch in watches)})
        return found

    def _about_server(self, server: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
        watch = self._servers.get(server["number"]) or ServerWatch()
        about: dict[str, Any] = {
            "cpu": 0,
            "memory": 0,
            "lag": 0,
            "connections": 0,
            "unconfirmed": [0] * 3,
            "queue": [0] * 5,
        }
        about |= watch.about
        _, _, worst, waiting, untaken = map(int, about["queue"])
        rates = watch.rates()
        held = [chain for table in tables.values() for chain in table["chains"] if server["number"] in chain]
        known = watch.tables().values()
        return {
            **{name: server[name] for name in ("number", "worker", "alive", "leaving")},
            **{name: int(about[name]) for name in ("memory", "connections")},
            "lag": about["lag"],
            "cpu": round(watch.cpu(), 4),
            "host": watch.host,
            "starved": round(watch.starved(), 4),
            **_rates(rates),
            "busy": round(watch.busy(), 4),
            "queue": round(watch.queue(), 3),
            "queue_worst": worst,
            "queue_bytes": waiting,
            "wait": round(watch.queue() * rates.service, 6),  # of those that wait, each takes the mean time
            "untaken": untaken,
            "unconfirmed": int(about["unconfirmed"][0]),
            "behind": round(about["unconfirmed"][2], 6),
            "rows": int(sum(table["rows"] for table in known)),
            "bytes": int(sum(table["bytes"] for table in known)),
            "shards": sum(chain[0] == server["number"] for chain in held),
            "copies": sum(chain[0] != server["number"] for chain in held),
        }

    def _about_table(self, table: dict[str, Any]) -> dict[str, Any]:
        spec = table["spec"]
        number, load = spec["id"], [0.0] * spec["shards"]
        rows = nbytes = 0
        rates: list[Rates] = []
        for watch in self._servers.values():
            about = watch.tables().get(number)
            if about is None:
                continue
            rows, nbytes = rows + about["rows"], nbytes + about["bytes"]
            rates.append(watch.rates([number]))
            for shard, keys in watch.loads(number).items():
                if shard < len(load):
                    load[shard] += keys
        return {
            "rows": int(rows),
            "bytes": int(nbytes),
            "dim": spec["dim"],
            "dtype": spec["dtype"],
            "optimizer": spec["optimizer"]["name"],
            "shards": spec["shards"],
            "copies": spec["copies"],
            **_rates(_together(rates)),
            "owner": table["owners"],
            "load": [round(keys, 1) for keys in load],
            "held": [list(chain) for chain in table["chains"]],
        }

    def _throughput(self) -> dict[str, list[float]]:
        """Of all servers, in the last minutes."""
        return {name: [point[i] for point in self._curve] for i, name in enumerate(COLUMNS)}


def history_json(about: dict[str, Any]) -> str:
    """A history as JSON: trainer by trainer, for whoever writes JSON stops all other threads meanwhile."""
    trainers = ",".join(json.dumps(plain(trainer)) for trainer in about["trainers"])
    rest = json.dumps({name: value for name, value in about.items() if name != "trainers"})
    return f'{rest[:-1]}, "trainers": [{trainers}]}}'


def _together(rates: list[Rates]) -> Rates:
    """Of several servers: sums, and the slowest quantiles."""
    if not rates:
        return Rates()
    requests, keys, nbytes, p50, p99, service = zip(*rates, strict=True)
    return Rates(sum(requests), sum(keys), sum(nbytes), max(p50), max(p99), max(service))


def _rates(rates: Rates) -> dict[str, float]:
    about = {"requests_rate": rates.requests, "keys_rate": rates.keys, "bytes_rate": rates.bytes}
    return {name: round(value, 2) for name, value in about.items()} | {"p50": rates.p50, "p99": rates.p99}


def _waiting(run: Any) -> dict[int, float]:
    """Since when each trainer that waits does."""
    return {n: waiting.since for n, waiting in (*run.ticking.items(), *run.meeting.items())}


def _counts(run: Any) -> bool:
    """Whether it is one of those that are kept: not one that ended well and had no work, where parties only met."""
    return run.watch is None or run.watch.worked or _state(run) == "failed"


def _number(run: Any) -> int:
    return int(run.number)


def _state(run: Any) -> str:
    return "failed" if run.stopped is not None and not run.ended else "finished" if run.over else "running"


def _title(finding: Finding) -> str:
    if finding.host is not None:
        return f"machine {finding.host} is overloaded"
    who = f"server {finding.server}" if finding.trainer is None else f"trainer {finding.trainer}"
    return f"{who} is slow ({finding.kind})" if finding.kind != "dead" else f"{who} is not heard of"
