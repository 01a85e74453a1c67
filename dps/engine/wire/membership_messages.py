"""The messages of membership: what servers tell the controller beside heartbeats. `controller/failover.py` says what
each is for. Pure.

Each message about shards has the epoch of the newest placement that the server has adopted, because the controller
takes no notice of what a server says of an earlier placement.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

__all__ = ["CaughtUp", "Serve", "ServerFailed", "SteppedDown", "Suspect"]

Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]  # because a negative one counts from a list's end
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Serve(msgspec.Struct, frozen=True):
    """SERVE: a server is up, and listens there."""

    server: int  # its number
    host: str
    port: Port


class CaughtUp(msgspec.Struct, frozen=True):
    """CAUGHT_UP: a joiner has every row and op of a shard that its feeder has."""

    table: str
    shard: Index
    server: int  # the joiner's number
    epoch: int


class SteppedDown(msgspec.Struct, frozen=True):
    """STEPPED_DOWN: a primary takes no more requests, and all replicas of its shard are equal."""

    table: str
    shard: Index
    epoch: int


class Suspect(msgspec.Struct, frozen=True):
    """SUSPECT: a server takes no ops of these shards, or has no replica of them."""

    server: int  # its number; it may be the sender's own
    shards: list[tuple[str, Index]]  # table and shard
    why: str
    epoch: int


class ServerFailed(msgspec.Struct, frozen=True):
    """FAILED: a server has ended itself, because a change of its replicas broke off in the middle."""

    server: int  # its number
    why: str
