"""Waiting: what has come to a connection and was not looked at: in its inbox, in a body half read, in the system.

Each connection is read when the loop comes to it, so most of what waits for a busy thread is in the system's buffers.
How much there is the system says (FIONREAD); how many frames that is, their headers say, which are looked at without
being read (MSG_PEEK). That takes microseconds for each connection: it is to be asked now and then.
"""

from __future__ import annotations

import array
import socket
from typing import Any

from dps.wire.frames import HEADER_SIZE, body_size

try:
    import fcntl
    import termios
except ImportError:  # Windows: what is in the system's buffers is not known
    fcntl = termios = None  # type: ignore[assignment]

__all__ = ["unread", "waiting"]

PEEK = 1 << 14  # bytes that are looked at


def unread(sock: Any) -> int:
    """Bytes that the system has for a socket."""
    if fcntl is None:
        return 0
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, count, True)
    except (OSError, ValueError):  # it is being closed
        return 0
    return count[0]


def waiting(sock: Any, encrypted: bool, inbox: memoryview, missing: int | None) -> tuple[int, int]:
    """Frames that have come, if only their beginning, and their bytes.

    Parameters
    ----------
    sock : socket
    encrypted : bool
        What the system has is not to be read: it counts as one frame.
    inbox : memoryview
        What was read of frames that are still to be handled.
    missing : int, optional
        Of a body that is being read: bytes still to come.
    """
    there = unread(sock)
    frames, at = (0, 0) if missing is None else (1, missing)
    known = bytes(inbox)
    total = len(known) + there
    if there and at < total and not encrypted:
        known += _peeked(sock, min(there, PEEK))
    while at < (len(known) if encrypted else total):
        frames += 1
        if at + HEADER_SIZE > len(known):  # the rest is not known
            break
        at += HEADER_SIZE + body_size(known, at)
    return frames + bool(there and encrypted), total


def _peeked(sock: Any, nbytes: int) -> bytes:
    """What comes next, which stays where it is."""
    own = socket.socket(sock.family, socket.SOCK_STREAM, 0, sock.fileno())  # the loop's object cannot
    try:
        return own.recv(nbytes, socket.MSG_PEEK)
    except OSError:
        return b""
    finally:
        own.detach()
