from collections.abc import Callable

import numpy as np

DECLINED: int
DONE: int
OPEN: int

class Traffic:
    answers: int
    sent: int
    received: int
    blocked: float
    def stall(self, seconds: float) -> None: ...

class Stream:
    number: int
    def __init__(self, fd: int) -> None: ...
    @property
    def fd(self) -> int: ...
    def take(self) -> int: ...

class Form:
    def __init__(
        self,
        table: int,
        kind: int,
        dim: int,
        rows: int,
        shards: int,
        bits: int,
        finite: bool,
        runs: list[tuple[int, int]],
    ) -> None: ...

class Exchange:
    def __init__(self, spin: int) -> None: ...
    @property
    def result(self) -> np.ndarray | None: ...
    @property
    def open(self) -> list[tuple[int, int, int, int, int, int, bytes]]: ...
    @property
    def current(self) -> int: ...
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
        idle: Callable[[int], None],
    ) -> int: ...
