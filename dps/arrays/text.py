"""How arrays show themselves: as text, and in notebooks."""

from __future__ import annotations

from html import escape
from typing import Protocol

import numpy as np
from dask.utils import format_bytes

from dps.arrays.layout import EVERY_KEY
from dps.arrays.space import Space

__all__ = ["described", "described_html"]


class Shown(Protocol):
    """What is told of a vector or matrix."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_stored(self) -> bool: ...

    @property
    def space(self) -> Space: ...


def _facts(array: Shown) -> dict[str, str]:
    shards = min(array.space.store.shards, array.shape[-1])
    facts = {
        "shape": "(any int64,)" if array.shape == (EVERY_KEY,) else str(array.shape),
        "dtype": array.dtype.name,
        "shards": str(shards),
        "bytes": format_bytes(array.nbytes),
        "state": "stored" if array.is_stored else "expression",
    }
    if array.space.kind == "sparse":  # how many bytes is not known here
        del facts["bytes"]
    return facts


def described(array: Shown) -> str:
    """The line that a prompt shows. It reads no element."""
    facts = _facts(array)
    state = facts.pop("state")
    return f"dps.{type(array).__name__}<{state}, {', '.join(f'{name}={fact}' for name, fact in facts.items())}>"


def described_html(array: Shown) -> str:
    """The table that a notebook shows."""
    rows = "".join(
        f"<tr><th>{name.capitalize()}</th><td>{escape(fact)}</td></tr>" for name, fact in _facts(array).items()
    )
    return f"<table><caption>dps.{type(array).__name__}</caption><tbody>{rows}</tbody></table>"
