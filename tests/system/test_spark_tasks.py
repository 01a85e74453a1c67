"""What Spark's Python workers do, as far as it takes no Spark: partitions in pieces, errors that travel."""

from __future__ import annotations

import functools
import pickle
import random
from types import SimpleNamespace

import cloudpickle
import pandas as pd
import pyarrow as pa
import pytest

import dps
from dps.engine.training import spark_tasks
from dps.engine.training.data import is_spark
from dps.errors import InputTypeError


@pytest.fixture
def partition(monkeypatch):
    """The task of Spark that this process pretends to be."""
    context = SimpleNamespace(number=0, partitionId=lambda: context.number, taskAttemptId=lambda: 7)
    monkeypatch.setattr(spark_tasks, "_context", lambda: context)
    return context


def shuffled(pieces, seed):
    """As a shuffle brings them: in any order, pickled."""
    pieces = pickle.loads(pickle.dumps(list(pieces)))
    random.Random(seed).shuffle(pieces)
    return iter(pieces)


@pytest.mark.parametrize("seed", range(5))
def test_records_in_pieces_come_back_in_order(seed, monkeypatch):
    monkeypatch.setattr(spark_tasks, "PIECE_BYTES", 50)
    partitions = {0: list(range(100)), 2: [], 3: list("abcdefg"), 5: [None, {"x": 1}]}
    pieces = [piece for part, records in partitions.items() for piece in spark_tasks.record_pieces(part, records)]
    assert 50 < max(len(pickled) for _, (_, pickled) in pieces) < 150
    shares, read = [[1, 4], [0, 2, 3, 5]], spark_tasks.record_list
    assert spark_tasks.sorted_pieces(shares, pickle.loads, read, 1, shuffled(pieces, seed)) == list(partitions.values())
    assert spark_tasks.sorted_pieces(shares, pickle.loads, read, 0, iter([])) == [[], []]


def test_pieces_are_of_some_size_whatever_the_records_are():
    def lengths(records):
        return [len(pickle.loads(pickled)) for _, (_, pickled) in spark_tasks.record_pieces(0, records)]

    assert lengths(bytes(spark_tasks.PIECE_BYTES + n) for n in range(4)) == [1] * 4
    assert lengths(range(10)) == [1, 2, 4, 3]


@pytest.mark.parametrize("seed", range(5))
def test_batches_in_pieces_come_back_in_order(seed, partition):
    table = pa.table({"n": range(100), "text": [None if n % 7 == 0 else str(n) for n in range(100)]})
    pieces = []
    for part in (2, 0):
        partition.number = part
        for batch in spark_tasks.frame_pieces(table.slice(50 * (part > 0), 50).to_batches(max_chunksize=9)):
            pieces += [(row["index"], (row["number"], row["rows"])) for row in batch.to_pylist()]
    read = functools.partial(spark_tasks.pandas_frame, table.schema)
    pieces_sorted = spark_tasks.sorted_pieces([[0, 1, 2]], spark_tasks.batches_of, read, 0, shuffled(pieces, seed))
    assert [len(frame) for frame in pieces_sorted] == [50, 0, 50]
    pd.testing.assert_frame_equal(pd.concat([pieces_sorted[0], pieces_sorted[2]], ignore_index=True), table.to_pandas())
    assert list(pieces_sorted[1].columns) == ["n", "text"]
    (whole,) = spark_tasks.one_partition(read, 0, iter(table.to_batches()))
    pd.testing.assert_frame_equal(whole, table.to_pandas())


class Odd(Exception):
    def __init__(self, number, place):
        super().__init__(f"{number} at {place}")


def test_errors_travel_with_their_traceback(partition):
    def raised(error):
        try:
            raise error
        except Exception as caught:
            return cloudpickle.loads(cloudpickle.dumps(spark_tasks._portable(caught, 3)))

    error = raised(KeyError("x"))
    assert type(error) is KeyError
    assert error.args == ("x",)
    assert "In trainer 3" in error.__notes__[0]
    assert "raise error" in error.__notes__[0]
    error = raised(Odd(1, "here"))
    assert type(error) is dps.DPSError
    assert "trainer 3 failed with an error that cannot be pickled" in str(error)
    assert "1 at here" in str(error)


def test_what_is_sparks_is_seen_without_spark():
    assert not any(map(is_spark, (1, [], pd.DataFrame(), "RDD", (1, 2), None)))
    rdd = type("RDD", (), {"__module__": "pyspark.core.rdd"})
    assert is_spark(type("PipelinedRDD", (rdd,), {"__module__": "pyspark.core.rdd"})())
    assert is_spark(type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})())
    assert not is_spark(type("DataFrame", (), {"__module__": "mine"})())
    with pytest.raises(InputTypeError, match=r"to_spark\(\)"):
        is_spark(type("DataFrame", (), {"__module__": "pyspark.pandas.frame"})())
    with pytest.raises(InputTypeError, match=r"rdd.zip"):
        is_spark((rdd(), rdd()))
