"""InterruptedRuns: the runs of a controller that has died, in the controller that took over.

`run_records.py` has the rules for one run. Everything here happens in the thread of the controller's endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from dps.engine.controller.run import Run
from dps.engine.controller.run_records import advance, begin_anew, restored
from dps.engine.controller.runs import Runs
from dps.engine.wire.journal_messages import RecordedRun
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, StoppedError

__all__ = ["InterruptedRuns"]


class InterruptedRuns:
    """The runs among `runs` that the dead controller had begun."""

    def __init__(self, runs: Runs):
        self._runs = runs

    def resume(self, next_origin: int, records: Iterable[RecordedRun]) -> None:
        """Go on after another controller: with its runs. It may have given out all origins before this one."""
        origins = self._runs.origins
        origins.given = max(origins.given, next_origin)
        for record in records:
            run = self._runs.runs[record.number] = restored(record, self._runs.now())
            if not run.elastic and run.stopped is None:
                text = f"run {run.number} was interrupted by the death of its scheduler: its trainers come back, or"
                self._runs.note(f"{text} ps.resume_run begins them anew", stands=partial(waits, run))

    def origins(self) -> list[list[int]]:
        """[first origin, how many] of the trainers whose clocks the ledgers of the shards may know better."""
        return [[run.origin, run.trainers] for run in self._going()]

    def advance(self, clocks: Mapping[int, int]) -> None:
        """Note the clocks of the last ops of trainers, by origin."""
        for run in self._going():
            self._runs.release(run, advance(run, clocks))

    def choose(self, number: int = 0) -> int:
        """The number of a run that may be begun anew; by default (0) of the only one."""
        if number:
            return self._runs.known(number).number
        found = [run for run in self._going() if not run.elastic and (run.interrupted or not run.connected)]
        if len(found) != 1:
            several = f"runs {[run.number for run in found]} were: name one with run="
            which = several if found else "ps.run begins one"
            raise InputError(f"no single run of parameter server {self._runs.session!r} was interrupted; {which}")
        return found[0].number

    def end(self, why: str) -> None:
        """End the interrupted runs for which no trainer is at work."""
        for run in self._going():
            if not run.elastic and not run.connected:
                self._runs.stop(run.number, StoppedError(f"run {run.number}, whose scheduler had died, ended: {why}"))

    def wait(self) -> bool:
        """Whether there are runs that go on, or may."""
        return any(not run.elastic for run in self._going())

    def is_at_work(self, number: int) -> bool:
        """Whether trainers of a run are connected."""
        return self._runs.known(number).connected > 0

    def begin_anew(self, number: int) -> SavedRun:
        """Let all trainers of a run begin as next attempts; what a driver must know to start them."""
        return begin_anew(self._runs.known(number))

    def _going(self) -> list[Run]:
        return [run for run in self._runs.runs.values() if run.taken_over is not None and not run.over]


def waits(run: Run) -> bool:
    """Whether trainers of the controller before are missing."""
    return run.interrupted
