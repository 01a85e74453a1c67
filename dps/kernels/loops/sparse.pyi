import numpy as np

def margins(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray | None, w: np.ndarray, b: np.ndarray, out: np.ndarray
) -> None: ...
def gradient(
    indptr: np.ndarray, indices: np.ndarray, data: np.ndarray | None, residual: np.ndarray, out: np.ndarray
) -> None: ...
def binary_residuals(z: np.ndarray, y: np.ndarray, weights: np.ndarray | None, residual: np.ndarray) -> float: ...
def multinomial_residuals(z: np.ndarray, y: np.ndarray, weights: np.ndarray | None, residual: np.ndarray) -> float: ...
def logistic(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    w: np.ndarray,
    b: float,
    y: np.ndarray,
    weights: np.ndarray | None,
    scale: float,
    out: np.ndarray,
) -> tuple[float, float]: ...
def pair_scores(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    rows: np.ndarray,
    b: float,
    s: np.ndarray,
    out: np.ndarray,
) -> None: ...
def pair_gradient(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    rows: np.ndarray,
    s: np.ndarray,
    residual: np.ndarray,
    out: np.ndarray,
) -> None: ...
def field_scores(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    fields: np.ndarray,
    rows: np.ndarray,
    n_fields: int,
    b: float,
    out: np.ndarray,
) -> None: ...
def field_gradient(
    indptr: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray | None,
    fields: np.ndarray,
    rows: np.ndarray,
    n_fields: int,
    residual: np.ndarray,
    out: np.ndarray,
) -> None: ...
