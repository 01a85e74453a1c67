"""Structs that several threads decode: their annotations are read when their module is imported.

msgspec reads the annotations of a struct when one is decoded for the first time. While one thread does so, another
thread that decodes the same struct crashes the process (msgspec 0.22: it uses what is read half). Trainers are threads
of one process, and all of them decode a route at first. So the types are read before there is a second thread: modules
are imported under a lock.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["read_annotations"]


def read_annotations(module: Mapping[str, object]) -> None:
    """Have msgspec read the annotations of all structs among the names of a module, which calls this at its end."""
    for value in module.values():
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct:
            msgspec.msgpack.Decoder(value)
