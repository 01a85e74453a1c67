"""What pulls, pushes and a click model take of a network: bytes first, which are free of noise, then seconds.

The server is in a network namespace of its own, behind a cable that lets 1 Gb/s through (`--gigabits` for others), as
much for these two cores as 10 to 25 Gb/s are for a machine of 16 to 48. Client, trainers and scheduler are on this side
of the cable. There is no way to make it long, too: this kernel cannot delay packets (tc-netem).

* *codecs*: how fast rows are made narrow, and wide again; how fast keys are packed, and what they take then.
* *bodies*: of a pull and a push of one row together, both directions, as the server counts them: a key there, a row
  back, a key and a row there, 144 bytes with dim 16, 24 with dim 1. *All that travels* is what the network device
  counts. *Halves* and *bytes* are tables with ``wire=``. Keys of *new rows* are drawn from 2^40, of *hashed rows* from
  2^24.
* *rows a second*: beside what a plain socket gets through the same cable of such bodies.
* *auto*: loops of pulls and pushes with `wire="auto"`, beside each of the settings from which it chooses, round by
  round in the same run; through the cable, and with the server on this side, where a Unix socket joins both ends.
* *models*: fits of a factorization machine, of factors of ratings and of words (the data is that of `wire_losses.py`),
  with `wire="auto"` and with rows as they are.
* *sums*: clocks of two trainers, each in a process of its own, that push all rows of a dense model, with sums of the
  machine, without, and where it is measured whether to sum.
* *click model*: examples a second in the second epoch (2^24 features, two trainers), with rows as they are and as
  halves, with the cable and with nothing in the way of the packets.

Needs Linux, root and tc; elsewhere it says what it left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import dask
import numpy as np
from distributed import Client

import dps
from benchmarks.click_model import ADAGRAD, BATCH, TRAINERS, Data, part, pull_model, train
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Machines, Namespace, machines, shaping_problem, wait_for
from benchmarks.wire_losses import CASES, FULL, QUICK, Fitted, Sizes, by_factors, by_machine, by_words
from dps.engine.core.codec import CODECS, bytes_of_row, decode, encode
from dps.engine.core.packed_keys import pack, packed_bytes, unpack
from dps.engine.state.wire_format import wire_of

GIGABITS = (1.0,)
ROWS = 10_000  # of a pull or push
ROUNDS, TURN_CALLS, MODEL_ROUNDS = 5, 20, 3
SUM_ROWS, SUM_CLOCKS = 1 << 14, 600
SUMS = {  # how pushes of a machine travel: a name, and the table's wire
    "push by push": None,
    "sums": dps.Wire(merge=True),
    "measured": dps.Wire(merge=True, measured=True),
}
PORT = 9876
CLICKS, FEATURES, EPOCHS, TEST_ROWS = 200_000, 1 << 24, 3, 20_000
# How rows travel: a name, and the table's wire.
WIRES = {
    "as they are": None,
    "halves": dps.Wire("bfloat16", "bfloat16", lists=True),
    "bytes": dps.Wire("int8", "int8", lists=True),
}
FIXED = {wire.label: dataclasses.replace(wire, measured=False) for wire in wire_of("auto").candidates}
AUTO_CALLS, AUTO_BEFORE = 160, 600  # of a round; before the first one, in which "auto" chooses
REACHES = {  # by dim, how rows travel, and whether they are the same each time
    (1, "halves", "new rows"): "<= 10 bytes",
    (1, "halves", "hashed rows"): "<= 8 bytes",
    (1, "halves", "the same rows"): "<= 4 bytes",
    (16, "halves", "new rows"): "<= 70 bytes",
    (16, "halves", "hashed rows"): "<= 68 bytes",
    (16, "bytes", "hashed rows"): "<= 44 bytes",
}
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


def pull_and_push(
    trainer: dps.Trainer, parts: object, keys: np.ndarray, bits: int, values: np.ndarray, calls: int
) -> list[float]:
    """The seconds of each round of pulls and pushes of the same rows, or, without `keys`, of others of so many bits."""
    draw, seconds = np.random.default_rng(0), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            named = keys if len(keys) else draw.integers(0, 1 << bits, len(values))
            trainer.pull("rows", named)
            trainer.push("rows", named, values)
        seconds.append((time.perf_counter() - began) / calls)
    return seconds


def measure_rows(report: Report, ps: dps.ParameterServer, cable: Namespace, gigabits: float, dim: int) -> None:
    """Pulls and pushes of a trainer, of rows of a keyed table."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal((ROWS, dim)).astype(np.float32)
    values = values if dim > 1 else values[:, 0]
    again, others = draw.integers(0, 1 << 40, ROWS), np.empty(0, np.int64)
    there, back = rates_of_plain_socket(cable, 1 << 26)
    for name, wire in WIRES.items() if dim > 4 else list(WIRES.items())[:2]:  # bytes are for longer rows
        for which, keys, bits in (("new rows", others, 40), ("hashed rows", others, 24), ("the same rows", again, 40)):
            ps.table("rows", dim=dim, wire=wire)
            taken, bodies = [0], [0]
            for calls in (TURN_CALLS, 2 * TURN_CALLS):  # the difference has no first call, which names what is new
                before = sum(cable.traffic())
                [seconds] = ps.run(pull_and_push, [0], trainers=1, args=(keys, bits, values, calls), progress=False)
                taken.append(sum(cable.traffic()) - before)
                bodies.append(bodies_of(ps) - sum(bodies))
            where = f"{gigabits:g} Gb/s, dim {dim}, {name}, {which}"
            per_row = 1 / (ROWS * ROUNDS * TURN_CALLS)
            body, all_bytes = (bodies[2] - bodies[1]) * per_row, (taken[2] - taken[1]) * per_row
            reach = REACHES.get((dim, name, which))
            report.add(f"{where}: bodies of a pull and a push", round(body, 1), "bytes a row", reach=reach)
            report.add(f"{where}: all that travels", all_bytes, "bytes a row")
            floor = 1 / ((8 + 8 + 4 * dim) / there + 4 * dim / back)
            rate = ROWS / statistics.median(seconds)
            report.add(f"{where}: rows a second", rate, "rows/s", "bytes as they are through a plain socket", floor)
            ps.drop_table("rows")


