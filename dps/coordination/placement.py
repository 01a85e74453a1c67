"""Which servers hold which shard, and how that changes. Pure.

The placement of a shard is its **chain**, primary first; perhaps a **joiner**, which is being brought up to date behind
the chain's end; and for each of them a **fence**: the epoch at which the one before it last changed. A server refuses
ops of an earlier epoch than its fence, for they come from somebody who was replaced.

`place` begins, `without` answers failures, and `next_steps` says, shard by shard, what to do next so that every shard
has as many copies as it should, leaving servers empty out, and the load is even. Steps are small, each leads to a
placement that is as safe as the one before, and whoever carries them out may stop between any two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dps.errors import InputError

__all__ = [
    *("DROP", "JOIN", "LEAD", "Place", "Step"),
    *("appended", "handed_over", "joined", "next_steps", "place", "rechained", "surplus", "without"),
]

JOIN, DROP, LEAD = "join", "drop", "lead"


class Place(NamedTuple):
    """Where one shard is.

    Examples
    --------
    >>> Place((0, 1), fences=(1, 1)).line
    (0, 1)
    """

    chain: tuple[int, ...]  # primary, backups; empty: the last copy is gone
    joiner: int | None = None
    fences: tuple[int, ...] = ()  # of chain and joiner
    stepping_down: bool = False  # the primary is to hand over

    @property
    def line(self) -> tuple[int, ...]:
        """The chain and the joiner behind it."""
        return self.chain if self.joiner is None else (*self.chain, self.joiner)


class Step(NamedTuple):
    """What to do next with one shard: let `server` JOIN, DROP it from the chain, or make it LEAD the chain."""

    what: str
    table: str
    shard: int
    server: int


def place(shards: int, servers: Sequence[int], copies: int = 1, epoch: int = 0) -> tuple[Place, ...]:
    """First placement: neighbouring shards together, primaries and copies spread evenly.

    Neighbours stay together because a batch sorted by hash (or by row) is then cut into one view a server. The backups
    of one server's shards are spread over the others, so that no single one has to take over all its work.

    Parameters
    ----------
    shards : int
        How many shards, at least one.
    servers : sequence of int
        The numbers of the servers, each once, in the order in which they are to be filled.
    copies : int
        Length of the chains; as many as there are servers, if these are fewer.
    epoch : int
        From when on this holds.

    Returns
    -------
    tuple of Place
        One for each shard.

    Examples
    --------
    >>> [p.chain for p in place(4, [0, 1], copies=2)]
    [(0, 1), (0, 1), (1, 0), (1, 0)]
    """
    if shards < 1:
        raise InputError(f"a table needs at least one shard, not {shards}")
    if not servers:
        raise InputError(f"no server to place {shards} shards on")
    if len(set(servers)) != len(servers):
        raise InputError(f"a server is named twice: {list(servers)}")
    count, places = len(servers), []
    backups = min(copies, count) - 1
    for i in range(shards):
        first = i * count // shards
        rank = i - -(-first * shards // count)  # among the shards of this primary
        of = -(-(first + 1) * shards // count) - -(-first * shards // count)
        turn = rank * (count - 1) // of if count > 1 else 0
        chain = (first, *((first + 1 + (turn + k) % (count - 1)) % count for k in range(backups)))
        places.append(Place(tuple(servers[n] for n in chain), None, (epoch,) * len(chain)))
    return tuple(places)


def rechained(old: Place, chain: Iterable[int], joiner: int | None, epoch: int) -> Place:
    """The shard with another chain or joiner from `epoch` on; fences rise where the one before has changed."""
    new = Place(tuple(chain), joiner)
    before = dict(zip(old.line, zip((None, *old.line), old.fences, strict=False), strict=True))
    fences = []
    for previous, server in zip((None, *new.line), new.line, strict=False):
        fences.append(before[server][1] if server in before and before[server][0] == previous else epoch)
    return new._replace(fences=tuple(fences))


def without(
    old: Place, lost: Collection[int], silent: Collection[int], epoch: int, doubted: Collection[int] = ()
) -> Place:
    """The shard when servers fail: the next in the chain takes over.

    `lost` servers are gone for good. `silent` ones may come back: they stay where nobody else is known to be alive. Of
    the `doubted` that is not known: should they be dead, the silent ones have all that was acknowledged.
    """
    chain = tuple(n for n in old.chain if n not in lost and n not in silent)
    if all(n in doubted for n in chain):
        chain = tuple(n for n in old.chain if n not in lost)
    joiner = old.joiner if chain and old.joiner not in lost and old.joiner not in silent else None
    if (chain, joiner) == (old.chain, old.joiner):
        return old
    same_head = bool(chain) and chain[0] == old.chain[0]
    return rechained(old, chain, joiner, epoch)._replace(stepping_down=old.stepping_down and same_head)


def joined(old: Place, server: int, epoch: int) -> Place:
    """The shard with `server` being brought up to date."""
    return rechained(old, old.chain, server, epoch)


def appended(old: Place, epoch: int) -> Place:
    """The joiner has caught up: it is the chain's last copy now."""
    return rechained(old, old.line, None, epoch)._replace(stepping_down=old.stepping_down)


