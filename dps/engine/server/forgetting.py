"""Rows that go by themselves: a primary decides which, and its backups follow.

Theory of operation
-------------------
The rules are in `state/forgetting.py`. Here is what asks them, in the thread of the server's loop: a push that would
exceed the budget of its shard (`make_way`), and the timer of the heartbeat (`tick`), which gives each shard a number of
short turns of the loop. Between two turns the loop serves others. What the rules choose becomes an op of the primary,
DELETE, with the clock that the shard is at; the op goes down the chain before the push does for which it made room.

Only a primary that is sure to be the only one decides (`leads`). A shard that a function holds is left alone.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.server.changes import Changes
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS
from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.forgetting import Coldest, Expiring, must_go, new_rows
from dps.engine.state.life import ExpireUnused, RowLife
from dps.engine.state.op_views import AgeOp, DeleteOp
from dps.engine.state.ops import ADD, DELETE, EVICTED, EXPIRED, NO_CLOCK, PUSH, Op
from dps.engine.state.partition import distinct
from dps.engine.state.shard import KeyedShard
from dps.engine.telemetry.snapshot import NEARLY_FULL
from dps.engine.wire.protocols import RoleEndpoint
from dps.errors import FunctionError, LimitError, SpillError

__all__ = ["Forgetting"]

logger = logging.getLogger(__name__)

TURN_SLOTS = 1 << 13  # of the index that one turn looks at: if all their rows go, it takes 3 ms
TURN_ENTRIES = 1 << 11  # of a file that one turn looks at
MAX_FILE_TURNS = 16  # of a heartbeat: where rows expire faster than a file is read, they go late
MARKS_PER_EXPIRY = 64  # AGE ops in the time after which a row expires
ROUNDS_PER_EXPIRY = 16  # of the hand over all rows, in that time
ROUND_SECONDS = 4.0  # of a round where rows expire by clocks
MOMENTS_PER_ROUND = 64  # moments in which as many rows are used as there are
MAX_MOMENTS_PER_SECOND = 64  # so that 24 bits last for days
MAX_OPS_OF_MOMENT = (1 << 16) - 1  # as the header of a frame has room for
AGE_SECONDS = 1.0  # between two AGE ops of a table that evicts


class ForgettingOwner(Protocol):
    """The parts of a server's role that this needs: see :class:`dps.engine.server.requests.ServerRole`."""

    endpoint: RoleEndpoint
    tables: dict[int, ServerTable]
    epoch: int
    changes: Changes

    def leads(self, replica: Replica) -> bool: ...


class Chooser(NamedTuple):
    """What is known of the rows of a replica, while it is the primary."""

    expiring: Expiring
    coldest: Coldest | None


class Way(NamedTuple):
    """A shard in which rows have to go before an op."""

    table: ServerTable
    replica: Replica
    rows: int
    spared: np.ndarray  # the keys of the op, distinct


