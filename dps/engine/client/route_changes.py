"""Route changes: whether servers have lost what they had by the route, and whether the controller is to be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dps.engine.client.requests import TableRoute
from dps.engine.wire.channel import Request
from dps.engine.wire.messages import Route
from dps.errors import LeaseError

__all__ = ["refused_by_leases", "was_replaced"]


def was_replaced(server: int, epoch: int, routes: Mapping[int, TableRoute], known: Route) -> bool:
    """Whether a shard that the server had by the routes of that epoch, by table number, is not its own any more."""
    owners = {table.spec["id"]: table.owners for table in known.tables}
    owners |= {old: [] for table in known.tables for old in table.ancestors}  # no server has it, after a split
    of_tables = [(route, owners[table]) for table, route in routes.items() if table in owners]
    return known.epoch != epoch and any(route.has_moved(server, owners) for route, owners in of_tables)


def refused_by_leases(failed: Sequence[Request]) -> bool:
    """Whether one of these requests was refused for a lease that is over.

    Others have failed then because the server has closed their connection, too. All these channels are closed, so that
    nothing overtakes what is sent again.
    """
    refused = any(isinstance(request.error, LeaseError) for request in failed)
    for request in failed if refused else ():
        if request.channel is not None:  # it could be sent
            request.channel.close()
    return refused
