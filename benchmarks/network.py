"""What pulls, pushes and a click model take of a network: bytes first, which are free of noise, then seconds.

The server is in a network namespace of its own, behind a cable that lets 1 Gb/s through (`--gigabits` for others), as
much for these two cores as 10 to 25 Gb/s are for a machine of 16 to 48. Client, trainers and scheduler are on this side
of the cable. There is no way to make it long, too: this kernel cannot delay packets (tc-netem).

* *bytes a row*: of a pull and a push of one row together, both directions, by the counts of the network device. The
  *body* of these messages is a key there, a row back, a key and a row there: 144 bytes with dim 16, 24 with dim 1.
* *of the cable*: how much of what a plain socket gets through the same cable the pulls and pushes do.
* *click model*: examples a second in the second epoch (2^24 features, two trainers), beside the same with nothing in
  the way of the packets.

Needs Linux, root and tc; elsewhere it says what it left out.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import dask
import numpy as np
from distributed import Client

import dps
from benchmarks.click_model import ADAGRAD, BATCH, TRAINERS, Data, part, pull_model, train
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Machines, Namespace, machines, wait_for

GIGABITS = (1.0,)
ROWS = 10_000  # of a pull or push
ROUNDS, TURN_CALLS = 5, 20
PORT = 9876
CLICKS, FEATURES, EPOCHS, TEST_ROWS = 200_000, 1 << 24, 3, 20_000
REACHES = {1: "<= 12 bytes (a body; headers are more)", 16: "<= 72 bytes (a body; headers are more)"}
# A program that answers each 8 bytes with so many as they say, and takes as many after a negative number.
PEER = """
import socket, struct
server = socket.create_server(("{host}", {port}))
while True:
    line, _ = server.accept()
    block = memoryview(bytearray(1 << 20))
    while head := line.recv(8, socket.MSG_WAITALL):
        (left,) = struct.unpack("<q", head)
        while left > 0:
            left -= line.send(block[: min(left, len(block))])
        while left < 0:
            left += line.recv_into(block, min(-left, len(block)))
        line.sendall(b"done")
