"""Partitions cut into batches: every kind, the same objects in every epoch, any start."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import sparse
from hypothesis import given
from hypothesis import strategies as st

from dps.engine.training.batches import Batches, iterate_partition, row_count
from dps.errors import InputError

DENSE = np.arange(28.0).reshape(7, 4) % 3


def to_dense(batch):
    if isinstance(batch, (pd.DataFrame, pd.Series)):
        return batch.to_numpy()
    return batch if isinstance(batch, np.ndarray) else batch.toarray() if hasattr(batch, "toarray") else batch.todense()


KINDS = {
    "numpy": np.asarray,
    "csr": scipy.sparse.csr_matrix,
    "csr_array": scipy.sparse.csr_array,
    "csc": scipy.sparse.csc_matrix,
    "coo": scipy.sparse.coo_array,
    "sparse.COO": sparse.COO.from_numpy,
    "sparse.GCXS": sparse.GCXS.from_numpy,
    "sparse.DOK": sparse.DOK.from_numpy,
    "frame": pd.DataFrame,
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_rows_of_every_kind(kind, size):
    batches = iterate_partition(KINDS[kind](DENSE), size)
    assert [b.shape[0] for b in batches] == [min(size, 7 - i) for i in range(0, 7, size)]
    np.testing.assert_array_equal(np.concatenate([to_dense(b) for b in batches]), DENSE)


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_the_whole_partition(kind):
    partition = KINDS[kind](DENSE)
    (batch,) = iterate_partition(partition)
    assert batch is partition


def test_tuples_are_cut_together():
    y = pd.Series(range(7), index=list("abcdefg"))
    for partition in [(scipy.sparse.csc_matrix(DENSE), y, None), [scipy.sparse.csr_array(DENSE), y, None]]:
        batches = iterate_partition(partition, 3)
        assert [type(b) for b in batches] == [tuple] * 3
        assert [b[1].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6]]
        np.testing.assert_array_equal(np.concatenate([b[0].toarray() for b in batches]), DENSE)
        assert all(b[2] is None for b in batches)
        assert [b[0].format for b in batches] == ["csr"] * 3
    (whole,) = iterate_partition((DENSE, y))
    assert whole[0] is DENSE
    assert whole[1] is y


def test_csr_rows_are_views():
    X = scipy.sparse.random(1000, 50, density=0.1, format="csr", random_state=0)
    batches = iterate_partition(X, 64)
    for batch in batches:
        assert np.shares_memory(batch.data, X.data)
        assert np.shares_memory(batch.indices, X.indices)
        batch.check_format(full_check=True)
        assert batch.dtype == X.dtype
        assert type(batch) is type(X)
    assert abs(scipy.sparse.vstack(batches) - X).nnz == 0


def test_read_only_csr():
    X = scipy.sparse.csr_matrix(DENSE)
    for part in (X.data, X.indices, X.indptr):
        part.flags.writeable = False
    assert [b.shape for b in iterate_partition(X, 4)] == [(4, 4), (3, 4)]


def test_lists_and_other_things():
    assert iterate_partition([1, 2, 3], 2) == [[1, 2], [3]]
    assert iterate_partition([1, 2, 3]) == [1, 2, 3]
    assert iterate_partition([DENSE])[0] is DENSE  # a bag of one array, not a tuple of aligned ones
    assert iterate_partition([(DENSE, 1), (DENSE, 2)], 1)[1][0][1] == 2
    for thing in WITHOUT_ROWS:
        (batch,) = iterate_partition(thing)
        assert batch is thing


class Tensor:
    """What is used of torch's: a shape that is a tuple, slices, and no slices where it is sparse."""

    def __init__(self, values, layout="strided"):
        self.values, self.shape, self.layout = values, values.shape, f"torch.{layout}"

    def __getitem__(self, rows):
        return Tensor(self.values[rows])


