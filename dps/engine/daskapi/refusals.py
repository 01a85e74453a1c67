"""Refusals: errors of dps that come back from the scheduler as values.

Dask logs a traceback for every exception that a handler of the scheduler raises. That is right for a mistake in the
code of dps. A wrong call (a name in use, too few workers) is a mistake of the caller, and its message is for the
caller. So the handlers of the controller return such an error as a value, and the driver raises it, with its type and
its attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from distributed.protocol.pickle import dumps, loads

from dps.errors import DPSError

__all__ = ["as_value", "value"]

T = TypeVar("T")
REFUSED = "dps-refused"  # the key of a pickled error
DONE = "dps-done"  # in place of None, which Dask answers where a scheduler has no such handler


def as_value(handler: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    """The handler, returning a DPSError where it raises one; any other exception goes on to Dask's log.

    It never returns None, because None says that there is no such handler.
    """

    @functools.wraps(handler)  # because Dask inspects the signature
    async def answer(*args: object, **kwargs: object) -> object:
        try:
            result = await handler(*args, **kwargs)
            return DONE if result is None else result
        except DPSError as error:
            return {REFUSED: dumps(error)}

    return answer


def value(answer: T) -> T | None:
    """The value that a handler answered; the DPSError with which it refused the call is raised."""
    if isinstance(answer, dict) and REFUSED in answer:
        raise loads(answer[REFUSED])
    return None if isinstance(answer, str) and answer == DONE else answer
