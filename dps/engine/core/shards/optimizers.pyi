import numpy as np

class Kernel:
    __name__: str
    def __call__(
        self, rows: np.ndarray, index: np.ndarray, start: int, updates: np.ndarray, numbers: np.ndarray
    ) -> None: ...

class ColumnKernel(Kernel):
    def __init__(self, columns: list[tuple[Kernel, int, int]]) -> None: ...

add: Kernel
assign: Kernel
sgd: Kernel
momentum: Kernel
adagrad: Kernel
rmsprop: Kernel
adam: Kernel
ftrl: Kernel
