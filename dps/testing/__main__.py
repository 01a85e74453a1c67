"""Many schedules: ``python -m dps.testing``, see ``--help``."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
import traceback

from dps.testing.schedules import check_schedule, problem_of

CHUNK = 20  # schedules that a process is given at a time


def show(seed: int) -> int:
    """One schedule with all that happened."""
    try:
        check_schedule(seed)
    except Exception as error:
        print(*getattr(error, "trace", ()), sep="\n")
        traceback.print_exc(file=sys.stdout)
        return 1
    print(f"schedule {seed} is right")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dps.testing", description="Check many random schedules.")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=1000, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--trace", type=int, metavar="SEED", help="show what happens in one schedule")
    wish = parser.parse_args()
    logging.disable()
    if wish.trace is not None:
        return show(wish.trace)
    began, failures = time.perf_counter(), 0
    seeds = range(wish.seed, wish.seed + wish.count)
    context = multiprocessing.get_context("spawn")
    with context.Pool(wish.jobs, logging.disable) as pool:
        for seed, problem in pool.imap_unordered(problem_of, seeds, CHUNK):
            if problem is not None:
                failures += 1
                print(f"schedule {seed}: {problem}\n    repeat: python -m dps.testing --trace {seed}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{wish.count} schedules from {wish.seed} in {seconds:.0f} s ({wish.count / seconds:.1f} a second), "
        f"{failures or 'none'} failed"
    )
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
