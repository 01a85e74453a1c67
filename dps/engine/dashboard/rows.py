"""Rows: the tables and runs of a status, as the values that the notebook's templates and the terminal show."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from dps.engine.dashboard.text import learning_curve, size_text
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.snapshot import (
    PARTS,
    RunStatus,
    Straggler,
    TableStatus,
    TimeSplit,
    TrainerPhase,
    TrainerStatus,
)

__all__ = [
    "MAX_ROWS",
    "RunRow",
    "TableRow",
    "TrainerRow",
    "run_row",
    "shares_of",
    "summary",
    "table_row",
    "trainer_text",
]

MAX_ROWS = 24  # servers, tables, trainers or events that a notebook lists


class TableRow(NamedTuple):
    """A table, as text."""

    name: str
    keys: str
    row: str
    optimizer: str
    shape: str  # shards x copies
    shards: int
    lost: int = 0  # shards whose last replica is lost
    rows: int | None = None
    nbytes: str = ""


class TrainerRow(NamedTuple):
    """A trainer, and how far it is in per cent."""

    number: int
    clock: int
    planned: int
    share: float
    state: str


class RunRow(NamedTuple):
    """A run and its trainers; `hidden` counts those that are not listed."""

    number: int
    staleness: str
    stopped: str | None
    over: bool
    trainers: list[TrainerRow]
    hidden: int
    done: int  # clocks of all trainers
    planned: int | None
    summary: str


def shares_of(run: RunStatus) -> np.ndarray:
    """Where the recent time of each trainer went: [part, trainer], in the order of `PARTS`; 0 where it is not known."""
    nothing = TimeSplit()
    rows = [msgspec.structs.astuple(trainer.split or nothing) for trainer in run.trainers]
    return np.array(rows, float).reshape(-1, len(PARTS)).T


def table_row(table: TableSpec | TableStatus) -> TableRow:
    """A table as it is, or as it was asked for."""
    keys = table.rows if isinstance(table, TableSpec) else table.keys
    height = "any int64" if keys is None else f"0 to {keys - 1}"
    shape = height, f"{table.dim} x {table.dtype}", str(table.optimizer), f"{table.shards} x {table.copies}"
    row = TableRow(table.name, *shape, table.shards)
    if isinstance(table, TableSpec):
        return row
    return row._replace(lost=table.lost, rows=table.rows, nbytes=size_text(table.bytes))


def run_row(run: RunStatus) -> RunRow:
    """A run and its trainers. A run of more than MAX_ROWS trainers lists the slowest."""
    furthest = max(run.maximum, 1)
    trainers = [
        TrainerRow(
            trainer.number,
            trainer.clock,
            trainer.planned,
            min(100.0, 100.0 * trainer.clock / (trainer.planned or furthest)),
            trainer_text(run, trainer),
        )
        for trainer in run.trainers
    ]
    if len(trainers) > MAX_ROWS:
        trainers = sorted(trainers, key=lambda trainer: (trainer.state == TrainerPhase.LEFT, trainer.clock))[:MAX_ROWS]
    planned = [trainer.planned for trainer in run.trainers]
    return RunRow(
        number=run.run,
        staleness="inf" if run.staleness is None else f"{run.staleness:g}",
        stopped=run.stopped,
        over=run.over,
        trainers=trainers,
        hidden=len(run.trainers) - len(trainers),
        done=sum(run.clocks),
        planned=sum(planned) if all(planned) else None,
        summary=", ".join(last_metric(run)) if run.over else summary(run),
    )


def trainer_text(run: RunStatus, trainer: TrainerStatus) -> str:
    """The state of a trainer in a word: "stopped" if its run was stopped before the trainer had ended its part."""
    ended = trainer.state in (TrainerPhase.LEFT, TrainerPhase.LOST)
    return trainer.state if ended or run.stopped is None else "stopped"


def summary(run: RunStatus) -> str:
    """A run in a few words: its slowest trainer, the number of trainers that wait, and the loss.

    Examples
    --------
    >>> from dps.engine.telemetry.snapshot import RunPhase
    >>> trainers = [TrainerStatus(n, TrainerPhase.RUNNING, clock) for n, clock in enumerate([7, 4, 5])]
    >>> run = RunStatus(1, RunPhase.RUNNING, 3, False, 0.0, 1.0, None, None, trainers)
    >>> summary(run)
    'slowest: trainer 1 at 4'
    >>> summary(msgspec.structs.replace(run, stragglers=[Straggler("permanent", trainer=2, factor=2.04)]))
    'slowest: trainer 2 at 5 (permanent, 2.0x)'
    """
    present = {trainer.number: trainer for trainer in run.trainers if trainer.state is not TrainerPhase.LEFT}
    slow = next((finding for finding in run.stragglers if finding.trainer in present), None)  # the most important one
    slowest = slow.trainer if slow else min(present, key=lambda n: present[n].clock, default=None)
    kind = f" ({kind_text(slow)})" if slow else ""
    parts = []
    if slowest is not None and len(run.trainers) > 1:
        parts.append(f"slowest: trainer {slowest} at {present[slowest].clock}{kind}")
    servers = [finding for finding in run.stragglers if finding.trainer is None and finding.server is not None]
    parts += [f"server {finding.server} is slow ({kind_text(finding)})" for finding in servers]
    parts += [f"machine {finding.host} is overloaded" for finding in run.stragglers if finding.host is not None]
    waiting = len(run.waiting)
    parts += [f"{waiting} waiting"] if waiting else []
    return ", ".join([*parts, *last_metric(run)])


def kind_text(finding: Straggler) -> str:
    factor = finding.factor or 0.0
    return f"{finding.kind}, {factor:.1f}x" if factor > 1 else finding.kind


def last_metric(run: RunStatus) -> list[str]:
    """The last value of the loss, or of another metric if no loss is logged; empty if there is none."""
    known = {name: curve.value[-1] for name, curve in run.metrics.items() if curve.value}
    name = learning_curve(known)
    return [] if name is None else [f"{name} {known[name]:.4g}"]
