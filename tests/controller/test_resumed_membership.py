"""A membership that goes on from the record of another controller, and what it tells servers and clients then."""

from __future__ import annotations

import msgspec
import pytest
from failover_world import Line, World
from noticing import assert_noticed

from dps.engine.controller.announcements import Announcements
from dps.engine.controller.failover import Membership
from dps.engine.controller.holders import Holders
from dps.engine.controller.recorder import Recorder
from dps.engine.controller.runs import Runs
from dps.engine.controller.session_record import RecordContent
from dps.engine.coordination.journal import Ballot, Journal, Record
from dps.engine.server.holder import RecordHolder
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, decode_json, encode_json
from dps.engine.wire.journal_messages import KeptRecord, SessionRecord
from dps.engine.wire.messages import decode

BALLOT = Ballot(1, "first")


class JournaledWorld(World):
    """A membership with a journal, and the servers' holders; records are answered by `write`."""

    def __init__(self, servers: int = 3, ballot: Ballot = BALLOT, record: SessionRecord | None = None):
        self.holders: dict[int, RecordHolder] = {}
        self.later: list[tuple[float, object]] = []
        super().__init__(0)
        self.membership.endpoint.later = lambda seconds, function: self.later.append((seconds, function))
        self.runs = Runs("s", lambda: self.time)
        content = RecordContent(self.membership, self.runs, ("a", "b"), ("host", 1), 1, lambda: servers, lambda: None)
        self.content, self.effects = content, []
        if record is None:
            for _ in range(servers):
                self.start()
        self.recorder = Recorder(
            "s",
            content.encoded,
            self.membership.holders.send,
            self.membership.holders.hosts,
            lambda: self.time,
            ballot,
            content.committed,
            record is not None,
        )
        self.membership.holders.recorder, self.record = self.recorder, record

    def serve(self, number: int) -> Line:
        self.holders.setdefault(number, RecordHolder(number))
        self.lines[number] = line = Line()
        content = {"server": number, "host": f"host-{number}", "port": 9000, "follows": self.follows(number)}
        body = memoryview(encode_json(content))
        self.membership.handlers[frames.SERVE](line, Header(frames.SERVE), body)
        return line

    def follows(self, number: int) -> tuple[int, str]:
        return tuple(self.holders[number].followed)

    def write(self, *servers: int) -> None:
        """Servers answer the records that they have got."""
        for number in servers or list(self.lines):
            line = self.lines[number]
            for header, body in [each for each in line.sent if each[0].kind == frames.RECORD]:
                line.sent.remove((header, body))
                self.recorder.recorded(self.holders[number].keep(decode(KeptRecord, body), 0.0))

    def beat(self, number: int, request: int, known: int) -> bool:
        """A heartbeat, which names the answer that the server knows; whether the answer renews a lease."""
        line = self.lines[number]
        self.membership.handlers[frames.BEAT](line, Header(frames.BEAT, request=request, number=known), memoryview(b""))
        header, _ = next(each for each in reversed(line.sent) if each[0].kind == frames.OK)
        return not header.flags & frames.CONTROL

    def beats(self, first: int, *servers: int) -> list[bool]:
        """Each server beats twice; whether the second one renews its lease."""
        for number in servers or list(self.lines):
            self.beat(number, first, first - 1)
        return [self.beat(number, first + 1, first) for number in servers or list(self.lines)]

    def begin(self) -> JournaledWorld:
        self.recorder.begin(lambda: self.effects.append("begun"))
        self.write()
        assert self.effects == ["begun"]
        return self


def placements(line: Line) -> list[dict]:
    return [decode_json(body) for header, body in line.sent if header.kind == frames.PLACE]


