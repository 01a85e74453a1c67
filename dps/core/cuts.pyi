import numpy as np

def flag(flags: np.ndarray, index: np.ndarray, start: int, count: int, bits: int) -> None: ...
def save(
    rows: np.ndarray,
    index: np.ndarray,
    start: int,
    count: int,
    first: int,
    end: int,
    existing: int,
    place: np.ndarray,
    saved: np.ndarray,
    used: int,
) -> int: ...
def follow(
    index: np.ndarray, start: int, count: int, place: np.ndarray, used: int, which: np.ndarray, where: np.ndarray
) -> tuple[int, int]: ...
def count_wanted(place: np.ndarray, flags: np.ndarray, bits: int, end: int) -> int: ...
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
) -> tuple[int, int]: ...
