"""A preload for Dask's worker processes: Ctrl-C interrupts the program, not the workers that the program has started.

A terminal (and a notebook that interrupts its kernel) sends SIGINT to all processes of the program. Each worker would
end with a traceback, and the rows of a parameter server would be lost. So workers ignore SIGINT: only the program is
interrupted, which stops the run, and closes the cluster when it ends.

This module is a preload and not a plugin, because Dask unpickles a plugin, and so would import dps and numpy, before
the environment variables of the nanny are set in the new process.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import dask

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["dask_setup", "ignoring_interrupts"]


def dask_setup(worker: object) -> None:
    """Ignore SIGINT. Dask calls this in the main thread of the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignoring_interrupts(options: Mapping[str, Any]) -> dict[str, list]:
    """The preload options for a nanny: the given ones, or those of Dask's configuration, and this module."""
    preload = options.get("preload", dask.config.get("distributed.worker.preload"))
    argv = options.get("preload_argv", dask.config.get("distributed.worker.preload-argv"))
    modules = [preload] if isinstance(preload, str) else list(preload or ())
    if not argv or isinstance(argv[0], str):  # one list of arguments is for each of the modules
        argv = [list(argv or ())] * len(modules)
    return {"preload": [*modules, __name__], "preload_argv": [*argv, []]}
