"""Failed tasks of dps in the log of a Dask worker, which are told there once more than is of use.

A worker logs an error for each task that fails, "Compute Failed", with its call and its traceback. An error of a
training function, or data that an estimator refuses, is raised in the driver, too, by the call that has made the task.
So the log of the worker would tell it a second time, and before the driver does. Dask's own view of the task stays as
it is: the task has failed, with its error, on the dashboard and for all that asks for its result.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

__all__ = ["drop_failures_told_elsewhere"]

PACKAGE = str(Path(__file__).parents[2])
# Tasks whose functions are of dps, but whose graphs belong to the user: maybe no call of dps ever raises their errors.
OF_USERS = re.compile(r"lazy_(tasks|reads)\.py$")
FIRST_FILE = re.compile(r'File "([^"]+)"')


class FailuresToldElsewhere(logging.Filter):
    """Drops the message about a failed task if the task's function is one of dps, whose driver raises the error."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Compute Failed") or not isinstance(record.args, tuple) or not record.args:
            return True
        # The last argument is the traceback, and its first file is that of the task's function.
        first = FIRST_FILE.search(str(record.args[-1]))
        return first is None or not first[1].startswith(PACKAGE) or OF_USERS.search(first[1]) is not None


told_elsewhere = FailuresToldElsewhere()


def drop_failures_told_elsewhere() -> None:
    """Make the workers of this process log no failed tasks of dps. A second call changes nothing."""
    logging.getLogger("distributed.worker").addFilter(told_elsewhere)
