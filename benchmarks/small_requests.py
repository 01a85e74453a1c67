"""How long small requests wait for large ones on the same link: pulls and ticks beside pushes of many MiB.

The server and the controller are on this side of a cable that lets 1 Gb/s through (`--gigabits` for others), and the
trainer is in a network namespace at its other end. At staleness 0, and in turns, it pulls 100 rows, ticks, and asks a
plain socket, which sends 64 bytes and gets the 464 of such a pull back. Meanwhile

* nothing else is sent;
* *another thread* of its process pushes 16 or 64 MiB to the same server, again and again, as a client of its own;
* *another process* at its end of the cable does so.

The plain socket is the floor: whatever it waits for is the link, or the processors, and not a queue of dps. Another
plain socket is *marked* (SO_PRIORITY), and the line of packets before the cable lets it pass (pfifo_fast): that much a
mark on small requests could save.

Needs Linux, root and tc; elsewhere it says what it left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Namespace, machines, shaping_problem

ROWS, PORT, ANSWER = 100, 9878, 464
SIZES = (1 << 24, 1 << 26)  # bytes of values of a large push
BESIDE = ("another thread", "another process")
SECONDS = 8.0
# A program that answers 64 bytes with so many.
PEER = """
import socket, threading
def serve(line):
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, line.recv(1)[0])
    while line.recv(64, socket.MSG_WAITALL):
        line.sendall(bytes({answer}))
server = socket.create_server(("{host}", {port}))
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
# A program that pushes until it is ended.
PUSHER = """
import pickle, sys
from benchmarks.small_requests import pushes
for _ in pushes(*pickle.load(sys.stdin.buffer)):
    print("pushed", flush=True)
"""

KINDS = ("pulls", "ticks", "a plain socket", "a marked socket")
INTERACTIVE = 6  # the priority of a marked socket


def pushes(client: dps.Client, nbytes: int) -> Iterator[None]:
    """Push so many bytes of values again and again."""
    keys, values = np.arange(nbytes // 64), np.ones((nbytes // 64, 16), np.float32)
    while True:
        client.push("large", keys, values)
        yield


@contextlib.contextmanager
def pushing(client: dps.Client, nbytes: int, where: str) -> Iterator[None]:
    """Within the block a thread or a process pushes."""
    if where == "another process":
        with subprocess.Popen([sys.executable, "-c", PUSHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump((client, nbytes), process.stdin)
            process.stdin.close()
            process.stdout.readline()
            try:
                yield
            finally:
                process.kill()
        return
    begun, ended = threading.Event(), threading.Event()

    def push() -> None:
        for _ in pushes(client, nbytes):
            begun.set()
            if ended.is_set():
                return

    thread = threading.Thread(target=push)
    thread.start()
    begun.wait(PATIENCE)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def small_requests(
    trainer: dps.Trainer, parts: object, client: dps.Client, nbytes: int, where: str, host: str, seconds: float
) -> list[list[float]]:
    """The seconds of each kind of request, in turns, beside pushes of so many bytes, or beside nothing."""
    keys, lines = np.arange(ROWS), [connected(host, priority) for priority in (0, INTERACTIVE)]
    asks = [lambda: trainer.pull("small", keys), trainer.tick, *(functools.partial(ask, line) for line in lines)]
    found: list[list[float]] = [[] for _ in KINDS]
    with pushing(client, nbytes, where) if nbytes else contextlib.nullcontext():
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            for times, request in zip(found, asks, strict=True):
                request()
                times.append((now := time.perf_counter()) - began)
                began = now
    return found


@contextlib.contextmanager
def peer(program: str) -> Iterator[None]:
    """Within the block a program runs on this side."""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            process.kill()


def connected(host: str, priority: int) -> socket.socket:
    line = socket.create_connection((host, PORT), timeout=PATIENCE)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
    line.sendall(bytes([priority]))
    return line


def ask(line: socket.socket) -> None:
    line.sendall(bytes(64))
    line.recv(ANSWER, socket.MSG_WAITALL)


def measure(report: Report, args: argparse.Namespace, cable: Namespace, ps: dps.ParameterServer) -> None:
    seconds = SECONDS / 8 if args.quick else SECONDS
    for gigabits in args.gigabits:
        cable.limit(gigabits, bands=True)
        for nbytes, where in ((0, "nothing"), *((nbytes, where) for where in BESIDE for nbytes in SIZES)):
            how = (ps.client(), nbytes, where, cable.ours, seconds)
            [found] = ps.run(small_requests, [0], trainers=1, staleness=0, args=how, progress=False)
            what = f"{gigabits:g} Gb/s, beside {where}" + (f", {nbytes >> 20} MiB" if nbytes else "")
            for name, share in (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99)):
                times = [1e3 * float(np.quantile(each, share)) for each in found]
                for kind, time_of in zip(KINDS, times, strict=True):
                    reach = "<= 0.5 x" if nbytes and kind in KINDS[:2] and name == "median" else None
                    report.add(f"{what}: {kind}, {name}", time_of, "ms", "a plain socket", times[2], reach=reach)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--gigabits", type=float, nargs="+", default=(1.0,), help="rates of the cable, in Gb/s")
    args = options.parse_args(argv)
    with Report("small requests", args.json) as report:
        why = shaping_problem()
        if why is not None:
            report.note(f"left out, all of it: {why}")
            return
        program = PEER.format(host=Namespace.ours, port=PORT, answer=ANSWER)
        with contextlib.closing(Namespace()) as cable, machines(1, cable.ours) as (cluster, client), peer(program):
            cluster.start_trainer("far", cable)
            client.wait_for_workers(2, timeout=PATIENCE)
            with dps.ParameterServer(client, servers=1) as ps:
                ps.table("small")
                ps.table("large", dim=16)
                measure(report, args, cable, ps)


if __name__ == "__main__":
    from benchmarks.small_requests import main as run  # so that processes find our functions by name

    run()
