"""A server's role without sockets: bytes in, bytes out, through the compiled step or past it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.ring import Ring
from dps.engine.server.functions import DIRECT
from dps.engine.server.requests import ServerRole
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header, encode_error, encode_header
from dps.engine.wire.messages import Placement, ShardPlace
from dps.engine.wire.plain_answers import ROOM_BYTES
from dps.errors import DPSError, MovedError, ProtocolError

AT_ONCE: Any = SimpleNamespace(run=DIRECT.run, close=lambda: None)
NO_RUNNER: Any = SimpleNamespace(close=lambda: None)  # of servers without functions

FOREVER = 1e12
MOST_PIECES = 10_000  # of an answer; a wrong variant may have more of it for ever


class Endpoint:
    """Nothing happens by itself: time stands still, and links never open."""

    frame_limit, host, port, connections = 1 << 26, "here", 1, ()

    def now(self) -> float:
        return 0.0

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> None: ...

    def connect(self, *args: object) -> Any:
        return SimpleNamespace(open=False, close=lambda: None, party=None)


class Peer:
    """A connection: it collects what it is sent."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.key_lists = KeyLists()
        self.ring: Ring | None = None
        self.received = bytearray()
        self.closing = False
        self.transport = SimpleNamespace(is_closing=lambda: False, close=self._close)

    def _close(self) -> None:
        self.closing = True

    def outgoing(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def write(self, data: Any) -> None:
        self.received += memoryview(data).cast("B")

    def reply(self, header: Header, body: bytes = b"") -> None:
        self.write(encode_header(header._replace(body=len(body))) + body)

    def reply_error(self, header: Header, error: BaseException) -> None:
        self.reply(Header(frames.ERROR, request=header.request), encode_error(error))

    def reply_json(self, header: Header, value: object) -> None:
        self.reply(header, frames.encode_json(value))

    def share(self, header: Header) -> None: ...

    def acknowledge(self, header: Header) -> None:
        self.reply(header)

    def deliver(self, answers: bytes) -> None:
        self.write(answers)

    def hold(self, body: memoryview) -> tuple[memoryview, Callable[[], None]]:
        return body, lambda: None

    def suspend(self) -> None: ...


class LoneServer:
    """A server of some tables, with all of their shards; their other copies are on servers that cannot be reached.

    Parameters
    ----------
    specs : list of TableSpec
        Each with an id of its own.
    plain : bool
        Whether frames go through the compiled step.
    backup : bool
        It is the second of two servers, and its peer is the first. Otherwise it is the first, and its peer a client.
    room : int
        Bytes of answers that the compiled step makes at a time.
    memory : int
        Bytes that all tables may take; 0: any number.
    """

    def __init__(
        self, specs: list[TableSpec], plain: bool, backup: bool = False, room: int = ROOM_BYTES, memory: int = 0
    ):
        self.plain, self.backup = plain, backup
        self.peer = Peer("s/servers" if backup else "s")
        of_role: Any = Endpoint(), "s", int(backup), "ab", ("there", 1), NO_RUNNER, AT_ONCE
        self.role = ServerRole(*of_role, memory=memory)
        self.role.heartbeat.lease_until = FOREVER
        self.answered = self.declined = 0
        self._answers = np.empty(room, np.uint8)
        for spec in specs:
            self.role.create(spec, range(spec.shards))
        copies = {spec.id: 2 if backup else spec.copies for spec in specs}
        places = {s.id: [ShardPlace([*range(copies[s.id])], None, [1] * 8, False)] * s.shards for s in specs}
        self.role.adopt(Placement(1, {n: ("here", n + 1) for n in range(8)}, places))

    def step(self, arrived: bytes) -> tuple[int, bytes]:
        """What the compiled step makes of these bytes: how many it answers, and its answers."""
        inbox = np.frombuffer(bytearray(arrived), np.uint8)
        answered, made = self.role.service.step(inbox, 0, len(inbox), self._answers, self.peer, self.backup)
        answers = [self._answers[:made].tobytes()]
        while self.role.service.left:
            answers.append(self._answers[: self.role.service.more(self._answers)].tobytes())
            assert len(answers) <= MOST_PIECES, "an answer has no end"
        return answered, b"".join(answers)

    def take(self, arrived: bytes) -> bytes:
        """Answer all these frames, as a connection does; what it sends."""
        self.peer.received.clear()
        while arrived:
            if self.plain:
                size, answers = self.step(arrived)
                self.peer.received += answers
                arrived = arrived[size:]
                self.answered += size > 0
            if arrived:
                self.declined += 1
                header = decode_header(arrived, 0, 1 << 40)
                end = HEADER_SIZE + header.body
                self.handle(header, memoryview(bytearray(arrived[HEADER_SIZE:end])))
                arrived = arrived[end:]
        return bytes(self.peer.received)

    def handle(self, header: Header, body: memoryview) -> None:
        """Answer one frame in the general way."""
        try:
            self.role.handlers[header.kind](self.peer, header, body)  # type: ignore[arg-type]
        except DPSError as error:
            self.peer.reply_error(header, error)
            if isinstance(error, (MovedError, ProtocolError)):
                self.peer.transport.close()
