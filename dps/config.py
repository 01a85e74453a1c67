"""Settings: ``dps.yaml`` merged into Dask's configuration, read with their units."""

from __future__ import annotations

import pathlib

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

__all__ = ["count", "nbytes", "seconds"]

with open(pathlib.Path(__file__).with_name("dps.yaml")) as file:
    defaults = yaml.safe_load(file)
dask.config.update_defaults(defaults)


def seconds(name: str) -> float:
    """A duration under ``dps.timeouts``, in seconds.

    Examples
    --------
    >>> seconds("connect")
    10
    """
    return parse_timedelta(dask.config.get(f"dps.timeouts.{name}"))


def nbytes(name: str) -> int:
    """A size under ``dps.limits``, in bytes.

    Examples
    --------
    >>> nbytes("buffer")
    4194304
    """
    return parse_bytes(dask.config.get(f"dps.limits.{name}"))


def count(name: str) -> int:
    """A plain number under ``dps``, such as ``"limits.in-flight"``."""
    return int(dask.config.get(f"dps.{name}"))
