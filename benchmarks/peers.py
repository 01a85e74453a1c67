"""Bare sockets: the floor under every pull and push.

A request is 64 bytes that begin with two uint64 - the bytes that follow, the bytes wanted back - and then those bytes.
Both sides reuse their buffers and never look at what they move. A peer listens on a TCP port of this machine and at a
Unix socket that is named after the port, because dps uses either.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np

from benchmarks.common import ROOT

__all__ = ["KINDS", "Bare", "Peers"]

HEAD = 64
SIZES = struct.Struct("<QQ")
KINDS = ("unix", "tcp")  # of sockets


def buffer(nbytes: int) -> memoryview:
    """Memory whose pages are there already."""
    return memoryview(np.ones(nbytes, np.uint8))


def name_of(port: int) -> str:
    """The abstract name of the Unix socket of a peer."""
    return f"\0dps-bare-peer/{port}"


def receive(sock: socket.socket, view: memoryview, have: int, want: int, spin: float = 0.0) -> int:
    """Fill `view` up to at least `want` bytes; how many there are then.

    Parameters
    ----------
    spin : float
        Seconds for which each read polls before it sleeps.
    """
    while have < want:
        n = read(sock, view[have:want] if have else view, spin)
        if n == 0:
            raise EOFError
        have += n
    return have


def read(sock: socket.socket, view: memoryview, spin: float) -> int:
    if spin:
        until = time.perf_counter() + spin
        while True:
            try:
                return sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            if time.perf_counter() > until:
                break
            os.sched_yield()
        select.select([sock], [], [])
    return sock.recv_into(view)


def answer(sock: socket.socket) -> None:
    """Answer requests until the other side is gone."""
    inbox, outbox = buffer(1 << 16), buffer(1 << 16)
    while True:
        have = receive(sock, inbox, 0, HEAD)
        sent, wanted = SIZES.unpack_from(inbox)
        if HEAD + sent > len(inbox):
            larger = buffer(HEAD + sent)
            larger[:have] = inbox[:have]
            inbox = larger
        receive(sock, inbox, have, HEAD + sent)
        if HEAD + wanted > len(outbox):
            outbox = buffer(HEAD + wanted)
        sock.sendall(outbox[: HEAD + wanted])


def accept(listener: socket.socket) -> None:
    """Answer each connection in a thread of its own."""
    while True:
        sock, _ = listener.accept()
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer_all, args=(sock,), daemon=True).start()


def answer_all(sock: socket.socket) -> None:
    with sock, contextlib.suppress(EOFError, OSError):
        answer(sock)


def serve() -> None:
    """The process of a peer: prints its port, and ends when its standard input does."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        port = tcp.getsockname()[1]
        local.bind(name_of(port))
        local.listen()
        for listener in (tcp, local):
            threading.Thread(target=accept, args=(listener,), daemon=True).start()
        print(port, flush=True)
        sys.stdin.read()
        os._exit(0)


class Peers:
    """So many processes of `serve`, for the length of a with block."""

    def __init__(self, count: int):
        command = [sys.executable, "-c", "from benchmarks.peers import serve; serve()"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(count)
        ]
        self.pids = [process.pid for process in self._processes]
        self.ports: list[int] = []

    def __enter__(self) -> Peers:
        for process in self._processes:
            assert process.stdout is not None
            self.ports.append(int(process.stdout.readline()))
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class Bare:
    """The side that asks: writes its requests to all peers, then reads all answers.

    Parameters
    ----------
    ports : list of int
        Of the peers.
    kind : str
        Of the sockets: "unix" or "tcp".
    spin : float
        Seconds for which the caller polls for an answer before it sleeps.
    """

    def __init__(self, ports: list[int], kind: str, spin: float = 0.0):
        self._sockets, self._spin = [connected(port, kind) for port in ports], spin
        self.prepare(0, 0)

    def prepare(self, sent: int, wanted: int) -> None:
        """From now on requests of `sent` bytes to each peer, answered by `wanted`; both without the head."""
        self._request, self._answer = buffer(HEAD + sent), buffer(HEAD + wanted)
        SIZES.pack_into(self._request, 0, sent, wanted)

    def exchange(self) -> None:
        """One round trip."""
        for sock in self._sockets:
            sock.sendall(self._request)
        for sock in self._sockets:
            receive(sock, self._answer, 0, len(self._answer), self._spin)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def connected(port: int, kind: str) -> socket.socket:
    if kind == "tcp":
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(name_of(port))
    return sock