def resumed(serves: int = 1) -> JournaledWorld:
    """Servers 0 and 1 of three have come back to another controller, each of them so many times."""
    first = JournaledWorld().begin()
    first.table("w", shards=1, copies=3)
    first.write()
    record = SessionRecord.decode(first.recorder.journal.committed.content)
    world = JournaledWorld(ballot=Ballot(2, "second"), record=record)
    world.holders = first.holders
    for number in (0, 1):
        assert world.holders[number].follow(Ballot(2, "second"), False)
        world.membership.expect_server(number, f"worker-{number}", "key")
        for _ in range(serves):
            world.serve(number)
    journal = Journal(Ballot(2, "second"))
    for number in (0, 1):
        kept = world.holders[number].record
        journal.agreed(number, Record.made(kept.ballot, kept.number, kept.holders, kept.before, kept.content))
    world.membership.resume(record, 10.0)
    world.recorder.take(journal, lambda: None)
    return world


def check_epochs() -> None:
    """However often servers have connected before, they are told the tables of the record only."""
    world = resumed(serves=20)
    for number in (0, 1):
        assert not any(placed["tables"] for placed in placements(world.lines[number]))
    for _ in range(3):
        world.write()
    for number in (0, 1):
        told = placements(world.lines[number])
        assert [placed["tables"] for placed in told if placed["epoch"] > world.record.epoch]
        assert all(placed["tables"] for placed in told if placed["epoch"] > world.record.epoch)


def check_addresses() -> None:
    """Server 2 is not back: its neighbours are told where it listens, because it still has its replica."""
    world = resumed()
    for _ in range(3):
        world.write()
    assert {*placements(world.lines[0])[-1]["servers"]} == {"0", "1", "2"}


def check_follows() -> None:
    """A server that has not followed this controller takes it for the last one, which had the same address."""
    world = resumed()
    assert world.serve(2).closed
    world.holders[2].follow(Ballot(2, "second"), False)
    assert not world.serve(2).closed


def check_no_lease_before_the_placement() -> None:
    world = resumed()
    world.beats(1)
    assert world.beats(3) == [False, False], "nothing is committed"
    for _ in range(3):
        world.write()
    world.beats(5)
    assert world.beats(7) == [True, True]


def check_lease_before_its_own_record() -> None:
    """Once the record of the other controller is written again, servers get its placement, and leases after that.

    The first record of this controller waits for the end of grants, which the leases bring.
    """
    world = resumed()
    world.beats(1)
    assert world.beats(3) == [False, False]
    assert not any(placed["tables"] for number in (0, 1) for placed in placements(world.lines[number]))
    world.write()
    number = world.recorder.journal.committed.number
    for line in map(world.lines.get, (0, 1)):
        told = placements(line)[-1]
        assert told == {**told, "epoch": world.record.epoch}
        assert told["tables"] == encode_json_of(world.record)
    world.beats(5)
    assert world.beats(7) == [True, True]
    assert world.recorder.journal.committed.number == number, "its first record is on its way"


def encode_json_of(record: SessionRecord) -> dict:
    """The tables of a record, as a placement names them."""
    return {str(table.spec["id"]): msgspec.to_builtins(table.places) for table in record.tables}


def check_losers_of_a_resumed_record() -> None:
    """A server that is to lose a shard by the first record of another controller gets no lease before."""
    world = resumed()
    world.write()
    world.beats(1)
    assert world.beats(3) == [True, True]
    (chain,) = world.chains()
    first, other = chain[0], 1 - chain[0]
    world.time += 5.0
    world.beats(5, other)
    world.membership.tick()
    world.beats(7, other)
    assert world.chains()[0][0] == other
    world.beats(5, first)
    world.beats(9)
    assert world.beats(11) == [first != 0, first != 1], "its successor is decided"
    for _ in range(3):
        world.write()
    world.beats(13)
    assert world.beats(15) == [True, True], "and now it is known"


def check_welcome() -> None:
    """A server that connects again is told the placement before its first heartbeat is answered."""
    world = JournaledWorld().begin()
    world.table("w", shards=1)
    world.write()
    line = world.serve(2)
    assert [header.kind for header, _ in line.sent if header.kind == frames.PLACE]
    assert placements(line)[-1]["tables"]


