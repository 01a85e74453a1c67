"""Functions that come with dps, against numpy, on tables of one, two and eight shards."""

from __future__ import annotations

import collections
import inspect
from pathlib import Path

import numpy as np
import pytest
from function_shards import Shards
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.functions.definition import Function
from dps.engine.state.ops import ASSIGN, TableSpec
from dps.errors import InputError
from dps.functions import library

PAGE = Path(__file__).parents[2] / "docs/functions.md"
ROWS = 23
ASKED = [None, slice(3, 19), [0, 22, 7, 8, 7], slice(0, 1)]
SHARDS = [1, 2, 8]


def table(values: np.ndarray, shards: int, keyed: bool = False, **fields) -> Shards:
    """Rows 0, 1, ... with these values, behind other initial values."""
    rows = None if keyed else len(values)
    made = Shards(TableSpec("w", rows=rows, dim=values.shape[1], dtype=values.dtype.name, shards=shards, **fields))
    made.change(ASSIGN, np.arange(len(values)), values)
    return made


def numbers(draw: np.random.Generator, rows: int = ROWS, dim: int = 3, dtype: str = "float64") -> np.ndarray:
    """Values of which some are zero, and some are equal."""
    values = draw.integers(-4, 5, (rows, dim))
    return values.astype(dtype) if dtype == "int64" else (values + draw.choice([0, 0.25], (rows, dim))).astype(dtype)


def chosen(asked, rows: int = ROWS) -> np.ndarray:
    """The rows that a call names, in numpy's words."""
    return (
        np.arange(rows) if asked is None else np.arange(rows)[asked] if isinstance(asked, slice) else np.unique(asked)
    )


AGGREGATES = {
    "amax": lambda x: np.abs(x).max(),
    "amin": lambda x: np.abs(x).min(),
    "asum": lambda x: np.abs(x).sum(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "nrm2": np.linalg.norm,
    "dot": lambda x: x[:, 0] @ x[:, 1],
    "nnz": np.count_nonzero,
    "size": len,
    "equal": lambda x: bool((x[:, 0] == x[:, 1]).all()),
}
CHANGES = {
    "add_scalar": (lambda x: x + 2, {"value": 2}),
    "scale": (lambda x: x * 3, {"value": 3}),
    "divide": (lambda x: x / 4, {"value": 4}),
    "power": (lambda x: x**2, {"value": 2}),
    "clip": (lambda x: np.clip(x, -1, 2), {"low": -1, "high": 2}),
    "soft_threshold": (lambda x: np.sign(x) * np.maximum(np.abs(x) - 1.5, 0), {"value": 1.5}),
    "axpy": (lambda x: np.stack([x[:, 0], x[:, 1] + 0.5 * x[:, 0], x[:, 2]], 1), {"value": 0.5, "x": 0, "y": 1}),
    "copy": (lambda x: x[:, [0, 1, 0]], {"a": 0, "to": 2}),
    "fill": (lambda x: np.full_like(x, 7), {"value": 7}),
    "zeros": (np.zeros_like, {}),
}
CHANGES |= {f"map_values {name}": (function, {"name": name}) for name, function in library.UNARY.items()}
CHANGES |= {
    f"combine_columns {name}": (
        lambda x, function=function: np.stack([x[:, 0], x[:, 1], function(x[:, 0], x[:, 1])], 1),
        {"name": name, "a": 0, "b": 1, "to": 2},
    )
    for name, function in library.BINARY.items()
}


@pytest.mark.parametrize("name", ["assign", *library.BINARY])
@pytest.mark.parametrize("column", [None, 1])
@pytest.mark.parametrize("keyed", [False, True])
def test_values_are_combined_by_key(name, column, keyed) -> None:
    values, at = numbers(np.random.default_rng(1)), np.array([0, 3, 4, 17, 22])
    given = numbers(np.random.default_rng(2), len(at))[:, : 3 if column is None else 1] + 0.5
    made, which = table(values, 4, keyed), slice(None) if column is None else slice(column, column + 1)
    made.call(library.combine, at, name=name, at=at, values=given, column=column)
    expected = values.copy()
    expected[at, which] = given if name == "assign" else library.BINARY[name](values[at, which], given)
    np.testing.assert_array_equal(made.values(np.arange(ROWS)), expected)


def test_combine_takes_a_value_for_each_key() -> None:
    for at in ([1, 2], [5, 1, 2], [1, 5]):
        with pytest.raises(InputError, match="a value for each of its keys"):
            table(np.zeros((9, 1)), 2).call(library.combine, [1, 2, 5], name="add", at=np.array(at), values=np.ones(3))


def check_aggregate(name: str, dtype: str, shards: int, asked, seed: int = 1, keyed: bool = False) -> None:
    values = numbers(np.random.default_rng(seed), dtype=dtype)
    result = table(values, shards, keyed).call(getattr(library, name), asked)
    expected = AGGREGATES[name](values[chosen(asked)].astype(np.float64 if dtype == "float32" else dtype))
    assert type(result) in (int, float, bool)
    if dtype == "int64" and name not in ("mean", "nrm2", "dot"):
        assert result == expected
    assert result == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates(name) -> None:
    for dtype, shards in (("float32", 1), ("float64", 2), ("int64", 8)):
        for asked in ASKED:
            check_aggregate(name, dtype, shards, asked)


@pytest.mark.parametrize("name", AGGREGATES)
def test_aggregates_of_keyed_tables(name) -> None:
    check_aggregate(name, "float64", 4, None, keyed=True)
    check_aggregate(name, "float64", 4, [3, 3, 11], keyed=True)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([*AGGREGATES]),
    dtype=st.sampled_from(["float32", "float64", "int64"]),
    shards=st.sampled_from(SHARDS),
    asked=st.sampled_from(ASKED),
    seed=st.integers(0, 999),
    keyed=st.booleans(),
)
def test_any_aggregate_of_any_table(name, dtype, shards, asked, seed, keyed) -> None:
    check_aggregate(name, dtype, shards, None if keyed and isinstance(asked, slice) else asked, seed, keyed)


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min"])
@pytest.mark.parametrize("row", [0, 22])
def test_extremes_of_a_nan_are_nan(name, row) -> None:
    values = numbers(np.random.default_rng(1))
    values[row, 1] = np.nan
    assert np.isnan(table(values, 2).call(getattr(library, name)))


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min", "mean"])
def test_what_no_rows_have_not_is_an_error(name) -> None:
    empty = Shards(TableSpec("t", dim=2, shards=2))
    for asked in (None, []):
        with pytest.raises(InputError, match=f"{name} of no rows"):
            empty.call(getattr(library, name), asked)


