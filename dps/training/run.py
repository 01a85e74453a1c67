"""`ps.run`: one trainer for each free thread, all at once, each with its share of the partitions, where they lie.

All trainers of a run must be running at the same time, or those that wait for the others would wait for ever. So a
trainer is a task that lasts the whole run and takes several partitions, and there are never more of them than threads.
"""

from __future__ import annotations

import json
import math
import numbers
import time
import uuid
from collections.abc import Callable
from typing import Any

from distributed import Client, Future, get_worker

from dps import config
from dps.client import Ticket
from dps.errors import InputError, StoppedError, TooFewWorkersError, by_name
from dps.training.data import partitions, share
from dps.training.progress import ProgressBar
from dps.training.trainer import Trainer

__all__ = ["launch"]

POLL = 0.05  # seconds between two looks at the trainers' tasks
SHOW = 0.25  # seconds between two looks at their clocks
LATE = 1.0  # seconds that a trainer's own error may arrive after it has left


def train(ticket: Ticket, run: int, number: int, function: Callable, args: tuple, kwargs: dict, parts: list) -> Any:
    """The task of one trainer: join, call the user's function, leave."""
    worker = get_worker()
    key = worker.get_current_task()
    state = worker.state.tasks[key]

    def cancelled() -> bool:  # the scheduler took the task back: the thread must end by itself
        return state.state != "executing" and state.state != "long-running"

    trainer = Trainer(ticket, run, number, state.run_id, worker.address, cancelled)
    try:
        result = function(trainer, parts, *args, **kwargs)
        trainer.leave()
        return result
    except BaseException as error:
        try:
            trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
        except Exception:
            pass  # the run is over, or the controller is: what counts is the user's own error
        raise
    finally:
        trainer.close()


