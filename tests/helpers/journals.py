"""Schedules of controllers and holders of a journal, in which anything may be late, lost, repeated, stopped or dead."""

from __future__ import annotations

import random

from dps.engine.coordination.journal import Ballot, Record

STEPS = 300
MAX_SERVERS = 7


class Server:
    """A process with a holder; it is bound as long as it has a lease of the controller that it follows."""

    def __init__(self, holder):
        self.holder, self.alive, self.bound = holder, True, False
        self.epoch = 0  # of the newest placement that it knows
        self.granted: dict[int, int] = {}  # servers to which it has granted -> epoch of the placement that they knew
        # What the holders that have granted to it had then, as it believes.
        self.grants: dict[int, Record | None] = {}


class Controller:
    """The shell around a journal: it sends what the journal says, and acts on what is committed."""

    def __init__(self, world: World, journal, servers: list[int]):
        self.world, self.journal, self.servers = world, journal, servers
        self.bound: set[int] = set()  # servers that have a lease of it, as it believes

    def begin(self) -> None:
        if self.journal.proposed is not None:
            self.send(self.journal.proposed)
        for server in self.servers if self.journal.proposed is None else ():
            self.world.bag.append(("follow", self, server, self.journal.ballot))

    def send(self, record: Record) -> None:
        for server in sorted(record.holders | record.before):
            self.world.bag.append(("write", self, server, record))

    def decide(self) -> None:
        """Take another decision, perhaps with other holders."""
        journal, world, rng = self.journal, self.world, self.world.rng
        if journal.fenced or journal.committed is None or journal.proposed is not None:
            return
        holders = set(journal.committed.holders)
        if journal.committed.settled and rng.random() < 0.5:
            known = [n for n, server in enumerate(world.servers) if server.alive or rng.random() < 0.2]
            holders = set(rng.sample(known, min(len(known), rng.randint(1, 5)))) or holders
        world.decisions += rng.random() < 0.8  # the others are no placements
        self.send(journal.propose(b"%d" % world.decisions, frozenset(holders)))

    def act(self, committed: bool) -> None:
        """Act on a decision: the world sees it."""
        if committed:
            self.world.act(self.journal.committed)


