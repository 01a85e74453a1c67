"""Connection: what an endpoint has for each peer. Reading, writing, and whom to believe.

Theory of operation
-------------------
A frame is read, handled and answered to completion before the next one, all in the endpoint's thread.

Reading. Small frames are parsed in place in the connection's inbox. A body that does not fit there is read straight
into a buffer of its own, kept for the next one; after a giant message both shrink back. All these buffers of an
endpoint together are bounded: a body that finds no room waits, unread, for its turn (`memory.py`). The buffer of a body
grows with what has come of it, and a body that comes more slowly than `dps.limits.trickle` is given up.

Writing. An answer is a view of the connection's outgoing buffer, handed to the transport without a copy. The buffer may
be used again only when the transport has passed everything on; the high-water mark is 0, so the transport tells at once
when it has not (`pause_writing`). From then on this connection is not read, and frames already in its inbox wait, until
the peer has taken its answer: a slow reader holds up nobody but itself, and costs one answer of memory (TLS: that and
two more, encrypted). Answers that are owed by then, and come when backups have confirmed, get buffers of their own.
Acknowledgements have no body: those of one turn of the loop leave together (`outbox.py`).

Trust. Until a connection has proved the session's secret it may send one small frame, within the connect time-out; it
has a small inbox, and where connections are scarce it is the first to go. Anything else, and later any frame that
breaks the protocol, closes it; others do not notice. Who has proved the secret may still be broken or slow: an answer
that is not taken, a body that does not come, or a closing that does not end, is given up after the request time-out.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dps import config
from dps.errors import AccessDeniedError, DPSError, MovedError, ProtocolError, RequestTimeoutError
from dps.wire import frames, session
from dps.wire.frames import HEADER_SIZE, Header, decode_header, encode_header
from dps.wire.memory import FIRST, GROWTH, Buffer
from dps.wire.outbox import Outbox
from dps.wire.quiet import GONE, AtMost, keep_alive
from dps.wire.rights import STRANGER, TO_ANY, allowed
from dps.wire.waiting import waiting

if TYPE_CHECKING:
    from dps.wire.endpoint import Endpoint

__all__ = ["Connection"]

logger = logging.getLogger(__name__)
logger.addFilter(AtMost(20))

INBOX = 1 << 16
HANDSHAKE_LIMIT = 1 << 12  # bytes that a stranger may send
AWAKE = 1.0  # seconds that a look may be late: later ones come from a process that slept, and judge no sender
# Bodies that wait for no memory: else two servers, each full of what the other has to confirm, would wait for ever.
AHEAD = {frames.REPLICATE, frames.DUMP}


class Connection(asyncio.BufferedProtocol):
    """One peer: its inbox, its outgoing buffer, and who it has proved to be."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.session: str | None = None  # set by a proved HELLO
        self.peer = "?"
        self.origin = ("", "")  # session and host, once it has proved the secret: they share memory
        self.party: Any = None  # for the role's own use: the trainer behind the connection
        self.transport: Any = None
        self._outbox: Any = None
        self._nonce = session.new_nonce()
        self._inbox = memoryview(np.empty(HEADER_SIZE + HANDSHAKE_LIMIT, np.uint8))
        self._start = self._end = 0  # the unread part of the inbox
        self._incoming = Buffer(endpoint.keep)
        self._outgoing = Buffer(endpoint.keep)
        self._body: memoryview | None = None  # a large body on its way in,
        self._head = Header(0)  # its header
        self._filled = 0  # and how much of it is there
        self._paused = False  # the last answer has not left yet
        self._news: tuple[Header, bytes] | None = None  # to be told when it has
        self._suspended = False  # the role takes no more requests for now
        self._waiting = self._granted = False  # in line for the memory of a large body; and its turn has come
        self._lent: weakref.WeakSet[Buffer] | None = None  # with bodies that the role has kept; None: it never has
        self._steps = 0  # grows whenever something comes in
        self._begun = False  # a handler has written a part of its answer
        self._deadline: asyncio.TimerHandle | None = None  # of the proof,
        self._stuck: asyncio.TimerHandle | None = None  # of an answer or a body that does not move,
        self._pace: asyncio.TimerHandle | None = None  # and of a body that comes too slowly
        self._bodies = self._halts = 0  # large bodies so far; times that reading was held up by this side

    # -- transport callbacks

    def connection_made(self, transport: Any) -> None:
        self.transport, self._outbox = transport, Outbox(self.endpoint.loop, transport)
        self.peer = str(transport.get_extra_info("peername"))
        encrypted = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=int(encrypted))  # TLS transports pause at that size, others above it
        if (sock := transport.get_extra_info("socket")) is not None:
            keep_alive(sock, max(GONE, self.endpoint.patience))
        loop = self.endpoint.loop
        self._deadline = loop.call_later(config.seconds("connect"), self._too_slow)
        if not self.endpoint.admit(self):
            self.transport.abort()
            return
        self.reply_json(Header(frames.GREETING), {"version": frames.VERSION, "nonce": self._nonce})

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox[self._end :] if self._body is None else self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._steps += 1
        if self._body is None:
            self._end += nbytes
        else:
            self._filled += nbytes
            if self._filled == len(self._body) < self._head.body:
                self._more_room()
        self._handle_frames()

    def pause_writing(self) -> None:
        self._paused = True
        self._halts += 1
        self.transport.pause_reading()
        self._watch()

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on()
        news, self._news = self._news, None
        if news is not None and not self.transport.is_closing():
            self.tell(*news)

    def suspend(self) -> None:
        """Handle no more frames, and read no more, until `resume`."""
        if not self._suspended and not self.transport.is_closing():
            self._suspended = True
            self._halts += 1
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._suspended:
            self._suspended = False
            self._go_on()

    def _go_on(self) -> None:
        """Handle what has come meanwhile, then read on."""
        self._handle_frames()
        if not self._held_up():
            self.transport.resume_reading()

    @property
    def untaken(self) -> bool:
        """The peer has yet to take an answer: until then nothing of what it sent is looked at."""
        return self._paused

    def waiting(self) -> tuple[int, int]:
        """Frames that are still to be handled, and their bytes, as far as they have come."""
        sock = self.transport.get_extra_info("socket")
        if self.session is None or sock is None or self.transport.is_closing():
            return 0, 0
        encrypted = self.transport.get_extra_info("ssl_object") is not None
        inbox = self._inbox[self._start : self._end]
        if self._body is None:
            return waiting(sock, encrypted, inbox, None)
        count, nbytes = waiting(sock, encrypted, inbox, self._head.body - self._filled)
        return count, nbytes + self._filled

    def _held_up(self) -> bool:
        return self._paused or self._suspended or self._waiting or self.transport.is_closing()

    def _watch(self) -> None:
        """Give up a peer that for the request time-out takes nothing of its answer, or sends nothing of a body."""
        if self._stuck is None:
            before = self._steps, self.transport.get_write_buffer_size()
            self._stuck = self.endpoint.later(self.endpoint.patience, self._look, before)

    def _look(self, before: tuple[int, int]) -> None:
        self._stuck = None
        coming = self._body is not None and not self._suspended
        if self._paused or coming or self.transport.is_closing():
            if before == (self._steps, self.transport.get_write_buffer_size()):
                what = "send its body" if coming and not self._paused else "take its answer"
                logger.warning("%s does not %s: closing the connection", self.peer, what)
                self.transport.abort()
            else:
                self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._deadline, self._stuck, self._pace):
            if timer is not None:
                timer.cancel()
        self.endpoint.forget(self)
        self._incoming = self._outgoing = Buffer(0)

    def _too_slow(self) -> None:
        if self.session is None:
            self.transport.abort()

    # -- frames in

    def _handle_frames(self) -> None:
        """Handle every frame that is complete, unless an answer is stuck."""
        try:
            while not self._held_up():
                if self._body is not None:
                    if self._filled < self._head.body:
                        break
                    body, self._body = self._body, None
                    self.endpoint.incoming.done(self)
                    self._handle(self._head, body)
                    if self.endpoint.incoming.contended:
                        self.drop()
                        self.endpoint.memory_is_free()
                elif not self._next_frame():
                    break
        except (ProtocolError, MemoryError) as error:
            self.refuse(error)
        except Exception:
            logger.exception("a frame from %s broke its handler", self.peer)
            self.transport.abort()

    def _next_frame(self) -> bool:
        """Handle the inbox's next frame; False when it is not complete."""
        start, end = self._start, self._end
        if end - start >= HEADER_SIZE:
            limit = HANDSHAKE_LIMIT if self.session is None else self.endpoint.frame_limit
            header = decode_header(self._inbox, start, limit)
            after = start + HEADER_SIZE + header.body
            if after <= end:
                self._start = after
                self._handle(header, self._inbox[start + HEADER_SIZE : after])
                if self._start == self._end:
                    self._start = self._end = 0
                return True
            if header.body > INBOX - HEADER_SIZE:
                nbytes = header.body if header.kind in AHEAD else min(header.body, max(FIRST, len(self._incoming)))
                if not self._room_for(header, nbytes):
                    return False
                self._head, self._filled = header, end - start - HEADER_SIZE
                self._body = memoryview(self._incoming.take(nbytes))
                self._body[: self._filled] = self._inbox[start + HEADER_SIZE : end]
                self._start = self._end = 0
                self._bodies += 1
                self._watch()
                self._keep_pace()
                return False
        if start > 0:  # keep the beginning of the next frame at the front, and aligned
            self._inbox[: end - start] = bytes(self._inbox[start:end])
            self._start, self._end = 0, end - start
        return False

    def _room_for(self, header: Header, nbytes: int) -> bool:
        """Whether a large body may have so much memory; if not, nothing is read until its turn comes."""
        if self._granted or header.kind in AHEAD or self.endpoint.incoming.admit(self, header.body, nbytes):
            return True
        self._waiting = True
        self._halts += 1
        self.transport.pause_reading()
        return False

    def _more_room(self) -> None:
        """The buffer of a body is full, and more is to come."""
        nbytes = min(self._head.body, GROWTH * self._filled)
        if self._room_for(self._head, nbytes):
            self._body = memoryview(self._incoming.grow(nbytes, self._filled))

    def _keep_pace(self) -> None:
        """Look at a large body after a while, and again: whether it comes fast enough."""
        if self._pace is None:
            before, due = (self._bodies, self._halts, self._filled), self.endpoint.now() + self.endpoint.over
            self._pace = self.endpoint.later(self.endpoint.over, self._judge_pace, before, due)

    def _judge_pace(self, before: tuple[int, int, int], due: float) -> None:
        """Give up a body that came more slowly than `dps.limits.trickle`, where nothing but its sender held it up."""
        self._pace = None
        if self._body is None or self.transport.is_closing():
            return
        bodies, halts, filled = before
        endpoint, came = self.endpoint, self._filled - filled
        awake = endpoint.now() - due < AWAKE
        alone = (bodies, halts) == (self._bodies, self._halts) and not self._held_up()
        if awake and alone and came < endpoint.trickle * endpoint.over:
            error = RequestTimeoutError(
                f"a request of {self._head.body} bytes comes too slowly: {came} bytes in {endpoint.over:g} s "
                f"(dps.timeouts.trickle), where at least {endpoint.trickle} bytes a second (dps.limits.trickle) are "
                f"due; send smaller requests (dps.limits.chunk), or lower the limit where the network is so slow"
            )
            self.reply_error(self._head, error)
            self.refuse(error)
        else:
            self._keep_pace()

    def _handle(self, header: Header, body: memoryview) -> None:
        self._steps += 1
        if self.session is None:
            self._prove(header, body)
            return
        handler = self.endpoint.handlers.get(header.kind)
        if handler is None:
            raise ProtocolError(f"no handler for frames of kind {header.kind}")
        self._begun = False
        try:
            handler(self, header, body)
        except (DPSError, MemoryError) as error:
            if self._begun:  # whatever is said now would be taken for the rest of the answer
                raise RuntimeError("an answer broke off in the middle") from error
            if isinstance(error, ProtocolError):
                raise
            self.reply_error(header, error if isinstance(error, DPSError) else DPSError(f"out of memory: {error}"))
            if isinstance(error, MovedError):  # later requests must not overtake this one, which will come again
                self.transport.close()

    def _prove(self, header: Header, body: memoryview) -> None:
        """The first frame: HELLO with the session's name and a proof of its secret."""
        if not allowed(TO_ANY, STRANGER, header.kind, header.flags):
            raise ProtocolError("the first frame must prove the session secret")
        hello = frames.decode_json(body)
        name, nonce = (hello.get("session"), hello.get("nonce")) if isinstance(hello, dict) else ("", "")
        if not (isinstance(name, str) and isinstance(nonce, str)):
            name = nonce = ""
        secret = self.endpoint.secrets.get(name)
        if secret is None or not session.proves(hello.get("proof"), secret, "client", self._nonce, nonce):
            raise AccessDeniedProtocol(f"no proof of the secret of parameter server {name!r}")
        self.session, self.origin = name, (name, self._host())
        self.endpoint.strangers.pop(self, None)
        stranger, self._inbox = self._inbox, memoryview(np.empty(INBOX, np.uint8))
        self._inbox[: self._end] = stranger[: self._end]
        proof = session.proof(secret, "server", nonce, self._nonce)
        self.reply_json(Header(frames.WELCOME, request=header.request), {"proof": proof})

    def _host(self) -> str:
        """The peer's address without its port."""
        return str((self.transport.get_extra_info("peername") or ("",))[0])

    def hold(self, body: memoryview) -> tuple[memoryview, Callable[[], None]]:
        """The body of the frame being handled, to be kept beyond it; and what to call when it is done with.

        A small one is copied; for a large one the connection does without its buffer meanwhile.
        """
        if len(body) <= INBOX - HEADER_SIZE:
            return memoryview(bytearray(body)), _nothing
        lent, self._incoming = self._incoming, Buffer(self.endpoint.keep)
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
        return len(self._incoming)

    @property
    def lent(self) -> int:
        return 0 if self._lent is None else sum(map(len, self._lent))

    @property
    def busy(self) -> bool:
        return self._body is not None

    def drop(self) -> None:
        self._incoming = Buffer(self.endpoint.keep)

    def granted(self) -> None:
        self._waiting, self._granted = False, True
        if self._body is not None:
            self._more_room()
        self._go_on()
        self._granted = False

    # -- frames out

    def outgoing(self, nbytes: int) -> np.ndarray:
        """The connection's outgoing buffer, uint8[nbytes]: fill it, then `write` views of it."""
        if self._paused:  # a late answer: an earlier one is still leaving from the buffer
            self._outgoing = Buffer(self.endpoint.keep)
        return self._outgoing.take(nbytes)

    def write(self, data: Any) -> None:
        """Pass bytes on. A view must be of the outgoing buffer, or of memory that nobody changes.

        To a peer that has gone meanwhile nothing is said: whoever answers late need not know.
        """
        self._begun = True
        self._outbox.flush()
        if not self.transport.is_closing():
            self.transport.write(data)

    def reply(self, header: Header, body: bytes = b"") -> None:
        """A whole frame with a small body, which is a multiple of 8 bytes."""
        if body:
            header = header._replace(body=len(body))
        self._outbox.flush()
        if not self.transport.is_closing():
            self.transport.write(encode_header(header) + body)

    def acknowledge(self, header: Header) -> None:
        """A frame without a body, at the end of this turn of the loop: together with others, if there are."""
        self._outbox.put(HEADER_SIZE, (encode_header(header),))

    def tell(self, header: Header, body: bytes) -> None:
        """Send news that replace all earlier ones: while those are still on their way, only the newest are kept."""
        if self._paused:
            self._news = header, body
        else:
            self.reply(header, body)

    def reply_json(self, header: Header, value: Any) -> None:
        self.reply(header, frames.encode_json(value))

    def reply_error(self, header: Header, error: BaseException) -> None:
        self.reply(Header(frames.ERROR, request=header.request), frames.encode_error(error))

    def refuse(self, error: Exception) -> None:
        """Say why, and close the connection."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        shown = AccessDeniedError(str(error)) if isinstance(error, AccessDeniedProtocol) else error
        self.reply(Header(frames.ERROR), frames.encode_error(shown))
        self.transport.close()
        self._watch()


def _nothing() -> None:
    pass


class AccessDeniedProtocol(ProtocolError):
    """Inside this module: a ProtocolError that the peer is shown as AccessDeniedError."""
