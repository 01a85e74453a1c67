"""Liveness: which servers have sent no heartbeat for too long. Pure.

A server sends a heartbeat every quarter of a second. If the controller's own process was stopped or starved, heartbeats
have piled up unread; to declare all servers dead for that would be wrong. So the controller checks at a fixed interval,
and a check that comes late moves the last heartbeat of every server forward by as much as the check is late.
"""

from __future__ import annotations

import math

__all__ = ["Liveness"]


class Liveness:
    """When each server sent its last heartbeat.

    A server may be without a heartbeat for `patience` seconds, and calls of :meth:`silent` are at most `interval`
    seconds apart.

    Examples
    --------
    >>> liveness = Liveness(patience=2.0, interval=0.5)
    >>> liveness.heartbeat(7, now=0.0)
    >>> [liveness.silent(now / 2) for now in range(6)][-2:]
    [[], [7]]
    >>> liveness.silent(60.0)  # a late check: this process itself was stopped
    [7]
    """

    def __init__(self, patience: float, interval: float):
        self.patience, self.interval = patience, interval
        self._heartbeats: dict[int, float] = {}  # server -> time of its last heartbeat
        self._checked: float | None = None  # time of the last call of `silent`

    def heartbeat(self, server: int, now: float) -> None:
        self._heartbeats[server] = max(now, self._heartbeats.get(server, now))

    def forget(self, server: int) -> None:
        self._heartbeats.pop(server, None)

    def last_heartbeat(self, server: int) -> float:
        """The time of the last heartbeat of `server`; -infinity if it is not watched."""
        return self._heartbeats.get(server, -math.inf)

    def silent(self, now: float) -> list[int]:
        """The servers without a heartbeat for longer than the patience. To be called every `interval`."""
        late = 0.0 if self._checked is None else max(0.0, now - self._checked - 2 * self.interval)
        self._checked = now
        for server in self._heartbeats if late else ():
            self._heartbeats[server] = min(now, self._heartbeats[server] + late)
        return [server for server, last in self._heartbeats.items() if now - last > self.patience]
