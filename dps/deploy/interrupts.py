"""A preload for Dask's worker processes: Ctrl-C is for the program, not for the workers that it has started.

A terminal (and a notebook that is told to interrupt its kernel) sends SIGINT to all processes of the program. Workers
would end with a traceback each, and with them the rows of a parameter server. So only the program is interrupted: it
stops the run, and closes the cluster if it ends.

It is a preload, and no plugin, because a plugin is unpickled in the new process, and would import numba, before the
nanny's environment holds there.
"""

from __future__ import annotations

import signal
from typing import Any

import dask

__all__ = ["dask_setup", "ignoring_interrupts"]


def dask_setup(worker: Any) -> None:
    """What Dask calls in the worker's process, in its main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignoring_interrupts(options: dict[str, Any]) -> dict[str, Any]:
    """The preload options for a nanny with this one added to those given, or to those of Dask's configuration."""
    preload = options.get("preload", dask.config.get("distributed.worker.preload"))
    argv = options.get("preload_argv", dask.config.get("distributed.worker.preload-argv"))
    modules = [preload] if isinstance(preload, str) else list(preload or ())
    if not argv or isinstance(argv[0], str):  # Dask gives the same words to each module
        argv = [list(argv or ())] * len(modules)
    return {"preload": [*modules, __name__], "preload_argv": [*argv, []]}
