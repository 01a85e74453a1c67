"""Random and mutated conversations for live endpoints: the frames (by seed), their senders, and forbidden answers.

A `Grammar` makes *talks*: what one connection sends, before or after its proof. Most frames of a talk are valid in
form and wild in content, so that they reach the handlers; then bytes are flipped, cut, doubled and put in, and the talk
is cut into pieces at random places. `converse` speaks many talks at once on bare sockets and counts the frames that
were answered: only those have been *judged* by the endpoint, what comes after a refusal has not.

Everything is drawn from `random.Random(seed)`: a seed gives the same talks, though sockets deliver them as they like.
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import psutil
from peers import NAME, SECRET, framed

from dps.engine.wire import frames, handshake
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_json
from dps.errors import ProtocolError

PACKED = struct.Struct(frames._HEADER.format)
CODES = dict(zip(("magic", *Header._fields), re.findall("[A-Za-z]", PACKED.format), strict=True))
BITS = {name: 8 * struct.calcsize(code) for name, code in CODES.items()}
SIGNED = {name for name, code in CODES.items() if code.islower()}
KIND, BODY, FIRST = 2, HEADER_SIZE - 8, struct.Struct("<HB")  # where kind and length of a frame stand
AT_ONCE = 8  # connections that talk at the same time


class Grammar:
    """Talks of wild frames.

    Parameters
    ----------
    seed : int
        The same seed, the same talks.
    valid : callable
        (random) -> kind, fields, body of a frame that a handler may take seriously.
    harmless : callable, optional
        Whether a frame may be sent: not if it might be carried out where nothing may change.
    opening : callable, optional
        (random) -> what most talks begin with.
    tame : callable, optional
        (random) -> as `valid`, but a frame that is always carried out: some talks are of nothing else.
    """

    def __init__(
        self,
        seed: int,
        valid: Callable[[random.Random], tuple[int, dict, bytes]],
        harmless: Callable[[Header, bytes], bool] | None = None,
        opening: Callable[[random.Random], bytes] = lambda draw: b"",
        tame: Callable[[random.Random], tuple[int, dict, bytes]] | None = None,
    ):
        self.tame = tame
        self.random = random.Random(seed)
        self._valid, self._harmless, self._opening = valid, harmless, opening

    def wild(self, name: str) -> int:
        """A number for a field: small, an extreme, or anything."""
        draw, bits = self.random, BITS[name]
        number = draw.choice((draw.getrandbits(3), draw.getrandbits(bits), 1 << draw.randrange(bits), (1 << bits) - 1))
        return number - (1 << bits) if name in SIGNED and number >> (bits - 1) else number

    def frame(self) -> bytes:
        """A frame: valid, with a few wild fields, or with nothing but wild ones."""
        draw = self.random
        kind, fields, body = self._valid(draw)
        fields = {"kind": kind, "request": draw.getrandbits(32), **fields}
        what = draw.random()
        if what < 0.45:  # a field or two; the length only now and then, for that ends the talk
            for _ in range(draw.randint(1, 2)):
                name = draw.choice(Header._fields[1:-1])
                fields[name] = self.wild(name)
        elif what < 0.55:
            fields = {name: self.wild(name) for name in Header._fields[:-1]}
            fields["kind"] = draw.choice((kind, kind, fields["kind"]))
        elif what < 0.62:
            body = self.mutated(body)
            body = body[: len(body) & ~7]
        fields["body"] = self.wild("body") if draw.random() < 0.004 else len(body)
        magic = frames.MAGIC if draw.random() < 0.998 else self.wild("magic")
        return PACKED.pack(magic, *Header(**fields)) + body

    def mutated(self, data: bytes) -> bytes:
        """Bits flipped, bytes cut out, doubled, put in or overwritten."""
        draw, data = self.random, bytearray(data)
        for _ in range(draw.randint(1, 3)):
            place, length = draw.randrange(len(data) + 1), draw.randint(1, 24)
            what = draw.randrange(5)
            if what == 0 and place < len(data):
                data[place] ^= 1 << draw.randrange(8)
            elif what == 1:
                del data[place : place + length]
            elif what == 2:
                data[place:place] = data[place : place + length]
            elif what == 3:
                data[place:place] = draw.randbytes(length)
            else:
                data[place : place + 8] = struct.pack("<q", draw.choice((-1, 0, (1 << 63) - 1, -1 << 63)))
        return bytes(data)

    def talk(self, limit: int) -> bytes:
        """What a proved peer says: up to `limit` frames; one talk in four was mutated anywhere after that."""
        data = b"".join(self.frame() for _ in range(self.random.randint(1, limit)))
        if self.random.random() < 0.8:
            data = self._opening(self.random) + data
        if self.random.random() < 0.25:
            data = self.mutated(data)
        return self._allowed(data)

    def tame_talk(self, count: int) -> bytes:
        """Frames that are carried out."""
        talk = ((kind, body, fields) for kind, fields, body in (self.tame(self.random) for _ in range(count)))
        return b"".join(framed(kind, body, **fields) for kind, body, fields in talk)

    def strange(self, hello: bytes) -> bytes:
        """The bytes of a peer without a proof: `hello` mutated, JSON of any kind, frames, noise."""
        draw = self.random
        what = draw.randrange(5)
        if what == 0:
            return self.mutated(hello) + self.talk(1)  # which is heard where the proof was left as it was
        if what == 1:
            return wild_hello(draw) + self.talk(1)
        if what == 2:
            return self.talk(3)
        return draw.randbytes(draw.randint(0, 9000)) if what == 3 else hello[: draw.randrange(len(hello))]

    def pieces(self, data: bytes) -> deque[bytes]:
        """`data`, cut at random places; most often not at all."""
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((0, 0, 0, 1, 2, 9))))
        return deque(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))

    def _allowed(self, data: bytes) -> bytes:
        """The talk up to the first frame that might do harm, read as an endpoint reads it."""
        if self._harmless is None:
            return data
        at = 0
        while at + HEADER_SIZE <= len(data):
            magic, *fields = PACKED.unpack_from(data, at)
            header = Header._make(fields)
            after = at + HEADER_SIZE + header.body
            if magic != frames.MAGIC or header.body & 7 or after > len(data):
                break  # refused, or never complete
            if not self._harmless(header, data[at + HEADER_SIZE : after]):
                return data[:at]
            at = after
        return data


def wild_json(draw: random.Random, depth: int = 2):
    """Any JSON value, with those in it that programs forget."""
    odd = (None, True, 0, -1, 1 << 70, -1e308, float("inf"), float("nan"), "", "0", "\ud800", "x" * 300, [], {}, 1.5)
    if depth and draw.random() < 0.3:
        inner = [wild_json(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return inner if draw.random() < 0.5 else {str(i): value for i, value in enumerate(inner)}
    return draw.choice(odd)


def wild_text(draw: random.Random, usual: dict) -> bytes:
    """The JSON of `usual` with a few values, or all of it, replaced; or nesting without end, or no JSON at all."""
    what = draw.random()
    if what < 0.03:
        depth = draw.choice((100, 900, 950, 980, 990, 1000, 2000))
        text = b"[" * depth + b"]" * depth * draw.randint(0, 1)
        return text.ljust(frames.padded(len(text)))
    if what < 0.06:
        return draw.randbytes(8 * draw.randint(0, 20))
    value = dict(usual)
    for name in usual:
        if draw.random() < 0.3:
            value[name] = wild_json(draw)
        elif draw.random() < 0.05:
            del value[name]
    return encode_json(value if what > 0.1 else wild_json(draw))


def wild_hello(draw: random.Random) -> bytes:
    return framed(frames.HELLO, wild_text(draw, {"session": NAME, "nonce": "00" * 16, "proof": "00" * 32}))


# ---- speaking -------------------------------------------------------------------------------------------------------


class Speaker:
    """One connection: greeted, proved or not, and then through with its talk. Never blocks."""

    def __init__(self, address: tuple[str, int], grammar: Grammar, limit: int):
        self.sock = socket.create_connection(address, timeout=20)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = self._greeted()
        draw = grammar.random
        self._proves, self._hello = draw.random() < 0.9, hello
        self._tame = draw.randint(1, limit) if self._proves and grammar.tame and draw.random() < 0.05 else 0
        if self._tame:
            self.sent = hello + grammar.tame_talk(self._tame)
        else:
            self.sent = hello + grammar.talk(limit) if self._proves else grammar.strange(hello)
        self._pieces = grammar.pieces(self.sent)
        self._rest = memoryview(b"")
        self._got = bytearray()
        self._skip = 0
        self.answers: Counter[int] = Counter({frames.GREETING: 1})  # kind -> how many
        self.sock.setblocking(False)

    def _greeted(self) -> bytes:
        """The frame that proves the secret."""
        head = _exactly(self.sock, HEADER_SIZE)
        (length,) = struct.unpack_from("<Q", head, BODY)
        theirs, mine = frames.decode_json(_exactly(self.sock, length))["nonce"], handshake.new_nonce()
        proof = handshake.proof(SECRET, "client", theirs, mine)
        text = encode_json({"session": NAME, "nonce": mine, "proof": proof})
        return framed(frames.HELLO, text)

    def step(self, events: int) -> bool:
        """Send or take what can be sent or taken; False when the other side has closed."""
        if events & select.POLLOUT:
            self._send()
        return not events & ~select.POLLOUT or self._take()

    def check(self) -> None:
        """No secret, no service; no fault, no refusal."""
        assert not self._tame or self.answers[frames.OK] == self._tame, "a frame without a fault was refused"
        if not self._proves and self.answers[frames.WELCOME]:  # the mutated byte may be one that no check reads
            kind, body = self.sent[KIND], self.sent[HEADER_SIZE : len(self._hello)]
            assert kind == frames.HELLO, "welcomed without a proof"
            answer = None
            with contextlib.suppress(ProtocolError):  # a body that was mutated may be no JSON
                answer = frames.decode_json(body)
            assert answer == frames.decode_json(self._hello[HEADER_SIZE:]), "welcomed with no proof"
        assert self.answers[frames.WELCOME] or not self.answers[frames.OK], "served before it was welcomed"

    @property
    def wants(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._rest or self._pieces else 0)

    def _send(self) -> None:
        if not self._rest and self._pieces:
            self._rest = memoryview(self._pieces.popleft())
        try:
            if self._rest:
                self._rest = self._rest[self.sock.send(self._rest) :]
            if not self._rest and not self._pieces:
                self.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # it has closed: what it said is still to be read
            self._rest = memoryview(b"")
            self._pieces.clear()

    def _take(self) -> bool:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self._got += data[skipped:]
        at = 0
        while at + HEADER_SIZE <= len(self._got):
            magic, kind = FIRST.unpack_from(self._got, at)
            assert magic == frames.MAGIC, "an answer that is no frame"
            self.answers[kind] += 1
            at += HEADER_SIZE + struct.unpack_from("<Q", self._got, at + BODY)[0]
        self._skip += max(0, at - len(self._got))
        del self._got[:at]
        return bool(data)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = sock.recv(nbytes, socket.MSG_WAITALL)
    assert len(data) == nbytes, "closed where it should have greeted"
    return data


def converse(address: tuple[str, int], grammar: Grammar, count: int, limit: int = 40) -> Counter[int]:
    """Talk until `count` frames were judged; kind of answer -> how many. Raises if the endpoint falls silent."""
    answers: Counter[int] = Counter()
    poll = select.poll()
    speakers: dict[int, Speaker] = {}
    try:
        while answers[frames.OK] + answers[frames.ERROR] < count or speakers:
            while len(speakers) < AT_ONCE and answers[frames.OK] + answers[frames.ERROR] < count:
                speaker = Speaker(address, grammar, limit)
                speakers[speaker.sock.fileno()] = speaker
                poll.register(speaker.sock, speaker.wants)
            ready = poll.poll(20_000)
            assert ready, f"silent for 20 s after {speakers[min(speakers)].sent[:4000]!r}"
            for number, events in ready:
                speaker = speakers[number]
                if speaker.step(events):
                    poll.modify(number, speaker.wants)
                else:
                    poll.unregister(number)
                    speakers.pop(number).sock.close()
                    speaker.check()
                    answers += speaker.answers
    finally:
        for speaker in speakers.values():
            speaker.sock.close()
    return answers


# ---- watching -------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that this process has."""
    return psutil.Process().memory_info().rss


@contextlib.contextmanager
def only_warnings(logger) -> Iterator[list[str]]:
    """Collects what `logger` calls an error: a refusal is a warning, a handler's bug is not. Nothing is printed."""
    bugs: list[str] = []

    def keep_record(record) -> bool:
        if record.levelname in ("ERROR", "CRITICAL"):
            bugs.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")
        return False

    logger.addFilter(keep_record)
    try:
        yield bugs
    finally:
        logger.removeFilter(keep_record)


class Witness:
    """A well-behaved client, and how long each of its calls took. Use as a context manager: calls in a thread."""

    def __init__(self, call: Callable[[], object]):
        import threading

        self._call = call
        self.seconds: list[float] = []
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.005):
                began = time.perf_counter()
                self._call()
                self.seconds.append(time.perf_counter() - began)
        except BaseException as error:
            self.error = error

    def __str__(self) -> str:
        ms = sorted(1e3 * s for s in self.seconds)
        return f"{len(ms)} calls, median {ms[len(ms) // 2]:.1f} ms, worst {ms[-1]:.0f} ms"
