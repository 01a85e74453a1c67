"""What all commands share: where the cluster is, how an answer is printed, how an error ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click
import dask
from dask.distributed import Client, Security
from distributed.comm import get_address_host_port

import dps
from dps import config
from dps.errors import ControllerGoneError, DPSError

__all__ = ["Answer", "Table", "Where", "absolute", "attached", "command", "live"]

PEM = click.Path(exists=True, dir_okay=False, resolve_path=True)
CELL = str | int | float | None


class Table(NamedTuple):
    """Rows to be printed one below the other; numbers are set to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[CELL]]


class Answer(NamedTuple):
    """What a command has to say: to programs (``--json``), and to people, as lines and tables."""

    data: Any
    text: Sequence[str | Table]


class Where(NamedTuple):
    """The options that say which cluster is meant, and which parameter server in it."""

    scheduler: str | None
    scheduler_file: str | None
    name: str | None
    tls_ca_file: str | None
    tls_cert: str | None
    tls_key: str | None

    @property
    def known(self) -> bool:
        """Whether any cluster was named."""
        return bool(self.scheduler or self.scheduler_file)

    def connect(self) -> Client:
        """A Dask client; where no scheduler listens, an error at once."""
        return self._connect(self._knock)

    def connect_when_up(self) -> Client:
        """The same for a scheduler that was started a moment ago: it has `dps.timeouts.connect` to come up."""
        return self._connect(lambda: None)

    def _knock(self) -> None:
        """Raise ConnectionRefusedError where nothing listens, because Dask would try again until its time-out."""
        address = _address_in(self.scheduler_file) if self.scheduler_file else self.scheduler
        if address is not None and address.partition("://")[0] in ("tcp", "tls"):
            socket.create_connection(get_address_host_port(address), config.seconds("connect")).close()

    def _connect(self, before: Callable[[], None]) -> Client:
        """A Dask client, which is not made the process's default one."""
        if not self.known:
            raise click.UsageError(
                "which cluster? Say --scheduler tcp://HOST:8786 or --scheduler-file FILE, or set DASK_SCHEDULER_ADDRESS"
            )
        files = {"tls_ca_file": self.tls_ca_file, "tls_client_cert": self.tls_cert, "tls_client_key": self.tls_key}
        given = {key: path for key, path in files.items() if path}
        options: dict[str, Any] = {"security": Security(**given, require_encryption=True)} if given else {}
        options |= {"scheduler_file": self.scheduler_file} if self.scheduler_file else {"address": self.scheduler}
        if self.scheduler_file and not os.path.exists(self.scheduler_file):  # Dask would wait for ever
            raise ControllerGoneError(f"there is no scheduler file {self.scheduler_file!r}: is the scheduler running?")
        try:
            before()
            return Client(**options, set_as_default=False, timeout=config.seconds("connect"))
        except (OSError, TimeoutError) as error:
            raise ControllerGoneError(
                f"no scheduler answers at {self.scheduler or self.scheduler_file} ({error}); start one with "
                f"`dask scheduler`, or say with --scheduler where it is"
            ) from error


def _address_in(scheduler_file: str) -> str | None:
    with open(scheduler_file) as file:
        about = json.load(file)
    return about.get("address") if isinstance(about, dict) else None


@contextlib.contextmanager
def attached(where: Where) -> Iterator[dps.ParameterServer]:
    """The parameter server that is meant; it goes on when the command has ended."""
    with where.connect() as client, dps.ParameterServer.attach(client, where.name or "dps") as ps:
        yield ps


def command(function: Callable[..., Answer]) -> click.Command:
    """Make a function a command of ``dask ps``, under its own name and with the options that all have.

    It is called with the `Where` of these options and with its own, and returns what is to be printed.
    """

    @functools.wraps(function)
    def run(where: Where, as_json: bool, **given: Any) -> None:
        answer = function(where, **given)
        if as_json:
            click.echo(json.dumps(answer.data, indent=2))
        else:
            show(answer.text)

    return live(run)


def live(function: Callable[..., None]) -> click.Command:
    """The same for a function that prints by itself: it is also told whether JSON is wanted, as `as_json`."""

    @functools.wraps(function)
    def run(**given: Any) -> None:
        where = Where(**{field: given.pop(field) for field in Where._fields})
        try:
            function(where, **given)
        except BrokenPipeError:  # `| head` has seen enough: click ends it quietly
            raise
        except (DPSError, OSError, ValueError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error

    options = [
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            default=lambda: dask.config.get("scheduler-address", None),
            help="Address of the scheduler  [default: what Dask's configuration says]",
        ),
        click.option("--scheduler-file", metavar="FILE", help="File that `dask scheduler --scheduler-file` wrote"),
        click.option("--name", help="Which of the cluster's parameter servers  [default: dps]"),
        click.option("--tls-ca-file", type=PEM, help="CA cert(s) file for TLS (in PEM format)"),
        click.option("--tls-cert", type=PEM, help="certificate file for TLS (in PEM format)"),
        click.option("--tls-key", type=PEM, help="private key file for TLS (in PEM format)"),
        click.option("--json", "as_json", is_flag=True, help="Print JSON"),
    ]
    for option in reversed(options):
        run = option(run)
    return click.command(function.__name__.strip("_"))(run)


def show(text: Sequence[str | Table]) -> None:
    """Print lines and tables; tables by rich where it is installed and a person is looking."""
    for part in text:
        if isinstance(part, str):
            click.echo(part)
        elif not sys.stdout.isatty() or not _rich(part):
            click.echo(plain(part))


def plain(table: Table) -> str:
    """A table in plain text.

    >>> print(plain(Table(["server", "worker", "rows"], [[0, "tcp://127.0.0.1:4711", 1200], [1, None, 7]])))
    server  worker                 rows
         0  tcp://127.0.0.1:4711  1,200
         1  -                         7
    """
    rows = [list(table.columns), *([cell(value) for value in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [_right(table, n) for n in range(len(widths))]
    lines = (
        "  ".join(
            text.rjust(width) if side else text.ljust(width)
            for text, width, side in zip(row, widths, right, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def cell(value: CELL) -> str:
    """A value in a table.

    >>> cell(None), cell(1234567), cell("w"), cell(0.12345678)
    ('-', '1,234,567', 'w', '0.1235')
    """
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def absolute(url: str) -> str:
    """A path as the cluster's processes, which have other working directories, can find it; URLs stay.

    >>> absolute("/data/../model"), absolute("s3://bucket/model")
    ('/model', 's3://bucket/model')
    """
    return url if "://" in url else os.path.abspath(url)


def _right(table: Table, column: int) -> bool:
    return any(isinstance(row[column], (int, float)) for row in table.rows)


def _rich(table: Table) -> bool:
    """Print with rich; False where it is not installed."""
    try:
        import rich
        import rich.box
        import rich.markup
        import rich.table
    except ImportError:
        return False
    pretty = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for n, name in enumerate(table.columns):
        pretty.add_column(rich.markup.escape(name), justify="right" if _right(table, n) else "left", overflow="fold")
    for row in table.rows:
        pretty.add_row(*(rich.markup.escape(cell(value)) for value in row))
    rich.print(pretty)
    return True
