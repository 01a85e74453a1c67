"""RingAllreduce: large arrays combined between the trainers themselves, past the controller.

Theory of operation
-------------------
The trainers meet at the controller twice, with a few bytes each; the numbers go round a ring of direct connections
(`ring.py`, `ring_peer.py`).

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
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from dps.engine.training.ring import Span, pieces, ring_steps
from dps.engine.training.types import Json
from dps.engine.wire import frames
from dps.errors import ClockTimeoutError, InputError, RequestTimeoutError, ServerGoneError, TrainerLostError

__all__ = ["RING_BYTES", "Peer", "RingAllreduce"]

RING_BYTES = 1 << 18  # of an array: a larger one goes round, because the controller would be the bottleneck
PIECE_BYTES = 1 << 19  # that travel in one frame, so that sending, receiving and adding overlap
MOST_ROUNDS = 16  # attempts at one allreduce, because a trainer that is lost again and again ends the run before
COMBINE: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}

Meet = Callable[[Json, bytes], bytes | bytearray]


class Peer(Protocol):
    """What a round needs of a trainer's connections: see :class:`dps.engine.training.ring_peer.RingPeer`."""

    address: tuple[str, int]

    def begin(self, number: int, following: tuple[str, int], nbytes: int) -> None:
        """Begin a round."""

    def send(self, step: int, start: int, content: memoryview) -> None:
        """Send bytes to the next member."""

    def receive(self, step: int, start: int, nbytes: int, deadline: float) -> memoryview:
        """Wait for bytes of the member before."""

    def finish(self, deadline: float) -> None:
        """Wait until the next member has taken all bytes."""

    def give_up(self, following: tuple[str, int], number: int) -> None:
        """Tell the next member that this one does not take part."""

    def end(self, number: int, result: np.ndarray | None) -> None:
        """The round has ended."""

    def fetch(self, address: tuple[str, int], number: int, nbytes: int, deadline: float) -> bytearray:
        """The result of a round that another member has kept."""


class Member(NamedTuple):
    """A trainer in a round, as it says of itself."""

    trainer: int
    identity: str  # of this attempt at it
    host: str
    port: int
    round: int  # the number that the round has if this is its first member


class RingAllreduce:
    """The allreduce of one trainer.

    Parameters
    ----------
    trainer : int
        Its number.
    peer : Peer
        Its connections to other trainers.
    meet : callable
        The controller's allgather, (call, bytes) -> all bytes, which all trainers join.
    patience : float
        Seconds that a trainer waits for the others.
    """

    def __init__(self, trainer: int, peer: Peer, meet: Meet, patience: float):
        self._trainer, self._peer, self._meet, self._patience = trainer, peer, meet, patience
        self._identity = secrets.token_hex(8)

    def combine(self, array: np.ndarray, op: str) -> np.ndarray:
        """The arrays of all trainers, combined by `op` ("sum", "mean", "max", "min").

        Raises
        ------
        TrainerLostError
            The result is that of an earlier attempt, and no trainer has kept it; or 16 rounds have failed.
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
        answer = self._meet(call, frames.pack_item(json.dumps(own).encode()))
        return [Member(*json.loads(item)) for item in frames.unpack_items(answer)]

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
