"""Memory that a client and a server of one machine share: how it is made, offered and opened.

A large answer takes two copies through a Unix socket, and all of it leaves the processor's cache in between. Through a
ring of pieces that both ends have mapped it takes one copy beside that of the gathering, and the pieces stay in the
cache (`core/requests/ring.pyx`). The client makes the memory when it is about to ask for the first large answer of a
connection. It is a file without a name, and goes with the connection.

Event loops drop files that come along with bytes of a Unix socket. So the server opens the client's file by the number
of the process, which it asks its own system for, and the number of the file, which the client says. It does not trust
what it finds there: a file that can be cut short would end the server (SIGBUS) as it writes, so the file has to be one
whose size is sealed. The *mark*, a random number in the memory, tells the right file from one of another process that
has got the number of the client meanwhile.

Where something is in the way (another system than Linux, process numbers of another container, no rights, too many
such memories already), the answers come through the socket as ever.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket

from dps.engine.core.requests.ring import RING_BYTES, Ring
from dps.engine.wire.sockets import peer_process

__all__ = ["MOST_RINGS", "offered", "opened"]

logger = logging.getLogger(__name__)

# Memories that an endpoint has open at once, 2 MiB each: 128 MiB. More trainers of one machine than that are rare, and
# those beyond have their answers through the socket.
MOST_RINGS = 64


def offered() -> tuple[Ring, int] | None:
    """Memory for another process of this machine, and the number of its file; None where there can be none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        fd = os.memfd_create("dps-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        logger.debug("no memory is shared with servers of this machine: %s", error)
        return None
    try:
        os.posix_fallocate(fd, 0, RING_BYTES)  # because a page that there is no memory for would end its writer
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        ring = Ring(fd, own=True)
    except OSError as error:
        logger.debug("no memory is shared with servers of this machine: %s", error)
        os.close(fd)
        return None
    ring.sign(secrets.randbits(63))
    return ring, fd


def opened(sock: socket.socket, number: int, mark: int) -> Ring | None:
    """The memory that the peer at this Unix socket offers; None where it cannot be had, or is not what it has to be."""
    path = f"/proc/{peer_process(sock)}/fd/{number}"
    try:
        if not os.readlink(path).startswith("/memfd:"):  # to open another kind of file may take long, or do something
            raise OSError(f"{path} is no memory")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            found = os.fstat(fd)
            if sealed & _seals() != _seals() or found.st_size != RING_BYTES or 512 * found.st_blocks < RING_BYTES:
                raise OSError(f"{path} can be cut short, or has not {RING_BYTES} bytes")
            ring = Ring(fd)
        finally:
            os.close(fd)
        if ring.mark != mark:
            raise OSError(f"{path} has another mark")
    except (OSError, AttributeError) as error:  # some systems have no seals
        logger.debug("large answers to process %d go through the socket: %s", peer_process(sock), error)
        return None
    return ring


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
