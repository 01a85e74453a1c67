"""The controller's and servers' end of the simulated network: an endpoint, its connections and links.

Three things are stricter than with real sockets. The body of a frame is overwritten as soon as its handler returns,
unless the handler held it, so code that keeps a view of it always reads garbage, not only sometimes. Connections are
in the order in which they were made. An error in a handler that is no DPSError ends the simulation, not one connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dps import config
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.ring import Ring
from dps.engine.simulation.network import END, End, ListeningEnd, Network
from dps.engine.simulation.world import Party, Timer
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Handler
from dps.engine.wire.frames import HEADER_SIZE, Header, byte_views, decode_header, encode_header
from dps.engine.wire.handshake import MAX_HELLO_BYTES, ConnectingHandshake, ListeningHandshake
from dps.engine.wire.loans import Loans
from dps.engine.wire.plain_answers import ROOM_BYTES, PlainStep
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint, RoleLink
from dps.engine.wire.rights import SERVER, role_of
from dps.errors import AccessDeniedError, DPSError, MovedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["SimConnection", "SimEndpoint", "SimLink"]

GARBAGE = b"\xa5" * 4096
KINDS: dict[int, str] = {}
for _name, _value in vars(frames).items():  # kinds stand before flags, and some flags have the same numbers
    if _name.isupper() and isinstance(_value, int) and not _name.startswith("_"):
        KINDS.setdefault(_value, _name)
BODY_SIZE = struct.Struct("<Q")  # the last field of a header: bytes of the body


def spoil(body: memoryview) -> None:
    """Overwrite a body that no code may read any more."""
    for start in (0, max(0, len(body) - len(GARBAGE))):
        end = min(len(body), start + len(GARBAGE))
        body[start:end] = GARBAGE[: end - start]


class Transport:
    """What a connection writes to. It collects bytes into whole frames, and sends these."""

    def __init__(self, end: SimConnection):
        self._end = end
        self._closing = False
        self._rest = bytearray()  # the beginning of a frame

    def write(self, data: Buffer) -> None:
        if self.is_closing():
            return
        data = memoryview(data).cast("B")
        if self._rest or len(data) < HEADER_SIZE or len(data) != _size(data):
            self._rest += data
            while len(self._rest) >= HEADER_SIZE and len(self._rest) >= (size := _size(self._rest)):
                self._end.emit(self._rest[:size])
                del self._rest[:size]
        else:
            self._end.emit(bytearray(data))

    def writelines(self, buffers: Sequence[Buffer]) -> None:
        for data in byte_views(buffers):
            self.write(data)

    def is_closing(self) -> bool:
        return self._closing or self._end.over

    def get_write_buffer_size(self) -> int:
        return 0 if self._end.over else self._end.outward.unsent

    def close(self) -> None:
        """Hang up after all frames that were written."""
        self._leave(rudely=False)

    def abort(self) -> None:
        """Hang up at once."""
        self._leave(rudely=True)

    def _leave(self, rudely: bool) -> None:
        if not self.is_closing():
            self._closing = True
            self._end.host.later(0, self._end.lost)
            self._end.hang_up(rudely)


Result = TypeVar("Result")


def _size(frame: Buffer) -> int:
    return HEADER_SIZE + BODY_SIZE.unpack_from(frame, HEADER_SIZE - BODY_SIZE.size)[0]


class SimConnection(ListeningEnd):
    """The accepted side of a connection, as :class:`dps.engine.wire.endpoint.Connection`."""

    def __init__(self, endpoint: SimEndpoint):
        super().__init__(endpoint.host_party)
        self.endpoint = endpoint
        self.session: str | None = None
        self.party: object = None  # for the role's own use
        self.key_lists = KeyLists()
        self.ring: Ring | None = None
        self.loans: Loans | None = None
        self.peer = "?"
        self._handshake = ListeningHandshake(endpoint.secrets)
        self.transport = Transport(self)
        self._paused = self._suspended = self._begun = self._held = False
        self._news: tuple[Header, bytes] | None = None
        self._stuck: Timer | None = None
        self._postponed: bytearray | None = None  # a frame that waits for `resume`
        self.is_copy = False  # of an older connection, without a network

    def __repr__(self) -> str:
        return f"{self.peer}>{self.host}"

    # -- in

    def arrived(self) -> None:
        inbox = self.inward.inbox
        while (inbox or self._postponed) and not (self._paused or self._suspended or self.transport.is_closing()):
            if self._postponed is not None:
                frame, self._postponed = self._postponed, None
                self.handle(decode_header(frame, 0, self.endpoint.frame_limit), frame)
                continue
            message = self.take()
            if isinstance(message, bytearray):
                self._frame(message)
            elif message is END:
                self.finish()
                self.lost()

    def greet(self) -> tuple[Header, bytes]:
        """The frame with which the endpoint greets the caller."""
        return self._handshake.greet()

    def _welcome(self, frame: bytearray) -> None:
        """Take the first frame, which has to prove a session's secret."""
        self.peer = self.peer_name
        self.endpoint.connections[self] = None
        header = decode_header(frame, 0, MAX_HELLO_BYTES)
        welcome, body = self._handshake.receive(header, memoryview(frame)[HEADER_SIZE:])
        self.session = self._handshake.session
        self.outward.write(bytearray(encode_header(welcome) + body), 0)

    def _frame(self, frame: bytearray) -> None:
        endpoint, world = self.endpoint, self.host.world
        try:
            if self.session is None:
                self._welcome(frame)
                return
            header = decode_header(frame, 0, endpoint.frame_limit)
            kind = KINDS.get(header.kind, header.kind)
            world.note("%s>%s %s %d.%d #%d", self.peer, self.host, kind, header.clock, header.number, header.request)
            if header.kind in endpoint.repeated and world.random.random() < endpoint.network.repeats:
                delay = endpoint.network.delay(self.host, self.host) * world.random.choice((1, 10, 100))
                self.host.later(delay, self._again, bytearray(frame))
            self.handle(header, frame)
        except (ProtocolError, AccessDeniedError) as error:
            self.refuse(error)

    def handle(self, header: Header, frame: bytearray) -> None:
        """Let the role's compiled step answer the frame, or else call the handler for its kind, whose DPSError is the
        answer."""
        body = memoryview(frame)[HEADER_SIZE:]
        self._held = self._begun = False
        try:
            if self._answer_plain(frame):
                return
            handler = self.endpoint.handlers.get(header.kind)
            if handler is None:
                raise ProtocolError(f"no handler for frames of kind {header.kind}")
            handler(self, header, body)  # type: ignore[arg-type]
        except DPSError as error:
            if self._begun or isinstance(error, ProtocolError):
                raise
            self.reply_error(header, error)
            if isinstance(error, MovedError):
                self.transport.close()
        finally:
            if not self._held:
                spoil(body)

    def _answer_plain(self, frame: bytearray) -> bool:
        """Whether the role's compiled step has answered the frame."""
        service = self.endpoint.service
        if self.session is None or service is None:
            return False
        memory, answers = np.frombuffer(frame, np.uint8), np.empty(ROOM_BYTES, np.uint8)
        from_server = role_of(self.session) == SERVER
        answered, made = service.step(memory, 0, len(frame), answers, self, from_server)
        if answered:
            self.transport.write(answers[:made])
            while service.left:
                self.transport.write(answers[: service.more(answers)])
        return bool(answered)

    def _again(self, frame: bytearray) -> None:
        """Handle a frame a second time, as if a copy of it arrived from an older connection that broke long ago."""
        ghost = SimConnection(self.endpoint)
        ghost.over = ghost.is_copy = True
        ghost.peer = f"{self.peer} (again)"
        ghost.session = self.session
        ghost.party, ghost.key_lists = self.party, self.key_lists
        header = decode_header(frame, 0, self.endpoint.frame_limit)
        self.host.world.note("%s>%s %s %d.%d again", self.peer, self.host, header.kind, header.clock, header.number)
        ghost.handle(header, frame)

    def hold(self, body: memoryview) -> tuple[memoryview, Callable[[], None]]:
        self._held = True
        return body, lambda: spoil(body)

    def postpone(self, header: Header, body: memoryview) -> None:
        self._postponed = bytearray(encode_header(header) + body)
        self.suspend()

    def suspend(self) -> None:
        self._suspended = True

    def resume(self) -> None:
        if self._suspended:
            self._suspended = False
            if not self.is_copy:
                self.host.later(0, self.arrived)

    def lost(self) -> None:
        """The connection has ended: tell the endpoint."""
        if self._stuck is not None:
            self._stuck.cancel()
        self.endpoint.forget(self)

    # -- out

    def outgoing(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def write(self, data: Buffer) -> None:
        self._begun = True
        self.transport.write(data)

    def emit(self, frame: bytearray) -> None:
        """Send a whole frame; stop reading while the window has no room for it."""
        self.outward.write(frame, len(frame))
        if self.outward.unsent and not self._paused:
            self._paused = True
            self._watch(self.outward.unsent)

    def drained(self) -> None:
        if self._paused:
            self._paused = False
            if self._stuck is not None:
                self._stuck.cancel()
            self.arrived()
            news, self._news = self._news, None
            if news is not None and not self.transport.is_closing():
                self.send_newest(*news)

    def _watch(self, unsent: int) -> None:
        """Abort the connection if the peer takes no byte of its answers for the length of the request time-out."""

        def check() -> None:
            if self._paused and not self.over:
                if self.outward.unsent == unsent:
                    self.transport.abort()
                else:
                    self._watch(self.outward.unsent)

        self._stuck = self.host.later(self.endpoint.patience, check)

    def send_newest(self, header: Header, body: bytes) -> None:
        if self._paused:
            self._news = header, body
        else:
            self.reply(header, body)

    def reply(self, header: Header, body: bytes = b"") -> None:
        if body:
            header = header._replace(body=len(body))
        self.transport.write(encode_header(header) + body)

    def deliver(self, answers: bytes) -> None:
        self.transport.write(answers)

    def share(self, header: Header) -> None:
        self.reply(Header(frames.OK, request=header.request))  # answers come through the socket

    def acknowledge(self, header: Header) -> None:
        self.reply(header)

    def reply_json(self, header: Header, value: object) -> None:
        self.reply(header, frames.encode_json(value))

    def reply_error(self, header: Header, error: BaseException) -> None:
        self.reply(Header(frames.ERROR, request=header.request), frames.encode_error(error))

    def refuse(self, error: Exception) -> None:
        self.reply(Header(frames.ERROR), frames.encode_error(error))
        self.transport.close()


class SimLink(End):
    """An endpoint's own connection to another, as :class:`dps.engine.wire.link.Link`."""

    def __init__(
        self,
        endpoint: SimEndpoint,
        session_name: str,
        secret: str,
        on_up: Callable[[RoleLink], None],
        on_frame: Callable[[RoleLink, Header, memoryview], None],
        on_end: Callable[[RoleLink], None],
    ):
        super().__init__(endpoint.host_party)
        self.open = self.refused = False
        self.party: Any = None  # for the role's own use,
        self.plain: Callable[[np.ndarray, int, int], int] | None = None  # and what takes plain frames
        self.handshake = ConnectingHandshake(session_name, secret, "the other side")
        self._endpoint = endpoint
        self._on_up, self._on_frame, self._on_end = on_up, on_frame, on_end
        self._deadline = self.host.later(config.seconds("connect"), self.close)

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        if not self.over:
            frame = bytearray(encode_header(header))
            for piece in byte_views(buffers):
                frame += piece
            if len(frame) != HEADER_SIZE + header.body:
                raise RuntimeError(f"a frame of {len(frame) - HEADER_SIZE} bytes announces {header.body}")
            self.outward.write(frame, len(frame))

    def write(self, buffers: Sequence[Buffer]) -> None:
        frames_ = b"".join(byte_views(buffers))
        while frames_ and not self.over:
            size = _size(frames_)
            self.outward.write(bytearray(frames_[:size]), size)
            frames_ = frames_[size:]

    def close(self) -> None:
        """Hang up; `on_end` is called afterwards, never within this call."""
        if not self.over:
            self.hang_up(rudely=True)
            self.host.later(0, self._ended)

    def arrived(self) -> None:
        while self.inward.inbox and not self.over:
            message = self.take()
            if message is END:
                self.finish()
                self._ended()
            elif isinstance(message, bytearray):
                self._frame(message)

    def drained(self) -> None:
        """A link never waits for room, so there is nothing to resume."""

    def _frame(self, frame: bytearray) -> None:
        header, body = decode_header(frame, 0, self._endpoint.frame_limit), memoryview(frame)[HEADER_SIZE:]
        try:
            if self.open:
                peer, kind = self.inward.sender.host, KINDS.get(header.kind)
                self.host.world.note("%s<%s %s #%d", self.host, peer, kind, header.request)
                if self.plain is None or not self.plain(np.frombuffer(frame, np.uint8), 0, len(frame)):
                    self._on_frame(self, header, body)
            else:
                self.handshake.receive(header, body)
                self._deadline.cancel()
                self.open = True
                self._on_up(self)
        except DPSError:
            self.close()
        spoil(body)

    def _ended(self) -> None:
        self._deadline.cancel()
        self.open = False
        self._on_end(self)


class SimEndpoint:
    """A party's listening side, as :class:`dps.engine.wire.endpoint.Endpoint`, on virtual time."""

    def __init__(
        self,
        network: Network,
        party: Party,
        handlers: dict[int, Handler] | None = None,
        on_close: Callable[[RoleConnection], None] | None = None,
        address: tuple[str, int] | None = None,
    ):
        self.network, self.host_party = network, party
        self.handlers: dict[int, Handler] = {} if handlers is None else handlers
        self.service: PlainStep | None = None  # it answers plain frames, before the handlers see them
        self.repeated = frozenset({frames.PUSH})  # kinds of frames that the fault `repeats` repeats
        self.secrets: dict[str, str] = {}
        self.connections: dict[SimConnection, None] = {}
        self.frame_limit = config.nbytes("frame")
        self.patience = config.seconds("request")
        self.now, self.later = party.now, party.later
        self.host, self.port = address or (party.name, 1 + len(network.endpoints))
        self._on_close = on_close
        network.endpoints[self.host, self.port] = self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which this endpoint listens."""
        return self.host, self.port

    def connect(
        self,
        address: tuple[str, int],
        session_name: str,
        secret: str,
        on_up: Callable[[RoleLink], None],
        on_frame: Callable[[RoleLink, Header, memoryview], None],
        on_end: Callable[[RoleLink], None],
    ) -> SimLink:
        """Connect this endpoint to another one."""
        link = SimLink(self, session_name, secret, on_up, on_frame, on_end)
        link.refused = self.network.refuses(self.host_party, (address[0], address[1]))
        self.network.connect(link, (address[0], address[1]), link.handshake)
        return link

    def call(self, function: Callable[..., Result], *args: object, timeout: float = 60) -> Result:
        """Run `function` at once. A real endpoint runs it in its own thread."""
        return function(*args)

    def submit(self, function: Callable[..., Result], *args: object) -> Result:
        """As `call`."""
        return function(*args)

    def new_connection(self) -> SimConnection:
        """The accepted side of a new connection."""
        return SimConnection(self)

    def forget(self, connection: SimConnection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            if self._on_close is not None:
                self._on_close(connection)

    def stop(self) -> None:
        """Hang up every connection, and listen no more."""
        if not self.port:  # the name is another process's from now on
            self.network.endpoints.pop(self.address, None)
        for connection in list(self.connections):
            connection.transport.abort()


def _contract(endpoint: SimEndpoint, connection: SimConnection) -> tuple[RoleEndpoint, RoleConnection]:
    """For mypy: the simulator offers all that a role may ask of an endpoint, its connections and its links."""
    return endpoint, connection
