from collections.abc import Callable
from typing import Any

import numpy as np

from dps.engine.core.shard_map import ShardMap
from dps.engine.core.shards.counters import TableCounters
from dps.engine.core.shards.index import KeyIndex
from dps.engine.core.shards.initializers import RowStart
from dps.engine.core.shards.ledger import Ledger

VALUES_PER_ROW: int

class Lead:
    clock: int
    origin: int
    def __init__(self) -> None: ...
    def note(self, clock: int, origin: int) -> None: ...
    def lag(self, clock: int) -> int: ...
    def retire(self, first: int, count: int) -> None: ...
    def copy(self) -> Lead: ...

class CutState:
    before: int
    latest: int
    is_complete: bool
    has_changes: bool
    ledger: Ledger
    lead: Lead | None
    place: np.ndarray
    saved: np.ndarray
    copies: int
    existing: int
    given: int
    stop: int

class ShardState:
    number: int
    low: int
    rows: np.ndarray
    index: KeyIndex | None
    ledger: Ledger
    clock: int
    version: int
    sums: Any
    cut: Any
    changed: np.ndarray | None
    dirty: np.ndarray | None
    vacant: np.ndarray | None
    pulled: np.ndarray | None
    vacancies: int
    dim: int
    row_start: RowStart
    kernel: Callable[..., None]
    lead: Lead | None
    numbers: dict[int | tuple[int, int], np.ndarray]
    record_at: int
    most_rows: int
    spilled: int
    uses: int
    moment_at_base: int
    base_version: int
    ops_of_moment: int
    admits: bool
    thrifty: bool

class SumsState:
    clock: int
    parties: int
    rows: int
    shard: Any
    sums: Any
    touched: Any
    plain_rows: int

class ReplicaState:
    number: int
    shard: Any
    so_far: Any
    successor: int | None
    tail: Any
    feed: Any
    hold: Any
    primary: bool
    joining: bool
    stepping_down: bool
    deposed: bool
    learning: bool
    fence: int
    @property
    def serves(self) -> bool: ...

class TableState:
    replicas: dict[int, Any]
    meter: TableCounters
    plain: bool
    replicated: bool
    waits: bool
    finite: bool
    aggregated: bool
    dim: int
    shards: int
    rows: int
    row_bytes: int
    pulled: int
    pushed: int
    shard_map: ShardMap
    def __init__(
        self,
        dtype: int,
        dim: int,
        shard_map: ShardMap,
        finite: bool,
        aggregated: bool,
        replicated: bool,
        waits: bool,
        kernel: object,
        row_start: RowStart,
        meter: TableCounters,
        pulled: int = 0,
        pushed: int = 0,
    ) -> None: ...
