"""Takeover procedures: how a controller goes on with the servers of another one, step by step. Pure.

`coordination/journal.py` has the rules, `docs/design/scheduler.md` the steps. Once enough servers have reported what
they keep of the journal, the controller

1. makes a session with a ballot that is higher than all that were reported, and all that it has tried before;
2. takes up the servers: each one follows the ballot, and connects to this controller;
3. writes the newest record that they keep again, under its own ballot, and goes on from it.

Until the record is committed, nothing takes effect, no lease is renewed, and clients that ask for the route wait. Where
a step fails, the session is given up, and all of it is tried again under a higher ballot. A server that is not back yet
may come back later; its shards fail over as those of a silent server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.procedures import Ask, Commit, InEndpoint, Procedure, Sleep, Together
from dps.engine.controller.server_procedures import ServerProcedures
from dps.engine.controller.session_record import RecordContent, fingerprint_of
from dps.engine.coordination.journal import Ballot, Journal, Record, newest_of
from dps.engine.wire.journal_messages import KeptRecord, ReturnedServer, SessionRecord
from dps.errors import DPSError, ServerGoneError

__all__ = [
    "ALL_SECONDS",
    "LOOK_SECONDS",
    "Attempt",
    "Make",
    "Reports",
    "enough",
    "follow",
    "go_on",
    "newest",
    "take_over",
]

logger = logging.getLogger(__name__)

# Time for which all servers of the last placement are waited for, when enough of them are back.
ALL_SECONDS = 3.0
# Pause between two looks, and until a takeover that failed is tried again.
LOOK_SECONDS = 0.5

Reports = Mapping[int, ReturnedServer]  # number of a server -> what it has reported to this scheduler
Result = TypeVar("Result")


class Attempt(Protocol):
    """A session that is made to take over: a `Session`, or what stands for one."""

    def take_over(self, reports: Reports, ballot: Ballot, force: bool) -> object:
        """Have the servers follow that ballot, and go on from their newest record; may wait."""
        ...


Make = Callable[[SessionRecord, tuple[str, str], Ballot], Attempt]


def take_over(
    name: str,
    reports: Reports,
    make: Make,
    abandon: Callable[[Attempt], None],
    clock: Callable[[], float],
    new_name: Callable[[], str],
    forced: Callable[[], bool] = lambda: False,
) -> Procedure[bool]:
    """Take over a parameter server as soon as enough of its servers have reported; whether that succeeded in time.

    `reports` grows meanwhile. `make` makes a session, to which servers can connect, and `abandon` undoes that.
    `new_name` gives a controller a name by which its ballot differs from all others. Where it is `forced`, any number
    of servers is enough.
    """
    began, tried = clock(), 0
    while clock() - began < config.scheduler_grace():
        now = dict(reports)
        late = clock() - began >= ALL_SECONDS
        force = late and forced() and newest(now) is not None  # not before, because others may be about to come
        if force or enough(now, late):
            tried = 1 + max(tried, *(report.followed[0] for report in now.values()))
            try:
                yield from _attempt(now, make, abandon, Ballot(tried, new_name()), force)
            except Exception as error:
                logger.warning("parameter server %r: it is not taken over yet: %s", name, error)
            else:
                logger.warning("parameter server %r was taken over in term %d", name, tried)
                return True
        yield Sleep(LOOK_SECONDS)
    logger.error(
        "parameter server %r was not taken over: servers %s are back, and too few of those that keep its journal "
        "within %g s (dps.scheduler.grace); `dask ps takeover --force` goes on with fewer",
        *(name, sorted(reports), config.scheduler_grace()),
    )
    return False


def _attempt(
    reports: Reports, make: Make, abandon: Callable[[Attempt], None], ballot: Ballot, force: bool
) -> Procedure[None]:
    record, of_servers = newest(reports), next(iter(reports.values())).secrets
    assert record is not None
    known = SessionRecord.decode(record.content)
    strangers = [n for n, report in reports.items() if fingerprint_of(report.secrets) != known.fingerprint]
    if strangers:
        raise DPSError(f"servers {strangers} have other secrets than the record of parameter server {known.name!r}")
    session = make(known, of_servers, ballot)
    try:
        yield Ask(session.take_over, (reports, ballot, force))
    except BaseException:
        abandon(session)
        raise


def follow(servers: ServerProcedures, reports: Reports, ballot: Ballot, force: bool) -> Procedure[Journal]:
    """Have the servers follow this controller; the journal, in which the newest record is proposed."""
    name, journal = servers.membership.session, Journal(ballot)
    taking = tuple(_outcome(servers.take_up(n, report.worker, ballot)) for n, report in reports.items())
    answers = yield Together(taking)
    for number, answer in zip(reports, answers, strict=True):
        if isinstance(answer, Exception):
            logger.warning("parameter server %r: server %d does not follow: %s", name, number, answer)
        else:
            journal.agreed(number, None if answer is None else record_of(answer))
    if force and journal.proposed is None and journal.agreed_by_force(newest(reports)) is not None:
        logger.error("parameter server %r is taken over by force, with servers %s only", name, sorted(reports))
    if journal.proposed is None:
        raise ServerGoneError(
            f"too few servers of parameter server {name!r} follow this controller: {sorted(reports)} are back, and of "
            f"the servers that keep the journal more than half have to follow"
        )
    return journal


def go_on(
    membership: Membership,
    runs: InterruptedRuns,
    content: RecordContent,
    journal: Journal,
    take: Callable[[Journal], object],
) -> Procedure[SessionRecord]:
    """Go on from the record that is proposed, once it is committed and its placement is known; the record.

    `take` writes it, and returns when it is committed.
    """
    assert journal.proposed is not None
    record = SessionRecord.decode(journal.proposed.content)
    yield InEndpoint(membership.resume, (record, config.scheduler_grace()))
    yield InEndpoint(runs.resume, (record.next_origin, record.runs))
    yield InEndpoint(content.resume, (record,))
    yield Ask(take, (journal,))
    yield Commit()  # only then clients may ask for the route, because before that it names no table
    return record


def _outcome(procedure: Procedure[Result]) -> Procedure[Result | Exception]:
    """The result of a procedure, or its error."""
    try:
        return (yield from procedure)
    except Exception as error:
        return error


def record_of(kept: KeptRecord) -> Record:
    return Record.made(*msgspec.structs.astuple(kept))


def newest(reports: Reports) -> Record | None:
    """The newest record that the servers keep."""
    return newest_of(None if report.kept is None else record_of(report.kept) for report in reports.values())


def enough(reports: Reports, late: bool) -> bool:
    """Whether a controller may take over with these servers: most of those that keep the newest record are back.

    As long as it is not `late`, all servers of its placement are to be back, because the others would be replaced.
    """
    record = newest(reports)
    if record is None or not record.has_majorities(reports):
        return False
    placed = {
        server
        for table in SessionRecord.decode(record.content).tables
        for place in table.places
        for server in (*place.chain, place.joiner)
    }
    return late or placed - {None} <= reports.keys()
