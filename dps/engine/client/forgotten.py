"""Forgotten keys: a reader of the keys of rows that went by themselves, for what an application keeps elsewhere.

The servers number the keys of each shard in the order in which they go (`state/gone.py`), and remember the last ones.
A reader remembers the number at which it goes on. So nothing is taken off the servers by reading, any number of readers
read the same keys, and a reader goes on where it was when a copy has become the primary of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.client.session import ClientSession
from dps.engine.client.shard_requests import answered, keyed_spec, sent_to_shard
from dps.engine.state.gone import REASONS
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import Gone, GoneAnswer
from dps.errors import InputError, ProtocolError

__all__ = ["ForgottenBatch", "ForgottenKeys"]

KEYS_A_PIECE = 1 << 16


class ForgottenBatch(NamedTuple):
    """Keys of rows that went for one reason.

    Parameters
    ----------
    reason : {"evicted", "expired"}
        The budget of the table was full, or the rows were not used for long.
    keys : ndarray of int64
        In the order in which they went. A key is there as often as its row went.

    Examples
    --------
    >>> import dps
    >>> dps.ForgottenBatch("expired", np.array([7, 9]))
    ForgottenBatch(reason='expired', keys=array([7, 9]))
    """

    reason: str
    keys: np.ndarray


class ForgottenKeys:
    """The keys of rows of a table that went by themselves, batch after batch; made by
    :meth:`dps.ParameterServer.forgotten`.

    An iteration gives the keys that went until now, shard after shard, and ends; the next one goes on there. A batch
    counts as read when the next one is asked for, so the batch at which a loop broke off comes again: each key comes at
    least once. The servers remember the last keys only. What they had forgotten before it was read is counted by
    `missed`.

    Parameters
    ----------
    session : ClientSession
        The connections.
    table : str
        Its name.
    since : sequence of int, optional
        The `position` of an earlier reader.

    Attributes
    ----------
    missed : int
        How many keys went that this reader will not see, because it came too late.

    Raises
    ------
    UnknownTableError
        There is no table of that name.
    InputError
        The table does not remember keys, or `since` is no position in it.

    Examples
    --------
    >>> import dps
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     w = ps.table("w", expire=dps.ExpireUnused(0.1), remember=True, shards=1)
    ...     w.push([7, 9], 1.0)
    ...     reader, told = ps.forgotten(w), []
    ...     while len(told) < 2:
    ...         told += [(reason, key) for reason, keys in reader for key in keys.tolist()]
    ...     sorted(told), reader.position[1:]
    ([('expired', 7), ('expired', 9)], [2])
    >>> cluster.close()
    """

    def __init__(self, session: ClientSession, table: str, since: Sequence[int] | None = None):
        self._session, self.missed = session, 0
        with session.lock:
            self._spec = keyed_spec(session, table)
        if not self._spec.life.remember:
            raise InputError(
                f"table {table!r} does not remember the keys of rows that went: make it with remember=True"
            )
        self._numbers = numbers_of(self._spec, since)

    def __repr__(self) -> str:
        return f"<ForgottenKeys of {self._spec.name!r}: {sum(self._numbers)} read or missed>"

    @property
    def position(self) -> list[int]:
        """Where this reader is, for one that goes on there later: the number of the table, then one of each shard.

        A table that was restored from a checkpoint is another table, which a reader begins from its first key on.
        """
        return [self._spec.id, *self._numbers]

    def __iter__(self) -> Iterator[ForgottenBatch]:
        for shard in range(self._spec.shards):
            stop: int | None = None  # where the shard was when this iteration came to it: else it might never end
            while stop is None or self._numbers[shard] < stop:
                answer, keys, whys = self._piece(shard)
                stop = answer.stop if stop is None else stop
                self.missed += answer.first - self._numbers[shard]
                self._numbers[shard] = answer.first
                for why, reason in REASONS.items():
                    if (whys == why).any():
                        yield ForgottenBatch(reason, keys[whys == why])
                self._numbers[shard] = answer.first + len(keys)

    def _piece(self, shard: int) -> tuple[GoneAnswer, np.ndarray, np.ndarray]:
        session, spec, number = self._session, self._spec, self._numbers[shard]

        def header() -> Header:
            return Gone(spec.id, session.epoch, shard, number, KEYS_A_PIECE).header()

        def send() -> Request:
            return sent_to_shard(session, spec, shard, header, b"")

        with session.lock:
            session.meter.begin(session.now())
            try:
                answered_with, body = answered(session, None, send)
            finally:
                session.meter.lap("pull", session.now())
        answer = GoneAnswer.of(answered_with)
        if not number <= answer.first <= answer.first + answer.keys <= answer.stop:
            raise ProtocolError(
                f"keys {answer.first} to {answer.stop} that went came, and they were asked from {number} on"
            )
        if not answer.keys and answer.first < answer.stop:
            raise ProtocolError(f"no keys that went came, and the last one is number {answer.stop - 1}")
        keys = np.frombuffer(body, np.int64, answer.keys).copy()
        return answer, keys, np.frombuffer(body, np.int8, answer.keys, 8 * answer.keys)


def numbers_of(spec: TableSpec, since: Sequence[int] | None) -> list[int]:
    """The number at which each shard is read on."""
    if since is None:
        return [0] * spec.shards
    table, *numbers = since if len(since) else (0,)
    if len(numbers) != spec.shards or min(numbers) < 0:
        raise InputError(
            f"since={since!r:.100} is no position in table {spec.name!r}, which has a number of its own and one for "
            f"each of its {spec.shards} shards: pass the `position` of a reader of this table"
        )
    return [int(number) for number in numbers] if table == spec.id else [0] * spec.shards
