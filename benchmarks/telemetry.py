"""What it costs that clients count their work: nanoseconds a call, and the share of a trainer's time.

A trainer whose connections answer at once, in its own process, calls with a meter that counts, and with one that does
not, in turns: what is left of a call is Python alone. Whatever else the machine does only adds to that, so each turn
counts with its quickest call, and of the turns the median: tens of nanoseconds can be told apart. The same is then done
in a training task on a `dps.LocalCluster`, with real servers, in the loop of click_model.py.

The bytes and answers that a connection itself counts are counted in both; only ``--before`` shows what they cost.

With ``--before DIR`` (another checkout of dps), the bare calls of that code are timed too, in turns, in processes of
their own.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import ROOT, Report, parser
from dps.client.environment import ProcessEnvironment
from dps.state.ops import TableSpec
from dps.wire import frames
from dps.wire.channel import Channel
from dps.wire.frames import HEADER_SIZE, Header, decode_header, encode_header, encode_json, padded

ROUNDS, CALLS = 21, 200  # turns, and calls in each
TURNS = 7  # processes of each checkout
KEYS, FEATURES = 1000, 100_000  # a call's; a batch's
BATCH, STEPS, NNZ = 1000, 40, 20  # rows; batches in a turn; features of a row


class Echo:
    """Instead of a socket: answers every request at once, with zeros for values."""

    def __init__(self, row_bytes: int):
        self._row_bytes, self._answer, self._left = row_bytes, b"", 0

    def send(self, buffers: list[Any]) -> int:
        if not self._left:
            asked = decode_header(buffers[0], 0, 1 << 40)
            self._left = HEADER_SIZE + asked.body
            body = b""
            if asked.kind == frames.PULL:
                body = bytes(padded(asked.count * self._row_bytes))
            elif asked.kind == frames.JOIN:
                reply = {"origin": 1, "attempt": 0, "incarnation": 0, "staleness": 0, "trainers": 1, "clock": 0}
                body = encode_json(reply)
            elif asked.kind == frames.ROUTE:
                table = {"spec": TableSpec("w", dim=16, shards=1, id=1).to_dict(), "owners": [0]}
                body = encode_json({"epoch": 1, "remedy": "", "servers": {"0": ["127.0.0.1", 1]}, "tables": [table]})
            self._answer = encode_header(Header(frames.OK, parties=1, body=len(body)), asked.request) + body
        sent = sum(map(len, buffers))
        self._left -= sent
        return sent

    def receive(self, view: memoryview, patience: float) -> int:
        nbytes = min(len(view), len(self._answer))
        view[:nbytes] = self._answer[:nbytes]
        self._answer = self._answer[nbytes:]
        return nbytes

    def wait(self, seconds: float, also_write: bool = False) -> bool:
        return False

    def close(self) -> None:
        """It holds nothing."""


class EchoChannel(Channel):
    """A connection to an echo."""

    def _introduce(self, *args: Any) -> None:
        self._socket.close()
        self._socket = Echo(64)  # type: ignore[assignment]


class EchoEnvironment(ProcessEnvironment):
    """A process whose connections are echoes."""

    def connect(self, ticket: dps.Ticket, address: tuple[str, int], what: str, *args: Any) -> Channel:
        with socket.create_server(("127.0.0.1", 0)) as door:  # a connection begins with a socket
            return EchoChannel(door.getsockname()[:2], "s", "secret", what)


def alone() -> dps.Trainer:
    """A trainer without connections."""
    ticket = dps.Ticket("s", ("127.0.0.1", 1), "secret")
    return dps.Trainer.join(ticket, 1, 0, environment=EchoEnvironment())


class Blind:
    """A meter that counts nothing."""

    began = held = mark = 0.0
    clocks = rows = resent = 0

    def nothing(self, *args: Any) -> None:
        """Do it."""

    begin = prepared = lap = counted = due = nothing


def calls_of(trainer: dps.Trainer) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    keys = {n: np.sort(np.random.default_rng(0).choice(1 << 40, n, replace=False)) for n in (1, KEYS)}
    values = {n: np.ones((n, 16), np.float32) for n in keys}
    out = {n: np.empty((n, 16), np.float32) for n in keys}
    found: dict[str, Callable[[], Any]] = {}
    for n in keys:
        several = f"{n:,} key{'s' * (n > 1)}"
        found[f"pull of {several}"] = lambda n=n: trainer.pull("w", keys[n], out[n])
        found[f"push of {several}"] = lambda n=n: trainer.push("w", keys[n], values[n])
    return {**found, "tick": trainer.tick}


def quickest(cases: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Seconds a call takes: of turns A B A B, each counting with its quickest call, the median."""
    turns: dict[Any, list[float]] = {name: [] for name in cases}
    now = time.perf_counter
    for _ in range(rounds + 1):
        for name, function in cases.items():
            best = 1.0
            for _ in range(CALLS):
                began = now()
                function()
                best = min(best, now() - began)
            turns[name].append(best)
    return {name: statistics.median(found[1:]) for name, found in turns.items()}