"""


@contextlib.contextmanager
def plain_socket(cable: Namespace) -> Iterator[socket.socket]:
    """A connection to a program on the other side."""
    program = PEER.format(host=cable.theirs, port=PORT)
    with subprocess.Popen([*cable.command(), sys.executable, "-c", program]) as peer:
        try:
            yield wait_for("plain socket", lambda: connected(cable.theirs))
        finally:
            peer.kill()


def connected(host: str) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection((host, PORT), timeout=PATIENCE)
    return None


def rates_of_plain_socket(cable: Namespace, nbytes: int) -> tuple[float, float]:
    """Bytes a second in, and out."""
    block = memoryview(bytearray(1 << 20))
    with plain_socket(cable) as line:
        rates = []
        for sign in (-1, 1):
            began = time.perf_counter()
            line.sendall((sign * nbytes).to_bytes(8, "little", signed=True))
            left = nbytes
            while left:
                size = min(left, len(block))
                left -= line.send(block[:size]) if sign < 0 else line.recv_into(block, size)
            line.recv(4, socket.MSG_WAITALL)
            rates.append(nbytes / (time.perf_counter() - began))
    return rates[0], rates[1]


def bytes_of(cable: Namespace, call: Callable[[], object], calls: int) -> float:
    """Bytes that a call sends through the cable, both directions."""
    before = sum(cable.traffic())
    for _ in range(calls):
        call()
    return (sum(cable.traffic()) - before) / calls


def measure_rows(report: Report, ps: dps.ParameterServer, cable: Namespace, gigabits: float, dim: int) -> None:
    """Pulls and pushes of rows of a keyed table."""
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 1 << 40, ROWS)
    values = draw.standard_normal((ROWS, dim)).astype(np.float32)
    where = f"{gigabits:g} Gb/s, dim {dim}"
    ps.table("rows", dim=dim)
    client = ps.client()

    def both() -> None:
        client.pull("rows", keys)
        client.push("rows", keys, values if dim > 1 else values[:, 0])

    try:
        both()
        taken = bytes_of(cable, both, TURN_CALLS) / ROWS
        report.add(f"{where}: a pull and a push", taken, "bytes a row", reach=REACHES[dim])
        inward, outward = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(TURN_CALLS):
                both()
            seconds = (time.perf_counter() - began) / TURN_CALLS
            inward.append(seconds)
            there, back = rates_of_plain_socket(cable, 1 << 24)
            outward.append((8 + 8 + 4 * dim) * ROWS / there + 4 * dim * ROWS / back)
        floor = ROWS / statistics.median(outward)
        rate = ROWS / statistics.median(inward)
        report.add(f"{where}: rows a second", rate, "rows/s", "the same bytes through a plain socket", floor)
    finally:
        ps.drop_table("rows")


def measure_clicks(
    report: Report, client: Client, ps: dps.ParameterServer, cable: Namespace, gigabits: float, rows: int
) -> None:
    """The click model, with and without a limit, turn by turn."""
    data = Data.make(rows, FEATURES, TEST_ROWS)
    each = rows // TRAINERS
    parts = list(client.persist([dask.delayed(part)(each, FEATURES, n * each) for n in range(TRAINERS)]))
    rates: dict[float | None, list[float]] = {None: [], gigabits: []}
    taken, losses = [], []
    for _ in range(ROUNDS if rows == CLICKS else 1):
        for limit, found in rates.items():
            cable.limit(limit)
            seconds, nbytes, loss = trained(ps, cable, parts, data)
            found.append(rows / seconds)
            taken.append(nbytes / (rows * EPOCHS))
            losses.append(loss)
    what = f"{gigabits:g} Gb/s, click model"
    report.add(f"{what}: traffic", statistics.median(taken), "bytes an example")
    free, limited = (statistics.median(found) for found in rates.values())
    report.add(f"{what}: examples a second", limited, "/s", "without a limit", free)
    report.add(f"{what}: held-out loss", statistics.median(losses), "")


def trained(ps: dps.ParameterServer, cable: Namespace, parts: list, data: Data) -> tuple[float, int, float]:
    """Train fresh tables: seconds of a later epoch, bytes through the cable in all epochs, held-out loss."""
    ps.table("w", optimizer=ADAGRAD[BATCH])
    ps.table("b", rows=1, optimizer=ADAGRAD[BATCH])
    try:
        before = sum(cable.traffic())
        results = ps.run(train, parts, staleness=1, args=(EPOCHS, BATCH), progress=False)
        nbytes = sum(cable.traffic()) - before
        ends = [max(times) for times in zip(*(times for times, _ in results), strict=True)]
        return statistics.median(np.diff(ends)[1:]), nbytes, data.loss(*pull_model(ps, data.features))
    finally:
        ps.drop_table("w")
        ps.drop_table("b")


@contextlib.contextmanager
def cluster_behind(cable: Namespace) -> Iterator[tuple[Client, dps.ParameterServer]]:
    """A server behind the cable, and trainers on this side."""
    with machines(0, cable.ours, cable) as (cluster, client):
        start_trainers(cluster, client)
        with dps.ParameterServer(client, servers=1) as ps:
            yield client, ps


def start_trainers(cluster: Machines, client: Client) -> None:
    for n in range(TRAINERS):
        cluster.start_trainer(f"trainer-{n}")
    client.wait_for_workers(1 + TRAINERS, timeout=PATIENCE)


def problem() -> str | None:
    """Why it cannot be measured here."""
    return Namespace.problem() or (None if shutil.which("tc") else "there is no tc (iproute2)")


def measure(report: Report, args: argparse.Namespace) -> None:
    with contextlib.closing(Namespace()) as cable, cluster_behind(cable) as (client, ps):
        for gigabits in args.gigabits:
            cable.limit(gigabits)
            there, back = rates_of_plain_socket(cable, 1 << 26)
            report.add(f"{gigabits:g} Gb/s: a plain socket, in", there * 8e-9, "Gb/s")
            report.add(f"{gigabits:g} Gb/s: a plain socket, out", back * 8e-9, "Gb/s")
            for dim in REACHES:
                measure_rows(report, ps, cable, gigabits, dim)
            measure_clicks(report, client, ps, cable, gigabits, CLICKS // 10 if args.quick else CLICKS)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--gigabits", type=float, nargs="+", default=GIGABITS, help="rates of the cable, in Gb/s")
    args = options.parse_args(argv)
    with Report("a network", args.json) as report:
        why = problem()
        if why is None:
            measure(report, args)
        else:
            report.note(f"left out, all of it: {why}")


if __name__ == "__main__":
    from benchmarks.network import main as run  # so that processes find our functions by name

    run()
