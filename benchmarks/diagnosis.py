"""A delay of 50 ms, put into one place of a run that goes well: is it seen in the right bar, and called by its name?

Two servers and three trainers are processes of their own. An iteration pulls, computes (sleeps) 20 ms, pushes and
ticks, staleness 4. After five seconds one of these begins:

* *compute*, *pull*, *push*: 50 ms more for trainer 0, in its own code, or before it reads each server's answer;
* *server*: server 0 takes 50 ms longer for each request;
* *twice as slow*: trainer 0 sleeps 40 ms for good.

And a machine that is overloaded: the trainers, all equal, compute 20 ms of a processor's time an iteration, while busy
loops, three for each processor, run on the same processors. No finding may advise to move or retire anything.
``--busy`` does this part alone.

Looked at through what the pages and reports are made of. *Seen*: seconds until in one report the right bar has become
longer by what was put in, within 10 %, and no other bar has (of what an iteration takes longer, 90 to 110 % is there).
*Named*: until a finding of the right kind names the right party. Medians of the rounds.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask
import msgspec
import numpy as np
from distributed import Client
from distributed.worker import Worker

import dps
from benchmarks.common import Report, parser
from dps.engine.telemetry.run_history import RunHistory
from dps.engine.telemetry.snapshot import RunPhase, RunStatus, Status
from dps.engine.wire import frames

STEP, DELAY, TRAINERS, SERVERS = 0.02, 0.05, 3, 2
BEFORE, WITHIN = 6.0, 20.0
LOOPS, BUSY = 3, 25.0  # busy loops a processor; seconds
MOVING = ("retire", "move ", "another machine", "another one")  # what no remedy may say meanwhile
STOP, CODES = 9, {1: "compute", 2: "pull", 3: "push", 4: "slow"}
KINDS = {
    "compute": ("transient", "permanent"),
    "pull": ("network",),
    "push": ("network",),
    "server": ("server",),
    "slow": ("permanent",),
}


@contextlib.contextmanager
def late(trainer: dps.Trainer, active: bool) -> Iterator[None]:
    """Answers of servers are read 50 ms late, as if they had been on their way for so long."""
    if not active:
        yield
        return
    reads = {channel: channel.read_until for channel in trainer.client.session._channels.values()}
    slept = []

    def slowly(channel: Any, read: Callable[..., None]) -> Callable[..., None]:
        def read_late(request: Any, deadline: float) -> None:
            read(request, deadline)
            if not slept:
                slept.append(True)
                began = time.monotonic()
                time.sleep(DELAY)
                channel.traffic.blocked += time.monotonic() - began

        return read_late

    for channel, read in reads.items():
        channel.read_until = slowly(channel, read)
    try:
        yield
    finally:
        for channel in reads:
            del channel.read_until


def train(trainer: dps.Trainer, parts: list) -> dict[str, float]:
    """Iterate until told to stop; what is to be slow is in a table, looked at now and then."""
    keys = np.random.default_rng(trainer.number).integers(0, 1 << 30, 2000)
    code, looked = 0, 0.0
    while code != STOP:
        if time.monotonic() - looked > 0.2:
            looked, code = time.monotonic(), int(trainer.pull("what", [0])[0])
        mine = CODES.get(code, "") if trainer.number == 0 else ""
        with late(trainer, mine == "pull"):
            trainer.pull("w", keys)
        time.sleep(STEP + DELAY * (mine == "compute") + STEP * (mine == "slow"))
        with late(trainer, mine == "push"):
            trainer.push("w", keys, 1.0)
        trainer.tick()
    return trainer.time_spent()


def compute(trainer: dps.Trainer, parts: list) -> None:
    """Iterate until told to stop: a pull, 20 ms of a processor's time, a push."""
    keys = np.random.default_rng(trainer.number).integers(0, 1 << 30, 2000)
    while trainer.pull("what", [0])[0] != STOP:
        trainer.pull("w", keys)
        until = time.thread_time() + STEP
        while time.thread_time() < until:
            pass
        trainer.push("w", keys, 1.0)
        trainer.tick()


@contextlib.contextmanager
def busy_loops(count: int, seconds: float) -> Iterator[None]:
    """Programs that do nothing but run; they end by themselves, too."""
    program = f"import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def running(ps: dps.ParameterServer) -> RunStatus | None:
    """The run that goes on, without asking the servers."""
    status = msgspec.msgpack.decode(ps.connection.call("snapshot"), type=Status)
    return next((run for run in status.runs if run.state is RunPhase.RUNNING), None)