def bodies_of(ps: dps.ParameterServer) -> int:
    """The bytes of keys and values that requests for the rows, and their answers, had; once the server has told all."""
    counted = 0
    for _ in range(100):
        traffic = ps.status().tables["rows"].traffic
        if counted == (counted := traffic.keys + traffic.pushed + traffic.pulled) > 0:
            return counted
        time.sleep(1.0)
    raise TimeoutError("the server still counts bytes")


def pull_and_push_by_turns(
    trainer: dps.Trainer, parts: object, tables: list[str], dim: int, calls: int, before: int
) -> dict[str, list[float]]:
    """The seconds of a pull and a push, by table: of each of some rounds, in which each table has its turn."""
    draw, seconds = np.random.default_rng(0), dict[str, list[float]]()
    values = draw.standard_normal((ROWS, dim)).astype(np.float32)
    values = values if dim > 1 else values[:, 0]
    for round_number in range(1 + ROUNDS):
        first = round_number % len(tables)  # in turns, because what follows on something else may meet what it has left
        for table in tables[first:] + tables[:first]:
            began = time.perf_counter()
            for _ in range(calls if round_number else before):
                named = draw.integers(0, 1 << 18, ROWS)  # rows that are there soon
                trainer.pull(table, named)
                trainer.push(table, named, values)
            if round_number:
                seconds.setdefault(table, []).append((time.perf_counter() - began) / calls)
    return seconds


