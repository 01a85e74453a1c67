"""Rows that trainers send to each other through a table, the mailbox: each row has a trainer that receives it.

A row of the mailbox is a block of `BLOCK` numbers. Its key says the exchange, the sender, the receiver and the number
of the block, so nothing is written twice, and a trainer that runs again reads the same. The mailbox is kept until the
algorithm ends, because of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import dps

__all__ = ["BLOCK", "exchanged", "owners"]

# Number of values in a row of the mailbox: 2 KiB.
BLOCK = 256
# Number of blocks that a call carries: 16 MiB.
BLOCKS_OF_CALL = 1 << 13
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio (Knuth, volume 3, section 6.4)


def owners(vertices: np.ndarray, trainers: int) -> np.ndarray:
    """Which trainer owns each vertex, by a hash of its id.

    Examples
    --------
    >>> owners(np.array([1, 2, 3, 1]), 2)
    array([1, 0, 1, 1])
    """
    spread = np.ascontiguousarray(vertices).view(np.uint64) * MULTIPLIER
    spread >>= np.uint64(32)
    spread *= np.uint64(trainers)
    spread >>= np.uint64(32)
    return spread.view(np.int64)


def exchanged(trainer: dps.Trainer, mailbox: str, number: int, rows: np.ndarray, receivers: np.ndarray) -> np.ndarray:
    """Send each row to a trainer, and return the rows that this trainer receives, in the order of the senders.

    All trainers of the run call it alike.

    Parameters
    ----------
    mailbox : str
        A keyed int64 table of dim `BLOCK` with ``dps.Assign()``.
    number : int
        Which exchange through this mailbox it is.
    rows : ndarray of int64, [n, width]
    receivers : ndarray of int64, [n]
    """
    width = rows.shape[1]
    me = trainer.number
    count = trainer.trainers
    # numpy sorts numbers of 16 bits digit by digit, in half of the time.
    narrow = receivers.astype(np.uint16) if count <= 1 << 16 else receivers
    order = np.argsort(narrow, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(narrow, minlength=count))])
    kept = rows.take(order[ends[me] : ends[me + 1]], axis=0)
    for receiver in range(count):
        if receiver != me:
            theirs = rows.take(order[ends[receiver] : ends[receiver + 1]], axis=0)
            _send(trainer, mailbox, (number * count + me) * count + receiver, theirs)
    sizes = [np.frombuffer(each, np.int64) for each in trainer.allgather(np.diff(ends).tobytes())]
    parts = [
        kept
        if sender == me
        else _received(trainer, mailbox, (number * count + sender) * count + me, int(sizes[sender][me]) * width)
        for sender in range(count)
    ]
    return np.concatenate([part.reshape(-1, width) for part in parts])


def _keys(route: int, first: int, count: int) -> np.ndarray:
    return (route << 32) + np.arange(first, first + count, dtype=np.int64)


def _send(trainer: dps.Trainer, mailbox: str, route: int, rows: np.ndarray) -> None:
    flat = rows.reshape(-1)
    blocks = np.zeros((-(-len(flat) // BLOCK), BLOCK), np.int64)
    blocks.reshape(-1)[: len(flat)] = flat
    for start in range(0, len(blocks), BLOCKS_OF_CALL):
        some = blocks[start : start + BLOCKS_OF_CALL]
        trainer.push(mailbox, _keys(route, start, len(some)), some)


def _received(trainer: dps.Trainer, mailbox: str, route: int, size: int) -> np.ndarray:
    blocks = -(-size // BLOCK)
    parts = [
        trainer.pull(mailbox, _keys(route, start, min(BLOCKS_OF_CALL, blocks - start))).reshape(-1)
        for start in range(0, blocks, BLOCKS_OF_CALL)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])[:size]
