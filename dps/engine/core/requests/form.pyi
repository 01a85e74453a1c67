from dps.engine.core.cells import Cells

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
        cells: Cells | None = None,
    ) -> None: ...
