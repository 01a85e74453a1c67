"""Commands about tables: tables, checkpoint, restore, export."""

from __future__ import annotations

import os
from typing import Any

import click
import numpy as np
from dask.utils import format_bytes

import dps
from dps.cli.common import Answer, Table, Where, absolute, attached, command

__all__ = ["COMMANDS"]

FORMS = {".parquet": "parquet", ".npz": "numpy", ".csv": "pandas"}


@command
def tables(where: Where) -> Answer:
    """Tables: their shape, optimizer and size."""
    with attached(where) as ps:
        about = ps.status()
    found = [description(name, entry["spec"], about["servers"]) for name, entry in sorted(about["tables"].items())]
    rows: list[list[Any]] = []
    for t in found:
        height = "any key" if t["rows"] is None else t["rows"]
        shape = [t["name"], height, t["dim"], t["dtype"], t["optimizer"]]
        rows.append([*shape, t["shards"], t["copies"], t["there"], format_bytes(t["bytes"])])
    columns = ["table", "rows", "dim", "dtype", "optimizer", "shards", "copies", "rows there", "memory"]
    return Answer(found, [Table(columns, rows) if rows else "no table yet"])


@command
@click.argument("url", required=False)
@click.option("--every", metavar="TIME", help='Again and again after so long: "10 min", "30 s"')
@click.option("--clocks", type=click.IntRange(1), help="Again and again after so many clocks")
@click.option("--keep", type=click.IntRange(1), default=3, show_default=True, help="How many stay")
@click.option("--incremental", is_flag=True, help="Write only the rows that have changed since the one before")
@click.option("--stop", is_flag=True, help="No more regular checkpoints")
def checkpoint(where: Where, url: str | None, stop: bool, **options: Any) -> Answer:
    """Write all tables and clocks to URL.

    All servers must reach it: a path on a shared disk, s3://..., hdfs://...
    """
    if stop == (url is not None):
        raise click.UsageError("say either a URL or --stop")
    with attached(where) as ps:
        if url is None:
            ps.stop_checkpoints()
            return Answer({"stopped": True}, ["no more regular checkpoints"])
        done = ps.checkpoint(absolute(url), **options)
    if done is None:
        return Answer({"regular": True}, [f"checkpoints go to {absolute(url)} from now on; `status` tells of the last"])
    clock = "" if done["clock"] is None else f", at clock {done['clock']}"
    return Answer(done, [f"checkpoint {done['name']}: {done['rows']:,} rows, {format_bytes(done['bytes'])}{clock}"])


@command
@click.argument("url")
@click.option("--checkpoint", metavar="NAME", help="Which one  [default: the newest that is whole]")
@click.option("--table", "tables", multiple=True, help="Only this table; may be repeated")
def restore(where: Where, url: str, checkpoint: str | None, tables: tuple[str, ...]) -> Answer:
    """Bring tables back from a checkpoint.

    They take the place of those of the same names.
    """
    with attached(where) as ps:
        done = ps.restore(absolute(url), checkpoint, tables=list(tables) or None)
    names = ", ".join(sorted(done["tables"])) or "no table"
    return Answer(done, [f"checkpoint {done['name']}: restored {names}"])


@command
@click.argument("table")
@click.argument("path")
@click.option("--from", "url", metavar="URL", help="Out of a checkpoint there; then no cluster is needed")
@click.option("--checkpoint", metavar="NAME", help="Which one  [default: the newest that is whole]")
def export(where: Where, table: str, path: str, url: str | None, checkpoint: str | None) -> Answer:
    """Write a table's values to a file.

    PATH ends in .parquet, .npz (numpy) or .csv.
    """
    form = FORMS.get(os.path.splitext(path)[1])
    if form is None:
        raise click.BadParameter(f"{path!r} ends in none of {', '.join(FORMS)}", param_hint="PATH")
    if checkpoint is not None and url is None:
        raise click.UsageError("--checkpoint is one of those under --from URL")
    target = absolute(path) if form == "parquet" else None
    if url is not None:
        found = dps.export_checkpoint(absolute(url), table, form, target, checkpoint=checkpoint)
    else:
        with attached(where) as ps:
            found = ps.export(table, form, target)
    if target is None:
        write(found, path)
    return Answer({"table": table, "path": path}, [f"table {table!r} is in {path}"])


def write(found: Any, path: str) -> None:
    """Arrays or a frame to a file."""
    import fsspec

    with fsspec.open(path, "wb") as file:
        if hasattr(found, "to_csv"):
            found.to_csv(file, index_label="key")
        elif isinstance(found, tuple):
            np.savez(file, keys=found[0], values=found[1])
        else:
            np.savez(file, values=found)


COMMANDS = [tables, checkpoint, restore, export]


def description(name: str, spec: dict[str, Any], servers: list[dict[str, Any]]) -> dict[str, Any]:
    """A table, in a few plain values."""
    parts = [server["tables"][name] for server in servers if name in server.get("tables", {})]
    about = {"name": name, **{field: spec[field] for field in ("rows", "dim", "dtype", "shards", "copies")}}
    held = {"there": sum(part["rows"] for part in parts), "bytes": sum(part["bytes"] for part in parts)}
    return {**about, "optimizer": repr(dps.TableSpec.from_dict(spec).optimizer), **held}
