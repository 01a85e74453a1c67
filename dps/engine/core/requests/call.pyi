from typing import Protocol

import numpy as np

from dps.engine.core.requests.form import Form

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
    keys: int
    pushes: bool
    answered: bool
    merges: bool
    carries: bool
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
        keys: int = ...,
    ) -> None: ...

class Call:
    terms: Terms
    result: np.ndarray | None
    asked: int
    numbers: int
    legs: int
    def __init__(self) -> None: ...
    @staticmethod
    def of(
        terms: Terms, origin: Origin, keys: object, values: object, out: object, weight: int = ...
    ) -> Call | None: ...
    def take_number(self, origin: Origin) -> None: ...
    def own(self) -> None: ...
    def finish(self) -> np.ndarray | None: ...
