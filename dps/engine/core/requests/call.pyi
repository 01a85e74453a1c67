from typing import Protocol

import numpy as np

from dps.engine.core.requests.terms import Terms

LAST_NUMBER: int

class Origin(Protocol):
    id: int
    attempt: int
    clock: int
    number: int
    parties: int

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
