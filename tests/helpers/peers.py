"""For tests of the wire: an endpoint with small handlers, and peers on bare sockets that need not behave."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

import numpy as np

from dps.engine.wire import frames, handshake
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.endpoint import Connection, Endpoint
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header, encode_header, encode_json
from dps.errors import InputError, ProtocolError

NAME, SECRET = "s", "ab" * 32
EAT, FILL, PARK, RELEASE, FAIL, BREAK, CRASH, HALF, JSON = range(100, 109)
PIECE = 1 << 19


def pattern(stop: int, seed: int, start: int = 0) -> np.ndarray:
    """Numbers start..stop-1 of a sequence of int64 that no other seed gives."""
    return (np.arange(start, stop, dtype=np.int64) + (seed << 32)) * 0x5851F42D4C957F2D


class ViewSink:
    """A sink that fills contiguous memory."""

    def __init__(self, target: memoryview):
        self._rest = target

    def buffer(self) -> memoryview:
        return self._rest

    def advance(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]


class Kit:
    """An endpoint and its handlers; use as a context manager."""

    def __init__(self, tls: ssl.SSLContext | None = None):
        self.parked: list[tuple[Connection, Header]] = []
        self.ended: list[Connection] = []
        handlers = {kind: getattr(self, name) for name, kind in HANDLERS.items()}
        self.endpoint = Endpoint("test", "127.0.0.1", handlers, self.ended.append, tls=tls)
        self.endpoint.secrets[NAME] = SECRET
        self.address = (self.endpoint.host, self.endpoint.port)

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.endpoint.stop()

    def channel(self, tls: ssl.SSLContext | None = None, secret: str = SECRET, name: str = NAME) -> Channel:
        return Channel(self.address, name, secret, "the peer", tls=tls)

    @contextlib.contextmanager
    def channels(self, count: int = 1, tls: ssl.SSLContext | None = None):
        """That many channels, closed in the end."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(contextlib.closing(self.channel(tls))) for _ in range(count)]

    # -- handlers

    def eat(self, connection: Connection, header: Header, body: memoryview) -> None:
        """Answers what it was fed: length, sum of the words, and whether they lay aligned."""
        words = np.frombuffer(body, np.int64) if len(body) else np.zeros(0, np.int64)
        aligned = len(body) == 0 or words.ctypes.data % 8 == 0
        answer = {"bytes": len(body), "sum": int(words.sum()), "aligned": aligned}
        connection.reply_json(Header(frames.OK, request=header.request), answer)

    def fill(self, connection: Connection, header: Header, body: memoryview) -> None:
        """Answers pattern(header.count, header.number), piece by piece, from the outgoing buffer."""
        nbytes = 8 * header.count
        if nbytes > self.endpoint.frame_limit:
            raise InputError(f"{nbytes} bytes are too many")
        buffer = connection.outgoing(HEADER_SIZE + nbytes)
        view = memoryview(buffer)
        view[:HEADER_SIZE] = encode_header(Header(frames.OK, request=header.request, body=nbytes))
        out = buffer[HEADER_SIZE:].view(np.int64)
        connection.write(view[:HEADER_SIZE])
        for a in range(0, header.count, PIECE // 8):
            b = min(a + PIECE // 8, header.count)
            out[a:b] = pattern(b, header.number, a)
            connection.write(view[HEADER_SIZE + 8 * a : HEADER_SIZE + 8 * b])

    def park(self, connection: Connection, header: Header, body: memoryview) -> None:
        self.parked.append((connection, header))

    def release(self, connection: Connection, header: Header, body: memoryview) -> None:
        """Answers all that is parked, the last one first."""
        for waiting, parked in reversed(self.parked):
            waiting.reply(Header(frames.OK, request=parked.request, count=parked.number))
        self.parked.clear()
        connection.reply(Header(frames.OK, request=header.request))

    def fail(self, connection: Connection, header: Header, body: memoryview) -> None:
        raise InputError("table 'w': 3 is not 4")

    def break_(self, connection: Connection, header: Header, body: memoryview) -> None:
        raise ProtocolError("the counts do not add up")

    def crash(self, connection: Connection, header: Header, body: memoryview) -> None:
        raise ZeroDivisionError("a bug")

    def half(self, connection: Connection, header: Header, body: memoryview) -> None:
        """Begins an answer and fails in the middle of it: with an error of ours (0), none left (1), or goes (2)."""
        buffer = connection.outgoing(HEADER_SIZE + 8000)
        buffer[:HEADER_SIZE] = np.frombuffer(encode_header(Header(frames.OK, request=header.request, body=8000)), "u1")
        connection.write(memoryview(buffer)[: HEADER_SIZE + 800])
        if header.number < 2:
            raise (InputError, MemoryError)[header.number]("in the middle")
        connection.transport.close()

    def json(self, connection: Connection, header: Header, body: memoryview) -> None:
        connection.reply_json(Header(frames.OK, request=header.request), "x" * header.count)


HANDLERS = {
    "eat": EAT,
    "fill": FILL,
    "park": PARK,
    "release": RELEASE,
    "fail": FAIL,
    "break_": BREAK,
    "crash": CRASH,
    "half": HALF,
    "json": JSON,
}


class Raw:
    """A peer on a bare blocking socket."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None = None, timeout: float = 20, source: str = ""
    ):
        self.sock = socket.create_connection(address, timeout=timeout, source_address=(source, 0))
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def take(self, nbytes: int) -> bytes:
        """Exactly so many bytes; fewer only where the other side closed."""
        got = bytearray()
        while len(got) < nbytes:
            try:
                data = self.sock.recv(min(nbytes - len(got), 1 << 20))
            except (ConnectionError, ssl.SSLError):
                break
            if not data:
                break
            got += data
        return bytes(got)

    def frame(self) -> tuple[Header, bytes] | None:
        """The next frame; None where the other side closed."""
        head = self.take(HEADER_SIZE)
        if len(head) < HEADER_SIZE:
            return None
        header = decode_header(head, 0, 1 << 40)
        return header, self.take(header.body)

    def hello(self, secret: str = SECRET, name: str = NAME) -> bytes:
        """The frame that answers the greeting."""
        header, body = self.frame()
        assert header.kind == frames.GREETING
        theirs, mine = frames.decode_json(body)["nonce"], handshake.new_nonce()
        proof = handshake.proof(secret, "client", theirs, mine)
        return framed(frames.HELLO, encode_json({"session": name, "nonce": mine, "proof": proof}))

    def introduce(self) -> Raw:
        self.send(self.hello())
        header, _ = self.frame()
        assert header.kind == frames.WELCOME
        return self


def framed(kind: int, body: bytes = b"", says: int | None = None, **fields: int) -> bytes:
    """A frame; `says` is the length that it announces, where that is not its body's."""
    return encode_header(Header(kind, body=len(body) if says is None else says, **fields)) + body


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def feed(channel: Channel, words: np.ndarray) -> dict:
    answer = channel.send(Header(EAT, body=words.nbytes), (memoryview(words).cast("B"),) if len(words) else ())
    return frames.decode_json(answer.result(soon()).body)


def ask_echo(channel: Channel, words: int, seed: int) -> tuple[Request, np.ndarray]:
    out = np.zeros(words, np.int64)
    sink = ViewSink(memoryview(out).cast("B")) if words else ViewSink(memoryview(b""))
    return channel.send(Header(FILL, count=words, number=seed), (), sink, out.nbytes), out


def fulfilled(wishes) -> None:
    for seed, (request, out) in wishes:
        request.result(soon())
        np.testing.assert_array_equal(out, pattern(len(out), seed))


@contextlib.contextmanager
def impostor(behave):
    """A listener on a bare socket: `behave(Raw)` for one connection, in a thread; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        raw = Raw.__new__(Raw)
        raw.sock, _ = listener.accept()
        raw.sock.settimeout(20)
        with raw, contextlib.suppress(OSError):
            behave(raw)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        thread.join(20)
        listener.close()
