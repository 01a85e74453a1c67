"""The data of `fit` as checked pieces, from Dask, from memory, from files or from Spark, and runs over them.

Pieces of Dask are futures on the workers that hold the data. Spark's are made on the executors that train on them, in
one Spark job: whole partitions go through Arrow to Python once, and become a trainer's pieces as they arrive. The
trainers gather the surveys of all pieces (`survey_of`) and send them to the driver, which makes the tables. For that,
the driver is a trainer of a second, small run, in which it meets the first trainer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as Outcome
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import dask
import numpy as np
from dask.distributed import Future

import dps
from dps.errors import ClockTimeoutError, DPSError, InputError, InputTypeError, StoppedError, TrainerLostError
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece, Survey, parts_of, piece_of, spark_parts, summary, survey_of
from dps.models.inputs.files import files_of
from dps.models.inputs.notes import from_plain, to_plain
from dps.models.inputs.source import SparkParts, is_path, release, turns, without_errors
from dps.models.types import Check, Features, Labels, Part, Source
from dps.spark import is_spark

__all__ = ["Pieces", "Surveys", "checked", "pieces_of"]

T = TypeVar("T")

POLL_SECONDS = 0.05  # between two checks whether the first trainer has joined its run
Surveys = Callable[[], list[Survey]]  # the surveys of all pieces


def pieces_of(
    ps: dps.ParameterServer,
    data: tuple[Features, Labels, Labels],
    layout: Layout | None,
    bits: int,
    seed: int | None,
    by_field: bool = False,
    n_fields: int | None = None,
    labelled: bool = True,
    words: dps.WordTable | None = None,
) -> Pieces:
    """The data of `fit`, (X, y, sample_weight), from Dask, from memory, from Spark or from files.

    Pieces are encoded, checked and shuffled. If there is a `layout`, they must have it. With `by_field`, the features
    of frames are numbered by their columns, as `encode_frame` does; `n_fields` is the number of fields of libffm's
    files. If not `labelled`, y is None, and the labels of all pieces are 0. `words` number the features of frames, in
    place of hashes.
    """
    if labelled and is_path(data[0]):
        if data[2] is not None:
            raise InputTypeError("of files, sample_weight is None; partitions (X, y, sample_weight) have weights")
        data = files_of(*data[:2], bits, n_fields), None, None
    parts: SparkParts | Sequence[Part]
    if is_spark(data[0]):
        parts = spark_parts(data, labelled)
    else:
        parts, seed = parts_of(ps, data, labelled, seed)
    check = functools.partial(
        piece_of, layout=layout, bits=bits, seed=seed, by_field=by_field, labelled=labelled, words=words
    )
    return checked(ps, parts, check)


def checked(ps: dps.ParameterServer, parts: SparkParts | Sequence[Part], check: Check) -> Pieces:
    """What a check makes of each part. Parts of Dask are futures, delayed values, or tuples of them."""
    return SparkPieces(ps, parts, check) if isinstance(parts, SparkParts) else DaskPieces(ps, parts, check)


class Pieces:
    """Parts of Dask or of Spark that are checked, where they lie."""

    data: Source  # for `ps.run`, whose partitions they are

    def surveys(self) -> list[Survey]:
        return self.mapped(survey_of)

    @abstractmethod
    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        """What `function` makes of each piece; it runs where the pieces are."""

    @abstractmethod
    def converted(self, function: Callable, *arguments: object) -> AbstractContextManager[Source]:
        """Data for `ps.run`, whose partitions are ``function(piece, *arguments)``."""

    @abstractmethod
    def train(
        self, plan: Callable[[Surveys], object], function: Callable, *, staleness: float, progress: bool | None
    ) -> list[tuple]:
        """Call ``function(trainer, pieces, plan(surveys))`` on the trainers of a run; `plan` may call `surveys`."""

    @abstractmethod
    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        """Call ``function(trainer, pieces, plan)`` on the trainers of a run, with a plan that needs no surveys."""

    def close(self) -> None:
        """Release what Dask holds for the pieces."""


class DaskPieces(Pieces):
    """Data of Dask or from memory: futures of what a check makes of each part, on the workers that hold the data."""

    def __init__(self, ps: dps.ParameterServer, parts: Sequence[Part], check: Check):
        self._ps, self._client = ps, ps.dask_client
        numbers = range(len(parts))
        if all(isinstance(part, Future) for part in parts):
            self.data = ps.map_scattered(functools.partial(_numbered, check=check), parts, numbers)
        else:
            made = [dask.delayed(check, pure=False)(number, part) for number, part in zip(numbers, parts, strict=True)]
            self.data = self._client.compute(made)

    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        notes = self._client.map(function, self.data, pure=False)
        try:
            return self._client.gather(notes)
        finally:
            release(notes)

    def train(
        self,
        plan: Callable[[Surveys], object],
        function: Callable,
        *,
        staleness: float,
        progress: bool | None,
    ) -> list[tuple]:
        with turns(self._ps, self.data):
            args = (plan(self.surveys),)
            return self._ps.run(function, self.data, args=args, staleness=staleness, progress=progress)

    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        with turns(self._ps, self.data):
            return self._ps.run(function, self.data, args=(plan,), staleness=staleness, progress=progress)

    @contextlib.contextmanager
    def converted(self, function: Callable, *arguments: object) -> Iterator[list[Future]]:
        """Futures of ``function(piece, *arguments)``, while no other fit trains in this cluster."""
        with turns(self._ps, self.data):
            columns = ([each] * len(self.data) for each in arguments)
            futures = self._ps.map_scattered(function, self.data, *columns)
            try:
                yield futures
            finally:
                release(futures)

    def close(self) -> None:
        release(self.data)


def _numbered(part: Part, number: int, check: Check) -> Piece:
    return check(number, part)


class SparkPieces(Pieces):
    """Data of Spark, which each run reads."""

    def __init__(self, ps: dps.ParameterServer, parts: SparkParts, check: Check):
        self._ps, self._parts, self._check = ps, parts, check
        self.data = parts.checked(check)

    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        """What `function` makes of each piece; it runs on the executors."""
        made = self._ps.run(_mapped, self.data, args=(function,), staleness=math.inf, progress=False)
        notes = [note for each in made for note in each]
        if not notes:
            raise InputError("X has 0 rows: there is nothing to learn from")
        return notes

    @contextlib.contextmanager
    def converted(self, function: Callable, *arguments: object) -> Iterator[Features]:
        """Spark's data whose partitions a trainer reads as ``function(piece, *arguments)``."""
        read = functools.partial(
            _converted, read=self._parts.reader(self._check), function=function, arguments=arguments
        )
        yield dps.spark.read_with(self._parts.data, read)

    def train(
        self,
        plan: Callable[[Surveys], object],
        function: Callable,
        *,
        staleness: float,
        progress: bool | None,
    ) -> list[tuple]:
        """Call ``function(trainer, pieces, plan(surveys))`` on the trainers of a run; the driver calls `plan`."""
        planned: Outcome | None = None
        with ThreadPoolExecutor(1, "dps-plan") as threads:
            try:
                with self._ps.open_run(trainers=2) as meeting:  # of the driver and the first trainer
                    planned = threads.submit(_planned, self._ps, meeting, plan)
                    return self._ps.run(
                        _surveyed, self.data, args=(meeting, function), staleness=staleness, progress=progress
                    )
            except DPSError:
                wrong = None if planned is None else planned.exception()  # its thread ended with the run
                if wrong is not None and not isinstance(wrong, (StoppedError, TrainerLostError)):
                    raise wrong from None  # because this error has stopped the trainers
                raise

    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        return self._ps.run(_with_rows, self.data, args=(plan, function), staleness=staleness, progress=progress)


