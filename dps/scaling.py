"""Scaling: what the handle does with the number of servers."""

from __future__ import annotations

import json
import math
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta

from dps.archive import Archive
from dps.errors import InputError

__all__ = ["Scaling", "check_servers"]

MOST = 1024  # servers
LEAST = 0.01  # seconds between two looks


class Scaling(Archive):
    """How many servers there are, by hand or by load; the rest is in :class:`dps.ParameterServer`."""

    @property
    def servers(self) -> int:
        """How many servers are up; :meth:`status` tells which."""
        return sum(server["alive"] for server in self._call("describe")["servers"])

    def scale(self, servers: int) -> None:
        """Have that many servers. Shards move while training goes on; :meth:`status` shows how far they are.

        More servers come up as soon as there are workers for them. Of fewer, those with the highest numbers are emptied
        first and closed then. What :meth:`adapt` has begun ends here.
        """
        check_servers("servers", servers)
        self._call("scale", servers=servers)

    def adapt(
        self,
        minimum: int | None = None,
        maximum: float | None = None,
        *,
        interval: str | float | None = None,
        wait_count: int | None = None,
        busy: float | None = None,
        memory: str | float | None = None,
    ) -> None:
        """Let the number of servers follow the load, as ``cluster.adapt`` does with workers; :meth:`scale` ends it.

        Another server comes, on a worker that is free for it, when rows take 60 % of the memory that the servers may
        use, at once, or when they are at work for more than `busy` of their time, after three looks. One goes when the
        others would be loaded by half of that, after `wait_count` looks. It is one server at a time, and none while a
        server comes or goes, shards move or a checkpoint is written; there are always as many as tables have copies.
        The parameter server does this by itself, whatever becomes of the driver. :meth:`status` ("adapt") tells what it
        sees; what it does is among the events, with the reason.

        What is not given is taken from the settings ``dps.adaptive``.

        Parameters
        ----------
        minimum, maximum : int
            How many servers at least and at most; ``math.inf``: as many as there are workers for.
        interval : str or float
            Between two looks: "2 s", or seconds.
        wait_count : int
            Looks in a row that find too many servers, until one goes.
        busy : float
            Part of its time that a server may be at work.
        memory : str or float
            What one server may have in use, "4 GiB" or bytes. By default the limit that Dask has for its worker; where
            there is none, and here is none, rows do not count.

        Examples
        --------
        >>> with dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.adapt(minimum=1, maximum=2, memory="4 GiB")
        ...         ps.status()["adapt"]["maximum"]
        ...         ps.scale(2)
        ...         ps.status()["adapt"]
        2
        """
        given: dict[str, Any] = {"minimum": minimum, "maximum": maximum, "interval": interval}
        given |= {"wait-count": wait_count, "busy": busy, "memory": memory}
        wish = {name: dask.config.get(f"dps.adaptive.{name}") if x is None else x for name, x in given.items()}
        if wish["maximum"] != math.inf:
            check_servers("maximum", wish["maximum"])
        check_servers("minimum", wish["minimum"])
        seconds = parse_timedelta(wish["interval"])
        nbytes = None if wish["memory"] is None else parse_bytes(wish["memory"])
        if seconds < LEAST or (nbytes is not None and nbytes <= 0):
            raise InputError(
                f"interval={wish['interval']!r}, memory={wish['memory']!r}: {LEAST} s or more, and more than nothing"
            )
        about = {"minimum": wish["minimum"], "maximum": wish["maximum"], "interval": seconds, "memory": nbytes}
        about |= {"wait_count": wish["wait-count"], "busy": wish["busy"]}
        self._call("adapt", wish=json.dumps(about))

    def retire(self, server: int) -> None:
        """Empty one server and close it, while training goes on; another takes its place, if there is a worker."""
        self._call("retire", server=server)

    def _most_servers(self) -> int:
        """How many there are, or may come with the load."""
        about = self._call("describe")
        adapt = json.loads(about["adapt"]) or {}
        return max(sum(server["alive"] for server in about["servers"]), adapt.get("maximum") or 1)


def check_servers(name: str, servers: int) -> None:
    if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers <= MOST:
        raise InputError(f"{name} is a whole number from 1 to {MOST}, not {servers!r}")
