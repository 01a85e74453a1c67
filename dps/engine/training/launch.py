"""`ps.run`: one trainer for each free thread, all at once, each with its share of the partitions, where they lie.

All trainers of a run must be running at the same time, or those that wait for the others would wait for ever. So a
trainer is a task that lasts the whole run and takes several partitions, and there are never more of them than threads.
What becomes of the tasks is in `tasks.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from distributed import Client

from dps import config
from dps.engine.client.client import Ticket
from dps.engine.daskapi.processes import check_versions_of
from dps.engine.telemetry.snapshot import RunStatus, TrainerPhase
from dps.engine.training.data import ByPartition, Partitions, Shares, by_partition
from dps.engine.training.leased_batches import FetchablePartitions
from dps.engine.training.open_run import OpenRun, checked_bound
from dps.engine.training.progress_bar import ProgressBar
from dps.engine.training.tasks import Stopped, Tasks, TrainerJob, TrainerTask, holders
from dps.engine.training.threads import Threads
from dps.engine.training.types import Control, Result
from dps.engine.training.vacancies import SPARE_SEATS, Vacancies
from dps.engine.wire.messages import InterruptedRun, SavedRun
from dps.errors import DPSError, InputError, TooFewWorkersError, by_name, told

__all__ = ["RunOptions", "begin", "checked_reassign", "launch", "resumed", "resuming"]

POLL_SECONDS = 0.05  # between two looks at the trainers' tasks, once a run is a second old,
SHOW_SECONDS = 0.25  # at their clocks,
LOOK_SECONDS = 2.0  # and, while no trainer is missing, at their workers
LATE_SECONDS = 1.0  # that a trainer's own error may arrive after it has left

assignments = Shares()  # which trainer had which partitions, in all runs of this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the caller of a run may choose: the keyword parameters of :meth:`dps.ParameterServer.run`, which documents
    them. They are checked here, before anything is started."""

    staleness: float | str = 0
    trainers: int | str | None = None
    retries: int = 0
    args: tuple = ()
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    progress: bool | None = None
    resume: bool = False
    run: OpenRun | None = None
    reassign: bool | str = False
    by: str = "trainer"
    warm_start: int = 0
    interrupted: int = 0  # the run whose scheduler has died, and which goes on; 0: none

    def __post_init__(self) -> None:
        trainers, retries = self.trainers, self.retries
        if self.grows:
            self._check_growing()
            trainers = None
        checked_bound(self.staleness)
        checked_reassign(self.reassign)
        if self.by not in ("trainer", "partition"):
            raise InputError(f'results come by="trainer" or by="partition", not by={self.by!r}')
        if trainers is not None and (not isinstance(trainers, int) or isinstance(trainers, bool) or trainers < 1):
            raise InputError(
                f'trainers is 1 or more, "all", or None for as many as there are threads, not {told(trainers)}'
            )
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise InputError(f"retries is 0 or more, not {told(retries)}")
        warm = self.warm_start
        if not isinstance(warm, int) or isinstance(warm, bool) or warm < 0:
            raise InputError(f"warm_start is a number of clocks, 0 or more, not {told(warm)}")
        if warm and (self.run is not None or self.reassign):
            raise InputError("warm_start= counts the batches of one caller's trainers: leave out run= and reassign=")
        if self.resume and self.run is not None:
            raise InputError("resume=True goes on with a run of one caller: it cannot be part of another (run=)")
        if self.reassign and self.run is not None:
            raise InputError("reassign=True leases the batches of one caller's data: it cannot be part of a run (run=)")

    def _check_growing(self) -> None:
        if self.run is not None:
            raise InputError('trainers="all" is for a run of one caller: it cannot be part of a run (run=)')
        if self.reassign is not True:
            raise InputError('trainers="all": others do the work of a trainer that is gone, so say reassign=True, too')
        if self.by == "partition":
            raise InputError(
                'trainers="all": a trainer that is gone has no results, so they cannot come by="partition"'
            )

    @property
    def is_leased(self) -> bool:
        """Whether the batches are leased to the trainers, so that the clock counts epochs."""
        return self.reassign is not False

    @property
    def grows(self) -> bool:
        """Whether trainers may join the run while it goes on."""
        return isinstance(self.trainers, str) and self.trainers == "all"

    @property
    def count(self) -> int | None:
        """With how many trainers the run is to begin; None: as many as there are threads."""
        return None if isinstance(self.trainers, str) else self.trainers

    def wrapped(self, function: Callable) -> Callable:
        return ByPartition(function) if self.by == "partition" else function

    def listed(self, results: list[Result], shares: list[list[int]]) -> list[Result]:
        return by_partition(results, shares) if self.by == "partition" else results