def check_losers() -> None:
    """A server that is to lose a shard gets no lease until that is known, also if it beats again meanwhile."""
    world = JournaledWorld().begin()
    world.table("w", shards=1)
    world.write()
    world.beats(1)
    assert world.beats(3) == [True] * 3
    (chain,) = world.chains()
    world.time += 3.0
    for number in set(world.lines) - {chain[0]}:
        world.beat(number, 5, 4)
    world.membership.tick()
    world.beats(6, *set(world.lines) - {chain[0]})
    assert world.chains()[0][0] != chain[0]
    assert not world.beat(chain[0], 7, 4), "its successor is decided"
    world.beats(8)
    for _ in range(4):
        world.write()
    world.beats(10)
    assert all(world.beats(12)), "and now it is known"


def check_deaths() -> None:
    """A death counts while the last lease lasts, and not where the server may have followed another controller.

    Then it counts after the time of a lease, in which its grants end, if all servers that are left follow this one.
    """

    def counted(world: JournaledWorld) -> bool:
        for number in (1, 2, 1):  # servers that have not answered are looked for again and again
            world.membership.holders.died(number)
        world.write(0)
        return world.recorder.journal.committed.number > 0

    for seconds, counts in ((1.0, True), (3.0, False)):
        world = JournaledWorld().begin()
        world.write()
        world.beats(1)
        world.beats(3)
        world.beats(5)
        world.table("w", shards=1)
        for number in (1, 2):
            world.cut(number)
        world.time += seconds
        assert counted(world) is counts
    world.time += 0.1
    world.beats(7, 0)
    assert not counted(world), "their grants may last"
    world.time += 3.0
    world.beats(9, 0)
    assert counted(world)
    check_deaths_beside_servers_that_were_lost_before()
    check_deaths_beside_a_holder_that_is_not_back()
    world = JournaledWorld().begin()
    world.beats(1)
    world.table("w", shards=1)
    for number in (1, 2):
        world.cut(number)
    for seconds in (3.0, 3.0):
        world.time += seconds
        assert not counted(world), "server 0 may follow another one"


def check_deaths_beside_servers_that_were_lost_before() -> None:
    """The journal has gone on without a server; it does not wait for its death, but looks for it, too, when others die.

    Otherwise that server might follow another controller for all that this one knows, and the journal would wait for
    ever for two servers whose deaths were found too late.
    """
    world = JournaledWorld(servers=4).begin()
    world.write()
    world.beats(1)
    world.cut(3)
    world.time += 3.0
    for request in range(3, 9):
        world.beats(request, 0, 1, 2)
        world.membership.tick()
        world.write(0, 1, 2)
    assert world.recorder.journal.committed.holders == {0, 1, 2}
    assert not world.membership.holders.suspects(), "nothing waits"
    before = world.recorder.journal.committed.number
    world.table("w", shards=1)
    kept, *lost = world.recorder.journal.committed.holders
    for number in lost:
        world.cut(number)
    for seconds in (3.0, 3.0):  # the first time that the deaths are looked for is after their leases
        world.time += seconds
        world.beats(9 + int(world.time), kept)
        assert set(world.membership.holders.suspects()) >= {*lost}
        for number in world.membership.holders.suspects():
            world.membership.holders.died(number)
        world.write(kept)
    assert world.recorder.journal.committed.number > before


def check_deaths_beside_a_holder_that_is_not_back() -> None:
    """A server that keeps the journal and has never followed this controller may follow another one."""
    world = JournaledWorld().begin()
    world.write()
    world.beats(1, 0, 1)
    world.beats(3, 0, 1)
    world.membership.holders._bound_at.pop(2, None)
    before = world.recorder.journal.committed.number
    world.table("w", shards=1)
    for number in (1, 2):
        world.cut(number)
    for seconds in (3.0, 3.0):
        world.time += seconds
        world.beats(5 + int(world.time), 0)
        world.membership.holders.died(1)
        world.write(0)
    assert world.recorder.journal.committed.number == before