class Forgetting:
    """What lets rows go on one server: see the module's docstring. `wall` gives seconds since 1970."""

    def __init__(self, owner: ForgettingOwner, wall: Callable[[], float], memory: ServerMemory):
        self._owner, self._wall, self._memory = owner, wall, memory
        self._choosers: dict[Replica, Chooser] = {}
        self._turns: collections.deque[Callable[[], None]] = collections.deque()

    # -- budgets

    def ways(self, table: ServerTable, ops: Iterable[tuple[Replica, Op]]) -> list[Way]:
        """In which shards rows have to go before these ops; LimitError, if the ops must not be carried out."""
        found: list[Way] = []
        if not table.spec.most_rows:
            return found
        for replica, op in ops:
            shard, keys = replica.shard, op.keys
            if not isinstance(shard, KeyedShard) or keys is None or op.rule == DELETE:
                continue
            if shard.spill is not None:
                self._bring(table, shard, op)
                continue
            count = must_go(shard, new_rows(shard, keys, op.unborn))
            if count:
                spared = distinct(keys)
                self._check(table, shard, len(spared))
                found.append(Way(table, replica, count, spared))
        return found

    def _bring(self, table: ServerTable, shard: KeyedShard, op: Op) -> None:
        """Let the rows of an op be in memory before anything changes, so that what goes wrong refuses the op."""
        assert op.keys is not None
        assert shard.spill is not None
        is_summed = op.rule == PUSH and table.spec.aggregate is not None and op.clock != NO_CLOCK
        if is_summed or len(op.keys) > shard.most_rows // 2:  # such an op is carried out in parts
            return
        try:
            shard.spill.bring(op.keys, creates=True, strict=True)
        except LimitError:
            table.refused += 1
            raise

    def make_way(self, ways: Iterable[Way]) -> None:
        """Let the coldest rows go."""
        for table, replica, rows, spared in ways:
            chooser = self._chooser_of(replica)
            assert chooser.coldest is not None
            keys = chooser.coldest.take(replica.shard, rows, spared)
            self._forget(table, replica, keys, EVICTED)

    def _check(self, table: ServerTable, shard: KeyedShard, keys: int) -> None:
        """Refuse an op on so many keys, where none of the other rows may go, or where they do not suffice."""
        spec = table.spec
        where = (
            f"table {spec.name!r}: shard {shard.number} has {len(shard)} of the {shard.most_rows} rows for which its "
        )
        where += f"part of max_bytes={spec.life.max_bytes} is room"
        if spec.life.evict == "refuse":
            table.refused += 1
            raise LimitError(f"{where}, and evict='refuse': delete rows, or make the table with a larger budget")
        if keys > shard.most_rows:
            table.refused += 1
            raise LimitError(f"{where}, and the op has {keys} keys of it: push fewer keys at once")

    def make_room(self, table: ServerTable, ops: Sequence[tuple[Replica, Op]]) -> None:
        """Let rows go before these ops, as budgets demand; LimitError, if the ops must not be carried out."""
        ways = self.ways(table, ops)
        if self._memory.limit:
            going = self._memory.admit(table, ops, {way.replica: way.rows for way in ways})
            keys = {replica: op.keys for replica, op in ops if op.keys is not None}
            ways = [Way(table, replica, rows, distinct(keys[replica])) for replica, rows in going.items() if rows > 0]
        self.make_way(ways)
        if self._memory.limit:
            self._memory.reserve(ops)

    # -- time

    def tick(self) -> None:
        """Begin moments that are due, and look at more rows. To be called with each heartbeat."""
        self._memory.tick()
        served = [
            (table, replica)
            for table in self._owner.tables.values()
            if table.spec.life.asks
            for replica in table.replicas.values()
            if replica.serves and not replica.joining
        ]
        there = {replica for _, replica in served}
        self._choosers = {replica: chooser for replica, chooser in self._choosers.items() if replica in there}
        if self._turns:  # the last tick's turns are not over
            return
        now = int(1000 * self._wall())
        for table, replica in served:
            shard = replica.shard
            if self._may_decide(replica):
                if table.spec.life.has_records and age_is_due(shard, table.spec.life, now):
                    op = AgeOp(now, shard.clock, ops_of_moment(shard, table.spec.life, now)).op()
                    shard.uses = 0
                    self._owner.changes.control(table, self._owner.epoch, [replica], op, OwedAnswer())
                self._plan(table, replica, now)
        if self._turns:
            self._owner.endpoint.later(0, self._next)

    def _plan(self, table: ServerTable, replica: Replica, now: int) -> None:
        """The turns of a shard until the next tick."""
        shard, life = replica.shard, table.spec.life
        if life.expire and shard.ages.marks:
            slots = sum(map(len, shard.index.tables)) * HEARTBEAT_SECONDS / round_seconds(life)
            for _ in range(int(slots // TURN_SLOTS) + 1):
                self._turns.append(lambda: self._expire(table, replica, now))
            if shard.spill is not None:
                entries = shard.spill.entries * HEARTBEAT_SECONDS / round_seconds(life)
                for _ in range(min(int(entries // TURN_ENTRIES) + 1, MAX_FILE_TURNS)):
                    self._turns.append(lambda: self._expire_spilled(table, replica, now))
        if not shard.most_rows or life.spills or len(shard) <= NEARLY_FULL * shard.most_rows:
            return
        if not table.warned:
            table.warned = True
            logger.warning(
                "table %r: shard %d has %s of the %s rows for which its part of max_bytes=%d is room; beyond it, %s",
                *(table.spec.name, shard.number, f"{len(shard):,}", f"{shard.most_rows:,}", life.max_bytes),
                "pushes of new keys are refused" if life.evict == "refuse" else f"rows go, by evict={life.evict!r}",
            )
        if life.evicts:
            self._turns.append(lambda: self._prepare(table, replica))

    def _next(self) -> None:
        if self._turns:
            self._turns.popleft()()
            self._owner.endpoint.later(0, self._next)

    def _expire(self, table: ServerTable, replica: Replica, now: int) -> None:
        if self._may_decide(replica):
            found = self._chooser_of(replica).expiring.piece(replica.shard, now, TURN_SLOTS)
            self._forget(table, replica, found.gone, EXPIRED)
            self._use(table, replica, found.pulled)

    def _expire_spilled(self, table: ServerTable, replica: Replica, now: int) -> None:
        if self._may_decide(replica):
            with contextlib.suppress(SpillError):  # what asks for these rows is told
                found = self._chooser_of(replica).expiring.spilled_piece(replica.shard, now, TURN_ENTRIES)
                self._forget(table, replica, found, EXPIRED)

    def _prepare(self, table: ServerTable, replica: Replica) -> None:
        try:
            self._look_for_cold(table, replica)
        except FunctionError as error:  # of the user: pushes of new keys are told, too
            if not table.rank_failed:
                table.rank_failed = True
                logger.warning("table %r: %s", table.spec.name, error)

    def _look_for_cold(self, table: ServerTable, replica: Replica) -> None:
        coldest, shard = self._chooser_of(replica).coldest, replica.shard
        if coldest is not None and self._may_decide(replica):
            coldest.prepare(shard, TURN_SLOTS)
            rows = must_go(shard, 0)  # because the end of a clock creates rows that no push has named
            if rows:
                keys = coldest.take(shard, min(rows, TURN_SLOTS), np.empty(0, np.int64))
                self._forget(table, replica, keys, EVICTED)

    # -- inside

    def _may_decide(self, replica: Replica) -> bool:
        """Whether this server may change the shard now, and no function or thread is at it."""
        table = self._owner.tables.get(replica.spec.id)
        is_there = table is not None and table.replicas.get(replica.number) is replica and replica.serves
        return is_there and replica.hold is None and replica.shard.twin is None and self._owner.leads(replica)

    def _forget(self, table: ServerTable, replica: Replica, keys: np.ndarray, why: int) -> None:
        if len(keys):
            op = DeleteOp(keys, 0, len(keys), replica.shard.clock, 1, why=why).op()
            self._owner.changes.control(table, self._owner.epoch, [replica], op, OwedAnswer())

    def _use(self, table: ServerTable, replica: Replica, keys: np.ndarray) -> None:
        """Let the rows of keys that were pulled be used now, on all copies: zeros are added to them."""
        if len(keys):
            values = np.zeros((len(keys), table.spec.dim), table.dtype)
            op = Op(ADD, keys, 0, values, replica.shard.clock, 1)
            self._owner.changes.control(table, self._owner.epoch, [replica], op, OwedAnswer())

    def _chooser_of(self, replica: Replica) -> Chooser:
        chooser = self._choosers.get(replica)
        if chooser is None:
            life = replica.spec.life
            chooser = self._choosers[replica] = Chooser(Expiring(life.expire), Coldest(life) if life.evicts else None)
        return chooser


def round_seconds(life: RowLife) -> float:
    """The time in which the hand looks at all rows once."""
    times = [rule.seconds / ROUNDS_PER_EXPIRY for rule in life.expire if rule.seconds is not None]
    return max(min(times, default=ROUND_SECONDS), HEARTBEAT_SECONDS)


def age_is_due(shard: KeyedShard, life: RowLife, now: int) -> bool:
    """Whether a new moment has to begin, `now` in milliseconds; none does while the shard is not changed."""
    if shard.version == shard.base_version and not life.counts_pulls:
        return False
    if not shard.ages.marks:
        return True
    last, passed = shard.ages.marks[-1], now - shard.ages.marks[-1].time
    for rule in life.expire:
        if rule.seconds is not None and passed >= 1000 * rule.seconds / MARKS_PER_EXPIRY:
            return True
        clocks = rule.clocks if isinstance(rule, ExpireUnused) else 0
        if clocks and shard.clock >= last.clock + max(1, clocks // MARKS_PER_EXPIRY):
            return True
    return life.max_bytes > 0 and passed >= 1000 * AGE_SECONDS


def ops_of_moment(shard: KeyedShard, life: RowLife, now: int) -> int:
    """How many ops a moment lasts from now on, if the shard is used as it was since the last AGE."""
    if not life.max_bytes:
        return 0
    ops = max(1, shard.version - shard.base_version)
    uses, rows = max(1.0, shard.uses / ops), shard.resident / MOMENTS_PER_ROUND
    seconds = (now - shard.ages.marks[-1].time) / 1000 if shard.ages.marks else AGE_SECONDS
    least = ops / max(seconds, 0.001) / MAX_MOMENTS_PER_SECOND
    return int(min(max(1.0, rows / uses, least), MAX_OPS_OF_MOMENT))
