"""Connection: an endpoint's end of the connection to one peer. It reads, writes, and checks what the peer may do.

Theory of operation
-------------------
A frame is read, handled and answered to completion before the next one, all in the endpoint's thread.

Reading. Small frames are parsed in place in the connection's inbox. A body that does not fit there is read straight
into a buffer of its own, behind its header, so that the compiled step (`plain_answers.py`) can answer the frame as it
answers those of the inbox. The buffer is kept for the next body; after a giant message both shrink back. The sum of
these buffers over all connections of an endpoint is bounded: a body that finds no room waits, unread, for its turn
(`memory.py`). The buffer grows with the part of the body that has arrived, and the connection gives up a body that
arrives more slowly than `dps.limits.trickle`.

Writing. An answer is a view of the connection's outgoing buffer, handed to the transport without a copy. The buffer may
be used again only when the transport has passed everything on; the high-water mark is 0, so the transport reports at
once that it has not (`pause_writing`). From then on this connection is not read, and frames that are in its inbox
already wait, until the peer has taken its answer: a slow reader holds up no peer but itself, and costs the memory of
one answer (with TLS: that and two more, encrypted). An answer that was owed by then, and is due when the backups have
confirmed, gets a buffer of its own. Acknowledgements have no body: those of one turn of the loop leave together
(`departures.py`).

Trust. Until a peer has proved the session secret it may send one small frame, within the connect time-out; its inbox is
small, and where connections are scarce its connection is the first to be closed. Any other frame, and later any frame
that breaks the protocol, closes the connection; other peers do not notice. A peer that has proved the secret may still
be broken or slow: an answer that it does not take, a body that it does not send, or a close that it does not finish is
given up after the request time-out.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from dps import config
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.ring import Ring
from dps.engine.wire import frames
from dps.engine.wire.departures import Coalescer, DirectWriter, Turn
from dps.engine.wire.frame_reader import FrameReader
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_header
from dps.engine.wire.handshake import MAX_HELLO_BYTES, ListeningHandshake
from dps.engine.wire.loans import Loans
from dps.engine.wire.log_limit import LogLimit
from dps.engine.wire.memory import FIRST_BYTES, GROWTH_FACTOR, Buffer, GrowingBody, Incoming
from dps.engine.wire.plain_answers import PlainAnswers, PlainStep
from dps.engine.wire.rights import SERVER, role_of
from dps.engine.wire.shared_memory import MOST_RINGS, opened
from dps.engine.wire.sockets import DEAD_PEER_SECONDS, is_local, keep_alive, widen
from dps.errors import AccessDeniedError, DPSError, MovedError, ProtocolError, RequestTimeoutError

__all__ = ["Connection", "ConnectionOwner", "Handler"]

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit(20))

# Inbox of a peer that has proved the secret; the system gives memory to the part that is used.
PEER_INBOX_BYTES = 1 << 17
# A timer that fires later than this does not judge the pace of a sender, because this process itself was stopped.
MAX_TIMER_DELAY_SECONDS = 1.0
# Kinds of frames whose bodies do not wait for memory. Otherwise two servers, each of them full of ops that the other
# one has to confirm, would wait for each other for ever.
ADMITTED_AT_ONCE = {frames.REPLICATE, frames.DUMP}


Handler = Callable[["Connection", Header, memoryview], object]


class ConnectionOwner(Protocol):
    """What a connection needs of its endpoint: see :class:`dps.engine.wire.endpoint.Endpoint`."""

    loop: asyncio.AbstractEventLoop
    soon: Callable[[Callable[[], None]], object]  # calls a function at the end of the loop's turn
    turn: Turn | None  # the end of a turn of a loop that polls
    handlers: dict[int, Handler]
    secrets: dict[str, str]
    connections: set[Connection]
    strangers: dict[Connection, None]
    service: PlainStep | None  # service of the role: it answers plain frames
    incoming: Incoming
    frame_limit: int  # bytes of a body
    keep_bytes: int  # size of a buffer that is kept between two bodies
    trickle_bytes: int  # bytes a second that a sender of a large body owes
    trickle_seconds: float  # time between two checks of that rate
    patience: float  # seconds for a peer to make progress

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> asyncio.TimerHandle: ...

    def admit(self, connection: Connection) -> bool: ...

    def forget(self, connection: Connection) -> None: ...

    def memory_is_free(self) -> None:
        """A body was handled: let in connections that wait for the memory of theirs."""


class Connection(asyncio.BufferedProtocol):
    """One peer: its inbox, its outgoing buffer, and which secret it has proved."""

    def __init__(self, endpoint: ConnectionOwner):
        self.endpoint = endpoint
        self.session: str | None = None  # the name whose secret the peer has proved; None: none yet
        self.peer = "?"
        self.origin = ("", "")  # session and host of a proved peer: connections of one origin share its memory
        self.party: object = None  # for the role's own use: the trainer or server behind the connection
        self.key_lists = KeyLists()
        self.ring: Ring | None = None  # memory that the peer shares
        self.loans: Loans | None = None  # memory that a peer in this process lends
        self.transport: asyncio.Transport
        self._coalescer: Coalescer
        self._direct: DirectWriter
        self._handshake = ListeningHandshake(endpoint.secrets)
        self._reader = FrameReader(MAX_HELLO_BYTES, self._place, HEADER_SIZE + MAX_HELLO_BYTES)
        self._plain: PlainAnswers | None = None  # answers to a peer that has proved the secret
        self._incoming = Buffer(endpoint.keep_bytes)
        self._outgoing = Buffer(endpoint.keep_bytes)
        self._body: GrowingBody | None = None  # a large body that is arriving
        self._head = Header(0)  # header of the large body that is arriving
        self._paused = False  # the peer has not taken the last answer yet
        self._newest: tuple[Header, bytes] | None = None  # a frame of `send_newest`, to be sent when the peer has
        self._suspended = False  # the role takes no more requests for now
        self._postponed: tuple[Header, memoryview, Buffer | None] | None = None  # a frame that waits for `resume`
        self._kept: Buffer | None = None  # buffer of the postponed frame's body, while the frame is handled again
        self._rests = False  # a large frame was handled in this turn of the loop
        self._awaits_memory = False  # the connection is in line for the memory of a large body
        self._admitted_now = False  # the connection's turn has come in that line
        self._lent: weakref.WeakSet[Buffer] | None = None  # buffers of bodies that the role holds; None: it never did
        self._steps = 0  # counts whatever arrives
        self._turn: Turn | None = None  # end of the turn of a loop that polls after plain answers
        self._begun = False  # a handler has written a part of its answer
        self._proof_timer: asyncio.TimerHandle | None = None  # ends a peer that does not prove the secret
        self._progress_timer: asyncio.TimerHandle | None = None  # ends a peer without progress in a transfer
        self._pace_timer: asyncio.TimerHandle | None = None  # ends a peer whose body comes too slowly
        self._bodies_begun = self._halts = 0  # large bodies so far; how often this side has stopped reading

    # -- transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport, self._coalescer = transport, Coalescer(self.endpoint.soon, transport)
        self._direct = DirectWriter(transport, self._coalescer)
        sock = transport.get_extra_info("socket")
        local = sock is not None and is_local(sock)
        self.peer = "a process of this machine" if local else str(transport.get_extra_info("peername"))
        encrypted = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=int(encrypted))  # TLS transports pause at that size, others above it
        if local:
            widen(sock)
        elif sock is not None:
            keep_alive(sock, max(DEAD_PEER_SECONDS, self.endpoint.patience))
        loop = self.endpoint.loop
        self._proof_timer = loop.call_later(config.seconds("connect"), self._proof_is_late)
        if not self.endpoint.admit(self):
            self.transport.abort()
            return
        self.reply(*self._handshake.greet())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._steps += 1
        self._reader.advance(nbytes)
        self._handle_frames()

    def pause_writing(self) -> None:
        self._paused = True
        self._halts += 1
        self.transport.pause_reading()
        self._expect_progress()

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on()
        news, self._newest = self._newest, None
        if news is not None and not self.transport.is_closing():
            self.send_newest(*news)

    def suspend(self) -> None:
        """Handle no more frames, and read no more, until `resume`."""
        if not self._suspended and not self.transport.is_closing():
            self._suspended = True
            self._halts += 1
            self.transport.pause_reading()

    def postpone(self, header: Header, body: memoryview) -> None:
        """Handle this frame again, and then all later ones, when `resume` is called.

        A small body is copied. The buffer of a large one stays with the frame, and counts as memory of this connection.
        """
        lent: Buffer | None = None
        if len(body) <= PEER_INBOX_BYTES - HEADER_SIZE:
            body = memoryview(bytearray(body))
        elif self._kept is not None:
            lent = self._kept
        else:
            lent, self._incoming = self._incoming, Buffer(self.endpoint.keep_bytes)
            self._lent = weakref.WeakSet() if self._lent is None else self._lent
            self._lent.add(lent)
        self._postponed = header, body, lent
        self.suspend()

    def resume(self) -> None:
        if self._suspended:
            self._suspended = False
            self._go_on()

    def _go_on(self) -> None:
        self._handle_frames()
        if not self._held_up():
            self.transport.resume_reading()

    def _held_up(self) -> bool:
        waits = self._paused or self._suspended or self._rests or self._awaits_memory
        return waits or self.transport.is_closing()

    def _expect_progress(self) -> None:
        """Start the timer that ends a peer which takes no byte of an answer, or sends none of a body, in time."""
        if self._progress_timer is None:
            before = self._steps, self.transport.get_write_buffer_size()
            self._progress_timer = self.endpoint.later(self.endpoint.patience, self._check_progress, before)

    def _check_progress(self, before: tuple[int, int]) -> None:
        self._progress_timer = None
        coming = self._body is not None and not self._suspended
        if self._paused or coming or self.transport.is_closing():
            if before == (self._steps, self.transport.get_write_buffer_size()):
                what = "send its body" if coming and not self._paused else "take its answer"
                logger.warning("%s does not %s: closing the connection", self.peer, what)
                self.transport.abort()
            else:
                self._expect_progress()

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._proof_timer, self._progress_timer, self._pace_timer):
            if timer is not None:
                timer.cancel()
        self.endpoint.forget(self)
        if self._turn is not None:
            self._turn.forget(self)
        self._incoming = self._outgoing = Buffer(0)
        self.key_lists, self.ring, self.loans = KeyLists(), None, None
        # No frame is handled any more, so their memory goes now, and not when Python next looks for cycles.
        self._reader = FrameReader(0, inbox_bytes=0)
        self._plain = None
        self._body = None

    def _proof_is_late(self) -> None:
        if self.session is None:
            self.transport.abort()

    # -- frames in

    def _handle_frames(self) -> None:
        """Handle every frame that is complete, until an answer does not leave."""
        try:
            while not self._held_up():
                if self._postponed is not None:
                    (header, body, self._kept), self._postponed = self._postponed, None
                    self._handle(header, body)
                    self._kept = None
                    continue
                answered = self._answer_plain(self._reader.inbox, self._reader.start, self._reader.end)
                if answered:
                    self._reader.start += answered
                    continue  # because these answers may not leave
                frame = self._reader.next()
                if frame is None:
                    if self._body is not None:
                        self._keep_pace()
                    break
                if self._body is None:
                    self._handle(*frame)
                else:
                    self._handle_large(*frame)
        except (ProtocolError, AccessDeniedError, MemoryError) as error:
            self.refuse(error)
        except Exception:
            logger.exception("the handler of a frame from %s failed", self.peer)
            self.transport.abort()

    def _answer_plain(self, memory: np.ndarray, start: int, end: int) -> int:
        """Answer the plain frames at the beginning of memory[start:end]; how many bytes they have."""
        service = self.endpoint.service
        if self._plain is None or service is None or end - start < HEADER_SIZE:
            return 0
        self._steps += 1
        answered = self._plain.answer(service, memory, start, end)
        if answered and self._turn is not None:
            self._turn.answered()
        return answered

    def _handle_large(self, header: Header, body: memoryview) -> None:
        assert self._body is not None
        whole, self._body = self._body.frame, None
        self.endpoint.incoming.done(self)
        if not self._answer_plain(whole, 0, len(whole)):
            self._handle(header, body)
        if self.endpoint.incoming.contended:
            self.drop()
            self.endpoint.memory_is_free()
        self._rest()

    def _rest(self) -> None:
        """Read on in the next turn of the loop, because the frames of other connections have waited meanwhile."""
        if not self._held_up():
            self._rests = True
            self.transport.pause_reading()
            self.endpoint.soon(self._rested)

    def _rested(self) -> None:
        self._rests = False
        if not self._held_up():
            self._go_on()

    def _place(self, header: Header) -> GrowingBody | None:
        """The buffer of a large body; None while there is no room for it."""
        nbytes = header.body
        if header.kind not in ADMITTED_AT_ONCE:
            nbytes = min(nbytes, max(FIRST_BYTES, self.spare))
        if not self._room_for(header, nbytes):
            return None
        self._head = header
        self._body = GrowingBody(self._incoming, encode_header(header), header.body, nbytes, self._more_room)
        self._bodies_begun += 1
        self._expect_progress()
        return self._body

    def _room_for(self, header: Header, nbytes: int) -> bool:
        """Whether a large body may have that much memory; if not, the connection is not read until its turn comes."""
        if (
            self._admitted_now
            or header.kind in ADMITTED_AT_ONCE
            or self.endpoint.incoming.admit(self, header.body, nbytes)
        ):
            return True
        self._awaits_memory = True
        self._halts += 1
        self.transport.pause_reading()
        return False

    def _more_room(self) -> None:
        assert self._body is not None
        nbytes = min(self._head.body, GROWTH_FACTOR * self._body.filled)
        if self._room_for(self._head, nbytes):
            self._body.grow(nbytes)

    def _keep_pace(self) -> None:
        """Start the timer that checks, again and again, whether a large body comes fast enough."""
        if self._pace_timer is None:
            assert self._body is not None
            before = self._bodies_begun, self._halts, self._body.filled
            due = self.endpoint.now() + self.endpoint.trickle_seconds
            self._pace_timer = self.endpoint.later(self.endpoint.trickle_seconds, self._judge_pace, before, due)

    def _judge_pace(self, before: tuple[int, int, int], due: float) -> None:
        """Give up a body that came more slowly than `dps.limits.trickle`, if nothing but its sender held it up."""
        self._pace_timer = None
        if self._body is None or self.transport.is_closing():
            return
        bodies, halts, filled = before
        endpoint, arrived = self.endpoint, self._body.filled - filled
        on_time = endpoint.now() - due < MAX_TIMER_DELAY_SECONDS
        undisturbed = (bodies, halts) == (self._bodies_begun, self._halts) and not self._held_up()
        if on_time and undisturbed and arrived < endpoint.trickle_bytes * endpoint.trickle_seconds:
            error = RequestTimeoutError(
                f"a request of {self._head.body} bytes comes too slowly: {arrived} bytes in "
                f"{endpoint.trickle_seconds:g} s (dps.timeouts.trickle), where at least {endpoint.trickle_bytes} bytes "
                f"a second (dps.limits.trickle) are due; send smaller requests (dps.limits.chunk), or lower the limit "
                f"where the network is so slow"
            )
            self.reply_error(self._head, error)
            self.refuse(error)
        else:
            self._keep_pace()

    def _handle(self, header: Header, body: memoryview) -> None:
        self._steps += 1
        if self.session is None:
            self._welcome(header, body)
            return
        handler = self.endpoint.handlers.get(header.kind)
        if handler is None:
            raise ProtocolError(f"no handler for frames of kind {header.kind}")
        self._begun = False
        try:
            handler(self, header, body)
        except (DPSError, MemoryError) as error:
            if self._begun:  # the peer would take an error frame for the rest of the answer
                raise RuntimeError("an answer broke off in the middle") from error
            if isinstance(error, ProtocolError):
                raise
            self.reply_error(header, error if isinstance(error, DPSError) else DPSError(f"out of memory: {error}"))
            if isinstance(error, MovedError):  # later requests must not overtake this one, which the client sends again
                self.transport.close()

    def _welcome(self, header: Header, body: memoryview) -> None:
        """Take the first frame. If it proves a session's secret, the peer may send more, and larger ones."""
        welcome = self._handshake.receive(header, body)
        self.session = self._handshake.session
        self.origin = (self.session or "", self._host())
        self.endpoint.strangers.pop(self, None)
        self._reader.limit = self.endpoint.frame_limit
        self._reader.resize(PEER_INBOX_BYTES)
        if self.endpoint.service is not None:
            self._turn = self.endpoint.turn
            if self._turn is not None:
                self._turn.watch(self, self.transport.get_extra_info("socket"))
            self._plain = PlainAnswers(self, self._direct, role_of(self.session) == SERVER)
        self.reply(*welcome)

    def _host(self) -> str:
        """The peer's address without its port; the same for all peers on this machine that use Unix sockets."""
        return str((self.transport.get_extra_info("peername") or ("",))[0])

    def hold(self, body: memoryview) -> tuple[memoryview, Callable[[], None]]:
        """The body of the frame that is being handled, to be used after its handler has returned; and its release, to
        be called after that use.

        A small body is copied. The buffer of a large one is lent: the connection does without it until the release.
        """
        if len(body) <= PEER_INBOX_BYTES - HEADER_SIZE:
            return memoryview(bytearray(body)), _nothing
        lent, self._incoming = self._incoming, Buffer(self.endpoint.keep_bytes)
        loans = self._lent = weakref.WeakSet() if self._lent is None else self._lent
        loans.add(lent)

        def release() -> None:
            loans.discard(lent)
            self.endpoint.memory_is_free()
            if not self.transport.is_closing() and self._body is None:
                self._incoming = lent

        return body, release

    # -- the memory of bodies, see `memory.Holder`

    @property
    def spare(self) -> int:
        return max(0, len(self._incoming) - HEADER_SIZE)

    @property
    def lent(self) -> int:
        return 0 if self._lent is None else sum(len(each) - HEADER_SIZE for each in self._lent)

    @property
    def busy(self) -> bool:
        return self._body is not None

    def drop(self) -> None:
        self._incoming = Buffer(self.endpoint.keep_bytes)

    def granted(self) -> None:
        self._awaits_memory, self._admitted_now = False, True
        if self._body is not None:
            self._more_room()
        self._go_on()
        self._admitted_now = False

    # -- frames out

    def outgoing(self, nbytes: int) -> np.ndarray:
        """The connection's outgoing buffer, uint8[nbytes]: fill it, then `write` views of it."""
        if self._paused:  # a late answer: an earlier one is still leaving from the buffer
            self._outgoing = Buffer(self.endpoint.keep_bytes)
        return self._outgoing.take(nbytes)

    def write(self, data: bytes | memoryview | np.ndarray) -> None:
        """Pass bytes on. A view must be of the outgoing buffer, or of memory that does not change.

        If the peer has closed the connection meanwhile, nothing is sent, so a late answer needs no check.
        """
        self._begun = True
        self._coalescer.flush()
        if not self.transport.is_closing():
            self.transport.write(data)  # type: ignore[arg-type]  # it takes any buffer

    def reply(self, header: Header, body: bytes = b"") -> None:
        """A whole frame with a small body, which is a multiple of 8 bytes."""
        if body:
            header = header._replace(body=len(body))
        self._coalescer.flush()
        if not self.transport.is_closing():
            self.transport.write(encode_header(header) + body)

    def deliver(self, answers: bytes) -> None:
        """Send whole frames that a step has made, at once."""
        self._direct.write(answers, len(answers))

    def share(self, header: Header) -> None:
        """Take up the memory that the peer offers; where that cannot be, its answers come through the socket."""
        sock = self.transport.get_extra_info("socket")
        if sum(each.ring is not None for each in self.endpoint.connections) < MOST_RINGS and is_local(sock):
            self.ring, self.loans = opened(sock, header.number, header.clock), Loans.offered(header.clock)
        self.acknowledge(Header(frames.OK, request=header.request))

    def acknowledge(self, header: Header) -> None:
        """Send a frame without a body at the end of this turn of the loop, in one system call with others."""
        self._coalescer.put(HEADER_SIZE, (encode_header(header),))

    def send_newest(self, header: Header, body: bytes) -> None:
        """Send a frame that makes all earlier ones of this method useless: while the connection is blocked, only the
        newest is kept."""
        if self._paused:
            self._newest = header, body
        else:
            self.reply(header, body)

    def reply_json(self, header: Header, value: object) -> None:
        self.reply(header, frames.encode_json(value))

    def reply_error(self, header: Header, error: BaseException) -> None:
        self.reply(Header(frames.ERROR, request=header.request), frames.encode_error(error))

    def refuse(self, error: Exception) -> None:
        """Send the reason, and close the connection."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        self.reply(Header(frames.ERROR), frames.encode_error(error))
        self.transport.close()
        self._expect_progress()


def _nothing() -> None:
    pass
