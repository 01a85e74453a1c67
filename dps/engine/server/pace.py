"""How fast a server's dumps to joiners go: what is under way, what has to be confirmed first, and when they rest. Pure.

Three parties pay for a dump, and each has a rule:

* the ops for which an answer waits, because the joiner has another of their shards already. At the joiner they wait
  behind a piece. Among such ops one piece is under way at a time, and pieces occupy the joiner for a share of the time;
* the joiner, which has to keep up with the ops of the shards that it is learning: no answer waits for these, but they
  take memory of the primary until they are confirmed. Where too many bytes of them are unconfirmed, a piece leaves only
  after a rest. The end of a dump, from which on answers wait for the joiner, leaves when hardly any are;
* the requests of all clients of either server, which wait while its loop makes or takes a piece. A dump gets a share of
  a loop's time as long as there are requests: the sender rests after a piece, and the joiner before it confirms one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["END_SECONDS", "MOST_UNDER_WAY", "PIECE_BYTES", "SHARE", "DumpPace", "Traffic", "may_end", "next_piece"]

SHARE = 0.25  # of the time of a loop that serves requests: pushes are to keep 0.7 of their rate
PIECE_BYTES = 1 << 18  # of rows in one frame of a dump
MOST_UNDER_WAY = 4  # pieces to one joiner, so that it need not wait for the next one
AMONG_OPS_SECONDS = 0.05  # since the last op for which an answer waits: so long the next one is expected
REST_SECONDS = 0.003  # from a piece to the next one, at most, so that a dump goes on whatever the ops are
BEHIND_BYTES = 1 << 22  # of unconfirmed ops to a joiner: with more of them it has to catch up before it gets more rows
LAST_BYTES = 1 << 18  # of such ops with which a dump may end: the joiner takes them in a fraction of a millisecond
END_SECONDS = 2.0  # that the end of a dump waits for that, because pushes may go on faster than the joiner takes them
BUSY_SECONDS = 0.05  # since the last request: so long a server counts as serving
AHEAD_SECONDS = 0.002  # that a dump may be ahead of its share, because the loop's timers count milliseconds
MAX_REST_SECONDS = 0.01  # that one server's dumps rest at a time, so that they go on whatever the last pieces took


class Traffic(NamedTuple):
    """What goes to one joiner, as far as the next piece depends on it."""

    awaited: bool  # an answer waits for an op that is not confirmed
    op_sent_at: float  # when the last such op was sent
    learning_bytes: int  # of unconfirmed ops for which no answer waits
    under_way: float  # unconfirmed pieces
    confirmed_at: float  # when the last piece was confirmed
    took: float  # seconds from the sending of that piece until then


def next_piece(traffic: Traffic, now: float) -> float:
    """When the next piece may leave; infinity, while another one has to be confirmed first.

    Examples
    --------
    >>> quiet = Traffic(False, -math.inf, 0, 0, 6.999, 0.001)
    >>> next_piece(quiet, 7.0), next_piece(quiet._replace(under_way=4), 7.0)
    (7.0, inf)
    >>> round(next_piece(quiet._replace(awaited=True), 7.0), 6)  # 3 ms after the last one, which took 1 ms
    7.002
    """
    among_ops = traffic.awaited or now - traffic.op_sent_at < AMONG_OPS_SECONDS
    behind = traffic.learning_bytes > BEHIND_BYTES
    if traffic.under_way > (0 if among_ops or behind else MOST_UNDER_WAY - 1):
        return math.inf
    rest = REST_SECONDS if behind else min(REST_SECONDS, rest_after(traffic.took)) if among_ops else 0.0
    return max(now, traffic.confirmed_at + rest)


def rest_after(seconds: float) -> float:
    """How long a dump rests after work of so many seconds, so that it has its share of the time."""
    return seconds * (1 - SHARE) / SHARE


def may_end(learning_bytes: int, waited: float) -> bool:
    """Whether the end of a dump may leave, which has waited for so many seconds: answers wait for the joiner then."""
    return learning_bytes <= LAST_BYTES or waited >= END_SECONDS


class DumpPace:
    """The share of a server's time that its dumps may have while it serves requests.

    Parameters
    ----------
    served : callable
        Returns how many requests of clients there have been.
    worked : callable
        Returns the processor seconds of the server's thread. Time would count other processes against the dump.

    Examples
    --------
    >>> requests, seconds = 0, 0.0
    >>> pace = DumpPace(lambda: requests, lambda: seconds)
    >>> with pace.work(lambda: 5.0):
    ...     seconds += 2e-3
    >>> pace.rested_at(5.0)  # no request
    5.0
    >>> requests = 1
    >>> round(pace.rested_at(5.0) - 5.0, 6)
    0.006
    """

    def __init__(self, served: Callable[[], int], worked: Callable[[], float]):
        self._served, self._worked = served, worked
        self._seen = 0
        self._looked_at = self._seen_at = self._rested_at = -math.inf

    def rested_at(self, now: float) -> float:
        """When the next piece may leave; now, if there are no requests."""
        count = self._served()
        if count != self._seen and now - self._looked_at < BUSY_SECONDS:  # else they may have come long ago
            self._seen_at = now
        self._seen, self._looked_at = count, now
        rests = now - self._seen_at < BUSY_SECONDS and self._rested_at > now + AHEAD_SECONDS
        return self._rested_at if rests else now

    @contextlib.contextmanager
    def work(self, now: Callable[[], float]) -> Iterator[None]:
        """A piece is made or taken within; then the dump rests."""
        began = self._worked()
        yield
        moment = now()
        rested_at = max(moment, self._rested_at) + rest_after(self._worked() - began)
        self._rested_at = min(rested_at, moment + MAX_REST_SECONDS)
