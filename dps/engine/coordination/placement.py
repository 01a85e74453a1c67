"""Which servers hold which shard, and how that changes. Pure.

The placement of a shard is its **chain**, primary first; perhaps a **joiner**, which is being brought up to date behind
the chain's end; and for each of them a **fence**: the epoch at which the server before it last changed. A server
refuses ops of an earlier epoch than its fence, because they come from a server that was replaced.

`place` makes the first placement, `without` answers failures, and `next_steps` says, shard by shard, what to do next so
that every shard has as many copies as it should, leaving servers empty out, and the load is even. Steps are small, each
leads to a placement that is as safe as the one before, and the controller may stop between any two.

The load of a server is the sum of the **weights** of its copies. Each shard weighs 1, so servers get equally many,
unless the caller gives other weights (`coordination/rebalancing.py` measures them). Each move then takes the copy whose
move lowers the larger load of the two servers most, so that few copies move; a move that gains less than `LEAST_GAIN`
of the mean load is not made.
"""

from __future__ import annotations

import enum
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from dps.errors import InputError

__all__ = [
    *("EVEN", "Place", "PlacementStep", "StepKind", "Weights"),
    *("appended", "handed_over", "joined", "next_steps", "place", "rechained", "surplus", "without"),
]

# Table -> the weight of each of its shards. The shards of a table that is not named weigh 1.
Weights: TypeAlias = Mapping[str, Sequence[float]]
EVEN: Weights = types.MappingProxyType({})
NOWHERE: Mapping[str, Sequence[int]] = types.MappingProxyType({})  # no table's shards are brought together
# A move of unequal weights has to lower the larger load of two servers by this part of the mean load. Equal weights
# need no such limit, because each of their moves lowers it by a whole shard.
LEAST_GAIN = 0.1


class StepKind(enum.StrEnum):
    """What a step does with one server of one shard's chain."""

    JOIN = "join"  # bring the server up to date, behind the chain's end
    DROP = "drop"  # take it out of the chain
    LEAD = "lead"  # make it the primary


class Place(NamedTuple):
    """The placement of one shard."""

    chain: tuple[int, ...]  # primary, backups; empty: the last copy is gone
    joiner: int | None = None
    fences: tuple[int, ...] = ()  # one for each server of the chain, and one for the joiner
    stepping_down: bool = False  # the primary has been asked to hand over

    @property
    def line(self) -> tuple[int, ...]:
        """The chain and the joiner behind it."""
        return self.chain if self.joiner is None else (*self.chain, self.joiner)


class PlacementStep(NamedTuple):
    """What to do next with one shard, and with which server."""

    kind: StepKind
    table: str
    shard: int
    server: int


