"""What a role (a server, the controller's membership, its runs) may ask of an endpoint, a connection and a link.

The classes of this room and those of the simulator (`simulation/endpoint.py`) both satisfy these contracts, so a role
runs on either of them, and mypy checks both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.ring import Ring
from dps.engine.wire.frames import Header
from dps.engine.wire.loans import Loans

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["EndpointCaller", "RoleConnection", "RoleEndpoint", "RoleLink", "RoleTransport"]


T = TypeVar("T")


class EndpointCaller(Protocol):
    """Runs a function in the endpoint's thread, for a caller on another event loop, which goes on meanwhile."""

    def __call__(self, function: Callable[..., T], /, *args: object) -> Awaitable[T]: ...


class RoleTransport(Protocol):
    """The transport of a connection, which a role may close."""

    def is_closing(self) -> bool: ...

    def close(self) -> None:
        """Close the connection, once all that was written has left."""

    def abort(self) -> None: ...


class RoleConnection(Protocol):
    """A connection that a peer has opened: see :class:`dps.engine.wire.connection.Connection`."""

    party: object  # for the role's own use: the trainer or server behind the connection
    key_lists: KeyLists  # the lists of keys that the peer's requests name by numbers
    ring: Ring | None  # memory that the peer shares, for the bodies of large answers
    loans: Loans | None  # memory that a peer in this process lends for them

    @property
    def session(self) -> str | None:
        """The name whose secret the peer has proved."""

    @property
    def transport(self) -> RoleTransport: ...

    def reply(self, header: Header, body: bytes = b"") -> None: ...

    def reply_json(self, header: Header, value: object) -> None: ...

    def reply_error(self, header: Header, error: BaseException) -> None: ...

    def share(self, header: Header) -> None:
        """Take up the memory that the peer offers."""

    def acknowledge(self, header: Header) -> None: ...

    def deliver(self, answers: bytes) -> None: ...

    def send_newest(self, header: Header, body: bytes) -> None: ...

    def outgoing(self, nbytes: int) -> np.ndarray: ...

    def write(self, data: bytes | memoryview | np.ndarray) -> None: ...

    def hold(self, body: memoryview) -> tuple[memoryview, Callable[[], None]]: ...

    def postpone(self, header: Header, body: memoryview) -> None: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class RoleLink(Protocol):
    """A connection that this endpoint has opened: see :class:`dps.engine.wire.link.Link`."""

    party: Any  # for the role's own use
    refused: bool  # the machine at the address has answered that nothing listens there
    # Takes frames at the beginning of inbox[start:end], and says how many bytes they have; the rest goes to `on_frame`.
    plain: Callable[[np.ndarray, int, int], int] | None

    @property
    def open(self) -> bool:
        """Whether both sides have proved the secret."""

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None: ...

    def write(self, buffers: Sequence[Buffer]) -> None: ...

    def close(self) -> None: ...


class RoleEndpoint(Protocol):
    """The endpoint on which a role runs, in its thread: see :class:`dps.engine.wire.endpoint.Endpoint`."""

    frame_limit: int  # bytes of a body
    host: str
    port: int

    @property
    def connections(self) -> Collection[RoleConnection]:
        """All open connections."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> object: ...

    def connect(
        self,
        address: tuple[str, int],
        session_name: str,
        secret: str,
        on_up: Callable[[RoleLink], None],
        on_frame: Callable[[RoleLink, Header, memoryview], None],
        on_end: Callable[[RoleLink], None],
    ) -> RoleLink: ...
