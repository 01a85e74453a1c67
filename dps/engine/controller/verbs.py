"""Verbs: what a driver asks of one parameter server, over Dask's control plane.

The scheduler has one handler for all of them, `dps_call`; it takes a verb, the name of the parameter server, and the
fields of the request by name. `SESSION_VERBS` has the function of each verb. `Sessions.verbs` has those by which
parameter servers come and go, and those about the cluster. All of them run on the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import msgspec

from dps import config
from dps.engine.controller.resharding_procedures import GATHER_SECONDS
from dps.engine.controller.session import Session
from dps.engine.telemetry.run_history import encode_history
from dps.engine.telemetry.snapshot import ServerAnswer
from dps.engine.wire.messages import AdaptRule, CheckpointOptions, CheckpointSchedule, InterruptedRun, RestoreRequest
from dps.errors import DPSError, InputError, StoppedError

__all__ = ["DECISIONS", "SESSION_VERBS"]

M = TypeVar("M", bound=msgspec.Struct | dict)


def decode(kind: type[M], request: bytes) -> M:
    """The request of that kind; an InputError says which field is wrong."""
    try:
        return msgspec.msgpack.decode(request, type=kind)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:  # TypeError: it is not bytes
        raise InputError(f"{kind.__name__}: this request cannot be read: {error}") from None


# -- servers


async def scale(session: Session, *, servers: int) -> None:
    """Have that many servers, whatever the load; shards move while training goes on."""
    adapted = session.end_adapting()
    try:
        await session.actors.scale(servers)
    except InputError:
        if adapted is not None:
            session.adapt(adapted)
        raise


async def adapt(session: Session, *, rule: bytes) -> None:
    """Let the number of servers follow the load; `rule` is an `AdaptRule`, encoded."""
    session.adapt(decode(AdaptRule, rule))


async def retire(session: Session, *, server: int) -> None:
    await session.actors.retire(server)


async def hold(session: Session) -> None:
    """Have the servers wait for another scheduler when this one ends on purpose, as when it dies."""
    if session.journal is None:
        raise InputError(
            f"the servers of parameter server {session.name!r} end with their scheduler, because dps.scheduler.grace "
            f"is 0: set it on the scheduler and on all workers before these start"
        )
    session.on_hold = True
    await session.in_endpoint(session.membership.note, "servers wait for another scheduler when this one ends")


async def status(session: Session) -> bytes:
    """The state of the parameter server, with what its servers answer: a `Status`, encoded."""
    answers = await session.actors.call_all("status")
    known = {number: msgspec.msgpack.decode(answer, type=ServerAnswer) for number, answer in answers.items()}
    return msgspec.msgpack.encode(await session.in_endpoint(session.monitor.snapshot, known, True))


async def snapshot(session: Session) -> bytes:
    """The state of the parameter server, without asking its servers: a `Status`, encoded."""
    return msgspec.msgpack.encode(await session.in_endpoint(session.monitor.snapshot))


async def history(session: Session, *, run: int = 0) -> bytes:
    """The whole history of one run (0: the last): a `RunHistory`, encoded."""
    values, trainers = await session.in_endpoint(session.monitor.history, run)
    return await asyncio.get_running_loop().run_in_executor(None, encode_history, values, trainers)


# -- tables


async def add_table(session: Session, *, spec: bytes, exist_ok: bool = False, free: Collection[str] = ()) -> bytes:
    """Make a table on all servers, then publish it, so that a client never sees a part of one.

    `spec` has the fields of a `TableSpec`, encoded; so has the answer, with the table's number.
    """
    return msgspec.msgpack.encode(await session.actors.add_table(decode(dict, spec), exist_ok, free))


async def split_table(session: Session, *, table: str, shards: int | None, shard: int | None = None) -> bytes:
    """Cut a table into more shards, twice as many by default; the answer has the fields of a `TableSpec`, encoded."""
    return msgspec.msgpack.encode(await session.carry_out(session.resharding.split(table, shards, shard)))


async def merge_table(
    session: Session, *, table: str, shards: int | None, seconds: float | None, shard: int | None = None
) -> bytes:
    """Cut a table into fewer shards, half as many by default; the answer has the fields of a `TableSpec`, encoded."""
    limit = GATHER_SECONDS if seconds is None else float(seconds)
    return msgspec.msgpack.encode(await session.carry_out(session.resharding.merge(table, shards, shard, limit)))


async def rebalance(session: Session, *, seconds: float | None) -> bytes:
    """Even the load of the servers out, within so many seconds; a `RebalanceReport`, encoded."""
    limit = config.seconds("request") if seconds is None else float(seconds)
    return msgspec.msgpack.encode(await session.carry_out(session.rebalancing.rebalance(limit)))


async def drop_table(session: Session, *, table: str) -> None:
    await session.actors.drop_table(table)


# -- functions


async def add_function(session: Session, *, function: str, code: bytes) -> None:
    """Bring a function of the user to all servers; `function` is the hash of its code."""
    await session.actors.add_function(function, code)


# -- checkpoints


async def checkpoint(session: Session, *, options: bytes) -> bytes:
    """Take a checkpoint now; `options` are `CheckpointOptions`, the answer is a `LastCheckpoint`, encoded."""
    taking = session.checkpoints.take(decode(CheckpointOptions, options))
    return msgspec.msgpack.encode(await session.carry_out(taking))


async def schedule_checkpoints(session: Session, *, schedule: bytes | None) -> None:
    """Take checkpoints at intervals from now on; `schedule` is a `CheckpointSchedule`, encoded; None: no more."""
    session.schedule_checkpoints(None if schedule is None else decode(CheckpointSchedule, schedule))


async def restore(session: Session, *, request: bytes) -> bytes:
    """Restore tables from a checkpoint; `request` is a `RestoreRequest`, the answer a `RestoreAnswer`, encoded.

    Interrupted runs end, because the ledgers of the restored tables do not know them.
    """
    restoring = session.checkpoints.restore(decode(RestoreRequest, request))
    answer = msgspec.msgpack.encode(await session.carry_out(restoring))
    await session.in_endpoint(session.interrupted_runs.end, "tables were restored from a checkpoint")
    return answer


# -- runs


async def start_run(
    session: Session,
    *,
    trainers: int,
    staleness: float | None,
    partitions: Sequence[Sequence[int]] | None = None,
    resume: bool = False,
    elastic: bool = False,
    reassign: bool | str = False,
    warm_start: int = 0,
    vacant: int = 0,
    lends: bool = False,
) -> int:
    """Begin a run; returns its number. Parameters as those of `Runs.start`; None is no bound on the staleness."""
    if session.journal is not None:
        await session.journal.set_origins_aside(trainers)
    collecting = session.ends.collecting()
    restored = session.checkpoints.resumable(trainers) if resume else None
    args = (trainers, staleness, collecting, restored, partitions or [], elastic, reassign, warm_start, vacant, lends)
    run: int = await session.in_endpoint(session.runs.start, *args)
    session.checkpoints.resumed()
    if collecting and not elastic:  # because a run whose driver died has left its last clock open
        try:
            await session.settle(keep=False)
        except DPSError as error:
            await session.in_endpoint(session.runs.stop, run, error)
            raise
    return run


async def progress(session: Session, *, run: int) -> bytes:
    """The clocks of a run and what its trainers do: a `RunStatus`, encoded."""
    return msgspec.msgpack.encode(await session.in_endpoint(session.monitor.run, run))


async def set_staleness(session: Session, *, staleness: float | str | None, run: int = 0) -> None:
    """Set the staleness, or "auto", of an active run, or of all (0); None is no bound."""
    if (collecting := session.ends.collecting()) and staleness != 0:
        raise InputError(
            f"table {collecting[0]!r} collects a clock's pushes (aggregate=...), which needs staleness 0; it "
            f"cannot be set to {staleness!r}"
        )
    if staleness == "auto":
        await session.in_endpoint(session.monitor.automatic, run)
    else:
        bound = math.inf if staleness is None else staleness
        await session.in_endpoint(session.monitor.set_staleness, bound, run)


async def set_reassign(session: Session, *, reassign: bool | str, run: int = 0) -> None:
    """Set whether trainers of an active run, or of all (0), help each other; see `Run.reassign`."""
    await session.in_endpoint(session.runs.set_reassign, reassign, run)


async def set_table_staleness(session: Session, *, table: str, staleness: float | None) -> None:
    """Set how stale trainers' reads of a table may be; None: as their run allows."""
    await session.actors.set_table_staleness(table, staleness)
    await session.in_endpoint(session.runs.decide, session.runs.renew_tables)


