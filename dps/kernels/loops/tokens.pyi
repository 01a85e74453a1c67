import numpy as np

def draw_topics(
    indptr: np.ndarray,
    indices: np.ndarray,
    repeats: np.ndarray,
    topics: np.ndarray,
    counts: np.ndarray,
    totals: np.ndarray,
    random: np.ndarray,
    alpha: float,
    eta: float,
    words: int,
    made: np.ndarray,
) -> None: ...
