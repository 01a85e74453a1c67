"""Archive: what a parameter server's handle writes: checkpoints, tables in other forms, what is known of a run."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
from dask.utils import parse_timedelta

from dps.client import Client, Ticket
from dps.dashboard.report import report
from dps.dashboard.timeline import timeline
from dps.display import PATIENCE, Checkpoint, held, held_text
from dps.errors import ClosedError, DPSError, InputError, UnknownTableError
from dps.export import export
from dps.handle import Handle
from dps.state.ops import TableSpec
from dps.state.partition import bound

__all__ = ["Archive"]

logger = logging.getLogger(__name__)

PIECE = 8 << 20  # bytes pulled at a time
PACKAGES = ("dps", "dask", "distributed", "numpy")  # whose versions a report tells


class Archive(Handle):
    """Checkpoints, export, reports of runs; the rest is in :class:`dps.ParameterServer`."""

    def client(self) -> Client:
        """A client without a clock: for the driver, a notebook, or to be shipped into Dask tasks (it pickles)."""
        if self.closed:
            raise ClosedError(f"parameter server {self.name!r} was closed")
        if self._client is None or self._client._closed:
            self._client = Client(self.ticket)
        return self._client

    def checkpoint(
        self,
        url: str,
        *,
        every: str | float | None = None,
        clocks: int | None = None,
        keep: int = 3,
        incremental: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Write all tables, optimizer state and clocks; training goes on meanwhile.

        While a run goes on, a checkpoint is one consistent model: exactly the pushes that each trainer made before one
        clock, whatever the staleness.

        Parameters
        ----------
        url : str
            A directory that all servers reach, in any form that fsspec knows: a path, ``s3://``, ``hdfs://``, ...
        every : str or float, optional
            Again and again after so long ("10 min", or seconds), instead of now. Replaces what was asked for before.
            None is taken after a run that failed, before another is begun or something is restored.
        clocks : int, optional
            Again and again after so many clocks.
        keep : int
            How many stay.
        incremental : bool
            Where a checkpoint was written to this URL before, write only the rows that have changed since.
        storage_options : dict, optional
            For fsspec.

        Returns
        -------
        dict or None
            Name, clock, rows, bytes and seconds of the checkpoint; None for regular ones, of which
            :meth:`~dps.ParameterServer.status` tells.

        Raises
        ------
        CheckpointError
            It could not be written; the ones before are as they were.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dtype="int64")
        ...         ps.client().push("w", [1, 2], [10, 20])
        ...         done = ps.checkpoint(folder.name)
        ...         ps.client().push("w", [1, 2], [1, 1])
        ...         _ = ps.restore(folder.name)
        ...         done["rows"], ps.client().pull("w", [1, 2])
        (2, array([10, 20]))
        >>> folder.cleanup()
        """
        seconds = None if every is None else duration(every)
        if (seconds is not None and seconds <= 0) or (clocks is not None and clocks < 1):
            raise InputError(f"every={every!r}, clocks={clocks!r}: checkpoints are taken after more than that")
        if seconds is not None and clocks is not None:
            raise InputError("checkpoints are taken every so long, or every so many clocks: not both")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep={keep!r}: at least 1 checkpoint stays")
        wish = {"url": str(url), "keep": keep, "incremental": incremental, "seconds": seconds, "clocks": clocks}
        wish["storage_options"] = storage_options or {}
        done = json.loads(self._call("checkpoint", wish=json.dumps(wish)))
        return done and Checkpoint(done)

    def stop_checkpoints(self) -> None:
        """No more regular checkpoints."""
        self._call("checkpoint", wish="null")

    def restore(
        self,
        url: str,
        checkpoint: str | None = None,
        *,
        tables: list[str] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Bring tables back as they were in a checkpoint, in the place of those of the same names.

        Any number of servers will do. Nobody sees a table half restored: until all are there, the old ones are. Calls
        that are on their way meanwhile reach the old table or the new one. A push that has reached the old one is gone
        with it, acknowledged or not; from the return of this on, everything goes to the new one.

        Parameters
        ----------
        url : str
            Where checkpoints were written.
        checkpoint : str, optional
            Its name; by default the newest one that is whole. Damaged ones are passed over, with a warning.
        tables : list of str, optional
            Only these.
        storage_options : dict, optional
            For fsspec.

        Returns
        -------
        dict
            Name and clock of the checkpoint, and the tables; "passed": newer ones, and why they could not be used.

        Raises
        ------
        CheckpointError
            There is none, or the one named is damaged. The tables are as they were.
        """
        wish = {"url": str(url), "checkpoint": checkpoint, "tables": tables, "storage_options": storage_options or {}}
        answer = json.loads(self._call("restore", wish=json.dumps(wish)))
        for name, error in answer["passed"].items():
            logger.warning("checkpoint %r was passed over, %r was restored: %s", name, answer["name"], error)
        if self._client is not None:
            self._client.forget_routes()
        return Checkpoint(answer)

    def export(self, table: str, form: str = "numpy", path: str | None = None) -> Any:
        """A table's values as they are now, in another form; :func:`dps.export_checkpoint` does it with saved ones.

        Parameters
        ----------
        table : str
        form : {"numpy", "pandas", "scipy", "parquet", "dask"}
            See Returns.
        path : str
            Where Parquet goes: a URL that fsspec understands.

        Returns
        -------
        numpy
            An array [rows, dim]; of a keyed table keys and values, two arrays.
        pandas
            A DataFrame of `dim` columns with the row numbers or keys as index.
        scipy
            A ``coo_array`` of what is not zero, [rows, dim]; of a keyed table, [largest key + 1, dim].
        parquet
            None: the file has the columns ``key`` and ``value`` (a list of fixed length where `dim` is above 1), and is
            written a piece at a time.
        dask
            As numpy, of dask arrays that pull a shard at a time, on the workers, when they are computed.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dim=2, rows=2)
        ...         ps.client().push("w", [1], [[3, 4]])
        ...         ps.export("w", "pandas")
             0    1
        0  0.0  0.0
        1  3.0  4.0
        """
        spec = self._table(table)
        parts = [functools.partial(pull_shard, self.ticket, spec, shard) for shard in range(spec.shards)]
        return export(parts, spec, form, path)

    def report(self, path: str | os.PathLike[str], run: int | None = None) -> str:
        """Write a report of a run: who was slow and why, where the time went, the loss, the servers.

        It is one file of HTML with its pictures in it. Browsers open it without a network, and it can be mailed.

        Parameters
        ----------
        path : str
            Where it goes, such as ``run.html``; a file that is there is replaced.
        run : int, optional
            The run's number, as :meth:`~dps.ParameterServer.status` has it; by default the last one. It may go on.

        Returns
        -------
        str
            The path.

        Examples
        --------
        >>> import tempfile
        >>> def train(trainer, partitions):
        ...     for step, keys in enumerate(trainer.iterate(partitions, epochs=20)):
        ...         trainer.push("w", keys, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...         with dps.ParameterServer(cluster) as ps:
        ...             _ = ps.table("w", dtype="int64")
        ...             _ = ps.run(train, ps.dask_client.scatter([[1, 2], [3, 4]]))
        ...             path = ps.report(folder + "/run.html")
        ...     "Where the time went" in open(path).read()
        True
        """
        history = self._history(path, run)
        versions = {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
        with contextlib.suppress(DPSError):  # servers that do not answer are no reason to go without a report
            history["held"] = held_text(held(json.loads(self._call("status", callback_timeout=PATIENCE))))
        return write(path, report(history, versions).encode())

    def timeline(self, path: str | os.PathLike[str], run: int | None = None) -> str:
        """Write a run as a trace that https://ui.perfetto.dev and Chrome's ``chrome://tracing`` show.

        Each trainer is a line of slices: compute, pull, wait, push, serialise. These are put together from what a
        trainer measures between two reports, which may be several clocks: how long each took in all is measured, the
        order within such a window is made up. Servers are curves, what happened are marks.

        Parameters
        ----------
        path : str
            Where it goes; compressed if it ends in ``.gz``. A file that is there is replaced.
        run : int, optional
            The run's number; by default the last one.

        Returns
        -------
        str
            The path.

        Examples
        --------
        >>> import tempfile
        >>> def train(trainer, partitions):
        ...     for keys in trainer.iterate(partitions, epochs=20):
        ...         trainer.push("w", keys, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...         with dps.ParameterServer(cluster) as ps:
        ...             _ = ps.table("w", dtype="int64")
        ...             _ = ps.run(train, ps.dask_client.scatter([[1, 2], [3, 4]]))
        ...             path = ps.timeline(folder + "/run.json")
        ...     sorted({event["name"] for event in json.load(open(path))["traceEvents"] if event["ph"] == "X"})[:2]
        ['compute', 'push']
        """
        data = json.dumps(timeline(self._history(path, run)), separators=(",", ":"), allow_nan=False).encode()
        return write(path, gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)

    def _history(self, path: str | os.PathLike[str], run: int | None) -> dict[str, Any]:
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise InputError(f"there is no folder {folder!r}: make it first")
        return json.loads(self._call("history", run=0 if run is None else run))

    def _table(self, name: str) -> TableSpec:
        tables = json.loads(self._call("describe")["tables"])
        if name not in tables:
            known = ", ".join(map(repr, sorted(tables))) or "none"
            raise UnknownTableError(f"parameter server {self.name!r} has no table {name!r}; it has {known}")
        return TableSpec.from_dict(tables[name]["spec"])


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
    """(keys or the first row's number, values) of one shard, some at a time: a part for :func:`dps.export.export`."""
    step = max(1, PIECE // (spec.dim * spec.itemsize + 8))
    with Client(ticket) as client:
        if spec.rows is not None:
            low, high = bound(shard, spec.rows, spec.shards), bound(shard + 1, spec.rows, spec.shards)
            for row in range(low, high, step):
                end = min(row + step, high)
                yield row, client.pull(spec.name, slice(row, end)).reshape(end - row, spec.dim)
            return
        for keys in client.keys(spec.name, shard):
            for a in range(0, len(keys), step):
                some = keys[a : a + step]
                yield some, client.pull(spec.name, some).reshape(len(some), spec.dim)
