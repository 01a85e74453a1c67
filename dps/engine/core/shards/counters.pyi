import numpy as np

from dps.engine.core.shards.heat import KeyHeat

class RequestCounters:
    keys: int
    bytes: int
    key_bytes: int
    back_bytes: int
    seconds: float
    @property
    def requests(self) -> int: ...
    @property
    def histogram(self) -> list[int]: ...
    def count(self, keys: int, nbytes: int, seconds: float, key_bytes: int = 0, back_bytes: int = 0) -> None: ...

class TableCounters:
    pulls: RequestCounters
    pushes: RequestCounters
    heat: KeyHeat
    @property
    def shards(self) -> list[int]: ...
    def __init__(self, shards: int) -> None: ...
    def count_scanned(self, shard: int, rows: int) -> None: ...
    def count_keys(self, shard: int, keys: np.ndarray | None, start: int, count: int) -> None: ...

class ServerCounters:
    lag: float