def check_leaving() -> None:
    """An empty server that is to go keeps no journal when it is closed."""
    world = JournaledWorld().begin()
    world.membership.retire([2])
    assert world.membership.holders.keeps_journal(2)
    for _ in range(4):
        world.membership.tick()
        world.write()
    assert not world.membership.holders.keeps_journal(2)
    assert world.recorder.journal.committed.holders == {0, 1}


def check_route() -> None:
    """A controller that its servers have left gives no route, because another one may decide."""
    world = JournaledWorld().begin()
    assert world.membership.holders.decides
    world.time += 3.0
    assert not world.membership.holders.decides
    world.beats(1)
    assert all([*world.beats(3)])
    assert world.membership.holders.decides


CHECKS = {
    "epochs": check_epochs,
    "addresses": check_addresses,
    "follows": check_follows,
    "leases": check_no_lease_before_the_placement,
    "before its own": check_lease_before_its_own_record,
    "losers of another": check_losers_of_a_resumed_record,
    "welcome": check_welcome,
    "losers": check_losers,
    "deaths": check_deaths,
    "leaving": check_leaving,
    "route": check_route,
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_controller_with_a_journal(check):
    CHECKS[check]()


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "check"),
    [
        (Membership, "resume", "max(self.epoch, record.epoch)", "record.epoch", "epochs"),
        (Membership, "resume", "number in record.addresses", "False", "addresses"),
        (Membership, "resume", "server.must_follow = True", "pass", "follows"),
        (Announcements, "may_lease", "self._placement is not None and", "", "leases"),
        (Membership, "resume", "begin_after(self.epoch)", "committed(record)", "before its own"),
        (Announcements, "committed", "self._tell_all()", "pass", "before its own"),
        (Announcements, "committed", "record.epoch", "self._epoch + 1", "before its own"),
        (Announcements, "committed", "if self._placement is None:", "if False:", "before its own"),
        (Announcements, "committed", "self._heads = {", "self._heads = {} and {", "losers of another"),
        (Announcements, "welcome", "self._tell(server)", "pass", "welcome"),
        (Announcements, "_is_to_lose", "return True", "return False", "losers"),
        (Holders, "died", "now - self._bound_at.get(number, -math.inf) <= lease or ", "", "deaths"),
        (Holders, "died", "(now - found > lease and follow)", "True", "deaths"),
        (Holders, "died", "now - found > lease and follow", "follow", "deaths"),
        (Holders, "died", "now - found > lease and follow", "now - found > lease", "deaths"),
        (Holders, "_concerned", " | self.recorder.keepers", "", "deaths"),
        (Holders, "suspects", "awaited | (self._concerned() - self._dead.keys())", "awaited", "deaths"),
        (Holders, "hosts", "if server.leaving and self._owner.empty(n)", "if False", "leaving"),
    ],
    ids=lambda value: value if value in CHECKS else "",
)
def test_a_wrong_membership_is_noticed(kind, name, old, new, check):
    assert_noticed(kind, name, old, new, CHECKS[check])


def test_servers_that_have_not_come_back_within_the_grace_are_lost():
    world = resumed()
    for _ in range(3):
        world.write()
    ((seconds, give_up),) = world.later
    assert seconds == 10.0
    assert 2 in world.membership.servers
    give_up()
    assert set(world.membership.servers) == {0, 1}


def check_content() -> None:
    """Until all is set up again, records say what the record said from which this controller goes on."""
    world = resumed()
    assert SessionRecord.decode(world.content.encoded()).wanted == 3
    found = msgspec.structs.replace(world.record, wanted=7, functions=["f"])
    world.content.resume(found)
    said = SessionRecord.decode(world.content.encoded())
    assert (said.wanted, said.functions) == (7, ["f"])
    world.content.resumed()
    assert SessionRecord.decode(world.content.encoded()).wanted == 3


def test_records_keep_what_is_not_set_up_again_yet():
    check_content()
    assert_noticed(RecordContent, "encoded", "if self._found is not None:", "if False:", check_content)
