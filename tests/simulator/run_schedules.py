"""Check many random schedules of faults, on all cores: ``python tests/simulator/run_schedules.py --help``.

Kinds of schedules: *faults* accounts for every op; *checkpoints* also takes and restores checkpoints; in *scaling*
servers come and go, and tables are made; *functions* is as *faults*, and half of the changes are calls of functions;
in *deletions* rows go, too, with and without checkpoints; in *ahead* trainers are given rows that were pulled ahead; in
*forgetting* rows go by themselves, and wait for their admission; in *takeovers* schedulers die, and the controllers of
others take over.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback

import dask
from ahead_schedules import check_ahead, check_cached
from checkpoint_schedules import check_checkpoints
from deletion_schedules import check_deletions
from fault_schedules import check_functions, check_schedule, problem_of
from forgetting_schedules import check_forgetting
from merged_schedules import check_merged
from scaling_schedules import check_scaling
from split_schedules import check_copies, check_kept, check_lists, check_merges, check_splits
from takeover_schedules import check_takeovers

KINDS = {
    "faults": check_schedule,
    "checkpoints": check_checkpoints,
    "scaling": check_scaling,
    "functions": check_functions,
    "deletions": check_deletions,
    "ahead": check_ahead,
    "cached": check_cached,
    "merged": check_merged,
    "kept": check_kept,
    "copies": check_copies,
    "lists": check_lists,
    "splits": check_splits,
    "merges": check_merges,
    "forgetting": check_forgetting,
    "takeovers": check_takeovers,
}
EVERY = {"faults": 1, "checkpoints": 4, "scaling": 4, "functions": 2, "deletions": 3, "ahead": 2}
EVERY |= {"cached": 2, "kept": 2, "copies": 2, "lists": 2, "splits": 2, "merges": 2}
EVERY |= {"forgetting": 2, "takeovers": 1, "merged": 2}  # one seed in so many
CHUNK_SCHEDULES = 20  # that a process is given at a time


def show(kind: str, seed: int) -> int:
    """Print everything that happens in one schedule."""
    try:
        KINDS[kind](seed)
    except Exception as error:
        print(*getattr(error, "trace", ()), sep="\n")
        traceback.print_exc(file=sys.stdout)
        return 1
    print(f"schedule {seed} is right")
    return 0


def prepare() -> None:
    """In each process: no logs, and no journal but where schedules ask for it, as in the tests."""
    logging.disable()
    dask.config.set({"dps.scheduler.grace": "0 s"})


def problem(job: tuple[str, int]) -> tuple[str, int, str | None]:
    """The schedule, and what is wrong in it or None."""
    kind, seed = job
    return (kind, *problem_of(seed, KINDS[kind]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Check many random schedules of faults.")
    parser.add_argument("--kind", choices=KINDS, help="only schedules of this kind, of each seed")
    parser.add_argument("--seed", type=int, default=0, help="the first schedule")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print everything that happens in one schedule")
    arguments = parser.parse_args()
    prepare()
    if arguments.trace is not None:
        return show(arguments.kind or "faults", arguments.trace)
    began, failures = time.perf_counter(), 0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    kinds = EVERY if arguments.kind is None else {arguments.kind: 1}
    jobs = [(kind, seed) for seed in seeds for kind, every in kinds.items() if seed % every == 0]
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, prepare) as pool:
        for kind, seed, wrong in pool.imap_unordered(problem, jobs, CHUNK_SCHEDULES):
            if wrong is not None:
                failures += 1
                repeat = f"python {__file__} --kind {kind} --trace {seed}"
                print(f"schedule {seed} of {kind}: {wrong}\n    repeat: {repeat}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{len(jobs)} schedules from {arguments.seed} in {seconds:.0f} s "
        f"({len(jobs) / seconds:.1f} a second), {failures or 'none'} failed"
    )
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