def test_sums_of_no_rows_are_zero() -> None:
    empty = Shards(TableSpec("t", dim=2, shards=2))
    for name in ("sum", "asum", "nrm2", "dot", "nnz", "size"):
        assert empty.call(getattr(library, name)) == empty.call(getattr(library, name), []) == 0


def test_keys_that_a_table_has_not_are_not_counted() -> None:
    keyed = table(np.ones((4, 2)), 2, keyed=True, init=dps.Constant(5.0))
    assert keyed.call(library.size, [2, 3, 4, 5, 6]) == 2
    assert keyed.call(library.sum, [3, 4]) == 12, "but read as their initial values"


def test_a_sum_does_not_lose_digits_between_shards() -> None:
    values = np.array([1e16, 1.0, -1e16, 1.0]).reshape(4, 1)
    assert table(values, 4).call(library.sum) == 2.0


def test_a_sum_of_small_floats_does_not_lose_digits() -> None:
    values = np.full((5000, 1), 0.1, np.float32)
    assert table(values, 2).call(library.sum) == pytest.approx(5000 * float(np.float32(0.1)), rel=1e-12)


def test_a_column_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        table(np.ones((4, 1)), 2).call(library.dot)


def check_change(name: str, shards: int, asked, keyed: bool = False) -> None:
    function, (expected_of, arguments) = getattr(library, name.partition(" ")[0]), CHANGES[name]
    values = numbers(np.random.default_rng(3))
    made, rows = table(values, shards, keyed), chosen(asked)
    expected = values.copy()
    with np.errstate(all="ignore"):
        expected[rows] = expected_of(values[rows])
        assert made.call(function, asked, **arguments) == [None] * len(made.rows(asked))
    np.testing.assert_allclose(made.values(np.arange(ROWS)), expected, rtol=1e-14)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name) -> None:
    for shards, asked in zip((1, 2, 8, 2), ASKED, strict=True):
        check_change(name, shards, asked)
    check_change(name, 4, [3, 4, 22], keyed=True)


