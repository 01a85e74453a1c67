"""Checkpointer: the controller's part in checkpoints. It picks the clock, leads the servers, and commits.

A checkpoint is *one* model: exactly the pushes that every trainer made before its clock c, on every shard. So c is a
clock that nobody has reached. The servers begin to cut their shards there; training goes on, and the fast ones run
ahead of c while the slow ones catch up with it. When the slowest has ticked c, all pushes before it are acknowledged:
the cuts are complete, and are written while training goes on. Where a shard has moved meanwhile, or a server was lost,
the checkpoint is begun anew.

Without a run (or with several, whose clocks have nothing to do with each other) shards are cut as they are. After a run
that failed no regular checkpoints are taken, so that those of the run stay the newest, to go on from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from dps import config
from dps.checkpoint import Checkpoint, Store, Writer
from dps.crew import Crew
from dps.errors import (
    CheckpointError,
    ClosedError,
    DPSError,
    InputError,
    MovedError,
    RequestTimeoutError,
    ServerGoneError,
)
from dps.fleet import Fleet, Recruit
from dps.restore import Origins
from dps.runs import Run, Runs
from dps.shard_files import FileRecord
from dps.state.ops import TableSpec

__all__ = ["Checkpointer", "Wish"]

logger = logging.getLogger(__name__)

LOOK = 0.02  # seconds between two looks whether clocks, or files, are there;
SELDOM = 0.25  # at most
MARGINS = (1, 2, 4, 8, 16, 64, 256, 1024)  # how far ahead of the fastest to cut: more, where that came too late
AGAIN = 0.1  # seconds until the next try, where shards have moved


@dataclasses.dataclass
class Wish:
    """What checkpoints somebody wants."""

    url: str
    keep: int = 3
    incremental: bool = False
    seconds: float | None = None  # every so often;
    clocks: int | None = None  # or every so many clocks; neither: once
    storage_options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Checkpointer:
    """Takes and restores checkpoints of one parameter server; one at a time.

    Parameters
    ----------
    runs, fleet, crew
        Clocks; who serves what; the servers' actors.
    in_endpoint : callable
        Runs a function in the thread that owns runs and fleet.
    """

    def __init__(self, runs: Runs, fleet: Fleet, crew: Crew, in_endpoint: Callable[..., Awaitable[Any]]):
        self.runs, self.fleet, self.crew, self._in_endpoint = runs, fleet, crew, in_endpoint
        self.session = secrets.token_hex(8)  # whose origins the ledgers speak of
        self.last: dict[str, Any] | None = None  # of the last one: name, url, clock, rows, bytes, seconds
        self.error: str | None = None  # of the last one that failed
        self.restored: dict[str, Any] | None = None  # what it takes to go on with the run that was restored
        self._busy = asyncio.Lock()
        self._closed = False
        self._parents: dict[str, str] = {}  # url -> the last checkpoint there
        self._regular: asyncio.Future | None = None
        self._margin = 0, 0  # a run, and which of the margins was enough: its trainers are about as fast as they were
        self._forgiven = 0  # the last run that may have failed: its tables were restored since

    @property
    def busy(self) -> bool:
        """Whether one is being taken or restored."""
        return self._busy.locked()

    # -- taking them

    async def take(self, wish: Wish) -> dict[str, Any]:
        """One checkpoint, whole when this returns."""
        async with self._busy:
            began = time.monotonic()
            until = began + config.seconds("request")
            store = await in_thread(Store, wish.url, wish.keep, storage_options=wish.storage_options)
            while True:
                self._go_on()
                try:
                    done = await self._try(store, wish)
                    break
                except (MovedError, ServerGoneError) as error:
                    if time.monotonic() > until:
                        raise CheckpointError(
                            f"no checkpoint under {wish.url} was begun within {config.limit('request')}: {error}"
                        ) from error
                    await asyncio.sleep(AGAIN)
            self._parents[wish.url] = done.name
            nbytes, rows = sum(f.size for f in done.files), sum(f.rows for f in done.files)
            self.last = {"name": done.name, "url": wish.url, "clock": done.clock, "rows": rows, "bytes": nbytes}
            self.last |= {"parent": done.parent, "seconds": time.monotonic() - began, "when": time.time()}
            remedy = f"restore checkpoint {done.name!r} with ps.restore({wish.url!r})"
            await self._in_endpoint(self.fleet.set_remedy, remedy)
            return self.last

    async def _try(self, store: Store, wish: Wish) -> Checkpoint:
        specs = [TableSpec.from_dict(spec) for spec in self.fleet.specs.values()]
        if not specs:
            raise InputError("there are no tables to write a checkpoint of")
        parent = self._parents.get(wish.url) if wish.incremental else None
        writer: Writer = await in_thread(store.begin, specs, parent=parent)
        servers = [server for server in self.crew.up() if server.ready]
        name = None
        try:
            run, clock = await self._cut(servers, specs, writer.parent, wish.incremental)
            await self._reached(run, clock)
            await self._each(servers, "complete")
            metadata = {"session": self.session, "run": None if run is None else run.saved(clock)}
            writer.checkpoint = dataclasses.replace(writer.checkpoint, clock=clock, metadata=metadata)
            await self._each(servers, "save", wish.url, writer.name, wish.storage_options)
            done = await in_thread(writer.commit, await self._files(servers))
            name = done.name
            return done
        finally:
            await asyncio.shield(self._end(writer, name))

    async def _end(self, writer: Writer, name: str | None) -> None:
        """It was committed; or (None) nobody is to write any more, and what was written goes."""
        await self.crew.call_all("end_cut", name)
        if name is None:
            try:
                await in_thread(writer.abort)
            except CheckpointError as error:  # it has no manifest, and goes later
                logger.warning("an unfinished checkpoint could not be removed: %s", error)

    async def _cut(
        self, servers: list[Recruit], specs: list[TableSpec], parent: str | None, track: bool
    ) -> tuple[Run | None, int | None]:
        """Begin the cuts at a clock that nobody has reached; the run whose clock it is, and the clock."""
        wanted = {(spec.id, shard) for spec in specs for shard in range(spec.shards)}
        late: DPSError | None = None
        run = await self._in_endpoint(self.runs.only)
        known, margin = self._margin
        first = max(margin - 1, 0) if run is not None and run.number == known else 0
        for number in range(first, len(MARGINS)):
            if run is not None:
                self._margin = run.number, number
            clock = None if run is None else run.clock.maximum + MARGINS[number]
            try:
                answers = await self._each(servers, "cut", [spec.id for spec in specs], clock, parent, track)
            except InputError as error:  # somebody was faster
                if run is None:  # the sums of a run that has just ended are about to be closed
                    raise MovedError(str(error)) from error
                late = error
                await self.crew.call_all("end_cut", None)
                run = await self._in_endpoint(self.runs.only)
                continue
            cut = {(table, shard) for text in answers for table, shard in json.loads(text)}
            if lost := await self._in_endpoint(self.fleet.lost):
                raise CheckpointError(f"{len(lost)} shards have no copy left: there is nothing to write of them")
            if missing := wanted - cut:
                raise MovedError(f"{len(missing)} shards were on the move, or their tables were dropped")
            return run, clock
        raise CheckpointError(f"the trainers are too fast for a checkpoint: {late}")

    async def _reached(self, run: Run | None, clock: int | None) -> None:
        """Wait until every trainer has ticked `clock`, or has left."""
        until = time.monotonic() + config.seconds("clock")
        while run is not None and clock is not None:
            self._go_on()
            behind = await self._in_endpoint(run.behind, clock)
            if run.stopped is not None:
                raise CheckpointError(
                    f"no checkpoint: run {run.number} was stopped before clock {clock}: {run.stopped}"
                )
            if behind is None:
                return
            if time.monotonic() > until:
                raise RequestTimeoutError(
                    f"no checkpoint: clock {clock}, which it is of, was not reached within {config.limit('clock')}; "
                    f"{run.clock.explain(behind, self.runs.now())}"
                )
            await asyncio.sleep(LOOK)

    async def _files(self, servers: list[Recruit]) -> list[FileRecord]:
        """The records of all files, when all servers have written theirs."""
        until, pause = time.monotonic() + config.seconds("checkpoint"), LOOK
        while True:
            self._go_on()
            answers = [json.loads(text) for text in await self._each(servers, "saved")]
            if all(answer is not None for answer in answers):
                return [FileRecord(**fields) for answer in answers for fields in answer]
            if time.monotonic() > until:
                raise RequestTimeoutError(
                    f"a checkpoint was not written within {config.limit('checkpoint')}: its store is slow, or the "
                    f"servers are busy; see how far the last one came in ps.status(), or raise the setting"
                )
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, SELDOM)  # asking costs the servers time

    async def _each(self, servers: Iterable[Recruit], method: str, *args: Any) -> list[Any]:
        """Call these servers; raise if one fails, when all have answered."""
        there = self.crew.up()
        if gone := [server.number for server in servers if server not in there]:
            raise ServerGoneError(f"server {gone[0]} was lost meanwhile")
        calls = (self.crew.call(server, method, *args) for server in servers)
        return raised(await asyncio.gather(*calls, return_exceptions=True))

    def _go_on(self) -> None:
        if self._closed:
            raise ClosedError("the parameter server was closed")

    # -- regularly

    def regularly(self, wish: Wish | None) -> None:
        """Take checkpoints again and again, in place of what was wished before; None: no more."""
        if self._regular is not None:
            self._regular.cancel()
        self._regular = None if wish is None else asyncio.ensure_future(self._repeat(wish))

    def stop(self) -> None:
        """The parameter server is being closed."""
        self._closed = True
        self.regularly(None)

    async def _repeat(self, wish: Wish) -> None:
        """A failed one is logged, and the next one is tried: training goes on."""
        clock = 0
        while True:
            if wish.seconds is not None:
                await asyncio.sleep(wish.seconds)
            else:
                run = await self._in_endpoint(self.runs.only)
                if run is None or run.clock.maximum < clock + (wish.clocks or 1):
                    clock = 0 if run is None else min(clock, run.clock.maximum)
                    await asyncio.sleep(LOOK)
                    continue
                clock = run.clock.maximum
            failed = await self._in_endpoint(self.runs.failed)
            if failed > self._forgiven:
                self.error = f"none is taken since run {failed} failed: restore, or start another run"
            elif self.fleet.specs:
                clock = await self._take_one(wish) or clock

    async def _take_one(self, wish: Wish) -> int | None:
        """Its clock; None if it has none, or failed."""
        try:
            done = await self.take(wish)
            self.error = None
            return done["clock"]
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not self._closed:
                logger.warning("parameter server %r: no checkpoint was taken: %s", self.fleet.session, error)
            return None

    # -- restoring

    async def restore(
        self,
        url: str,
        name: str | None,
        tables: list[str] | None,
        new_id: Callable[[], int],
        storage_options: dict[str, Any],
    ) -> dict[str, Any]:
        """Tables as they were in a checkpoint, in the place of those of the same names.

        Without a name it is the newest that can be read; `passed` tells why newer ones could not.
        """
        async with self._busy, self.crew.changing:
            store = await in_thread(Store, url, storage_options=storage_options)
            passed: dict[str, str] = {}
            for each in [name] if name is not None else await in_thread(store.names):
                try:
                    checkpoint = await in_thread(store.whole, each)
                    wanted = tables or list(checkpoint.tables)
                    if unknown := sorted(set(wanted) - checkpoint.tables.keys()):
                        raise InputError(f"checkpoint {each!r} has no table {', '.join(map(repr, unknown))}")
                    await self._bring_back(store, checkpoint, wanted, new_id, storage_options)
                except CheckpointError as error:
                    if name is not None:
                        raise CheckpointError(f"checkpoint {name!r} cannot be restored: {error}") from error
                    logger.warning("checkpoint %r is passed over: %s", each, error)
                    passed[each] = f"{error!s:.500}"
                    continue
                return {"name": each, "clock": checkpoint.clock, "tables": wanted, "passed": passed}
        why = "".join(f"; {name!r}: {error}" for name, error in passed.items())
        raise CheckpointError(f"there is no whole checkpoint under {url}{why}")

    async def _bring_back(
        self,
        store: Store,
        checkpoint: Checkpoint,
        tables: list[str],
        new_id: Callable[[], int],
        storage_options: dict[str, Any],
    ) -> None:
        """Make all tables anew, fill them, and only then let anybody see them, all at once."""
        saved = checkpoint.metadata.get("run")
        origins = await self._in_endpoint(self._origins, checkpoint.metadata.get("session") == self.session, saved)
        made: list[tuple[dict[str, Any], Any]] = []
        try:
            for table in tables:
                spec = {**checkpoint.tables[table].to_dict(), "id": new_id()}
                spec["copies"] = min(spec["copies"], max(1, sum(s.ready and not s.leaving for s in self.crew.up())))
                made.append((spec, await self._in_endpoint(self.fleet.add_table, spec)))
                await self._load(store, checkpoint, *made[-1], origins, storage_options)
            old = [self.fleet.specs[table]["id"] for table in tables if table in self.fleet.specs]
            await self._in_endpoint(self._publish, made)
        except BaseException:
            for spec, _ in made:
                await asyncio.shield(self.crew.call_all("drop_table", spec["id"]))
            raise
        for number in old:
            await self.crew.call_all("drop_table", number)
        self._forgiven = await self._in_endpoint(self.runs.failed)
        whole = set(tables) == checkpoint.tables.keys()
        self.restored = {**saved, "origin": origins.to} if saved and origins.trainers and whole else None

    async def _load(
        self,
        store: Store,
        checkpoint: Checkpoint,
        spec: dict[str, Any],
        places: list[Any],
        origins: Origins,
        storage_options: dict[str, Any],
    ) -> None:
        """Make one table on all servers, and have them read what they hold of it."""
        holders = {s: [n for n, p in enumerate(places) if s.number in p.chain] for s in self.crew.up()}
        raised(
            await asyncio.gather(
                *(self.crew.call(s, "create_table", spec, mine) for s, mine in holders.items()), return_exceptions=True
            )
        )
        what = spec["id"], store.url, checkpoint.name
        loads = (
            self.crew.call(s, "load", *what, mine, tuple(origins), storage_options)
            for s, mine in holders.items()
            if mine
        )
        raised(await asyncio.gather(*loads, return_exceptions=True))

    def _publish(self, made: list[tuple[dict[str, Any], list[Any]]]) -> None:
        for spec, places in made:
            self.fleet.publish_table(spec, places)

    def _origins(self, known: bool, saved: dict[str, Any] | None) -> Origins:
        """What becomes of those that the checkpoint knows. A run that is going on keeps its own."""
        ended = [origins for run in self.runs.runs.values() if run.over for origins in run.origins()]
        if saved is None or (known and self.runs.going_on(saved["origin"])):
            return Origins(known, ended=ended)
        ended += saved.get("origins", ())
        return Origins(known, saved["origin"], saved["trainers"], self.runs.allot(saved["trainers"]), ended)

    def resumable(self, trainers: int) -> dict[str, Any]:
        """What was restored of a run, for one of so many trainers to go on with."""
        if self.restored is None or self.restored["trainers"] != trainers:
            raise InputError("what was restored has been taken up by another run, or replaced: restore again")
        return self.restored


def raised(results: list[Any]) -> list[Any]:
    """The results, if none of them is an error; damage is told before anything else."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, CheckpointError)):
        raise error
    return results


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run what waits for disks and networks where it holds up nobody."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except DPSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error!s:.500}") from error
