import numpy as np

from dps.engine.core.shards.index import KeyIndex

def rank(key: int, salt: int) -> int: ...
def list_window(
    index: KeyIndex, low: int, high: int, first: int, last: int, keys: np.ndarray, rows: np.ndarray
) -> int: ...
