"""TCP keepalive: the system breaks a connection to a dead machine within half a minute, and not after two hours.

A host that loses power closes no connection: its peers only find out because nothing arrives from it any more.
"""

from __future__ import annotations

import socket

__all__ = ["DEAD_PEER_SECONDS", "keep_alive"]

DEAD_PEER_SECONDS = 30  # without a packet from the peer's machine, until the system breaks the connection
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": DEAD_PEER_SECONDS // 2, "TCP_KEEPINTVL": DEAD_PEER_SECONDS // 6, "TCP_KEEPCNT": 3}


def keep_alive(sock: socket.socket, untaken_seconds: float | None = None) -> None:
    """Have the system break a connection whose peer's machine is dead.

    A trainer then has half of `dps.timeouts.rejoin` left to connect again.

    Parameters
    ----------
    sock : socket
    untaken_seconds : float, optional
        How long the peer may leave sent data untaken; `DEAD_PEER_SECONDS` by default. The side that answers requests
        allows more, because a client may compute for a while before it takes an answer.
    """
    untaken_ms = round(1000 * (DEAD_PEER_SECONDS if untaken_seconds is None else untaken_seconds))
    options = {**KEEPALIVE_OPTIONS, "TCP_USER_TIMEOUT": untaken_ms}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        if hasattr(socket, option):  # on Linux; elsewhere the system's own times hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