async def set_rejoin(session: Session, *, run: int, seconds: float, setting: str) -> None:
    """Give lost trainers of a run more time to be back; `setting` names where that time comes from, for errors."""
    await session.in_endpoint(session.runs.set_rejoin, run, float(seconds), setting)


async def resume_run(session: Session, *, run: int = 0) -> bytes:
    """Have a driver begin all trainers of an interrupted run anew (0: the only one); an `InterruptedRun`, encoded."""
    number: int = await session.in_endpoint(session.interrupted_runs.choose, run)
    await session.await_end_of_trainers(number)
    await session.await_shards()
    await session.learn_clocks()
    saved = await session.in_endpoint(session.interrupted_runs.begin_anew, number)
    return msgspec.msgpack.encode(InterruptedRun(number, saved))


async def stop_run(session: Session, *, run: int, reason: str) -> None:
    await session.in_endpoint(session.runs.stop, run, StoppedError(reason))


async def give_up_trainer(session: Session, *, run: int, trainer: int) -> bool:
    """Go on without a trainer whose worker is gone, where the run allows it; whether the run does."""
    given_up: bool = await session.in_endpoint(session.runs.give_up, run, trainer)
    return given_up


async def end_run(session: Session, *, run: int) -> None:
    """End a run that was opened for several callers, or that is elastic."""
    if await session.in_endpoint(session.runs.end, run):  # otherwise the run that ends last settles
        await session.settle(keep=True)


