"""Golden cases: the products of sparse logistic regression that are summed in a fixed order.

These are the margins of several outputs, and gradients. The margins of one output are summed in any order, so that the
adds overlap, and losses and residuals use the C library's exp and log: their last bits differ between processors, and
`test_sparse_tolerance.py` compares them with float64 instead.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import streams

from dps.kernels import gradient, margins

OUTPUTS = (2, 3, 8, 16, 17, 64)
KINDS = ("ones", "float32", "float64")
ROWS, WEIGHTS = 70, 45


class Batch:
    """A CSR batch with empty rows, long rows and repeated indices; `data` is None for ones."""

    def __init__(self, kind: str, rows: int = ROWS, k: int = WEIGHTS, name: str = "batch"):
        lengths = streams.integers(f"{name} lengths", rows, 0, 30)
        lengths[:: rows // 5 or 1] = 0
        self.indptr = np.append(0, np.cumsum(lengths))
        count = int(self.indptr[-1])
        self.indices = streams.integers(f"{name} indices", count, 0, k)
        self.data = None if kind == "ones" else streams.values(f"{name} data", (count,), kind)

    @property
    def parts(self) -> tuple:
        return self.indptr, self.indices, self.data


def products(kind: str, outputs: int, name: str = "products") -> dict[str, np.ndarray]:
    """Margins and gradient of several outputs."""
    X = Batch(kind)
    w, b = (streams.values(f"{name} {shape}", shape, "float32") for shape in ((WEIGHTS, outputs), (outputs,)))
    residual = streams.values(f"{name} residual", (ROWS, outputs), "float32")
    special = streams.specials(f"{name} special", (WEIGHTS, outputs), "float32")
    again = gradient(*X.parts, residual, WEIGHTS, out=streams.values("before", (WEIGHTS, outputs), "float32"))
    return {
        "margins": margins(*X.parts, w, b),
        "one b": margins(*X.parts, w, 0.25),
        "special margins": margins(*X.parts, special, b),
        "gradient": gradient(*X.parts, residual, WEIGHTS),
        "added gradient": again,
    }


def one_output(kind: str, name: str = "one output") -> dict[str, np.ndarray]:
    """The gradient of one output, in both shapes of residuals; and with int32 indices and special values."""
    X = Batch(kind)
    residual = streams.values(name, (ROWS,), "float32")
    special = streams.specials(f"{name} special", (ROWS,), "float32")
    return {
        "gradient": gradient(*X.parts, residual, WEIGHTS),
        "column": gradient(*X.parts, residual[:, None], WEIGHTS),
        "int32": gradient(X.indptr.astype(np.int32), X.indices.astype(np.int32), X.data, residual, WEIGHTS),
        "special": gradient(*X.parts, special, WEIGHTS),
    }


CASES = {f"products / {kind} / {outputs}": partial(products, kind, outputs) for kind in KINDS for outputs in OUTPUTS}
CASES |= {f"gradient / {kind}": partial(one_output, kind) for kind in KINDS}

VARIANTS = {
    "products / float32 / 3": partial(products, "float64", 3),
    "products / ones / 16": partial(products, "ones", 16, "others"),
    "gradient / float64": partial(one_output, "float64", "another"),
}