def place(shards: int, servers: Sequence[int], copies: int = 1, epoch: int = 0) -> tuple[Place, ...]:
    """First placement: neighbouring shards together, primaries and copies spread evenly.

    Neighbours stay together because a batch sorted by hash (or by row) is then cut into one view for each server. The
    backups of one server's shards are spread over the others, so that no single server has to take over all its work.

    Parameters
    ----------
    servers : sequence of int
        The numbers of the servers, each once, in the order in which they are to be filled.
    copies : int
        Length of the chains; as many as there are servers, if these are fewer.

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
    """The shard with another chain or joiner from `epoch` on; a fence rises where the server before it has changed."""
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

    `lost` servers are gone for good. `silent` servers may come back: they stay in a chain where no other server is
    known to be alive. That is not known of the `doubted` servers: if they turn out to be dead, the silent servers of
    the chain have all that was acknowledged.
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
    return rechained(old, old.chain, server, epoch)


def appended(old: Place, epoch: int) -> Place:
    """The shard after its joiner has caught up, as the last backup of the chain."""
    return rechained(old, old.line, None, epoch)._replace(stepping_down=old.stepping_down)


def handed_over(old: Place, step: PlacementStep, servers: Collection[int], copies: int, epoch: int) -> Place:
    """The shard after its primary has stepped down for `step`: another server leads, or the primary goes on after all.

    The primary goes on where copies were lost since it was asked to step down, so that too few of `servers` (those that
    are up and stay) would be left in the chain: fewer than `copies` where it leaves, because of these one may be dead
    and not yet missed.
    """
    chain = [n for n in old.chain if n != step.server]
    if step.kind == StepKind.LEAD:
        if step.server not in old.chain or step.server not in servers:
            return old._replace(stepping_down=False)  # because the other one was lost, or leaves
        chain.insert(0, step.server)
    leaves = step.kind == StepKind.DROP and step.server not in servers
    if sum(n in servers for n in chain) < (copies if leaves else max(1, min(copies, len(servers)))):
        return old._replace(stepping_down=False)
    return rechained(old, chain, old.joiner, epoch)


def next_steps(
    tables: Mapping[str, tuple[int, Sequence[Place]]],
    servers: Collection[int],
    leaving: Collection[int],
    moves: int,
    unfit: Collection[int] = (),
    resting: Collection[tuple[str, int]] = (),
    weights: Weights = EVEN,
    together: Mapping[str, Sequence[int]] = NOWHERE,
) -> Iterator[PlacementStep]:
    """The steps to take now: copies that are missing or too many, servers to be emptied; if there are none, even load.

    Parameters
    ----------
    tables : mapping of str to (int, sequence of Place)
        For each table the copies it should have, and the places of its shards.
    servers : collection of int
        Servers that are up and stay.
    leaving : collection of int
        Servers that are up but are to be emptied.
    moves : int
        How many joiners there may be at a time.
    unfit : collection of int
        Servers that are not to join a chain now.
    resting : collection of (str, int)
        Table and shard where the primary is not asked to hand over now, because it could not do so a moment ago.
    weights : mapping of str to sequence of float
        Table -> the weight of each shard. The mean of all shards is about 1, which is the weight of those not named.
    together : mapping of str to sequence of int
        Table -> for each shard, the shard on whose servers it is to lie.

    Yields
    ------
    PlacementStep
        At most one for each shard.

    Examples
    --------
    >>> list(next_steps({"w": (2, [Place((0,), None, (1,))])}, [0, 3], [], moves=4))
    [PlacementStep(kind=<StepKind.JOIN: 'join'>, table='w', shard=0, server=3)]
    """
    load = _load(tables, servers, weights)
    free = moves - sum(p.joiner is not None for _, shards in tables.values() for p in shards)
    moving = False  # some shard needs a step, or is in the middle of one
    fine: list[_Shard] = []
    for each in _shards(tables, load, leaving, weights):
        name, number, p, copies, weight = each
        step = _mend(p._replace(chain=p.line), copies, load, leaving, unfit)
        if name in together:
            first = tables[name][1][together[name][number]]
            step = _gather(p, first.chain, step, load, unfit)
        moving = moving or each.under_way or step is not None
        if step is None:
            fine += [] if each.under_way or name in together else [each]
            continue
        kind, server = step
        if kind == StepKind.DROP and server in load:
            load[server] -= weight  # because later steps reckon with the load after this one
        if each.under_way or (kind == StepKind.JOIN and free <= 0):
            continue
        if kind == StepKind.DROP and server == p.chain[0] and (name, number) in resting:
            continue
        if kind == StepKind.JOIN:
            free -= 1
            load[server] += weight
        yield PlacementStep(kind, name, number, server)
    spread = list(_spread(fine, load, free, unfit))
    yield from spread
    if not moving and not spread:
        yield from _even_out_primaries(tables, fine, load, resting, weights)


_Load: TypeAlias = dict[int, float]  # server -> the sum of its weights


def _weight(weights: Weights, table: str, shard: int) -> float:
    return weights[table][shard] if table in weights else 1


def _load(tables: Mapping[str, tuple[int, Sequence[Place]]], servers: Collection[int], weights: Weights) -> _Load:
    """The weights that each server has, joiners included."""
    load: _Load = dict.fromkeys(servers, 0)
    for name, (_, places) in tables.items():
        for number, p in enumerate(places):
            for n in p.line:
                if n in load:
                    load[n] += _weight(weights, name, number)
    return load


class _Shard(NamedTuple):
    """One shard of a table that should have so many copies."""

    table: str
    number: int
    place: Place
    copies: int
    weight: float

    @property
    def under_way(self) -> bool:
        return self.place.joiner is not None or self.place.stepping_down


def _shards(
    tables: Mapping[str, tuple[int, Sequence[Place]]], load: _Load, leaving: Collection[int], weights: Weights
) -> list[_Shard]:
    """The shards that can be copied, those first with which something is under way.

    A shard is lost, or there is no server now from which a joiner could copy it, if the last of its chain is not up.
    """
    shards = [
        _Shard(name, number, p, copies, _weight(weights, name, number))
        for name, (copies, places) in tables.items()
        for number, p in enumerate(places)
        if p.chain and (p.chain[-1] in load or p.chain[-1] in leaving)
    ]
    return sorted(shards, key=lambda each: not each.under_way)


def surplus(tables: Mapping[str, tuple[int, Sequence[Place]]], servers: Collection[int], wanted: int) -> list[int]:
    """The servers that may stop, so that `wanted` are left: those that hold the least, of equals the newest.

    There are none until each shard has its copies, and none that the copies of a table need.

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
    p: Place, copies: int, load: _Load, leaving: Collection[int], unfit: Collection[int]
) -> tuple[StepKind, int] | None:
    """What one shard needs, whatever the load: more copies, fewer copies, or copies elsewhere than on `leaving`."""
    staying = [n for n in p.chain if n in load]
    away = [n for n in p.chain if n in leaving]
    wanted = max(1, min(copies, len(load)))
    if len(staying) < wanted:
        others = [n for n in load if n not in p.line and n not in unfit]
        return (StepKind.JOIN, min(others, key=lambda n: (load[n], n))) if others else None
    if away and len(staying) >= copies:  # backups first: the primary has to step down before it goes
        return StepKind.DROP, away[-1]
    if len(staying) > wanted:  # a server that neither stays nor leaves does not count, because it may be dying
        return StepKind.DROP, max(staying, key=lambda n: (load[n], p.chain.index(n)))
    return None


