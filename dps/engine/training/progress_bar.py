"""How far a run is, while it goes on: a table of clocks in a notebook, tqdm's bar in a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from dps.engine.dashboard.notebook import clocks_html, summary
from dps.engine.telemetry.snapshot import RunPhase, RunStatus

if TYPE_CHECKING:
    import tqdm
    from IPython.display import DisplayHandle

__all__ = ["ProgressBar"]


class View(Protocol):
    """Where it is shown."""

    def show(self, seen: RunStatus) -> None: ...
    def close(self) -> None: ...


class ProgressBar:
    """Shows how far the trainers are: iterations completed of those planned, which is slowest, and which wait.

    With `wanted` None, it is shown where a person may look: in a terminal or a notebook.
    """

    def __init__(self, wanted: bool | None):
        notebook = in_notebook()
        if wanted is None:
            wanted = notebook or sys.stderr.isatty()
        self._view: View | None = (Page() if notebook else bar()) if wanted else None
        self._seen: RunStatus | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._view is None:
            return
        if error is not None and self._seen is not None:  # no trainer works on, whatever was seen last
            reason = self._seen.stopped or repr(error)[:500]
            self._view.show(msgspec.structs.replace(self._seen, state=RunPhase.FAILED, stopped=reason))
        self._view.close()

    def show(self, seen: RunStatus) -> None:
        if self._view is not None:
            self._seen = seen
            self._view.show(seen)


def in_notebook() -> bool:
    """Whether output goes to JupyterLab, VS Code and the like, which speak to a Jupyter kernel."""
    ipython = sys.modules.get("IPython")  # not imported: then this is no kernel
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Page:
    """HTML, changed in its place: that needs no widgets, and works wherever a kernel's output is shown."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._began = time.monotonic()

    def show(self, seen: RunStatus) -> None:
        from IPython.display import display

        seconds = time.monotonic() - self._began
        text = f"run {seen.run}: {sum(seen.clocks)} iterations in {seconds:.1f} s; {summary(seen)}"
        both = {"text/html": clocks_html(seen, seconds=seconds), "text/plain": text}
        if self._handle is None:
            self._handle = display(both, raw=True, display_id=True)
        else:
            self._handle.update(both, raw=True)

    def close(self) -> None:
        """The last picture stays."""


class Bar:
    def __init__(self, tqdm: type[tqdm.tqdm]):
        self._bar = tqdm(total=None, unit="it", desc="training", leave=True)

    def show(self, seen: RunStatus) -> None:
        planned = [trainer.planned for trainer in seen.trainers]
        if all(planned):
            self._bar.total = sum(planned)
        self._bar.n = sum(seen.clocks)
        self._bar.set_postfix_str(summary(seen), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def bar() -> Bar | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return Bar(tqdm)
