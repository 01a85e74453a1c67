"""How far ``dps.arrays.on(ps)`` follows the array API standard 2024.12, function by function, with numpy as the oracle.

``array_api_2024_12.txt`` has the standard's names and signatures. A function passes if it takes the standard's
parameters, and gives numpy's results (values, dtype, shape) in all cases here, which are arrays of one axis and of two
with elements. ``python tests/helpers/array_api.py`` prints the table.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

STANDARD = Path(__file__).with_name("array_api_2024_12.txt").read_text().splitlines()
NAMES = [line.split("(")[0] for line in STANDARD]
Call = Callable[[Any, Callable[[Any], Any]], Any]  # (namespace, how an array is made) -> result

FLOATS, INTS = ("float32", "float64"), ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REAL = (*INTS, *FLOATS)
BITS, ALL = ("bool", *INTS), ("bool", *REAL)
UNARY = {
    "acos acosh asin asinh atan atanh cos cosh exp expm1 log log10 log1p log2": FLOATS,
    "reciprocal sin sinh sqrt tan tanh signbit real imag": FLOATS,
    "abs ceil conj floor isfinite isinf isnan negative positive round sign square trunc": REAL,
    "bitwise_invert": BITS,
    "logical_not": ("bool",),
}
BINARY = {
    "atan2 copysign divide hypot logaddexp nextafter": FLOATS,
    "add subtract multiply floor_divide remainder pow maximum minimum greater greater_equal less less_equal": REAL,
    "bitwise_and bitwise_or bitwise_xor": BITS,
    "bitwise_left_shift bitwise_right_shift": INTS,
    "logical_and logical_or logical_xor": ("bool",),
    "equal not_equal": ALL,
}
REDUCED = {
    "sum prod": REAL,
    "max min": REAL,
    "mean std var": FLOATS,
    "all any count_nonzero": ALL,
}


def values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers of a dtype: small ones, and of floats all special ones."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype in INTS:
        return rng.integers(1, 6, shape).astype(dtype)
    found = rng.normal(size=shape).astype(dtype)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5], dtype)
    flat = found.reshape(-1)
    flat[: len(special)] = special
    return rng.permutation(flat).reshape(shape)


def plain(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers without special ones."""
    return (np.random.default_rng(seed).random(shape) * 5 + 1).astype(dtype)


SHAPES = ((13,), (3, 11))


def elementwise() -> Iterator[tuple[str, str, Call]]:
    """(function, case, call)"""
    for names, dtypes in UNARY.items():
        for name in names.split():
            for dtype in dtypes:
                for shape in SHAPES:
                    x = values(dtype, shape)
                    yield name, f"{dtype} {shape}", lambda xp, a, name=name, x=x: getattr(xp, name)(a(x))
    for names, dtypes in BINARY.items():
        for name in names.split():
            for dtype in dtypes:
                for first, second in ((SHAPES[0], SHAPES[0]), ((3, 11), (11,))):
                    x, y = values(dtype, first, 1), values(dtype, second, 2)
                    call = lambda xp, a, name=name, x=x, y=y: getattr(xp, name)(a(x), a(y))  # noqa: E731
                    yield name, f"{dtype} {first} {second}", call
                x, number = values(dtype, (13,), 3), True if dtype == "bool" else 2
                yield name, f"{dtype} number", lambda xp, a, name=name, x=x, n=number: getattr(xp, name)(a(x), n)
                yield name, f"number {dtype}", lambda xp, a, name=name, x=x, n=number: getattr(xp, name)(n, a(x))
    for dtype in FLOATS:
        x, y = values(dtype, (11,)), values(dtype, (3, 11), 1)
        yield "clip", dtype, lambda xp, a, x=x: xp.clip(a(x), -0.5, 0.5)
        yield "clip", f"{dtype} arrays", lambda xp, a, x=x, y=y: xp.clip(a(y), min=a(x), max=a(x))
        yield "where", dtype, lambda xp, a, x=x, y=y: xp.where(a(y) > 0, a(x), a(y))
        yield "where", f"{dtype} number", lambda xp, a, x=x: xp.where(a(x) > 0, a(x), 0.0)


