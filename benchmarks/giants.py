"""What clients that announce much and send little cost an honest one: the rate of its pushes, beside its rate alone.

A thousand connections that have proved the secret announce a request of 1 GiB each, send its first 64 KiB, and from
then on eight bytes now and then: a thousand times more than the memory for requests on their way
(`dps.limits.incoming`). An honest client pushes 8 MiB at a time meanwhile. The endpoint gives each body a small buffer
that grows with what has come of it (`dps/engine/wire/memory.py`), so the honest pushes need not wait for the giants;
and `dps.timeouts.trickle` is raised for the measurement, because a giant would be given up after 10 seconds otherwise.

Clients and endpoint share one process. The turns alone and beside the giants cannot take turns A B A B, because the
giants hold on from the time they come; so the rate alone is taken before them and after them, and the mean counts.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator

import dask
import numpy as np

from benchmarks.common import Report, parser
from dps.engine.wire import frames, memory
from dps.engine.wire.channel import Channel
from dps.engine.wire.endpoint import Connection, Endpoint
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header, encode_header
from dps.engine.wire.handshake import ConnectingHandshake, new_secret

GIANTS, ROUNDS, SECONDS = 1000, 7, 1.0  # turns of each, and how long a turn is
ANNOUNCED, FIRST, MORE = 1 << 30, 1 << 16, 8  # bytes of a giant's request; that it sends at once; and in each turn
PUSH = 8 << 20  # bytes of an honest request
TAKE = 100  # the kind of a frame that the endpoint reads through and acknowledges
NAME, SECRET = "giants", new_secret()


def take(connection: Connection, header: Header, body: memoryview) -> None:
    """Read the whole body, as a server's kernels would."""
    total = np.frombuffer(body, np.int64).sum()
    connection.reply(Header(frames.OK, request=header.request, start=int(total)))


@contextlib.contextmanager
def listening() -> Iterator[Endpoint]:
    endpoint = Endpoint("giants", "127.0.0.1", {TAKE: take})
    endpoint.secrets[NAME] = SECRET
    try:
        yield endpoint
    finally:
        endpoint.stop()


class Giant:
    """A connection on a bare socket that proves the secret, and then sends what it is told to."""

    def __init__(self, address: tuple[str, int]):
        self._socket = socket.create_connection(address, timeout=60)
        handshake = ConnectingHandshake(NAME, SECRET, "the endpoint")
        while (reply := handshake.receive(*self._frame())) is not None:
            self.send(encode_header(reply[0]) + reply[1])

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def announce(self) -> None:
        """Begin a request of `ANNOUNCED` bytes."""
        self.send(encode_header(Header(TAKE, body=ANNOUNCED)) + bytes(FIRST))

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> tuple[Header, bytes]:
        header = decode_header(self._exactly(HEADER_SIZE), 0, 1 << 16)
        return header, self._exactly(header.body)

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._socket.recv(nbytes - len(data))
            if not more:
                raise EOFError("the endpoint closed the connection of a giant")
            data += more
        return bytes(data)


def rate(channel: Channel, words: np.ndarray, seconds: float) -> float:
    """MiB a second of honest requests, one after the other."""
    sent, began = 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        request = channel.send(Header(TAKE, body=words.nbytes), (memoryview(words).cast("B"),))
        request.result(time.monotonic() + 60)
        sent += words.nbytes
    return sent / passed / (1 << 20)


def held(endpoint: Endpoint) -> int:
    """Bytes of all buffers of requests on their way."""
    return endpoint.call(lambda: sum(connection.spare + connection.lent for connection in endpoint.connections))


def measure(report: Report, endpoint: Endpoint, count: int, rounds: int, seconds: float) -> None:
    words, address = np.ones(PUSH // 8, np.int64), (endpoint.host, endpoint.port)
    with contextlib.closing(Channel(address, NAME, SECRET, "the endpoint")) as honest, contextlib.ExitStack() as stack:
        rate(honest, words, seconds)  # buffers grow
        alone = [rate(honest, words, seconds) for _ in range(rounds)]
        giants = [stack.enter_context(contextlib.closing(Giant(address))) for _ in range(count)]
        began = time.monotonic()
        for giant in giants:
            giant.announce()
        while held(endpoint) < count * memory.FIRST_BYTES:
            time.sleep(0.01)
        arrived = time.monotonic() - began
        beside = []
        for turn in range(rounds):
            for giant in giants[turn::rounds]:
                giant.send(bytes(MORE))
            beside.append(rate(honest, words, seconds))
        most, there = held(endpoint), len(endpoint.connections) - 1
        stack.close()
        alone += [rate(honest, words, seconds) for _ in range(rounds)]
    what = f"beside {count:,} giants of {ANNOUNCED >> 30} GiB that trickle"
    mean = statistics.fmean((statistics.median(alone[:rounds]), statistics.median(alone[rounds:])))
    report.add(f"honest pushes of 8 MiB, {what}", statistics.median(beside), "MiB/s", "alone", mean, ">= 0.5 x")
    report.add("the slowest turn of these", min(beside), "MiB/s", "the slowest alone", min(alone))
    report.add("memory of all requests on their way", most / (1 << 20), "MiB", reach="<= 1,024 MiB")
    report.duration("until the endpoint has taken up the last of the giants", arrived)
    report.add("giants that hold on", there, "connections", reach=f">= {count} connections", failed=there != count)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    count, rounds, seconds = (50, 3, 0.2) if args.quick else (GIANTS, ROUNDS, SECONDS)
    with (
        dask.config.set({"dps.timeouts.trickle": "600 s"}),
        Report("giants that trickle", args.json) as report,
        listening() as endpoint,
    ):
        measure(report, endpoint, count, rounds, seconds)


if __name__ == "__main__":
    from benchmarks.giants import main as run  # so that workers find our functions by name

    run()
