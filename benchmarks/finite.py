"""What `finite=True` costs a push: processor time of client and server together, beside a table with `finite=False`.

Client and server run in one process, so that its processor time is that of both: of the client's check, which comes
before anything is sent, and of the server's, which trusts no client. Other programs lengthen a push, but not the
processor time that it takes, so the measure holds on a busy machine. The two tables take turns A B A B; of each turn
the ratio is taken, because the machine's speed differs from turn to turn, and the median of these ratios is judged.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import dps
from benchmarks.common import Report, interleave, parser
from dps.engine.core.shards.rows import all_finite

ROUNDS, DIM = 21, 16
PUSHES = {1_000: 300, 100_000: 20}  # keys of a push: pushes of a turn


def spent(client: dps.Client, table: str, keys: np.ndarray, values: np.ndarray, pushes: int) -> float:
    """Seconds of processor time of one push, of all threads of this process."""
    began = time.process_time()
    for _ in range(pushes):
        client.push(table, keys, values)
    return (time.process_time() - began) / pushes


def turns(client: dps.Client, keys: np.ndarray, values: np.ndarray, pushes: int, rounds: int) -> np.ndarray:
    """Seconds of a push [round, (unchecked, checked)]; the tables take turns in being the first of a round."""
    found = np.empty((rounds + 1, 2))
    for turn in range(rounds + 1):
        for checked in (False, True) if turn % 2 else (True, False):
            found[turn, int(checked)] = spent(client, str(checked), keys, values, pushes)
    return found[1:]  # the first one brings the rows to life


def rows(report: Report, client: dps.Client, size: int, pushes: int, rounds: int) -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.permutation(size), rng.normal(size=(size, DIM)).astype(np.float32)
    found = turns(client, keys, values, pushes, rounds)
    unchecked, checked = np.median(found, axis=0)
    what = f"push of {size:,} x {DIM}"
    report.duration(f"{what}, processor time", checked, "finite=False", unchecked)
    ratio = statistics.median(found[:, 1] / found[:, 0])
    report.add(f"{what}, over finite=False (median of the rounds)", ratio, "times", reach="<= 1.02 times")
    alone = interleave({"once": lambda: all_finite(values)}, rounds, turn=0.01)
    report.duration(f"{what}: one check alone (it is done twice)", alone["once"], "the push", checked)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    rounds = 3 if args.quick else ROUNDS
    with (
        Report("what finite=True costs a push", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        for finite in (False, True):
            ps.table(str(finite), dim=DIM, optimizer=dps.SGD(0.1), finite=finite)
        client = ps.client()
        for size, pushes in PUSHES.items():
            rows(report, client, size, pushes, rounds)


if __name__ == "__main__":
    from benchmarks.finite import main as run  # so that workers find our functions by name

    run()
