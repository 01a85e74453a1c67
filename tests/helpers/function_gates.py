"""For functions that run on servers: what they import to wait for the test, and to keep.

Events for servers whose functions run in a thread of the test's own process; files for those in any process.
"""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

PATIENCE = 60.0

began, go_on = threading.Event(), threading.Event()
kept: list[Any] = []


def reset() -> None:
    began.clear()
    go_on.clear()
    kept.clear()


def wait() -> None:
    """Say that the function runs, and wait until it may go on."""
    began.set()
    assert go_on.wait(PATIENCE)


def wait_at(directory: str) -> None:
    """The same by files: say so with one named `began`, and wait for one named `go_on`."""
    place, until = pathlib.Path(directory), time.monotonic() + PATIENCE
    (place / "began").touch()
    while not (place / "go_on").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