COLUMNS = {
    "tuple with a list": (DENSE, list("abcdefg")),
    "lists": (list("abcdefg"), range(7)),
    "dict": {"X": DENSE, "names": list("abcdefg"), "weights": None},
    "nested": ({"X": scipy.sparse.csr_array(DENSE), "names": pd.Series(list("abcdefg"))}, (np.arange(7), None)),
    "tensors": (Tensor(DENSE), Tensor(np.arange(7))),
    "tensor": Tensor(DENSE),
    "table": pa.table({"name": list("abcdefg"), "i": range(7)}),
    "columns of Arrow": (pa.array(range(7)), pa.chunked_array([range(3), range(4)])),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_whatever_has_rows_is_cut(kind):
    partition = COLUMNS[kind]
    batches = iterate_partition(partition, 3)
    assert [row_count(batch) for batch in batches] == [3, 3, 1]
    assert {type(batch) for batch in batches} == {type(partition)}
    (whole,) = iterate_partition(partition)
    assert whole is partition
    assert row_count(whole) == 7


def test_what_is_in_the_rows_of_columns():
    assert iterate_partition((["a", "b", "c"], range(3)), 2) == [(["a", "b"], range(2)), (["c"], range(2, 3))]
    (X, (y, w)), _ = iterate_partition(({"a": [1, 2, 3]}, (DENSE[:3, 0], None)), 2)
    assert (X, y.tolist(), w) == ({"a": [1, 2]}, [0, 1], None)
    assert iterate_partition(COLUMNS["table"], 5)[1]["name"].to_pylist() == ["f", "g"]
    assert [t[1].values.tolist() for t in iterate_partition(COLUMNS["tensors"], 4)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert iterate_partition(({"a": []}, []), 2) == iterate_partition(({"a": []}, [])) == []


WITHOUT_ROWS = [{"a": 1}, {}, "text", b"text", 3, None, (1, 2), np.float64(3), np.array(5), (), (None,), iter([1, 2])]
WITHOUT_ROWS += [(DENSE, 0.5), (DENSE, iter([1])), (["a"], "text"), Tensor(DENSE, "sparse_csr"), {1, 2}]


@pytest.mark.parametrize("thing", WITHOUT_ROWS, ids=lambda thing: type(thing).__name__)
def test_what_cannot_be_cut_is_refused(thing):
    """It was one batch an epoch without a word: a tuple that holds a list, a dict, a scalar, a generator."""
    with pytest.raises(InputError, match=rf"batch_size=2.*{type(thing).__name__}.*no.*prepare=function.*leave out"):
        iterate_partition(thing, 2)


def test_a_refusal_names_every_part():
    with pytest.raises(InputError, match=r"\[0\] \(ndarray\) has 7 rows; \[1\]\['a'\] \(float\) has no rows"):
        iterate_partition((DENSE, {"a": 0.5}), 2)
    with pytest.raises(InputError, match=r"it \(sparse tensor\) has no rows"):
        iterate_partition(Tensor(DENSE, "sparse_csr"), 2)


@pytest.mark.parametrize("empty", [[], np.empty((0, 3)), pd.DataFrame({"a": []}), (np.empty((0, 2)), np.empty(0))])
def test_no_rows_no_batches(empty):
    assert iterate_partition(empty, 3) == iterate_partition(empty) == []


def test_lengths_that_differ():
    with pytest.raises(InputError, match=r"have 7, 6 rows"):
        iterate_partition((DENSE, np.zeros(6)), 2)
    with pytest.raises(InputError, match=r"have 7, 8, 7 rows"):
        row_count((DENSE, np.zeros(8), np.zeros(7)))
    for partition in [(DENSE, ["a"] * 6), {"X": DENSE, "y": np.zeros(6)}, (DENSE, ({"y": [0] * 6},))]:
        with pytest.raises(
            InputError, match=rf"type {type(partition).__name__} have 7, 6 rows.*\((list|ndarray)\) has 6"
        ):
            iterate_partition(partition, 2)
    with pytest.raises(InputError, match=r"have 7, 6 rows"):  # arrays: a mistake, however large the batches
        iterate_partition((DENSE, np.zeros(6)))
    rows_and_words = (["a", "b"], ["c"])
    assert iterate_partition(rows_and_words)[0] is rows_and_words


@pytest.mark.parametrize("size", [0, -1, 2.5, "3", True])
def test_bad_batch_size(size):
    with pytest.raises(InputError, match="batch_size"):
        iterate_partition(DENSE, size)


def test_batches_are_the_same_objects_in_every_epoch():
    X = scipy.sparse.csr_matrix(DENSE)
    batches = Batches([(X, np.zeros(7)), (X, np.ones(7))], epochs=3, batch_size=4, shuffle=5)
    assert len(batches) == 12
    seen: dict[int, set[int]] = {}
    for _, index, batch in batches:
        seen.setdefault(index, set()).add(id(batch))
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(len(objects) == 1 for objects in seen.values())


def test_orders_of_the_epochs():
    parts = [np.arange(100)]
    plain = Batches(parts, epochs=2, batch_size=1)
    assert [(e, i) for e, i, _ in plain] == [(e, i) for e in range(2) for i in range(100)]
    for seed in (0, 7):
        shuffled = Batches(parts, epochs=2, batch_size=1, shuffle=seed)
        order = [i for _, i, _ in shuffled]
        assert order == [i for _, i, _ in Batches(parts, epochs=2, batch_size=1, shuffle=seed)]
        assert sorted(order[:100]) == sorted(order[100:]) == list(range(100))
        assert order[:100] != order[100:]
        assert order[:100] != list(range(100))
    assert list(Batches(parts, 1, 1, shuffle=True).order(0)) == list(Batches(parts, 1, 1, shuffle=0).order(0))
    assert list(Batches(parts, 1, 1, shuffle=False).order(0)) == list(range(100))
    assert list(Batches(parts, 1, 1, shuffle=1).order(0)) != list(Batches(parts, 1, 1, shuffle=0).order(0))


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_any_start_continues_the_same_sequence(sizes, epochs, batch_size, seed):
    batches = Batches([np.arange(n) for n in sizes], epochs, batch_size, seed)
    everything = list(batches)
    assert len(everything) == len(batches)
    for start in range(len(batches) + 2):
        resumed = list(batches.iterate(start))
        assert len(resumed) == max(0, len(everything) - start)
        assert all(a[:2] == b[:2] and a[2] is b[2] for a, b in zip(resumed, everything[start:], strict=True))
    assert all(batches[i][2] is everything[i][2] for i in range(len(batches)))


def test_positions():
    batches = Batches([np.arange(4)], epochs=2, batch_size=2)
    assert batches[-1][:2] == (1, 1)
    assert [b[:2] for b in batches[1:3]] == [(0, 1), (1, 0)]
    with pytest.raises(IndexError, match="4 batches"):
        batches[4]
    with pytest.raises(InputError, match="start"):
        list(batches.iterate(-1))


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"epochs": 1.5}, {"shuffle": -3}, {"shuffle": "yes"}])
def test_bad_settings(wrong):
    with pytest.raises(InputError):
        Batches([], **wrong)


def test_steps_without_data():
    """What `trainer.iterate(range(n))` goes through: a loop of one's own that can go on in the middle."""
    batches = Batches(range(5), epochs=2)
    assert [batch for _, _, batch in batches.iterate(3)] == [3, 4, 0, 1, 2, 3, 4]
