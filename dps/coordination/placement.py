"""Which server holds which shard. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dps.errors import InputError

__all__ = ["place"]


def place(shards: int, servers: Sequence[int]) -> tuple[int, ...]:
    """The server of each shard: neighbouring shards together, and no server has more than one more than another.

    Neighbours stay together because a batch sorted by hash (or by row) is then cut into one view a server.

    Parameters
    ----------
    shards : int
        How many shards, at least one.
    servers : sequence of int
        The numbers of the servers, each once, in the order in which they are to be filled.

    Returns
    -------
    tuple of int
        For shard i, the number of its server.

    Examples
    --------
    >>> place(8, [0, 1, 2])
    (0, 0, 0, 1, 1, 1, 2, 2)
    """
    if shards < 1:
        raise InputError(f"a table needs at least one shard, not {shards}")
    if not servers:
        raise InputError(f"no server to place {shards} shards on")
    if len(set(servers)) != len(servers):
        raise InputError(f"a server is named twice: {list(servers)}")
    return tuple(servers[i * len(servers) // shards] for i in range(shards))