def test_changes_of_more_values_than_are_taken_at_a_time() -> None:
    values = np.random.default_rng(1).normal(size=(library.BLOCK // 2 + 5, 3))
    made = table(values, 1)
    made.call(library.map_values, name="abs")
    made.call(library.soft_threshold, value=0.5)
    expected = np.maximum(np.abs(values) - 0.5, 0)
    np.testing.assert_allclose(made.values(), expected)
    assert made.call(library.sum) == pytest.approx(expected.sum())
    assert made.call(library.dot, a=1, b=2) == pytest.approx(expected[:, 1] @ expected[:, 2])


def test_names_that_are_not_known_are_listed() -> None:
    made = table(np.ones((4, 2)), 1)
    for function, arguments in (
        (library.map_values, {"name": "eval"}),
        (library.combine_columns, {"name": "eval", "a": 0, "b": 1, "to": 0}),
        (library.where, {"comparison": "=~", "value": 1}),
    ):
        with pytest.raises(InputError, match=r"is none of \S+, "):
            made.call(function, **arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "mean", "std"),
    [
        (library.uniform, {"low": 2.0, "high": 6.0}, 4.0, 4 / np.sqrt(12)),
        (library.normal, {"mean": 3.0, "std": 2.0}, 3.0, 2.0),
    ],
)
def test_random_values(function, arguments, mean, std) -> None:
    made = table(np.zeros((4000, 2)), 2)
    made.call(function, **arguments)
    values = made.values()
    assert values.mean() == pytest.approx(mean, abs=0.1)
    assert values.std() == pytest.approx(std, rel=0.05)
    assert len(np.unique(values)) == values.size, "each shard draws its own"
    again = table(np.zeros((4000, 2)), 2)
    again.call(function, **arguments)
    assert np.array_equal(again.values(), values), "and the same in each repetition"
    if "low" in arguments:
        assert values.min() >= 2
        assert values.max() < 6


# ---- queries


def scores_of(values: np.ndarray, by: str, query) -> np.ndarray:
    return {"value": values[:, 0], "norm": np.linalg.norm(values, axis=1), "dot": values @ query}[by]


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 30),
    by=st.sampled_from(["value", "norm", "dot"]),
    shards=st.sampled_from(SHARDS),
    seed=st.integers(0, 999),
    keyed=st.booleans(),
    with_values=st.booleans(),
)
def test_top_k(k, by, shards, seed, keyed, with_values) -> None:
    """Of equal scores, the lowest keys."""
    dim = 1 if by == "value" else 3
    values, query = numbers(np.random.default_rng(seed), dim=dim), np.arange(dim) - 0.5
    made = table(values, shards, keyed)
    result = made.call(library.top_k, k=k, by=by, query=query, values=with_values)
    scores = scores_of(values, by, query)
    keys = np.lexsort((np.arange(ROWS), -scores))[:k]
    if not keyed:
        assert result[0].tolist() == keys.tolist()
    np.testing.assert_allclose(result[1], scores[keys])
    np.testing.assert_allclose(scores[result[0]], result[1])
    if with_values:
        assert np.array_equal(result[2], values[result[0]])


def test_top_k_of_more_rows_than_are_taken_at_a_time() -> None:
    """Block by block, also where a block has a NaN, which is no score."""
    values = np.random.default_rng(1).normal(size=(2 * library.BLOCK, 1))
    values[[5, library.BLOCK + 9, -1]] = np.nan
    keys, scores = table(values, 2).call(library.top_k, k=50)
    expected = np.argsort(np.where(np.isnan(values[:, 0]), -np.inf, values[:, 0]))[::-1][:50]
    assert keys.tolist() == expected.tolist()
    assert np.array_equal(scores, values[expected, 0])