async def settle(session: Session, *, keep: bool) -> None:
    """A run has ended: see `RunProcedures.settle`."""
    await session.settle(keep)


# The controller commits what these verbs decide before it answers the driver, because a controller that takes over has
# to know what the driver was told.
DECISIONS = {"scale", "adapt", "retire", "add_table", "split_table", "drop_table", "add_function", "restore"}
DECISIONS |= {"merge_table", "rebalance", "schedule_checkpoints", "start_run", "set_staleness", "set_rejoin"}
DECISIONS |= {"set_table_staleness"}
DECISIONS |= {"resume_run", "give_up_trainer", "stop_run", "end_run"}

SESSION_VERBS: dict[str, Callable[..., Awaitable[object]]] = {
    "scale": scale,
    "adapt": adapt,
    "retire": retire,
    "hold": hold,
    "status": status,
    "snapshot": snapshot,
    "history": history,
    "add_table": add_table,
    "merge_table": merge_table,
    "split_table": split_table,
    "rebalance": rebalance,
    "drop_table": drop_table,
    "add_function": add_function,
    "checkpoint": checkpoint,
    "schedule_checkpoints": schedule_checkpoints,
    "restore": restore,
    "start_run": start_run,
    "resume_run": resume_run,
    "progress": progress,
    "set_reassign": set_reassign,
    "set_staleness": set_staleness,
    "set_table_staleness": set_table_staleness,
    "set_rejoin": set_rejoin,
    "give_up_trainer": give_up_trainer,
    "stop_run": stop_run,
    "end_run": end_run,
    "settle": settle,
}
