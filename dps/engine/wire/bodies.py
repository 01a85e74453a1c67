"""Typed bodies: a message in a frame is a `msgspec.Struct`, encoded once, and checked when it is decoded. Pure.

A message travels as JSON with the names of its fields. `run_messages.py`, `membership_messages.py`
and `placement_messages.py` have the kinds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from dps.engine.wire import frames
from dps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["decode", "encode"]

M = TypeVar("M", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """The body of a frame."""
    return frames.encode_json(msgspec.to_builtins(message, str_keys=True))


def decode(kind: type[M], body: Buffer) -> M:
    """The message of that kind in the body of a frame.

    Raises
    ------
    ProtocolError
        It says which field is wrong.
    """
    value = frames.decode_json(body)
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # ValueError: a name that is no Unicode
        raise ProtocolError(f"a {kind.__name__} that cannot be read: {error}; it is {value!r:.200}") from None
