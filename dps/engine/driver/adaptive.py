"""How many servers there are: what a driver asks for, checked before the controller is asked."""

from __future__ import annotations

import math

import dask
from dask.utils import parse_bytes, parse_timedelta

from dps.engine.training.types import Json
from dps.engine.wire.messages import AdaptRule, Description
from dps.errors import InputError

__all__ = ["adapt_rule", "check_servers", "most_servers"]

MIN_INTERVAL_SECONDS = 0.01  # shortest time between two looks at the load
MAX_SERVERS = 1024


def adapt_rule(given: Json) -> AdaptRule:
    """How the number of servers follows the load; what is None in `given` comes from the settings ``dps.adaptive``."""
    policy = {name: dask.config.get(f"dps.adaptive.{name}") if x is None else x for name, x in given.items()}
    if policy["maximum"] != math.inf:
        check_servers("maximum", policy["maximum"])
    check_servers("minimum", policy["minimum"])
    seconds = parse_timedelta(policy["interval"])
    nbytes = None if policy["memory"] is None else parse_bytes(policy["memory"])
    if seconds < MIN_INTERVAL_SECONDS or (nbytes is not None and nbytes <= 0):
        raise InputError(
            f"interval={policy['interval']!r}, memory={policy['memory']!r}: {MIN_INTERVAL_SECONDS} s or more, and more "
            f"than nothing"
        )
    most = None if policy["maximum"] == math.inf else policy["maximum"]
    return AdaptRule(policy["minimum"], most, seconds, nbytes, policy["wait-count"], policy["busy"])


def most_servers(description: Description) -> int:
    """How many there are, or may come with the load."""
    most = None if description.adapt is None else description.adapt.maximum
    return max(sum(server.alive for server in description.servers), most or 1)


def check_servers(name: str, servers: int) -> None:
    if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers <= MAX_SERVERS:
        raise InputError(f"{name} is a whole number from 1 to {MAX_SERVERS}, not {servers!r}")
