"""Rebalancing procedures: shards follow the load. `coordination/rebalancing.py` has the rule. Pure.

A decision is carried out with what there is: a split by `resharding_procedures.py`; moves by new weights in the
membership, whose steps then join, hand over and drop replicas, as they do where a server joins. So a decision adds no
way in which an op could be lost, and a controller that ends between two steps leaves nothing half done: weights only
say where shards are to be.

The load is read about once a second, and only while nothing is unfinished: every server is up, every shard has its
replicas and none is moving, no table is being made or frozen, and no checkpoint is being written or restored.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dps.engine.controller.failover import Membership
from dps.engine.controller.placement_rest import PlacementRest
from dps.engine.controller.procedures import InEndpoint, InThread, Lock, Procedure, Sleep, holding
from dps.engine.coordination.placement import Place
from dps.engine.coordination.rebalancing import (
    LoadSample,
    RebalancingDecision,
    RebalancingRule,
    ServerUse,
    ShardLoad,
    TableLoad,
)
from dps.engine.state.ops import TableSpec
from dps.engine.state.partitioning import FunctionPartition
from dps.engine.state.table_edges import halved_edges, resharded
from dps.engine.telemetry.rebalance_report import RebalanceReport, RebalancingStatus, ReplacedShard, SplitTable
from dps.engine.telemetry.shard_work import MeasuredWork
from dps.errors import DPSError, InputError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["RebalancingProcedures", "SettledServers", "Splitting", "WorkReports"]

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0  # between two looks at the load
POLL_SECONDS = 0.1  # between two looks whether shards rest and servers have reported since
# One call of `rebalance` makes at most so many decisions, because each one changes what is measured next.
MAX_DECISIONS = 4


class WorkReports(Protocol):
    """The reports of how much servers and shards work, as rebalancing reads them."""

    def now(self) -> float:
        """Seconds, as `work` takes them."""
        ...

    def work(self, since: float) -> MeasuredWork | None:
        """The work of servers and shards since then; None if a server has not reported it yet."""
        ...


class SettledServers(Protocol):
    """Whether servers are being started or ended, because shards stay where they are meanwhile."""

    @property
    def settled(self) -> bool: ...


class Splitting(Protocol):
    """How tables are split: see :class:`dps.engine.controller.resharding_procedures.ReshardingProcedures`."""

    def split(self, name: str, shards: int | None = None) -> Procedure[Description]: ...
    def split_at(self, name: str, edges: Sequence[int]) -> Procedure[Description]: ...


class RebalancingProcedures:
    """How the shards of one parameter server follow their load.

    Parameters
    ----------
    membership : Membership
        Which servers hold which shards. The endpoint's thread owns it and the reports.
    busy : callable
        Whether a checkpoint is being taken or restored: meanwhile, shards stay.
    acting : Lock
        Held while a decision is carried out, so that there is one at a time.
    enabled : callable
        Whether decisions are made without being asked for.
    """

    def __init__(
        self,
        membership: Membership,
        reports: WorkReports,
        servers: SettledServers,
        resharding: Splitting,
        busy: Callable[[], bool],
        acting: Lock,
        enabled: Callable[[], bool],
    ):
        self.membership = membership
        self.rule = RebalancingRule()
        self.enabled = enabled
        self.closed = False
        self.moves = self.splits = 0  # shards whose replicas were to move, and tables that were split, so far
        self.why = "not looked yet"  # the reason of the last decision
        self._reports, self._servers, self._resharding = reports, servers, resharding
        self._busy, self._acting = busy, acting
        self._rest = PlacementRest(membership, reports.now)
        self._known: dict[int, TableSpec] = {}
        self._divisible: dict[int, Sequence[int] | None] = {}  # number of a table -> see `_divisions`

    def status(self) -> RebalancingStatus:
        return RebalancingStatus(self.enabled(), self.moves, self.splits, self.why)

    # -- by itself

    def follow(self) -> Procedure[None]:
        """Follow the load, while that is enabled, until the parameter server is closed."""
        failed = ""
        while not self.closed:
            try:
                if self.enabled() and len(self.membership.servers) > 1:
                    yield from self.tick()
                    failed = ""
            except Exception as error:
                self.why = f"{type(error).__name__}: {error}"
                if self.why != failed:  # so that each failure is logged once
                    failed = self.why
                    logger.warning("parameter server %r: shards stay: %s", self.membership.session, self.why)
            yield Sleep(INTERVAL_SECONDS)

    def tick(self) -> Procedure[None]:
        """Look at the load once, and carry out what is decided."""
        sample = yield from self._sample()
        if sample is None or self._acting.locked():  # because a user's `rebalance` is moving shards
            self.why = "waits for servers, shards, checkpoints and reports on their way"
            self.rule.restart()
            return
        decision: RebalancingDecision = yield InThread(self.rule.decide, (sample, self._reports.now()))
        self.why = decision.why
        if decision.acts:
            yield from holding([self._acting], self._carry_out(decision))

    # -- when a user asks

    def rebalance(self, seconds: float) -> Procedure[RebalanceReport]:
        """Even the measured load out now, within so many seconds; what was done."""
        return holding([self._acting], self._rebalance(seconds))

    def _rebalance(self, seconds: float) -> Procedure[RebalanceReport]:
        until, replaced, splits = self._reports.now() + seconds, list[ReplacedShard](), list[SplitTable]()
        self._divisible.clear()  # because a split that was refused may have room by now
        sample = yield from self._sample_by(until)
        before, why = _busy_of(sample), "servers and shards are on their way, or no load was reported"
        for _ in range(MAX_DECISIONS):
            if sample is None:
                break
            decision: RebalancingDecision = yield InThread(self.rule.propose, (sample,))
            why = decision.why
            if not decision.acts:
                break
            if decision.table is not None:
                splits.append(SplitTable(decision.table, len(sample.tables[decision.table].shards), decision.shards))
            old = yield from self._carry_out(decision)
            sample = yield from self._sample_by(until)
            replaced += _replaced(old, (yield InEndpoint(self._chains)))
        return RebalanceReport(replaced, splits, before, _busy_of(sample), why)

    def _sample_by(self, until: float) -> Procedure[LoadSample | None]:
        """The load, once shards rest and servers have reported since; None if that is not so in time."""
        while (sample := (yield from self._sample())) is None and self._reports.now() < until and not self.closed:
            yield Sleep(POLL_SECONDS)
        return sample

    # -- inside

    def _carry_out(self, decision: RebalancingDecision) -> Procedure[dict[str, list[tuple[int, ...]]]]:
        """Split and move; the chains before shards moved."""
        what = f"{decision.moves} shard{'s' * (decision.moves != 1)} to move: {decision.why}"
        if decision.table is not None:
            what = f"table {decision.table!r} is split into {decision.shards} shards, {what}"
        yield InEndpoint(self.membership.note, (f"rebalancing: {what}", logging.INFO))
        if decision.table is not None:
            number = self.membership.specs[decision.table]["id"]
            try:
                if decision.edges:
                    yield from self._resharding.split_at(decision.table, decision.edges)
                else:
                    yield from self._resharding.split(decision.table, decision.shards)
            except DPSError as error:
                failed = f"rebalancing: table {decision.table!r} was not split: {error}"
                yield InEndpoint(self.membership.note, (failed,))
                if self.membership.specs.get(decision.table, {}).get("id") == number:
                    self._divisible[number] = None  # because the next decision would propose the same split again
                raise
            self.splits += 1
        chains: dict[str, list[tuple[int, ...]]] = yield InEndpoint(self._chains)
        self.moves += decision.moves
        yield InEndpoint(self.membership.set_weights, (decision.weights,))
        return chains

    def _sample(self) -> Procedure[LoadSample | None]:
        """The load; None while a server comes or goes, a shard moves or a checkpoint is taken."""
        if self._busy() or not self._servers.settled:
            return None
        sample: LoadSample | None = yield InEndpoint(self._load)
        return sample

    def _load(self) -> LoadSample | None:
        """The load, in the endpoint's thread."""
        since = self._rest.since()
        work = self._reports.work(since) if math.isfinite(since) else None
        if work is None or not work.servers:
            return None
        tables = {}
        for name, spec in self.membership.specs.items():
            shards = [ShardLoad(*each) for each in work.tables.get(spec["id"], ())]
            places: Sequence[Place] = self.membership.places[name]
            if len(shards) == len(places):
                edges = self._divisions(spec)
                if edges:
                    shards = placed_loads(shards, places, self._table(spec), work.hot.get(spec["id"], ()))
                tables[name] = TableLoad(spec["copies"], list(places), shards, edges is not None, edges or ())
        return LoadSample(tables, {number: ServerUse(*use) for number, use in work.servers.items()})

    def _divisions(self, spec: Description) -> Sequence[int] | None:
        """The edges of a table of which one shard can be divided; none if only all can be, and None if none can.

        A table with a budget is not split unasked, because its parts would have budgets of their own.
        """
        number = spec["id"]
        if number not in self._divisible:
            known = {each["id"] for each in self.membership.specs.values()}
            self._divisible = {table: value for table, value in self._divisible.items() if table in known}
            table = self._table(spec)
            self._divisible[number] = None if table.life.max_bytes else divisions(table)
        return self._divisible[number]

    def _table(self, spec: Description) -> TableSpec:
        """The table with these fields; kept, because the load of each table is looked at each second."""
        if spec["id"] not in self._known:
            known = {each["id"] for each in self.membership.specs.values()}
            self._known = {number: table for number, table in self._known.items() if number in known}
            self._known[spec["id"]] = TableSpec.from_dict(spec)
        return self._known[spec["id"]]

    def _chains(self) -> dict[str, list[tuple[int, ...]]]:
        return {name: [place.chain for place in places] for name, places in self.membership.places.items()}