def reductions() -> Iterator[tuple[str, str, Call]]:
    for names, dtypes in REDUCED.items():
        for name in names.split():
            for dtype in dtypes:
                for shape in SHAPES:
                    x = plain(dtype, shape) if dtype in FLOATS else values(dtype, shape)
                    for axis in (None, 0, -1, (0, 1))[: 4 if len(shape) == 2 else 3]:
                        for keep in (False, True):
                            call = lambda xp, a, name=name, x=x, axis=axis, keep=keep: getattr(xp, name)(  # noqa: E731
                                a(x), axis=axis, keepdims=keep
                            )
                            yield name, f"{dtype} {shape} axis={axis} keepdims={keep}", call
    for name in ("sum", "prod"):
        x = values("int16", (13,))
        yield name, "dtype", lambda xp, a, name=name, x=x: getattr(xp, name)(a(x), dtype=xp.float64)
    for name in ("std", "var"):
        x = plain("float64", (3, 11))
        call = lambda xp, a, name=name, x=x: getattr(xp, name)(a(x), axis=-1, correction=1.0)  # noqa: E731
        yield name, "correction", call
    for name in ("argmax", "argmin"):
        for shape, axes in (((13,), (None, 0, -1)), ((3, 11), (None, 0, 1))):
            for axis in axes:
                for keep in (False, True):
                    x = plain("float64", shape)
                    call = lambda xp, a, name=name, x=x, axis=axis, keep=keep: getattr(xp, name)(  # noqa: E731
                        a(x), axis=axis, keepdims=keep
                    )
                    yield name, f"{shape} axis={axis} keepdims={keep}", call


