"""How long trainers wait when a primary is killed, stopped or cut off; and whether what was acknowledged counts once.

Scheduler, servers (workers with nannies) and two trainers are processes of their own. The trainers push ones to a table
of int64, two copies, `ack="copies"`, as fast as they can; every push touches every shard. Times count from the signal:

* *served*: until a trainer's push that was on its way when another server took over is acknowledged;
* *detection*: until the controller notes the loss; *takeover*: until it gives out the new route;
* *whole*: until all chains are full again. A killed server's nanny starts another worker meanwhile.

At the end of each part the table must be the sum of what was acknowledged.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import (
    HOST,
    Machines,
    Namespace,
    machines,
    primaries,
    server_pid,
    wait_for,
    whole,
)
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.partition import group
from dps.errors import MovedError, ServerGoneError

TABLE, TRAINERS, SERVERS = "count", 2, 3
BATCHES, KEYS, SPACE = 16, 128, 1 << 40
KILLS, STOPS, CUTS = 50, 10, 3
TICK = 100  # pushes between two ticks
QUIET = 1.0  # seconds of undisturbed load before each fault
PARTS = ("kill", "stop", "cut")


class Round(NamedTuple):
    """What became of one fault: the moment, and the seconds from there on."""

    moment: float
    detection: float
    takeover: float
    whole: float


# -- the load


def batches(shards: int) -> list[np.ndarray]:
    """Batches of distinct keys, each with some in every shard."""
    rng, found = np.random.default_rng(0), []
    while len(found) < BATCHES:
        keys = np.unique(rng.integers(0, SPACE, KEYS))
        if (np.diff(group(keys, ShardMap(0, shards), TABLE).starts) > 0).all():
            found.append(keys)
    return found


def push_for_ever(
    ticket: dps.engine.client.client.Ticket, run: int, number: int, shards: int, commands: Connection
) -> None:
    """A trainer's process: push until told to stop; gives back how often each batch was acknowledged, and when."""
    try:
        trainer = dps.Trainer.join(ticket, run, number)
        mine, counts = batches(shards), np.zeros(BATCHES, np.int64)
        began, ended = array("d"), array("d")
        trainer.push(TABLE, mine[0], 0)
        commands.send(None)
        while not commands.poll():
            batch = len(began) % BATCHES
            began.append(time.monotonic())
            trainer.push(TABLE, mine[batch], 1)
            ended.append(time.monotonic())
            counts[batch] += 1
            if len(began) % TICK == 0:
                trainer.tick()
        trainer.leave()
        commands.send((counts, np.array(began), np.array(ended)))
    except BaseException as error:
        commands.send(error)
        raise


class Load:
    """The trainers' processes; afterwards, when each push began and ended, and what the table should hold."""

    def __init__(self, ps: dps.ParameterServer, shards: int):
        self._batches = batches(shards)
        self.expected: dict[int, int] = {}
        self.times: list[tuple[np.ndarray, np.ndarray]] = []
        context = multiprocessing.get_context("spawn")
        run = ps.connection.call("start_run", trainers=TRAINERS, staleness=None)
        self._trainers = []
        for number in range(TRAINERS):
            ours, theirs = context.Pipe()
            args = (ps.ticket, run, number, shards, theirs)
            process = context.Process(target=push_for_ever, args=args, daemon=True)
            process.start()
            self._trainers.append((process, ours))
        for trainer in self._trainers:
            self._hear(trainer)

    def acknowledged(self, keys: np.ndarray, times: int) -> None:
        """So often, ones were pushed to these keys."""
        for key in keys.tolist():
            self.expected[key] = self.expected.get(key, 0) + times

    def finish(self) -> None:
        """Stop pushing."""
        for _, pipe in self._trainers:
            pipe.send(None)
        for trainer in self._trainers:
            counts, began, ended = self._hear(trainer)
            self.times.append((began, ended))
            for keys, times in zip(self._batches, counts.tolist(), strict=True):
                self.acknowledged(keys, times)

    def close(self) -> None:
        for process, _ in self._trainers:
            process.kill()
            process.join()

    @staticmethod
    def _hear(trainer: tuple[Any, Connection]) -> Any:
        pipe = trainer[1]
        found = pipe.recv() if pipe.poll(120) else TimeoutError("a trainer does not answer")
        if isinstance(found, BaseException):
            raise found
        return found

    def served(self, one: Round) -> list[float]:
        """For each trainer, seconds until the push that was on its way at the takeover was acknowledged."""
        taken = one.moment + one.takeover
        return [float(ended[np.searchsorted(began, taken) - 1] - one.moment) for began, ended in self.times]

    def longest(self, first: float, last: float) -> float:
        """Seconds of the longest push that began between two moments."""
        edges = [np.searchsorted(began, [first, last]) for began, _ in self.times]
        return max(
            float(np.max((ended - began)[a:b], initial=0.0))
            for (began, ended), (a, b) in zip(self.times, edges, strict=True)
        )

    def rate(self, first: float, last: float) -> float:
        """Pushes a second of all trainers between two moments."""
        return sum(np.diff(np.searchsorted(ended, [first, last]))[0] for _, ended in self.times) / (last - first)


