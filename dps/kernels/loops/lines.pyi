import numpy as np

def parse(
    data: bytes, with_fields: bool, first: int, features: int, n_fields: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