V, W, M, N = (
    plain("float64", (10,)),
    plain("float64", (10,), 1),
    plain("float64", (4, 10)),
    plain("float64", (10, 6), 2),
)
ONE = plain("float64", (1, 10))
CREATION: dict[str, list[Call]] = {
    "zeros": [lambda xp, a: xp.zeros(5), lambda xp, a: xp.zeros((2, 5), dtype=xp.int32), lambda xp, a: xp.zeros(())],
    "ones": [lambda xp, a: xp.ones((5,)), lambda xp, a: xp.ones((2, 5), dtype=xp.uint8, device=None)],
    "empty": [lambda xp, a: xp.zeros_like(xp.empty((2, 5), dtype=xp.float32))],
    "full": [lambda xp, a: xp.full((2, 5), 3), lambda xp, a: xp.full(4, 0.5), lambda xp, a: xp.full(4, True)],
    "zeros_like": [lambda xp, a: xp.zeros_like(a(V)), lambda xp, a: xp.zeros_like(a(M), dtype=xp.bool)],
    "ones_like": [lambda xp, a: xp.ones_like(a(V)), lambda xp, a: xp.ones_like(a(M), dtype=xp.int8)],
    "empty_like": [lambda xp, a: xp.zeros_like(xp.empty_like(a(V)))],
    "full_like": [lambda xp, a: xp.full_like(a(V), 7), lambda xp, a: xp.full_like(a(M), 7, dtype=xp.int64)],
    "arange": [
        lambda xp, a: xp.arange(7),
        lambda xp, a: xp.arange(3, 20, 4),
        lambda xp, a: xp.arange(0.0, 1.0, step=0.125),
        lambda xp, a: xp.arange(9, 1, -2, dtype=xp.float32),
    ],
    "linspace": [
        lambda xp, a: xp.linspace(0, 1, 7),
        lambda xp, a: xp.linspace(-2.0, 3.0, num=5, endpoint=False, dtype=xp.float32),
    ],
    "eye": [lambda xp, a: xp.eye(4), lambda xp, a: xp.eye(3, 5, k=1, dtype=xp.float32), lambda xp, a: xp.eye(3, k=-1)],
    "asarray": [
        lambda xp, a: xp.asarray([1.0, 2.0]),
        lambda xp, a: xp.asarray([[1, 2], [3, 4]], dtype=xp.float32),
        lambda xp, a: xp.asarray(a(V), copy=True),
        lambda xp, a: xp.asarray(3.0),
    ],
    "astype": [lambda xp, a: xp.astype(a(V), xp.int32), lambda xp, a: xp.astype(a(V), xp.float64, copy=False)],
    "from_dlpack": [lambda xp, a: xp.from_dlpack(a(V))],
    "meshgrid": [lambda xp, a: xp.meshgrid(a(V), a(W))[0]],
    "tril": [lambda xp, a: xp.tril(a(M)), lambda xp, a: xp.tril(a(M), k=-1)],
    "triu": [lambda xp, a: xp.triu(a(M)), lambda xp, a: xp.triu(a(M), k=2)],
}
SHAPED: dict[str, list[Call]] = {
    "reshape": [
        lambda xp, a: xp.reshape(a(V), (1, -1)),
        lambda xp, a: xp.reshape(a(ONE), (10,)),
        lambda xp, a: xp.reshape(a(V), shape=(10,), copy=True),
        lambda xp, a: xp.reshape(a(V), (2, 5)),
    ],
    "squeeze": [lambda xp, a: xp.squeeze(a(ONE), axis=0)],
    "expand_dims": [lambda xp, a: xp.expand_dims(a(V), axis=0), lambda xp, a: xp.expand_dims(a(V), axis=1)],
    "broadcast_to": [
        lambda xp, a: xp.broadcast_to(a(V), shape=(3, 10)),
        lambda xp, a: xp.broadcast_to(a(ONE), (3, 10)),
    ],
    "broadcast_arrays": [lambda xp, a: xp.broadcast_arrays(a(V), a(M))[0]],
    "broadcast_shapes": [lambda xp, a: np.asarray(xp.broadcast_shapes((10,), (4, 1)))],
    "permute_dims": [lambda xp, a: xp.permute_dims(a(M), axes=(1, 0)), lambda xp, a: xp.permute_dims(a(V), (0,))],
    "moveaxis": [lambda xp, a: xp.moveaxis(a(M), 0, -1), lambda xp, a: xp.moveaxis(a(V), 0, 0)],
    "matrix_transpose": [lambda xp, a: xp.matrix_transpose(a(M))],
    "stack": [lambda xp, a: xp.stack([a(V), a(W)]), lambda xp, a: xp.stack([a(V), a(W)], axis=-1)],
    "unstack": [lambda xp, a: xp.unstack(a(M))[1], lambda xp, a: xp.unstack(a(M), axis=1)[1]],
    "concat": [lambda xp, a: xp.concat([a(V), a(W)]), lambda xp, a: xp.concat([a(M), a(M)], axis=0)],
    "flip": [lambda xp, a: xp.flip(a(V)), lambda xp, a: xp.flip(a(M), axis=0)],
    "roll": [lambda xp, a: xp.roll(a(V), 3)],
    "repeat": [lambda xp, a: xp.repeat(a(V), 2)],
    "tile": [lambda xp, a: xp.tile(a(V), (3, 1))],
    "take": [lambda xp, a: xp.take(a(V), np.array([3, 1])), lambda xp, a: xp.take(a(M), np.array([2, 0]), axis=0)],
    "take_along_axis": [lambda xp, a: xp.take_along_axis(a(V), np.array([3, 1]))],
    "sort": [lambda xp, a: xp.sort(a(V))],
    "argsort": [lambda xp, a: xp.argsort(a(V))],
    "searchsorted": [lambda xp, a: xp.searchsorted(a(np.sort(V)), a(W))],
    "unique_values": [lambda xp, a: xp.unique_values(a(V))],
    "unique_counts": [lambda xp, a: xp.unique_counts(a(V))[1]],
    "unique_inverse": [lambda xp, a: xp.unique_inverse(a(V))[1]],
    "unique_all": [lambda xp, a: xp.unique_all(a(V))[1]],
    "isin": [lambda xp, a: xp.isin(a(V), a(W))],
    "nonzero": [lambda xp, a: xp.nonzero(a(V) > 3)[0], lambda xp, a: xp.nonzero(a(M) > 3)[1]],
    "cumulative_sum": [lambda xp, a: xp.cumulative_sum(a(V))],
    "cumulative_prod": [lambda xp, a: xp.cumulative_prod(a(V))],
    "diff": [lambda xp, a: xp.diff(a(V))],
}
PRODUCTS: dict[str, list[Call]] = {
    "matmul": [
        lambda xp, a: xp.matmul(a(M), a(V)),
        lambda xp, a: xp.matmul(a(M), a(N)),
        lambda xp, a: xp.matmul(a(V), a(N)),
        lambda xp, a: xp.matmul(a(V), a(W)),
    ],
    "matrix_transpose": SHAPED["matrix_transpose"],
    "tensordot": [
        lambda xp, a: xp.tensordot(a(V), a(W), axes=1),
        lambda xp, a: xp.tensordot(a(M), a(M), axes=2),
        lambda xp, a: xp.tensordot(a(M), a(M), axes=((1,), (1,))),
    ],
    "vecdot": [lambda xp, a: xp.vecdot(a(V), a(W)), lambda xp, a: xp.vecdot(a(M), a(M), axis=-1)],
}
LINALG: dict[str, list[Call]] = {
    "vector_norm": [
        lambda xp, a: xp.vector_norm(a(V)),
        lambda xp, a: xp.vector_norm(a(V), ord=1, keepdims=True),
        lambda xp, a: xp.vector_norm(a(M), axis=1, ord=3),
        lambda xp, a: xp.vector_norm(a(M)),
    ],
    "matrix_norm": [lambda xp, a: xp.matrix_norm(a(M)), lambda xp, a: xp.matrix_norm(a(M), ord=2)],
    "trace": [lambda xp, a: xp.trace(a(M)), lambda xp, a: xp.trace(a(M), offset=1)],
    "diagonal": [lambda xp, a: xp.diagonal(a(M)), lambda xp, a: xp.diagonal(a(M), offset=1)],
    "outer": [lambda xp, a: xp.outer(a(V), a(W))],
    **PRODUCTS,
}
SQUARE = ("det", "inv", "cholesky", "eigvalsh", "svdvals", "pinv", "matrix_rank")


