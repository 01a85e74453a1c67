"""FunctionCaller: a client's calls of functions, which run on the servers.

A call goes to all servers that have rows of it at once. Where one server has all of them, or where the function only
reads, its answer ends the call. Else each server answers what its parts returned, and keeps their effects; when all
have answered, the client sends COMMIT to all, or, if a part has failed, ABORT (`server/functions.py`).

What went wrong with a server is tried again, from the route on. All requests of a call carry the same stamp, so where
its effect counts already it does not count again.

Arguments that servers remember (`wire/remembered.py`) travel as hashes once a call with their content has succeeded. A
server that does not know a hash refuses; then the call is made again, under the same stamp, with the content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import struct
import time
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from dps.engine.client.inputs import as_keys
from dps.engine.client.origin import Origin
from dps.engine.client.reads import readable
from dps.engine.client.requests import TableRoute
from dps.engine.client.session import BACK_OFF_SECONDS, RETRIED, ClientSession
from dps.engine.client.ticket import Pending, SentCall
from dps.engine.client.verbs import Keys
from dps.engine.core.requests.call import LAST_NUMBER
from dps.engine.functions.definition import Function
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import distinct, group
from dps.engine.wire import frames
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import ALONE, PREPARES, READS, FunctionCall, decode_parts
from dps.engine.wire.remembered import Remembered
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import (
    BusyError,
    DataLostError,
    DPSError,
    InputError,
    LimitError,
    StoppedError,
    UnknownFunctionError,
    UnknownTableError,
)

__all__ = ["FunctionCaller"]

SEEDED = struct.Struct("<4q")  # of what seeds are made
GRACE_SECONDS = 10.0  # for the answers, beside the time that the function may take
MAX_KNOWN = 4096  # hashes of which the client expects that servers know them; then it forgets them all


@dataclasses.dataclass
class NamedRows:
    """The rows of a call, cut by shard."""

    keys: np.ndarray | None  # int64[m], distinct, grouped by shard; None: a range
    starts: np.ndarray | None  # where each shard's keys begin
    start: int  # of a range of rows
    stop: int
    shards: list[int]  # that have a part of it


class RunOfShards(NamedTuple):
    """Shards of one server that are called together."""

    server: int
    shards: list[int]


class SentRun(NamedTuple):
    run: RunOfShards
    request: Request


@dataclasses.dataclass
class Running:
    """A call on its way."""

    function: Function
    route: TableRoute
    named: NamedRows
    message: FunctionCall
    stamp: Header
    asked: set[int]  # shards whose effect does not count yet, as far as the client knows, and is not prepared
    prepared: list[RunOfShards] = dataclasses.field(default_factory=list)  # their effects wait for COMMIT, or may
    values: dict[int, object] = dataclasses.field(default_factory=dict)  # results of the function, by shard
    shortened: bool = False  # the message has hashes in place of content
    sent: list[SentRun] = dataclasses.field(default_factory=list)  # requests on their way, before answers are taken
    error: DPSError | None = None  # the error that ended the call

    def reshard(self, route: TableRoute) -> None:
        """Go on where the table is cut into other shards by now. A result that is here stands for all parts of its
        shard, in the place of the first one. Where shards were merged, one that only reads begins anew."""
        named, old, new = self.named, self.route.spec.shard_map, route.spec.shard_map
        keyed_range = None if new.rows == 0 else slice(named.start, named.stop)
        self.named = cut(route.spec, keyed_range if named.keys is None else named.keys)
        if not new.refines(old):
            self._begin_anew(len(named.shards))
            return
        first = {n: new.within(old.edges[n], old.edges[n + 1])[0] for n in named.shards}
        self.values = {first[n]: value for n, value in self.values.items() if n not in self.asked}
        here = {first[n] for n in named.shards if n not in self.asked}
        self.asked = {n for n in self.named.shards if old.within(*new.edges[n : n + 2])[0] in self.asked}
        self.named.shards = sorted(self.asked | here)

    def _begin_anew(self, shards: int) -> None:
        done = shards - len(self.asked)
        if done and self.function.changes:
            raise StoppedError(
                f"function {self.function.name!r} has changed rows in {done} of {shards} shards of table "
                f"{self.route.spec.name!r}, which was merged meanwhile: look at the rows before you call it again"
            )
        self.values, self.asked = {}, set(self.named.shards)


class SentFunction(SentCall):
    """A call of a function that reads, on its way."""

    __slots__ = ("arguments", "running")

    def __init__(self, sender: FunctionCaller, running: Running, arguments: Mapping[str, object]):
        super().__init__(sender, "pull", [request for _, request in running.sent])
        self.running, self.arguments = running, arguments


class FunctionCaller:
    """Calls functions in the name of one client, whose session's lock is held during a call."""

    def __init__(self, session: ClientSession):
        self._session, self.now = session, session.now
        self._reads = 0  # calls that read, so far
        self._known: set[bytes] = set()  # keys of values that servers remember

    def call(
        self,
        function: Function,
        table: str,
        keys: Keys,
        arguments: Mapping[str, object],
        rehearses: bool = False,
        replays: bool = False,
    ) -> object:
        """Run a function on rows of a table; its merged result. See :meth:`dps.Client.call`.

        With `rehearses`, what it changes is dropped. With `replays`, an earlier attempt has made the call: servers give
        it the answer that they keep, or drop what it changes.
        """
        running = self._begin(function, table, keys, arguments, replays)
        self._carry_out(running, arguments, rehearses and function.changes, self._deadline(None))
        return self._merged(running, arguments)

    def send(self, function: Function, table: str, keys: Keys, arguments: Mapping[str, object]) -> Pending[object]:
        running = self._begin(function, table, keys, arguments, replays=False)
        # A server that is not reached is asked again when the result is wanted.
        with contextlib.suppress(DataLostError, *RETRIED):
            message = msgspec.structs.replace(running.message, mode=READS)
            for run in self._runs(running):
                running.sent.append(SentRun(run, self._send(running, message, run)))
        sent = SentFunction(self, running, arguments)
        return Pending((sent,), lambda: self._merged(running, arguments))

    # -- what a `Pending` asks of the sender of its calls

    def poll(self, call: SentCall) -> None:
        self._session.poll(call)

    def result(self, call: SentCall, timeout: float | None) -> None:
        assert isinstance(call, SentFunction)
        session, running = self._session, call.running
        with session.lock:
            if running.error is not None:
                raise running.error
            session.meter.begin(session.now())
            try:
                self._carry_out(running, call.arguments, False, self._deadline(timeout))
            except DPSError as error:
                running.error = error
                raise
            finally:
                session.meter.lap(call.verb, session.now())

    # -- inside

    def _deadline(self, timeout: float | None) -> float:
        session = self._session
        return session.now() + (session.patience + GRACE_SECONDS if timeout is None else timeout)

    def _merged(self, running: Running, arguments: Mapping[str, object]) -> object:
        parts = [running.values[shard] for shard in running.named.shards]
        return running.function.merged(parts, arguments)

    def _begin(
        self, function: Function, table: str, keys: Keys, arguments: Mapping[str, object], replays: bool
    ) -> Running:
        """A call of which nothing is sent yet."""
        session = self._session
        if function.changes:  # because a push that waits for another client's function would keep COMMIT from arriving
            session.wait()
        encoded = self._encoded(function, arguments, self._known)
        route = readable(session, table)
        function.check(route.spec)
        named = cut(route.spec, keys)
        origin = session.acting
        if function.changes:
            if origin.number >= LAST_NUMBER:
                raise InputError(f"more than {LAST_NUMBER} pushes by one client without a tick: make a new client")
            number, origin.number = origin.number, origin.number + 1
        else:
            number = 0
        stamp = Header(
            frames.CALL,
            frames.REPLAYED if replays and function.changes else 0,
            trainer=origin.id,
            attempt=origin.attempt,
            number=number,
            clock=origin.clock,
            parties=origin.parties,
        )
        seed = self._seed(origin, number if function.changes else -1)
        message = FunctionCall(function.id, seed, time.time(), named.start, named.stop, encoded, READS)
        shortened = any(type(each) is Remembered and each.key in self._known for each in arguments.values())
        return Running(function, route, named, message, stamp, set(named.shards), shortened=shortened)

    @staticmethod
    def _encoded(function: Function, arguments: Mapping[str, object], known: Container[bytes]) -> bytes:
        return encode_values(dict(arguments), f"the arguments of function {function.name!r}", known)

    def _note(self, arguments: Mapping[str, object]) -> None:
        """The call has succeeded: its servers know all that was in it."""
        for each in arguments.values():
            if type(each) is Remembered and each.key not in self._known:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known.add(each.key)

    def _seed(self, origin: Origin, number: int) -> int:
        """The seed of a call; of one that changes rows the same if its task is run again."""
        self._reads += number < 0
        place = SEEDED.pack(origin.id, origin.clock, number, self._reads if number < 0 else 0)
        secret = self._session.ticket.secret.encode()
        return int.from_bytes(hashlib.blake2b(place, key=secret[:64], digest_size=8).digest(), "little") >> 2

    def _carry_out(self, running: Running, arguments: Mapping[str, object], rehearses: bool, deadline: float) -> None:
        session = self._session
        pause = BACK_OFF_SECONDS[0]
        while running.asked or running.prepared:
            try:
                self._ask(running, deadline, rehearses)
                if rehearses:
                    self._abort(running)
                    break
                self._commit(running, deadline)
            except UnknownFunctionError:
                self._abort(running)
                if not running.shortened:
                    raise
                whole = self._encoded(running.function, arguments, ())
                running.message, running.shortened = msgspec.structs.replace(running.message, arguments=whole), False
            except (BusyError, UnknownTableError, *RETRIED) as error:
                self._abort(running)
                if isinstance(error, DataLostError) or session.now() > deadline:
                    raise
                session.sleep(
                    pause * random.Random(running.message.seed).uniform(0.5, 1.5)
                )  # so that two are not in step
                pause = min(2 * pause, BACK_OFF_SECONDS[1])
                session.recover(deadline)
                self._reroute(running, error)
            except BaseException:
                self._abort(running)
                raise
        self._note(arguments)

    def _ask(self, running: Running, deadline: float, rehearses: bool) -> None:
        sent, running.sent = running.sent, []
        runs = [run for run in self._runs(running) if run not in [each.run for each in sent]]
        if not running.function.changes:
            mode = READS
        else:
            alone = len(runs) == 1 and len(running.asked) == len(running.named.shards)
            mode = ALONE if alone and running.route.spec.copies == 1 and not rehearses else PREPARES
        message = msgspec.structs.replace(running.message, mode=mode)
        errors: list[DPSError] = []
        for run in runs:
            try:
                sent.append(SentRun(run, self._send(running, message, run)))
            except DPSError as error:
                errors.append(error)
        if mode == PREPARES:
            running.prepared += [run for run, _ in sent]
        for run, request in sent:
            try:
                parts = decode_parts(request.result(deadline).body)
            except DPSError as error:
                errors.append(error)
                if mode == PREPARES:
                    running.prepared.remove(run)
                continue
            for part in parts:
                # Where the effect counts already, a second result may be of later rows, so the first one stays.
                if not (part.done and part.shard in running.values):
                    running.values[part.shard] = decode_values(part.value)
            running.asked.difference_update(run.shards)
        if errors:
            raise min(errors, key=urgency)

    def _commit(self, running: Running, deadline: float) -> None:
        """All parts have succeeded: have their effects count."""
        errors: list[DPSError] = []
        runs, running.prepared = running.prepared, []
        sent = []
        for run in runs:
            running.asked.update(run.shards)
            try:
                sent.append((run, self._tell(running, frames.COMMIT, run)))
            except DPSError as error:
                errors.append(error)
        for run, request in sent:
            try:
                request.result(deadline)
                running.asked.difference_update(run.shards)
            except DPSError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=urgency)

    def _abort(self, running: Running) -> None:
        """Have the servers drop what they have prepared. A server that cannot be told drops it by itself, later."""
        runs, running.prepared = running.prepared, []
        sent = []
        for run in runs:
            running.asked.update(run.shards)
            with contextlib.suppress(DPSError):
                sent.append(self._tell(running, frames.ABORT, run))
        for request in sent:
            with contextlib.suppress(DPSError):
                request.result(self._session.now() + GRACE_SECONDS)

    def _reroute(self, running: Running, error: DPSError) -> None:
        spec = running.route.spec
        route = self._session.route(spec.name)
        if spec.id in route.ancestors:
            running.reshard(route)
        elif route.spec.id != spec.id:
            raise UnknownTableError(f"table {spec.name!r} was replaced while a function ran on it; call it again")
        elif isinstance(error, UnknownTableError):
            raise error
        running.route = route

    @staticmethod
    def _runs(running: Running) -> Iterator[RunOfShards]:
        """The shards that are asked, cut by server; of a range, into neighbouring ones."""
        for server, first, end in running.route.runs:
            shards = [n for n in range(first, end) if n in running.asked]
            while shards:
                count = len(shards)
                if running.named.keys is None:
                    count = next((i for i in range(1, count) if shards[i] != shards[0] + i), count)
                yield RunOfShards(server, shards[:count])
                shards = shards[count:]

    def _tell(self, running: Running, kind: int, run: RunOfShards) -> Request:
        return self._session.channel(run.server).ask(self._header(running, kind, run.shards))

    def _header(self, running: Running, kind: int, shards: list[int]) -> Header:
        return running.stamp._replace(
            kind=kind,
            flags=running.stamp.flags if kind == frames.CALL else 0,
            table=running.route.spec.id,
            epoch=self._session.epoch,
            shard=shards[0],
            shards=shards[-1] - shards[0] + 1,
        )

    def _send(self, running: Running, message: FunctionCall, run: RunOfShards) -> Request:
        server, shards = run
        spec, named = running.route.spec, running.named
        if server < 0:
            raise DataLostError(
                f"table {spec.name!r}: the last copy of shards {shards[0]} to {shards[-1]} is gone; "
                f"{self._session.remedy}"
            )
        header, text = self._header(running, frames.CALL, shards), message.encode()
        if named.keys is None:
            header = header._replace(flags=header.flags | frames.RANGE)
            body = text
        else:
            assert named.starts is not None
            counts = np.zeros(header.shards, np.int64)
            pieces = []
            for shard in shards:
                a, b = named.starts[shard], named.starts[shard + 1]
                counts[shard - header.shard] = b - a
                pieces.append(named.keys[a:b])
            keys = np.concatenate(pieces)
            header = header._replace(count=len(keys))
            body = counts.tobytes() + keys.tobytes() + text
        if len(body) > self._session.frame_limit:
            raise LimitError(
                f"a call of function {running.function.name!r} has {len(body)} bytes of keys and arguments; at most "
                f"{self._session.frame_limit} are taken (dps.limits.frame)"
            )
        return self._session.channel(server).ask(header, body)


def cut(spec: TableSpec, keys: Keys) -> NamedRows:
    if keys is None or isinstance(keys, slice):
        if spec.rows is None:
            if keys is not None:
                raise InputError(f"table {spec.name!r} is keyed: a slice names no keys; pass keys, or none for all")
            return NamedRows(None, None, 0, 0, list(range(spec.shards)))
        start, stop, step = (keys or slice(None)).indices(spec.rows)
        if step != 1:
            raise InputError(f"table {spec.name!r}: a slice of rows has step 1, not {step}; name the keys")
        return NamedRows(None, None, start, stop, list(spec.shard_map.within(start, stop)))
    listed, _ = as_keys(keys, spec.name)
    grouping = group(distinct(listed), spec.shard_map, spec.name)
    starts = grouping.starts
    return NamedRows(grouping.keys, starts, 0, 0, [n for n in range(spec.shards) if starts[n] < starts[n + 1]])


def urgency(error: DPSError) -> int:
    """Errors of the function come first, because they end the call; then those that need a new route."""
    return 0 if not isinstance(error, (BusyError, *RETRIED)) else 1 if isinstance(error, RETRIED) else 2
