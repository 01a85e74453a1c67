"""`ps.run(..., reassign=True)` on Spark: trainers lend each other partitions, and each row counts once in an epoch."""

from __future__ import annotations

import math
import uuid

import lent_programs as programs
import numpy as np
import pytest
import sparks

import dps
from dps.errors import InputError, InputTypeError

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone"),
]


@pytest.fixture
def table(ps):
    name = uuid.uuid4().hex
    ps.table(name, dtype="int64")
    yield name
    ps.drop_table(name)


def counted(ps, table, rows, epochs):
    """How often each row has been counted: [epochs, rows]."""
    return ps.client().pull(table, np.add.outer(programs.EPOCH * np.arange(epochs), np.arange(rows)))


def check(ps, table, results, rows=200, epochs=2):
    portions = ps.status().runs[0].portions
    assert (counted(ps, table, rows, epochs) == 1).all()
    assert [clock for _, clock in results] == [epochs] * len(results)
    assert results[0][0] < results[1][0], "the fast trainer has done more"
    assert portions.moved > 0
    assert portions.left == 0


@pytest.mark.parametrize("staleness", [0, 1, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_a_slow_trainer_is_helped_and_each_row_counts_once(spark, ps, table, staleness):
    rdd = spark.sparkContext.range(200, numSlices=2)
    results = ps.run(programs.count_unevenly, rdd, staleness=staleness, reassign=True, args=(table,))
    check(ps, table, results)


def test_more_partitions_than_trainers_of_a_dataframe(spark, ps, table):
    frame = spark.range(200, numPartitions=5)
    check(ps, table, ps.run(programs.count_unevenly, frame, staleness=1, reassign=True, args=(table,)))
    with pytest.raises(InputError, match=r'trainers="all" is for Dask data: .* Spark begin and end together'):
        ps.run(programs.count_unevenly, frame, trainers="all", reassign=True, args=(table,))


def test_partitions_that_cannot_be_lent_end_the_run_with_the_reason(spark, ps, table):
    rdd = dps.spark.read_with(spark.sparkContext.range(200, numSlices=2), programs.locked)
    with pytest.raises(InputTypeError, match=r"partition 0 cannot be pickled.*stays here.*read_with"):
        ps.run(programs.count_unevenly, rdd, staleness=1, reassign=True, args=(table,))
