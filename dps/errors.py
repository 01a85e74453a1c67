"""Every error that dps raises.

Each error is a :class:`DPSError` and also the builtin error that Python users would catch (``KeyError`` for an unknown
table, ``TimeoutError`` for a time-out, ...). Messages name the object, the numbers and the remedy. All errors can be
pickled, and travel between processes as their class name and message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "AccessDeniedError",
    "BehindError",
    "BusyError",
    "CheckpointError",
    "ClockTimeoutError",
    "ClosedError",
    "ControllerGoneError",
    "DPSError",
    "DataLostError",
    "FencedError",
    "FunctionError",
    "FunctionTimeoutError",
    "InputError",
    "InputTypeError",
    "KeyRangeError",
    "LeaseError",
    "LimitError",
    "MissingPackageError",
    "MovedError",
    "NameInUseError",
    "NotFiniteError",
    "PoolFullError",
    "ProtocolError",
    "RequestTimeoutError",
    "ServerGoneError",
    "SpillError",
    "StoppedError",
    "TooFewWorkersError",
    "TrainerLostError",
    "UnguardedMainError",
    "UnknownColumnError",
    "UnknownFunctionError",
    "UnknownTableError",
    "UnknownWordError",
    "VersionMismatchError",
    "by_name",
]


class DPSError(Exception):
    """The base class of all errors of dps."""

    def __str__(self) -> str:  # KeyError would show the repr of its message
        return str(self.args[0]) if self.args else type(self).__name__


class InputError(DPSError, ValueError):
    """A value that dps cannot use: a wrong shape or length, a dtype that would lose digits, an impossible setting."""


class InputTypeError(DPSError, TypeError):
    """An object of a type that dps cannot use."""


class NotFiniteError(InputError):
    """NaN or infinity pushed to a table that refuses them (``finite=True``)."""


class PoolFullError(DPSError, MemoryError):
    """No room for one more vector in the pool of its length. The message names the capacity and the remedy."""


class KeyRangeError(DPSError, IndexError):
    """A row number outside a dense table."""


class LimitError(InputError):
    """A request that is larger than a limit in ``dps.yaml``."""


class UnknownTableError(DPSError, KeyError):
    """A table that the parameter server does not have."""


class UnknownColumnError(DPSError, KeyError):
    """A column that a table does not have. The message names those that it has."""


class UnknownWordError(DPSError, KeyError):
    """A word without a vector."""


class BusyError(DPSError, RuntimeError):
    """Rows that a function of another client is about to change. Clients try again by themselves."""


class UnknownFunctionError(DPSError, KeyError):
    """A function that the servers do not know, because it was not registered."""


class FunctionError(DPSError, RuntimeError):
    """A function of the user has failed on a server. No row has changed; the message has the end of its traceback."""


class FunctionTimeoutError(FunctionError, TimeoutError):
    """A function of the user did not end in time on a server. No row has changed."""


class NameInUseError(DPSError, ValueError):
    """A second table, or a second parameter server, of the same name."""


class TooFewWorkersError(DPSError, RuntimeError):
    """Not enough Dask workers for the servers, or not enough free threads for the trainers."""


class UnguardedMainError(DPSError, RuntimeError):
    """A program starts worker processes, which import it, outside of ``if __name__ == "__main__":``."""


class ServerGoneError(DPSError, ConnectionError):
    """A server's process ended or its connection broke."""


class MovedError(DPSError, ConnectionError):
    """A server is not the primary of a shard, or not at this moment. Clients find the primary by themselves."""


class LeaseError(MovedError):
    """A server's lease is over. It is asking other servers whether it may go on without the controller."""


class BehindError(MovedError):
    """A backup does not know that it has all acknowledged pushes to a shard. The client asks the primary."""


class FencedError(DPSError, ConnectionError):
    """A server that was replaced sent a request as if it had not been. It gives up its shards."""


class ControllerGoneError(DPSError, ConnectionError):
    """The controller (the scheduler process) ended or its connection broke."""


class DataLostError(ServerGoneError, LookupError):
    """The last replica of some rows is lost. The message names the table, the keys and a checkpoint to restore."""


class SpillError(DPSError, OSError):
    """A server cannot read or write the file with the rows that its memory has no room for (``evict="spill"``)."""


class CheckpointError(DPSError, ValueError):
    """A checkpoint that is damaged, unfinished or missing, or cannot be written. An older one may be whole."""


class MissingPackageError(DPSError, ImportError):
    """A package that the call needs is not installed. The message says how to install it."""


class RequestTimeoutError(DPSError, TimeoutError):
    """A server or the controller did not answer in time."""


class ClockTimeoutError(DPSError, TimeoutError):
    """A trainer waited too long for slower trainers. The message names the slowest."""


class TrainerLostError(DPSError, RuntimeError):
    """A trainer's connection or worker was lost, and the trainer did not come back in time."""


class StoppedError(DPSError, RuntimeError):
    """The run was stopped: by another trainer's failure, by the user, or because its task was cancelled."""


class ClosedError(DPSError, RuntimeError):
    """A parameter server, a client, or a result on the servers was used after it was closed."""


class ProtocolError(DPSError, ConnectionError):
    """A frame that does not follow the protocol. Its receiver has applied nothing of it, and closes the connection."""


class AccessDeniedError(DPSError, PermissionError):
    """A connection whose peer does not prove that it knows the session's secret, or that fails to agree on TLS."""


class VersionMismatchError(DPSError, RuntimeError):
    """The processes have different versions of dps. The message names the versions and the processes."""


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn an ImportError into a MissingPackageError that names the extra of dps which has the package."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(f"{error}: pip install 'dps[{extra}]'", name=error.name) from error


def told(value: object, length: int = 100) -> str:
    """A value as an error shows it: of what has rows, type and shape, because errors go to logs and data may be secret.

    Anything else is shown by its `repr`, cut to `length` characters.

    >>> import numpy as np
    >>> told(np.ones((3, 2))), told([np.ones(3)]), told("much"), told((1, None))
    ('a ndarray of shape (3, 2)', 'a list of 1', "'much'", '(1, None)')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"a {type(value).__name__} of shape {shape}"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        if any(hasattr(item, "shape") or isinstance(item, (list, tuple, set, dict)) for item in items):
            return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.{length}}"


def by_name(name: str) -> type[DPSError]:
    """The error class of that name, or :class:`DPSError` if there is none: a newer peer may have more errors."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, DPSError) else DPSError
