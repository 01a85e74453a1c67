"""What memory that two processes share would gain beside the Unix socket between them: 64 MB of rows from a server.

A server has rows and a trainer wants them in an array of its own. In turns the rows take these ways:

* *a socket*: the server sends from its rows, the trainer receives into its array. The system copies twice.
* *shared, at once*: the server copies all rows into shared memory, says so, and the trainer copies them out.
* *shared, in place*: the trainer reads the rows where the server has put them, and gives the memory back later.
* *shared, in pieces*: a ring of a few pieces. The server says when one is full, over the socket, and the trainer when
  it is empty, so both copy at the same time.
* *shared, polling*: the same ring, where each side reads a counter again and again until the other one is done.

Processor seconds are those of both processes.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import Report, parser

SIZES, QUICK_SIZES = (64 << 20, 1 << 20), (4 << 20, 1 << 20)
PIECE, PIECES = 1 << 18, 8  # bytes of a piece, and pieces of the ring
COUNTERS = 4096  # bytes before the ring: pieces that are full so far, and those that are empty again
ROUNDS = 15
SOCKET_BUFFER = 1 << 20  # what dps asks for
SURE_SECONDS = 60.0


class Shared:
    """Memory of both processes: two counters, and room for rows."""

    def __init__(self, nbytes: int):
        memory = mmap.mmap(-1, COUNTERS + nbytes)
        self.counts = np.frombuffer(memory, np.int64, 2)
        self.room = np.frombuffer(memory, np.uint8, nbytes, COUNTERS)

    def piece(self, number: int) -> np.ndarray:
        place = number % PIECES * PIECE
        return self.room[place : place + PIECE]


class Peer:
    """One of the two processes: its rows, its socket, and the memory that it shares."""

    def __init__(self, sock: socket.socket, shared: Shared, rows: np.ndarray):
        self.sock, self.shared, self.rows = sock, shared, rows
        self.pieces = len(rows) // PIECE
        sock.settimeout(SURE_SECONDS)

    def pieces_of(self) -> list[np.ndarray]:
        return [self.rows[n * PIECE : (n + 1) * PIECE] for n in range(self.pieces)]


class Server(Peer):
    """The process that has the rows. Each method sends them one way."""

    def socket(self) -> None:
        self.sock.sendall(self.rows)

    def at_once(self) -> None:
        np.copyto(self.shared.room[: len(self.rows)], self.rows)
        self.sock.sendall(b"f")

    in_place = at_once

    def in_pieces(self) -> None:
        empty = PIECES
        for number, piece in enumerate(self.pieces_of()):
            while not empty:
                empty += len(self.sock.recv(64))
            np.copyto(self.shared.piece(number), piece)
            empty -= 1
            self.sock.sendall(b"f")
        while empty < PIECES:
            empty += len(self.sock.recv(64))

    def polling(self) -> None:
        counts = self.shared.counts
        for number, piece in enumerate(self.pieces_of()):
            while number - counts[1] >= PIECES:
                pass
            np.copyto(self.shared.piece(number), piece)
            counts[0] = number + 1

    def serve(self) -> None:
        while way := self.sock.recv(1):
            getattr(self, WAYS[way[0]])()


class Trainer(Peer):
    """The process that wants the rows, in its array. Each method receives them one way."""

    def socket(self) -> None:
        view, have = memoryview(self.rows), 0
        while have < len(view):
            have += self.sock.recv_into(view[have:])

    def at_once(self) -> None:
        self.in_place()
        np.copyto(self.rows, self.shared.room[: len(self.rows)])

    def in_place(self) -> None:
        self.sock.recv(1)

    def in_pieces(self) -> None:
        full = 0
        for number, piece in enumerate(self.pieces_of()):
            while full <= number:
                full += len(self.sock.recv(64))
            np.copyto(piece, self.shared.piece(number))
            self.sock.sendall(b"e")

    def polling(self) -> None:
        counts = self.shared.counts
        for number, piece in enumerate(self.pieces_of()):
            while counts[0] <= number:
                pass
            np.copyto(piece, self.shared.piece(number))
            counts[1] = number + 1

    def fetch(self, way: str) -> None:
        self.shared.counts[:] = 0
        self.sock.sendall(bytes([WAYS.index(way)]))
        getattr(self, way)()


WAYS = ("socket", "at_once", "in_place", "in_pieces", "polling")
NAMES = {
    "socket": "a socket", "at_once": "shared, at once", "in_place": "shared, in place",
    "in_pieces": "shared, in pieces", "polling": "shared, polling",
}  # fmt: skip


def serve(others: socket.socket, sock: socket.socket, shared: Shared, nbytes: int) -> None:
    others.close()  # else this process itself would keep open what it waits for the end of
    Server(sock, shared, np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)).serve()


def measure(report: Report, nbytes: int) -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    shared = Shared(nbytes)
    expected = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(ours, theirs, shared, nbytes), daemon=True
    )
    process.start()
    theirs.close()
    trainer = Trainer(ours, shared, np.zeros(nbytes, np.uint8))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    worked: dict[str, list[float]] = {way: [] for way in WAYS}
    worker = processor_seconds_of(process.pid or 0)
    for _ in range(ROUNDS):
        for way in WAYS:
            before, began = worker() + time.process_time(), time.perf_counter()
            trainer.fetch(way)
            seconds[way].append(time.perf_counter() - began)
            worked[way].append(worker() + time.process_time() - before)
            arrived = shared.room if way == "in_place" else trainer.rows
            if not np.array_equal(arrived[:nbytes], expected):
                raise AssertionError(f"{NAMES[way]}: other rows arrived")
            trainer.rows[:] = 0
    ours.close()
    process.join(SURE_SECONDS)
    usual = {way: statistics.median(each) for way, each in seconds.items()}
    for way in WAYS:
        reach = None if way == "socket" else ">= 1.3 x"
        rate = nbytes / usual[way] * 1e-9
        against, floor = (None, None) if way == "socket" else ("a socket", nbytes / usual["socket"] * 1e-9)
        report.add(f"{nbytes >> 20} MB, {NAMES[way]}", rate, "GB/s", against, floor, reach)
        report.add(f"{nbytes >> 20} MB, {NAMES[way]}: processors", 1e3 * sum(worked[way]) / ROUNDS, "ms")


def processor_seconds_of(pid: int) -> Callable[[], float]:
    """What a process has used so far, to the resolution of the system's ticks."""
    ticks = os.sysconf("SC_CLK_TCK")

    def seconds() -> float:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / ticks

    return seconds


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with Report("memory that processes share", args.json) as report:
        for nbytes in QUICK_SIZES if args.quick else SIZES:
            measure(report, nbytes)


if __name__ == "__main__":
    main()
