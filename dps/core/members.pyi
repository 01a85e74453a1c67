import numpy as np

def are_in_rows(
    starts: np.ndarray,
    stops: np.ndarray,
    indices: np.ndarray,
    rows: np.ndarray,
    items: np.ndarray,
    out: np.ndarray,
) -> None: ...