def launch(
    client: Client,
    ticket: Ticket,
    call: Control,
    function: Callable,
    data: Partitions,
    options: RunOptions,
    restored: SavedRun | None,
    term: int,
) -> list[Result]:
    """Run `function` on trainers over `data`; what :meth:`dps.ParameterServer.run` does.

    `call` reaches the controller, whose term this is; `restored` is what there is to go on with.
    """
    threads = Threads(call, client.id)
    tasks: Tasks | None = None
    run = 0

    def seen() -> RunStatus:
        return msgspec.msgpack.decode(call("progress", run=run), type=RunStatus)

    def stop(reason: str) -> None:
        call("stop_run", run=run, reason=reason[:500])

    try:
        lying = holders(client, [list(row) for row in data.rows])
        shares = resumed(restored, options, len(data.rows)) if options.resume else None
        count = options.count if shares is None else len(shares)
        places = threads.take(ticket.session, count, lying, config.seconds("join"))
        slots = [worker for worker, _ in places]
        check_versions_of(client, sorted(set(slots)))
        shares = shares or assignments.of(data.keys, lying, slots)
        parts = [data.taken(mine) for mine in shares]
        vacant = vacant_seats(len(shares), options, restored)
        run, first = begin(call, shares, options, vacant)
        seats = [TrainerTask(first + n, *seat) for n, seat in enumerate(zip(places, shares, parts, strict=True))]
        every_seat = [*shares, *([] for _ in range(vacant))]
        stock = FetchablePartitions(data.keys, every_seat, data.paired) if options.is_leased else None
        vacancies = Vacancies(call, run, len(shares), len(every_seat)) if vacant else None
        called = options.wrapped(function), options.args, dict(options.kwargs), options.retries, stock, term
        tasks = Tasks(client, TrainerJob(ticket, run, *called), threads, seats, seen, vacancies)
        tasks.start()
        with ProgressBar(options.progress) as bar:
            watch(tasks, seen, stop, bar)
        return options.listed(tasks.results(), shares)
    except BaseException as error:
        if tasks is not None:
            text = f"the run was stopped: {error!r}"
            end(tasks, lambda: stop(text), seen)
        raise
    finally:
        threads.give_back(threads.keys)


def start(call: Control, staleness: float | str, **fields: Any) -> int:
    """A new run; its number. With "auto" it begins with a staleness of 1."""
    bound = checked_bound(staleness)
    run: int = call("start_run", staleness=1 if bound == "auto" else bound, **fields)
    if bound == "auto":
        try:
            call("set_staleness", staleness="auto", run=run)
        except DPSError:
            call("end_run", run=run)
            raise
    return run