class World:
    """One schedule, made by a seed."""

    def __init__(self, seed: int, module, controller: type[Controller] = Controller):
        self.rng, self.module, self.controller = random.Random(seed), module, controller
        count = self.rng.randint(1, 5)
        self.servers = [Server(module.Acceptor(int)) for _ in range(count)]
        self.bag: list[tuple] = []
        # What each decision was, and the lowest ballot that acted on it.
        self.acts: dict[int, tuple[tuple[bytes, frozenset[int]], Ballot]] = {}
        self.recovered: list[tuple[Ballot, int]] = []  # controllers that took over, and the decision that they found
        self.decisions = self.names = 0
        self.recoveries = self.served = 0
        self.controllers: list[Controller] = []
        holders = frozenset(range(count))
        ballot = self.ballot(1)
        self.start(module.Journal(ballot, Record(ballot, 0, holders, holders, b"0")))

    def ballot(self, term: int) -> Ballot:
        self.names += 1
        return Ballot(term, f"{self.rng.randrange(1000):03}-{self.names}")

    def start(self, journal) -> None:
        self.controllers.append(self.controller(self, journal, list(range(len(self.servers)))))
        self.controllers[-1].begin()

    def act(self, record: Record) -> None:
        """The world sees a decision: all controllers that act must agree, and none after it may have missed it."""
        what = record.content, record.holders
        known, first = self.acts.setdefault(record.number, (what, record.ballot))
        assert known == what, f"decision {record.number} is {known} and {what}"
        self.acts[record.number] = what, min(first, record.ballot)
        for ballot, number in self.recovered:
            self.check_found(record.ballot, record.number, ballot, number)

    def recover(self, record: Record) -> None:
        """A controller has found the newest record, and is going to write it."""
        for number, (_, ballot) in self.acts.items():
            self.check_found(ballot, number, record.ballot, record.number)
        self.recovered.append(record[:2])

    def check_found(self, ballot: Ballot, number: int, later: Ballot, found: int) -> None:
        assert ballot >= later or number <= found, f"{later} found decision {found}, and {ballot} acted on {number}"

    # -- the steps

    def run(self) -> World:
        """Each schedule has events of its own likelihood, so that some are mostly loss and others mostly haste."""
        rng = self.rng
        rare = [
            self.lose,
            self.repeat,
            self.kill_server,
            self.kill_controller,
            self.new_server,
            self.replace,
            self.unbind,
        ]
        steps = [self.deliver] * 40 + [self.decide] * rng.choice((4, 10, 20))
        steps += [event for event in rare for _ in range(rng.choice((0, 1, 1, 2, 4)))]
        steps += (
            [self.grant] * 8 + [self.serve] * 3 + [self.learn, self.end_grants, self.unbind, self.beat]
        ) * rng.choice((0, 0, 2))
        for _ in range(STEPS):
            self.rng.choice(steps)()
        return self

    def any_message(self) -> int:
        """Often a late one, so that things get done."""
        recent = len(self.bag) - 8 if self.rng.random() < 0.6 else 0
        return self.rng.randrange(max(0, recent), len(self.bag))

    def lose(self) -> None:
        if self.bag:
            self.bag.pop(self.any_message())

    def repeat(self) -> None:
        if self.bag:
            self.bag.append(self.bag[self.any_message()])

    def deliver(self) -> None:
        if not self.bag:
            return
        kind, controller, number, what = self.bag.pop(self.any_message())
        if kind in ("follow", "write"):
            self.at_server(kind, controller, number, what)
        elif controller in self.controllers:
            self.at_controller(kind, controller, number, what)

    def at_server(self, kind: str, controller: Controller, number: int, what) -> None:
        server = self.servers[number]
        if not server.alive:
            return
        before = server.holder.followed
        if kind == "write" and server.holder.must_wait(what, min(server.granted.values(), default=None)):
            self.bag.append((kind, controller, number, what))
            return
        taken = server.holder.follow(what, bound=server.bound) if kind == "follow" else server.holder.write(what)
        ballot = what if kind == "follow" else what.ballot
        if not taken and server.holder.follows(ballot):  # it is bound: the controller asks again
            self.bag.append((kind, controller, number, what))
            return
        if taken:
            self.bind(number, controller)
        assert server.holder.followed >= before, "a holder follows a lower ballot than before"
        answer = (server.holder.record if kind == "follow" else what) if taken else None
        self.bag.append(
            (("agreed" if kind == "follow" else "written") if taken else "refused", controller, number, answer)
        )

    def at_controller(self, kind: str, controller: Controller, number: int, what) -> None:
        journal = controller.journal
        if kind == "agreed":
            record = journal.agreed(number, what)
            if record is not None:
                self.recover(record)
                controller.send(record)
        elif kind == "refused":
            journal.refused()
        else:
            first = journal.committed is None
            committed = journal.written(number, what) if kind == "written" else journal.died(number)
            self.recoveries += committed and first and journal.ballot.term > 1
            controller.act(committed)

    def decide(self) -> None:
        if self.controllers:
            self.rng.choice(self.controllers).decide()

    def kill_server(self) -> None:
        number = self.rng.randrange(len(self.servers))
        server = self.servers[number]
        if server.alive and self.rng.random() < 0.2:
            server.alive = False
            for each in self.controllers:
                if self.knows_its_end(number, each):
                    self.bag.append(("died", each, number, None))

    def knows_its_end(self, number: int, controller: Controller) -> bool:
        """A controller counts the death of a server that had a lease of it."""
        return number in controller.bound

    def bind(self, number: int, controller: Controller) -> None:
        """A heartbeat and its answer: a lease begins."""
        server = self.servers[number]
        if self.may_bind(server):
            server.bound = True
            controller.bound.add(number)

    def may_bind(self, server: Server) -> bool:
        """A heartbeat says whether a grant of its server is open, because the death of such a server must not count."""
        return not server.granted

    def beat(self) -> None:
        if self.controllers:
            controller = self.rng.choice(self.controllers)
            number = self.rng.choice(controller.servers)
            server = self.servers[number]
            if server.alive and server.holder.followed == controller.journal.ballot:
                self.bind(number, controller)

    def unbind(self) -> None:
        """Leases are over; as always, their giver has taken them for over before."""
        for number in self.rng.sample(range(len(self.servers)), self.rng.randint(1, len(self.servers))):
            self.servers[number].bound = False
            for each in self.controllers:
                each.bound.discard(number)

    def learn(self) -> None:
        """A server gets the newest placement that a controller has announced."""
        server = self.rng.choice(self.servers)
        announced = [int(what[0]) for what, _ in self.acts.values()]
        server.epoch = max(server.epoch, self.rng.choice(announced or [0]))

    def grant(self) -> None:
        """A primary asks a server; the answer may come late or never, and its grants are over for it before."""
        primary, number = (self.rng.randrange(len(self.servers)) for _ in range(2))
        asking, server = self.servers[primary], self.servers[number]
        if asking.alive and server.alive and server.holder.may_grant(asking.epoch, bound=server.bound):
            server.granted[primary] = asking.epoch
            asking.grants[number] = server.holder.record

    def end_grants(self) -> None:
        number = self.rng.randrange(len(self.servers))
        for primary in self.servers[number].granted:
            self.servers[primary].grants.pop(number, None)
        self.servers[number].granted.clear()

    def serve(self) -> None:
        """A primary answers a pull: no placement may have been announced that it does not know."""
        server = self.rng.choice(self.servers)
        if server.alive and self.module.may_go_on(server.grants):
            self.served += 1
            newest = max((int(what[0]) for what, _ in self.acts.values()), default=0)
            assert newest <= server.epoch, f"served with placement {server.epoch}, after placement {newest}"

    def replace(self) -> None:
        """Somebody starts another scheduler; the one before may be dead, cut off, or only stopped."""
        term = 1 + max((s.holder.followed.term for s in self.servers if s.alive and self.rng.random() < 0.7), default=0)
        if self.rng.random() < 0.5:
            self.start(self.module.Journal(self.ballot(max(2, term))))

    def kill_controller(self) -> None:
        if self.controllers and self.rng.random() < 0.3:
            self.controllers.pop(self.rng.randrange(len(self.controllers)))

    def new_server(self) -> None:
        if len(self.servers) < MAX_SERVERS:
            self.servers.append(Server(self.module.Acceptor(int)))
