"""``dask ps top``: a live view of runs, trainers and servers, with the stragglers and the reasons."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

import click
import msgspec

import dps
from dps.engine.cli.common import Where, attached, live
from dps.engine.dashboard.terminal import StatusOverview
from dps.engine.telemetry.snapshot import Status
from dps.errors import needing

if sys.platform != "win32":
    import termios
    import tty

__all__ = ["top"]


@live
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between snapshots"
)
@click.option("--count", type=click.IntRange(1), help="End after so many snapshots  [default: at q or Ctrl-C]")
def top(where: Where, as_json: bool, interval: float, count: int | None) -> None:
    """Watch runs, trainers and servers.

    Of many trainers the slowest are shown, stragglers first; q or Ctrl-C ends it. If the output is no terminal, the
    snapshots are printed one after the other; with --json, each is a line of JSON.
    """
    with contextlib.suppress(KeyboardInterrupt), attached(where) as ps:
        if as_json:
            for snapshot in every(interval, count, ps):
                click.echo(msgspec.json.encode(snapshot))
        else:
            with needing("cli"):
                watch(ps, interval, count)


def every(
    interval: float, count: int | None, ps: dps.ParameterServer, pause: Callable[[float], bool] | None = None
) -> Iterator[Status]:
    """Snapshots, one every `interval` seconds. `pause` waits; they end when it returns True."""
    due = time.monotonic()
    for number in itertools.count(1):
        yield msgspec.msgpack.decode(ps.connection.call("snapshot"), type=Status)
        if number == count:
            return
        now = time.monotonic()
        due = max(due + interval, now)  # after a slow answer, missed snapshots are not made up for
        if (pause or rest)(due - now):
            return


def rest(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def watch(ps: dps.ParameterServer, interval: float, count: int | None) -> None:
    """Show snapshots on the whole screen of a terminal, or print them one below the other if there is no terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for snapshot in every(interval, count, ps):
            console.print(StatusOverview(snapshot), "")
        return
    with keys() as wait, Live(console=console, screen=True, auto_refresh=False) as screen:
        for snapshot in every(interval, count, ps, wait):
            screen.update(StatusOverview(snapshot, console.height), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits for so many seconds, and returns True at once when q is pressed."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield rest
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([number], [], [], max(0.0, until - time.monotonic()))[0]:  # at least once
            typed = os.read(number, 64)
            if not typed or b"q" in typed.lower():  # other keys may have been typed with q
                return True
        return False

    tty.setcbreak(number)
    try:
        yield wait
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