def divisions(table: TableSpec) -> Sequence[int] | None:
    """The edges of a table of which one shard can be divided; none if only all can be, and None if none can.

    >>> divisions(TableSpec("w", shards=2)), divisions(TableSpec("w", shards=2, fixed_shards=True))
    ((0, 2048, 4096), None)
    """
    edges = table.shard_map.edges
    widest = max(range(table.shards), key=lambda n: edges[n + 1] - edges[n])
    for shard, found in ((widest, edges), (None, ())):
        try:
            resharded(table, halved_edges(table, shard), table.id)
            return found
        except InputError:
            continue
    return None


def placed_loads(
    shards: Sequence[ShardLoad], places: Sequence[Place], table: TableSpec, hot: Iterable[tuple[int, int, float]]
) -> list[ShardLoad]:
    """The loads of shards, with the places of the table's hottest keys: (server, key, part of a core).

    A key counts if its server leads the shard in which its place lies, because a server that has given a shard away
    remembers the keys. The places of a table with a function as its partition are not known, because only clients and
    servers call it. Of shards that are not equal, each has the bytes of its part of the places.

    >>> loads, places = [ShardLoad(0.4), ShardLoad(0.2)], [Place((0,)), Place((1,))]
    >>> placed_loads(loads, places, TableSpec("w", rows=8, shards=2), [(1, 5, 0.1), (0, 6, 0.3)])[1]
    ShardLoad(busy=0.2, held=0.0, hottest=0.5, hot=[(5, 0.5)])
    """
    edges, total = table.shard_map.edges, sum(shard.held for shard in shards)
    found = list(shards)
    if not table.shard_map.is_even:
        widths = [end - first for first, end in itertools.pairwise(edges)]
        found = [shard._replace(held=total * x / edges[-1]) for shard, x in zip(found, widths, strict=True)]
    if isinstance(table.partition, FunctionPartition):
        return found
    listed = list(hot)
    at = table.shard_map.places(np.array([key for _, key, _ in listed], np.int64)).tolist()
    own: list[list[tuple[int, float]]] = [[] for _ in found]
    for place, (server, _, busy) in zip(at, listed, strict=True):
        number = table.shard_map.within(place, place + 1)[0]
        if places[number].chain[:1] == (server,) and found[number].busy > 0:
            own[number].append((place, busy / found[number].busy))
    for number, pairs in enumerate(own):
        most = max(1.0, sum(share for _, share in pairs))
        shares = [(place, share / most) for place, share in pairs]
        hottest = max((share for _, share in shares), default=0.0)
        found[number] = found[number]._replace(hot=shares, hottest=hottest)
    return found


def _busy_of(sample: LoadSample | None) -> dict[int, float]:
    return {} if sample is None else {number: round(use.busy, 4) for number, use in sample.servers.items()}


def _replaced(
    old: Mapping[str, Sequence[tuple[int, ...]]], new: Mapping[str, Sequence[tuple[int, ...]]]
) -> Iterable[ReplacedShard]:
    """The shards whose chains differ, of the tables with as many shards as before."""
    for name in old.keys() & new.keys():
        if len(old[name]) == len(new[name]):
            for shard, (before, after) in enumerate(zip(old[name], new[name], strict=True)):
                if before != after:
                    yield ReplacedShard(name, shard, list(before), list(after))
