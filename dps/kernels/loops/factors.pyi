import numpy as np

def rating_steps(
    p: np.ndarray,
    q: np.ndarray,
    p_reach: np.ndarray | None,
    q_reach: np.ndarray | None,
    users: np.ndarray,
    items: np.ndarray,
    ratings: np.ndarray,
    mean: float,
    rate: float,
    penalty: float,
) -> float: ...
def ranking_steps(
    p: np.ndarray,
    q: np.ndarray,
    p_reach: np.ndarray | None,
    q_reach: np.ndarray | None,
    users: np.ndarray,
    items: np.ndarray,
    others: np.ndarray,
    rate: float,
    penalty: float,
) -> float: ...
def least_squares(
    x: np.ndarray,
    y: np.ndarray,
    starts: np.ndarray,
    others: np.ndarray,
    extra: np.ndarray,
    gram: np.ndarray,
    steps: int,
) -> float: ...
