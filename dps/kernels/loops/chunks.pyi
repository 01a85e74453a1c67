import numpy as np

def loop_number(ufunc: np.ufunc, types: bytes) -> int: ...
def run_steps(
    arrays: list[np.ndarray],
    registers: list[np.ndarray],
    steps: list[tuple[np.ufunc, int, list[int]]],
    sums: list[tuple[int, bool]],
    length: int,
    width: int,
) -> list[float]: ...
