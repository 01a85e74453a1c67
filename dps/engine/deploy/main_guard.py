"""Programs that start worker processes without ``if __name__ == "__main__":``, refused before any process starts.

Python starts a worker process by *spawn*: the process imports the program again, under the name ``__mp_main__``. A
program without a guard would start its cluster again in each of them, so Python refuses that, and all that Dask can
tell is that a nanny failed to start. The program is refused in the first process if its source shows that no condition
stands around the call, because the import would run the call again. Otherwise the worker process refuses it.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
import traceback

import dask

from dps.errors import UnguardedMainError

__all__ = ["check_main_guard"]

CONDITIONS = (ast.If, ast.Match, ast.IfExp, ast.BoolOp)


def check_main_guard() -> None:
    """Raise unless the program may start worker processes here.

    Raises
    ------
    UnguardedMainError
        A worker process imports the program at this moment, or would run this call when it does.
    """
    if dask.config.get("distributed.worker.multiprocessing-method") == "fork":
        return  # because a forked process imports nothing
    # Python's own mark of a process that still imports the program that has spawned it: it has no public name.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise refusal("a worker process has imported this program, which")
    path, line = _module_level_call()
    if line and not is_conditional(path, line):
        raise refusal(f"{path}, line {line},")


def refusal(what: str) -> UnguardedMainError:
    return UnguardedMainError(
        f'{what} starts worker processes outside of `if __name__ == "__main__":`. Each worker process imports the '
        "program, and would start processes in its turn. Put the lines that start the cluster and use it under such an "
        "`if`; or use threads: LocalCluster(processes=False)"
    )


def _module_level_call() -> tuple[str, int]:
    """The file of the program and the line at its top level that this call comes from; 0 for a call from elsewhere."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""  # none in a notebook and in `python -c`: workers import nothing then
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals is vars(main) and code.co_filename == path:
            return path, line
    return path, 0


def is_conditional(path: str, line: int) -> bool:
    """Whether a condition stands around a line of a program, or its source cannot be read."""
    try:
        with open(path, "rb") as file:
            nodes = list(ast.walk(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError):
        return True
    return any(isinstance(node, CONDITIONS) and node.lineno <= line <= (node.end_lineno or 0) for node in nodes)
