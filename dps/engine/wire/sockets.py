"""Sockets between two parties: Unix sockets on one machine, TCP with keepalive, TLS, and waiting without sleep.

Unix sockets between processes of one machine need two thirds of the time of TCP for 72 bytes, and a third for 1 MB. An
endpoint that listens at a TCP address also listens at a Unix socket whose name is made of that address. A peer that
is to connect to the address tries the name first. The name is abstract (Linux): it is no file, it ends with the socket,
and it is known in one network namespace only, as the TCP address is. So a peer that finds the name would reach the same
endpoint over TCP, and a peer on another machine, or in a container with a network of its own, does not find it.

Another user of the machine could take the name before the endpoint does. Therefore a peer uses a socket only if the
process that listens there belongs to its own user; otherwise it connects over TCP. The two prove the secret to each
other over both. TLS goes over TCP, because certificates are asked of peers that connect over a network.

TCP keepalive. A host that loses power closes no connection: its peers only find out because nothing arrives from it any
more. The system breaks a connection to a dead machine within half a minute, and not after two hours.

TLS 1.3. The connecting side has finished the handshake before the listening side has seen its certificate; the verdict
on the certificate comes with the first bytes that the connecting side reads. So the listening side has to send the
verdict (`TlsVerdict`), and the connecting side has to look for it (`Tls.refusal`).

Waiting. For the first moments `receive` of a channel's socket polls without sleeping: see `polling.pyx`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable

from dps import config
from dps.engine.core.requests.polling import Polling

__all__ = [
    "DEAD_PEER_SECONDS",
    "Plain",
    "Tls",
    "TlsVerdict",
    "connected",
    "connected_locally",
    "hasten",
    "is_local",
    "is_own_address",
    "keep_alive",
    "listening_locally",
    "peer_process",
    "widen",
]


# ---- Unix sockets beside TCP

BACKLOG = 1024
# Size of what may be on its way to the peer; the system's limit may be lower.
SEND_BYTES = 1 << 20
PREFIX = "\0dps/"


def _local_name(address: tuple[str, int]) -> str | None:
    """The name of the Unix socket beside a TCP address; None where there are none, or they are turned off."""
    if sys.platform != "linux" or not config.flag("unix-sockets"):
        return None
    return f"{PREFIX}{address[0]}:{address[1]}"


def listening_locally(address: tuple[str, int]) -> socket.socket | None:
    """A Unix socket that listens beside this TCP address; None where that cannot be."""
    name = _local_name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:  # another process has the name: peers will use TCP
        sock.close()
        return None
    return sock


def connected_locally(address: tuple[str, int]) -> socket.socket | None:
    """A Unix socket that is connected to the endpoint at this TCP address; None if it has to be reached over TCP."""
    name = _local_name(address)
    if name is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    # It connects at once, or fails: with EAGAIN where too many peers wait to be accepted.
    if sock.connect_ex(name) == 0 and _listener(sock) == os.geteuid():
        widen(sock)
        return sock
    sock.close()
    return None


def _listener(sock: socket.socket) -> int:
    """The user of the process that listens at the other end."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def widen(sock: socket.socket) -> None:
    """Let this end of a Unix socket send `SEND_BYTES` before it waits, because its peer then wakes less often."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def is_local(sock: socket.socket) -> bool:
    """Whether this is a Unix socket, so that its peer is a process of this machine."""
    return sock.family == getattr(socket, "AF_UNIX", None)


@functools.lru_cache(maxsize=1024)
def is_own_address(host: str) -> bool:
    """Whether this is an address of this machine, or of the network namespace that this process is in. A name is none,
    because looking it up may take long.

    >>> is_own_address("127.0.0.1"), is_own_address("192.0.2.1")
    (True, False)
    """
    with contextlib.suppress(OSError, UnicodeError):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # UDP sends nothing here, but the system chooses an own address
            return str(sock.getsockname()[0]) == str(address[0])
    return False


def peer_process(sock: socket.socket) -> int:
    """The number of the process at the other end of a Unix socket, when it connected."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


# ---- Keepalive of TCP

# Time without a packet from the peer's machine after which the system breaks the connection.
DEAD_PEER_SECONDS = 30
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": DEAD_PEER_SECONDS // 2, "TCP_KEEPINTVL": DEAD_PEER_SECONDS // 6, "TCP_KEEPCNT": 3}


def keep_alive(sock: socket.socket, untaken_seconds: float | None = None) -> None:
    """Have the system break a connection whose peer's machine is dead.

    A trainer then has half of `dps.timeouts.rejoin` left to connect again.

    `untaken_seconds` is how long the peer may leave sent data untaken; `DEAD_PEER_SECONDS` by default. The side that
    answers requests allows more, because a client may compute for a while before it takes an answer.
    """
    untaken_ms = round(1000 * (DEAD_PEER_SECONDS if untaken_seconds is None else untaken_seconds))
    options = {**KEEPALIVE_OPTIONS, "TCP_USER_TIMEOUT": untaken_ms}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        if hasattr(socket, option):  # on Linux; elsewhere the system's own times hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# ---- Small requests before large ones

INTERACTIVE = 6  # TC_PRIO_INTERACTIVE of Linux: the highest priority that needs no right


def hasten(sock: socket.socket, priority: int = INTERACTIVE) -> None:
    """Let what a TCP socket sends pass the packets of other sockets that wait for the same network card.

    A connection has this priority until its first large request, and none from then on. So pulls and ticks of trainers
    that send nothing large do not wait for the pushes of others. A connection's own packets never pass each other,
    because those with a priority are older than those without. It is the queue of the sender's machine that looks at
    priorities, where it is one of pfifo_fast or prio; where connections take turns (fq_codel), they matter less.
    """
    if hasattr(socket, "SO_PRIORITY"):  # on Linux
        with contextlib.suppress(OSError):  # a closed socket has none
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)


# ---- The sockets of a channel: plain TCP and TLS, non-blocking underneath

# Slice of sleep after which the deadline is checked and `idle` is called.
SLICE_SECONDS = 0.25
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

    def give_way(self) -> None:
        """Send without a priority from now on."""
        hasten(self._sock, 0)

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
