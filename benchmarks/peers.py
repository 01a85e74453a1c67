"""Bare blocking sockets: the floor under every pull and push.

A request is 64 bytes that begin with two uint64 - the bytes that follow, the bytes wanted back - and then those bytes.
Both sides reuse their buffers and never look at what they move.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading

import numpy as np

from benchmarks.common import ROOT

__all__ = ["Bare", "Peers"]

HEAD = 64
SIZES = struct.Struct("<QQ")
Address = tuple[str, int]


def buffer(nbytes: int) -> memoryview:
    """Memory whose pages are there already."""
    return memoryview(np.ones(nbytes, np.uint8))


def receive(sock: socket.socket, view: memoryview, have: int, want: int) -> int:
    """Fill `view` up to at least `want` bytes; how many there are then."""
    while have < want:
        n = sock.recv_into(view[have:want] if have else view)
        if n == 0:
            raise EOFError
        have += n
    return have


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


def serve() -> None:
    """The process of a peer: prints its port, and ends when its standard input does."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    answer(sock)
                except (EOFError, OSError):
                    pass


class Peers:
    """So many processes of `serve`, for the length of a with block."""

    def __init__(self, count: int):
        command = [sys.executable, "-c", "from benchmarks.peers import serve; serve()"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(count)
        ]
        self.pids = [process.pid for process in self._processes]
        self.addresses: list[Address] = []

    def __enter__(self) -> Peers:
        for process in self._processes:
            assert process.stdout is not None
            self.addresses.append(("127.0.0.1", int(process.stdout.readline())))
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class Bare:
    """The side that asks: writes its requests to all peers, then reads all answers.

    Parameters
    ----------
    addresses : list of (str, int)
        The peers.
    """

    def __init__(self, addresses: list[Address]):
        self._sockets = [socket.create_connection(address) for address in addresses]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out, self._in = buffer(HEAD), buffer(HEAD)

    def prepare(self, sent: int, wanted: int) -> None:
        """From now on requests of `sent` bytes to each peer, answered by `wanted`; both without the head."""
        if len(self._out) < HEAD + sent:
            self._out = buffer(HEAD + sent)
        if len(self._in) < HEAD + wanted:
            self._in = buffer(HEAD + wanted)
        SIZES.pack_into(self._out, 0, sent, wanted)
        self._request, self._answer = self._out[: HEAD + sent], self._in[: HEAD + wanted]

    def exchange(self) -> None:
        """One round trip."""
        for sock in self._sockets:
            sock.sendall(self._request)
        for sock in self._sockets:
            receive(sock, self._answer, 0, len(self._answer))

    def spin(self) -> None:
        """One round trip with the first peer, polling for the answer instead of sleeping."""
        sock, view, have = self._sockets[0], self._answer, 0
        sock.sendall(self._request)
        sock.setblocking(False)
        while have < len(view):
            try:
                have += sock.recv_into(view[have:])
            except BlockingIOError:
                pass
        sock.setblocking(True)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
