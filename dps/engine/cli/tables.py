"""Commands about tables: tables, split, merge, rebalance, checkpoint, restore, export."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

import dps
from dps.engine.cli.common import CELL, Answer, TextTable, Where, absolute, attached, command
from dps.engine.dashboard.text import hottest_key_text, size_text, turnover_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COMMANDS"]

FORMATS = {".parquet": "parquet", ".npz": "numpy", ".csv": "pandas"}


@command
def tables(where: Where) -> Answer:
    """Tables: their shape, optimizer and size, the key that is pulled and pushed most now, and rows that come and go.

    With --json, "hot_keys" has the 16 hottest keys, "hot_shares" the shares of the 1, 8 and 64 hottest, and "turnover"
    how many rows were admitted, evicted and expired.
    """
    with attached(where) as ps:
        answer = ps.status()
    tables = [table for _, table in sorted(answer.tables.items())]
    rows: list[list[CELL]] = []
    columns = ["table", "rows", "dim", "dtype", "optimizer", "shards", "copies", "rows there", "memory", "hottest key"]
    some_come_and_go = any(t.turnover is not None for t in tables)
    columns += ["rows come and go"] if some_come_and_go else []
    for t in tables:
        height = "any key" if t.keys is None else t.keys
        row: list[CELL] = [t.name, height, t.dim, t.dtype, t.optimizer, t.shards, t.copies, t.rows, size_text(t.bytes)]
        row += [hottest_key_text(t) or None]
        row += [turnover_text(t.turnover) or None] if some_come_and_go else []
        rows.append(row)
    return Answer(msgspec.to_builtins(tables), [TextTable(columns, rows) if rows else "no table yet"])


@command
@click.argument("url", required=False)
@click.option("--every", metavar="TIME", help='Repeat after so much time: "10 min", "30 s"')
@click.option("--clocks", type=click.IntRange(1), help="Repeat after so many clocks")
@click.option("--keep", type=click.IntRange(1), default=3, show_default=True, help="Number of checkpoints to keep")
@click.option("--incremental", is_flag=True, help="Write only the rows that have changed since the one before")
@click.option("--stop", is_flag=True, help="No more regular checkpoints")
def checkpoint(
    where: Where, url: str | None, stop: bool, every: str | None, clocks: int | None, keep: int, incremental: bool
) -> Answer:
    """Write all tables and clocks to URL.

    All servers must reach it: a path on a shared disk, s3://..., hdfs://...
    """
    if stop == (url is not None):
        raise click.UsageError("say either a URL or --stop")
    with attached(where) as ps:
        if url is None:
            ps.stop_checkpoints()
            return Answer({"stopped": True}, ["no more regular checkpoints"])
        if every is not None or clocks is not None:
            ps.schedule_checkpoints(absolute(url), every=every, clocks=clocks, keep=keep, incremental=incremental)
            text = f"checkpoints go to {absolute(url)} from now on; `status` tells of the last"
            return Answer({"regular": True}, [text])
        taken = ps.checkpoint(absolute(url), keep=keep, incremental=incremental)
    clock = "" if taken["clock"] is None else f", at clock {taken['clock']}"
    return Answer(taken, [f"checkpoint {taken['name']}: {taken['rows']:,} rows, {size_text(taken['bytes'])}{clock}"])


@command
@click.argument("url")
@click.option("--checkpoint", metavar="NAME", help="Which one  [default: the newest that is whole]")
@click.option("--table", "tables", multiple=True, help="Only this table; may be repeated")
def restore(where: Where, url: str, checkpoint: str | None, tables: tuple[str, ...]) -> Answer:
    """Bring tables back from a checkpoint.

    They replace the tables of the same names.
    """
    with attached(where) as ps:
        restored = ps.restore(absolute(url), checkpoint, tables=list(tables) or None)
    names = ", ".join(sorted(restored["tables"])) or "no table"
    return Answer(restored, [f"checkpoint {restored['name']}: restored {names}"])


@command
@click.argument("table")
@click.option("--shards", type=click.IntRange(1), help="How many it is to have  [default: twice as many]")
@click.option("--shard", type=click.IntRange(0), help="Divide this one only")
def split(where: Where, table: str, shards: int | None, shard: int | None) -> Answer:
    """Cut a table into more shards, for more servers.

    Training goes on; pulls and pushes of the table wait while its rows are divided.
    """
    with attached(where) as ps:
        count = ps.split(table, shards, shard=shard).spec.shards
    return Answer({"table": table, "shards": count}, [f"table {table}: {count} shards"])


@command
@click.argument("table")
@click.option("--shards", type=click.IntRange(1), help="How many it is to have  [default: half as many]")
@click.option("--shard", type=click.IntRange(0), help="Merge this one with the next only")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds that shards may move before  [default: 600]")
def merge(where: Where, table: str, shards: int | None, shard: int | None, timeout: float | None) -> Answer:
    """Cut a table into fewer shards.

    Training goes on; pulls and pushes of the table wait while its rows are put together.
    """
    with attached(where) as ps:
        count = ps.merge(table, shards, shard=shard, timeout=timeout).spec.shards
    return Answer({"table": table, "shards": count}, [f"table {table}: {count} shards"])


@command
@click.option("--timeout", type=click.FloatRange(0), help="Seconds that it may take  [default: dps.timeouts.request]")
def rebalance(where: Where, timeout: float | None) -> Answer:
    """Even the measured load of the servers out.

    Shards move, and a table with a hot shard is split, while training goes on.
    """
    with attached(where) as ps:
        report = ps.rebalance(timeout=timeout)
    return Answer(report.to_dict(), str(report).splitlines())


@command
@click.argument("table")
@click.argument("path")
@click.option("--from", "url", metavar="URL", help="Read a checkpoint in this folder; needs no cluster")
@click.option("--checkpoint", metavar="NAME", help="Which one  [default: the newest that is whole]")
def export(where: Where, table: str, path: str, url: str | None, checkpoint: str | None) -> Answer:
    """Write a table's values to a file.

    PATH ends in .parquet, .npz (numpy) or .csv.
    """
    file_format = FORMATS.get(os.path.splitext(path)[1])
    if file_format is None:
        raise click.BadParameter(f"{path!r} ends in none of {', '.join(FORMATS)}", param_hint="PATH")
    if checkpoint is not None and url is None:
        raise click.UsageError("--checkpoint names a checkpoint under --from URL")
    target = absolute(path) if file_format == "parquet" else None
    if url is not None:
        values = dps.export_checkpoint(absolute(url), table, file_format, target, checkpoint=checkpoint)
    else:
        with attached(where) as ps:
            values = ps.export(table, file_format, target)
    if target is None:
        write(values, path)
    return Answer({"table": table, "path": path}, [f"table {table!r} is in {path}"])


def write(values: pd.DataFrame | tuple[np.ndarray, np.ndarray] | np.ndarray, path: str) -> None:
    """Write an array, a pair of keys and values, or a data frame to a file."""
    import fsspec

    with fsspec.open(path, "wb") as file:
        if isinstance(values, tuple):
            np.savez(file, keys=values[0], values=values[1])
        elif isinstance(values, np.ndarray):
            np.savez(file, values=values)
        else:
            values.to_csv(file, index_label="key")


COMMANDS = [tables, split, merge, rebalance, checkpoint, restore, export]
