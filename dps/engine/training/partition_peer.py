"""PartitionPeer: a trainer lends its partitions to other trainers of its run, and fetches theirs.

Spark gives each task its own partitions and no others. So with ``reassign=True`` a trainer on Spark listens, and
another trainer that is to work on one of its partitions fetches it there, as a pickle in pieces (`trainer_port.py`).
The controller says where (`LeaseRequest.peer`, `LeaseAnswer.peer`).

Which peers may fetch, and what is unpickled. The connections have a secret of their own, which the driver has made for
this run and which reaches its trainers with Spark's tasks, that is, with code. Both sides prove that they know it
before a byte of a partition travels, and each pickle ends with a code that only a trainer of the run can make of it
(HMAC, RFC 2104), because the proof could be passed on between two of them. So no client of the parameter server can
send a trainer a pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import pickle
import time
import zlib
from collections.abc import Callable, Mapping

import cloudpickle

from dps import config
from dps.engine.client.environment import Environment
from dps.engine.client.ticket import Ticket
from dps.engine.training.trainer_port import FETCHED_BYTES, TrainerPort, answer_later, answer_piece
from dps.engine.training.types import Partition
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import PartitionRequest
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import TO_LENDER
from dps.errors import AccessDeniedError, InputError, InputTypeError, RequestTimeoutError, ServerGoneError

__all__ = ["PartitionPeer"]

# Number of pickles that a trainer keeps.
MAX_PICKLES = 2
# Time after which a trainer that has asked for a part of a pickle is not expected to ask for the rest.
IDLE_SECONDS = 1.0


@dataclasses.dataclass
class _Pickle:
    content: memoryview
    edition: int  # a checksum: two pickles of a partition may differ, if it was changed in between
    used: float  # time of the last request for a part of it
    is_fetched: bool = False  # some trainer has all of it


class PartitionPeer:
    """A trainer's end of the lending of partitions.

    Pickles are made when they are asked for. It keeps `MAX_PICKLES` of them: so the partitions that are lent at present
    are in memory twice, and up to two of them at a time. A trainer that asks for a third one is told to ask again.

    Parameters
    ----------
    ticket : Ticket
        Of the parameter server.
    secret : str
        That the trainers of the run share, hexadecimal.
    environment : Environment
        Where connections come from.
    run : int
        The number of the run.
    partitions : mapping of int to Partition
        What it lends, by the numbers of the driver.

    Attributes
    ----------
    address : str
        Where it listens, "host:port".
    """

    def __init__(
        self, ticket: Ticket, secret: str, environment: Environment, run: int, partitions: Mapping[int, Partition]
    ):
        self._run, self._partitions, self._now = run, dict(partitions), environment.now
        self._key = bytes.fromhex(secret)
        self._pickles: dict[int, _Pickle] = {}  # by the partitions' numbers; only the listener's thread touches it
        ours = dataclasses.replace(ticket, secret=secret)
        self._port = TrainerPort(ours, environment, TO_LENDER, {frames.FETCH_PARTITION: self._tell})
        host, port = self._port.address
        self.address = f"{host}:{port}"

    def fetch(self, partition: int, peer: str | None, check: Callable[[], None]) -> Partition:
        """Get a partition from the trainer that listens at `peer`, within ``dps.timeouts.fetch``.

        `check` is called now and then, and may raise, to stop it. Raises ServerGoneError if the trainer is gone, and
        RequestTimeoutError if it has not sent everything in time.
        """
        if peer is None:
            raise ServerGoneError(f"partition {partition} cannot be fetched, because no trainer lends it at present")
        host, _, port = peer.rpartition(":")
        patience = config.seconds("fetch")

        def ask(start: int) -> Header:
            return PartitionRequest(self._run, partition, start).header()

        try:
            content = self._port.fetch((host, int(port)), ask, time.monotonic() + patience, check)
        except RequestTimeoutError as error:
            raise RequestTimeoutError(
                f"partition {partition} was not here within {config.limit('fetch', patience)}: the trainer at {peer} "
                f"that has it is busy or cut off, or it is large; raise the setting, or make partitions smaller "
                f"({error})"
            ) from error
        except (ServerGoneError, AccessDeniedError) as error:  # the latter: another process listens there by now
            raise ServerGoneError(
                f"partition {partition} cannot be fetched, because the trainer at {peer} that has it is gone; see why "
                f"its executor has ended: Spark begins the stage again ({error})"
            ) from error
        size = max(0, len(content) - hashlib.sha256().digest_size)
        with memoryview(content) as found:
            if not hmac.compare_digest(found[size:], self._code(partition, found[:size])):
                raise AccessDeniedError(
                    f"what came from {peer} as partition {partition} was not made by a trainer of run {self._run}, and "
                    f"was not unpickled: see which process listens there"
                )
            return pickle.loads(found[:size])

    def _code(self, partition: int, content: memoryview | bytes) -> bytes:
        """The HMAC of a pickle, by which it is known to come from a trainer of the run: only these know the key."""
        code = hmac.new(self._key, f"{self._run} {partition} ".encode(), hashlib.sha256)
        code.update(content)
        return code.digest()

    def close(self) -> None:
        """Lend no more."""
        self._port.close()

    # -- in the listener's thread

    def _tell(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        request = PartitionRequest.of(header)
        if request.run != self._run:
            raise InputError(f"a trainer of run {self._run} was asked for a partition of run {request.run}")
        if request.partition not in self._partitions:
            raise InputError(
                f"partition {request.partition} was asked for of a trainer of run {self._run} that has partitions "
                f"{', '.join(map(str, sorted(self._partitions))) or 'none'}"
            )
        found = self._pickled(request.partition)
        if found is None:
            answer_later(connection, header.request)
            return
        found.used = self._now()
        found.is_fetched |= request.start + FETCHED_BYTES >= len(found.content)
        answer_piece(connection, header.request, found.content, request.start, found.edition)

    def _pickled(self, partition: int) -> _Pickle | None:
        """The pickle of a partition, made if need be; None while other trainers fetch as many as may be kept."""
        if partition not in self._pickles:
            now = self._now()
            idle = [n for n, each in self._pickles.items() if each.is_fetched or now - each.used > IDLE_SECONDS]
            if len(self._pickles) >= MAX_PICKLES:
                if not idle:
                    return None
                del self._pickles[min(idle, key=lambda n: self._pickles[n].used)]
            self._pickles[partition] = self._made(partition)
        return self._pickles[partition]

    def _made(self, partition: int) -> _Pickle:
        try:
            content = cloudpickle.dumps(self._partitions[partition], protocol=5)
        except Exception as error:
            raise InputTypeError(
                f"partition {partition} cannot be pickled, so no other trainer can work on it: {error!r}. With "
                f"reassign=True on Spark, read_with has to make partitions that can be"
            ) from error
        content += self._code(partition, content)
        return _Pickle(memoryview(content), 1 + zlib.crc32(content) % (1 << 31), self._now())
