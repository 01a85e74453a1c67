"""The events of one parameter server that its users may want to know: logged, told to Dask, and remembered."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable

__all__ = ["EventLog"]

logger = logging.getLogger(__name__)

MAX_EVENTS = 256  # The log remembers so many events, because a cluster may run for months.


class EventLog:
    """The last events of a parameter server; `on_event` is called with the text of each event."""

    def __init__(self, session: str, on_event: Callable[[str], None]):
        self._session, self._on_event = session, on_event
        self.events: collections.deque[tuple[float, str]] = collections.deque(maxlen=MAX_EVENTS)
        # A function for each event, which says whether the event still matters.
        self._still_true: collections.deque[Callable[[], bool]] = collections.deque(maxlen=MAX_EVENTS)

    def note(self, text: str, level: int = logging.WARNING, stands: Callable[[], bool] = lambda: True) -> None:
        """Log an event that users may want to know, and remember it; `stands` says whether it still matters."""
        logger.log(level, "parameter server %r: %s", self._session, text)
        self.events.append((time.time(), text))
        self._still_true.append(stands)
        self._on_event(text)

    def mention(self, text: str) -> None:
        """As `note`, for an event that is not remembered."""
        logger.info("parameter server %r: %s", self._session, text)
        self._on_event(text)

    def news(self) -> list[tuple[float, str]]:
        """The events that still matter: not those of runs that are over or of servers that were closed."""
        return [event for event, stands in zip(self.events, self._still_true, strict=True) if stands()]
