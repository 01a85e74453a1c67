"""Run records: how the journal describes a run, and how a run goes on whose controller has died.

The clocks of trainers are not recorded, because each tick would need a record: they are with the trainers, and in the
ledgers of the shards. An op of clock c says that its trainer has completed c iterations, because a trainer goes on to
clock c only when all its ops before are acknowledged. Attempts are in the record, so that those of the next controller
are later ones.

A run that was taken over is *interrupted* until its trainers are back. A trainer whose process lives joins again: it
says which attempt it is, and which clock it has completed. A trainer that is missing counts at the last clock of its
ops, so the others wait for it if the staleness demands that. If no trainer lives, a driver may begin all of them anew
(:func:`begin_anew`): from then on, those of before are refused.

Leases of batches (`work_leases.py`) are not recorded, but the clock that all trainers have reached is, and where the
origins of the portions begin. So each portion of the epochs since is leased again, and made again in its own name: what
had been applied is a repeat for the ledgers. The trainers of a leased run are begun anew, but for those that lend each
other their partitions (Spark): these live on, and each comes back at the epoch before which its own partitions are
done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dps.engine.controller.run import Run
from dps.engine.controller.work_leases import WorkLeases
from dps.engine.wire.journal_messages import RecordedRun
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, TrainerLostError

__all__ = ["advance", "begin_anew", "missing_for_too_long", "recorded", "restored", "surplus"]


def recorded(run: Run) -> RecordedRun:
    """The record of a run: all that the controller has decided about it."""
    leases = run.work_leases
    return RecordedRun(
        number=run.number,
        trainers=run.trainers,
        staleness=None if math.isinf(run.decided) else run.decided,
        start=run.start if leases is None else run.clock.minimum,
        origin=run.origin,
        partitions=run.partitions,
        elastic=run.elastic,
        warm_start=run.clock.warm_start,
        portions=(0, 0) if leases is None else (leases.origin, leases.total),
        rejoin=run.rejoin,
        reserved=run.reserved,
        attempts={n: r.attempt for n, r in sorted(run.records.items()) if r.attempt > run.presumed_attempt(n)},
        left=[] if run.elastic else run.left(),
        vacant=run.trainers - run.begun,
        reassign=run.reassign,
        lends=leases is not None and leases.lends,
    )


def restored(record: RecordedRun, now: float) -> Run:
    """The run of another controller, which waits for its trainers from `now` on."""
    bound = math.inf if record.staleness is None else record.staleness
    run = Run(record.number, record.trainers, bound, record.start, record.elastic, record.warm_start, record.vacant)
    run.origin, run.partitions = record.origin, record.partitions
    run.rejoin, run.reserved = record.rejoin, dict(record.reserved)
    if record.portions[0]:
        leases = WorkLeases(record.partitions, record.start, lambda count: record.portions[0], record.lends)
        run.lease_work(leases, record.reassign)
    run.wait_for_return(record.attempts, record.left, now)
    return run


def advance(run: Run, clocks: Mapping[int, int]) -> list[int]:
    """Note the clocks of the trainers' last ops, by origin. Returns the trainers whose wait is over."""
    released: list[int] = []
    for trainer in range(run.trainers):
        clock = clocks.get(run.origin + trainer)
        if clock is not None:
            released += run.clock.advance(trainer, clock)
    return released


def begin_anew(run: Run) -> SavedRun:
    """Let each trainer of an interrupted run begin as the next attempt; what a driver must know to start them."""
    if run.stopped is not None:
        raise InputError(f"run {run.number} has ended, so it cannot go on: {run.stopped}")
    if run.elastic:
        raise InputError(f"the trainers of run {run.number} come and go by themselves: there is nothing to resume")
    if run.taken_over is None:
        raise InputError(
            f"run {run.number} was not interrupted: only a run whose scheduler has died is resumed; see ps.status()"
        )
    if not run.partitions:
        raise InputError(
            f"run {run.number} was opened for several callers (ps.open_run): their trainers come back by themselves, "
            f"each under its name, and there is no data of which they had parts"
        )
    living = [n for n in range(run.trainers) if run.record(n).connection is not None]
    if living:
        places = ", ".join(f"{n} ({run.record(n).where})" for n in living[:5])
        raise InputError(
            f"run {run.number} cannot be resumed while {len(living)} of its {run.trainers} trainers live: {places}. "
            f"They go on by themselves; to resume the run, end their processes first"
        )
    run.expect_all()
    return run.saved(run.clock.minimum)


def missing_for_too_long(run: Run, now: float, seconds: float) -> TrainerLostError | None:
    """The error that ends an interrupted run in which trainers are back, and others are not within so many seconds."""
    if not (run.interrupted and run.connected) or run.taken_over is None or now - run.taken_over <= seconds:
        return None
    gone = ", ".join(map(str, sorted(run.missing)[:5]))
    return TrainerLostError(
        f"the scheduler of run {run.number} had died, and {len(run.missing)} of its trainers ({gone}) are not back "
        f"within {seconds:g} s (dps.scheduler.grace, dps.timeouts.rejoin); begin the run anew"
    )


def surplus(runs: Iterable[Run], left: int) -> list[Run]:
    """The oldest interrupted runs for which no trainer is at work, but for so many that are to be left."""
    waiting = [run for run in runs if run.interrupted and not run.active]
    return waiting[: max(0, len(waiting) - left)]
