import numpy as np

def exp_digamma(values: np.ndarray, out: np.ndarray) -> None: ...
def fit_documents(
    indptr: np.ndarray,
    indices: np.ndarray,
    counts: np.ndarray,
    weights: np.ndarray,
    alpha: float,
    max_iter: int,
    tol: float,
    epsilon: float,
    gamma: np.ndarray,
    statistics: np.ndarray | None,
) -> int: ...
