"""Route changes: what servers have lost by the route, whether the controller is asked for it, and what is sent anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dps.engine.client.requests import TableRoute
from dps.engine.core.requests.part import Part
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Route, decode
from dps.errors import BehindError, LeaseError, RequestTimeoutError, ServerGoneError, UnknownTableError

__all__ = [
    "DOUBT_SECONDS",
    "LEASE_SECONDS",
    "LEASE_TRIES",
    "MAX_SETBACKS",
    "RouteQuestion",
    "broke_off",
    "has_tried",
    "pause_before_try",
    "refused_by_leases",
    "sent_together",
    "was_replaced",
    "within",
]

# Time that a server may keep a caller waiting before the controller is asked; and that the controller has to answer.
DOUBT_SECONDS = 0.5
PAUSE_SECONDS = (0.002, 0.05)  # between two looks for the answer: the first pause, the longest
RETRY_SECONDS = (0.002, 0.1)  # between two tries to recover: the first pause, the longest
# Pauses grow slowly, so that a server is found soon after it can answer again: within 1.3 times the time until then.
RETRY_GROWTH = 1.3
# A client sends so many requests to a server whose lease is over, in about 0.7 s, before it asks the controller for the
# route; and so many to a server whose connections break, before it waits for the controller to answer. It sends none
# after so many seconds, because a connection that hangs takes as long as many that are refused.
LEASE_TRIES, LEASE_SECONDS = 18, 1.0
MAX_SETBACKS = 32  # recoveries in a row that lengthen the pause before the next one


def pause_before_try(setbacks: int) -> float:
    """Seconds before a client that was set back so many times in a row tries to recover again."""
    return min(RETRY_SECONDS[0] * RETRY_GROWTH**setbacks, RETRY_SECONDS[1])


class RouteQuestion:
    """The question for the route by a client that can go on without an answer.

    A question without an answer stays open, because a scheduler that stands still answers it when it goes on. The next
    call takes that answer, and waits for none. Its connection is kept: the scheduler would greet no new one.
    """

    def __init__(self, now: Callable[[], float], sleep: Callable[[float], object]):
        self._now, self._sleep = now, sleep
        self._open: Request | None = None  # the question that has no answer yet

    def ask(self, controller: Callable[[float], Channel], header: Header, epoch: int) -> Request | None:
        """The answer, unless it does not come soon, or is older than the route of that epoch.

        `controller` returns the connection, which may take so many seconds. Its errors, and those of `Request.result`,
        are raised.
        """
        question, until, pause = self._open, self._now(), PAUSE_SECONDS[0]
        if question is None or question.channel.closed:
            question = self._open = controller(DOUBT_SECONDS).ask(header)
            until += DOUBT_SECONDS
        question.channel.poll()
        while not question.done and self._now() < until:
            self._sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])
            question.channel.poll()
        if not question.done:
            return None
        self._open = None
        answer = question.result(until)
        return answer if decode(Route, answer.body).epoch >= epoch else None


def within(seconds: float, now: Callable[[], float], check: Callable[[], object], what: str) -> Callable[[], None]:
    """As `check`, which is called again and again in a wait; it also raises when that takes longer."""
    until = now() + seconds

    def checked() -> None:
        check()
        if now() > until:
            raise RequestTimeoutError(f"{what} has not greeted within {seconds:g} s: it may stand still")

    return checked


def was_replaced(server: int, epoch: int, routes: Mapping[int, TableRoute], known: Route) -> bool:
    """Whether a shard that the server had by the routes of that epoch, by table number, is not its own any more."""
    owners = {table.spec["id"]: table.owners for table in known.tables}
    owners |= {old: [] for table in known.tables for old in table.ancestors}  # no server has it, after a split
    chains = {table.spec["id"]: table.chains for table in known.tables}
    of_tables = [(route, owners[table], chains.get(table, [])) for table, route in routes.items() if table in owners]
    return known.epoch != epoch and any(
        route.has_moved(server, owners) or route.has_left(server, chains) for route, owners, chains in of_tables
    )


def refused_by_leases(requests: Sequence[Request], retried: Callable[[Request], bool]) -> bool:
    """Whether one of these requests was refused for a lease that is over, and the controller need not be asked.

    A backup that is behind its primary refuses in the same way; the request goes to the primary then.

    Others that are `retried` have failed then because the server has closed their connection, too. All these channels
    are closed, so that nothing overtakes what is sent again. If a server does not know the table, only the controller
    can tell whether another one has taken its place.
    """
    failed = [request for request in requests if retried(request)]
    refused = any(isinstance(request.error, (LeaseError, BehindError)) for request in failed)
    for request in failed if refused else ():
        if request.channel is not None:  # it could be sent
            request.channel.close()
    return refused and not any(isinstance(request.error, UnknownTableError) for request in requests)


def has_tried(setbacks: int, seconds: float) -> bool:
    """Whether servers were tried often enough, by a client whose first of so many setbacks was so many seconds ago.

    >>> [has_tried(*so_far) for so_far in [(0, 1000.0), (3, 0.1), (1, 10.0), (LEASE_TRIES, 0.7)]]
    [False, False, True, True]
    """
    return setbacks >= LEASE_TRIES or (setbacks > 0 and seconds > LEASE_SECONDS)


def broke_off(requests: Sequence[Request]) -> bool:
    """Whether some have failed, and these only because their connections broke, or could not be made."""
    errors = [request.error for request in requests if request.error is not None]
    return bool(errors) and all(type(error) is ServerGoneError for error in errors)


def sent_together(
    requests: Sequence[Request], part: Part, route: TableRoute | None, retried: Callable[[Request], bool]
) -> list[Part] | None:
    """The parts of a part's op that are sent again together, the first one first; none, if each goes by itself.

    `requests` are those of its call. Where shards were merged, one shard may get several parts of an op, and would take
    the second for a repeat. So they become one part; None, if the table was restored, and some were answered
    by the old one or were cut anew. A table that was merged knows what was answered, and is sent the whole op again.
    """
    if route is None or not part.pushes or route.spec.shard_map.refines(part.shard_map):
        return []
    mates = [each for each in requests if each.call_part.pushes and each.call_part.op == part.op]
    parts = [each.call_part for each in mates]
    if route.merges(part):
        return [each.call_part for each in mates if retried(each)]
    return parts if all(map(retried, mates)) and all(each.call is part.call for each in parts) else None
