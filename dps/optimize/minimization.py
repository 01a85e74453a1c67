"""What all solvers share: checked input, counted evaluations, when to end, and scipy's result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from scipy.optimize import OptimizeResult

from dps.errors import InputError, InputTypeError, NotFiniteError
from dps.optimize.vectors import Vector, stored

__all__ = [
    "CONVERGED",
    "NO_STEP",
    "OUT_OF_ITERATIONS",
    "STOPPED",
    "Callback",
    "Function",
    "Minimization",
    "counted",
    "nonnegative",
    "positive",
    "start_of",
]

# Function to minimise: x -> (loss, gradient).
Function: TypeAlias = Callable[[Vector], tuple[float, Vector]]
Callback: TypeAlias = Callable[[OptimizeResult], object]

# Status of a result: scipy's numbers, where it has them.
RUNNING = -1
CONVERGED = 0
OUT_OF_ITERATIONS = 1
NO_STEP = 2
STOPPED = 99
MESSAGES = {
    OUT_OF_ITERATIONS: "max_iter={max_iter} iterations did not converge; a larger max_iter or tol ends this",
    NO_STEP: "no step along the direction makes the loss smaller: the loss is flat at the precision of its numbers, or "
    "the gradient is not the gradient of the loss",
    STOPPED: "the callback raised StopIteration",
}


class Minimization:
    """One minimisation: its point so far, the counts, and the reason for its end.

    Parameters
    ----------
    fun : callable
        ``fun(x) -> (loss, gradient)``.
    x0 : vector
        The first point. It is not changed.
    tol : float
        End when the norm that the solver watches is at most `tol`.
    f_tol : float
        End when the loss falls by at most this fraction of itself (of 1, if it is less than 1) in an iteration.
    callback : callable, optional
        Called with an OptimizeResult after each iteration; it may raise StopIteration.
    watched : str
        What the norm is of, for messages.
    """

    def __init__(
        self,
        fun: Callable,
        x0: Vector,
        tol: float,
        f_tol: float = 0.0,
        max_iter: int = 100,
        callback: Callback | None = None,
        watched: str = "the norm of the gradient",
    ):
        if not callable(fun):
            raise InputTypeError(f"fun is a function of x that returns (loss, gradient), not a {type(fun).__name__}")
        if callback is not None and not callable(callback):
            raise InputTypeError(f"callback is a function of an OptimizeResult, not a {type(callback).__name__}")
        self.x = start_of(x0)
        self.nit = 0
        self.nfev = 0
        self.value, self.gradient = math.nan, None
        self.status, self.message = RUNNING, ""
        self._fun, self._callback = fun, callback
        self.tol, self._f_tol = nonnegative("tol", tol), nonnegative("f_tol", f_tol)
        self.max_iter = counted("max_iter", max_iter)
        self._watched = watched
        self._fall = math.inf  # fall of the last iteration, relative

    def evaluate(self, x: Vector) -> tuple[float, Vector]:
        return self.checked(x, self._fun(x))

    def checked(self, x: Vector, answer: object) -> tuple[float, Vector]:
        """What a function has answered at x: a number, and a new vector of the shape of x."""
        self.nfev += 1
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise InputTypeError(f"fun returns a tuple (loss, gradient), not {_described(answer)}")
        value, gradient = answer
        if np.ndim(value) != 0:
            raise InputTypeError(f"fun returns (loss, gradient), and its loss is {_described(value)}, not a number")
        if getattr(gradient, "shape", None) != x.shape:
            raise InputError(f"fun returns a gradient that is {_described(gradient)}, and x has shape {x.shape}")
        if gradient is self.gradient or gradient is x:
            raise InputError(
                "fun returns x, or the gradient that it returned before: it must make a new array each time"
            )
        return float(value), gradient

    def begin(self) -> None:
        self.value, self.gradient = self.evaluate(self.x)
        if not math.isfinite(self.value):
            raise NotFiniteError(
                f"the loss at x0 is {self.value}: begin at a point where it is finite, or look for NaN in the data"
            )

    def advance(self, x: Vector, value: float, gradient: Vector) -> None:
        """The end of an iteration: the new point, which the callback sees."""
        self._fall = (self.value - value) / max(abs(self.value), abs(value), 1.0)
        self.x = x
        self.value = value
        self.gradient = gradient
        self.nit += 1
        if self._callback is not None:
            try:
                self._callback(self._described())
            except StopIteration:
                self.end(STOPPED)

    def ended(self, norm: float) -> bool:
        """Whether to end before another iteration, of which `norm` is what the solver watches."""
        if not math.isfinite(norm):
            raise NotFiniteError(
                f"the gradient has NaN or infinity after {self.nit} iterations, and the loss is {self.value:.6g}: look "
                f"for them in the data, or begin nearer to the minimum"
            )
        if self.status != RUNNING:
            return True
        if norm <= self.tol:
            self.end(CONVERGED, f"{self._watched} is {norm:.3g}, and tol={self.tol:g}")
        elif self._f_tol and 0.0 <= self._fall <= self._f_tol:
            self.end(CONVERGED, f"the loss fell by a fraction of {self._fall:.3g}, and f_tol={self._f_tol:g}")
        elif self.nit >= self.max_iter:
            self.end(OUT_OF_ITERATIONS)
        return self.status != RUNNING

    def end(self, status: int, message: str = "") -> None:
        if self.status == RUNNING:
            self.status = status
            self.message = message or MESSAGES[status].format(max_iter=self.max_iter)

    def result(self) -> OptimizeResult:
        return self._described(success=self.status == CONVERGED, status=self.status, message=self.message)

    def _described(self, **more: object) -> OptimizeResult:
        return OptimizeResult(x=self.x, fun=self.value, jac=self.gradient, nit=self.nit, nfev=self.nfev, **more)


def start_of(x0: Vector) -> Vector:
    """The first point, as a vector of floats that the solver may keep."""
    if not hasattr(x0, "__array_function__"):
        x0 = np.asarray(x0)
    if isinstance(x0, np.ndarray):
        if x0.dtype.kind not in "biuf":
            raise InputTypeError(f"x0 is a vector of floating-point numbers, not of dtype {x0.dtype}")
        x0 = x0.astype(np.float64) if x0.dtype.kind != "f" else x0.copy()
    if len(x0.shape) != 1 or not x0.shape[0]:
        raise InputError(f"x0 is a vector of one dimension with one element or more; its shape is {x0.shape}")
    return stored(x0)


def nonnegative(name: str, value: float) -> float:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise InputError(f"{name} is a finite number, 0 or more; not {value!r}")
    return float(value)


def positive(name: str, value: float) -> float:
    if not _is_number(value) or not 0 < value < math.inf:
        raise InputError(f"{name} is a finite number above 0; not {value!r}")
    return float(value)


def counted(name: str, value: int) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is a whole number, 1 or more; not {value!r}")
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _described(thing: object) -> str:
    shape = getattr(thing, "shape", None)
    return f"a {type(thing).__name__}" + (f" of shape {shape}" if shape is not None else "")
