"""Moves of shards: GB/s at rest and while a trainer pushes, what the pushes keep of their rate, and the longest push.

Scheduler, two servers and the trainer are processes of their own; this process only watches. A second server comes, so
that half of the shards move to it; then it is emptied, and they move back. Moves at rest and with pushes take turns,
and so do pushes with and without a move. The time of a move counts from the first joiner until all shards have arrived,
so the start of a server's process is no part of it, and the handover of each shard is.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import machines, server_pid, wait_for, whole

DIM, BATCH, FILL = 64, 1_000, 50_000
ROWS, QUICK_ROWS = 1_600_000, 100_000  # 410 MB of values
ROUNDS = 3  # each there and back
ALONE_SECONDS = 1.5  # of pushes without a move
HEAR_SECONDS = 120.0
TABLES: dict[str, dict[str, Any]] = {"keyed": {}, "dense": {"rows": ROWS}}


class Pushes(NamedTuple):
    """When each push of a turn began and ended."""

    began: np.ndarray
    ended: np.ndarray

    def rate(self, since: float, until: float) -> float:
        """Pushes a second that ended in this time."""
        return float(((self.ended > since) & (self.ended <= until)).sum()) / (until - since)

    def longest(self, since: float, until: float) -> float:
        """Seconds of the longest push that was under way in this time."""
        among = (self.ended > since) & (self.began < until)
        return float((self.ended - self.began)[among].max(initial=0.0))


def push_when_told(ticket: Any, table: str, rows: int, commands: Connection) -> None:
    """The trainer's process: one push after another, from each first word until the next."""
    client = dps.Client(ticket)
    rng, ones = np.random.default_rng(1), np.ones((BATCH, DIM), np.float32)
    batches = [np.sort(rng.choice(rows, BATCH, replace=False)) for _ in range(64)]
    try:
        gc.disable()
        while commands.recv():
            began, ended = [], []
            while not commands.poll():
                began.append(time.monotonic())
                client.push(table, batches[len(began) % len(batches)], ones)
                ended.append(time.monotonic())
            commands.recv()
            commands.send(Pushes(np.array(began), np.array(ended)))
    except BaseException as error:
        commands.send(error)
        raise
    finally:
        client.close()


class Trainer:
    """The process that pushes, and the words that it waits for."""

    def __init__(self, ps: dps.ParameterServer, table: str, rows: int):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=push_when_told, args=(ps.ticket, table, rows, theirs), daemon=True)
        self._process.start()

    def begin(self) -> None:
        self._pipe.send(True)

    def end(self) -> Pushes:
        self._pipe.send(True)
        found = self._pipe.recv() if self._pipe.poll(HEAR_SECONDS) else TimeoutError("the trainer does not answer")
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class Move(NamedTuple):
    """One move: its bytes, the moments of its begin and end, and the processor seconds of both servers meanwhile."""

    nbytes: int
    began: float
    ended: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.nbytes / 1e9 / (self.ended - self.began)


def moved(ps: dps.ParameterServer, servers: int) -> Move:
    """Have that many servers, and wait until the shards have arrived."""
    before = {server.number: server.bytes for server in ps.status().servers}
    pids: dict[int, psutil.Process] = {}

    def begins() -> bool:
        description = ps.connection.describe()
        for server in description.servers:
            if server.alive and server.number not in pids:
                pids[server.number] = psutil.Process(server_pid(ps.dask_client, server.worker))
        return any(joiner is not None for table in description.tables.values() for joiner in table.joiners)

    begins()
    ps.scale(servers)
    wait_for("move", begins, pause=0.003)
    processes = list(pids.values())
    began, cpu = time.monotonic(), _cpu(processes)
    wait_for("end of the move", lambda: _is_over(ps, servers), pause=0.05)
    ended, cpu = time.monotonic(), _cpu(processes) - cpu
    nbytes = min(before.values()) if servers == 1 else 0
    for _ in range(500):  # until a heartbeat has brought what the new server holds
        held = {server.number: server.bytes for server in ps.status().servers if server.alive}
        if len(held) == servers and (servers == 1 or min(held.values()) >= sum(before.values()) / 4):
            break
        time.sleep(0.02)
    return Move(nbytes or min(held.values()), began, ended, cpu)


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def _is_over(ps: dps.ParameterServer, servers: int) -> bool:
    description = ps.connection.describe()
    holders = {n for table in description.tables.values() for chain in table.chains for n in chain}
    single = all(len(chain) == table.spec["copies"] for table in description.tables.values() for chain in table.chains)
    return single and len(holders) == servers and whole(ps, servers)