def _gather(
    p: Place, chain: Sequence[int], step: tuple[StepKind, int] | None, load: _Load, unfit: Collection[int]
) -> tuple[StepKind, int] | None:
    """The step that brings a shard to the servers of `chain`; `step` is the one that it needs for other reasons."""
    if not chain or any(n not in load for n in chain):  # because the first shard is lost, or leaves a server
        return step
    missing = [n for n in chain if n not in p.line and n not in unfit]
    surplus = [n for n in p.line if n not in chain and n in load]
    if step is not None and step[0] == StepKind.JOIN:
        return (StepKind.JOIN, missing[0]) if missing else step
    if step is not None and step[1] not in load:
        return step
    if surplus and step is not None:  # one copy is too many, as that is, too
        return StepKind.DROP, surplus[-1]
    return (StepKind.JOIN, missing[0]) if missing else step


def _gain(weight: float, gap: float) -> float:
    """How much the larger of two loads, which differ by `gap`, falls when a weight goes over to the smaller one."""
    return min(weight, gap - weight)


def _least_gain(load: _Load) -> float:
    return min(1.0, LEAST_GAIN * sum(load.values()) / max(1, len(load)))


def _spread(fine: list[_Shard], load: _Load, free: int, unfit: Collection[int]) -> Iterator[PlacementStep]:
    """Steps towards the same load on every server. The fullest one gives up its copy once there is another.

    `load` is as it will be when all that is under way is over, and these steps, too. Of the fullest server's shards,
    the one goes that gains most; of equals, one of the table that is spread least evenly over the two servers, because
    requests go to all shards. If weights differ, and one shard is nearly all of the fullest server's load, so that none
    gains enough, the next server gives one up.
    """
    held = Counter((each.table, n) for each in fine for n in each.place.chain)
    least, even = _least_gain(load), all(each.weight == 1 for each in fine)
    while free > 0 and len(load) > 1:
        sources, emptiest = sorted(load, key=lambda n: (-load[n], n)), min(load, key=lambda n: (load[n], n))
        rank: dict[_Shard, tuple[float, int, int]] = {}  # shard -> how good its move is, if it gains enough
        for fullest in sources[: 1 if even else None]:
            gap = load[fullest] - load[emptiest]
            if gap <= (1 if even else least):
                return
            able = [each for each in fine if fullest in each.place.chain and emptiest not in each.place.chain]
            rank = {
                each: (_gain(each.weight, gap), held[each.table, fullest] - held[each.table, emptiest], each.number)
                for each in able
                if _gain(each.weight, gap) >= least
            }
            if rank:
                break
        if not rank or emptiest in unfit:
            return
        each = max(rank, key=rank.__getitem__)
        fine.remove(each)
        held[each.table, fullest] -= 1
        held[each.table, emptiest] += 1
        load[fullest] -= each.weight
        load[emptiest] += each.weight
        free -= 1
        yield PlacementStep(StepKind.JOIN, each.table, each.number, emptiest)


def _even_out_primaries(
    tables: Mapping[str, tuple[int, Sequence[Place]]],
    fine: list[_Shard],
    load: _Load,
    resting: Collection[tuple[str, int]],
    weights: Weights,
) -> Iterator[PlacementStep]:
    """One step towards the same weight of primaries on every server."""
    heads: _Load = dict.fromkeys(load, 0)
    for name, (_, places) in tables.items():
        for number, p in enumerate(places):
            if p.chain and p.chain[0] in heads:
                heads[p.chain[0]] += _weight(weights, name, number)
    least = _least_gain(heads)
    best: tuple[tuple[float, float], PlacementStep] | None = None  # the gain of a step and the gap, and the step
    for name, number, p, _, weight in fine:
        for backup in () if (name, number) in resting else p.chain[1:]:
            gap = heads.get(p.chain[0], 0) - heads[backup] if backup in heads else 0
            gain = _gain(weight, gap)
            if gain >= least and (best is None or (gain, gap) > best[0]):
                best = (gain, gap), PlacementStep(StepKind.LEAD, name, number, backup)
    if best is not None:
        yield best[1]
