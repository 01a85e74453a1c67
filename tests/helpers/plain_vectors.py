"""`PlainVector`: a vector that has the operations of solvers and no other, and counts its round trips."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

UFUNCS = {np.add, np.subtract, np.multiply, np.true_divide, np.negative, np.sign, np.maximum, np.absolute}
UFUNCS |= {np.equal, np.less, np.greater}


class PlainVector:
    """Wraps a numpy array. What is not listed here raises; what would cross the network is counted in `trips`."""

    trips: ClassVar[Counter] = Counter()
    alive = 0  # vectors that exist
    most = 0  # that existed at once

    def __init__(self, values):
        self._values = np.array(values)
        type(self).alive += 1
        type(self).most = max(self.most, type(self).alive)

    def __del__(self):
        type(self).alive -= 1

    @classmethod
    def count(cls) -> None:
        """Begin to count anew."""
        cls.trips, cls.most = Counter(), cls.alive

    @property
    def shape(self):
        return self._values.shape

    @property
    def dtype(self):
        return self._values.dtype

    def copy(self):
        self.trips["copy"] += 1
        return type(self)(self._values)

    def home(self) -> np.ndarray:
        """The numbers, for functions and assertions of tests."""
        return self._values.copy()

    @classmethod
    def __dps_dots__(cls, pairs):
        cls.trips["dots"] += 1
        assert all(isinstance(each, cls) for pair in pairs for each in pair)
        return [float(np.dot(a._values.astype(np.float64), b._values.astype(np.float64))) for a, b in pairs]

    def __array__(self, *arguments, **more):
        raise AssertionError("all the numbers would travel to the driver")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **more):
        plain = ufunc in UFUNCS and method == "__call__" and not more
        assert plain, f"no solver may use {ufunc.__name__}.{method}"
        values = ufunc(*(each._values if isinstance(each, PlainVector) else self._scalar(each) for each in inputs))
        if out is None:
            return type(self)(values)
        assert out == (self,)
        self._values[...] = values
        return self

    @staticmethod
    def _scalar(value):
        assert isinstance(value, (int, float)), f"{value!r} is neither a vector nor a number of Python"
        return value

    def __array_function__(self, function, types, arguments, more):
        if function is np.ndim:
            return 1
        plain = function in (np.where, np.zeros_like) and not more
        assert plain, f"no solver may use {function.__name__}"
        values = [each._values if isinstance(each, PlainVector) else self._scalar(each) for each in arguments]
        return type(self)(function(*values))

    def _binary(ufunc, swapped=False):
        def method(self, other):
            return ufunc(other, self) if swapped else ufunc(self, other)

        return method

    __add__, __radd__ = _binary(np.add), _binary(np.add, True)
    __sub__, __rsub__ = _binary(np.subtract), _binary(np.subtract, True)
    __mul__, __rmul__ = _binary(np.multiply), _binary(np.multiply, True)
    __truediv__ = _binary(np.true_divide)
    __gt__, __lt__, __eq__ = _binary(np.greater), _binary(np.less), _binary(np.equal)
    __hash__ = None

    def __neg__(self):
        return np.negative(self)

    def __imul__(self, other):
        return np.multiply(self, other, out=self)