def measure_auto(report: Report, ps: dps.ParameterServer, where: str, quick: bool) -> None:
    """`wire="auto"` beside each fixed setting."""
    wires = {"auto": wire_of("auto")} | FIXED
    for dim in (1, 16):
        began = time.time()
        for name, wire in wires.items():
            ps.table(name, dim=dim, wire=wire)
        calls = (AUTO_CALLS // 20, AUTO_BEFORE // 20) if quick else (AUTO_CALLS, AUTO_BEFORE)
        [found] = ps.run(pull_and_push_by_turns, [0], trainers=1, args=(list(wires), dim, *calls), progress=False)
        seconds = {name: statistics.median(each) for name, each in found.items()}
        best = min((name for name in seconds if name != "auto"), key=seconds.__getitem__)
        for name in wires:
            rate, of_best = ROWS / seconds[name], ROWS / seconds[best]
            reach = ">= 0.97 x" if name == "auto" else None
            report.add(f"{where}, dim {dim}, {name}", rate, "rows/s", f"the best setting, {best}", of_best, reach=reach)
        for text in [text for when, text in ps.status().events if "'auto' travel" in text and when > began]:
            report.note(text)
        for name in wires:
            ps.drop_table(name)


def push_all_rows(trainer: dps.Trainer, parts: object, clocks: int) -> float:
    """The median seconds of a clock in the second half, before which it is chosen whether to sum."""
    values, ends = np.ones((SUM_ROWS, 16), np.float32), []
    for _ in trainer.iterate(range(clocks)):
        trainer.push("rows", None, values)
        ends.append(time.perf_counter())
    return statistics.median(np.diff(ends[clocks // 2 :]))


def measure_sums(report: Report, ps: dps.ParameterServer, where: str, quick: bool) -> None:
    """Clocks in which all trainers push all rows of a dense table, at staleness 0."""
    found: dict[str, float] = {}
    clocks = SUM_CLOCKS // 10 if quick else SUM_CLOCKS
    for name, wire in SUMS.items():
        ps.table("rows", rows=SUM_ROWS, dim=16, optimizer=dps.SGD(0.01), wire=wire)
        found[name] = max(ps.run(push_all_rows, range(TRAINERS), args=(clocks,), staleness=0, progress=False))
        ps.drop_table("rows")
        report.add(
            f"{where}, {TRAINERS} processes, {name}: a clock",
            1e3 * found[name],
            "ms",
            "push by push",
            1e3 * found["push by push"],
        )


def measure_codecs(report: Report) -> None:
    """Encoding and decoding on one core, against a copy."""
    rows = np.random.default_rng(0).standard_normal((1 << 20, 16)).astype(np.float32)
    out, copy = np.empty_like(rows), np.empty_like(rows)
    for name, reach in (("bfloat16", ">= 5 GB/s"), ("float16", ">= 5 GB/s"), ("int8", ">= 2.5 GB/s")):
        coded = np.empty(len(rows) * bytes_of_row(CODECS[name], 16, 0), np.uint8)
        works = {
            "encoded": lambda name=name, coded=coded: encode(CODECS[name], rows, coded),
            "decoded": lambda name=name, coded=coded: decode(CODECS[name], coded, out),
            "copied": lambda: np.copyto(copy, rows),
        }
        seconds: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(ROUNDS):
            for work, run in works.items():
                began = time.perf_counter()
                run()
                seconds[work].append(time.perf_counter() - began)
        rate = {work: rows.nbytes / statistics.median(each) * 1e-9 for work, each in seconds.items()}
        for work in ("encoded", "decoded"):
            report.add(f"{name} {work}, dim 16", rate[work], "GB/s", "a copy", rate["copied"], reach=reach)


def measure_keys(report: Report) -> None:
    """Packing and unpacking the keys of a part on one core, against a copy."""
    draw = np.random.default_rng(0)
    for bits, count, ascends in ((24, 32_768, True), (24, 32_768, False), (30, 32_768, True), (30, 1_000, False)):
        keys = draw.integers(0, 1 << bits, count)
        keys = np.unique(keys) if ascends else keys
        packed, out = np.empty(packed_bytes(keys), np.uint8), np.empty_like(keys)
        works = {
            "packed": lambda keys=keys, packed=packed: pack(keys, packed),
            "unpacked": lambda packed=packed, out=out: unpack(packed, out),
            "copied": lambda keys=keys, out=out: np.copyto(out, keys),
        }
        seconds: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(100 * ROUNDS):
            for work, run in works.items():
                began = time.perf_counter()
                run()
                seconds[work].append(time.perf_counter() - began)
        rate = {work: keys.nbytes / statistics.median(each) * 1e-9 for work, each in seconds.items()}
        what = f"{count:,} keys of {bits} bits, {'ascending' if ascends else 'in the order of hashes'}"
        report.add(f"{what}: packed", len(packed) / len(keys), "bytes a key")
        for work in ("packed", "unpacked"):
            report.add(f"{what}: {work}", rate[work], "GB/s", "a copy", rate["copied"], reach=">= 2 GB/s")


def measure_clicks(
    report: Report, client: Client, ps: dps.ParameterServer, cable: Namespace, gigabits: float, rows: int
) -> None:
    """The click model, with and without a limit, turn by turn."""
    data = Data.make(rows, FEATURES, TEST_ROWS)
    each = rows // TRAINERS
    parts = list(client.persist([dask.delayed(part)(each, FEATURES, n * each) for n in range(TRAINERS)]))
    ways = [(limit, name) for limit in (None, gigabits) for name in ("as they are", "halves")]
    found: dict[tuple[float | None, str], list[tuple[float, int, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS if rows == CLICKS else 1):
        for limit, name in ways:
            cable.limit(limit)
            found[limit, name].append(trained(ps, cable, parts, data, WIRES[name]))
    median = {way: [statistics.median(each) for each in zip(*found[way], strict=True)] for way in ways}
    for limit, name in ways:
        what = f"click model, {'no limit' if limit is None else f'{limit:g} Gb/s'}, {name}"
        seconds, nbytes, loss = median[limit, name]
        plain = median[limit, "as they are"]
        report.add(
            f"{what}: traffic", nbytes / (rows * EPOCHS), "bytes an example", "as they are", plain[1] / (rows * EPOCHS)
        )
        wanted = ">= 1.5 x" if limit and name == "halves" else None
        report.add(f"{what}: examples a second", rows / seconds, "/s", "as they are", rows / plain[0], reach=wanted)
        report.add(f"{what}: held-out loss", loss, "", "as they are", plain[2])


MODELS = [case for case in CASES if case.fit in (by_machine, by_factors, by_words)]


def measure_models(report: Report, ps: dps.ParameterServer, cable: Namespace, gigabits: float, sizes: Sizes) -> None:
    """Fits of estimators through the cable, turn by turn."""
    cable.limit(gigabits)
    for case in MODELS:
        case.fit(0, QUICK, {"client": ps}).model.forget()  # because the first fit compiles
        found: dict[str, list[Fitted]] = {"as they are": [], "auto": []}
        for seed in range(1 if sizes is QUICK else MODEL_ROUNDS):
            for name, wire in (("as they are", dps.Wire()), ("auto", "auto")):
                found[name].append(case.fit(seed, sizes, {"client": ps, "wire": wire}))
                found[name][-1].model.forget()
        plain, auto = ([statistics.median(fit.seconds for fit in fits), fits[0].loss] for fits in found.values())
        what = f"{gigabits:g} Gb/s, {case.name}"
        report.add(f"{what}: fits a minute, auto", 60 / auto[0], "/min", "as they are", 60 / plain[0], reach=">= 1.5 x")
        report.add(f"{what}: loss of seed 0, auto", auto[1], "", "as they are", plain[1])


def trained(
    ps: dps.ParameterServer, cable: Namespace, parts: list, data: Data, wire: dps.Wire | None
) -> tuple[float, int, float]:
    """Train fresh tables: seconds of a later epoch, bytes through the cable in all epochs, held-out loss."""
    ps.table("w", optimizer=ADAGRAD[BATCH], wire=wire)
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


def measure(report: Report, args: argparse.Namespace) -> None:
    with contextlib.closing(Namespace()) as cable, cluster_behind(cable) as (client, ps):
        for gigabits in args.gigabits:
            cable.limit(gigabits)
            there, back = rates_of_plain_socket(cable, 1 << 26)
            report.add(f"{gigabits:g} Gb/s: a plain socket, in", there * 8e-9, "Gb/s")
            report.add(f"{gigabits:g} Gb/s: a plain socket, out", back * 8e-9, "Gb/s")
            if not (args.auto or args.sums):
                measure_rate(report, client, ps, cable, gigabits, args.quick)
            if not args.sums:
                measure_auto(report, ps, f"{gigabits:g} Gb/s", args.quick)
            measure_sums(report, ps, f"{gigabits:g} Gb/s", args.quick)
    with machines(1) as (cluster, client):
        start_trainers(cluster, client)
        with dps.ParameterServer(client, servers=1) as ps:
            if not args.sums:
                measure_auto(report, ps, "one machine", args.quick)
            measure_sums(report, ps, "one machine", args.quick)


def measure_rate(
    report: Report, client: Client, ps: dps.ParameterServer, cable: Namespace, gigabits: float, quick: bool
) -> None:
    """All but the choice, at one rate of the cable."""
    for dim in (1, 16):
        measure_rows(report, ps, cable, gigabits, dim)
    measure_clicks(report, client, ps, cable, gigabits, CLICKS // 10 if quick else CLICKS)
    measure_models(report, ps, cable, gigabits, QUICK if quick else FULL)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--gigabits", type=float, nargs="+", default=GIGABITS, help="rates of the cable, in Gb/s")
    options.add_argument("--auto", action="store_true", help='only loops with wire="auto" beside each fixed setting')
    options.add_argument("--sums", action="store_true", help="only clocks in which the pushes of a machine are summed")
    args = options.parse_args(argv)
    with Report("a network", args.json) as report:
        if not (args.auto or args.sums):
            measure_codecs(report)
            measure_keys(report)
        why = shaping_problem()
        if why is None:
            measure(report, args)
        else:
            report.note(f"left out, all of it: {why}")


if __name__ == "__main__":
    from benchmarks.network import main as run  # so that processes find our functions by name

    run()
