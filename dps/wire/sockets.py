"""Sockets of a channel: plain TCP and TLS, non-blocking underneath, with waiting that does not sleep at once.

TLS 1.3. The side that connects has shaken hands before the other has seen its certificate: the verdict comes with the
first bytes that it reads. So a listener must send it (`Verdict`), and who connects look for it (`Tls.refusal`).

Waiting. For the first moments `receive` polls without sleeping: waking a sleeping core costs more (40 to 80 us on
virtual machines) than a server needs to answer. It gives way to whoever else wants the core, which may be the server.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable

__all__ = ["Plain", "Tls", "Verdict", "connected"]

SPIN = 50e-6  # seconds of polling before going to sleep
SLICE = 0.25  # seconds of sleep between two looks at the deadline and at `idle`
BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)  # the connection; all else is about TLS itself

give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def connected(address: tuple[str, int], deadline: float, idle: Callable[[], None] | None) -> socket.socket:
    """A TCP socket to that address; `idle` is called now and then while nobody answers, and may raise."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{address[0]!r} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                _await(sock, select.POLLOUT, deadline, idle)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _await(sock: socket.socket, event: int, deadline: float, idle: Callable[[], None] | None) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(min(left, SLICE) * 1000):
            return
        if idle is not None:
            idle()
    raise TimeoutError("timed out")


class Verdict(ssl.SSLObject):
    """The listening side of TLS in an event loop: says why it refuses a peer, where loops close the connection mutely.

    For `SSLContext.sslobject_class`. What is to be said is ready when the handshake fails, but loops drop it then. They
    send it when the handshake waits for the peer; so it does, once more, and fails when the peer answers or goes away.
    """

    _refused: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """As it does, failing at the second call."""
        if self._refused is not None:
            raise self._refused
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, *BROKEN):
            raise
        except ssl.SSLError as error:
            self._refused = error
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert is to be sent") from error


class Plain:
    """A TCP socket."""

    refusal: ssl.SSLError | None = None  # why the peer will not speak TLS with us, once it has said so

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._in, self._in_out = select.poll(), select.poll()
        self._in.register(sock, select.POLLIN)
        self._in_out.register(sock, select.POLLIN | select.POLLOUT)

    def send(self, buffers: list[memoryview]) -> int:
        try:
            return self._sock.sendmsg(buffers[:64])
        except BlockingIOError:
            return 0

    def receive(self, view: memoryview, patience: float) -> int | None:
        receive = self._sock.recv_into
        try:
            try:
                return receive(view)
            except BlockingIOError:
                pass
            if patience <= 0:
                return None
            until = time.perf_counter() + SPIN
            while time.perf_counter() < until:
                give_way()
                try:
                    return receive(view)
                except BlockingIOError:
                    pass
            self._in.poll(patience * 1000)
            return receive(view)
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def wait(self, seconds: float, also_write: bool = False) -> bool:
        """Wait until something can be done; whether there is something to read."""
        events = (self._in_out if also_write else self._in).poll(seconds * 1000)
        return any(event & ~select.POLLOUT for _, event in events)

    def close(self) -> None:
        self._sock.close()


class Tls(Plain):
    """The same over TLS, where reading may need to write and the other way round."""

    _sock: ssl.SSLSocket

    @classmethod
    def over(cls, sock: socket.socket, tls: ssl.SSLContext, deadline: float, idle: Callable[[], None] | None) -> Tls:
        """Shake hands. ssl.SSLError when the two cannot agree; where merely the connection breaks, another OSError."""
        wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    return cls(wrapped)
                except ssl.SSLWantReadError:
                    _await(wrapped, select.POLLIN, deadline, idle)
                except ssl.SSLWantWriteError:
                    _await(wrapped, select.POLLOUT, deadline, idle)
                except BROKEN as error:
                    raise ConnectionResetError(errno.ECONNRESET, f"during the TLS handshake: {error}") from error
        except BaseException:
            wrapped.close()
            raise

    def send(self, buffers: list[memoryview]) -> int:
        try:
            return self._sock.send(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def receive(self, view: memoryview, patience: float) -> int | None:
        for attempt in range(2):
            try:
                return self._sock.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if patience > 0 and not attempt:
                    self.wait(patience)
            except OSError as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, BROKEN):
                    self.refusal = error
                return 0
        return None
