"""RingPeer: a trainer's connections to the members beside it in a ring, and what has come over them.

A peer listens with a thread of its own for the member before it, and writes to the member after it in the trainer's
thread. In each *round* (one attempt at one allreduce) the members are the same. A piece of a round that the trainer has
not begun yet stays in its connection until it begins; pieces of rounds that have ended are dropped.

A member that cannot go on says so to the member after it, and that one does the same, so all members learn of it.
Results are kept for a trainer that is run again, and
repeats the calls of its earlier attempt: it asks another member for the result.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

from dps.engine.client.environment import Environment
from dps.engine.client.ticket import Ticket
from dps.engine.daskapi.processes import trainer_tls
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import CONTROL, Header
from dps.engine.wire.headers import RingPiece
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import TO_TRAINER, guarded
from dps.errors import ClockTimeoutError, InputError, ProtocolError, ServerGoneError

__all__ = ["RingPeer"]

KEPT_BYTES = 1 << 26  # of the results of earlier rounds, beside the last one
REMEMBERED_ROUNDS = 64  # that have ended, or were given up
WAIT_SECONDS = 0.1  # between two looks whether the run was stopped
PIECE_BYTES = 1 << 20  # of a result that is fetched


class RingPeer:
    """A trainer's end of rings.

    Parameters
    ----------
    ticket : Ticket
        The parameter server, whose secret and TLS protect the connections between trainers, too.
    environment : Environment
        Makes connections.
    check : callable
        Called now and then in a wait; it raises an error if the trainer is to stop.

    Attributes
    ----------
    address : (str, int)
        Where the peer listens.
    """

    def __init__(self, ticket: Ticket, environment: Environment, check: Callable[[], None]):
        self._ticket, self._environment, self._check = ticket, environment, check
        self._news = threading.Condition()  # guards all that follows up to the channel
        self._round: int | None = None
        self._arrived: dict[tuple[int, int], bytes] = {}  # of this round, by step and first byte
        self._room = 0  # bytes that may lie there
        self._lost: deque[int] = deque(maxlen=REMEMBERED_ROUNDS)  # rounds that some member has given up
        self._ended: deque[int] = deque(maxlen=REMEMBERED_ROUNDS)
        self._early: list[RoleConnection] = []  # of members that are in a later round already
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # round -> bytes of its result, the oldest first
        self._channel: Channel | None = None  # to the member after this one
        self._next: tuple[str, int] | None = None  # the address of that one
        self._sent: deque[Request] = deque()  # pieces that it has not acknowledged yet
        handlers = guarded(TO_TRAINER, {frames.RING: self._take, frames.RING_RESULT: self._tell})
        host = _own_host(ticket.controller[0])
        self._endpoint = Endpoint("trainer", host, dict(handlers), None, trainer_tls(ticket.security))
        self._endpoint.call(self._endpoint.secrets.update, {ticket.session: ticket.secret})
        self.address = self._endpoint.host, self._endpoint.port

    # -- a round, in the trainer's thread

    def begin(self, number: int, following: tuple[str, int], nbytes: int) -> None:
        """Begin a round over an array of `nbytes`, whose next member listens at `following`."""
        with self._news:
            self._round, self._arrived, self._room = number, {}, nbytes
            early, self._early = self._early, []
        self._sent.clear()
        if self._channel is None or self._channel.closed or self._next != following:
            self._hang_up()
            self._channel, self._next = self._connected(following), following
        for connection in early:
            self._endpoint.submit(connection.resume)

    def send(self, step: int, start: int, content: memoryview) -> None:
        """Send bytes of the array to the next member."""
        assert self._channel is not None
        assert self._round is not None
        piece = RingPiece(self._round, step, start, len(content))
        padding = bytes(frames.padded(len(content)) - len(content))
        self._sent.append(self._channel.send(piece.header(), (content, padding)))

    def receive(self, step: int, start: int, nbytes: int, deadline: float) -> memoryview:
        """Wait for bytes of the member before; `deadline` is of the monotonic clock.

        Raises
        ------
        ServerGoneError
            A member has given the round up.
        ClockTimeoutError
            Nothing has come in time.
        """
        with self._news:
            while (content := self._arrived.pop((step, start), None)) is None:
                if self._round in self._lost:
                    raise ServerGoneError("another trainer of the ring is gone")
                if time.monotonic() > deadline:
                    raise ClockTimeoutError(f"step {step} of an allreduce has not come in time: is a trainer stuck?")
                self._news.wait(WAIT_SECONDS)
                self._check()
            self._room += nbytes
        if frames.padded(nbytes) != len(content):
            raise ProtocolError(f"a piece of a ring has {len(content)} bytes, and {nbytes} were expected")
        return memoryview(content)[:nbytes]

    def finish(self, deadline: float) -> None:
        """Wait until the next member has acknowledged all pieces."""
        while self._sent:
            self._sent.popleft().result(deadline)

    def give_up(self, following: tuple[str, int], number: int) -> None:
        """Tell the next member that this one does not take part in a round, or no longer."""
        with contextlib.suppress(ServerGoneError, OSError):  # it is gone itself
            if self._channel is None or self._channel.closed or self._next != following:
                self._hang_up()
                self._channel, self._next = self._connected(following), following
            self._channel.ask(RingPiece(number, 0, 0, 0).header(flags=CONTROL))
        self._hang_up()

    def end(self, number: int, result: np.ndarray | None) -> None:
        """The round has ended, with this result."""
        with self._news:
            self._round, self._arrived = None, {}
            self._ended.append(number)
            if result is None:
                return
            self._kept[number] = result.reshape(-1).view(np.uint8)
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)

    def fetch(self, address: tuple[str, int], number: int, nbytes: int, deadline: float) -> bytearray:
        """The result of a round from a member that has kept it.

        Raises
        ------
        ServerGoneError
            The member is gone.
        InputError
            It has kept later results only.
        """
        channel, result = self._connected(address), bytearray(nbytes)
        try:
            for start in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - start)
                asked = channel.ask(RingPiece(number, 0, start, size).header(frames.RING_RESULT)).result(deadline)
                result[start : start + size] = asked.body[:size]
        finally:
            channel.close()
        return result

    def close(self) -> None:
        """Close all connections; the thread ends."""
        self._hang_up()
        self._endpoint.stop()

    def _connected(self, address: tuple[str, int]) -> Channel:
        return self._environment.connect(self._ticket, address, "a trainer", ServerGoneError, self._check)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._sent.clear()

    # -- in the endpoint's thread

    def _take(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        piece = RingPiece.of(header)
        with self._news:
            if header.flags & CONTROL:
                self._lost.append(piece.round)
                self._news.notify()
            elif piece.round == self._round:
                self._put(piece, body)
            elif piece.round not in self._ended:
                self._early.append(connection)
                connection.postpone(header, body)
                return
        connection.acknowledge(Header(frames.OK, request=header.request))

    def _put(self, piece: RingPiece, body: memoryview) -> None:
        self._room -= piece.nbytes
        if self._room < 0 or len(body) != frames.padded(piece.nbytes):
            raise ProtocolError(f"a piece of {len(body)} bytes, of which {piece.nbytes} count, has no place in a ring")
        self._arrived[piece.step, piece.start] = bytes(body)
        self._news.notify()

    def _tell(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        piece = RingPiece.of(header)
        with self._news:
            kept = self._kept.get(piece.round)
        if kept is None:
            raise InputError("the result of this allreduce is no longer kept")
        content = kept[piece.start : piece.start + piece.nbytes].tobytes()
        connection.reply(Header(frames.OK, request=header.request), content.ljust(frames.padded(len(content)), b"\0"))


def _own_host(controller: str) -> str:
    """The address of this machine on the way to the controller's."""
    family = socket.AF_INET6 if ":" in controller else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((controller, 9))  # a datagram socket sends nothing to connect
        return way.getsockname()[0]
