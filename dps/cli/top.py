"""``dask ps top``: who is slow, and why, while it goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

import click

import dps
from dps.cli.common import Where, attached, live
from dps.dashboard.terminal import Overview
from dps.errors import needing

if sys.platform != "win32":
    import termios
    import tty

__all__ = ["top"]


@live
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two")
@click.option("--count", type=click.IntRange(1), help="End after so many  [default: at q or Ctrl-C]")
def top(where: Where, as_json: bool, interval: float, count: int | None) -> None:
    """Watch runs, trainers and servers.

    Of many trainers the slowest are shown, stragglers first; q or Ctrl-C ends it. With --json, or where the output is
    no terminal, one after the other is printed; of JSON, each in one line.
    """
    with contextlib.suppress(KeyboardInterrupt), attached(where) as ps:
        if as_json:
            for text in every(interval, count, ps):
                click.echo(text)
        else:
            with needing("cli"):
                watch(ps, interval, count)


def every(
    interval: float, count: int | None, ps: dps.ParameterServer, pause: Callable[[float], bool] | None = None
) -> Iterator[str]:
    """Snapshots as JSON, one each `interval` seconds; until `pause`, which waits so long, says that it is enough."""
    due = time.monotonic()
    for number in itertools.count(1):
        yield ps._call("snapshot")
        if number == count:
            return
        now = time.monotonic()
        due = max(due + interval, now)  # after a long answer it does not hurry
        if (pause or rest)(due - now):
            return


def rest(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def watch(ps: dps.ParameterServer, interval: float, count: int | None) -> None:
    """On the whole screen of a terminal; elsewhere one below the other."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        for text in every(interval, count, ps):
            console.print(Overview(json.loads(text)), "")
        return
    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as screen:
        for text in every(interval, count, ps, pressed):
            screen.update(Overview(json.loads(text), console.height), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds, or until q is pressed: then it says True."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield rest
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([number], [], [], max(0.0, until - time.monotonic()))[0]:  # once, however late it is
            typed = os.read(number, 64)
            if not typed or b"q" in typed.lower():  # other keys may have come with it
                return True
        return False

    tty.setcbreak(number)
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