def test_top_k_of_some_keys() -> None:
    values = np.arange(float(ROWS)).reshape(-1, 1)
    keys, scores = table(values, 2).call(library.top_k, [3, 1, 20, 9], k=2)
    assert keys.tolist() == [20, 9]
    assert scores.tolist() == [20, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "value"}, "no single value"),
        ({"by": "dot"}, "the query has shape None"),
        ({"by": "dot", "query": np.ones(2)}, r"the query has shape \(2,\)"),
        ({"by": "size"}, "not by 'size'"),
        ({"k": 0}, "k is how many rows, 1 or more, not 0"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        table(np.ones((4, 3)), 2).call(library.top_k, **{"k": 1, **arguments})


@pytest.mark.parametrize("shards", SHARDS)
def test_dots(shards) -> None:
    values = numbers(np.random.default_rng(1))
    for query in (np.arange(3.0), np.ones((2, 3)), [1.0, 2.0, 3.0]):
        keys, products = table(values, shards).call(library.dots, query=query)
        np.testing.assert_allclose(products, values[keys] @ np.transpose(query))
        assert sorted(keys.tolist()) == list(range(ROWS))
    with pytest.raises(InputError, match="a row has 3 values"):
        table(values, shards).call(library.dots, query=np.ones(4))


@pytest.mark.parametrize("comparison", library.COMPARISONS)
@pytest.mark.parametrize("shards", SHARDS)
def test_where(comparison, shards) -> None:
    values, compare = numbers(np.random.default_rng(1)), library.COMPARISONS[comparison]
    made = table(values, shards)
    for arguments, expected in (
        ({}, compare(values, 2).any(axis=1)),
        ({"column": 2}, compare(values[:, 2], 2)),
        ({"by": "norm"}, compare(np.sqrt((values * values).sum(axis=1)), 2)),
    ):
        keys, found = made.call(library.where, comparison=comparison, value=2, **arguments)
        assert sorted(keys.tolist()) == np.flatnonzero(expected).tolist()
        assert np.array_equal(found, values[keys])


@pytest.mark.parametrize("keyed", [False, True])
def test_key_range(keyed) -> None:
    values = numbers(np.random.default_rng(1))
    for low, high in ((0, ROWS), (5, 12), (9, 9), (-5, 3), (20, 99)):
        keys, found = table(values, 4, keyed).call(library.key_range, low=low, high=high)
        assert keys.tolist() == list(range(max(0, low), min(ROWS, high)))
        assert np.array_equal(found, values[keys])


def test_queries_of_no_rows_are_empty() -> None:
    made = table(np.ones((4, 1)), 2)
    for function, arguments in (
        (library.top_k, {"k": 3}),
        (library.dots, {"query": np.ones(1)}),
        (library.where, {"comparison": ">", "value": 0}),
        (library.key_range, {"low": 0, "high": 9}),
    ):
        assert list(map(len, made.call(function, [], **arguments))) == [0, 0]
    assert len(made.call(library.sample, [], n=3)) == 0


def test_samples_are_rows_and_none_twice() -> None:
    made = table(np.ones((ROWS, 1)), 4)
    for n in (0, 5, ROWS, 99):
        keys = made.call(library.sample, n=n)
        assert len(keys) == len(set(keys.tolist())) == min(n, ROWS)
        assert set(keys.tolist()) <= set(range(ROWS))
    assert set(made.call(library.sample, [3, 7], n=9).tolist()) == {3, 7}


@pytest.mark.parametrize("shards", [1, 4])
def test_chances_of_a_sample_follow_the_weights(shards) -> None:
    """The first of a sample is row i with a chance of w_i / sum(w), however the rows lie."""
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    made = table(weights.reshape(-1, 1), shards)
    first = collections.Counter(made.call(library.sample, seed=seed, n=2, by="value")[0] for seed in range(2000))
    for row, weight in enumerate(weights):
        assert first[row] / 2000 == pytest.approx(weight / 8, abs=0.04)
    assert set(made.call(library.sample, n=4, by="value").tolist()) == {1, 2, 3}
    with pytest.raises(InputError, match="negative weight"):
        table(-np.ones((4, 1)), shards).call(library.sample, n=1, by="value")


def test_the_library_is_what_the_module_says() -> None:
    functions = library.library()
    assert all(isinstance(each, Function) for each in functions.values())
    assert set(library.__all__) == {*functions, "UNARY", "BINARY"}
    for name in functions:
        assert f"`{name}`" in library.__doc__
        assert functions[name].__doc__, name


def test_the_page_lists_the_library() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name, function in library.library().items():
        arguments = [*inspect.signature(function.part).parameters.values()][1:]
        shown = ", ".join(str(a).split(":")[0] + ("" if a.default is a.empty else f"={a.default!r}") for a in arguments)
        first = function.__doc__.strip().splitlines()[0].replace("``", "`")
        expected = f"| `{name}` | {f'`{shown}`' if shown else ''} | {first} |"
        assert expected in lines, expected


# ---- wrong variants

WRONG = {
    "max": ("_extreme", "choose(found).item()", "found[-1]", lambda: check_aggregate("max", "float64", 8, None)),
    "sum": ("_total", "np.int64 if whole else np.float64", "values.dtype",
            test_a_sum_of_small_floats_does_not_lose_digits),
    "blocks": ("blocks", "range(0, len(values), step)", "range(0, step, step)",
               test_changes_of_more_values_than_are_taken_at_a_time),
    "ties": ("_largest", "[: k - len(above)]", "[:0]",
             lambda: test_top_k.hypothesis.inner_test(8, "value", 1, 1, False, False)),
    "names": ("known", "if name not in functions:", "if False:", test_names_that_are_not_known_are_listed),
    "none": ("_columns", "if not parts:", "if False:", test_queries_of_no_rows_are_empty),
    "norm": ("_scores", "np.sqrt(", "(", lambda: test_where(">", 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_caught(name, monkeypatch) -> None:
    function, old, new, check = WRONG[name]
    monkeypatch.setattr(library, function, mutant(getattr(library, function), old, new))
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, pytest.fail.Exception)):
        check()
