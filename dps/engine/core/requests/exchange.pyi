from collections.abc import Callable
from typing import Any

import numpy as np

from dps.engine.core.requests.call import Call, Origin
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.meter import CallMeter
from dps.engine.core.requests.part import Part
from dps.engine.core.requests.polling import Polling
from dps.engine.core.requests.ring import Ring
from dps.engine.core.requests.terms import Terms

class Outcome: ...

DECLINED: Outcome
OPEN: Outcome

class Traffic:
    answers: int
    sent: int
    received: int
    blocked: float
    def __init__(self) -> None: ...
    def stall(self, seconds: float) -> None: ...

class Stream:
    fd: int
    number: int
    calls: int
    touched: bool
    ended: bool
    local: bool
    ring: Ring | None
    loans: Any
    lists: KeyLists
    on_large: Callable[[], None] | None
    def __init__(self, fd: int) -> None: ...
    def take(self) -> int: ...
    def announce(self, nbytes: int) -> int: ...
    def write(self, part: Part, number: int) -> list[bytes | memoryview]: ...
    def close_after(self, close: Callable[[], None]) -> None: ...

class Wires:
    channels: list[Any]
    streams: list[Stream]
    traffics: list[Traffic]
    def __init__(self, channels: list[Any]) -> None: ...

class Exchange:
    calls: list[Call]
    began: float
    open: list[tuple[int, int, int, int, bytes]]
    at: int
    current: int
    def __init__(
        self, polling: Polling, now: Callable[[], float], meter: CallMeter, idle: Callable[[Any, int], None]
    ) -> None: ...
    def make(
        self, asked: list[tuple[Wires, Terms, object, object, object]], origin: Origin
    ) -> list[np.ndarray | None] | Outcome: ...
    def give_away(self) -> list[Call]: ...
