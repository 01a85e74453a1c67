import numpy as np

def fill_missing(out: np.ndarray, keys: np.ndarray, index: np.ndarray, seed: int, numbers: np.ndarray) -> None: ...
def fill_new(
    rows: np.ndarray,
    dim: int,
    keys: np.ndarray,
    index: np.ndarray,
    first: int,
    seed: int,
    numbers: np.ndarray,
    slot_start: float,
    vacant: np.ndarray | None = None,
) -> None: ...
def fill_range(
    rows: np.ndarray, dim: int, start_key: int, seed: int, numbers: np.ndarray, slot_start: float
) -> None: ...
