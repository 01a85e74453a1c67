"""A progress bar of a run, in a terminal or a notebook: tqdm's, where tqdm is installed."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shows how far the trainers are: iterations completed of those planned, and who is slowest.

    Parameters
    ----------
    wanted : bool or None
        None shows a bar where somebody may look: a terminal or a notebook.
    """

    def __init__(self, wanted: bool | None):
        if wanted is None:
            wanted = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar: Any = None
        if wanted:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=None, unit="it", desc="training", leave=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, seen: dict[str, Any]) -> None:
        """Bring the bar up to what the controller says of the run."""
        if self._bar is None:
            return
        clocks, planned = seen["clocks"], seen["planned"]
        if all(planned):
            self._bar.total = sum(planned)
        self._bar.n = sum(clocks)
        behind = [n for n in range(len(clocks)) if n not in seen["left"]]
        slowest = min(behind, key=lambda n: clocks[n], default=None)
        text = "" if slowest is None or len(clocks) == 1 else f"slowest: trainer {slowest} at {clocks[slowest]}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.refresh()