class Watched:
    """What was named while a run went on, look by look."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, frozenset[str], frozenset[str]]] = []  # time, named (with kind), remedies

    def look(self, ps: dps.ParameterServer) -> frozenset[str]:
        run = running(ps)
        stragglers = run.stragglers if run is not None else ()
        subjects = ((f.kind, f.trainer, f.server, f.host) for f in stragglers)
        named = frozenset(" ".join(str(part) for part in parts if part is not None) for parts in subjects)
        self.samples.append((time.monotonic(), named, frozenset(f.remedy for f in stragglers)))
        return named

    def advice(self) -> set[str]:
        """The remedies that would have moved something."""
        told = {remedy for _, _, remedies in self.samples for remedy in remedies}
        return {remedy for remedy in told if any(words in remedy for words in MOVING)}

    def changes(self) -> int:
        """How often a finding came or went, those apart that are only for a moment."""
        lasting = [{name for name in named if not name.startswith("transient")} for _, named, _ in self.samples]
        return sum(len(before ^ after) for before, after in itertools.pairwise(lasting))

    def counts(self) -> str:
        """Looks in which each was named, of all."""
        counted = collections.Counter(name for _, named, _ in self.samples for name in named)
        return ", ".join(f"{name}: {count} of {len(self.samples)}" for name, count in counted.most_common()) or "none"


def one_busy(ps: dps.ParameterServer, seconds: float) -> tuple[Watched, float | None]:
    """What is named while busy loops run, and after how many seconds the machine is."""
    told, watched = ps.client(), Watched()
    told.assign("what", [0], 0)
    data = [dask.delayed(n) for n in range(TRAINERS)]
    thread = threading.Thread(target=lambda: ps.run(compute, data, staleness=4, progress=False))
    thread.start()
    named = None
    try:
        time.sleep(BEFORE)
        with busy_loops(LOOPS * (os.cpu_count() or 1), seconds + 30):
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                if any(name.startswith("overloaded") for name in watched.look(ps)) and named is None:
                    named = time.monotonic() - began
                time.sleep(0.5)
    finally:
        told.assign("what", [0], STOP)
        thread.join(120)
    return watched, named


def report_busy(report: Report, ps: dps.ParameterServer, rounds: int, seconds: float) -> None:
    """The rows of the overloaded machine."""
    found = [one_busy(ps, seconds) for _ in range(rounds)]
    report.add("host overloaded: named", statistics.median(WITHIN if n is None else n for _, n in found), "s")
    advice = sum(bool(watched.advice()) for watched, _ in found)
    report.add("host overloaded: rounds with advice to move", advice, "rounds", reach="<= 0 rounds")
    changes = max(watched.changes() for watched, _ in found)
    report.add("host overloaded: findings that came or went, worst", changes, "times", reach="<= 4 times")
    for watched, _ in found:
        report.note(f"host overloaded: named in samples: {watched.counts()}")
        for remedy in watched.advice():
            report.note(f"host overloaded: advised: {remedy}")


def slow_server(on: bool, dask_worker: Worker) -> None:
    """Put 50 ms before each request of the server that lives on this worker, or take them away."""
    for actor in dask_worker.state.actors.values():
        role = actor.role
        if on:
            actor.fast = dict(role.endpoint.handlers)
            role.endpoint.service = None  # so that all frames go to the handlers
            for kind in (frames.PULL, frames.PUSH):

                def handle(*args: Any, usual: Any = actor.fast[kind]) -> None:
                    time.sleep(DELAY)
                    usual(*args)

                role.endpoint.handlers[kind] = handle
        else:
            role.endpoint.handlers.update(actor.fast)
            role.endpoint.service = role.service


def bars(what: str) -> tuple[str, ...]:
    """Where the delay should be seen."""
    return ("pull", "push") if what == "server" else ("compute" if what == "slow" else what,)


def spent(ps: dps.ParameterServer, what: str, last: int) -> tuple[float, float]:
    """Seconds that the right bars, and all work (waiting left out), take of an iteration: of trainer 0 (of all, for a
    server), in the last reports."""
    found = []
    history = msgspec.msgpack.decode(ps.connection.call("history", run=0), type=RunHistory)
    for told in history.trainers[: None if what == "server" else 1]:
        rows = {name: sum(column[-last:]) for name, column in told.rows.items()}
        if rows["clocks"]:
            work = rows["total"] - rows["wait"]
            found.append((sum(rows[bar] for bar in bars(what)) / rows["clocks"], work / rows["clocks"]))
    return (0.0, 0.0) if not found else (statistics.fmean(x for x, _ in found), statistics.fmean(x for _, x in found))


def in_its_bar(what: str, usual: tuple[float, float], now: tuple[float, float]) -> bool:
    """Of what an iteration takes longer, 90 to 110 % is in the right bar; and it is what was put in, within 10 %. (A
    server that sleeps keeps all others waiting as well, for a time that is no parameter here.)"""
    bar, work = now[0] - usual[0], now[1] - usual[1]
    put = STEP if what == "slow" else DELAY
    right = bar > 0.9 * put if what == "server" else abs(bar - put) < 0.1 * put
    return right and abs(bar - work) < 0.1 * work


def one(ps: dps.ParameterServer, client: Client, what: str) -> tuple[float | None, float | None, str]:
    """(seconds until seen, until named, what was named) of one delay; None: not within the time."""
    told = ps.client()
    told.assign("what", [0], 0)

    error: list[BaseException] = []

    def snapshot() -> RunStatus:
        if error:
            raise error[0]
        run = running(ps)
        assert run is not None, "the run is over"
        return run

    def work() -> None:
        try:
            ps.run(train, [dask.delayed(n) for n in range(TRAINERS)], staleness=4, progress=False)
        except BaseException as failure:
            error.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(BEFORE)
        snapshot()
        usual = spent(ps, what, 12)
        servers = [s.worker for s in ps.status().servers if s.number == 0]
        began = time.monotonic()
        if what == "server":
            client.run(slow_server, True, workers=servers)
        else:
            told.assign("what", [0], next(code for code, name in CODES.items() if name == what))
        seen = named = None
        wrong = ""
        while time.monotonic() - began < WITHIN and (seen is None or named is None) and not error:
            run, latest = snapshot(), spent(ps, what, 1)
            now = time.monotonic() - began
            if seen is None and in_its_bar(what, usual, latest):
                seen = now
            for finding in run.stragglers:
                right = finding.server == 0 if what == "server" else finding.trainer == 0
                if right and finding.kind in KINDS[what]:
                    named = now if named is None else named
                elif f"{finding.kind} {finding.trainer}" not in wrong:
                    wrong += f" {finding.kind} {finding.trainer}"
            time.sleep(0.05)
        if what == "server":
            client.run(slow_server, False, workers=servers)
    finally:
        told.assign("what", [0], STOP)
        thread.join(60)
    if error:
        raise error[0]
    return seen, named, wrong


def main(argv: list[str] | None = None) -> None:
    known = parser(__doc__)
    known.add_argument("--busy", action="store_true", help="the overloaded machine alone")
    options = known.parse_args(argv)
    rounds = 1 if options.quick else 5
    with (
        Report("diagnosis", options.json) as report,
        dps.LocalCluster(servers=SERVERS, trainers=TRAINERS, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=SERVERS) as ps,
    ):
        ps.table("w")
        ps.table("what", rows=1, dtype="int64")
        report_busy(report, ps, rounds, 10.0 if options.quick else BUSY)
        if options.busy:
            return
        found: dict[str, list] = {what: [] for what in KINDS}
        for _ in range(rounds):
            for what in KINDS:
                found[what].append(one(ps, client, what))
        for what, rows in found.items():
            seen = [row[0] if row[0] is not None else WITHIN for row in rows]
            named = [row[1] if row[1] is not None else WITHIN for row in rows]
            delay = "twice as slow for good" if what == "slow" else f"50 ms in {what}"
            report.add(f"{delay}: seen in the right bar", statistics.median(seen), "s", reach="<= 2 s")
            report.add(f"{delay}: worst", max(seen), "s")
            reach = "<= 10 s" if what == "slow" else "<= 2 s"
            report.add(f"{delay}: {' or '.join(KINDS[what])} named", statistics.median(named), "s", reach=reach)
            report.add(f"{delay}: worst", max(named), "s")
            if others := sorted({row[2].strip() for row in rows} - {""}):
                report.note(f"{what}: also named meanwhile (kind, trainer): {'; '.join(others)}")


if __name__ == "__main__":
    main()
