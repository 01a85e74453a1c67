import numpy as np

def are_in_rows(
    ends: np.ndarray, indices: np.ndarray, rows: np.ndarray, items: np.ndarray, out: np.ndarray
) -> None: ...
