"""For functions that run on servers of the test's own process: what they import to wait for the test, and to keep."""

from __future__ import annotations

import threading
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