def handed_over(old: Place, step: Step, servers: Collection[int], copies: int, epoch: int) -> Place:
    """The primary has stepped down, for `step`: another leads. If it is needed after all, it goes on.

    That is so where copies were lost since it was asked: of `servers`, which are up and stay, too few are left.
    """
    chain = [n for n in old.chain if n != step.server]
    if step.what == LEAD and step.server in old.chain and step.server in servers:
        chain.insert(0, step.server)
    if sum(n in servers for n in chain) < max(1, min(copies, len(servers))):
        return old._replace(stepping_down=False)
    return rechained(old, chain, old.joiner, epoch)


def next_steps(
    tables: Mapping[str, tuple[int, Sequence[Place]]],
    servers: Collection[int],
    leaving: Collection[int],
    moves: int,
    unfit: Collection[int] = (),
    resting: Collection[tuple[str, int]] = (),
) -> Iterator[Step]:
    """What to do now.

    Parameters
    ----------
    tables : mapping of str to (int, sequence of Place)
        For each table the copies it should have, and its shards.
    servers : collection of int
        Those that are up and stay.
    leaving : collection of int
        Those that are up but are to be emptied.
    moves : int
        How many joiners there may be at a time.
    unfit : collection of int
        Those that are not to join anything now.
    resting : collection of (str, int)
        Table and shard where the primary is not asked to hand over now, because it could not do so a moment ago.

    Yields
    ------
    Step
        At most one a shard.

    Examples
    --------
    >>> list(next_steps({"w": (2, [Place((0,), None, (1,))])}, [0, 3], [], moves=4))
    [Step(what='join', table='w', shard=0, server=3)]
    """
    places = [p for _, shards in tables.values() for p in shards]
    load = Counter(dict.fromkeys(servers, 0))
    load.update(n for p in places for n in p.line if n in load)
    free = moves - sum(p.joiner is not None for p in places)
    busy = False
    for name, (copies, shards) in tables.items():
        wanted = max(1, min(copies, len(servers)))
        for number, p in enumerate(shards):
            if not p.chain or not (p.chain[-1] in load or p.chain[-1] in leaving):  # lost, or nobody to ask now
                continue
            step = _mend(p, wanted, load, leaving, unfit)
            if step is None:
                continue
            busy = True
            what, server = step
            if p.joiner is not None or p.stepping_down or (what == JOIN and free <= 0):
                continue
            if what == DROP and server == p.chain[0] and (name, number) in resting:
                continue
            if what == JOIN:
                free -= 1
                load[server] += 1
            yield Step(what, name, number, server)
    if not busy and not any(p.joiner is not None or p.stepping_down for p in places):
        yield from _even_out(tables, load, free, unfit, resting)


def surplus(tables: Mapping[str, tuple[int, Sequence[Place]]], servers: Collection[int], wanted: int) -> list[int]:
    """Servers beyond `wanted`, once each shard has its copies: those that hold the least, of equals the newest.

    Examples
    --------
    >>> surplus({"w": (2, [Place((0, 1), None, (1, 1))])}, [0, 1, 3, 4], wanted=3)
    [4]
    """
    load = Counter[int]()
    for copies, shards in tables.values():
        if any(p.chain and sum(n in servers for n in p.chain) < min(copies, len(servers)) for p in shards):
            return []
        load.update(n for p in shards for n in p.line)
    needed = max(wanted, max((copies for copies, _ in tables.values()), default=1))
    return sorted(servers, key=lambda n: (load[n], -n))[: max(0, len(servers) - needed)]


def _mend(
    p: Place, wanted: int, load: Counter[int], leaving: Collection[int], unfit: Collection[int]
) -> tuple[str, int] | None:
    """What one shard needs, whatever the load: more copies, or fewer, or others than those that leave."""
    staying = [n for n in p.chain if n in load]
    away = [n for n in p.chain if n in leaving]
    if len(staying) < wanted:
        others = [n for n in load if n not in p.line and n not in unfit]
        return (JOIN, min(others, key=lambda n: (load[n], n))) if others else None
    if away:  # backups first: the primary has to step down before it goes
        return DROP, away[-1]
    if len(staying) > wanted:  # whoever is neither staying nor leaving may be about to be lost: it does not count
        return DROP, max(staying, key=lambda n: (load[n], p.chain.index(n)))
    return None


def _even_out(
    tables: Mapping[str, tuple[int, Sequence[Place]]],
    load: Counter[int],
    free: int,
    unfit: Collection[int],
    resting: Collection[tuple[str, int]],
) -> Iterator[Step]:
    """One step towards the same number of copies, then of primaries, on every server."""
    if len(load) < 2:
        return
    most, least = max(load, key=lambda n: (load[n], -n)), min(load, key=lambda n: (load[n], n))
    if load[most] - load[least] > 1 and free > 0 and least not in unfit:
        for name, (_, shards) in tables.items():
            for number, p in reversed(list(enumerate(shards))):
                if most in p.chain and least not in p.chain:
                    yield Step(JOIN, name, number, least)
                    return
    heads = Counter(dict.fromkeys(load, 0))
    heads.update(p.chain[0] for _, shards in tables.values() for p in shards if p.chain and p.chain[0] in heads)
    found = None
    for name, (_, shards) in tables.items():
        for number, p in enumerate(shards):
            for backup in () if (name, number) in resting else p.chain[1:]:
                gain = heads[p.chain[0]] - heads[backup] if backup in heads else 0
                if gain > 1 and (found is None or gain > found[0]):
                    found = gain, Step(LEAD, name, number, backup)
    if found is not None:
        yield found[1]
