"""TrainerPort: where a trainer listens to other trainers, its connections to them, and what one fetches of another.

What is fetched travels in pieces of up to 1 MiB. Each answer says how many bytes there are in all, and of which
*edition* they are, because the holder may have made them anew since the piece before (`PieceAnswer`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from dps.engine.client.environment import Environment
from dps.engine.client.ticket import Ticket
from dps.engine.daskapi.processes import trainer_tls
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import PieceAnswer
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import Handler, Rights, guarded
from dps.errors import ProtocolError, ServerGoneError

__all__ = ["FETCHED_BYTES", "TrainerPort", "answer_later", "answer_piece"]

# Largest piece that travels in one frame, so that a trainer that fetches looks now and then whether it is to stop.
FETCHED_BYTES = 1 << 20
LATER_SECONDS = 0.1  # between two questions for what the holder cannot serve yet
LATER = 0  # the edition in an answer that brings nothing


class TrainerPort:
    """A trainer's listener, with a thread of its own, for other trainers.

    The secret and TLS of the `ticket` protect the connections; `handlers` are for the frames that `rights` names.
    """

    def __init__(self, ticket: Ticket, environment: Environment, rights: Rights, handlers: Mapping[int, Handler]):
        self._ticket, self._environment = ticket, environment
        host = _own_host(ticket.controller[0])
        guards = guarded(rights, handlers)
        self._endpoint = Endpoint("trainer", host, dict(guards), None, trainer_tls(ticket.security))
        self._endpoint.call(self._endpoint.secrets.update, {ticket.session: ticket.secret})
        self.address = self._endpoint.host, self._endpoint.port
        self.submit = self._endpoint.submit

    def connect(self, address: tuple[str, int], check: Callable[[], None]) -> Channel:
        """A channel to another trainer. `check` is called now and then in a wait, and may raise."""
        return self._environment.connect(self._ticket, address, "a trainer", ServerGoneError, check)

    def fetch(
        self, address: tuple[str, int], ask: Callable[[int], Header], deadline: float, check: Callable[[], None]
    ) -> bytearray:
        """Bytes that another trainer has, until `deadline` (time.monotonic).

        `ask` makes the request for those from a place on. Raises ServerGoneError if the trainer is gone, or what it
        answers.
        """
        channel, content, edition = self.connect(address, check), bytearray(), LATER
        try:
            while True:
                request = channel.ask(ask(len(content)))
                piece, body = PieceAnswer.of(request.answer(deadline)), request.body
                if piece.edition == LATER:
                    check()
                    self._environment.sleep(LATER_SECONDS)
                    continue
                if content and piece.edition != edition:  # the holder has made the bytes anew
                    content.clear()
                    continue
                edition, size = piece.edition, min(FETCHED_BYTES, piece.total - len(content))
                if size < 0 or len(body) != frames.padded(size):
                    raise ProtocolError(f"a trainer has sent {len(body)} bytes where {size} were missing")
                content += body[:size]
                if len(content) == piece.total:
                    return content
        finally:
            channel.close()

    def close(self) -> None:
        self._endpoint.stop()


def answer_piece(connection: RoleConnection, request: int, content: memoryview, start: int, edition: int = 1) -> None:
    """Answer a request for the bytes of `content` from `start` on."""
    piece = bytes(content[max(0, start) : max(0, start) + FETCHED_BYTES])
    header = PieceAnswer(len(content), edition).header(request)
    connection.reply(header, piece.ljust(frames.padded(len(piece)), b"\0"))


def answer_later(connection: RoleConnection, request: int) -> None:
    """Answer that the other trainer is to ask again after a moment."""
    connection.reply(PieceAnswer(0, LATER).header(request))


def _own_host(controller: str) -> str:
    """The address of this machine on the way to the controller's."""
    family = socket.AF_INET6 if ":" in controller else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((controller, 9))  # a datagram socket sends nothing to connect
        return way.getsockname()[0]
