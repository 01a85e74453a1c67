"""Which copy answers a client's pulls of a table with ``reads="copies"``, and when its primaries have to.

`docs/design/replication.md`, "Pulls from backups", says why a pull goes to the primaries while pushes of this client to
the table have no acknowledgement: such a push may reach the primary later than what a backup asks it. After a copy has
failed, primaries alone are asked for a while, because a backup that is cut off from its primary keeps pulls waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from dps.engine.client.requests import TableRoute
from dps.engine.client.ticket import SentCall
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request
from dps.errors import DPSError

__all__ = ["PAUSE_SECONDS", "CopyReads", "is_on_its_way"]

Named = Mapping[int, TableSpec]

PAUSE_SECONDS = 1.0  # after a pull of a copy has failed, a client asks primaries alone for so long


def is_on_its_way(request: Request, name: str, named: Named, retried: Callable[[Request], bool]) -> bool:
    """Whether a request is a push to the table of that name without an acknowledgement."""
    part = request.part
    if part is None or not part.pushes or part.table not in named or named[part.table].name != name:
        return False
    if not request.done:
        with contextlib.suppress(DPSError):  # the request has the error
            request.channel.poll()
    return not request.done or retried(request)


class CopyReads:
    """The pulls of one session that copies may answer.

    Attributes
    ----------
    asked : bool
        A copy was asked since one has failed.
    """

    def __init__(self, now: Callable[[], float]):
        self._now, self._paused_until, self.asked = now, 0.0, False

    def may_answer(
        self, route: TableRoute, open_calls: Iterable[SentCall], named: Named, retried: Callable[[Request], bool]
    ) -> bool:
        """Whether the copies that the route has chosen may answer a pull that is made now.

        `named` has the tables that were called, by the numbers that they had: a table that was restored has another.
        """
        if not route.reads_copies or self._now() < self._paused_until:
            return False
        requests = (request for call in open_calls for request in call.requests)
        may = not any(is_on_its_way(request, route.spec.name, named, retried) for request in requests)
        self.asked = self.asked or may
        return may

    def failed(self, requests: Iterable[Request]) -> None:
        """Ask primaries alone for a while, if a pull is among these requests, which have failed."""
        if not all(request.call_part.pushes for request in requests):
            self._paused_until, self.asked = self._now() + PAUSE_SECONDS, False