def _converted(number: int, records: Iterable, read: Callable, function: Callable, arguments: tuple) -> Part:
    """What a function makes of the piece of a partition; of an empty one, a part without rows."""
    piece = read(number, records)
    if isinstance(piece, DPSError):
        raise piece
    if piece is None:
        return np.zeros((0, 1)), np.zeros(0), None
    return function(piece, *arguments)


# -- the trainers' side, and the driver's part of it


def _mapped(trainer: dps.Trainer, partitions: list[Part], function: Callable) -> list:
    return [function(piece) for piece in without_errors(partitions)]


def _with_rows(trainer: dps.Trainer, partitions: list[Part], plan: object, function: Callable) -> tuple:
    """Wait until all trainers have read their pieces, and train if any of them has rows."""
    pieces = without_errors(partitions)
    if not sum(_gathered(trainer, [len(piece.labels) for piece in pieces])):
        raise InputError("X has 0 rows: there is nothing to learn from")
    return function(trainer, pieces, plan)


def _surveyed(trainer: dps.Trainer, partitions: list[Part], meeting: dps.OpenRun, function: Callable) -> tuple:
    """Survey the pieces with the other trainers, get the driver's plan, and train."""
    pieces = without_errors(partitions)
    surveys = _gathered(trainer, [summary([survey_of(piece) for piece in pieces])] if pieces else [])
    plans: list[object] = []
    if trainer.number == 0:
        with meeting.trainer("trainer", trainer.attempt) as me:
            _gathered(me, surveys)
            plans = _gathered(me, [])
    (plan,) = _gathered(trainer, plans)
    return function(trainer, pieces, plan)


def _planned(ps: dps.ParameterServer, meeting: dps.OpenRun, plan: Callable[[Surveys], object]) -> None:
    """The driver's part: receive the surveys from the first trainer, send it the plan."""
    try:
        while not _begun(ps, meeting):  # because with aggregating tables no run begins while another one goes on
            time.sleep(POLL_SECONDS)
        with meeting.trainer("driver") as me:
            surveys: list[Survey] = _gathered(me, [])
            if not surveys:
                raise InputError("X has 0 rows: there is nothing to learn from")
            _gathered(me, [plan(lambda: surveys)])
    except BaseException:
        with contextlib.suppress(DPSError):  # the first error counts
            meeting.close()  # because the first trainer would wait for ever in it
        raise


def _begun(ps: dps.ParameterServer, meeting: dps.OpenRun) -> bool:
    """Whether the first trainer has joined the run, or never will."""
    progress = meeting.progress()
    return bool(progress.connected) or progress.stopped is not None


def _gathered(trainer: dps.Trainer, brought: list[T]) -> list[T]:
    """The items that all trainers of a run bring, on each of them.

    Spark may read and queue for longer than the controller lets a trainer wait for the others, so a trainer whose time
    is over asks again. A run that fails ends this.
    """
    while True:
        try:
            notes = trainer.allgather([to_plain(each) for each in brought])
        except ClockTimeoutError:
            continue
        return [cast(T, from_plain(each)) for note in notes for each in note]
