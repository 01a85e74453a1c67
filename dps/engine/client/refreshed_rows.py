"""RefreshedRows: rows that a trainer pulls, of which it has some already, and does not know whether these have changed.

It pulls the rows that it lacks. Of the others it tells the servers the fingerprints (the flag CHANGED), and they answer
which ones differ, with these rows. All of that travels at once, so it takes one round trip, as a pull does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dps.engine.client.origin import Origin
from dps.engine.client.requests import Prepared, TableRoute, TableTerms, prepared_pull, refuse
from dps.engine.core.fingerprints import fingerprints
from dps.engine.core.requests.call import Call
from dps.engine.wire import frames
from dps.engine.wire.changed_rows import changed_rows_in
from dps.engine.wire.channel import Request

__all__ = ["RefreshedRows"]


class RefreshedRows:
    """The rows of one pull.

    `rows` [m, dim] has those that are `here`, bool[m], or none of them (None). The object keeps it, and puts the others
    there.
    `compared` and `changed` count the rows of which the servers were asked whether they have changed, and those that
    have; the latter once the answers are here.
    """

    def __init__(self, route: TableRoute, rows: np.ndarray, here: np.ndarray | None):
        self._route, self._rows = route, rows
        self._here = np.zeros(len(rows), np.bool_) if here is None else here
        self._lacking: Prepared | None = None
        self.compared, self.changed = int(np.count_nonzero(self._here)), 0

    def prepared(self, terms: TableTerms, origin: Origin, keys: np.ndarray) -> Prepared:
        """The calls for the rows, which have these keys."""
        route, here, calls = self._route, self._here, list[Call]()
        if not here.all():
            self._lacking = prepared_pull(route, terms, origin, keys[~here], None)
            calls += self._lacking.calls
        if here.any():
            prints = fingerprints(self._rows[here], route.spec.salt)
            call = Call.of(terms.changed, origin, keys[here], prints, None)
            calls.append(refuse(route, frames.PULL, origin, keys[here]) if call is None else call)
        return Prepared(route, tuple(calls), lambda: None)

    def values(self, requests: Sequence[Request]) -> np.ndarray:
        """All rows, when these requests for them are answered."""
        rows = self._rows
        if self._lacking is not None:
            rows[~self._here] = self._lacking.finish().reshape(-1, rows.shape[1])
        places, self.changed = np.flatnonzero(self._here), 0
        for request in requests:
            part = request.call_part
            if part.is_changed:
                own = places[part.places]
                changed, fresh = changed_rows_in(request.body, len(own), rows.shape[1], rows.dtype)
                rows[own[changed]] = fresh
                self.changed += len(fresh)
        return rows
