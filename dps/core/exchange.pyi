from collections.abc import Callable

import numpy as np

from dps.core.form import Form

DECLINED: int
DONE: int
OPEN: int

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
    def __init__(self, fd: int) -> None: ...
    def take(self) -> int: ...

class Exchange:
    result: np.ndarray | None
    open: list[tuple[int, int, int, int, int, int, bytes]]
    current: int
    def __init__(self, spin: int) -> None: ...
    @property
    def seconds_waited(self) -> float: ...
    def call(
        self,
        form: Form,
        streams: list[Stream],
        traffics: list[Traffic],
        kind: int,
        flags: int,
        stamp: tuple[int, ...],
        keys: np.ndarray | None,
        start: int,
        end: int,
        values: np.ndarray | None,
        out: np.ndarray | None,
        answered: bool,
        distinct: bool,
        most: int,
        acknowledge: Callable[[int, int], bool],
        idle: Callable[[int, int], None],
    ) -> int: ...