def written() -> Iterator[tuple[str, str, Call]]:
    """The cases that are written one by one."""
    for table in (CREATION, SHAPED, PRODUCTS):
        for name, calls in table.items():
            for number, call in enumerate(calls):
                yield name, f"case {number}", call
    for name, calls in LINALG.items():
        for number, call in enumerate(calls):
            yield f"linalg.{name}", f"case {number}", lambda xp, a, call=call: call(xp.linalg, a)
    square = N.T @ N
    for name in SQUARE:
        yield f"linalg.{name}", "square", lambda xp, a, name=name: getattr(xp.linalg, name)(a(square))
    for name, at in (("qr", 1), ("svd", 1), ("eigh", 0), ("slogdet", 1)):
        yield f"linalg.{name}", "square", lambda xp, a, name=name, at=at: getattr(xp.linalg, name)(a(square))[at]
    yield "linalg.solve", "square", lambda xp, a: xp.linalg.solve(a(square), a(V[:6]))
    yield "linalg.matrix_power", "square", lambda xp, a: xp.linalg.matrix_power(a(square), 2)
    yield "linalg.cross", "vectors", lambda xp, a: xp.linalg.cross(a(V[:3]), a(W[:3]))
    for name in [each[4:] for each in NAMES if each.startswith("fft.")]:
        argument: Call = (lambda xp, a: 8) if name.endswith("freq") else (lambda xp, a: a(V))
        yield f"fft.{name}", "vector", lambda xp, a, n=name, of=argument: getattr(xp.fft, n)(of(xp, a))
    for name in (*ALL, "complex64", "complex128"):
        yield name, "dtype", lambda xp, a, name=name: np.zeros(1, getattr(xp, name))
    for name in ("e", "inf", "nan", "pi"):
        yield name, "number", lambda xp, a, name=name: getattr(xp, name)
    yield "newaxis", "is None", lambda xp, a: xp.newaxis is None
    yield "finfo", "float32", lambda xp, a: [xp.finfo(xp.float32).eps, xp.finfo(xp.float64).bits]
    yield "finfo", "array", lambda xp, a: xp.finfo(a(V).dtype).max
    yield "iinfo", "int16", lambda xp, a: [xp.iinfo(xp.int16).max, xp.iinfo(xp.uint8).bits]
    yield "isdtype", "kinds", lambda xp, a: [xp.isdtype(a(V).dtype, kind) for kind in ("real floating", "integral")]
    yield "can_cast", "dtypes", lambda xp, a: [xp.can_cast(xp.int8, xp.int16), xp.can_cast(xp.float64, xp.int8)]
    yield "can_cast", "array", lambda xp, a: xp.can_cast(a(V).dtype, xp.float32)
    yield "result_type", "arrays", lambda xp, a: np.zeros(1, xp.result_type(a(V), xp.int8, a(M)))
    yield (
        "__array_namespace_info__",
        "default",
        lambda xp, a: np.zeros(1, xp.__array_namespace_info__().default_dtypes()["real floating"]),
    )


