from typing import Protocol

import numpy as np

from dps.core.form import Form

LAST_NUMBER: int

class Origin(Protocol):
    id: int
    attempt: int
    clock: int
    number: int
    parties: int

class Terms:
    form: Form
    kind: int
    flags: int
    epoch: int
    most: int
    pushes: bool
    answered: bool
    merges: bool
    def __init__(
        self,
        form: Form,
        epoch: int,
        most: int,
        kind: int,
        flags: int,
        pushes: bool,
        answered: bool,
        merges: bool,
    ) -> None: ...

class Call:
    terms: Terms
    result: np.ndarray | None
    asked: int
    legs: int
    def __init__(self) -> None: ...
    @staticmethod
    def of(terms: Terms, origin: Origin, keys: object, values: object, out: object) -> Call | None: ...
    def take_number(self, origin: Origin) -> None: ...
    def own(self) -> None: ...
    def finish(self) -> np.ndarray | None: ...
    @property
    def parts(self) -> list[tuple[int, int, int, int, int]]: ...
    @property
    def fields(self) -> dict[str, int]: ...
    @property
    def span(self) -> tuple[int, int]: ...
    @property
    def grouping(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None: ...
    @property
    def pushed(self) -> np.ndarray | None: ...
    @property
    def places(self) -> np.ndarray | None: ...

class Part:
    call: Call
    size: int
    sent: int
    def __init__(self, call: Call, n: int) -> None: ...
    def pieces(self, number: int) -> list[bytes | memoryview]: ...
    def accept(self, kind: int, request: int, nbytes: int, body: memoryview) -> bool: ...
    def buffer(self) -> memoryview: ...
    def advance(self, nbytes: int) -> None: ...
