from collections.abc import Callable

import numpy as np

class Cells:
    function: Callable[[np.ndarray], np.ndarray] | None

    def __init__(
        self,
        shift: int = 0,
        mask: int = -1,
        bounds: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
        function: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None: ...
    def __reduce__(self) -> tuple[type[Cells], tuple[object, ...]]: ...
    def of(self, keys: np.ndarray, cells: np.ndarray) -> None: ...