def bare(rounds: int) -> dict[str, float]:
    """Seconds of each call, as the code is."""
    return quickest(calls_of(alone()), rounds)


def with_and_without(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each call with a meter, and without one."""
    seeing, blind = alone(), alone()
    for function in calls_of(blind).values():
        function()
    blind.client.session.meter = Blind()  # type: ignore[assignment]
    counting, not_counting = calls_of(seeing), calls_of(blind)
    found = quickest({(name, f): f for name in counting for f in (counting[name], not_counting[name])}, rounds)
    with_it, without = ({name: found[name, f] for name, f in calls.items()} for calls in (counting, not_counting))
    return with_it, without


# -- a training task


def batches(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys and gradients of batches as a click model has them: some features are frequent, most are not."""
    for _ in range(STEPS):
        keys = np.unique((rng.pareto(0.7, BATCH * NNZ) * 10).astype(np.int64) % FEATURES)
        yield keys, rng.normal(size=len(keys)).astype(np.float32)


def train(trainer: dps.Trainer, partitions: list[Any], rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of turns with a meter and without one; calls in a turn."""
    work = list(batches(np.random.default_rng(trainer.number)))
    rows = np.random.default_rng(0).normal(size=(BATCH, 64))
    meters = {"counting": trainer.client.session.meter, "blind": Blind()}
    seconds: dict[str, list[float]] = {name: [] for name in meters}
    bias, one = np.zeros(1, np.int64), np.ones(1, np.float32)
    for turn in range(rounds + 1):
        for name, meter in reversed(meters.items()) if turn % 2 else meters.items():
            trainer.client.session.meter = meter  # type: ignore[assignment]
            began = time.perf_counter()
            for keys, gradient in work:
                found = trainer.pull({"w": keys, "b": bias})
                (rows.T @ rows).sum()
                trainer.push({"w": (keys, gradient + 0 * found["w"]), "b": (bias, one)})
                trainer.tick()
            if turn:  # the first one makes the rows
                seconds[name].append(time.perf_counter() - began)
    trainer.client.session.meter = meters["counting"]  # type: ignore[assignment]
    return seconds, 5 * STEPS


def in_a_run(report: Report, cost: float, rounds: int) -> None:
    """The share of a trainer's time; `cost` are the seconds that a call's counting takes."""
    with (
        dps.LocalCluster(servers=1, trainers=1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("w", optimizer=dps.Adagrad(0.1))
        ps.table("b", rows=1)
        ((seconds, calls),) = ps.run(train, client.scatter([0]), args=(rounds,), progress=False)
    counting, blind = (statistics.median(seconds[name]) for name in ("counting", "blind"))
    report.duration("a turn of the loop of click_model.py", counting, "the same, blind", blind)
    share = 100 * calls * cost / counting
    report.add("the same: calls x cost of counting / time", share, "% of time", reach="< 1 % of time")


# -- two checkouts


def timed_in(folder: Path, rounds: int) -> dict[str, float]:
    """`bare`, of the dps in that folder, in a process of its own."""
    script = "import json, sys; sys.path.insert(0, sys.argv[1]); import dps\n"  # that dps, and our benchmarks
    script += "sys.path.insert(0, sys.argv[2]); from benchmarks.telemetry import bare\n"
    script += "print(json.dumps(bare(int(sys.argv[3]))))"
    command = [sys.executable, "-c", script, str(folder), str(ROOT), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": ""}
    told = subprocess.run(command, cwd="/", env=environment, text=True, capture_output=True, check=True, timeout=600)
    return json.loads(told.stdout.splitlines()[-1])


def compare(report: Report, before: Path, turns: int, rounds: int) -> None:
    """Calls of this checkout and of another one."""
    found: dict[Path, list[dict[str, float]]] = {ROOT: [], before: []}
    for _ in range(turns):
        for folder, times in found.items():
            times.append(timed_in(folder, rounds))
    for name in found[ROOT][0]:
        now, then = (1e9 * statistics.median(times[name] for times in found[folder]) for folder in (ROOT, before))
        report.add(f"{name}, without its way", now, "ns", str(before), then)
        report.add(f"{name}: more than before", now - then, "ns", reach="< 1,000 ns")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--before", metavar="DIR", type=Path, help="another checkout, to compare with")
    args = options.parse_args(argv)
    rounds = 5 if args.quick else ROUNDS
    with Report("the cost of counting; a connection that answers at once", args.json) as report:
        counting, blind = with_and_without(rounds)
        for name, seconds in counting.items():
            report.add(name, 1e9 * seconds, "ns", "the same, blind", 1e9 * blind[name])
            report.add(f"{name}: its counting", 1e9 * (seconds - blind[name]), "ns", reach="< 1,000 ns")
        if args.before:
            compare(report, args.before.resolve(), 2 if args.quick else TURNS, 5)
        in_a_run(report, max(counting[name] - blind[name] for name in counting), rounds)


if __name__ == "__main__":
    from benchmarks.telemetry import main as run  # so that workers find our functions by name

    run()