# -- the faults


class Bench:
    """A cluster under load, and its servers as targets."""

    def __init__(self, cluster: Machines, client: Client, ps: dps.ParameterServer, seed: int):
        self.cluster, self.client, self.ps = cluster, client, ps
        self.random = random.Random(seed)
        self.asked = self.refused = 0  # requests by an old route; answers that were refusals
        self.shards = ps.table(TABLE, dtype="int64", copies=2).spec.shards
        self.eye = dps.Client(ps.ticket)  # looks at the route
        self.load = Load(ps, self.shards)
        self.await_whole()

    def await_whole(self) -> None:
        wait_for("all servers and replicas", lambda: whole(self.ps, SERVERS), pause=0.05)

    def choose(self, host: str = "") -> tuple[int, int] | None:
        """A primary (on that host), and its process, if there is one."""
        workers = {s.number: s.worker for s in self.ps.connection.describe().servers if s.alive}
        leading = [n for n in sorted(primaries(self.ps, TABLE)) if host in workers.get(n, "")]
        if not leading:
            return None
        victim = self.random.choice(leading)
        return victim, server_pid(self.client, workers[victim])

    def replaced(self, victim: int) -> bool:
        """Whether the route that clients are given goes past a server."""
        self.eye.session.fetch_route()
        return all(owner != victim for owner, _, _ in self.eye.session._tables[TABLE].runs)

    def strike(self, victim: int, blow: Callable[[], Any]) -> tuple[float, float, float]:
        """Let it happen; (moment, seconds until it was noted, until another has taken over)."""
        time.sleep(QUIET + self.random.uniform(0.0, 0.5))
        wall, moment = time.time(), time.monotonic()
        blow()
        wait_for("takeover", lambda: self.replaced(victim), pause=0.001)
        takeover = time.monotonic() - moment
        events = self.ps.status().events
        noted = [at for at, text in events if at >= wall and text.startswith(f"server {victim} ")]
        return moment, (noted[0] - wall if noted else takeover), takeover

    def kill(self) -> Round:
        victim, pid = wait_for("primary", self.choose)
        moment, detection, takeover = self.strike(victim, lambda: os.kill(pid, signal.SIGKILL))
        wait_for("replacement", lambda: whole(self.ps, SERVERS), pause=0.02)
        return Round(moment, detection, takeover, time.monotonic() - moment)

    def silence(self, victim: int, begin: Callable[[], Any], end: Callable[[], Any]) -> Round:
        """Stop or cut off a server, and ask it something by the old route: it is to refuse when it is back."""
        stale = dps.Client(self.ps.ticket)
        keys = self.keys_of(victim, stale)
        stale.pull(TABLE, keys)
        asked: list[Any] = []

        def blow() -> None:
            begin()
            asked.extend([stale.push_async(TABLE, keys, 1), stale.pull_async(TABLE, keys)])

        moment, detection, takeover = self.strike(victim, blow)
        end()
        for request in [request for pending in asked for call in pending.calls for request in call.requests]:
            self.asked += 1
            self.refused += self.refuses(request)
        asked[0].result()  # sent again, to the one that took over
        self.load.acknowledged(keys, 1)
        stale.close()
        self.await_whole()
        return Round(moment, detection, takeover, time.monotonic() - moment)

    @staticmethod
    def refuses(request: Any) -> bool:
        try:
            request.result(time.monotonic() + 30)
            return False
        except (MovedError, ServerGoneError):
            return True

    @staticmethod
    def keys_of(victim: int, client: dps.Client) -> np.ndarray:
        """Keys, outside the trainers' batches, of shards that one server leads."""
        keys = np.arange(SPACE, SPACE + 200)
        client.session.fetch_route()
        led = {n for owner, a, b in client.session._tables[TABLE].runs if owner == victim for n in range(a, b)}
        starts = group(keys, client.session._tables[TABLE].spec.shard_map, TABLE)
        inside = np.concatenate([starts.keys[starts.starts[n] : starts.starts[n + 1]] for n in sorted(led)])
        return np.sort(inside)

    def end(self) -> tuple[int, int]:
        """(lost, doubled): what the table lacks of what was acknowledged, and has too much."""
        time.sleep(QUIET)
        self.load.finish()
        keys = np.array(sorted(self.load.expected))
        wanted = np.array([self.load.expected[key] for key in keys.tolist()])
        more = dps.Client(self.ps.ticket).pull(TABLE, keys) - wanted
        rows = sum(
            (server.tables or {})[TABLE].rows for server in self.ps.status().servers if TABLE in (server.tables or {})
        )
        assert rows == len(keys), f"{rows} rows, of which {len(keys)} were pushed to"
        return int(-more[more < 0].sum()), int(more[more > 0].sum())


