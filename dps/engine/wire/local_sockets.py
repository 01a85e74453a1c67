"""Unix sockets between processes of one machine: two thirds of the time of TCP for 72 bytes, and a third for 1 MB.

An endpoint that listens at a TCP address also listens at a Unix socket whose name is made of that address. A peer that
is to connect to the address tries the name first. The name is abstract (Linux): it is no file, it ends with the socket,
and it is known in one network namespace only, as the TCP address is. So a peer that finds the name would reach the same
endpoint over TCP, and a peer on another machine, or in a container with a network of its own, does not find it.

Another user of the machine could take the name before the endpoint does. Therefore a peer uses a socket only if the
process that listens there belongs to its own user; otherwise it connects over TCP. The two prove the secret to each
other over both. TLS goes over TCP, because certificates are asked of peers that connect over a network.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

from dps import config

__all__ = ["connected_locally", "is_local", "listening_locally", "peer_process", "widen"]

BACKLOG = 1024
SEND_BYTES = 1 << 20  # that may be on their way to the peer; the system's limit may be lower
PREFIX = "\0dps/"


def _name(address: tuple[str, int]) -> str | None:
    """The name of the Unix socket beside a TCP address; None where there are none, or they are turned off."""
    if sys.platform != "linux" or not config.flag("unix-sockets"):
        return None
    return f"{PREFIX}{address[0]}:{address[1]}"


def listening_locally(address: tuple[str, int]) -> socket.socket | None:
    """A Unix socket that listens beside this TCP address; None where that cannot be."""
    name = _name(address)
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
    name = _name(address)
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


def peer_process(sock: socket.socket) -> int:
    """The number of the process at the other end of a Unix socket, when it connected."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
