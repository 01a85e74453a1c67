"""Slow servers: servers at which trainers lose time that the other servers do not cost. Pure.

There are two kinds of evidence. The first are the trainers' reports: how long they were blocked for each server.
Trainers wait for one server after the other, though all servers work at the same time, so the first server always costs
more than the rest. The second is therefore the server's own report: how long its requests took, and how late its event
loop is. If that confirms the slowness, a small loss is enough. If it does not, the network to the server may be slow,
and the wait must be far longer than requests of that size usually take. A run with one server cannot compare servers,
so only the usual time of a request is left as a measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

import numpy as np

from dps.engine.telemetry.findings import CROWDED_REMEDY, MAX_FACTOR, Finding, duration
from dps.engine.telemetry.rates import Window, others

__all__ = ["ServerReading", "silence", "slow_servers"]

# A server counts as silent when no heartbeat has come for this long.
SILENT_SECONDS = 2.0
CONFIRMED_SHARE = 0.2  # least part of the trainers' time that is lost, if the server's own report confirms the slowness
# Least part of the trainers' time that is lost, if the server's own report does not confirm the slowness.
SUSPECTED_SHARE = 0.3
# A server confirms the slowness when its service takes this many times as long as the other servers'.
SLOW_SERVICE_FACTOR = 2.0
# Without a confirmation, the wait must be so many times that of an ordinary request, and that for the other servers.
SUSPECTED_FACTOR, SUSPECTED_FACTOR_OF_OTHERS = 5.0, 3.0
# Upper bound on the time of an ordinary request on a busy machine: for the call, and for its bytes.
CALL_SECONDS = 3e-3
BYTES_PER_SECOND = 1e8
# A loop that is this late confirms the slowness: of one among several servers, and of a single server.
LAG_SECONDS = 0.02
LAG_SECONDS_ALONE = 0.05
MIN_LAG_SHARE = 0.25  # part of the worst lateness that trainers must lose in every clock
# Largest share of the trainers that need not lose any time at a slow server.
MINORITY_SHARE = 0.34


class ServerReading(NamedTuple):
    """What the controller knows of a server, from its recent reports.

    Parameters
    ----------
    service, p99 : float
        Seconds that requests took at the server: mean, and 99th percentile.
    lag : float
        Seconds by which the server's loop was late at worst.
    alive : bool
        Whether the server's connection is up.
    age : float
        Seconds since the last report.
    ran, starved : float
        Parts of the time that the serving thread ran, and that it was ready to run but had no processor.
    cost : float
        Processor seconds of the serving thread per request.
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

    def excused(self) -> ServerReading:
        """The reading with times as on an idle machine: no longer than the processor time that requests take.

        The loop's lateness is left out, because the machine causes it.
        """
        return self._replace(service=min(self.service, self.cost), p99=min(self.p99, self.cost), lag=0.0)


def silence(server: ServerReading, now: float, awake: float) -> float:
    """Seconds since the server was last heard of, counted from `awake` at the earliest; 0 if that is nothing unusual.

    `awake` is when the controller's own diagnosis last resumed: before that it could not hear anything.
    """
    seconds = min(server.age, now - awake)
    return seconds if not server.alive or seconds > SILENT_SECONDS else 0.0


def slow_servers(
    window: Window,
    servers: Sequence[ServerReading],
    held: Set[int],
    now: float,
    awake: float,
    slowed: Collection[int] = (),
    trainers: np.ndarray | None = None,
) -> list[Finding]:
    """The servers that slow trainers down, by the trainers' reports in `window`.

    Half the evidence is enough for the servers in `held`, which have been named already. `slowed` are servers, and
    `trainers` is a mask of trainers, that their overloaded machines slow. Such a server is named only if it takes more
    processor time than others for its requests. The waits of such a trainer are no evidence.
    """
    findings = [_quiet(server, now, awake) for server in servers if silence(server, now, awake)]
    known = [server for server in servers if not silence(server, now, awake) and server.number in window.servers]
    reported = ~np.isnan(window.step)
    free = reported if trainers is None else reported & ~trainers
    doubtful = not free.any()
    reported = reported if doubtful else free
    known = [server.excused() if server.number in slowed else server for server in known]
    if not known or not reported.any():
        return findings
    columns = [window.servers.index(server.number) for server in known]
    costs = np.quantile(window.at[reported][:, columns], MINORITY_SHARE, axis=0, method="lower")
    asked = np.median(window.asked[reported][:, columns], axis=0)
    step = float(np.median(window.step[reported]))
    ordinary = CALL_SECONDS + window.bytes_of_request() / BYTES_PER_SECOND
    usual = np.nan_to_num(others(costs))
    service = others(np.array([server.service for server in known]))
    lag = others(np.array([server.lag for server in known]))
    for i, server in enumerate(known):
        alone, ease = len(known) == 1, 0.5 if server.number in held else 1.0
        takes = ordinary if alone else max(float(service[i]), CALL_SECONDS / 3)
        admitted = min(costs[i], asked[i] * (server.service - takes))  # the loss by the server's own report
        excused = server.number in slowed
        lost = admitted if excused else max(costs[i] - usual[i], admitted)
        share = lost / max(step, 1e-9)
        late = LAG_SECONDS_ALONE if alone else max(LAG_SECONDS, 3 * float(lag[i]))
        confirmed = server.service > ease * SLOW_SERVICE_FACTOR * takes or (
            server.lag > ease * late and lost > MIN_LAG_SHARE * server.lag
        )
        far = (
            not (excused or doubtful)
            and lost > ease * SUSPECTED_FACTOR * ordinary * max(asked[i], 1)
            and costs[i] > SUSPECTED_FACTOR_OF_OTHERS * usual[i]
        )
        if (confirmed and share > ease * CONFIRMED_SHARE) or (far and share > ease * SUSPECTED_SHARE):
            finding = _slow(server, float(costs[i]), float(usual[i]), float(share), confirmed, alone, now)
            findings.append(finding._replace(remedy=CROWDED_REMEDY) if excused else finding)
    return findings


def _slow(
    server: ServerReading, cost: float, usual: float, share: float, confirmed: bool, alone: bool, now: float
) -> Finding:
    beside = "" if alone else f", at the others {duration(usual)}"
    own = f"its requests take {duration(server.service)} there (p99 {duration(server.p99)})"
    own += f" and its loop is up to {duration(server.lag)} late" if server.lag > LAG_SECONDS else ""
    doubt = "" if confirmed else ", so that the way to it may be what is slow"
    why = (
        f"most trainers wait {duration(cost)} a clock for server {server.number}{beside} ({share:.0%} of their time); "
    )
    remedy = "see what else its machine does; add servers, ps.scale(...)"
    if not alone:
        remedy = f"move its shards off, ps.retire({server.number}); {remedy}"
    factor = 1 / max(1 - share, 1 / MAX_FACTOR) if alone else min(max(cost / max(usual, 1e-6), 1.0), MAX_FACTOR)
    return Finding("server", None, server.number, factor, now, share, why + own + doubt, remedy)


def _quiet(server: ServerReading, now: float, awake: float) -> Finding:
    seconds = min(server.age, now - awake)
    lost = "" if server.alive else ", and its connection is lost"
    why = f"nothing was heard of server {server.number} for {seconds:.1f} s{lost}"
    remedy = "copies take over if tables have any (copies=2), else the run ends; see whether its worker still works"
    return Finding(
        "server", None, server.number, max(1.0, min(seconds / 0.25, MAX_FACTOR)), now - seconds, 1.0, why, remedy
    )