@contextlib.contextmanager
def bench(seed: int, spare: int = 1, namespace: Namespace | None = None) -> Iterator[Bench]:
    """Three servers, one of them in `namespace` if given, and a worker or more to spare."""
    host = HOST if namespace is None else namespace.ours
    with (
        machines(SERVERS + spare - (namespace is not None), host, namespace) as (cluster, client),
        dps.ParameterServer(client, servers=SERVERS) as ps,
    ):
        made = Bench(cluster, client, ps, seed)
        try:
            yield made
        finally:
            made.load.close()
            made.eye.close()


# -- the parts


def tell(report: Report, made: Bench, what: str, rounds: list[Round], median: str | None, worst: str | None) -> None:
    """The rows of one part."""
    lost, doubled = made.end()
    load = made.load
    served = [seconds for one in rounds for seconds in load.served(one)]
    count = f"{what}, {len(rounds)} times"
    report.add(f"{count}: served again, median of trainers", statistics.median(served), "s", reach=median)
    report.add(f"{count}: served again, worst", max(served), "s", reach=worst)
    for name in ("detection", "takeover", "whole"):
        values = [getattr(one, name) for one in rounds]
        report.add(f"{count}: {name}, median", statistics.median(values), "s")
        report.add(f"{count}: {name}, worst", max(values), "s")
    pushes = sum(len(began) for began, _ in made.load.times)
    report.add(f"{count}: pushes acknowledged", pushes, "pushes")
    report.add(f"{count}: lost", lost, "increments", reach="<= 0 increments")
    report.add(f"{count}: doubled", doubled, "increments", reach="<= 0 increments")
    back = [one.moment + max(load.served(one)) for one in rounds]
    before = statistics.median(load.rate(one.moment - QUIET, one.moment) for one in rounds)
    after = statistics.median(load.rate(moment, moment + QUIET) for moment in back)
    report.add(f"{count}: in the second after", after, "pushes/s", "in the second before", before)
    longest = max(load.longest(moment, one.moment + one.whole) for one, moment in zip(rounds, back, strict=True))
    report.add(f"{count}: longest push afterwards, while chains fill up", longest, "s")
    if made.asked:
        what = f"{count}: refused of what was asked by the old route"
        report.add(what, made.refused, "requests", "asked", made.asked, ">= 1 x")


def kills(report: Report, seed: int, count: int) -> None:
    with bench(seed) as made:
        rounds = [made.kill() for _ in range(count)]
        tell(report, made, "primary killed", rounds, "<= 0.5 s", "<= 2 s")


def suspend(pid: int) -> None:
    """Stop a process, and wait until it has stopped, because a server on another core answers sooner than that."""
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    wait_for("stopped process", lambda: status.read_text().rpartition(")")[2].split()[0] == "T", pause=0.0)


def stops(report: Report, seed: int, count: int) -> None:
    with bench(seed) as made:

        def stop() -> Round:
            victim, pid = wait_for("primary", made.choose)
            return made.silence(victim, lambda: suspend(pid), lambda: os.kill(pid, signal.SIGCONT))

        rounds = [stop() for _ in range(count)]
        tell(report, made, "primary stopped", rounds, None, "<= 5 s")


def cuts(report: Report, seed: int, count: int) -> None:
    problem = Namespace.problem()
    if problem is not None:
        report.note(f"primary cut off: left out: {problem}")
        return
    with contextlib.closing(Namespace()) as namespace, bench(seed, namespace=namespace) as made:

        def cut() -> Round:
            victim, _ = wait_for("primary in the namespace", lambda: made.choose(namespace.theirs))
            return made.silence(victim, namespace.cut, namespace.mend)

        rounds = [cut() for _ in range(count)]
        tell(report, made, "primary cut off", rounds, None, "<= 5 s")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=PARTS, help="only this one")
    options.add_argument("--seed", type=int, default=int(time.time()), help="of what is hit, and when")
    options.add_argument("--times", type=int, help="how often, instead of 50, 10 and 3 times")
    args = options.parse_args(argv)
    parts = {"kill": (kills, KILLS, 2), "stop": (stops, STOPS, 1), "cut": (cuts, CUTS, 1)}
    with Report(f"failover, seed {args.seed}", args.json) as report:
        for part, (function, times, quick) in parts.items():
            if args.part in (None, part):
                function(report, args.seed, args.times or (quick if args.quick else times))


if __name__ == "__main__":
    from benchmarks.failover import main as run  # so that processes find our functions by name

    run()
