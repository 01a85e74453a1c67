from dps.engine.core.shard_map import ShardMap

class Form:
    shard_map: ShardMap
    def __init__(
        self,
        table: int,
        kind: int,
        dim: int,
        shard_map: ShardMap,
        finite: bool,
        runs: list[tuple[int, int]],
        codecs: list[tuple[int, int, bool]] = ...,
    ) -> None: ...
    def travel(self, codecs: list[tuple[int, int, bool]]) -> None: ...
