"""The messages that say what is where: PLACE to servers, and the answer to ROUTE for clients. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

__all__ = ["Located", "Placement", "Route", "ShardPlace"]

Address: TypeAlias = tuple[str, int]  # host and port


class ShardPlace(msgspec.Struct, frozen=True, array_like=True):
    """Which servers hold a shard, by their numbers."""

    chain: list[int]  # the primary first
    joiner: int | None  # which is brought up to date, to be the last of the chain
    fences: list[int]  # of each server in the chain, and of the joiner: the epoch from which on it takes ops
    stepping_down: bool  # the primary takes no more requests


class Placement(msgspec.Struct, frozen=True):
    """PLACE: where all shards are from this epoch on."""

    epoch: int
    servers: dict[int, Address]  # by their numbers: those that are up
    tables: dict[int, list[ShardPlace]]  # by their numbers


class Located(msgspec.Struct, frozen=True):
    """A table, and the primary of each of its shards."""

    spec: dict[str, Any]  # see TableSpec.to_dict
    owners: list[int]  # -1: the last copy is gone


class Route(msgspec.Struct, frozen=True):
    """The answer to ROUTE: where a client sends its requests."""

    epoch: int
    servers: dict[int, Address]
    tables: list[Located]
    remedy: str  # for lost data, in words
