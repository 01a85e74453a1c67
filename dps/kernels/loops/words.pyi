import numpy as np

class WordMemory:
    def __init__(self) -> None: ...

def word_steps(
    inside: np.ndarray,
    outside: np.ndarray,
    words: np.ndarray,
    targets: np.ndarray,
    sentences: np.ndarray,
    reach: np.ndarray,
    pools: np.ndarray,
    negative: float,
    rate: float,
    step: int,
    trainers: int,
    cbow: bool,
) -> tuple[float, int]: ...
