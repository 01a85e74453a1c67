class RequestCounters:
    keys: int
    bytes: int
    seconds: float
    @property
    def requests(self) -> int: ...
    @property
    def histogram(self) -> list[int]: ...
    def count(self, keys: int, nbytes: int, seconds: float) -> None: ...

class TableCounters:
    pulls: RequestCounters
    pushes: RequestCounters
    @property
    def shards(self) -> list[int]: ...
    def __init__(self, shards: int) -> None: ...
    def count_keys(self, shard: int, keys: int) -> None: ...

class ServerCounters:
    lag: float