def launch(
    client: Client,
    ticket: Ticket,
    call: Callable[..., Any],
    serving: set[str],
    function: Callable,
    data: Any,
    *,
    staleness: float,
    trainers: int | None,
    args: tuple,
    kwargs: dict,
    progress: bool | None,
) -> list[Any]:
    """Run `function` on trainers over `data`; what :meth:`dps.ParameterServer.run` does.

    `call` reaches the controller, `serving` are the workers that trainers must keep off.
    """
    whole = isinstance(staleness, numbers.Real) and staleness >= 0 and staleness in (math.inf, staleness // 1)
    if not whole or isinstance(staleness, bool):
        raise InputError(f"staleness is 0, 1, 2, ... or math.inf, not {staleness!r}")
    if trainers is not None and (not isinstance(trainers, int) or isinstance(trainers, bool) or trainers < 1):
        raise InputError(f"trainers is 1 or more, or None for as many as there are threads, not {trainers!r}")
    rows = partitions(client, data)
    slots = free_slots(client, serving, ticket.session)
    if trainers is not None and trainers > len(slots):
        raise TooFewWorkersError(
            f"{trainers} trainers asked for and {len(slots)} threads are free for them: all trainers of a run must "
            f"run at once; add workers or threads, or ask for fewer"
        )
    holding = client.who_has([future for row in rows for future in row])
    holders = [[w for future in row for w in holding.get(future.key, ())] for row in rows]
    slots = spread(slots, holders, min(trainers or len(slots), len(rows)))
    shares = share(holders, slots)
    run = call("start_run", trainers=len(slots), staleness=None if math.isinf(staleness) else int(staleness))
    futures: list[Future] = []
    tag = uuid.uuid4().hex[:8]  # no task of an earlier session of that name may be taken for ours

    def seen() -> dict[str, Any]:
        return json.loads(call("progress", run=run))

    try:
        for number, (worker, mine) in enumerate(zip(slots, shares, strict=True)):
            parts = [rows[n][0] if not isinstance(data, tuple) else rows[n] for n in mine]
            key = f"dps-train-{ticket.session}-{run}-{number}-{tag}"
            task = (ticket, run, number, function, args, kwargs, parts)
            futures.append(client.submit(train, *task, workers=[worker], key=key, pure=False, retries=0, priority=100))
        with ProgressBar(progress) as bar:
            watch(futures, seen, bar, slots)
        return client.gather(futures)
    except BaseException as error:
        text = f"the run was stopped: {error!r}"[:500]
        end(client, futures, lambda: call("stop_run", run=run, reason=text), seen)
        raise


def free_slots(client: Client, serving: set[str], session: str) -> list[str]:
    """For each thread that can take a trainer, its worker: the first threads of all workers before the second ones."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    busy = client.processing()
    free = {
        address: info["nthreads"] - len(busy.get(address, ()))
        for address, info in workers.items()
        if address not in serving and not info.get("resources", {}).get("dps")
    }
    slots = [address for turn in range(max(free.values(), default=0)) for address in free if free[address] > turn]
    if not slots:
        raise TooFewWorkersError(
            f"no thread is free for trainers of parameter server {session!r}: {len(workers)} workers, {len(serving)} "
            f"of them servers, {sum(map(len, busy.values()))} tasks running; add workers, or wait for the tasks to end"
        )
    return slots


def spread(slots: list[str], holders: list[list[str]], count: int) -> list[str]:
    """The `count` slots to use, those on workers that hold data first."""
    held = {worker for workers in holders for worker in workers}
    return sorted(slots, key=lambda worker: worker not in held)[:count]


def watch(futures: list[Future], progress: Callable[[], dict], bar: ProgressBar, slots: list[str]) -> None:
    """Wait for all trainers; raise the first one's own error."""
    began, shown = time.monotonic(), 0.0
    while True:
        states = [future.status for future in futures]
        if all(state == "finished" for state in states):
            bar.show(progress())
            return
        if any(state in ("error", "cancelled", "lost") for state in states):
            raise_first(futures, progress)
        now = time.monotonic()
        if now - shown > SHOW:
            shown, seen = now, progress()
            bar.show(seen)
            if seen["joined"] < len(futures) and now - began > config.seconds("join"):
                missing = ", ".join(sorted({slots[n] for n, state in enumerate(states) if state == "pending"}))
                raise TooFewWorkersError(
                    f"{seen['joined']} of {len(futures)} trainers have joined within {config.seconds('join'):g} s "
                    f"(dps.timeouts.join); their workers may be busy with other tasks, or gone: {missing}"
                )
            if seen["stopped"] is not None:
                raise_first(futures, progress)
        time.sleep(POLL)


def raise_first(futures: list[Future], progress: Callable[[], dict]) -> None:
    """Raise the error that began it: not one that only says another trainer failed."""
    until = time.monotonic() + config.seconds("vanish") + config.seconds("stop")
    while True:
        failed = [future for future in futures if future.status == "error"]
        for future in failed:
            if not isinstance(future.exception(), StoppedError):
                future.result()
        seen = progress()
        if not seen["connected"] and not (seen["lost"] and seen["stopped"] is None):
            until = min(until, time.monotonic() + LATE)  # nobody is left who could say more
        if time.monotonic() > until:
            break
        time.sleep(POLL)
    for future in failed:
        future.result()
    if seen["stopped"] is not None:
        raise by_name(seen["error"])(seen["stopped"])
    raise StoppedError("the run's tasks were cancelled, or lost with their workers; is the cluster still up?")


def end(client: Client, futures: list[Future], stop: Callable[[], Any], progress: Callable[[], dict]) -> None:
    """Stop what still runs, and wait (not for ever) until no trainer is connected: then nobody pushes any more."""
    try:
        stop()
        client.cancel([future for future in futures if future.status == "pending"])
        until = time.monotonic() + config.seconds("stop")
        while progress()["connected"] and time.monotonic() < until:
            time.sleep(POLL)
    except Exception:
        pass  # the first error is the one to raise
