"""Rebalancing: which shards move, or which table is split, because of the load that was measured. Pure.

The controller takes a sample about once a second, while nothing moves: how much each shard makes its server work, how
many bytes it takes, and how busy and full the servers are. The rule answers with a decision, which does one of three
things:

* nothing;
* *moves*: shards have new weights, in proportion to their loads, and `coordination/placement.py` moves as few of them
  as even the servers out;
* *a split*: one shard is too large a part of the load to be evened out, so it is divided where its parts have equal
  loads (`coordination/shard_parts.py`); of some tables, all shards are. The parts then have weights, too.

Moves cost work, and a split costs a pause, so a decision has to be worth it. Four limits prevent oscillation, because
a load that trembles, or wanders, must not make shards wander with it:

* The servers were out of balance in each of the last samples, with the same server as the busiest.
* A decision promises that the largest load falls by `LEAST_PROMISE` of the mean load. The promise is what the steps of
  the placement lead to, which are simulated.
* There is a pause after each decision. It doubles as long as decisions follow one another. So does a shorter pause
  after an imbalance for which nothing promised enough, because to look for something costs work, too.
* The memory that the servers may use (``dps.memory``) comes first: moves for the sake of work do not fill a server
  unevenly, so that the next decision would take them back.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dps.engine.coordination.placement import EVEN, Place, StepKind, Weights, next_steps
from dps.engine.coordination.shard_parts import Hot, balanced_edges, part_loads

__all__ = [
    *("LoadSample", "RebalancingDecision", "RebalancingRule", "ServerUse", "ShardLoad", "TableLoad"),
    *("settled", "weights_by"),
]

# Servers are out of balance if the busiest one works so many times the mean, or the fullest one holds so many times it.
IMBALANCE = 1.25
# A decision is carried out only if it lowers the largest load of a server by this part of the mean load, because moves
# cost work, too.
LEAST_PROMISE = 0.15
# Nothing moves while the busiest server uses less than this part of what it could have of a core, because no trainer
# waits for it then. Where a user asks for it, ASKED_SHARE of that is enough.
LEAST_BUSY, ASKED_SHARE = 0.25, 0.1
# Nothing moves for the sake of memory while the fullest server has taken less than this part of its budget.
LEAST_FILL = 0.6
# A shard is hot, and its table may be split, if the shard takes HOT_BUSY of what its server could have of a core; or if
# it takes HOT_LEAST, and HOT_FACTOR times the mean of its table's shards.
HOT_BUSY, HOT_LEAST, HOT_FACTOR = 0.25, 0.05, 2.0
# So many samples in a row have to show an imbalance, or a hot shard, because loads tremble. A sample is the mean of
# about 4 s, and one is taken each second, so 7 samples tell of 10 s.
MOVE_SAMPLES, SPLIT_SAMPLES = 5, 7
# After a decision the rule rests for PAUSE_SECONDS, because the load has to be measured anew. The pause doubles up to
# MAX_PAUSE_SECONDS while decisions follow one another, and is short again after CALM_PAUSES pauses without one.
PAUSE_SECONDS, MAX_PAUSE_SECONDS, CALM_PAUSES = 10.0, 600.0, 6
# Where nothing promises enough, the rule looks again after this time, which doubles, because a look simulates moves.
REFUSAL_SECONDS = 2.0
SPLITS = (2, 4, 8)  # A shard is divided into so many parts at once; or all shards of its table are.
# Nothing is split unasked if a server has more bytes of it, because it has them twice until it is split.
MOST_SPLIT_BYTES = 2 << 30
# The rule splits no table into more shards than these allow, because each shard costs memory and messages.
SHARDS_PER_SERVER, MAX_SHARDS = 32, 4096
LEAST_WEIGHT = 1 / 16  # A shard without load has this weight and not 0, because such shards are to be spread, too.
WEIGHT_STEPS = 64  # Weights are multiples of 1/64, because sums of these are exact.
MAX_ROUNDS = 512  # A simulation of steps ends after so many rounds, because it has to end.


class ShardLoad(NamedTuple):
    """What one shard takes.

    Parameters
    ----------
    busy : float
        Of a core, on its primary.
    held : float
        Bytes of each of its replicas.
    hottest : float
        The part of its accesses that a single key may have. A split does not divide that.
    hot : Hot
        The places of its hottest keys, and the part of its load that each has.
    """

    busy: float = 0.0
    held: float = 0.0
    hottest: float = 0.0
    hot: Hot = ()


class TableLoad(NamedTuple):
    """A table: its copies, where its shards are, and what they take."""

    copies: int
    places: Sequence[Place]
    shards: Sequence[ShardLoad]
    divisible: bool = True  # whether it can be split
    edges: Sequence[int] = ()  # where its shards begin, and the end; none, if no shard of it can be divided alone


class ServerUse(NamedTuple):
    """How busy a server is, in parts of a core; how much it uses of what it could have of a core; and the bytes that
    its tables take and may take (0: any number)."""

    busy: float = 0.0
    used: float = 0.0
    taken: float = 0.0
    budget: float = 0.0

    @property
    def fill(self) -> float:
        """The part of its budget that is taken; 0 without one."""
        return self.taken / self.budget if self.budget else 0.0


class LoadSample(NamedTuple):
    """The load of all tables and servers, measured while no shard moved."""

    tables: Mapping[str, TableLoad]
    servers: Mapping[int, ServerUse]


class RebalancingDecision(NamedTuple):
    """What is to be done, and the numbers that say why.

    Parameters
    ----------
    why : str
    weights : Weights, optional
        New weights of all shards; None: nothing moves.
    table : str, optional
        The table that is split first.
    shards : int
        How many shards it is to have.
    edges : tuple of int
        Their edges, if one shard is divided alone.
    before, after : mapping of int to float
        The load of each server, in cores or bytes, as it is modelled now, and as the decision promises it.
    moves : int
        How many shards are to have another chain.
    """

    why: str
    weights: Weights | None = None
    table: str | None = None
    shards: int = 0
    edges: tuple[int, ...] = ()
    before: Mapping[int, float] = {}
    after: Mapping[int, float] = {}
    moves: int = 0

    @property
    def acts(self) -> bool:
        return self.weights is not None


def weights_by(loads: Mapping[str, Sequence[float]]) -> Weights:
    """The weights of shards with these loads; their mean is about 1, and equal loads give none.

    Examples
    --------
    >>> weights_by({"w": [3.0, 1.0], "v": [1.0, 1.0]})
    {'w': (1.9375, 0.6875), 'v': (0.6875, 0.6875)}
    >>> dict(weights_by({"w": [0.2, 0.2]}))
    {}
    """
    count, total = sum(map(len, loads.values())), math.fsum(x for of_table in loads.values() for x in of_table)
    if not total > 0:
        return EVEN
    weights = {name: tuple(_weight(x * count / total) for x in of_table) for name, of_table in loads.items()}
    return weights if any(w != 1 for of_table in weights.values() for w in of_table) else EVEN


def _weight(load: float) -> float:
    return round(WEIGHT_STEPS * (LEAST_WEIGHT + (1 - LEAST_WEIGHT) * load)) / WEIGHT_STEPS


def settled(
    tables: Mapping[str, tuple[int, Sequence[Place]]], servers: Iterable[int], weights: Weights
) -> dict[str, list[Place]]:
    """The placement to which the steps of these weights lead, from one at rest.

    Examples
    --------
    >>> tables = {"w": (1, [Place((0,)), Place((0,)), Place((1,)), Place((1,))])}
    >>> [place.chain for place in settled(tables, [0, 1], {"w": (4.0, 0.5, 0.5, 0.5)})["w"]]
    [(0,), (1,), (1,), (1,)]
    """
    here, up = {name: (copies, list(places)) for name, (copies, places) in tables.items()}, list(servers)
    for _ in range(MAX_ROUNDS):
        steps = list(next_steps(here, up, (), moves=1 << 30, weights=weights))
        for kind, table, shard, server in steps:
            places = here[table][1]
            others = tuple(n for n in places[shard].chain if n != server)
            chains = {StepKind.JOIN: (*others, server), StepKind.DROP: others, StepKind.LEAD: (server, *others)}
            places[shard] = Place(chains[kind])
        if not steps:
            break
    return {name: places for name, (_, places) in here.items()}


class _Measure(NamedTuple):
    """The load by which servers are balanced: the work of primaries, or the memory of all replicas."""

    memory: bool

    def of_shards(self, sample: LoadSample) -> dict[str, list[float]]:
        return {
            name: [shard.held if self.memory else shard.busy for shard in table.shards]
            for name, table in sample.tables.items()
        }

    def of_use(self, use: ServerUse) -> float:
        return use.fill if self.memory else use.busy

    def of_servers(
        self, places: Mapping[str, Sequence[Place]], loads: Mapping[str, Sequence[float]], servers: Iterable[int]
    ) -> dict[int, float]:
        """The load of each server in a placement."""
        sums = dict.fromkeys(servers, 0.0)
        for name, of_table in places.items():
            for place, load in zip(of_table, loads[name], strict=True):
                for server in place.chain if self.memory else place.chain[:1]:
                    if server in sums:
                        sums[server] += load
        return sums

    def text(self, load: float) -> str:
        return f"{load / (1 << 20):,.4g} MiB" if self.memory else f"{load:.2f} of a core"


class RebalancingRule:
    """The rule, with the last samples and the pause. See the module's docstring.

    Examples
    --------
    >>> places, cold = [Place((0,)), Place((0,)), Place((1,)), Place((1,))], ShardLoad(0.02)
    >>> table = TableLoad(1, places, [ShardLoad(0.3), ShardLoad(0.3), cold, cold])
    >>> sample = LoadSample({"w": table}, {0: ServerUse(0.6, 0.6), 1: ServerUse(0.04, 0.04)})
    >>> decisions = [RebalancingRule().decide(sample, now) for now in range(1)]
    >>> rule = RebalancingRule()
    >>> [rule.decide(sample, now).acts for now in range(7)]
    [False, False, False, False, True, False, False]
    """

    def __init__(self) -> None:
        self._samples: collections.deque[LoadSample] = collections.deque(maxlen=SPLIT_SAMPLES)
        self._hot: collections.Counter[tuple[str, int]] = collections.Counter()  # shard -> samples in a row
        # By which load, and with which busiest server, servers are out of balance; for so many samples in a row.
        self._imbalance: tuple[_Measure | None, int | None] = None, None
        self._lasting = 0
        self._pause, self._refusal = PAUSE_SECONDS, REFUSAL_SECONDS
        self._decided = self._rests_until = self._refused_until = -math.inf

    def restart(self) -> None:
        """Forget the samples, because shards or servers move, so that earlier samples say nothing of later ones."""
        self._samples.clear()
        self._hot.clear()
        self._lasting = 0

    def decide(self, sample: LoadSample, now: float) -> RebalancingDecision:
        """Take a sample and say what is to be done now."""
        if self._samples and not _same_shape(self._samples[-1], sample):
            self.restart()
        self._samples.append(sample)
        self._hot = collections.Counter({shard: self._hot[shard] + 1 for shard in _hot_shards(sample)})
        measures = _out_of_balance(sample)
        measure = measures[0] if measures else None
        busiest = None if measure is None else max(sample.servers, key=lambda n: measure.of_use(sample.servers[n]))
        if (measure, busiest) != self._imbalance:
            self._imbalance, self._lasting = (measure, busiest), 0
            self._refusal, self._refused_until = REFUSAL_SECONDS, -math.inf
        self._lasting += 1
        if now < self._rests_until:
            return RebalancingDecision(f"waits for {self._rests_until - now:.0f} s after the last decision")
        if measure is None:
            return RebalancingDecision(_state(sample))
        if self._lasting < MOVE_SAMPLES:
            return RebalancingDecision(f"server {busiest} has more than the others, since {self._lasting} samples")
        hot = {shard for shard, times in self._hot.items() if times >= SPLIT_SAMPLES}
        if now < self._refused_until:
            return RebalancingDecision(f"nothing promised enough; looks again in {self._refused_until - now:.0f} s")
        decision = _propose(_average(self._samples), measures, hot, MOST_SPLIT_BYTES)
        if not decision.acts:
            self._refused_until = now + self._refusal
            self._refusal = min(2 * self._refusal, MAX_PAUSE_SECONDS)
        else:
            doubled = min(2 * self._pause, MAX_PAUSE_SECONDS)
            self._pause = PAUSE_SECONDS if now - self._decided > CALM_PAUSES * self._pause else doubled
            self._decided, self._rests_until = now, now + self._pause
            self.restart()
        return decision

    def propose(self, sample: LoadSample) -> RebalancingDecision:
        """What would even this load out: a user asks, so there is no pause, and one sample is enough."""
        measures = _out_of_balance(sample, least=ASKED_SHARE)
        if not measures:
            return RebalancingDecision(_state(sample))
        return _propose(sample, measures, _hot_shards(sample), math.inf)


def _state(sample: LoadSample) -> str:
    loads = [use.busy for use in sample.servers.values()]
    return f"in balance: servers work {min(loads):.2f} to {max(loads):.2f} of a core" if loads else "no server"


def _same_shape(one: LoadSample, other: LoadSample) -> bool:
    def shape(sample: LoadSample) -> object:
        return sample.servers.keys(), {name: len(table.shards) for name, table in sample.tables.items()}

    return shape(one) == shape(other)


def _average(samples: Sequence[LoadSample]) -> LoadSample:
    """The last sample, with the mean loads of all: of a shard, and of a server. They have the same shape."""
    last, count = samples[-1], len(samples)
    tables = {}
    for name, table in last.tables.items():
        busy = [
            sum(of_shard) / count
            for of_shard in zip(*([s.busy for s in each.tables[name].shards] for each in samples), strict=True)
        ]
        tables[name] = table._replace(shards=[s._replace(busy=b) for s, b in zip(table.shards, busy, strict=True)])
    servers = {
        n: use._replace(busy=sum(each.servers[n].busy for each in samples) / count) for n, use in last.servers.items()
    }
    return LoadSample(tables, servers)


def _hot_shards(sample: LoadSample) -> set[tuple[str, int]]:
    """The shards that are so much of the load that their table may be split."""
    hot = set()
    for name, table in sample.tables.items():
        mean = sum(shard.busy for shard in table.shards) / max(1, len(table.shards))
        for number, (shard, place) in enumerate(zip(table.shards, table.places, strict=True)):
            use = sample.servers.get(place.chain[0], ServerUse())
            used = shard.busy * use.used / max(use.busy, 1e-9)
            if used > HOT_BUSY or (used > HOT_LEAST and shard.busy > HOT_FACTOR * mean):
                hot.add((name, number))
    return hot


def _ratio(loads: Iterable[float]) -> float:
    """The largest load over the mean; 1 where there is none."""
    values = list(loads)
    total = sum(values)
    return len(values) * max(values) / total if total > 0 else 1.0


def _out_of_balance(sample: LoadSample, least: float = 1.0) -> list[_Measure]:
    """By which loads servers are out of balance, memory first. `least` is the part of the limit of work that holds."""
    if len(sample.servers) < 2:
        return []
    fills, busy = [use.fill for use in sample.servers.values()], [use.busy for use in sample.servers.values()]
    by_memory = max(fills) > LEAST_FILL and _ratio(fills) > IMBALANCE
    by_work = max(use.used for use in sample.servers.values()) > least * LEAST_BUSY and _ratio(busy) > IMBALANCE
    return [_Measure(memory=True)] * by_memory + [_Measure(memory=False)] * by_work


def _propose(
    sample: LoadSample, measures: Iterable[_Measure], hot: set[tuple[str, int]], most_bytes: float
) -> RebalancingDecision:
    """What evens out the first load for which that can be done."""
    decision = RebalancingDecision("in balance")
    for measure in measures:
        decision = _propose_by(measure, sample, hot, most_bytes)
        if decision.acts:
            break
    return decision


def _propose_by(
    measure: _Measure, sample: LoadSample, hot: set[tuple[str, int]], most_bytes: float
) -> RebalancingDecision:
    """The best of moves and splits, if it promises enough. No table is split of which a server has more than that."""
    loads = measure.of_shards(sample)
    before = measure.of_servers(_places(sample), loads, sample.servers)
    fullest, mean = max(before, key=lambda n: (before[n], -n)), sum(before.values()) / len(before)
    why = f"server {fullest} has {measure.text(before[fullest])}, the mean is {measure.text(mean)}"
    best, larger = _moves(sample, measure, loads, loads), sample
    if not measure.memory:
        for split in _splits(sample, loads, fullest, hot, most_bytes):
            hottest_key = split.hottest(sample, loads)
            most = max(best.after.values())
            if most <= IMBALANCE * mean or hottest_key >= most - LEAST_PROMISE * mean:  # which no split divides
                break
            parts = [
                {**loads, split.table: split.loads(loads[split.table], some)} for some in (split.even, split.expected)
            ]
            decision = _moves(split.made(sample), measure, *parts)
            if max(decision.after.values()) < most - LEAST_PROMISE * mean:
                best = decision._replace(table=split.table, shards=len(split.of), edges=split.edges)
                larger = split.made(sample)
    if not before[fullest] - max(best.after.values()) > LEAST_PROMISE * mean:
        return RebalancingDecision(f"{why}, and no move or split promises enough", before=before)
    if not measure.memory and _fills_unevenly(larger, best):
        return RebalancingDecision(f"{why}, and the memory of the servers allows no move", before=before)
    return best._replace(why=f"{why}; it will be at most {measure.text(max(best.after.values()))}", before=before)


def _places(sample: LoadSample) -> dict[str, Sequence[Place]]:
    return {name: table.places for name, table in sample.tables.items()}


def _moves(
    sample: LoadSample,
    measure: _Measure,
    loads: Mapping[str, Sequence[float]],
    expected: Mapping[str, Sequence[float]],
) -> RebalancingDecision:
    """What weights by these loads lead to, if the loads are as expected then."""
    weights = weights_by(loads)
    tables = {name: (table.copies, table.places) for name, table in sample.tables.items()}
    places = settled(tables, sample.servers, weights)
    moves = sum(
        new.chain != old.chain for name in places for new, old in zip(places[name], tables[name][1], strict=True)
    )
    return RebalancingDecision("", weights, after=measure.of_servers(places, expected, sample.servers), moves=moves)


def _splits(
    sample: LoadSample,
    loads: Mapping[str, Sequence[float]],
    fullest: int,
    hot: set[tuple[str, int]],
    most_bytes: float,
) -> Iterable[_Split]:
    """The splits that may be made of the fullest server's hottest shard, or of its whole table, where no shard can be
    divided alone. Those into the fewest parts come first, because each shard costs memory and messages."""
    there = [
        (loads[name][shard], name, shard)
        for name, shard in hot
        if name in sample.tables and sample.tables[name].places[shard].chain[:1] == (fullest,)
    ]
    limit = min(MAX_SHARDS, SHARDS_PER_SERVER * len(sample.servers))
    name, shard = max(there)[1:] if there else (None, 0)
    if name is None or not sample.tables[name].divisible:
        return
    table = sample.tables[name]
    held = {name: [each.held if n == shard or not table.edges else 0.0 for n, each in enumerate(table.shards)]}
    on_servers = _Measure(memory=True).of_servers({name: sample.tables[name].places}, held, sample.servers)
    if max(on_servers.values()) > most_bytes:
        return
    for times in SPLITS:
        split = _split_shard(name, table, shard, times) if table.edges else _split_table(name, table, times)
        if len(split.of) <= limit:
            yield split


class _Split(NamedTuple):
    """A table with more shards. Of each one: the shard of which it is a part; what part of the bytes it has; of the
    load, evenly spread; and of the load at worst."""

    table: str
    of: Sequence[int]
    held: Sequence[float]
    even: Sequence[float]
    expected: Sequence[float]
    edges: tuple[int, ...] = ()

    def made(self, sample: LoadSample) -> LoadSample:
        """The sample as it would be then, where parts lie where the shard was."""
        table = sample.tables[self.table]
        shards = [
            table.shards[n]._replace(held=table.shards[n].held * x) for n, x in zip(self.of, self.held, strict=True)
        ]
        places = [table.places[n] for n in self.of]
        return sample._replace(tables={**sample.tables, self.table: table._replace(places=places, shards=shards)})

    def loads(self, loads: Sequence[float], parts: Sequence[float]) -> list[float]:
        return [loads[n] * part for n, part in zip(self.of, parts, strict=True)]

    def hottest(self, sample: LoadSample, loads: Mapping[str, Sequence[float]]) -> float:
        """The load that a single key of the table may have, which no split divides."""
        shards = sample.tables[self.table].shards
        return max(x * shard.hottest for x, shard in zip(loads[self.table], shards, strict=True))


def _split_table(name: str, table: TableLoad, times: int) -> _Split:
    """All shards divided into equal parts, of which one, no matter which, has the hottest key."""
    of = [n for n in range(len(table.shards)) for _ in range(times)]
    even = [1 / times] * len(of)
    expected = [shard.hottest * (n == 0) + (1 - shard.hottest) / times for shard in table.shards for n in range(times)]
    return _Split(name, of, even, even, expected)


def _split_shard(name: str, table: TableLoad, shard: int, parts: int) -> _Split:
    """One shard divided where its parts have equal loads."""
    first, end = table.edges[shard : shard + 2]
    edges = balanced_edges(first, end, table.shards[shard].hot, parts)
    before, behind = range(shard), range(shard + 1, len(table.shards))
    load = table.shards[shard]
    held, even = part_loads(edges, ()), part_loads(edges, load.hot)
    # Where places of hot keys are not known, one of the parts, no matter which, has the hottest key.
    apart = 0.0 if load.hot else load.hottest
    expected = [apart * (n == 0) + (1 - apart) * part for n, part in enumerate(even)]
    of = [*before, *[shard] * len(held), *behind]
    held, even, expected = ([*[1.0] * len(before), *some, *[1.0] * len(behind)] for some in (held, even, expected))
    return _Split(name, of, held, even, expected, tuple(sorted({*table.edges, *edges})))


def _fills_unevenly(sample: LoadSample, decision: RebalancingDecision) -> bool:
    """Whether a decision leads to another balance of memory, out of balance and worse than now.

    The sample is as after a split, if one is decided, because a split moves no more than its parts.
    """
    if not any(use.budget for use in sample.servers.values()):
        return False
    by_memory = _Measure(memory=True)
    held = by_memory.of_shards(sample)
    tables = {name: (table.copies, table.places) for name, table in sample.tables.items()}
    now = by_memory.of_servers(_places(sample), held, sample.servers)
    then = by_memory.of_servers(settled(tables, sample.servers, decision.weights or EVEN), held, sample.servers)
    servers = {n: use._replace(taken=use.taken + then[n] - now[n]) for n, use in sample.servers.items()}
    fills, before = ([use.fill for use in uses.values()] for uses in (servers, sample.servers))
    return max(fills) > LEAST_FILL and _ratio(fills) > max(IMBALANCE, _ratio(before) + 1e-6)
