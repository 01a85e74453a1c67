import numpy as np

from dps.engine.core.shard_map import ShardMap

UNGROUPED: int
GROUPED: int
ASCENDING: int

def mix(key: int) -> int: ...
def hash_keys(keys: np.ndarray, hashes: np.ndarray) -> None: ...
def survey(keys: np.ndarray, shard_map: ShardMap, starts: np.ndarray) -> int: ...
def scatter(
    keys: np.ndarray,
    shard_map: ShardMap,
    starts: np.ndarray,
    order: np.ndarray,
    grouped: np.ndarray,
    cells: np.ndarray | None = None,
) -> None: ...
def find_repeats(keys: np.ndarray, starts: np.ndarray, target: np.ndarray) -> int: ...
def distinct_keys(
    keys: np.ndarray, starts: np.ndarray, target: np.ndarray, out_keys: np.ndarray, out_starts: np.ndarray
) -> None: ...
def sum_repeats(updates: np.ndarray, order: np.ndarray | None, target: np.ndarray, out: np.ndarray) -> None: ...
