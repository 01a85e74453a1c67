"""Channel: the connecting side. It blocks and has no thread: everything happens in the caller's own thread.

A request is written now and its answer read later, in any order: an answer carries the number of its request, and goes
into that request's *sink*, also while the caller waits for another request.

Two rules keep a channel from locking up. A channel that cannot write also reads, because a server whose answers are not
taken stops reading requests, and both sides would wait for ever. And a channel that stopped in the middle of a frame
(by a time-out or Ctrl-C) is closed, because the beginning of the next frame could not be found.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dps import config
from dps.engine.core.requests.exchange import Stream, Traffic
from dps.engine.core.requests.part import Part
from dps.engine.core.requests.ring import SLOT_BYTES
from dps.engine.wire import frames
from dps.engine.wire.frame_reader import Destination, FrameReader, Sink, WholeBody, pour
from dps.engine.wire.frames import HEADER_SIZE, Header, byte_views, encode_header
from dps.engine.wire.handshake import MAX_ANSWER_BYTES, ConnectingHandshake
from dps.engine.wire.loans import Loans
from dps.engine.wire.shared_memory import offered
from dps.engine.wire.sockets import SLICE_SECONDS, Plain, Tls, connected, connected_locally, hasten, keep_alive
from dps.errors import AccessDeniedError, DPSError, ProtocolError, RequestTimeoutError, ServerGoneError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Channel", "Request", "Sink"]

TIMEOUT_SETTINGS = {frames.TICK: "clock", frames.COLLECT: "clock", frames.HELLO: "connect", frames.GREETING: "connect"}


class SinkBody:
    """The body of a large answer, which goes into the sink of its request."""

    def __init__(self, sink: Sink, size: int):
        self.size = size
        self.buffer, self.advance = sink.buffer, sink.advance

    def body(self) -> memoryview:
        return memoryview(b"")


class Request:
    """A request on its way: its sink, and its answer or error."""

    __slots__ = ("body", "channel", "done", "error", "header", "kind", "part", "size", "sink")

    def __init__(self, channel: Channel, sink: Sink | None, size: int, kind: int = 0, part: Part | None = None):
        self.kind = kind  # kind of its frame
        self.part = part  # sum of a call that it carries
        self.channel = channel
        self.sink = sink
        self.size = size  # bytes that the sink takes; a body may be padded beyond
        self.header: Header | None = None
        self.body: bytes | bytearray | memoryview = b""  # body of an answer without a sink
        self.error: DPSError | None = None
        self.done = False

    @classmethod
    def carrying(cls, part: Part, channel: Channel) -> Request:
        return cls(channel, part if part.size else None, part.size, part=part)

    @classmethod
    def failed(cls, error: DPSError, part: Part) -> Request:
        """A request that could not be sent."""
        request = cls(None, None, 0, part=part)  # type: ignore[arg-type]
        request.error, request.done = error, True
        return request

    @property
    def call_part(self) -> Part:
        assert self.part is not None
        return self.part

    def result(self, deadline: float) -> Request:
        """Wait until `deadline` (time.monotonic) for the answer.

        Raises the error that the peer answered, or a DPSError if the peer is gone, or did not answer in time.
        """
        if not self.done:
            self.channel.read_until(self, deadline)
        if self.error is not None:
            raise self.error
        return self

    def answer(self, deadline: float) -> Header:
        """As :meth:`result`, the header of the answer."""
        header = self.result(deadline).header
        assert header is not None
        return header


class Channel:
    """One connection to a server or to the controller.

    Parameters
    ----------
    session_name, secret : str
        The parameter server's name, and the secret to prove.
    what : str
        What error messages call the peer.
    gone : type of DPSError
        The error for a peer that cannot be reached, or has closed the connection.
    idle : callable, optional
        Called every `SLICE_SECONDS` of a wait, also for the connection and the greeting; it may raise.

    Raises
    ------
    AccessDeniedError
        The peer answers, and TLS with it is impossible, now and later; because its certificate is not trusted, say.
    DPSError
        `gone`, or what :meth:`Request.result` raises.
    """

    def __init__(
        self,
        address: tuple[str, int],
        session_name: str,
        secret: str,
        what: str,
        gone: type[DPSError] = ServerGoneError,
        tls: ssl.SSLContext | None = None,
        idle: Callable[[], None] | None = None,
    ):
        self.what = what
        self.closed = False
        self.idle = idle
        self.traffic = Traffic()
        self.key: tuple[object, ...] | None = None  # key of a channel that a pool may keep: see `pool.py`
        self._gone = gone
        self._requests: dict[int, Request] = {}
        self._sinks = 0  # requests on their way whose answers have a sink
        self._encrypted = tls is not None
        self._reader = FrameReader(MAX_ANSWER_BYTES, self._place)
        self._patience = config.seconds("request")
        deadline = time.monotonic() + config.seconds("connect")
        try:
            sock = connected_locally(address) if tls is None else None
            local = sock is not None
            if sock is None and not address[1]:
                raise gone(f"no process of this machine listens as {what}")
            if sock is None:
                sock = connected(address, deadline, idle)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock)
                hasten(sock)
            self._socket: Plain | Tls = Plain(sock) if tls is None else Tls.over(sock, tls, deadline, idle)
            self.stream = Stream(sock.fileno())
            self.stream.on_large = None if local else self._socket.give_way
            self.stream.local = local
            self._introduce(session_name, secret, deadline, tls is not None)
        except DPSError:  # raised by `idle`, or by the peer; some are OSErrors too
            raise
        except ssl.SSLError as error:
            raise AccessDeniedError(
                f"{what} at {address[0]}:{address[1]} and we cannot speak TLS with each other: {error}; do both have "
                f"certificates of the same authority (the Security that the cluster was made with)?"
            ) from error
        except OSError as error:
            raise gone(f"{what} cannot be reached at {address[0]}:{address[1]}: {error}") from error
        self._reader.limit = config.nbytes("frame")

    def _introduce(self, session_name: str, secret: str, deadline: float, tls: bool) -> None:
        handshake = ConnectingHandshake(session_name, secret, self.what)
        greeting = answer = self._requests[0] = Request(self, None, 0, frames.GREETING)
        try:
            while (reply := handshake.receive(answer.answer(deadline), answer.body)) is not None:
                answer = self.ask(*reply)
        except RequestTimeoutError as error:  # the peer hangs, or its machine is dead; no request was sent yet
            raise self._gone(
                f"{self.what} has not greeted in time, {config.limit('connect')}: it is busy, hangs, or is cut off"
            ) from error
        except self._gone as error:
            if not (tls and greeting.header is None):
                raise
            if self._socket.refusal is not None:
                raise self._socket.refusal from None
            raise self._gone(f"{error}; over TLS, that is also how it refuses our certificate") from error
        except BaseException:
            self.close()
            raise

    # -- out

    def ask(self, header: Header, body: bytes = b"") -> Request:
        """Send a request with a small body; its answer has a small body, too."""
        return self.send(header._replace(body=len(body)), (body,)) if body else self.send(header, ())

    def send(self, header: Header, pieces: Iterable[Buffer], sink: Sink | None = None, size: int = 0) -> Request:
        """Write a request now; its answer goes to `sink`.

        `pieces` are the buffers of the body. A generator may reuse its memory, because a piece has left before the next
        one is drawn.
        """
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        number, self.stream.touched = self.stream.take(), True
        request = self._requests[number] = Request(self, sink, size, header.kind)
        self._sinks += sink is not None
        self.traffic.sent += HEADER_SIZE + header.body
        try:
            self.stream.announce(HEADER_SIZE + header.body)
            head = encode_header(header, number)
            if isinstance(pieces, (tuple, list)):
                self._write([head, *pieces])
            else:
                self._write([head])
                for piece in pieces:
                    self._write([piece])
        except BaseException as error:
            self._break(error)
            raise
        return request

    def post(self, part: Part) -> Request:
        """Write the request of a part of a call now; its answer goes to the places that the call names."""
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        number, self.stream.touched = self.stream.take(), True
        request = Request.carrying(part, self)
        self._expect(request, number)
        try:
            if self._encrypted:
                part.begin(number, self.stream.lists)
                self.stream.announce(part.sent)
            pieces = part.pieces() if self._encrypted else self.stream.write(part, number)
            while pieces:
                self._write(pieces)
                pieces = part.pieces()
        except BaseException as error:
            self._break(error)
            raise
        self.traffic.sent += part.sent
        return request

    def _write(self, buffers: Sequence[Buffer]) -> None:
        deadline = None
        rest = [memoryview(each) for each in byte_views(buffers)]
        while rest:
            try:
                sent = self._socket.send(rest)
            except OSError as error:
                raise self._gone(f"the connection to {self.what} broke: {error}") from error
            while rest and sent >= len(rest[0]):
                sent -= len(rest[0])
                del rest[0]
            if not rest:
                return
            rest[0] = rest[0][sent:]
            now = time.monotonic()
            if sent or deadline is None:
                deadline = now + self._patience
            if now > deadline:
                raise RequestTimeoutError(
                    f"{self.what} has taken no bytes for {config.limit('request', self._patience)}: it is busy, hangs, "
                    f"or is cut off; see its log"
                )
            readable = self._socket.wait(SLICE_SECONDS, also_write=True)
            if readable and self._requests:
                self._read(0)
            elif not sent and self.idle is not None:
                self.idle()
            self.traffic.stall(time.monotonic() - now)

    # -- in

    def read_until(self, request: Request, deadline: float) -> None:
        """Read answers, also those of other requests, until `request` is done."""
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        began = now = time.monotonic()
        try:
            while not request.done:
                left = deadline - now
                if left <= 0:
                    limit = config.limit(TIMEOUT_SETTINGS.get(request.kind, "request"))
                    raise RequestTimeoutError(
                        f"{self.what} has not answered in time, {deadline - began:.3g} s; the limit is {limit} unless "
                        f"the call names another. It is busy, hangs, or is cut off: see its log"
                    )
                if not self._read(min(left, SLICE_SECONDS)) and self.idle is not None:
                    self.idle()
                now = time.monotonic()
        except BaseException as error:
            now = time.monotonic()
            self._break(error)
            raise
        finally:
            self.traffic.blocked += now - began

    def poll(self) -> None:
        """Read the answers that have arrived, without waiting."""
        try:
            while not self.closed and self._requests and self._read(0):
                pass
        except BaseException as error:
            self._break(error)
            raise

    def _read(self, patience: float) -> bool:
        """Read bytes, waiting up to `patience` seconds for the first; False if none came."""
        self.stream.touched = True
        nbytes = self._socket.receive(self._reader.buffer(), patience)
        if nbytes == 0:
            raise self._gone(f"{self.what} closed the connection")
        if nbytes is None:
            return False
        self._reader.advance(nbytes)
        self._take_frames()
        return True

    def _take_frames(self) -> None:
        while (frame := self._reader.next()) is not None:
            self._take(*frame)

    def _place(self, header: Header) -> Destination:
        request = self._requests.get(header.request)
        if header.kind == frames.ERROR or request is None:
            raise ProtocolError(f"{self.what} sent {header.body} bytes that no request asked for")
        if request.sink is None:  # a long text
            return WholeBody(header)
        self._check_size(header, request)
        return SinkBody(request.sink, request.size)

    def _check_size(self, header: Header, request: Request) -> None:
        if header.body != frames.padded(request.size):
            raise ProtocolError(f"{self.what} answered {header.body} bytes where {request.size} were asked for")

    def _take(self, header: Header, body: memoryview) -> None:
        """Take a whole answer. The body of a large one is in its sink already, and `body` is empty."""
        request = self._requests.get(header.request)
        if request is None:
            if header.kind == frames.ERROR:
                raise frames.decode_error(body)  # the peer is about to close
            raise ProtocolError(f"{self.what} answered request {header.request}, which was never made")
        if self.stream.loans is not None and not header.flags & frames.SHARED:
            self.stream.loans.ended(header.request)
        if header.kind == frames.ERROR:
            request.error = frames.decode_error(body)
        elif header.flags & frames.SHARED and not self._take_piece(header, request):
            return
        elif request.part is not None and request.part.accept(header.kind, header.request, header.body, body):
            pass  # its rows are where the caller wants them
        elif request.sink is None:
            request.body = self._kept(body)
        elif body or not header.body:
            self._check_size(header, request)
            pour(body[: request.size], request.sink)
        del self._requests[header.request]
        self._sinks -= request.sink is not None
        self.traffic.answers += 1
        self.traffic.received += HEADER_SIZE + header.body
        request.header, request.done = header, True

    def _take_piece(self, header: Header, request: Request) -> bool:
        """Take a piece of an answer from the memory that the peer shares; whether it was the last one."""
        ring, loans, whole = self.stream.ring, self.stream.loans, frames.padded(request.size)
        if loans is not None and request.sink is not None and loans.ended(header.request):
            if header.start != whole:
                raise ProtocolError(f"{self.what} answered {header.start} bytes in memory lent for {whole}")
            request.sink.advance(request.size)
            self.traffic.received += whole
            return True
        if ring is None or request.sink is None or header.body or not 0 < header.start <= min(whole, SLOT_BYTES):
            raise ProtocolError(
                f"{self.what} answered {header.start} bytes in shared memory, where {whole} were to come"
            )
        nbytes = min(header.start, request.size)
        pour(memoryview(ring.slot())[:nbytes], request.sink)
        ring.taken()
        request.size -= nbytes
        self.traffic.received += header.start
        return header.start == whole

    def _kept(self, body: memoryview) -> bytes | memoryview:
        """The body of an answer for later: copied, unless it has memory of its own, and is not in the inbox."""
        return bytes(body) if body.obj is self._reader.inbox else body

    # -- a call past this channel, see `exchange.pyx`

    @property
    def is_plain(self) -> bool:
        """Whether a call may use the socket past this channel: nothing is half read, and no large answer is owed."""
        return not (self.closed or self._sinks or self._encrypted) and self._reader.between_frames

    def share(self) -> None:
        """Offer memory to the peer, which is a process of this machine, for the large answers that it owes.

        Nothing waits for the answer, because a request that comes after it is not handled before it.
        """
        offer = offered()
        if offer is not None:
            self.stream.ring, number = offer
            self.stream.loans = Loans(self.stream.ring.mark)
            with contextlib.suppress(DPSError):  # the connection is closed, and those that use it find that out
                self.ask(Header(frames.SHARE, number=number, clock=self.stream.ring.mark))

    def acknowledged(self, number: int) -> bool:
        """A call has read the answer to an earlier request: OK, without a body. False if there is no such request."""
        request = self._requests.get(number)
        if request is None or request.sink is not None:
            return False
        del self._requests[number]
        request.header, request.done = Header(frames.OK, request=number), True
        return True

    def adopt(self, request: Request, number: int) -> None:
        """Go on with a request that a call has written to the socket."""
        if self.closed:
            request.error, request.done = self._gone(f"the connection to {self.what} broke"), True
            return
        self.stream.touched = True
        self._expect(request, number)

    def _expect(self, request: Request, number: int) -> None:
        self._requests[number] = request
        self._sinks += request.sink is not None

    def feed(self, received: bytes) -> None:
        """Go on with bytes that a call has read; to be called when its requests are adopted."""
        if self.closed:
            return
        rest = memoryview(received)
        try:
            while rest:
                rest = rest[self._reader.feed(rest) :]
                self._take_frames()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Close the connection, because of an error in the middle of a message; open requests fail."""
        self._break(error)

    # -- the end

    def is_idle(self) -> bool:
        """Whether it is open without a request on its way, so that another client may use it."""
        if self.closed or self._requests or self.stream.calls or not self._reader.between_frames:
            return False
        return not self._socket.wait(0)  # else the peer has closed it, or has sent bytes without a request

    def _break(self, error: BaseException) -> None:
        self.close()
        cause = error if isinstance(error, DPSError) else self._gone(f"the connection to {self.what} broke: {error!r}")
        for request in self._requests.values():
            request.error, request.done = cause, True
        self._requests.clear()

    def close(self) -> None:
        """Close the connection. Requests without an answer get none.

        Where a plain call of another thread uses the socket, this ends the connection, and that thread closes it.
        """
        self.closed = True
        socket_ = getattr(self, "_socket", None)
        if socket_ is None:
            return
        self.stream.touched = self.stream.ended = True
        self.stream.ring = None
        if self.stream.loans is not None:
            self.stream.loans.close()
        if self.stream.calls:
            self.stream.close_after(socket_.close)
            socket_.end()
        else:
            socket_.close()
