import numpy as np

class RowStart:
    dim: int
    slots: int
    has_zeros: bool
    is_zero: bool
    def __init__(self, columns: list[tuple[int, int, np.ndarray, int, float]], state_columns: int = 1) -> None: ...

def fill_missing(out: np.ndarray, keys: np.ndarray, index: np.ndarray, start: RowStart) -> None: ...
def fill_new(
    rows: np.ndarray,
    keys: np.ndarray,
    index: np.ndarray,
    first: int,
    start: RowStart,
    vacant: np.ndarray | None = None,
) -> None: ...
def fill_range(rows: np.ndarray, start_key: int, start: RowStart) -> None: ...
