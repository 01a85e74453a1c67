"""Slow servers: those at which trainers lose time that the other servers do not cost. Pure.

Two witnesses are heard. What trainers say: how long they were blocked for each server. They wait for one after the
other, though all servers work at the same time, so the first always costs more than the rest. Hence what the server
says of itself: how long its requests took, and how late its loop is. Where that confirms, little is enough; where it
does not (the way to the server may be slow), the wait must be far beyond what requests of that size take anywhere. A
run with one server has no other to compare with, and only that measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

import numpy as np

from dps.coordination.findings import CROWDED, MOST, Finding, duration
from dps.coordination.rates import Window, others

__all__ = ["Server", "silence", "slow_servers"]

QUIET = 2.0  # seconds without a beat
CONFIRMED, SUSPECTED = 0.2, 0.3  # part of the trainers' time lost, if the server's own report confirms it, and if not
SEVERAL = 2.0  # times the others' service
FAR, FARTHER = 5.0, 3.0  # without a confirmation: times what is ordinary, and times the other servers
CALL, BANDWIDTH = 3e-3, 1e8  # seconds and bytes a second that a request ordinarily takes at most: on a busy machine
LATE, LATER = 0.02, 0.05  # seconds that a loop is late: beside other servers, and alone
OFTEN = 0.25  # of that lateness, which is the worst, must be lost every clock
MINORITY = 0.34  # of the trainers need not lose anything at it


class Server(NamedTuple):
    """What is known of a server.

    Parameters
    ----------
    number : int
    service, p99 : float
        Seconds that its requests took lately, at the server: mean, and all but one in a hundred.
    lag : float
        Seconds that its loop was late at worst lately.
    alive : bool
    age : float
        Seconds since it was heard of.
    host : str, optional
        The machine that it runs on.
    ran, starved : float
        Parts of its time that the thread which serves ran lately, and that it was ready to run but had no processor.
    cost : float
        Processor seconds of that thread for a request.
    """

    number: int
    service: float
    p99: float
    lag: float
    alive: bool
    age: float
    host: str | None = None
    ran: float = 0.0
    starved: float = 0.0
    cost: float = math.inf

    def excused(self) -> Server:
        """As it would be if its machine had processors for it: judged by the processor time that requests take. How
        late its loop is says nothing then."""
        return self._replace(service=min(self.service, self.cost), p99=min(self.p99, self.cost), lag=0.0)


def silence(server: Server, now: float, awake: float) -> float:
    """Seconds that nothing was heard of it, as far as is known by a judge who has been awake since `awake`; 0 if that
    is nothing out of the ordinary."""
    seconds = min(server.age, now - awake)
    return seconds if not server.alive or seconds > QUIET else 0.0


def slow_servers(
    window: Window,
    servers: Sequence[Server],
    held: Set[int],
    now: float,
    awake: float,
    slowed: Collection[int] = (),
    trainers: np.ndarray | None = None,
) -> list[Finding]:
    """The servers that hold trainers up, by the trainers' reports in `window`. Of those `held` already, half is enough.

    `slowed` are those servers, and `trainers` a mask of those trainers, that their machines slow. Such a server must
    take more processor time than others for its requests. Such a trainer is no witness of what it waits for.

    Examples
    --------
    >>> from dps.coordination.history import COLUMNS, History
    >>> history = History(trainers=2)
    >>> row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": 10, "total": 1.0, "compute": 0.2, "pull": 0.8}
    >>> for trainer in 0, 1:
    ...     history.report(trainer, 1.0, list(row.values()), 10, {0: (10, 0.02), 1: (10, 0.78)})
    >>> told = [Server(0, 1e-4, 1e-3, 1e-3, True, 0.1), Server(1, 0.075, 0.08, 0.075, True, 0.1)]
    >>> [found] = slow_servers(Window(history, history.reports()), told, set(), now=1.0, awake=0.0)
    >>> found.server, round(found.share, 2)
    (1, 0.76)
    """
    found = [_quiet(server, now, awake) for server in servers if silence(server, now, awake)]
    known = [server for server in servers if not silence(server, now, awake) and server.number in window.servers]
    reported = ~np.isnan(window.step)
    free = reported if trainers is None else reported & ~trainers
    doubtful = not free.any()
    reported = reported if doubtful else free
    known = [server.excused() if server.number in slowed else server for server in known]
    if not known or not reported.any():
        return found
    columns = [window.servers.index(server.number) for server in known]
    costs = np.quantile(window.at[reported][:, columns], MINORITY, axis=0, method="lower")
    asked = np.median(window.asked[reported][:, columns], axis=0)
    step = float(np.median(window.step[reported]))
    ordinary = CALL + window.bytes_of_request() / BANDWIDTH
    usual = np.nan_to_num(others(costs))
    service = others(np.array([server.service for server in known]))
    lag = others(np.array([server.lag for server in known]))
    for i, server in enumerate(known):
        alone, ease = len(known) == 1, 0.5 if server.number in held else 1.0
        takes = ordinary if alone else max(float(service[i]), CALL / 3)
        itself = min(costs[i], asked[i] * (server.service - takes))  # by its own word
        excused = server.number in slowed
        lost = itself if excused else max(costs[i] - usual[i], itself)
        share = lost / max(step, 1e-9)
        late = LATER if alone else max(LATE, 3 * float(lag[i]))
        confirmed = server.service > ease * SEVERAL * takes or (server.lag > ease * late and lost > OFTEN * server.lag)
        far = (
            not (excused or doubtful)
            and lost > ease * FAR * ordinary * max(asked[i], 1)
            and costs[i] > FARTHER * usual[i]
        )
        if (confirmed and share > ease * CONFIRMED) or (far and share > ease * SUSPECTED):
            made = _slow(server, float(costs[i]), float(usual[i]), float(share), confirmed, alone, now)
            found.append(made._replace(remedy=CROWDED) if excused else made)
    return found


def _slow(server: Server, cost: float, usual: float, share: float, confirmed: bool, alone: bool, now: float) -> Finding:
    beside = "" if alone else f", at the others {duration(usual)}"
    own = f"its requests take {duration(server.service)} there (p99 {duration(server.p99)})"
    own += f" and its loop is up to {duration(server.lag)} late" if server.lag > LATE else ""
    doubt = "" if confirmed else ", so that the way to it may be what is slow"
    why = (
        f"most trainers wait {duration(cost)} a clock for server {server.number}{beside} ({share:.0%} of their time); "
    )
    remedy = "see what else its machine does; add servers, ps.scale(...)"
    if not alone:
        remedy = f"move its shards off, ps.retire({server.number}); {remedy}"
    factor = 1 / max(1 - share, 1 / MOST) if alone else min(max(cost / max(usual, 1e-6), 1.0), MOST)
    return Finding("server", None, server.number, factor, now, share, why + own + doubt, remedy)


def _quiet(server: Server, now: float, awake: float) -> Finding:
    seconds = min(server.age, now - awake)
    lost = "" if server.alive else ", and its connection is lost"
    why = f"nothing was heard of server {server.number} for {seconds:.1f} s{lost}"
    remedy = "copies take over if tables have any (copies=2), else the run ends; see whether its worker still works"
    return Finding("server", None, server.number, max(1.0, min(seconds / 0.25, MOST)), now - seconds, 1.0, why, remedy)
