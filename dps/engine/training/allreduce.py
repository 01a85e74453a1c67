"""RingAllreduce: large arrays combined between the trainers themselves, past the controller.

Theory of operation
-------------------
The trainers meet at the controller twice, with a few bytes each; the numbers go round a ring of direct connections.

1. Each trainer says where it listens. All learn the members of the ring, and the number of the *round*.
2. The array goes round.
3. Each trainer says whether it has the result. If all have it, it counts; if one of them has not, all begin at 1 again,
   with their own arrays, which the round has not changed.

The others wait for numbers of a trainer that dies in the round. When it is run again, the new attempt repeats its calls
of 1 and is told the old members. It sees that it is none of them, and tells the member after it that it gives the round
up; that one tells the next one, and all come to 3. So do they if a connection breaks. If the trainer is not run again,
the controller stops the run.

A trainer that dies after 3, when its task is run again, is told that all had the result. It fetches the result from
another member: each keeps the last one, and earlier ones of 64 MiB together. The controller's answers to 1 and 3 are
the same in each attempt (`coordination/meetings.py`), so all trainers take the same decisions.

The ring (`ring_steps`)
-----------------------
The n members of a ring stand in a circle, and the array is cut into n chunks. In n - 1 steps each member adds the chunk
that it has got to its own, and passes the sum on; then chunk c is whole at member c - 1. In n - 1 further steps the
whole chunks go round. A member sends and receives 2 (n - 1) / n of the array, however many members there are, which is
the least that is possible.

The connections (`RingPeer`)
----------------------------
A peer listens with a thread of its own for the member before it, and writes to the member after it in the trainer's
thread. In each round the members are the same. A piece of a round that the trainer has not begun yet stays in its
connection until it begins; pieces of rounds that have ended are dropped.

References
----------
P. Patarasu, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib. Comput.
69 (2009), section 3.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from dps.engine.client.environment import Environment
from dps.engine.client.ticket import Ticket
from dps.engine.training.trainer_port import FETCHED_BYTES, TrainerPort, answer_piece
from dps.engine.training.types import Json
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.frames import CONTROL, Header
from dps.engine.wire.headers import RingPiece
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import TO_TRAINER
from dps.errors import (
    ClockTimeoutError,
    InputError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
    TrainerLostError,
)

__all__ = ["RING_BYTES", "RingAllreduce", "RingPeer", "RingStep", "Span", "pieces", "ring_steps"]


# ---- The ring: which chunk a member passes on in each step. Pure


class RingStep(NamedTuple):
    """What one member does in one step.

    `sent` and `received` are elements of the flat array.
    `is_sum` says whether what is received is to be combined with the member's own elements, or takes their place.
    """

    sent: range
    received: range
    is_sum: bool


class Span(NamedTuple):
    """Elements that travel in one frame: the step in which they are sent, and where they belong."""

    step: int
    start: int
    stop: int


def ring_steps(rank: int, members: int, size: int) -> list[RingStep]:
    """The steps of one member in an allreduce of `size` elements.

    What a member receives in a step is what the member before it sends in the same step.

    Examples
    --------
    >>> for step in ring_steps(0, 2, 10):
    ...     print(step.sent, step.received, step.is_sum)
    range(0, 5) range(5, 10) True
    range(5, 10) range(0, 5) False
    """
    chunks = [range(c * size // members, (c + 1) * size // members) for c in range(members)]
    adding = [
        RingStep(chunks[(rank - s) % members], chunks[(rank - s - 1) % members], True) for s in range(members - 1)
    ]
    copying = [
        RingStep(chunks[(rank + 1 - s) % members], chunks[(rank - s) % members], False) for s in range(members - 1)
    ]
    return adding + copying


def pieces(step: int, elements: range, most: int) -> Iterator[Span]:
    for start in range(elements.start, elements.stop, most):
        yield Span(step, start, min(start + most, elements.stop))


# ---- A trainer's connections to the members beside it, and what has come over them

KEPT_BYTES = 1 << 26  # of the results of earlier rounds, beside the last one
REMEMBERED_ROUNDS = 64  # that have ended, or were given up
WAIT_SECONDS = 0.1  # between two looks whether the run was stopped


class RingPeer:
    """A trainer's end of rings.

    The secret and TLS of the `ticket` protect the connections between trainers, too.
    `check` is called now and then in a wait; it raises an error if the trainer is to stop.
    """

    def __init__(self, ticket: Ticket, environment: Environment, check: Callable[[], None]):
        self._check = check
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
        handlers = {frames.RING: self._take, frames.RING_RESULT: self._tell}
        self._port = TrainerPort(ticket, environment, TO_TRAINER, handlers)
        self.address = self._port.address

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
            self._port.submit(connection.resume)

    def send(self, step: int, start: int, content: memoryview) -> None:
        assert self._channel is not None
        assert self._round is not None
        piece = RingPiece(self._round, step, start, len(content))
        padding = bytes(frames.padded(len(content)) - len(content))
        self._sent.append(self._channel.send(piece.header(), (content, padding)))

    def receive(self, step: int, start: int, nbytes: int, deadline: float) -> memoryview:
        """Wait for bytes of the member before; `deadline` is of the monotonic clock.

        Raises ServerGoneError if a member has given the round up.
        Raises ClockTimeoutError if nothing has come in time.
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

        Raises ServerGoneError if the member is gone.
        Raises InputError if it has kept later results only.
        """

        def ask(start: int) -> Header:
            return RingPiece(number, 0, start, min(FETCHED_BYTES, nbytes - start)).header(frames.RING_RESULT)

        return self._port.fetch(address, ask, deadline, self._check)

    def close(self) -> None:
        self._hang_up()
        self._port.close()

    def _connected(self, address: tuple[str, int]) -> Channel:
        return self._port.connect(address, self._check)

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
        answer_piece(connection, header.request, kept.data, piece.start)


# ---- The rounds

RING_BYTES = 1 << 18  # of an array: a larger one goes round, because the controller would be the bottleneck
PIECE_BYTES = 1 << 19  # that travel in one frame, so that sending, receiving and adding overlap
MOST_ROUNDS = 16  # attempts at one allreduce, because a trainer that is lost again and again ends the run before
COMBINE: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}

Meet = Callable[[Json, bytes], bytes | bytearray]


class Member(NamedTuple):
    """A trainer in a round, as it says of itself."""

    trainer: int
    identity: str  # of this attempt at it
    host: str
    port: int
    round: int  # the number that the round has if this is its first member


class RingAllreduce:
    """The allreduce of one trainer.

    `meet` is the controller's allgather, (call, bytes) -> all bytes, which all trainers join.
    `patience` is how many seconds a trainer waits for the others.
    """

    def __init__(self, trainer: int, peer: RingPeer, meet: Meet, patience: float):
        self._trainer, self._peer, self._meet, self._patience = trainer, peer, meet, patience
        self._identity = secrets.token_hex(8)

    def combine(self, array: np.ndarray, op: str) -> np.ndarray:
        """The arrays of all trainers, combined by `op` ("sum", "mean", "max", "min").

        Raises TrainerLostError if the result is that of an earlier attempt, and no trainer has kept it; or 16 rounds
        have failed.
        """
        call = {"op": "allgather", "ring": op, "dtype": array.dtype.str, "shape": list(array.shape)}
        for _ in range(MOST_ROUNDS):
            members = self._members(call)
            result = self._round(members, array, op)
            done = b"1" if result is not None else b"0"
            verdicts = frames.unpack_items(self._meet({**call, "ring": f"{op}, end"}, frames.pack_item(done)))
            if b"0" not in verdicts:
                return self._fetched(members, array, op) if result is None else result
        raise TrainerLostError(f"{MOST_ROUNDS} rounds of an allreduce have failed: trainers are lost again and again")

    def _members(self, call: Json) -> list[Member]:
        own = Member(self._trainer, self._identity, *self._peer.address, secrets.randbits(62))
        answer = self._meet(call, frames.pack_item(msgspec.msgpack.encode(own)))
        return [msgspec.msgpack.decode(item, type=Member) for item in frames.unpack_items(answer)]

    def _round(self, members: list[Member], array: np.ndarray, op: str) -> np.ndarray | None:
        """The result of one round; None if it failed."""
        rank = [member.trainer for member in members].index(self._trainer)
        following = members[(rank + 1) % len(members)]
        number = members[0].round
        if members[rank].identity != self._identity:  # these are the members of an earlier attempt's round
            self._peer.give_up((following.host, following.port), number)
            return None
        result = None
        try:
            result = self._reduced(members, rank, array, op)
        except (ServerGoneError, RequestTimeoutError, ClockTimeoutError):
            self._peer.give_up((following.host, following.port), number)
        self._peer.end(number, result)
        return result

    def _reduced(self, members: list[Member], rank: int, array: np.ndarray, op: str) -> np.ndarray:
        result = np.array(array, order="C")
        if len(members) > 1:
            self._go_round(members, rank, result.reshape(-1), COMBINE[op])
        return result / len(members) if op == "mean" else result

    def _go_round(self, members: list[Member], rank: int, flat: np.ndarray, combine: np.ufunc) -> None:
        peer, deadline = self._peer, time.monotonic() + self._patience
        following, raw, size = members[(rank + 1) % len(members)], flat.view(np.uint8), flat.itemsize
        peer.begin(members[0].round, (following.host, following.port), raw.nbytes)
        for number, step in enumerate(ring_steps(rank, len(members), len(flat))):
            most = max(1, PIECE_BYTES // size)
            leaving = pieces(number, step.sent, most)
            for coming in pieces(number, step.received, most):
                self._send(next(leaving, None), raw, size)
                where = slice(coming.start, coming.stop)
                content = peer.receive(number, coming.start * size, (coming.stop - coming.start) * size, deadline)
                numbers = np.frombuffer(content, flat.dtype)
                flat[where] = combine(flat[where], numbers) if step.is_sum else numbers
            for left in leaving:
                self._send(left, raw, size)
        peer.finish(deadline)

    def _send(self, piece: Span | None, raw: np.ndarray, size: int) -> None:
        if piece is not None:
            self._peer.send(piece.step, piece.start * size, raw[piece.start * size : piece.stop * size].data)

    def _fetched(self, members: list[Member], array: np.ndarray, op: str) -> np.ndarray:
        """The result that an earlier attempt at this trainer had, from another one."""
        if len(members) == 1:
            return self._reduced(members, 0, array, op)
        deadline, error = time.monotonic() + self._patience, None
        for member in members:
            if member.trainer != self._trainer:
                try:
                    raw = self._peer.fetch((member.host, member.port), members[0].round, array.nbytes, deadline)
                    return np.frombuffer(raw, array.dtype).reshape(array.shape)
                except (ServerGoneError, InputError) as refusal:
                    error = refusal
        raise TrainerLostError(
            f"trainer {self._trainer}, run again, needs the result of an allreduce of {array.nbytes} bytes that was"
            f" complete before, and no other trainer has it ({error}). Trainers keep the last result and 64 MiB of"
            " earlier ones until they leave: call trainer.barrier() at the end of the function, and let"
            " trainer.iterate skip the batches that are complete"
        )
