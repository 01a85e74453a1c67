"""What a parameter server's handle writes to files: checkpoints, tables in other forms, reports of runs."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
from dask.utils import parse_timedelta

from dps.engine.checkpoints.export import export
from dps.engine.client.client import Client
from dps.engine.client.ticket import Ticket
from dps.engine.dashboard.notebook import PATIENCE_SECONDS, CheckpointView, held_text
from dps.engine.dashboard.report.report import report
from dps.engine.dashboard.report.timeline import timeline
from dps.engine.state.names import check_name
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.run_history import RunHistory
from dps.engine.telemetry.snapshot import LastCheckpoint, Status
from dps.engine.training.types import Control, Json, Options
from dps.engine.wire.messages import CheckpointOptions, CheckpointSchedule, RestoreAnswer, RestoreRequest
from dps.errors import DPSError, InputError

__all__ = [
    "duration",
    "export_table",
    "restore",
    "schedule_checkpoints",
    "take_checkpoint",
    "write_report",
    "write_timeline",
]

logger = logging.getLogger(__name__)

# Size of the piece that is pulled at a time.
PIECE_BYTES = 8 << 20
# Packages whose versions a report tells.
PACKAGES = ("dps", "dask", "distributed", "numpy")


def take_checkpoint(call: Control, url: str, keep: int, incremental: bool, storage_options: Options | None) -> Json:
    """See :meth:`dps.ParameterServer.checkpoint`."""
    options = _options(url, keep, incremental, storage_options)
    answer = call("checkpoint", options=msgspec.msgpack.encode(options))
    return CheckpointView(msgspec.to_builtins(msgspec.msgpack.decode(answer, type=LastCheckpoint)))


def schedule_checkpoints(
    call: Control,
    url: str,
    every: str | float | None,
    clocks: int | None,
    keep: int,
    incremental: bool,
    storage_options: Options | None,
) -> None:
    """See :meth:`dps.ParameterServer.schedule_checkpoints`."""
    seconds = None if every is None else duration(every)
    if (seconds is not None and seconds <= 0) or (clocks is not None and clocks < 1):
        raise InputError(f"every={every!r}, clocks={clocks!r}: checkpoints are taken after more than that")
    if seconds is not None and clocks is not None:
        raise InputError("checkpoints are taken every so long, or every so many clocks: not both")
    if seconds is None and clocks is None:
        raise InputError("a schedule of checkpoints has every= or clocks=; ps.checkpoint(url) takes one now")
    schedule = CheckpointSchedule(_options(url, keep, incremental, storage_options), seconds, clocks)
    call("schedule_checkpoints", schedule=msgspec.msgpack.encode(schedule))


def _options(url: str, keep: int, incremental: bool, storage_options: Options | None) -> CheckpointOptions:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise InputError(f"keep={keep!r}: at least 1 checkpoint stays")
    return CheckpointOptions(str(url), keep, incremental, storage_options or {})


def restore(
    call: Control,
    url: str,
    checkpoint: str | None,
    tables: list[str] | None,
    storage_options: Options | None,
    shards: Mapping[str, int],
) -> Json:
    """See :meth:`dps.ParameterServer.restore`."""
    if checkpoint is not None:
        check_name("checkpoint", checkpoint)
    for table in (*(tables or ()), *shards):
        check_name("table", table)
    request = RestoreRequest(str(url), checkpoint, tables, storage_options or {}, dict(shards))
    encoded = call("restore", request=msgspec.msgpack.encode(request))
    answer = msgspec.msgpack.decode(encoded, type=RestoreAnswer)
    for name, error in answer.passed.items():
        logger.warning("checkpoint %r was passed over, %r was restored: %s", name, answer.name, error)
    return CheckpointView(msgspec.to_builtins(answer))


def export_table(ticket: Ticket, spec: TableSpec, form: str, path: str | None) -> Any:
    """See :meth:`dps.ParameterServer.export`."""
    parts = [functools.partial(pull_shard, ticket, spec, shard) for shard in range(spec.shards)]
    return export(parts, spec, form, path)


def write_report(call: Control, path: str | os.PathLike[str], run: int | None) -> str:
    """See :meth:`dps.ParameterServer.report`."""
    history = _history(call, path, run)
    versions = {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    held, status = "", None
    with contextlib.suppress(DPSError):  # servers that do not answer are no reason to go without a report
        status = msgspec.msgpack.decode(call("status", callback_timeout=PATIENCE_SECONDS), type=Status)
        held = held_text(status)
    return write(path, report(history, versions, held, status).encode())


def write_timeline(call: Control, path: str | os.PathLike[str], run: int | None) -> str:
    """See :meth:`dps.ParameterServer.timeline`."""
    data = json.dumps(timeline(_history(call, path, run)), separators=(",", ":"), allow_nan=False).encode()
    return write(path, gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)


def _history(call: Control, path: str | os.PathLike[str], run: int | None) -> RunHistory:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder!r}: make it first")
    return msgspec.msgpack.decode(call("history", run=0 if run is None else run), type=RunHistory)


def duration(text: str | float) -> float:
    """Seconds, of "10 min" and the like.

    >>> duration("10 min"), duration("2 h"), duration(0.5)
    (600, 7200, 0.5)
    """
    try:
        return parse_timedelta(re.sub(r"min(s?)$", "minutes", text) if isinstance(text, str) else text)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f'every={text!r}: a time is "10 min", "30 s" and the like, or a number of seconds') from error


def write(path: str | os.PathLike[str], data: bytes) -> str:
    """A file, all of it or as it was before."""
    partial = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise
    return os.fspath(path)


def pull_shard(ticket: Ticket, spec: TableSpec, shard: int) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
    """(keys or the first row's number, values) of one shard, some at a time: a part for `export`."""
    step = max(1, PIECE_BYTES // (spec.dim * spec.itemsize + 8))
    with Client(ticket) as client:
        if spec.rows is not None:
            low, high = spec.shard_map.edges[shard : shard + 2]
            for row in range(low, high, step):
                end = min(row + step, high)
                yield row, client.pull(spec.name, slice(row, end)).view(spec.dtype).reshape(end - row, spec.dim)
            return
        for keys in client.keys(spec, shard):
            for a in range(0, len(keys), step):
                some = keys[a : a + step]
                yield some, client.pull(spec.name, some).view(spec.dtype).reshape(len(some), spec.dim)
