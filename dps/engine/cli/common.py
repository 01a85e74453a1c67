"""What all commands share: the options that name the cluster, the printing of answers and of errors."""

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

__all__ = ["Answer", "TextTable", "Where", "absolute", "attached", "command", "live"]

PEM = click.Path(exists=True, dir_okay=False, resolve_path=True)
CELL = str | int | float | None


class TextTable(NamedTuple):
    """A table to print; columns with numbers are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[CELL]]


class Answer(NamedTuple):
    """The answer of a command: `data` for programs (``--json``), `text` for people, as lines and tables."""

    data: object  # value as JSON has it
    text: Sequence[str | TextTable]


class Where(NamedTuple):
    """The options that name a cluster, and a parameter server in it."""

    scheduler: str | None
    scheduler_file: str | None
    name: str | None
    tls_ca_file: str | None
    tls_cert: str | None
    tls_key: str | None

    @property
    def known(self) -> bool:
        """Whether a cluster was named."""
        return bool(self.scheduler or self.scheduler_file)

    def connect(self) -> Client:
        """A Dask client, or an error at once if no scheduler listens."""
        return self._connect(self._check_listening)

    def connect_when_up(self) -> Client:
        """A Dask client, for a scheduler that may be starting: waits for it for `dps.timeouts.connect`."""
        return self._connect(lambda: None)

    def _check_listening(self) -> None:
        """Raise ConnectionRefusedError if nothing listens, because Dask would try again until its time-out."""
        address = _address_in(self.scheduler_file) if self.scheduler_file else self.scheduler
        if address is not None and address.partition("://")[0] in ("tcp", "tls"):
            socket.create_connection(get_address_host_port(address), config.seconds("connect")).close()

    def _connect(self, before: Callable[[], None]) -> Client:
        """A Dask client, which does not become the default client of the process."""
        if not self.known:
            raise click.UsageError(
                "which cluster? Say --scheduler tcp://HOST:8786 or --scheduler-file FILE, or set DASK_SCHEDULER_ADDRESS"
            )
        files = {"tls_ca_file": self.tls_ca_file, "tls_client_cert": self.tls_cert, "tls_client_key": self.tls_key}
        paths = {key: path for key, path in files.items() if path}
        options: dict[str, Any] = {"security": Security(**paths, require_encryption=True)} if paths else {}
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
        content = json.load(file)
    return content.get("address") if isinstance(content, dict) else None


@contextlib.contextmanager
def attached(where: Where) -> Iterator[dps.ParameterServer]:
    """The parameter server that the options name. It stays up when the command has ended."""
    with where.connect() as client, dps.ParameterServer.attach(client, where.name or "dps") as ps:
        yield ps


def command(function: Callable[..., Answer]) -> click.Command:
    """Make a function a command of ``dask ps``, under its own name and with the options that all commands have.

    The function gets a `Where`, made of these options, and its own options. Its answer is printed.
    """

    @functools.wraps(function)
    def run(where: Where, as_json: bool, **options: object) -> None:
        answer = function(where, **options)
        if as_json:
            click.echo(json.dumps(answer.data, indent=2))
        else:
            show(answer.text)

    return live(run)


def live(function: Callable[..., None]) -> click.Command:
    """The same for a function that prints by itself. It also gets `as_json`: whether it is to print JSON."""

    @functools.wraps(function)
    def run(**values: Any) -> None:
        where = Where(**{field: values.pop(field) for field in Where._fields})
        try:
            function(where, **values)
        except BrokenPipeError:  # the reader of a pipe has closed it, such as `| head`; click then exits quietly
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


def show(text: Sequence[str | TextTable]) -> None:
    """Print lines and tables. If rich is installed and the output is a terminal, rich prints the tables."""
    for part in text:
        if isinstance(part, str):
            click.echo(part)
        elif not sys.stdout.isatty() or not _rich(part):
            click.echo(plain(part))


def plain(table: TextTable) -> str:
    """A table in plain text.

    >>> print(plain(TextTable(["server", "worker", "rows"], [[0, "tcp://127.0.0.1:4711", 1200], [1, None, 7]])))
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
    """A value as text in a table.

    >>> cell(None), cell(1234567), cell("w"), cell(0.12345678)
    ('-', '1,234,567', 'w', '0.1235')
    """
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def absolute(url: str) -> str:
    """An absolute path, because the cluster's processes have other working directories; URLs stay as they are.

    >>> absolute("/data/../model"), absolute("s3://bucket/model")
    ('/model', 's3://bucket/model')
    """
    return url if "://" in url else os.path.abspath(url)


def _right(table: TextTable, column: int) -> bool:
    return any(isinstance(row[column], (int, float)) for row in table.rows)


def _rich(table: TextTable) -> bool:
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
