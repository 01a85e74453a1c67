"""The longest wait of another client's pull while a server does something large: deletes, grows, is cut, drops a table.

One server, or two with copies, and two tables: a large keyed one, and a small one. A process of its own pulls one key
of the small table and one of the large one, in turns, about a thousand times a second, while the driver asks for one
large thing after the other. Each row is the longest of these pulls during one thing. Where the system allows it, that
process and the servers run at a higher priority than other programs, because else a row measures those, too. The first
row says what is left of that, while nothing large goes on.

A server that is silent for as long as `dps.timeouts.silence` would be taken for dead, so failovers are counted.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser

LARGE, SMALL, DENSE = "large", "small", "dense"
DIM, SHARDS, BATCH = 4, 4, 10_000
QUIET_SECONDS = 5.0  # for the first row
REST_SECONDS = 0.3  # after each thing, so that what it leaves to be done counts, too
REACH = "<= 20 ms"
PROBED_KEY = 1  # of both tables; no thing deletes it but `clear`
PAUSE_SECONDS = 0.0005  # between two pulls, so that the other client takes no core from the servers
PRIORITY = -15  # of 20 to -20, as `nice` counts
HEAR_SECONDS = 600.0


@dps.function(changes=True)
def halve(rows: Any) -> None:
    """A large effect: all rows."""
    rows.values *= 0.5


def is_cold(rows: Any) -> np.ndarray:
    """Two of three rows."""
    return rows.keys % 3 != PROBED_KEY  # type: ignore[no-any-return]


def prefer(process: int) -> bool:
    """Run all threads of a process at a higher priority than other programs; whether the system allows it."""
    try:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), PRIORITY)
    except OSError:
        return False
    return True


def probe(ticket: Any, commands: Connection) -> None:
    """The other client's process: pull until the next word comes, then say how long the longest pulls were."""
    client = dps.Client(ticket)
    tables: tuple[str, ...] = ()
    try:
        gc.disable()
        prefer(os.getpid())
        while (tables := commands.recv()) is not None:
            longest = dict.fromkeys(tables, 0.0)
            for table in tables:
                client.pull(table, [PROBED_KEY])
            commands.send(None)
            while not commands.poll():
                for table in tables:
                    began = time.perf_counter()
                    client.pull(table, [PROBED_KEY])
                    longest[table] = max(longest[table], time.perf_counter() - began)
                time.sleep(PAUSE_SECONDS)
            commands.recv()
            commands.send(longest)
    except BaseException as error:
        commands.send(error)
        raise
    finally:
        client.close()


class Probe:
    """The other client."""

    def __init__(self, ticket: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=probe, args=(ticket, theirs), daemon=True)
        self._process.start()

    def during(self, thing: Callable[[], Any], *tables: str) -> tuple[dict[str, float], float, Any]:
        """(seconds of the longest pull of each table, seconds that the thing took, its result)."""
        self._pipe.send(tables)
        self._hear()
        began = time.perf_counter()
        result = thing()
        seconds = time.perf_counter() - began
        time.sleep(REST_SECONDS)
        self._pipe.send(None)
        return self._hear(), seconds, result

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _hear(self) -> Any:
        found = self._pipe.recv() if self._pipe.poll(HEAR_SECONDS) else TimeoutError("the other client does not answer")
        if isinstance(found, BaseException):
            raise found
        return found


