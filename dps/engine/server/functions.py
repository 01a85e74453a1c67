"""Functions of users on a server: run on the rows of its shards, and their effects applied as ops.

Theory of operation
-------------------
A CALL names a function and rows of some shards that this server is the primary of. The part of the function runs on one
shard after the other, in a process of the server's own (`function_process.py`) or, if it is of dps itself, in a thread
(`function_thread.py`). So the endpoint goes on to serve other tables.
Meanwhile the shards are *held*: each request that could change them waits, unread, behind its connection. So a function
sees rows of one moment.

(A function of dps itself on few rows runs in the endpoint's thread.)

A function that reads is answered when it ends, and the hold with it. A function that changes rows works on copies. What
it has made is its *effect*: whole rows, state included. If several servers have shards of the call, each of them
answers, and keeps its hold and its effects until the client has all answers: then the client sends COMMIT to all, or
ABORT. So where a part fails, on whichever shard, all rows of all shards are as they were. A call of one server only
needs no COMMIT.

The effect is applied as an op with the stamp of the call (rule ROWS): it counts once, it travels to the backups as
these rows, and checkpoints and joiners see nothing but an op. So functions run on primaries only, and copies cannot
differ, whatever the function does.

What can happen, and what then:

* The connection breaks, or no COMMIT comes in time: the hold ends, its effects are dropped. The client calls again.
* A CALL is repeated after its effect was applied: the ledger says so. What the function returned on a shard is a part
  of the op, so the ledgers of all copies keep it (`MAX_KEPT_RESULT_BYTES`), and the repeat gets it again, also from the
  next primary. A longer result is made once more: the function runs on the rows as they are now, and its effect is
  dropped.
* A trainer is run again and calls what its earlier attempt has called (REPLAYED): that counts already on all shards on
  which it was to count. The new attempt may name others, for which the ledgers have no result; there the function runs,
  and its effect is dropped.
* Two calls that need COMMIT meet at a shard: the second one is refused (BusyError), because they could wait for each
  other at two servers. Its client gives back what it holds, and tries again a little later. All others wait.
* The controller changes a held shard (it closes the sums of a clock, another server takes over): the hold is
  *revoked*, its result is dropped, and the client is told to call again (BusyError).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from dps import config
from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.core.requests.forwards import Forwards
from dps.engine.functions.definition import Part, opened
from dps.engine.functions.rows import Effect, lent
from dps.engine.server.beside_thread import Outcome
from dps.engine.server.changes import Changes
from dps.engine.server.forgetting import Forgetting
from dps.engine.server.function_thread import Runner
from dps.engine.server.function_work import FunctionWork, Made, Repeated, failure
from dps.engine.server.late_parts import NamedPart, has_effect
from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import MAX_KEPT_RESULT_BYTES, MAX_MORE_BYTES, ServerTable
from dps.engine.state.beside import MadeBeside, is_large
from dps.engine.state.ops import NO_CLOCK, ROWS, Op, Selected
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, padded
from dps.engine.wire.messages import ALONE, PREPARES, READS, FunctionCall, encode_parts
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.errors import BusyError, DPSError, LimitError, ProtocolError

__all__ = ["FunctionCalls", "Hold"]

MAX_DIRECT_BYTES = 1 << 18  # of rows and arguments on which a function of dps itself runs in the endpoint's thread


BesideShards: TypeAlias = list[tuple[Replica, MadeBeside]]  # replicas, each with an op carried out beside its shard


class Beside(Protocol):
    """What carries out large effects: see :class:`dps.engine.server.large_ops.LargeOps`."""

    def run(
        self,
        hold: Hold,
        ops: list[tuple[Replica, Op]],
        done: Callable[[BesideShards], None],
    ) -> None: ...
    def clean(self, replicas: Iterable[Replica]) -> None: ...


class Owner(Protocol):
    """What calls of functions need of their server's role: see :class:`dps.engine.server.requests.ServerRole`."""

    endpoint: RoleEndpoint
    number: int
    tables: dict[int, ServerTable]
    changes: Changes
    forgetting: Forgetting
    memory: ServerMemory
    large: Beside

    @property
    def ops(self) -> Forwards: ...
    def leased(self, header: Header) -> ServerTable: ...
    def close_before(self, replica: Replica, clock: int) -> None: ...
    def throttle(self, connection: RoleConnection) -> bool: ...


