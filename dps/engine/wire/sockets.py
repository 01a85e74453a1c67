"""Sockets of a channel: plain TCP and TLS, non-blocking underneath, with waiting that does not sleep at once.

TLS 1.3. The connecting side has finished the handshake before the listening side has seen its certificate; the verdict
on the certificate comes with the first bytes that the connecting side reads. So the listening side has to send the
verdict (`TlsVerdict`), and the connecting side has to look for it (`Tls.refusal`).

Waiting. For the first moments `receive` polls without sleeping: see `polling.pyx`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable

from dps import config
from dps.engine.core.requests.polling import Polling

__all__ = ["Plain", "Tls", "TlsVerdict", "connected"]

SLICE_SECONDS = 0.25  # of sleep, until the deadline is checked and `idle` is called
# Errors of TLS that mean a broken connection; every other one means that the two sides cannot speak TLS.
CONNECTION_ERRORS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)

yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def connected(address: tuple[str, int], deadline: float, idle: Callable[[], None] | None) -> socket.socket:
    """A TCP socket to that address. While no answer comes, `idle` is called every `SLICE_SECONDS`; it may raise."""
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{address[0]!r} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(where)
            if code == errno.EINPROGRESS:
                _wait_for(sock, select.POLLOUT, deadline, idle)
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


def _wait_for(sock: socket.socket, event: int, deadline: float, idle: Callable[[], None] | None) -> None:
    poll = select.poll()
    poll.register(sock, event)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(min(left, SLICE_SECONDS) * 1000):
            return
        if idle is not None:
            idle()
    raise TimeoutError("timed out")


class TlsVerdict(ssl.SSLObject):
    """The listening side of TLS in an event loop: it sends a refused peer the reason, where loops only hang up.

    For `SSLContext.sslobject_class`. The alert with the reason is ready when the handshake fails, but an event loop
    drops it then. A loop does send it when the handshake waits for the peer. So a failing handshake waits once more,
    and fails when the peer answers or closes the connection.
    """

    _refused: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """As the base class, except that a failure is raised by the second call."""
        if self._refused is not None:
            raise self._refused
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, *CONNECTION_ERRORS):
            raise
        except ssl.SSLError as error:
            self._refused = error
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert is to be sent") from error


class Plain:
    """A TCP socket."""

    refusal: ssl.SSLError | None = None  # the reason why the peer refuses our TLS, once it has sent it

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock, self._polling = sock, Polling(config.polling())
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
            began = time.perf_counter()
            until = began + self._polling.now
            while time.perf_counter() < until:
                yield_core()
                try:
                    count = receive(view)
                    self._polling.waited(time.perf_counter() - began)
                    return count
                except BlockingIOError:
                    pass
            self._in.poll(patience * 1000)
            self._polling.waited(time.perf_counter() - began)
            return receive(view)
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def wait(self, seconds: float, also_write: bool = False) -> bool:
        """Wait until the socket can be read (or written, with `also_write`); returns whether there is data to read."""
        events = (self._in_out if also_write else self._in).poll(seconds * 1000)
        return any(event & ~select.POLLOUT for _, event in events)

    def end(self) -> None:
        """End the connection in both directions; the socket stays open."""
        with contextlib.suppress(OSError):  # the peer has ended it
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class Tls(Plain):
    """A TCP socket with TLS, where a read may have to write, and a write to read."""

    _sock: ssl.SSLSocket

    @classmethod
    def over(cls, sock: socket.socket, tls: ssl.SSLContext, deadline: float, idle: Callable[[], None] | None) -> Tls:
        """Do the handshake. Raises ssl.SSLError if the sides cannot agree, another OSError if the connection breaks."""
        wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False)
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    return cls(wrapped)
                except ssl.SSLWantReadError:
                    _wait_for(wrapped, select.POLLIN, deadline, idle)
                except ssl.SSLWantWriteError:
                    _wait_for(wrapped, select.POLLOUT, deadline, idle)
                except CONNECTION_ERRORS as error:
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
                if isinstance(error, ssl.SSLError) and not isinstance(error, CONNECTION_ERRORS):
                    self.refusal = error
                return 0
        return None
