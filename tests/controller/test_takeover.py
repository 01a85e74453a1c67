"""A parameter server is taken over by a controller that most holders of its journal follow, and else by none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from types import SimpleNamespace

import dask
import msgspec
import pytest
from noticing import assert_noticed

from dps.engine.controller import takeover, takeover_procedures
from dps.engine.controller.executor import Executor
from dps.engine.controller.procedures import Ask, Commit, InEndpoint
from dps.engine.controller.session_record import fingerprint_of
from dps.engine.controller.takeover import Takeovers
from dps.engine.controller.takeover_procedures import enough, newest
from dps.engine.coordination import journal
from dps.engine.coordination.journal import Ballot, Journal, Record
from dps.engine.server.holder import RecordHolder
from dps.engine.wire.journal_messages import KeptRecord, RecordedTable, ReturnedServer, SessionRecord
from dps.engine.wire.messages import ShardPlace
from dps.errors import DPSError, FencedError, ServerGoneError

SECRETS = ("clients", "servers")
PATIENCE = 30.0
GRACE = "30s"


def content(name="ps", chain=(0, 1, 2), epoch=7, secrets=SECRETS) -> bytes:
    """A record of one table with one shard."""
    table = RecordedTable({"name": "w", "id": 1}, [ShardPlace([*chain], None, [1] * len(chain), False)], [])
    counts = {"copies": 2, "epoch": epoch, "wanted": len(chain), "next_server": 64, "next_origin": 4096}
    rest = {"addresses": {}, "runs": [], "functions": [], "remedy": "", "schedule": None, "adapt": None}
    fingerprint = fingerprint_of(secrets)
    record = SessionRecord(name, fingerprint, ("host", 1), tables=[table], **counts, **rest)
    return record.encode()


class Held:
    """The process of a server that has outlived its scheduler."""

    def __init__(self, number: int, secrets=SECRETS):
        self.holder, self.secrets = RecordHolder(number), secrets
        self.bound = self.gone = False

    def keep(self, record: Record) -> Held:
        message = KeptRecord(record.ballot, record.number, [*record.holders], [*record.before], record.content)
        assert self.holder.keep(message, 0.0).kept
        return self

    def report(self) -> ReturnedServer:
        number = self.holder.number
        return ReturnedServer(number, f"worker-{number}", self.secrets, self.holder.followed, self.holder.record)

    def take_up(self, ballot: Ballot) -> KeptRecord | None:
        if self.gone:
            raise ServerGoneError(f"server {self.holder.number} is gone")
        if not self.holder.follow(ballot, self.bound):
            raise FencedError(f"server {self.holder.number} does not follow {ballot}")
        return self.holder.record


def record(number=1, ballot=(1, "first"), holders=(0, 1, 2), before=None, **what) -> Record:
    return Record.made(ballot, number, holders, holders if before is None else before, content(**what))


class StandIn:
    """A session that takes over with the real steps, as far as the journal is concerned."""

    def __init__(self, world: World, known: SessionRecord, ballot: Ballot):
        self.world, self.name, self.ballot, self.found = world, known.name, ballot, None
        self.active = True

    def take_up(self, number, worker, ballot):
        assert worker == f"worker-{number}"
        return (yield Ask(self._take_up, (number, ballot)))

    async def _take_up(self, number, ballot):
        return self.world.servers[self.name][number].take_up(ballot)

    async def take_over(self, reports, ballot, force):
        assert ballot == self.ballot
        assert self.active
        servers = SimpleNamespace(membership=SimpleNamespace(session=self.name), take_up=self.take_up)
        journal: Journal = await Executor(None).run(takeover_procedures.follow(servers, reports, ballot, force))
        if self.world.failures:
            raise self.world.failures.pop(0)
        proposed = journal.proposed
        for number in sorted(proposed.holders | proposed.before):
            server = self.world.servers[self.name].get(number)
            if server is not None and not server.gone and server.holder.followed == ballot:
                server.keep(proposed)
                journal.written(number, proposed)
        assert journal.committed == proposed, "those that follow are enough to commit"
        self.found = proposed


class World:
    """Takeovers with stand-ins for sessions; what they have made, and what is still active."""

    def __init__(self, servers: dict[str, list[Held]]):
        self.servers = {name: {each.holder.number: each for each in some} for name, some in servers.items()}
        self.failures: list[BaseException] = []
        self.made: list[StandIn] = []
        self.held: set[str] = set()  # parameter servers of which workers have brought servers
        self.young = False  # the scheduler: such workers may still join
        self.takeovers = Takeovers(
            self.make, self.abandon, Executor(None).run, held=lambda: self.held, may_come=lambda: self.young
        )

    def make(self, known, secrets, ballot):
        assert secrets == SECRETS
        self.made.append(StandIn(self, known, ballot))
        return self.made[-1]

    def abandon(self, session):
        assert session.active
        session.active = False

    def report(self, *numbers, name="ps"):
        """Servers report, where no session has taken over."""
        there = any(session.found is not None for session in self.active if session.name == name)
        for number in () if there else numbers:
            self.held.add(name)
            self.takeovers.add(name, self.servers[name][number].report())

    @property
    def active(self) -> list[StandIn]:
        return [session for session in self.made if session.active]

    async def until(self, condition) -> None:
        for _ in range(int(PATIENCE / 0.001)):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("it never happens")

    async def over(self, name="ps") -> None:
        """Taken over, or given up."""
        await self.until(lambda: not self.takeovers.expects(name))

    async def rest(self) -> None:
        """Some looks pass, also those after which nobody is waited for any more."""
        await asyncio.sleep(4 * takeover_procedures.ALL_SECONDS)

    def check(self) -> None:
        """What must hold whatever happens."""
        for name in self.servers:
            sessions = [session for session in self.made if session.name == name]
            assert sum(session.active for session in sessions) <= 1
            assert all(session.found is not None for session in sessions if session.active)
            terms = [session.ballot.term for session in sessions]
            assert terms == sorted(set(terms)), "each attempt has a higher term"


@contextlib.contextmanager
def quick(grace=GRACE):
    """Looks come soon after each other."""
    with pytest.MonkeyPatch.context() as patch, dask.config.set({"dps.scheduler.grace": grace}):
        patch.setattr(takeover_procedures, "LOOK_SECONDS", 0.002)
        patch.setattr(takeover_procedures, "ALL_SECONDS", 0.02)
        patch.setattr(takeover, "LOOK_SECONDS", 0.002)
        yield patch


def played(story, servers, grace=GRACE, **names) -> World:
    """Play a story in a world of held servers; the world in the end."""

    async def play():
        world = World({"ps": servers, **names})
        try:
            await asyncio.wait_for(story(world), PATIENCE)
        finally:
            world.takeovers.stop()
            for _ in range(20):  # until the cancelled ones have ended
                await asyncio.sleep(0)
        world.check()
        return world

    with quick(grace):
        return asyncio.run(play())


def three() -> list[Held]:
    return [Held(n).keep(record()) for n in range(3)]


# ---- stories


def test_all_servers_are_back():
    async def story(world):
        world.report(0)
        assert world.takeovers.expects("ps")
        world.report(1, 2)
        await world.over()

    world = played(story, three())
    (session,) = world.active
    assert session.ballot.term == 2
    assert session.found == record(ballot=session.ballot)
    assert all(server.holder.followed == session.ballot for server in world.servers["ps"].values())


def test_too_few_servers_are_back(caplog):
    async def story(world):
        world.report(2)
        await world.over()

    world = played(story, three(), grace="50ms")
    assert not world.made
    assert "servers [2] are back, and too few of those that keep its journal" in caplog.text
    assert "0.05 s (dps.scheduler.grace)" in caplog.text


def test_servers_that_nobody_has_written_to_are_not_taken_over():
    async def story(world):
        world.report(0, 1, 2)
        await world.rest()
        assert world.takeovers.expects("ps")

    assert not played(story, [Held(n) for n in range(3)]).made


def test_a_server_of_the_placement_is_waited_for_and_then_not_any_more():
    async def story(world):
        world.report(0, 1)
        await world.over()

    assert played(story, three()).active

    async def in_time(world):
        world.report(0, 1)
        await asyncio.sleep(0)
        assert not world.made
        world.report(2)
        await world.over()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(takeover_procedures, "enough", lambda reports, late: enough(reports, False))  # it is never late
        (session,) = played(in_time, three()).active
    assert session.found is not None


def test_a_server_that_comes_late_may_make_it_a_majority():
    async def story(world):
        world.report(1)
        await world.rest()
        assert not world.made
        world.report(0)
        await world.over()

    assert played(story, three()).active


def check_force() -> None:
    """One of three servers is enough by force, and only for as long as that is asked."""
    servers = three()

    async def story(world):
        await world.takeovers.force("ps", lambda: False)  # no server is back, so it has no effect on those that come
        world.report(1)
        await world.rest()
        assert not world.made, "too few"
        await world.takeovers.force("ps", lambda: any(session.found for session in world.active))
        await world.over()

    (session,) = played(story, servers).active
    assert session.ballot.term == 2, "one attempt is enough"
    assert session.found.content == record().content
    assert session.found == record(ballot=session.ballot, holders=[1])
    assert [server.holder.followed == session.ballot for server in servers] == [False, True, False]
    assert not session.found.has_majorities([0, 2]), "the others alone are no majority of its record"


def check_force_waits() -> None:
    """For servers that are about to come, and for the one with the newest record, which is bound for a while."""
    servers = [Held(0).keep(record(2)), Held(1).keep(record(1)), Held(2)]
    servers[0].bound = True

    async def story(world):
        forcing = asyncio.ensure_future(world.takeovers.force("ps", lambda: any(each.found for each in world.active)))
        world.young = True
        world.report(1)
        await asyncio.sleep(0)
        world.report(0)
        await world.until(lambda: len(world.made) > 2)
        assert not any(each.found for each in world.made), "without the newest record"
        servers[0].bound = False
        await world.over()
        await forcing

    (session,) = played(story, servers).active
    assert (session.found.number, session.found.holders) == (2, {0, 1, 2})


def test_force_waits_for_those_that_come():
    check_force_waits()


def test_one_server_is_enough_by_force(caplog):
    check_force()
    assert "is taken over by force, with servers [1] only" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (Takeovers, "force", "self._forced.discard(name)", "pass"),
        (takeover_procedures, "take_over", "late and forced() and ", "late and "),
        (takeover_procedures, "take_over", "late and forced() and ", "False and "),
        (takeover_procedures, "follow", "if force and ", "if False and "),
        (Journal, "agreed_by_force", "holders, holders, newest", "holders, newest.holders, newest"),
        (Journal, "agreed_by_force", "newest[:2] < known[:2]", "False"),
        (takeover_procedures, "take_over", "force = late and ", "force = "),
    ],
    ids=[
        "force lasts",
        "any number is enough",
        "force is not heard",
        "a majority is asked",
        "the old holders count",
        "an older record is enough",
        "it waits for no server",
    ],
)
def test_a_wrong_force_is_noticed(owner, name, old, new, caplog, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PATIENCE", 2.0)
    assert_noticed(owner, name, old, new, check_force, check_force_waits)


def test_servers_with_other_secrets_are_refused(caplog):
    servers = [Held(0).keep(record()), Held(1).keep(record()), Held(2, ("others", "too")).keep(record())]

    async def story(world):
        world.report(0, 1, 2)
        await world.rest()
        assert not world.made

    played(story, servers)
    assert "servers [2] have other secrets than the record of parameter server 'ps'" in caplog.text


def test_a_follower_that_refuses_is_left_out(caplog):
    check_left_out()
    assert "server 2 does not follow" in caplog.text


def check_left_out() -> None:
    servers = three()
    servers[2].holder.follow(Ballot(9, "another"), bound=False)

    async def story(world):
        reports = [server.report() for server in servers]
        reports[2] = msgspec.structs.replace(reports[2], followed=(1, "first"))  # it has followed that one since
        for report in reports:
            world.takeovers.add("ps", report)
        await world.over()

    (session,) = played(story, servers).active
    assert session.ballot.term == 2
    assert servers[2].holder.followed == Ballot(9, "another")


def test_a_controller_that_too_few_follow_is_given_up_and_tries_again():
    servers = three()
    servers[0].bound = servers[1].bound = True

    async def story(world):
        world.report(0, 1, 2)
        await world.until(lambda: len(world.made) > 2)
        assert all(session.found is None for session in world.made)
        servers[0].bound = False
        await world.over()

    world = played(story, servers)
    (session,) = world.active
    assert session.ballot.term > 3


@pytest.mark.parametrize("error", [DPSError("half"), OSError("no port"), RuntimeError("another")])
def test_a_takeover_that_fails_half_way_is_tried_again_under_a_higher_ballot(error):
    """The reports are those of before, so the next term does not follow from them."""

    async def story(world):
        world.failures += [error] * 3
        world.report(0, 1, 2)
        await world.over()

    world = played(story, three())
    assert [session.ballot.term for session in world.made] == [2, 3, 4, 5]
    assert [session.active for session in world.made] == [False, False, False, True]


def test_the_newest_record_counts_and_reports_may_be_old():
    """Server 0 has a later record than it has reported; server 1 has one of an old ballot with a higher number."""
    servers = [
        Held(0).keep(record(3, (2, "b"), epoch=9)),
        Held(1).keep(record(5, (1, "a"), epoch=8)),
        Held(2).keep(record(3, (2, "b"), epoch=9)),
    ]

    async def story(world):
        world.report(0, 1, 2)
        servers[0].keep(record(4, (2, "b"), epoch=10))
        await world.over()

    (session,) = played(story, servers).active
    assert (session.found.number, SessionRecord.decode(session.found.content).epoch) == (4, 10)
    assert session.ballot.term == 3


def test_a_server_that_reports_twice_counts_once():
    async def story(world):
        world.report(0)
        world.report(0)
        await world.rest()
        assert not world.made
        world.report(1)
        world.report(1)
        await world.over()
        assert not world.takeovers.expects("ps")

    assert len(played(story, three()).made) == 1


def test_the_last_report_of_a_server_counts():
    servers = three()

    async def story(world):
        world.report(0)
        servers[0].keep(record(2, (4, "d")))
        world.report(0)
        world.report(1, 2)
        await world.over()

    (session,) = played(story, servers).active
    assert (session.ballot.term, session.found.number) == (5, 2)


def test_two_parameter_servers_come_back_at_once():
    others = [Held(n).keep(record(name="others", chain=(0, 1), holders=(0, 1))) for n in range(2)]

    async def story(world):
        world.report(0, 1)
        world.report(0, name="others")
        await world.over()
        assert world.takeovers.expects("others")
        assert [session.name for session in world.active] == ["ps"]
        world.report(1, name="others")
        await world.over("others")

    assert [session.name for session in played(story, three(), others=others).active] == ["ps", "others"]


def test_drivers_wait_for_servers_that_come_back():
    async def story(world):
        there = lambda: bool(world.active) and world.active[0].found is not None  # noqa: E731
        await world.takeovers.wait("ps", there)
        assert not there()
        assert not world.takeovers.expects("ps")
        world.young = True
        waiting = asyncio.ensure_future(world.takeovers.wait("ps", there))
        await world.rest()
        world.held.add("ps")
        world.young = False
        assert world.takeovers.expects("ps")
        await world.rest()
        assert not waiting.done()
        world.report(0, 1, 2)
        await waiting
        assert there()
        await world.over()
        assert not world.takeovers.expects("ps"), "another of that name may begin when it is closed"

    with dask.config.set({"dps.timeouts.start": PATIENCE}):
        played(story, three())


def check_attempts() -> None:
    """A driver waits over attempts that fail, because the next one may succeed."""

    async def story(world):
        sessions: dict[str, SimpleNamespace] = {}

        def attempt() -> SimpleNamespace:
            sessions["ps"] = SimpleNamespace(recovering=True, opened=asyncio.Event())
            return sessions["ps"]

        world.held.add("ps")
        waiting = asyncio.ensure_future(world.takeovers.settled("ps", sessions))
        for _ in range(2):
            failed = attempt()
            await world.rest()
            assert not waiting.done()
            del sessions["ps"]
            failed.opened.set()
            await world.rest()
            assert not waiting.done(), "its servers are still there"
        found = attempt()
        found.recovering = False
        found.opened.set()
        assert await waiting is found
        assert await world.takeovers.settled("other", sessions) is None

    with dask.config.set({"dps.timeouts.start": PATIENCE}):
        played(story, three())


def test_drivers_wait_over_attempts_that_fail():
    check_attempts()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if session is None or not session.recovering", "if True"),
        ("await session.opened.wait()", "return None"),
    ],
)
def test_a_driver_that_does_not_wait_for_the_next_attempt_is_noticed(old, new):
    assert_noticed(Takeovers, "settled", old, new, check_attempts)


def test_a_server_whose_worker_has_left_is_waited_for_no_more():
    async def story(world):
        world.held.add("ps")
        waiting = asyncio.ensure_future(world.takeovers.wait("ps", lambda: False))
        await world.rest()
        assert not waiting.done()
        world.held.clear()
        await waiting

    played(story, three())


def test_no_driver_waits_for_longer_than_servers_may_take_to_start():
    async def story(world):
        world.held.add("ps")
        with dask.config.set({"dps.timeouts.start": 0.02}):
            await world.takeovers.wait("ps", lambda: False)
        assert world.takeovers.expects("ps")

    played(story, three())


def test_a_scheduler_that_ends_gives_the_session_up():
    servers = three()

    async def story(world):
        began, ended = asyncio.Event(), []

        async def take_over(session, reports, ballot, force):
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(session)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StandIn, "take_over", take_over)
            world.report(0, 1, 2)
            await asyncio.wait_for(began.wait(), PATIENCE)
            world.takeovers.stop()
            await world.until(lambda: not world.active)
        assert ended == world.made
        await world.rest()
        assert len(world.made) == 1

    played(story, servers)


# ---- schedules


def journaled(rng: random.Random) -> tuple[list[Held], Record]:
    """Servers after a controller has decided something; and what it has committed last."""
    count = rng.randint(1, 5)
    servers = [Held(n) for n in range(count)]
    newest_committed = record(0, (1, "first"), range(count), chain=range(count), epoch=0)
    for server in servers:
        server.keep(newest_committed)
    term = 1
    for number in range(1, rng.randint(1, 8)):
        term += rng.random() < 0.3
        named = str(rng.randrange(10))
        proposed = record(number, (term, named), range(count), chain=range(count), epoch=number)
        journal = Journal(proposed.ballot, proposed)
        if term > newest_committed.ballot.term:  # it has asked a majority to follow it before
            for server in rng.sample(servers, count // 2 + 1):
                server.holder.follow(proposed.ballot, bound=False)
        for server in rng.sample(servers, rng.randint(0, count)):
            if server.holder.followed <= proposed.ballot:
                server.keep(proposed)
                journal.written(server.holder.number, proposed)
        if journal.committed is None:
            break
        newest_committed = proposed
    return servers, newest_committed


def check_schedules(schedules=60) -> None:
    """What was committed is found, whichever servers report, refuse, are bound for a while or gone."""
    taken = 0
    for seed in range(schedules):
        rng = random.Random(seed)
        servers, committed = journaled(rng)
        for server in servers:
            server.bound, server.gone = rng.random() < 0.3, rng.random() < 0.1

        async def story(world, rng=rng, servers=servers):
            world.failures += [DPSError("half")] * rng.choice((0, 0, 0, 1, 2))
            for number in rng.sample(range(len(servers)), len(servers)):
                if rng.random() < 0.9:
                    world.report(number)
                await asyncio.sleep(0.001 * rng.randint(0, 2))
            for server in servers:
                server.bound = False
            world.report(*rng.sample(range(len(servers)), rng.randint(0, len(servers))))
            await world.until(lambda: not world.takeovers.expects("ps") or rng.random() < 0.01)

        for session in played(story, servers).active:
            taken += 1
            assert session.found.number >= committed.number, f"schedule {seed}: a committed record was missed"
    assert taken > schedules / 3


def check_terms() -> None:
    test_a_takeover_that_fails_half_way_is_tried_again_under_a_higher_ballot(DPSError("half"))


def check_few() -> None:
    """A minority is not asked to follow, because the other servers may go on with another controller."""

    async def story(world):
        world.report(2)
        await world.rest()
        assert not world.made

    played(story, three())


def check_newest_holders() -> None:
    """The majority that counts is that of the newest record."""
    moved = record(2, holders=(3, 4, 5), before=(0, 1, 2))
    servers = [Held(0).keep(record()), *(Held(n).keep(moved) for n in range(1, 6))]

    async def story(world):
        world.report(0, 1, 3)
        await world.rest()
        assert not world.made
        world.report(4)
        await world.over()

    (session,) = played(story, servers).active
    assert session.found.number == 2


def check_too_few_followers() -> None:
    test_a_controller_that_too_few_follow_is_given_up_and_tries_again()


def check_strangers() -> None:
    servers = [Held(0).keep(record()), Held(1).keep(record()), Held(2, ("others", "too")).keep(record())]

    async def story(world):
        world.report(0, 1, 2)
        await world.rest()
        assert not world.made

    played(story, servers)


def check_again() -> None:
    """The servers may keep other records by then."""

    async def story(world):
        world.report(0, 1, 2)
        await world.over()
        assert world.active[0].found is not None
        world.made.clear()
        world.report(0)
        await world.rest()
        assert not world.made

    played(story, three())


def test_the_newest_record_says_whose_majority_counts():
    check_newest_holders()


def test_reports_of_a_takeover_that_is_over_are_forgotten():
    check_again()


def test_what_was_committed_is_found_whoever_comes_back():
    check_schedules()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (takeover_procedures, "enough", "not record.has_majorities(reports)", "False"),
        (takeover_procedures, "take_over", "1 + max(tried, ", "0 + max(1, tried, "),
        (takeover_procedures, "take_over", "max(tried, ", "max(0, "),
        (takeover_procedures, "newest_of", "max(", "min("),
        (takeover_procedures, "_attempt", "abandon(session)", "pass"),
        (takeover_procedures, "follow", "isinstance(answer, Exception)", "False"),
        (journal, "newest_of", "max(", "min("),
        (Journal, "agreed", "not newest.has_majorities(self._found)", "False"),
        (takeover_procedures, "_attempt", "if strangers:", "if False:"),
        (Takeovers, "add", "if name not in self._tasks:", "if True:"),
    ],
    ids=[
        "no majority is asked",
        "the term is that of before",
        "each attempt has the same term",
        "the oldest report counts",
        "a failed session stays",
        "who refuses is counted",
        "the oldest record counts",
        "no majority follows",
        "strangers are taken up",
        "two attempts at once",
    ],
)
def test_a_wrong_takeover_is_noticed(owner, name, old, new, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(f"{__name__}.PATIENCE", 2.0)
    checks = [
        check_few,
        check_terms,
        check_too_few_followers,
        test_the_newest_record_counts_and_reports_may_be_old,
        test_the_last_report_of_a_server_counts,
        check_strangers,
        check_again,
        check_left_out,
        check_newest_holders,
        check_schedules,
    ]
    assert_noticed(owner, name, old, new, *checks)


def test_enough_reports():
    reports = {server.holder.number: server.report() for server in three()}
    assert newest({}) is None
    assert not enough({}, True)
    some = {n: reports[n] for n in (0, 2)}
    assert enough(reports, False)
    assert not enough(some, False)
    assert enough(some, True)
    assert not enough({0: reports[0]}, True)
    joining = record(2, holders=(0, 1), before=(1, 2, 3))
    changed = {n: Held(n).keep(joining).report() for n in (0, 1)}
    assert not enough(changed, True), "of those before only one is there"
    assert enough({**changed, 3: Held(3).report()}, True)


def test_clients_get_the_route_when_the_placement_is_committed():
    """Before that, the route names no table, and a client would take them all for dropped."""
    journal = Journal(Ballot(2, "b"), record())
    parts = SimpleNamespace(resume=None)
    steps = list(takeover_procedures.go_on(parts, parts, parts, journal, print))
    assert [type(step) for step in steps] == [InEndpoint, InEndpoint, InEndpoint, Ask, Commit]
    assert steps[3] == Ask(print, (journal,))
