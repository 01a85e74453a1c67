"""`ps.run`: one trainer for each free thread, all at once, each with its share of the partitions, where they lie.

All trainers of a run must be running at the same time, or those that wait for the others would wait for ever. So a
trainer is a task that lasts the whole run and takes several partitions, and there are never more of them than threads.
What becomes of the tasks is in `tasks.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from distributed import Client

from dps import config
from dps.client import Ticket
from dps.dask_side import ask_versions
from dps.errors import DPSError, InputError, TooFewWorkersError, by_name
from dps.training.data import ByPartition, Shares, by_partition, partitions
from dps.training.open_run import OpenRun, checked_bound
from dps.training.portions import Stock
from dps.training.progress import ProgressBar
from dps.training.tasks import Job, Seat, Stopped, Tasks, holders
from dps.training.threads import Threads

__all__ = ["begin", "check", "launch", "resumed"]

POLL = 0.05  # seconds between two looks at the trainers' tasks,
SHOW = 0.25  # at their clocks,
LOOK = 2.0  # and, while nobody is missing, at their workers
LATE = 1.0  # seconds that a trainer's own error may arrive after it has left

assignments = Shares()  # which trainer had which partitions, in all runs of this process


def launch(
    client: Client,
    ticket: Ticket,
    call: Callable[..., Any],
    function: Callable,
    data: Any,
    *,
    staleness: float | str,
    trainers: int | None,
    retries: int,
    args: tuple,
    kwargs: dict,
    progress: bool | None,
    resume: bool,
    restored: dict[str, Any] | None,
    within: OpenRun | None,
    reassign: bool,
    by: str,
) -> list[Any]:
    """Run `function` on trainers over `data`; what :meth:`dps.ParameterServer.run` does.

    `call` reaches the controller; `restored` is what there is to go on with.
    """
    rows, threads = partitions(client, data), Threads(call, client.id)
    tasks: Tasks | None = None
    run = 0

    def seen() -> dict[str, Any]:
        return json.loads(call("progress", run=run))

    def stop(reason: str) -> None:
        call("stop_run", run=run, reason=reason[:500])

    try:
        lying = holders(client, [list(row) for row in rows])
        shares = resumed(restored, trainers, len(rows), reassign) if resume else None
        count = trainers if shares is None else len(shares)
        places = threads.take(ticket.session, count, lying, config.seconds("join"))
        slots = [worker for worker, _ in places]
        ask_versions(client, sorted(set(slots)))
        keys = [[future.key for future in row] for row in rows]
        shares = shares or assignments.of(keys, lying, slots)
        parts = [[rows[n] if isinstance(data, tuple) else rows[n][0] for n in mine] for mine in shares]
        function = ByPartition(function) if by == "partition" else function
        run, first = begin(call, staleness, shares, resume, within, reassign)
        seats = [Seat(first + n, *seat) for n, seat in enumerate(zip(places, shares, parts, strict=True))]
        stock = Stock(keys, shares, isinstance(data, tuple)) if reassign else None
        tasks = Tasks(client, Job(ticket, run, function, args, kwargs, retries, stock), threads, seats)
        tasks.start()
        with ProgressBar(progress) as bar:
            watch(tasks, seen, stop, bar)
        results = [seat.result for seat in tasks.seats]
        return by_partition(results, shares) if by == "partition" else results
    except BaseException as error:
        if tasks is not None:
            text = f"the run was stopped: {error!r}"
            end(tasks, lambda: stop(text), seen)
        raise
    finally:
        threads.give_back(threads.keys)


def check(
    staleness: float | str,
    trainers: int | None,
    retries: int,
    resume: bool,
    within: OpenRun | None,
    reassign: bool = False,
    by: str = "trainer",
) -> None:
    """Refuse what no run can be asked for."""
    checked_bound(staleness)
    if by not in ("trainer", "partition"):
        raise InputError(f'results come by="trainer" or by="partition", not by={by!r}')
    if trainers is not None and (not isinstance(trainers, int) or isinstance(trainers, bool) or trainers < 1):
        raise InputError(f"trainers is 1 or more, or None for as many as there are threads, not {trainers!r}")
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise InputError(f"retries is 0 or more, not {retries!r}")
    if resume and within is not None:
        raise InputError("resume=True goes on with a run of one caller: it cannot be part of another (within=)")
    if reassign and within is not None:
        raise InputError("reassign=True leases the batches of one caller's data: it cannot be part of a run (within=)")


def start(call: Callable[..., Any], staleness: float | str, **fields: Any) -> int:
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


def begin(
    call: Callable[..., Any],
    staleness: float | str,
    shares: list[list[int]],
    resume: bool,
    within: OpenRun | None,
    reassign: bool = False,
) -> tuple[int, int]:
    """A run for so many trainers, or their part of one that is open: its number, and that of their first."""
    if within is not None:
        return within.number, within.reserve(len(shares))
    about = {"trainers": len(shares), "partitions": shares, "resume": resume, "reassign": reassign}
    return start(call, staleness, **about), 0


def resumed(
    restored: dict[str, Any] | None, trainers: int | None, partitions: int, reassign: bool = False
) -> list[list[int]]:
    """Which partitions each trainer had in the run that was restored."""
    if restored is None:
        raise InputError(
            "there is nothing to go on with: restore a checkpoint that was taken while one run went on, all its "
            "tables, and then begin with ps.run(..., resume=True)"
        )
    if (was := bool(restored.get("reassign"))) != reassign:
        raise InputError(
            f"the run that was restored had reassign={was}, and this one has reassign={reassign}: with it the clock "
            f"counts epochs, and without it batches; go on with reassign={was}"
        )
    before: list[list[int]] = restored["partitions"]
    for what, old, new in (
        ("trainers", len(before), len(before) if trainers is None else trainers),
        ("partitions", sum(map(len, before)), partitions),
    ):
        if old != new:
            raise InputError(
                f"the run that was restored has {old} {what}, and this one has {new}: each trainer goes on with its "
                f"own part of the same data"
            )
    return before


def watch(tasks: Tasks, progress: Callable[[], dict], stop: Callable[[str], None], bar: ProgressBar) -> None:
    """Wait for all trainers; raise the first one's own error."""
    began = looked = time.monotonic()
    shown = 0.0
    while not tasks.collect():
        if tasks.ended():
            raise_first(tasks, progress, stop)
        now = time.monotonic()
        if now - shown > SHOW:
            shown, seen = now, progress()
            bar.show(seen)
            if seen["stopped"] is not None:
                raise_first(tasks, progress, stop)
            joined = sum(seen["attempts"][seat.number] > 0 for seat in tasks.seats)
            late = joined < len(tasks.seats)
            if late or tasks.among(seen["lost"]) or now - looked > LOOK:
                looked = now
                tasks.look()
            if late and now - began > config.seconds("join"):
                missing = ", ".join(sorted({seat.worker for seat in tasks.seats if seat.status == "pending"}))
                raise TooFewWorkersError(
                    f"{joined} of {len(tasks.seats)} trainers have joined within {config.seconds('join'):g} s "
                    f"(dps.timeouts.join); their workers may be busy with other tasks, or gone: {missing}"
                )
        time.sleep(POLL)
    if tasks.ended():
        raise_first(tasks, progress, stop)
    bar.show(progress())


def raise_first(tasks: Tasks, progress: Callable[[], dict], stop: Callable[[str], None]) -> None:
    """Raise the error that began it: a trainer's own, or else why the run was stopped."""
    told = [seat.result.reason for seat in tasks.seats if isinstance(seat.result, Stopped)]
    stop(told[0] if told else "the run's tasks were cancelled, or lost with their workers; is the cluster still up?")
    until = time.monotonic() + config.seconds("stop")
    while True:
        tasks.own_error()
        seen = progress()
        if not tasks.among(seen["connected"]):
            until = min(until, time.monotonic() + LATE)  # nobody is left who could say more
        if time.monotonic() > until:
            break
        time.sleep(POLL)
    raise by_name(seen["error"])(seen["stopped"] + tasks.trouble())  # why it was stopped, first by whomsoever


def end(tasks: Tasks, stop: Callable[[], Any], progress: Callable[[], dict]) -> None:
    """Stop what still runs, and wait (not for ever) until no trainer is connected: then nobody pushes any more."""
    try:
        stop()
        tasks.cancel()
        until = time.monotonic() + config.seconds("stop")
        while tasks.among(progress()["connected"]) and time.monotonic() < until:
            time.sleep(POLL)
    except Exception:
        pass  # the first error is the one to raise
