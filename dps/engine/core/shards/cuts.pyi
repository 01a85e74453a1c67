import numpy as np

from dps.engine.core.shards.states import ShardState

def flag(flags: np.ndarray, index: np.ndarray, start: int, count: int, bits: int) -> None: ...
def save(shard: ShardState, index: np.ndarray, start: int, count: int, clock: int, is_step: bool) -> bool: ...
def occupy(shard: ShardState, index: np.ndarray) -> None: ...
def note(shard: ShardState, clock: int, origin: int, attempt: int, number: int, is_step: bool) -> None: ...
def follow(
    index: np.ndarray, start: int, count: int, place: np.ndarray, used: int, which: np.ndarray, where: np.ndarray
) -> tuple[int, int]: ...
def count_wanted(
    place: np.ndarray, flags: np.ndarray, bits: int, end: int, vacant: np.ndarray | None = None
) -> int: ...
def take_wanted(
    rows: np.ndarray,
    first: int,
    end: int,
    place: np.ndarray,
    saved: np.ndarray,
    flags: np.ndarray,
    bits: int,
    out: np.ndarray,
    which: np.ndarray,
    vacant: np.ndarray | None = None,
) -> tuple[int, int]: ...
