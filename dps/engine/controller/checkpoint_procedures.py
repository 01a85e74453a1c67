"""Checkpoint procedures: the controller's part in checkpoints. They pick the clock, lead the servers, and commit. Pure.

A checkpoint is *one* model: exactly the pushes that every trainer made before its clock c, on every shard. So c is a
clock that no trainer has reached. The servers begin to cut their shards there; training goes on, and the fast trainers
run ahead of c while the slow ones catch up. When the slowest trainer has ticked c, all pushes before c are
acknowledged: the cuts are complete, and are written while training goes on. If a shard has moved meanwhile, or a server
was lost, the checkpoint is begun anew.

Without a run (or with several, because their clocks have nothing to do with each other) shards are cut as they are.
After a run that failed no scheduled checkpoints are taken, so that those of the run stay the newest, to resume from.

What holds, and why:

* A committed checkpoint is whole. The manifest is written last, and only when each server that has cut a shard has
  written its files. A checkpoint that is given up has no manifest, and its files are removed; if that fails, a later
  commit removes them.
* It is consistent. The servers refuse a clock that a trainer has reached. A server that has retired the run cannot tell
  any more, so a cut is begun anew if its run was retired before all servers had begun it. A server that no longer leads
  a shard refuses to complete its cut, because another primary may have acknowledged pushes that the cut does not have.
* A restore is all or nothing: the new tables are published together, when all their shards are filled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dps import config
from dps.engine.checkpoints.reading import Origins
from dps.engine.checkpoints.shard_file import FileRecord
from dps.engine.checkpoints.store import Checkpoint, Store, Writer
from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import (
    CallServers,
    InEndpoint,
    InThread,
    Lock,
    Procedure,
    ServerCall,
    Sleep,
    TellServers,
    Uninterrupted,
    holding,
    raised,
)
from dps.engine.controller.runs import Run, Runs
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.coordination.placement import Place
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.snapshot import CheckpointStatus, LastCheckpoint
from dps.engine.wire.messages import (
    CheckpointOptions,
    CheckpointSchedule,
    RestoreAnswer,
    RestoreRequest,
    SavedRun,
    Shards,
)
from dps.errors import (
    CheckpointError,
    ClosedError,
    DPSError,
    InputError,
    MovedError,
    RequestTimeoutError,
    ServerGoneError,
)

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["CheckpointProcedures"]

logger = logging.getLogger(__name__)

# Pause between two checks whether a clock is reached, or the files are written; pauses grow up to MAX_POLL_SECONDS.
POLL_SECONDS = 0.02
MAX_POLL_SECONDS = 0.25
# How many clocks ahead of the fastest trainer to cut. The next margin is tried when one was reached too early.
CLOCK_MARGINS = (1, 2, 4, 8, 16, 64, 256, 1024)
# Pause until the next attempt, after shards have moved.
RETRY_SECONDS = 0.1


class CheckpointProcedures:
    """How checkpoints of one parameter server are taken and restored; one at a time.

    Parameters
    ----------
    up : callable
        The servers that can be called.
    tables_change, busy : Lock
        Held while a table is made or dropped; and while a checkpoint is taken or restored.
    clock, wall_clock : callable
        Seconds, for limits; and since 1970, for users.
    session : str
        Marks checkpoints whose ledgers have this parameter server's origins.
    """

    def __init__(
        self,
        runs: Runs,
        membership: Membership,
        up: Callable[[], list[ServerRecord]],
        tables: TableProcedures,
        tables_change: Lock,
        busy: Lock,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        session: str,
    ):
        self.runs = runs
        self.membership = membership
        self._up = up
        self._tables = tables
        self._tables_change, self._busy = tables_change, busy
        self._now = clock
        self._wall_clock = wall_clock
        self.session = session
        self.last: LastCheckpoint | None = None
        self.error: str | None = None  # error of the last attempt, if it failed
        self.restored: SavedRun | None = None  # the state of the restored run, to resume it
        self.closed = False  # the parameter server is being closed
        self._parents: dict[str, str] = {}  # url -> the last checkpoint there
        self._margin = 0, 0  # a run, and the index of the margin that was enough for it, to begin with next time
        self._restored_run = 0  # the last failed run whose tables were restored since

    def status(self) -> CheckpointStatus:
        """The last checkpoint, and the error of the last scheduled attempt, if that failed."""
        return CheckpointStatus(self.last, self.error)

    # -- taking them

    def take(self, options: CheckpointOptions) -> Procedure[LastCheckpoint]:
        """Take one checkpoint; it is committed at the end."""
        return holding([self._busy], self._take(options))

    def _take(self, options: CheckpointOptions) -> Procedure[LastCheckpoint]:
        began = self._now()
        until = began + config.seconds("request")
        store = yield InThread(Store, (options.url, options.keep), {"storage_options": options.storage_options})
        while True:
            self._check_open()
            try:
                done = yield from self._try(store, options)
                break
            except (MovedError, ServerGoneError) as error:
                if self._now() > until:
                    raise CheckpointError(
                        f"no checkpoint under {options.url} was begun within {config.limit('request')}: {error}"
                    ) from error
                yield Sleep(RETRY_SECONDS)
        self._parents[options.url] = done.name
        nbytes, rows = sum(f.size for f in done.files), sum(f.rows for f in done.files)
        self.last = last = LastCheckpoint(
            name=done.name,
            url=options.url,
            clock=done.clock,
            rows=rows,
            bytes=nbytes,
            parent=done.parent,
            seconds=self._now() - began,
            when=self._wall_clock(),
        )
        remedy = f"restore checkpoint {done.name!r} with ps.restore({options.url!r})"
        yield InEndpoint(self.membership.set_remedy, (remedy,))
        return last

    def _try(self, store: Store, options: CheckpointOptions) -> Procedure[Checkpoint]:
        specs = [TableSpec.from_dict(spec) for spec in self.membership.specs.values()]
        if not specs:
            raise InputError("there are no tables to write a checkpoint of")
        parent = self._parents.get(options.url) if options.incremental else None
        writer: Writer = yield InThread(store.begin, (specs,), {"parent": parent})
        servers = [server.number for server in self._up() if server.ready]
        name = None
        try:
            run, clock = yield from self._cut(servers, specs, writer.parent, options.incremental)
            yield from self._wait_for_clock(run, clock)
            yield from self._each(servers, "complete")
            saved = None if run is None or clock is None else msgspec.to_builtins(run.saved(clock))
            metadata = {"session": self.session, "run": saved}
            writer.checkpoint = dataclasses.replace(writer.checkpoint, clock=clock, metadata=metadata)
            yield from self._each(servers, "save", options.url, writer.name, options.storage_options)
            files = yield from self._files(servers)
            done: Checkpoint = yield InThread(writer.commit, (files,))
            name = done.name
            return done
        finally:
            yield Uninterrupted(self._end(writer, name))

    def _end(self, writer: Writer, name: str | None) -> Procedure[None]:
        """Tell the servers that the checkpoint `name` was committed; or (None) that it was given up, and remove it."""
        yield TellServers("end_cut", (name,))
        if name is None:
            try:
                yield InThread(writer.abort)
            except CheckpointError as error:  # it has no manifest, so a later checkpoint removes it
                logger.warning("an unfinished checkpoint could not be removed: %s", error)

    def _cut(
        self, servers: list[int], specs: list[TableSpec], parent: str | None, track: bool
    ) -> Procedure[tuple[Run | None, int | None]]:
        """Begin the cuts at a clock that no trainer has reached. Returns the run whose clock it is, and the clock."""
        wanted = {(spec.id, shard) for spec in specs for shard in range(spec.shards)}
        late: DPSError | None = None
        run: Run | None = yield InEndpoint(self.runs.only_active)
        known, margin = self._margin
        first = max(margin - 1, 0) if run is not None and run.number == known else 0
        for number in range(first, len(CLOCK_MARGINS)):
            if run is not None:
                self._margin = run.number, number
            clock = None if run is None else run.clock.maximum + CLOCK_MARGINS[number]
            try:
                answers = yield from self._each(servers, "cut", [spec.id for spec in specs], clock, parent, track)
            except InputError as error:  # a trainer has reached the clock already
                if run is None:  # a run has just ended, and the servers have yet to close its sums
                    raise MovedError(str(error)) from error
                late = error
                yield TellServers("end_cut", (None,))
                run = yield InEndpoint(self.runs.only_active)
                continue
            cut = {shard for answer in answers for shard in msgspec.msgpack.decode(answer, type=Shards)}
            if lost := (yield InEndpoint(self.membership.lost)):
                raise CheckpointError(f"{len(lost)} shards have no copy left, so they cannot be written")
            if missing := wanted - cut:
                raise MovedError(f"{len(missing)} shards were on the move, or their tables were dropped")
            if run is not None and run.retired:
                # A server that has retired the run's origins has forgotten their clocks. So it may have begun a cut at
                # a clock whose ops it has applied already.
                raise MovedError(f"run {run.number} ended while the cut of its clock {clock} began")
            return run, clock
        raise CheckpointError(f"the trainers are too fast for a checkpoint: {late}")

    def _wait_for_clock(self, run: Run | None, clock: int | None) -> Procedure[None]:
        until = self._now() + config.seconds("clock")
        while run is not None and clock is not None:
            self._check_open()
            behind = yield InEndpoint(run.behind, (clock,))
            if run.stopped is not None:
                raise CheckpointError(
                    f"no checkpoint: run {run.number} was stopped before clock {clock}: {run.stopped}"
                )
            if behind is None:
                return
            if self._now() > until:
                raise RequestTimeoutError(
                    f"no checkpoint: its clock {clock} was not reached within {config.limit('clock')}; "
                    f"{run.clock.explain(behind, self.runs.now())}"
                )
            yield Sleep(POLL_SECONDS)

    def _files(self, servers: list[int]) -> Procedure[list[FileRecord]]:
        until, pause = self._now() + config.seconds("checkpoint"), POLL_SECONDS
        while True:
            self._check_open()
            answers = yield from self._each(servers, "saved")
            files = [msgspec.msgpack.decode(answer, type=list[FileRecord] | None) for answer in answers]
            if None not in files:
                return [file for each in files if each is not None for file in each]
            if self._now() > until:
                raise RequestTimeoutError(
                    f"a checkpoint was not written within {config.limit('checkpoint')}: its store is slow, or the "
                    f"servers are busy; see how far the last one came in ps.status(), or raise the setting"
                )
            yield Sleep(pause)
            pause = min(1.5 * pause, MAX_POLL_SECONDS)  # because each question costs the servers time

    def _each(self, servers: Iterable[int], method: str, *args: object) -> Procedure[list[Any]]:
        """Call these servers; when all have answered, raise the error of one that failed."""
        up = {server.number for server in self._up()}
        if lost := [number for number in servers if number not in up]:
            raise ServerGoneError(f"server {lost[0]} was lost meanwhile")
        return raised((yield CallServers(tuple(ServerCall(number, method, args) for number in servers))))

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the parameter server was closed")

    # -- on a schedule

    def repeat(self, schedule: CheckpointSchedule) -> Procedure[None]:
        """Take checkpoints until cancelled; a failure is logged, and the next one is tried, as training goes on."""
        clock = 0
        while True:
            if schedule.seconds is not None:
                yield Sleep(schedule.seconds)
            else:
                run: Run | None = yield InEndpoint(self.runs.only_active)
                if run is None or run.clock.maximum < clock + (schedule.clocks or 1):
                    clock = 0 if run is None else min(clock, run.clock.maximum)
                    yield Sleep(POLL_SECONDS)
                    continue
                clock = run.clock.maximum
            failed = yield InEndpoint(self.runs.failed)
            if failed > self._restored_run:
                self.error = f"no checkpoint is taken since run {failed} failed: restore one, or start another run"
            elif self.membership.specs:
                clock = (yield from self._take_one(schedule.options)) or clock

    def _take_one(self, options: CheckpointOptions) -> Procedure[int | None]:
        """Take a checkpoint; returns its clock, None if it has none or failed."""
        try:
            done = yield from self.take(options)
            self.error = None
            return done.clock
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not self.closed:
                logger.warning("parameter server %r: no checkpoint was taken: %s", self.membership.session, error)
            return None

    # -- restoring

    def restore(self, request: RestoreRequest) -> Procedure[RestoreAnswer]:
        """Restore tables from a checkpoint, in the place of tables of the same names.

        Without a name it is the newest one that can be read; `passed` says why newer ones cannot.
        """
        return holding([self._busy, self._tables_change], self._restore(request))

    def _restore(self, request: RestoreRequest) -> Procedure[RestoreAnswer]:
        store: Store = yield InThread(Store, (request.url,), {"storage_options": request.storage_options})
        name, passed = request.checkpoint, dict[str, str]()
        for each in [name] if name is not None else (yield InThread(store.names)):
            try:
                checkpoint: Checkpoint = yield InThread(store.whole, (each,))
                wanted = request.tables or list(checkpoint.tables)
                if unknown := sorted(set(wanted) - checkpoint.tables.keys()):
                    raise InputError(f"checkpoint {each!r} has no table {', '.join(map(repr, unknown))}")
                shards = checked_shards(request.shards, checkpoint, wanted)
                yield from self._bring_back(store, checkpoint, wanted, request.storage_options, shards)
            except CheckpointError as error:
                if name is not None:
                    raise CheckpointError(f"checkpoint {name!r} cannot be restored: {error}") from error
                logger.warning("checkpoint %r is passed over: %s", each, error)
                passed[each] = f"{error!s:.500}"
                continue
            return RestoreAnswer(each, checkpoint.clock, wanted, passed)
        why = "".join(f"; {name!r}: {error}" for name, error in passed.items())
        raise CheckpointError(f"there is no whole checkpoint under {request.url}{why}")

    def _bring_back(
        self,
        store: Store,
        checkpoint: Checkpoint,
        tables: list[str],
        storage_options: dict[str, object],
        shards: Mapping[str, int],
    ) -> Procedure[None]:
        """Make all tables anew, fill them, and only then publish them, all at once."""
        saved = saved_run(checkpoint)
        known = checkpoint.metadata.get("session") == self.session
        origins: Origins = yield InEndpoint(self.origins, (known, saved))
        load = lambda n, shards: (n, store.url, checkpoint.name, shards, tuple(origins), storage_options)  # noqa: E731
        made: list[tuple[Description, list[Place]]] = []
        try:
            for table in tables:
                saved_spec = checkpoint.tables[table]
                fields = with_shards(saved_spec, shards.get(table)).to_dict()
                fields["copies"] = min(fields["copies"], max(1, sum(s.ready and not s.leaving for s in self._up())))
                made.append((yield from self._tables.make(fields, load)))
            old = [self.membership.specs[table]["id"] for table in tables if table in self.membership.specs]
            yield InEndpoint(self.membership.publish_tables, (made,))
        except BaseException:
            for spec, _ in made:
                yield Uninterrupted(self._tables.forget(spec["id"]))
            raise
        for number in old:
            yield from self._tables.discard(number)
        self._restored_run = yield InEndpoint(self.runs.failed)
        whole = set(tables) == checkpoint.tables.keys()
        resumable = saved is not None and origins.trainers and whole
        self.restored = msgspec.structs.replace(saved, origin=origins.to) if saved and resumable else None

    def origins(self, known: bool, saved: SavedRun | None) -> Origins:
        """What becomes of the origins in the checkpoint's ledgers. A run that goes on keeps its own."""
        ended = [origins for run in self.runs.runs.values() if run.over for origins in run.origins()]
        if saved is None or (known and self.runs.is_active_origin(saved.origin)):
            return Origins(known, ended=ended)
        ended += saved.origins
        return Origins(known, saved.origin, saved.trainers, self.runs.origins.allot(saved.trainers), ended)

    def resumable(self, trainers: int) -> SavedRun:
        """The state of the restored run, for a run of so many trainers that resumes it."""
        if self.restored is None or self.restored.trainers != trainers:
            raise InputError("another run has resumed the restored checkpoint, or replaced its tables: restore again")
        return self.restored

    def resumed(self) -> None:
        """A run has begun: the restored run cannot be resumed any more."""
        self.restored = None


