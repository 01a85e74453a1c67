"""Edges in a DataFrame of Spark: the trainers are Spark's tasks."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("pyspark")

import numpy as np
import sparks
from graphs import communities, core_numbers, random_edges

import dps.graph

ps, spark = sparks.ps, sparks.spark
KEPT = "PySpark keeps threads, sockets and workers for its session; after the module all are gone"


@pytest.mark.spark
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.leaks_ok(KEPT)
def test_values_are_those_of_one_process(ps, spark):
    edges = random_edges(150, 60)
    weights = np.random.default_rng(0).exponential(size=150)
    rows = [(weight, *edge) for weight, edge in zip(weights.tolist(), edges.tolist(), strict=True)]
    frame = spark.createDataFrame(rows, "weight double, `from` bigint, `to` bigint").repartition(2)
    ends = {"columns": ["from", "to"]}
    n = int(edges.max()) + 1
    matrix = np.zeros((n, n))
    np.add.at(matrix, (edges[:, 1], edges[:, 0]), weights)
    total, there = matrix.sum(axis=0), np.isin(np.arange(n), edges)
    matrix /= np.where(total == 0, 1, total)
    jump = there / there.sum()
    rank = jump
    for _ in range(200):
        rank = 0.85 * (matrix @ rank + rank[total == 0].sum() * jump) + 0.15 * jump
    with dps.graph.page_rank(ps, frame, weights="weight", tol=1e-12, **ends) as result:
        np.testing.assert_array_equal(result.vertices, np.flatnonzero(there))
        np.testing.assert_allclose(result.values, rank[there], rtol=0, atol=1e-10)
    least = np.arange(n)
    for _ in range(n):
        for a, b in edges.tolist():
            least[a] = least[b] = min(least[a], least[b])
    with dps.graph.connected_components(ps, frame, **ends) as result:
        np.testing.assert_array_equal(result.values, least[there])
    with dps.graph.label_propagation(ps, frame, seed=3, **ends) as result:
        assert result.converged
        assert result.to_dict() == communities(edges, seed=3)
    with dps.graph.k_core(ps, frame, **ends) as result:
        assert result.to_dict() == core_numbers(edges)
        assert len(set(result.values)) > 2, "cores differ"
