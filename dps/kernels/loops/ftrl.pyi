import numpy as np

def ftrl_steps(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    sums: np.ndarray,
    intercept: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray | None,
    rule: tuple[float, float, float, float],
    others: float,
    fixed: bool,
    gains: np.ndarray,
    intercept_gains: np.ndarray,
) -> float: ...