class Target(NamedTuple):
    """A shard of a call: its replica, and the keys that it was asked for (None: a range of rows, or all)."""

    replica: Replica
    keys: np.ndarray | None


class Hold:
    """Shards that a function reads or changes, and the connections whose requests wait for it."""

    def __init__(self, header: Header, connection: RoleConnection | None, targets: list[Target], commits: bool):
        self.header, self._connection, self.targets = header, connection, targets
        self.commits = commits  # it ends with a COMMIT
        self.effects: list[Made[Replica]] = []
        self.waiting: list[RoleConnection] = []
        self.running, self.revoked = True, False
        self.made: BesideShards = []  # the effects, carried out beside the shards
        self._lent: list[tuple[Replica, weakref.ref[np.ndarray]]] = []
        for target in targets:
            target.replica.hold = self

    def lend(self, call: FunctionCall) -> list[Selected]:
        """The rows of each shard. Those that need no copy are views of the shard's memory, which cannot be written."""
        selections = []
        for replica, keys in self.targets:
            selection = replica.shard.select(keys, call.start, call.stop)
            if selection.memory is not None and len(selection.memory):
                rows, kept = lent(selection.memory, writable=False)
                self._lent.append((replica, kept))
                selection = selection.over(rows)
            selections.append(selection)
        return selections

    @property
    def connection(self) -> RoleConnection:
        """Of the request for which it holds the shards."""
        assert self._connection is not None  # as at the end of a run, which is no request
        return self._connection

    @property
    def stamp(self) -> tuple[int, ...]:
        """By which a COMMIT finds it."""
        return stamp_of(self.header)

    def belongs_beside(self, header: Header) -> bool:
        """Whether it is of the same call, for other shards."""
        mine = self.header
        apart = mine.shard + mine.shards <= header.shard or header.shard + header.shards <= mine.shard
        return apart and stamp_of(mine)[:-2] == stamp_of(header)[:-2]

    def wait(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self.waiting.append(connection)
        connection.postpone(header, body)

    def end(self) -> None:
        for replica, _ in self.targets:
            if replica.hold is self:
                replica.hold = None
        self.effects, self.made = [], []

    def take_back(self) -> None:
        """Have shards go on with copies of their rows where the function still has views, or has kept some."""
        lent, self._lent = self._lent, []
        for replica, rows in lent:
            if rows() is not None:
                replica.shard.detach()
        for replica, _ in self.targets:
            if replica.shard.twin is not None:
                replica.shard.leave_twin()


class FunctionCalls:
    """The calls of functions on one server: see the module's docstring."""

    def __init__(self, owner: Owner, runner: Runner):
        self._owner, self._runner = owner, runner
        self._functions: dict[str, tuple[Part, bool]] = {}
        self.codes: dict[str, bytes] = {}  # of functions of users
        self.holds: set[Hold] = set()
        self._prepared: dict[tuple[int, ...], Hold] = {}
        self._seconds = config.seconds("function")

    def add(self, identity: str, code: bytes) -> None:
        """Take a function; DPSError if it cannot be opened here."""
        if identity not in self._functions:
            self._functions[identity], self.codes[identity] = opened(identity, code), code

    def close(self) -> None:
        self._prepared.clear()
        self.holds.clear()
        self._runner.close()

    # -- frames

    def call(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        table = self._owner.leased(header)
        targets, text = self._targets(table, header, body)
        call = FunctionCall.decode(text)
        part, changes = self._function(call.function)
        if changes != (call.mode != READS):
            raise ProtocolError(f"a call of a function that {'changes' if changes else 'reads'} rows, as {call.mode}")
        if changes:
            self._end_older(header)
        holds = [target.replica.hold for target in targets if target.replica.hold is not None]
        if holds:
            if call.mode == PREPARES and any(hold.commits for hold in holds):
                raise BusyError(f"table {table.spec.name!r}: another call of a function changes these shards just now")
            holds[0].wait(connection, header, body)
            return
        named = [NamedPart(*target, call.start, call.stop) for target in targets]
        repeated = self._repeated(table, header, named, changes, getattr(part, "__qualname__", call.function))
        hold = Hold(header, connection, targets, call.mode == PREPARES)
        self.holds.add(hold)
        try:
            replicas, code = [target.replica for target in targets], self.codes[call.function]
            work = FunctionWork(part, call, replicas, hold.lend(call), changes, repeated, code)
            known = ":" in call.function  # of dps itself: it does not take long on few rows
            direct = known and work.nbytes + len(call.arguments) <= MAX_DIRECT_BYTES
        except Exception as error:  # arguments that cannot be read, of which the size was to be known
            self._end(hold)
            raise failure(error, call.function) from None
        runner = DIRECT if direct else self._runner
        runner.run(work, self._seconds, lambda outcome: self._ended(hold, call.mode, work, outcome))

    def commit(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """The client has the answers of all servers: apply the effects."""
        table = self._owner.leased(header)
        _check_shards(table, header)
        hold = self._prepared.pop(stamp_of(header), None)
        if hold is None:
            replicas = [table.replica(n, primary=True) for n in range(header.shard, header.shard + header.shards)]
            if all(_has(replica, header) for replica in replicas):
                self._answer_when_confirmed(table, connection, Header(frames.OK, request=header.request), replicas)
                return
            raise BusyError(f"table {table.spec.name!r}: nothing is prepared, or not any more; call the function again")
        try:
            self._apply(connection, header, hold, Header(frames.OK, request=header.request), b"")
        finally:
            self._end(hold)

    def abort(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """The call has failed on another server, or was given up: drop the effects."""
        stamp = stamp_of(header)
        hold = self._prepared.pop(stamp, None)
        if hold is not None:
            self._end(hold)
        for running in [each for each in self.holds if each.running and each.stamp == stamp]:
            running.revoked = True  # its function goes on, and what that makes is dropped
        connection.reply(Header(frames.OK, request=header.request))

    # -- what the role tells

    def postpone(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview) -> bool:
        """Whether a pull or push has to wait for a function; then it is handled again when that has ended."""
        closes = table.spec.aggregate is not None
        reads = header.kind in (frames.PULL, frames.SCAN)
        if reads and not closes:
            return False
        for replica in table.named(header, body):
            hold = replica.hold
            if hold is not None and (not reads or replica.shard.would_close(header.clock)):
                hold.wait(connection, header, body)
                return True
        return False

    def revoke(self, replica: Replica) -> None:
        """The replica, which a function holds, is about to change, or to go."""
        hold: Any = replica.hold
        hold.revoked = True
        stamp = hold.stamp
        if self._prepared.get(stamp) is hold:
            del self._prepared[stamp]
        hold.take_back()
        self._end(hold)

    def release(self, hold: Hold) -> None:
        """End a hold of a large op: see `large_ops.py`."""
        self._end(hold)

    def drop_lost(self) -> None:
        """Drop what was prepared over connections that have ended, because no COMMIT will come over them."""
        for hold in [hold for hold in self._prepared.values() if hold.connection.transport.is_closing()]:
            self._drop(hold)

    # -- inside

    def _function(self, identity: str) -> tuple[Part, bool]:
        if identity not in self._functions:
            self.add(identity, b"")  # a function of dps itself, or none
        return self._functions[identity]

    def _targets(self, table: ServerTable, header: Header, body: memoryview) -> tuple[list[Target], memoryview]:
        """The shards of a call with the keys for each, and the text behind them."""
        if not header.flags & frames.RANGE:
            request = table.cut(header, body)
            targets = [Target(p.replica, None if p.keys is None else p.keys.copy()) for p in request.parts]
            return targets, body[request.used :]  # copies, because the body is gone when the function runs
        _check_shards(table, header)
        shards = range(header.shard, header.shard + header.shards)
        return [Target(table.replica(number, primary=True), None) for number in shards], body

    def _repeated(
        self, table: ServerTable, header: Header, named: list[NamedPart], changes: bool, function: str
    ) -> Repeated:
        """The shards on which the effect of the call counts already, and what it returned there."""
        for each in named:
            if changes and header.trainer:
                each.replica.shard.ledger.check(header.trainer, header.attempt)
        if table.spec.aggregate is not None and header.clock != NO_CLOCK:
            for each in named:
                self._owner.close_before(each.replica, header.clock)
        known = header.flags & frames.REPLAYED  # to its client, which has the acknowledgement of an earlier attempt
        counts = [each.replica for each in named if changes and (known or has_effect(table, header, each, function))]
        return {replica.number: _kept_result(replica, header) for replica in counts}

    def _end_older(self, header: Header) -> None:
        """The client calls: what it has prepared before will never be committed, but for other shards of this call."""
        for hold in [hold for hold in self._prepared.values() if hold.header.trainer == header.trainer]:
            if not hold.belongs_beside(header):
                self._drop(hold)

    def _drop(self, hold: Hold) -> None:
        if self._prepared.get(hold.stamp) is hold:
            del self._prepared[hold.stamp]
            self._end(hold)

    def _end(self, hold: Hold) -> None:
        self.holds.discard(hold)
        hold.end()
        waiting, hold.waiting = hold.waiting, []
        for connection in waiting:  # not at once, because this may be in the middle of a new placement
            self._owner.endpoint.later(0, connection.resume)

    def _ended(self, hold: Hold, mode: int, work: FunctionWork, outcome: Outcome) -> None:
        """A function has ended, in the endpoint's thread."""
        error = None if outcome.error is None else failure(outcome.error, work.name)
        work.release()
        hold.take_back()
        effects = [(made.replica, made.effect) for made in work.effects if made.effect is not None]
        gone = sum(len(made.deleted) for _, made in effects if made.deleted is not None)
        if error is None and is_large(sum(len(made.rows) for _, made in effects), gone) and not hold.revoked:
            ops = [(replica, op_of(hold.header, made, None, replica)) for replica, made in effects]
            self._owner.large.run(hold, ops, lambda made: self._settle(hold, mode, work, outcome, None, made))
        else:
            self._settle(hold, mode, work, outcome, error, [])

    def _settle(
        self,
        hold: Hold,
        mode: int,
        work: FunctionWork,
        outcome: Outcome,
        error: DPSError | None,
        made: BesideShards,
    ) -> None:
        """The effects of a function that has ended are carried out beside the shards, as far as that is worth it."""
        hold.running, hold.made = False, made
        try:
            if self._conclude(hold, mode, work, outcome, error):
                return
        except DPSError as why:
            hold.connection.reply_error(Header(frames.CALL, request=hold.header.request), why)
        except Exception as why:
            text = f"out of memory: {why}" if isinstance(why, MemoryError) else f"{type(why).__name__}: {why}"
            hold.connection.reply_error(Header(frames.CALL, request=hold.header.request), DPSError(text))
        self._end(hold)

    def _conclude(self, hold: Hold, mode: int, work: FunctionWork, outcome: Outcome, error: DPSError | None) -> bool:
        """Answer a call whose function has ended; whether its hold goes on until a COMMIT."""
        connection = hold.connection
        if mode == PREPARES and connection.transport.is_closing():
            raise BusyError("the connection over which COMMIT would come has ended")
        if hold.revoked:
            raise BusyError("the call was given up, or the controller changed the rows meanwhile; call it again")
        if error is not None:
            raise error
        answer, reply = encode_parts(outcome.value), Header(frames.OK, request=hold.header.request)
        if len(answer) > self._owner.endpoint.frame_limit:
            raise LimitError(
                f"function {work.name!r}: what it returned for {len(hold.targets)} shards of one server has "
                f"{len(answer)} bytes, and {self._owner.endpoint.frame_limit} at most are taken (dps.limits.frame): "
                "let it return less"
            )
        if mode == PREPARES:
            self._prepare(hold, work.effects)
            connection.reply(reply, answer)
            return True
        hold.effects = work.effects
        if mode == ALONE:
            self._apply(connection, hold.header, hold, reply, answer)
        else:
            connection.reply(reply, answer)
        return False

    def _prepare(self, hold: Hold, effects: list[Made[Replica]]) -> None:
        hold.effects = effects
        self._prepared[hold.stamp] = hold
        self._owner.endpoint.later(2 * self._seconds, self._drop, hold)

    def _apply(self, connection: RoleConnection, header: Header, hold: Hold, reply: Header, answer: bytes) -> None:
        """Apply the effects of a call to all its shards, and answer when their copies have them."""
        table = self._owner.leased(header)
        nothing = Effect(np.empty(0, np.int64), 0, np.empty((0, table.spec.dim + table.spec.slots), table.dtype))
        effects = [
            (table.replica(made.replica.number, primary=True), made.effect or nothing, made.result)
            for made in hold.effects
        ]
        beside, hold.made = dict(hold.made), []
        for replica, made, _ in effects:  # all that can fail comes before the first change
            if header.trainer:
                replica.shard.ledger.check(header.trainer, header.attempt)
            gone = 0 if made.deleted is None else len(made.deleted)
            table.check_copied(len(made.rows), "a function changed", 8 * gone + MAX_MORE_BYTES)
            if replica in beside or self._owner.memory.limit:  # its twin has the room; or it gets room below
                continue
            replica.shard.reserve(len(made.rows))
            if made.deleted is not None:
                replica.shard.reserve_deletion(gone)
        owed = OwedAnswer()
        kept: dict[bytes, np.ndarray] = {}  # results, which are often the same on all shards
        ops = []
        for replica, made, result in effects:
            keeps = header.trainer and len(result) <= MAX_KEPT_RESULT_BYTES
            if keeps and result not in kept:
                kept[result] = as_rows(result, table)
            ops.append((replica, op_of(header, made, kept[result] if keeps else None, replica)))
        self._owner.forgetting.make_room(table, ops)
        try:
            for replica, _ in ops:
                replica.shard.made_beside = beside.get(replica)
            self._owner.changes.effects(table, ops, owed)
        finally:
            self._owner.large.clean(replica for replica, _ in ops)
        changed = {replica.number for replica, _, _ in effects}
        before = [target.replica for target in hold.targets if target.replica.number not in changed]
        self._answer_when_confirmed(table, connection, reply, before, answer, owed)
        self._owner.throttle(connection)

    def _answer_when_confirmed(
        self,
        table: ServerTable,
        connection: RoleConnection,
        reply: Header,
        before: list[Replica],
        answer: bytes = b"",
        owed: OwedAnswer | None = None,
    ) -> None:
        """Answer when the backups have what `owed` waits for, and all that these replicas have passed on before."""
        owed = owed or OwedAnswer()
        for replica in before:  # their effect counts already, but perhaps not on the backups
            self._owner.ops.follow(replica, owed)

        def respond() -> None:
            if owed.error is not None:
                connection.reply_error(reply, owed.error)
            else:
                connection.reply(reply, answer)

        if table.waits:
            owed.then(respond)
        else:
            OwedAnswer().then(respond)


class Direct:
    """Runs work at once, in the endpoint's thread, because the way to another thread and back would take longer."""

    def run(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]) -> None:
        try:
            outcome = Outcome(work(), None)
        except Exception as error:
            outcome = Outcome(None, error)
        done(outcome)


DIRECT = Direct()


def as_rows(answer: bytes, table: ServerTable) -> np.ndarray:
    """Bytes as values of a table, which is what a ledger keeps."""
    whole = len(answer).to_bytes(8, "little") + answer
    return np.frombuffer(whole.ljust(padded(len(whole)), b"\0"), table.dtype).reshape(-1, 1)


def of_rows(kept: np.ndarray) -> bytes:
    whole = kept.tobytes()
    return whole[8 : 8 + int.from_bytes(whole[:8], "little")]


def stamp_of(header: Header) -> tuple[int, ...]:
    """What a CALL and its COMMIT have in common."""
    return header.table, header.trainer, header.attempt, header.clock, header.number, header.shard, header.shards


def _check_shards(table: ServerTable, header: Header) -> None:
    """Refuse a call of shards that are not there, and of none, because "all of them have the effect" would be true."""
    if header.shards < 1 or header.shard + header.shards > table.spec.shards:
        raise ProtocolError(
            f"a call of {header.shards} shards from shard {header.shard}: table {table.spec.name!r} has "
            f"{table.spec.shards}, and a call is of one at least"
        )


def _has(replica: Replica, header: Header) -> bool:
    """Whether the effect of the call counts on this shard already."""
    stamp = header.trainer, header.attempt, header.clock, header.number
    return bool(header.trainer) and replica.shard.ledger.seen(*stamp)


def _kept_result(replica: Replica, header: Header) -> bytes | None:
    kept = replica.shard.ledger.answer(header.trainer, header.clock, header.number)
    return None if kept is None else of_rows(kept)


def op_of(header: Header, made: Effect, result: np.ndarray | None, replica: Replica) -> Op:
    """The op that applies an effect to a replica, and has its ledger keep a result."""
    stamp = header.trainer, header.attempt, header.number
    op = Op(ROWS, made.keys, made.start, made.rows, header.clock, header.parties, *stamp)
    if replica.successor is not None:  # a view, because the shard would take over memory that a forward reads
        op = op._replace(values=op.values.view())
    return op._replace(deleted=made.deleted, result=result)
