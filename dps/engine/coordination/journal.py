"""Journal: the controller's last decision, kept by the servers, so that another controller can go on from it. Pure.

Theory of operation
-------------------
A decision (placement, tables, runs) is one `Record`, which holds everything that a controller must know. The servers in
`holders` keep the newest one. A controller acts on a record only after it is *committed*, so each decision that had an
effect is found again. The number of a record counts decisions, so it can be the epoch of a placement.

Controllers may be several at a time: a scheduler that was only stopped comes back when another one has been started. So
each has a `Ballot` of its own, and the holders follow the highest one (Lamport, *The Part-Time Parliament*, 1998):

1. A controller asks all servers that it can reach to follow its ballot. A holder that agrees tells its record, and
   refuses all lower ballots from then on. It refuses as long as it is *bound*: it has heard from the controller that it
   follows within the time of a lease.
2. When a majority of the holders of the newest record has agreed, the controller writes that record again, under its
   own ballot. It was perhaps not committed; now it is.
3. Then it writes records of its own, one after the other.

As a majority is needed to recover, a write needs only so many answers that no majority can be without one of them
(Howard, Malkhi, Spiegelman, *Flexible Paxos*, 2016): of two holders one, of three two. A holder that died while it was
bound to the controller has never followed another one. No majority can count on it, so a write does not wait for it.

Holders change with a record. It names those `before`, which commit it, and the next record is committed by the new
ones. A controller that recovers such a record needs a majority of both: of the old ones, because another record may
have been committed in its place, and of the new ones, because a further one may have followed it. So a record whose two
sets differ is followed at once by one in which they are the same (*settled*), which needs the new ones alone.

While no controller is there, a primary goes on by *grants* of holders. A holder grants if it is not bound and knows no
later placement than the primary. Until the grant is over, it takes no record with a later placement, or with other
holders. The primary counts grants as a controller counts those that follow it: it needs a majority of the holders of
the newest record that any of them has. So each later placement needs a holder that refuses it. A holder that has
granted may follow another controller, because that one writes the newest record again before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

__all__ = [
    "MAX_HOLDERS",
    "NOBODY",
    "Acceptor",
    "Ballot",
    "Journal",
    "Record",
    "choose_holders",
    "may_go_on",
    "may_write",
    "newest_of",
]


class Ballot(NamedTuple):
    """The standing of a controller. No two have the same one, because the name is random."""

    term: int
    controller: str


NOBODY = Ballot(0, "")
# Largest number of servers that keep the journal: with five, two may be silent.
MAX_HOLDERS = 5


class Record(NamedTuple):
    """One decision, with everything that was decided before it.

    `holders` keep it, and `before` kept the record before it.
    """

    ballot: Ballot
    number: int
    holders: frozenset[int]
    before: frozenset[int]
    content: bytes

    @classmethod
    def made(
        cls, ballot: tuple[int, str], number: int, holders: Collection[int], before: Collection[int], content: bytes
    ) -> Record:
        """A record of plain values, as it travels."""
        return cls(Ballot(*ballot), number, frozenset(holders), frozenset(before), content)

    def has_majorities(self, servers: Collection[int]) -> bool:
        """Whether these servers meet all that can commit a record after this one."""
        return may_recover(self.holders, servers) and may_recover(self.before, servers)

    @property
    def settled(self) -> bool:
        """Whether this record alone says which servers hold it."""
        return self.before == self.holders


def majority(holders: Collection[int]) -> int:
    """
    >>> [majority(range(n)) for n in range(1, 6)]
    [1, 2, 2, 3, 3]
    """
    return len(holders) // 2 + 1


def may_recover(holders: frozenset[int], agreed: Collection[int]) -> bool:
    """Whether a controller may take over that is followed by these servers.

    >>> [may_recover(frozenset({0, 1}), agreed) for agreed in ({0}, {0, 1})]
    [False, True]
    """
    return len(holders.intersection(agreed)) >= majority(holders)


def may_write(holders: frozenset[int], written: Collection[int], dead: Collection[int]) -> bool:
    """Whether no majority is left that could do without these servers, when `dead` never followed another controller.

    >>> [may_write(frozenset({0, 1, 2}), written, dead) for written, dead in (({0}, ()), ({0, 1}, ()), ({0}, {1, 2}))]
    [False, True, True]
    """
    return len(holders.difference(written, dead)) < majority(holders)


def choose_holders(hosts: Mapping[int, str], present: Collection[int]) -> frozenset[int]:
    """Which servers are to keep the journal: at most `MAX_HOLDERS`, on as many machines as there are.

    `hosts` has the machine of each server that is up. Those that keep it now (`present`) stay, as long as they are up
    and no further machine could have one in their place.

    >>> sorted(choose_holders({0: "a", 1: "a", 2: "b", 3: "b"}, ())), sorted(choose_holders({1: "a", 2: "b"}, {0, 1}))
    ([0, 1, 2, 3], [1, 2])
    >>> sorted(choose_holders({n: "a" for n in range(6)} | {6: "b"}, range(5)))
    [0, 1, 2, 3, 6]
    """
    per_host: dict[str, list[int]] = {}
    for server in sorted(hosts, key=lambda server: (server not in present, server)):
        per_host.setdefault(hosts[server], []).append(server)
    rank = {
        server: (nth, server not in present, server) for each in per_host.values() for nth, server in enumerate(each)
    }
    return frozenset(sorted(rank, key=rank.__getitem__)[:MAX_HOLDERS])


class Acceptor:
    """The journal's part in a holder: the ballot that it follows, and the newest record.

    `epoch_of` gives the epoch of the placement in the content of a record.

    >>> acceptor, old, new = Acceptor(int), Ballot(1, "a"), Ballot(2, "b")
    >>> acceptor.write(Record(old, 1, frozenset({0}), frozenset({0}), b"7"))
    True
    >>> [acceptor.follow(new, bound=bound) for bound in (True, False)], acceptor.follows(old)
    ([False, True], False)
    >>> [acceptor.may_grant(epoch, bound=False) for epoch in (6, 7)]
    [False, True]
    """

    def __init__(self, epoch_of: Callable[[bytes], int]) -> None:
        self.followed = NOBODY
        self.record: Record | None = None
        self._epoch_of = epoch_of

    def follows(self, ballot: Ballot) -> bool:
        """Whether this server obeys that controller; it refuses everything of lower ballots."""
        return ballot >= self.followed

    def follow(self, ballot: Ballot, *, bound: bool) -> bool:
        """Follow that ballot from now on, if it is higher and this server is not bound."""
        if not self.follows(ballot) or (bound and ballot != self.followed):
            return False
        self.followed = ballot
        return True

    def must_wait(self, record: Record, granted: int | None) -> bool:
        """Whether that record has to wait for the end of grants, the earliest of which names the epoch `granted`.

        A record that changes the holders has to wait, because the primary has counted on the holders before.
        """
        return granted is not None and (not record.settled or self._epoch_of(record.content) > granted)

    def write(self, record: Record) -> bool:
        """Follow the record's controller and keep the record, unless a newer one is there; returns whether it does.

        It may be bound, because a majority that is not follows already. A record that has to wait is not given to it.
        """
        if not self.follow(record.ballot, bound=False):
            return False
        if self.record is None or record[:2] > self.record[:2]:
            self.record = record
        return True

    def may_grant(self, epoch: int, *, bound: bool) -> bool:
        """Whether a primary with the placement of that epoch may go on, as far as this server is concerned."""
        return not bound and (self.record is None or self._epoch_of(self.record.content) <= epoch)


def may_go_on(grants: Mapping[int, Record | None]) -> bool:
    """Whether a primary may go on without a controller: `grants` has what each server that has granted keeps.

    >>> record = Record(Ballot(1, "a"), 1, frozenset({0, 1, 2}), frozenset({0, 1, 2}), b"7")
    >>> [may_go_on(grants) for grants in ({0: record}, {0: record, 2: None}, {2: None, 3: None})]
    [False, True, False]
    """
    newest = newest_of(grants.values())
    return newest is not None and newest.has_majorities(grants)


def newest_of(records: Iterable[Record | None]) -> Record | None:
    """The record of the highest ballot and number."""
    return max((record for record in records if record is not None), key=lambda record: record[:2], default=None)


class Journal:
    """The journal's part in a controller.

    `first` is the record with which a new parameter server begins. Without it, another controller's is recovered.

    >>> journal = Journal(Ballot(1, "a"), Record(Ballot(1, "a"), 0, frozenset({0, 1, 2}), frozenset({0, 1, 2}), b""))
    >>> [journal.written(server, journal.proposed) for server in (0, 2)]
    [False, True]
    >>> record = journal.propose(b"another placement", frozenset({0, 2}))
    >>> record.number, record.settled
    (1, False)
    """

    def __init__(self, ballot: Ballot, first: Record | None = None):
        self.ballot = ballot
        self.proposed = first
        self.committed: Record | None = None
        self.fenced = False  # a server follows another controller: this one decides nothing any more
        self._found: dict[int, Record | None] = {}  # servers that follow this controller, with what they had
        self._written: set[int] = set()
        self.dead: set[int] = set()  # servers that died and never followed another controller

    def agreed(self, server: int, record: Record | None) -> Record | None:
        """A server follows this controller and had that record; returns the one to write, once enough do."""
        self._found.setdefault(server, record)
        newest = newest_of(self._found.values())
        if self.fenced or self.proposed is not None or self.committed is not None or newest is None:
            return None
        if not newest.has_majorities(self._found):
            return None
        self.proposed = newest._replace(ballot=self.ballot)
        return self.proposed

    def agreed_by_force(self, known: Record | None) -> Record | None:
        """Go on with those that follow, although they are too few: they alone keep the journal from here on.

        It is safe only if the others, and the controller that they follow, are gone for good: that a person has said.
        A server that keeps the newest record that is `known` has to be among them: it may still be bound.
        """
        newest = newest_of(self._found.values())
        if self.fenced or self.proposed is not None or self.committed is not None or newest is None:
            return self.proposed
        if known is not None and newest[:2] < known[:2]:
            return None
        holders = frozenset(self._found)
        self.proposed = Record(self.ballot, newest.number, holders, holders, newest.content)
        return self.proposed

    def propose(self, content: bytes, holders: frozenset[int]) -> Record:
        """The next record to write, to `holders` and those before. The last one must be committed."""
        committed = self.committed
        assert committed is not None, "a controller decides once it has taken over"
        assert self.proposed is None, "one decision at a time"
        assert not self.fenced
        assert holders, "a journal without holders is lost"
        self.proposed = Record(self.ballot, committed.number + 1, holders, committed.holders, content)
        return self.proposed

    def force(self, holders: frozenset[int]) -> None:
        """Write the decision that is on its way anew, for these servers alone; it is safe as `agreed_by_force` is."""
        assert self.proposed is not None
        self.proposed = Record(self.ballot, self.proposed.number + 1, holders, holders, self.proposed.content)
        self._written = set()

    def written(self, server: int, record: Record | None) -> bool:
        """A server keeps that record; returns whether it is committed by this, so that it may be acted on."""
        if record != self.proposed:
            return False
        self._written.add(server)
        return self._commit()

    def died(self, server: int) -> bool:
        """A server died that was bound to this controller; returns as `written`."""
        self.dead.add(server)
        return self._commit()

    def refused(self) -> None:
        """A server follows another controller."""
        self.fenced = True

    def _commit(self) -> bool:
        record = self.proposed
        if record is None or self.fenced:
            return False
        if not may_write(record.before, self._written, self.dead):
            return False
        self.committed, self.proposed, self._written = record, None, set()
        return True
