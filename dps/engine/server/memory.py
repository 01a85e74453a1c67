"""The memory of a server: what its tables take, and whether an op that would make them take more is refused.

Theory of operation
-------------------
With ``dps.memory``, a server has a budget for all that it holds (`state/memory.py`). The compiled step leaves pushes to
the general way that would take memory for rows (`Service.bounded`). Here, before anything is changed:

* an op whose shards may grow as they like, within the budget, is let through: most are, because arrays grow by much;
* else its new rows are counted, and the shards are *thrifty*: they grow by these rows and no more. An op without new
  rows then needs nothing. So it is never refused;
* else, where the table evicts, as many of a shard's coldest rows go as there are new ones (`forgetting.py`);
* else the op is refused whole.

What a copy gets cannot be refused where the copy is. So a server reports how full it is, and the controller tells all
primaries which servers have nearly used up their budgets, with the answers to heartbeats (`learn_full`): these make no
rows then of which such a server has a copy.

Rows that an open clock will have count when they are pushed. What cannot be refused is counted, and makes others be
refused: sums of rows that there are, rows that a primary on another server has taken for a copy here, checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.core.requests.service import Service
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.dtypes import dtype_of_sums
from dps.engine.state.memory import creates_rows, first_bytes, growth, held_bytes, is_summed, missing
from dps.engine.state.ops import Op, TableSpec
from dps.engine.state.shard import KeyedShard, KeyedSums, Shard
from dps.engine.telemetry.snapshot import NEARLY_FULL
from dps.errors import LimitError

__all__ = ["Need", "ServerMemory"]

logger = logging.getLogger(__name__)


class Need(NamedTuple):
    """What an op needs of a shard."""

    shard: KeyedShard
    op: Op
    new: int  # rows, besides those that the open clock will have
    summed: bool  # they come when the clock is closed

    def growth(self, promised: int) -> int:
        """Bytes by which the shard and its sums grow at most."""
        count = len(self.op.values)
        if not self.summed:
            return growth(self.shard, self.new, count)
        sums = self.shard.sums
        row_bytes = self.shard.spec.dim * np.dtype(dtype_of_sums(self.shard.spec.dtype)).itemsize
        aside = growth(sums.shard, count, count) if isinstance(sums, KeyedSums) else count * row_bytes
        return growth(self.shard, self.new + promised, self.new + promised) + aside


class ServerMemory:
    """The budget of one server, of `limit` bytes (0: none) for the tables that it has."""

    def __init__(self, tables: Mapping[int, ServerTable], number: int, limit: int):
        self.limit, self._tables, self._number = limit, tables, number
        self.used = limit  # bytes, as measured last, and what was let through since; measured before one is refused
        self._promised: dict[KeyedShard, tuple[int, int]] = {}  # clock -> rows that its end will make
        self._warned = False
        self._full: frozenset[int] = frozenset()  # the servers that have nearly used up their budgets
        self._service: Service | None = None

    def begin(self, service: Service) -> None:
        """Let the compiled step of the server leave pushes to this that take memory."""
        self._service, service.bounded = service, self.limit > 0

    def learn_full(self, servers: Collection[int]) -> None:
        """Learn which servers have nearly used up their budgets: no rows are made of which these have a copy."""
        if self.limit and self._service is not None:
            self._full, self._service.blocked = frozenset(servers), len(servers) > 0

    @property
    def budget(self) -> tuple[int, int]:
        """Bytes that its tables take, and those that they may take."""
        return self.used, self.limit

    def measure(self) -> int:
        """Bytes that all tables take. Rows that two shards have count once (`Renumbered` of `state/resharding.py`)."""
        shards = [replica.shard for table in self._tables.values() for replica in table.replicas.values()]
        own = {id(shard.rows): held_bytes(shard) for shard in shards if isinstance(shard, Shard)}
        self.used = sum(own.values()) + sum(shard.nbytes for shard in shards if not isinstance(shard, Shard))
        return self.used

    def tick(self) -> None:
        """Measure, and warn once of a budget that is nearly full. To be called with each heartbeat."""
        if not self.limit:
            return
        there = {r.shard for table in self._tables.values() for r in table.replicas.values()}
        self._promised = {shard: promise for shard, promise in self._promised.items() if shard in there}
        if self.measure() > NEARLY_FULL * self.limit and not self._warned:
            self._warned = True
            logger.warning(
                "server %d: its tables take %s of the %s bytes of dps.memory; beyond them, pushes that create rows are "
                "refused, or let others go where the table evicts",
                *(self._number, f"{self.used:,}", f"{self.limit:,}"),
            )

    def fits(self, nbytes: int) -> bool:
        """Whether so many more bytes fit."""
        return not self.limit or self.used + nbytes <= self.limit or self.measure() + nbytes <= self.limit

    def check_table(self, spec: TableSpec, shards: Sequence[int]) -> None:
        """Refuse a table whose shards do not fit, before they are made."""
        nbytes = sum(first_bytes(spec, number) for number in shards) if self.limit else 0
        if nbytes and not self.fits(nbytes):
            raise LimitError(
                f"server {self._number}: {len(shards)} shards of table {spec.name!r} take {nbytes:,} bytes, and its "
                f"other tables take {self.used:,} of the {self.limit:,} of dps.memory: {REMEDY}"
            )

    def admit(self, table: ServerTable, ops: Iterable[tuple[Replica, Op]], going: Mapping[Replica, int]) -> Going:
        """Let an op through, which has a part for each shard; LimitError, if it must not be carried out.

        `going` says how many rows go from a shard anyway. Returns how many have to go, which is at least as many.
        """
        found = dict(going)
        needs = {replica: need_of(replica.shard, op) for replica, op in ops if creates_rows(replica.shard, op)}
        if not self.limit or not needs:
            return found
        for need in needs.values():
            need.shard.thrifty = False
        asked = self._asked(needs.values())
        full = {replica: self._full.intersection(replica.behind) for replica in needs} if self._full else {}
        if any(full.values()) or (self.used + asked > self.limit and self.measure() + asked > self.limit):
            for replica, need in needs.items():
                needs[replica] = need._replace(new=missing(need.shard, need.op))
                need.shard.thrifty = True
            creating = {replica: need for replica, need in needs.items() if need.new}
            asked = self._asked(creating.values())
            is_full = self.used + asked > self.limit
            for replica, need in creating.items():
                others = full.get(replica, frozenset())
                if is_full or others:
                    found[replica] = max(found.get(replica, 0), self._lacking(table, need, asked, others))
            asked = 0 if is_full else asked
        for need in needs.values():
            if need.summed:
                self._promised[need.shard] = need.op.clock, self._promise(need) + need.new
        self.used += asked
        return found

    def reserve(self, ops: Iterable[tuple[Replica, Op]]) -> None:
        """Give shards memory for ops that were let through, so that they cannot run out of it half-way."""
        for replica, op in ops:
            shard, count = replica.shard, len(op.values)
            if isinstance(shard, KeyedShard) and shard.thrifty and op.keys is not None:
                shard.reserve_exactly(0 if is_summed(shard, op) else missing(shard, op), count)
            else:
                shard.make_room(op, count)

    def _asked(self, needs: Iterable[Need]) -> int:
        return sum(need.growth(self._promise(need)) for need in needs)

    def _promise(self, need: Need) -> int:
        clock, rows = self._promised.get(need.shard, (need.op.clock, 0))
        return rows if clock == need.op.clock else 0

    def _lacking(self, table: ServerTable, need: Need, asked: int, full: Collection[int]) -> int:
        """How many rows have to go from a shard that must not grow; LimitError, if they cannot.

        `full` are the servers that have a copy of it and no room.
        """
        shard, life = need.shard, table.spec.life
        lacking = need.new - (0 if full else len(shard.rows) - shard.end + shard.index.free)
        evicts = life.max_bytes > 0 and life.evict != "refuse" and not life.spills and not need.summed
        others = len(shard) - (len(need.op.values) - need.new)
        if lacking <= 0 and not need.summed and not shard.index.growth(len(need.op.values)):
            return 0
        if evicts and lacking <= others:
            return lacking
        table.refused += 1
        if full:
            raise LimitError(
                f"server {min(full)} has a copy of shard {shard.number} of table {table.spec.name!r} and nearly as "
                f"many bytes as its dps.memory allows, and a push has {need.new} new rows: {REMEDY}"
            )
        raise LimitError(
            f"server {self._number}: its tables take {self.used:,} of the {self.limit:,} bytes of dps.memory, and "
            f"{need.new} new rows of table {table.spec.name!r} (shard {shard.number}) need {asked:,} more: {REMEDY}"
        )


REMEDY = "add servers (ps.scale), raise dps.memory, delete rows or tables, or let rows go (max_bytes=, expire=)"
Going = dict[Replica, int]


def need_of(shard: KeyedShard, op: Op) -> Need:
    """What an op needs if all of its keys are new; of one that is summed, they are counted, because others add up."""
    summed = is_summed(shard, op)
    return Need(shard, op, missing(shard, op) if summed else len(op.values), summed)
