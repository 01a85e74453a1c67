from collections.abc import Callable
from typing import Any

import numpy as np

from dps.engine.core.requests.answers import Answers, OwedAnswer
from dps.errors import DPSError

class Forward:
    replicas: list[Any]
    done: bool
    learning: bool
    nbytes: int
    feed: Any
    piece: Any
    owed_answers: list[OwedAnswer]
    followers: list[tuple[Any, OwedAnswer]]
    first_sent: float
    def __init__(self) -> None: ...
    @staticmethod
    def of_piece(feed: Any, piece: Any, head: bytes, buffers: tuple[Any, ...], nbytes: int) -> Forward: ...
    def split(self) -> list[Forward]: ...
    def confirm(self) -> None: ...
    def refuse(self, error: DPSError) -> None: ...
    def buffers(self) -> list[Any]: ...

class Successor:
    number: int
    link: Any
    feeds: Any
    unconfirmed: dict[int, Forward]
    awaited: int
    learning_bytes: int
    progressed_at: float
    op_sent_at: float
    def __init__(self, number: int) -> None: ...
    @property
    def awaits_op(self) -> bool: ...
    def next_request(self) -> int: ...
    def replace(self, unconfirmed: dict[int, Forward]) -> None: ...
    def take(self, request: int) -> Forward: ...

class Forwards:
    epoch: int
    backlog: int
    successors: dict[int, Successor]
    answers: Answers
    limit: int
    def __init__(
        self,
        now: Callable[[], float],
        make_feeds: Callable[[Successor], Any],
        connect: Callable[[Successor], object],
        limit: int,
    ) -> None: ...
    @property
    def full(self) -> bool: ...
    def successor(self, number: int) -> Successor: ...
    def forward(
        self,
        header: bytes,
        fresh: list[tuple[Any, int]],
        keys: np.ndarray | None,
        values: np.ndarray,
        owed: OwedAnswer,
        more: tuple[bytes | memoryview, ...] = (),
    ) -> None: ...
    def follow(self, replica: Any, owed: OwedAnswer) -> None: ...
    def send(self, number: int, forward: Forward) -> None: ...
    def write(self, successor: Successor, request: int) -> None: ...
    def confirm(self, successor: Successor, inbox: np.ndarray, start: int, end: int) -> int: ...
