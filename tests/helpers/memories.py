"""The memory that processes share for large answers, as the system sees it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

__all__ = ["files", "memories"]


def memories(pid: int | str = "self") -> Counter[str]:
    """How often a process has mapped each such memory, by the number of its file."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Counter(line.split()[4] for line in lines if "dps-ring" in line)


def files(pid: int | str = "self") -> int:
    """Files of such memories that a process has open."""
    found = 0
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found += "dps-ring" in os.readlink(f"/proc/{pid}/fd/{each}")
    return found
