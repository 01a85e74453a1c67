"""Settings: ``dps.yaml`` merged into Dask's configuration, read with their units."""

from __future__ import annotations

import math
import pathlib

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dps.errors import InputError

__all__ = ["bandwidth", "count", "flag", "limit", "nbytes", "polling", "scheduler_grace", "seconds", "spill_directory"]

# Longest time of polling: a longer wait exceeds by far the time that it takes to wake a sleeping core.
MAX_POLLING_SECONDS = 1e-3

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


def limit(name: str, value: float | None = None) -> str:
    """A time limit in words for an error message: its value, and the name of its setting.

    Parameters
    ----------
    name : str
        The name of the setting, under ``dps.timeouts``.
    value : float, optional
        Seconds, if the setting was read earlier; by default its current value.

    Examples
    --------
    >>> limit("request")
    '60 s (dps.timeouts.request)'
    """
    return f"{seconds(name) if value is None else value:g} s (dps.timeouts.{name})"


def nbytes(name: str) -> int:
    """A size under ``dps.limits``, in bytes.

    Examples
    --------
    >>> nbytes("buffer")
    4194304
    """
    return parse_bytes(dask.config.get(f"dps.limits.{name}"))


def bandwidth() -> float:
    """``dps.limits.bandwidth`` in bytes a second; infinity: no limit.

    >>> bandwidth()
    inf
    """
    value = dask.config.get("dps.limits.bandwidth")
    rate = math.inf if value is None else parse_bytes(value)
    if rate <= 0:
        raise InputError(f"dps.limits.bandwidth is {value!r}: it is bytes a second, such as '50 MiB', or null")
    return rate


def polling(name: str = "polling") -> float:
    """``dps.polling`` in seconds, or ``dps.server-polling``: the longest time that a wait may poll before it sleeps.

    Raises
    ------
    InputError
        The setting is longer than a millisecond.

    Examples
    --------
    >>> round(polling() * 1e6), round(polling("server-polling") * 1e6)
    (100, 100)
    """
    value = parse_timedelta(dask.config.get(f"dps.{name}"))
    if value > MAX_POLLING_SECONDS:
        raise InputError(f"dps.{name} is {value:g} s: a wait may poll for at most {MAX_POLLING_SECONDS:g} s")
    return value


def spill_directory() -> str | None:
    """``dps.spill-directory``; None: that of the Dask worker.

    >>> spill_directory() is None
    True
    """
    value = dask.config.get("dps.spill-directory")
    return None if value is None else str(value)


def scheduler_grace() -> float:
    """``dps.scheduler.grace`` in seconds: for how long servers outlive their scheduler; 0: they end with it.

    >>> scheduler_grace()
    600
    """
    return parse_timedelta(dask.config.get("dps.scheduler.grace"))


def flag(name: str) -> bool:
    """A switch under ``dps``, such as ``"unix-sockets"``."""
    return bool(dask.config.get(f"dps.{name}"))


def count(name: str) -> int:
    """A plain number under ``dps``, such as ``"limits.in-flight"``."""
    return int(dask.config.get(f"dps.{name}"))
