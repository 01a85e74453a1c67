"""Functions on rows that are vectors of features, beside numpy, on one shard and on several."""

from __future__ import annotations

import numpy as np
import pytest
from function_shards import Shards
from oracles import mutant

from dps.engine.state.initializers import Constant
from dps.engine.state.ops import ASSIGN, TableSpec
from dps.errors import InputError
from dps.functions import Function, products

ROWS, DIM = 200, 5
KEYS = np.random.default_rng(1).permutation(10 * ROWS)[:ROWS] - 5 * ROWS
VALUES = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
QUERIES = np.random.default_rng(2).normal(size=(7, DIM))


@pytest.fixture(params=[1, 8], ids=lambda shards: f"{shards} shards")
def table(request):
    spec = TableSpec("q", rows=None, dim=DIM, shards=request.param, init=Constant(0.5))
    made = Shards(spec)
    made.change(ASSIGN, KEYS, VALUES)
    return made


def check_gram(table):
    for skip in (0, 2):
        made = table.call(products.gram, skip=skip)
        assert made.dtype == np.float64
        x = VALUES[:, skip:].astype(np.float64)
        np.testing.assert_allclose(made, x.T @ x, rtol=1e-12)
    some = KEYS[[3, 100, 7]]
    x = VALUES[[3, 100, 7]].astype(np.float64)
    np.testing.assert_allclose(table.call(products.gram, some), x.T @ x, rtol=1e-12)


def check_nearest(table):
    for cosine in (False, True):
        for skip in (0, 1):
            x, queries = VALUES[:, skip:], QUERIES[:, skip:].astype(np.float32)
            scores = queries @ x.T
            if cosine:
                scores /= np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(x, axis=1)
            for k in (1, 10, ROWS + 3):
                keys, found = table.call(products.nearest, queries=queries, k=k, cosine=cosine, skip=skip)
                order = np.argsort(-scores, axis=1)[:, :k]
                np.testing.assert_array_equal(keys, KEYS[order])
                np.testing.assert_allclose(found, np.take_along_axis(scores, order, 1), atol=1e-5)


def check_create(table):
    new = np.array([10**6, KEYS[0], -(10**6)])
    before = [VALUES[:3].copy()]
    assert table.call(products.create, new, zeros=2) == 2
    assert table.call(products.create, new, zeros=2) == 0
    np.testing.assert_array_equal(table.whole(KEYS[:3]), before[0])
    np.testing.assert_array_equal(table.whole(new[[0, 2]]), [[0, 0, 0.5, 0.5, 0.5]] * 2)


def check_existing(table):
    keys, values = table.call(products.existing, np.array([KEYS[5], 10**7, KEYS[0]]))
    by_key = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert by_key == {KEYS[n].item(): VALUES[n].tolist() for n in (0, 5)}
    assert [part.shape for part in table.call(products.existing, [])] == [(0,), (0, 0)]


CHECKS = {"gram": check_gram, "nearest": check_nearest, "create": check_create, "existing": check_existing}


@pytest.mark.parametrize("name", CHECKS)
def test_beside_numpy(table, name):
    CHECKS[name](table)


@pytest.mark.parametrize("name", ["gram", "nearest"])
def test_blocks_of_few_rows(table, name, monkeypatch):
    monkeypatch.setattr(products, "BLOCK_NUMBERS", 64)
    CHECKS[name](table)


def test_rows_of_zeros_have_cosines_of_zero():
    made = Shards(TableSpec("q", rows=4, dim=2, shards=1))
    _, scores = made.call(products.nearest, queries=np.eye(2)[:1], k=2, cosine=True)
    assert scores.tolist() == [[0, 0]]
    assert products.gram.merged([made.call(products.gram)], {}).tolist() == [[0, 0], [0, 0]]


def test_queries_that_do_not_fit(table):
    with pytest.raises(InputError, match="1 or more, not 0"):
        table.call(products.nearest, queries=QUERIES, k=0)
    with pytest.raises(InputError, match=r"shape \(5,\); a row has 5 values"):
        table.call(products.nearest, queries=QUERIES[0], k=1)
    with pytest.raises(InputError, match=r"shape \(7, 5\); a row has 4 values"):
        table.call(products.nearest, queries=QUERIES, k=1, skip=1)


def test_the_servers_know_them_by_name():
    for name in products.__all__:
        function = getattr(products, name)
        assert isinstance(function, Function)
        assert (function.id, function.code) == (f"dps.functions.products:{name}", b"")


WRONG = {
    "order": ("_leading", "-scores", "scores", "nearest"),
    "least": ("_leading", "[:, -k:]", "[:, :k]", "nearest"),
    "norms": ("_unit", "np.where(norms > 0, norms, 1)", "(norms + 1)", "nearest"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_caught(table, name, monkeypatch):
    function, old, new, check = WRONG[name]
    monkeypatch.setattr(products, function, mutant(getattr(products, function), old, new))
    with pytest.raises(AssertionError):
        CHECKS[check](table)
