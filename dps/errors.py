"""Every error that dps raises.

Each is a :class:`DPSError` and also the builtin that Python users would catch (``KeyError`` for an unknown table,
``TimeoutError`` for a time-out, ...). Messages name the thing, the numbers and the remedy. All of them pickle, and
cross the data plane as their class name and message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "AccessDeniedError",
    "CheckpointError",
    "ClockTimeoutError",
    "ClosedError",
    "ControllerGoneError",
    "DPSError",
    "DataLostError",
    "FencedError",
    "InputError",
    "InputTypeError",
    "KeyRangeError",
    "LimitError",
    "MissingPackageError",
    "MovedError",
    "NameInUseError",
    "NotFiniteError",
    "ProtocolError",
    "RequestTimeoutError",
    "ServerGoneError",
    "StoppedError",
    "TooFewWorkersError",
    "TrainerLostError",
    "UnknownTableError",
    "VersionMismatchError",
    "by_name",
]


class DPSError(Exception):
    """Base of all errors of dps."""

    def __str__(self) -> str:  # KeyError would show the repr of its message
        return str(self.args[0]) if self.args else type(self).__name__


class InputError(DPSError, ValueError):
    """A value that dps cannot take: wrong shape, length, dtype that would lose numbers, impossible setting."""


class InputTypeError(DPSError, TypeError):
    """An object of a kind that dps does not understand."""


class NotFiniteError(InputError):
    """NaN or infinity pushed to a table that refuses them (``finite=True``)."""


class KeyRangeError(DPSError, IndexError):
    """A row number outside a dense table."""


class LimitError(InputError):
    """A request larger than a limit in ``dps.yaml`` allows."""


class UnknownTableError(DPSError, KeyError):
    """A table that the parameter server does not have."""


class NameInUseError(DPSError, ValueError):
    """Two tables, or two parameter servers, of one name."""


class TooFewWorkersError(DPSError, RuntimeError):
    """Not enough Dask workers for the servers, or not enough free threads for the trainers."""


class ServerGoneError(DPSError, ConnectionError):
    """A server's process ended or its connection broke."""


class MovedError(DPSError, ConnectionError):
    """A server is not (or not now) the one to ask for a shard. Clients look for the right one by themselves."""


class FencedError(DPSError, ConnectionError):
    """A server that was replaced spoke as if it had not been. It gives up what it held."""


class ControllerGoneError(DPSError, ConnectionError):
    """The controller (the scheduler process) ended or its connection broke."""


class DataLostError(ServerGoneError, LookupError):
    """The last copy of some rows is gone: the message names the table, the keys and what to restore from."""


class CheckpointError(DPSError, ValueError):
    """A checkpoint that is damaged, was never finished, is not there, or cannot be written. Others may serve."""


class MissingPackageError(DPSError, ImportError):
    """Something that dps can do needs a package that is not installed; the message says how to install it."""


class RequestTimeoutError(DPSError, TimeoutError):
    """A server or the controller did not answer in time."""


class ClockTimeoutError(DPSError, TimeoutError):
    """A trainer waited too long for slower ones; the message names the slowest."""


class TrainerLostError(DPSError, RuntimeError):
    """A trainer vanished without leaving."""


class StoppedError(DPSError, RuntimeError):
    """The run was stopped: by another trainer's failure, by the user, or because its task was cancelled."""


class ClosedError(DPSError, RuntimeError):
    """A parameter server or client was used after it was closed."""


class ProtocolError(DPSError, ConnectionError):
    """A frame that does not follow the protocol. The connection is closed; nothing was applied."""


class AccessDeniedError(DPSError, PermissionError):
    """A connection that could not prove knowledge of the session secret, or on which TLS cannot be agreed on."""


class VersionMismatchError(DPSError, RuntimeError):
    """Not the same version of dps everywhere; the message names the versions, and where each is."""


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn an ImportError into a MissingPackageError that names the extra of dps which has the package."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(f"{error}: pip install 'dps[{extra}]'", name=error.name) from error


def by_name(name: str) -> type[DPSError]:
    """The error class called `name`; :class:`DPSError` itself when there is none (a newer peer may know more)."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, DPSError) else DPSError