def checked_reassign(value: object) -> bool | str:
    """Whether trainers do work of others: from the beginning, never, or ("auto") from when one of them is slow."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value
    raise InputError(f'reassign is True, False or "auto", not {told(value)}')


def vacant_seats(trainers: int, options: RunOptions, restored: SavedRun | None) -> int:
    """How many seats a run has for trainers that come later; one that goes on has as many as before."""
    if not options.grows:
        return 0
    return restored.vacant if options.resume and restored is not None else trainers + SPARE_SEATS


def begin(
    call: Control, shares: list[list[int]], options: RunOptions, vacant: int = 0, lends: bool = False
) -> tuple[int, int]:
    """A run for so many trainers, or their part of one that is open: its number, and that of their first.

    With `lends`, trainers whose work is leased fetch partitions from each other.
    """
    if options.interrupted:
        return options.interrupted, 0
    if options.run is not None:
        return options.run.number, options.run.reserve(len(shares))
    every_seat = [*shares, *([] for _ in range(vacant))]
    fields = {"trainers": len(every_seat), "partitions": every_seat, "vacant": vacant}
    fields |= {"resume": options.resume, "reassign": options.reassign, "warm_start": options.warm_start}
    if lends and options.is_leased:
        fields["lends"] = True
    return start(call, options.staleness, **fields), 0


def resuming(call: Control, run: int | None, chosen: RunOptions) -> tuple[RunOptions, SavedRun]:
    """Take up the interrupted run of that number, or the only one: its options, and what there is to go on with."""
    if run is not None and (not isinstance(run, int) or isinstance(run, bool) or run < 1):
        raise InputError(f"run is the number of a run, or None for the only one that was interrupted, not {told(run)}")
    found = msgspec.msgpack.decode(call("resume_run", run=run or 0), type=InterruptedRun)
    saved, number = found.saved, found.number
    trainers = "all" if saved.vacant else None
    options = dataclasses.replace(chosen, resume=True, reassign=saved.reassign, trainers=trainers)
    return dataclasses.replace(options, warm_start=saved.warm_start, interrupted=number), saved


def resumed(restored: SavedRun | None, options: RunOptions, partitions: int) -> list[list[int]]:
    """Which partitions each trainer had in the run that was restored; `partitions` is how many the data has now."""
    trainers, reassign = options.count, options.is_leased
    if restored is None:
        raise InputError(
            "there is nothing to go on with: restore a checkpoint that was taken while one run went on, all its "
            "tables, and then begin with ps.run(..., resume=True)"
        )
    if (was := restored.reassign) != reassign:
        raise InputError(
            f"the run to go on with had reassign={was}, and this one has reassign={options.reassign}: with it the "
            f'clock counts epochs, and without it batches; go on with reassign={was}, or with "auto" for True'
        )
    if restored.warm_start != options.warm_start:
        raise InputError(
            f"the run to go on with had warm_start={restored.warm_start}, and this one has "
            f"warm_start={options.warm_start}: trainers would pass over other batches; say the same"
        )
    if (grew := restored.vacant > 0) != options.grows:
        raise InputError(
            f'the run to go on with was begun {"with" if grew else "without"} trainers="all": go on in the same way'
        )
    before = restored.partitions[: restored.trainers - restored.vacant]
    for what, old, new in (
        ("trainers", len(before), len(before) if trainers is None else trainers),
        ("partitions", sum(map(len, before)), partitions),
    ):
        if old != new:
            raise InputError(
                f"the run to go on with has {old} {what}, and this one has {new}: each trainer goes on with its "
                f"own part of the same data"
            )
    return before


def watch(tasks: Tasks, progress: Callable[[], RunStatus], stop: Callable[[str], None], bar: ProgressBar) -> None:
    """Wait for all trainers; raise the first one's own error."""
    began = looked = time.monotonic()
    shown = 0.0
    while not tasks.collect():
        if tasks.ended():
            raise_first(tasks, progress, stop)
        now = time.monotonic()
        if now - shown > SHOW_SECONDS:
            shown, seen = now, progress()
            bar.show(seen)
            if seen.stopped is not None:
                raise_first(tasks, progress, stop)
            tasks.dismiss_late(seen)
            first = [seat for seat in tasks.seats if not seat.is_late]
            joined = sum(seen.trainers[seat.number].state is not TrainerPhase.EXPECTED for seat in first)
            late = joined < len(first)
            if late or tasks.among(seen.lost) or now - looked > LOOK_SECONDS:
                looked = now
                tasks.look()
            if late and now - began > config.seconds("join"):
                missing = ", ".join(sorted({seat.worker for seat in tasks.seats if seat.status == "pending"}))
                raise TooFewWorkersError(
                    f"{joined} of {len(first)} trainers have joined within {config.seconds('join'):g} s "
                    f"(dps.timeouts.join); their workers may be busy with other tasks, or gone: {missing}"
                )
        time.sleep(min(POLL_SECONDS, max(now - began, 0.02) / 20))  # a run is known to be over soon after its end
    if tasks.ended():
        raise_first(tasks, progress, stop)
    bar.show(progress())


def raise_first(tasks: Tasks, progress: Callable[[], RunStatus], stop: Callable[[str], None]) -> None:
    """Raise the error that began it: a trainer's own, or else why the run was stopped."""
    told = [seat.result.reason for seat in tasks.seats if isinstance(seat.result, Stopped)]
    stop(told[0] if told else "the run's tasks were cancelled, or lost with their workers; is the cluster still up?")
    until = time.monotonic() + config.seconds("stop")
    while True:
        tasks.own_error()
        seen = progress()
        if not tasks.among(seen.connected):
            until = min(until, time.monotonic() + LATE_SECONDS)  # no trainer is left that could say more
        if time.monotonic() > until:
            break
        time.sleep(POLL_SECONDS)
    raise by_name(str(seen.stopped_by))(f"{seen.stopped}{tasks.trouble()}")  # why it was stopped, first by whomsoever


def end(tasks: Tasks, stop: Callable[[], None], progress: Callable[[], RunStatus]) -> None:
    """Stop what still runs, and wait (not for ever) until no trainer is connected, because then none pushes any
    more."""
    try:
        stop()
        tasks.cancel()
        until = time.monotonic() + config.seconds("stop")
        while tasks.among(progress().connected) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
    except Exception:
        pass  # the first error is the one to raise