def measure(report: Report, ps: dps.ParameterServer, kind: str, rows: int, rounds: int) -> None:
    """One table there and back, at rest and with pushes."""
    options = {**TABLES[kind], **({"rows": rows} if kind == "dense" else {})}
    table = ps.table("moved", dim=DIM, shards=8, optimizer=dps.Add(), **options)
    ones = np.ones((FILL, DIM), np.float32)
    for first in range(0, rows, FILL):
        table.push(np.arange(first, min(rows, first + FILL)), ones[: rows - first])
    trainer = Trainer(ps, "moved", rows)
    still: list[Move] = []
    loaded: list[Move] = []
    kept, longest, handed = [], [], []
    try:
        for turn in range(2 * rounds):
            servers = 1 if turn % 2 else 2
            still.append(moved(ps, servers))
            moved(ps, 3 - servers)
            trainer.begin()
            time.sleep(ALONE_SECONDS)
            move = moved(ps, servers)
            time.sleep(ALONE_SECONDS)
            until = time.monotonic()
            pushes = trainer.end()
            loaded.append(move)
            alone = [pushes.rate(move.began - ALONE_SECONDS, move.began), pushes.rate(until - ALONE_SECONDS, until)]
            kept.append(pushes.rate(move.began, move.ended) / statistics.mean(alone))
            longest.append(pushes.longest(move.began, move.ended))
            handed.append(pushes.longest(until - ALONE_SECONDS, until))
            print(
                f"   {kind}, {servers} servers: at rest {still[-1].rate:.2f} GB/s, {still[-1].cpu:.2f} s of CPU; "
                f"pushes {alone[0]:,.0f} and {alone[1]:,.0f}/s, {move.rate:.2f} GB/s, {move.cpu:.2f} s, "
                f"kept {kept[-1]:.2f} x, longest {1e3 * longest[-1]:.1f} ms (after it {1e3 * handed[-1]:.1f})",
                flush=True,
            )
    finally:
        trainer.close()
        ps.drop_table("moved")
    size = f"{kind}, {statistics.median(m.nbytes for m in still) / 1e6:,.0f} MB"
    cpu = statistics.median(m.cpu / m.nbytes * 1e9 for m in still)
    report.add(f"{size}: at rest", statistics.median(m.rate for m in still), "GB/s", reach=">= 0.6 GB/s")
    report.add("... CPU of both servers", cpu, "s/GB")
    what = f"... with pushes of {BATCH:,} x {DIM}"
    report.add(what, statistics.median(m.rate for m in loaded), "GB/s", reach=">= 0.3 GB/s")
    report.add("... the pushes keep of their rate", statistics.median(kept), "x", reach=">= 0.7")
    report.duration("... the longest of them, median of the moves", statistics.median(longest))
    report.add("... the longest of all", 1e3 * max(longest), "ms", "without a move", 1e3 * max(handed), "<= 10 ms")


def compare_copies(report: Report, ps: dps.ParameterServer, rows: int, rounds: int) -> None:
    """What pushes keep of their rate where each is passed on to a copy, as those of a shard that moves are: without a
    move. That is the most which pushes can keep during one, where the trainer and two servers have as many cores."""
    ps.scale(2)
    wait_for("two servers", lambda: sum(server.alive for server in ps.connection.describe().servers) == 2)
    rates: dict[int, list[float]] = {1: [], 2: []}
    trainers: dict[int, Trainer] = {}
    try:
        for copies in rates:
            table = ps.table(f"copies {copies}", dim=DIM, shards=8, optimizer=dps.Add(), copies=copies)
            for first in range(0, rows, FILL):
                table.push(np.arange(first, min(rows, first + FILL)), np.ones((min(FILL, rows - first), DIM)))
            trainers[copies] = Trainer(ps, f"copies {copies}", rows)
        for _ in range(rounds):
            for copies, trainer in trainers.items():
                trainer.begin()
                began = time.monotonic()
                time.sleep(ALONE_SECONDS)
                rates[copies].append(trainer.end().rate(began + 0.2, time.monotonic()))
    finally:
        for trainer in trainers.values():
            trainer.close()
        for copies in trainers:
            ps.drop_table(f"copies {copies}")
        ps.scale(1)
    kept = statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True))
    report.add("pushes to two copies keep of those to one, without a move", kept, "x")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--table", choices=tuple(TABLES), help="only this kind of table")
    options.add_argument("--rows", type=int, help=f"{ROWS:,} by default")
    options.add_argument("--rounds", type=int, help=f"{ROUNDS} by default; each there and back")
    args = options.parse_args(argv)
    with (
        Report("moves of shards between two servers, processes of their own", args.json) as report,
        machines(2) as (_, client),
        dps.ParameterServer(client, servers=1) as ps,
    ):
        for kind in TABLES if args.table is None else [args.table]:
            rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
            measure(report, ps, kind, rows, args.rounds or (1 if args.quick else ROUNDS))
        rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
        compare_copies(report, ps, rows // 2, args.rounds or (1 if args.quick else ROUNDS))


if __name__ == "__main__":
    from benchmarks.moves import main as run

    run()