class Bench:
    """The tables of one parameter server, and what is done to them."""

    def __init__(self, report: Report, ps: Any, rows: int, copies: int):
        self.report, self.ps, self.rows, self.copies = report, ps, rows, copies
        self.case = f"{rows:,} rows x {DIM}, copies={copies}"
        ps.table(SMALL, copies=copies).push([PROBED_KEY], [1.0])
        self.probe = Probe(ps.ticket)

    def tell(self, what: str, thing: Callable[[], Any], *tables: str) -> Any:
        """Do a thing; the rows that say how long the other client waited."""
        longest, seconds, result = self.probe.during(thing, *tables)
        for table, wait in longest.items():
            case = f"{self.case}: {what}, pulls of the {table} table"
            self.report.add(case, wait * 1e3, "ms", reach=REACH)
        self.report.note(f"{what}: {seconds:.2f} s")
        return result

    def make(self) -> None:
        """A new large table, without rows but the one that is pulled."""
        self.ps.table(LARGE, dim=DIM, shards=SHARDS, copies=self.copies).push([PROBED_KEY], np.ones((1, DIM)))

    def fill(self, batch: int) -> None:
        values = np.ones((batch, DIM), np.float32)
        for first in range(0, self.rows, batch):
            count = min(batch, self.rows - first)
            self.ps.client().push(LARGE, np.arange(first, first + count), values[:count])

    def tell_held(self, what: str) -> None:
        """Bytes that the servers hold for the large table, and those without rows, over its rows' bytes when full."""
        held, full = [server.tables[LARGE] for server in self.ps.status().servers], self.rows * DIM * 4
        for name, nbytes in ("held", sum(each.bytes for each in held)), ("kept", sum(each.kept for each in held)):
            self.report.add(f"{self.case}: memory {name} after {what}", nbytes / full, "of the full rows")

    def run(self, folder: Path) -> None:
        """All things, one after the other."""
        both, client = (SMALL, LARGE), self.ps.client()
        self.make()
        self.tell("nothing", lambda: time.sleep(QUIET_SECONDS), *both)
        self.tell(f"growth by pushes of {BATCH:,} new keys", lambda: self.fill(BATCH), *both)
        self.tell("a function that changes all rows", lambda: self.ps.call(halve, LARGE), *both)
        for kind in ("first", "second, incremental,"):
            url = str(folder / LARGE)
            self.tell(f"the {kind} checkpoint", lambda url=url: self.ps.checkpoint(url, incremental=True), *both)
        keys = np.arange(2, self.rows // 10, 1)
        keys = keys[keys % 3 != PROBED_KEY]
        self.tell(f"delete of {len(keys):,} keys", lambda: client.delete(LARGE, keys), *both)
        count = self.tell("delete_where, 2 of 3 rows", lambda: self.ps.delete_where(LARGE, is_cold), *both)
        self.report.note(f"{count:,} rows deleted, {len(self.ps.tables()[LARGE]):,} are left")
        self.tell_held("delete_where")
        self.tell("clear", lambda: client.clear(LARGE), *both)
        self.tell_held("clear")
        self.tell(f"growth by pushes of {100 * BATCH:,} new keys", lambda: self.fill(100 * BATCH), *both)
        self.tell("drop of the table", lambda: self.ps.drop_table(LARGE), SMALL)
        self.tell("a dense table, made with random rows", self.make_dense, SMALL)
        self.tell("a function that changes all rows, dense", lambda: self.ps.call(halve, DENSE), SMALL, DENSE)
        self.tell("delete_where, 2 of 3 rows, dense", lambda: self.ps.delete_where(DENSE, is_cold), SMALL, DENSE)
        self.tell("drop of the dense table", lambda: self.ps.drop_table(DENSE), SMALL)
        events = [text for _, text in self.ps.status().events if "lost" in text or "silent" in text]
        self.report.add(f"{self.case}: failovers", len(events), "failovers", reach="<= 0 failovers")

    def make_dense(self) -> None:
        self.ps.table(DENSE, rows=self.rows, dim=DIM, shards=SHARDS, copies=self.copies, init=dps.Normal(0.01, seed=7))


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    rows = 300_000 if options.quick else 10_000_000
    with Report("pauses", options.json) as report:
        for copies in (1, 2):
            with (
                tempfile.TemporaryDirectory(prefix="bench-pauses-") as folder,
                dps.LocalCluster(servers=copies, trainers=1) as cluster,
                Client(cluster) as client,
                dps.ParameterServer(client, servers=copies) as ps,
            ):
                processes = client.run(os.getpid, workers=[server.worker for server in ps.status().servers])
                preferred = [prefer(process) for process in processes.values()]
                report.note(f"priority raised: {all(preferred)}")
                made = Bench(report, ps, rows, copies)
                try:
                    made.run(Path(folder))
                finally:
                    made.probe.close()


if __name__ == "__main__":
    from benchmarks.pauses import main as run  # so that processes find our functions by name

    run()