def elements(found: Any) -> Any:
    """A result as arrays of numpy."""
    return [np.asarray(each) for each in found] if isinstance(found, (list, tuple)) else np.asarray(found)


def difference(found: Any, expected: Any) -> str:
    """How a result is another one than numpy's; empty if it is not."""
    ours, theirs = elements(found), elements(expected)
    pairs = zip(ours, theirs, strict=True) if isinstance(theirs, list) else [(ours, theirs)]
    for one, other in pairs:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{one.dtype} {one.shape} instead of {other.dtype} {other.shape}"
        tolerance = 1e-5 if one.dtype == np.float32 else 1e-12
        if not np.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            return "other values"
    return ""


def lacking(xp: Any, line: str) -> str:
    """What a function's signature lacks of the standard's; empty for nothing, and for ufuncs, which numpy checks."""
    name, _, listed = line.partition("(")
    target = xp
    for part in name.split("."):
        target = getattr(target, part, lacking)
        if target is lacking:
            return "missing"
    if not listed or isinstance(target, (np.ufunc, type)):
        return ""
    parameters = inspect.signature(target).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return ""
    _, star, keywords = listed.rstrip(")").partition("*, ")
    needed = [each for each in re.split(", ", keywords) if star and each]
    absent = [each for each in needed if each not in parameters]
    return f"no parameter {', '.join(absent)}" if absent else ""


def report(xp: Any, make: Callable[[Any], Any]) -> dict[str, str]:
    """For each name of the standard what is wrong with it; empty for nothing."""
    oracle: Any = np
    found = {name: lacking(xp, line) for name, line in zip(NAMES, STANDARD, strict=True)}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cases in (elementwise(), reductions(), written()):
            for name, label, call in cases:
                if found[name]:
                    continue
                try:
                    wrong = difference(call(xp, make), call(oracle, np.asarray))
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                if wrong:
                    found[name] = f"{label}: {wrong}"
    return found


def main() -> None:
    from memory_store import MemoryStore

    from dps.arrays import ArrayNamespace, Space

    xp = ArrayNamespace(Space(MemoryStore(2)))
    for name, wrong in report(xp, xp.asarray).items():
        print(f"{wrong or 'passes':60} {name}")


if __name__ == "__main__":
    main()
