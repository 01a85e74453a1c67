from collections.abc import Callable
from typing import Any

import numpy as np

from dps.engine.core.requests.forwards import Forwards
from dps.engine.core.shards.counters import ServerCounters

class Service:
    requests: int
    bounded: bool
    blocked: bool
    shared: bool
    @property
    def left(self) -> int: ...
    def __init__(
        self,
        tables: dict[int, Any],
        counters: ServerCounters,
        clock: Callable[[], float],
        holds_lease: Callable[[], bool],
        close_before: Callable[[Any, int], object],
        ops: Forwards,
        refuse: Callable[[Any, int, Any], object],
        throttle: Callable[[Any], bool],
        fail: Callable[[Exception], Exception],
        limit: int,
    ) -> None: ...
    def step(
        self, inbox: np.ndarray, start: int, end: int, out: np.ndarray, peer: Any, from_server: bool
    ) -> tuple[int, int]: ...
    def more(self, out: np.ndarray) -> int: ...
    def share(self, out: np.ndarray) -> int: ...