def checked_shards(shards: Mapping[str, int], checkpoint: Checkpoint, tables: Iterable[str]) -> Mapping[str, int]:
    """The numbers of shards that tables are to be restored with; InputError where that cannot be."""
    for table, count in shards.items():
        if table not in tables:
            raise InputError(f"shards= names table {table!r}, which is not restored")
        saved = checkpoint.tables[table]
        wanted = with_shards(saved, count)  # raises where a table cannot have so many
        if saved.fixed_shards and count != saved.shards:
            raise InputError(f"table {table!r} keeps its {saved.shards} shards: its rows are laid out by them")
        counts = saved.life.counts
        if counts is not None and counts.approximate and count != saved.shards:
            raise InputError(
                f"table {table!r} counts pushes approximately, in a sketch for each of its {saved.shards} shards: "
                f"restore it with as many, not with {count}"
            )
        if saved.life.asks and not wanted.shard_map.refines(saved.shard_map):
            raise InputError(
                f"table {table!r} was saved in {saved.shards} shards, each of which counts the ages of its rows by "
                f"itself: restore it with these (leave shards= out), or with more, each of which lies in one of them, "
                f"not with {count}"
            )
    return shards


def with_shards(saved: TableSpec, count: int | None) -> TableSpec:
    """The definition of a saved table with so many equal shards, or, for None, with those that it had."""
    return saved if count is None else dataclasses.replace(saved, shards=count, edges=())


def saved_run(checkpoint: Checkpoint) -> SavedRun | None:
    """What the checkpoint knows of its run; None where there was none, or several."""
    try:
        return msgspec.convert(checkpoint.metadata.get("run"), SavedRun | None)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"what it says of its run cannot be read: {error}") from None
