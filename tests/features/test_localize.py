"""localize: the oracle is numpy.unique; order of hash; what is remembered and for how long."""

import gc
import threading

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sparse
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import unmix

from dps.engine.core import unique
from dps.engine.state.partition import hash_keys
from dps.engine.training import localize as module
from dps.engine.training.localize import forget, localize, unique_ids
from dps.errors import InputError, InputTypeError


@pytest.fixture(autouse=True)
def empty_memory():
    forget()
    yield
    forget()


def hashes(keys):
    out = np.empty(len(keys), np.uint64)
    hash_keys(keys, out)
    return out


def check_ids(ids, keys, codes):
    assert keys.dtype == np.int64
    assert codes.dtype == np.int32
    assert codes.shape == ids.shape
    np.testing.assert_array_equal(keys[codes], ids.astype(np.int64))
    np.testing.assert_array_equal(np.sort(keys), np.unique(ids.astype(np.int64)))
    key_hashes = hashes(keys)
    assert (key_hashes[1:] > key_hashes[:-1]).all()


def by_sorting(ids):
    codes = np.empty(len(ids), np.int32)
    return module.by_sorting(ids, codes), codes


@pytest.mark.parametrize("find", [unique_ids, by_sorting])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 63, 1000, 200_000])
def test_ids_against_numpy(find, dtype, n):
    rng = np.random.default_rng(n)
    limits = np.iinfo(dtype)
    for ids in (
        rng.integers(0, max(1, n // 20), n),
        rng.integers(limits.min, limits.max, n, endpoint=True),
        np.minimum(rng.zipf(1.3, n), limits.max),
        np.full(n, -7),
        np.arange(n) * 3,
        rng.permutation(np.r_[np.arange(n // 2), np.zeros(n - n // 2, int)]),
    ):
        ids = ids.astype(dtype)
        check_ids(ids, *find(ids))


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.int64, st.integers(0, 80), elements=st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1)))
)
def test_any_ids(ids):
    check_ids(ids, *unique_ids(ids))
    check_ids(ids, *by_sorting(ids))


def test_chosen_ids_whose_hashes_nearly_agree():
    rng = np.random.default_rng(3)
    top = [5 << 40, (2**24 - 1) << 40]
    keys = [unmix(t + int(low)) for t in top for low in rng.integers(0, 200, 300)]  # same top half, many times over
    ids = np.array(keys + list(range(50)))
    rng.shuffle(ids)
    check_ids(ids, *unique_ids(ids))
    check_ids(ids, *by_sorting(ids))


def test_the_last_slots_and_growth():
    ids = np.array([unmix(2**64 - 1 - i * 2**40) for i in range(60)])
    check_ids(ids, *unique_ids(ids))
    ids = np.concatenate([np.repeat(np.arange(40_000), 9), np.arange(300_000) % 150_000])  # grows, moves entries
    check_ids(ids, *unique_ids(ids))
    crowd = np.array([unmix((7 << 57) + i * 2**33) for i in range(200)])  # too close: gives up while moving or probing
    ids = np.concatenate([np.repeat(crowd, 40), np.repeat(np.arange(1500), 8)])
    check_ids(ids, *unique_ids(ids))


KINDS = [
    scipy.sparse.csr_matrix,
    scipy.sparse.csr_array,
    scipy.sparse.csc_matrix,
    scipy.sparse.coo_array,
    scipy.sparse.lil_matrix,
    sparse.COO.from_scipy_sparse,
    sparse.GCXS.from_scipy_sparse,
]


def sample(rows=50, columns=100_000, seed=0, dtype=np.float32):
    return scipy.sparse.random(rows, columns, density=3e-4, format="csr", random_state=seed, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_batches(kind):
    X = sample()
    keys, local = localize(kind(X))
    assert isinstance(local, scipy.sparse.csr_array if "array" in str(kind) or "sparse.n" in str(kind) else object)
    assert local.format == "csr"
    assert local.indices.dtype == np.int32
    assert local.dtype == np.float32
    assert local.shape == (50, len(keys))
    local.check_format(full_check=True)
    np.testing.assert_array_equal(np.sort(keys), np.unique(X.indices))
    key_hashes = hashes(keys)
    assert (key_hashes[1:] > key_hashes[:-1]).all()
    back = scipy.sparse.csr_matrix((local.data, keys[local.indices], local.indptr), shape=X.shape)
    assert abs(back - X).nnz == 0
    np.testing.assert_allclose(local @ np.ones(len(keys)), X @ np.ones(X.shape[1]), rtol=1e-5)
    np.testing.assert_allclose(local.T @ np.ones(50), (X.T @ np.ones(50))[keys], rtol=1e-5)


def test_csr_shares_its_data():
    X = sample()
    _, local = localize(X)
    assert local.data is X.data
    assert type(local) is type(X)
    X.data *= 2
    assert localize(X)[1] is local
    assert localize(X)[1].data[0] == X.data[0]


def test_huge_columns_duplicates_and_explicit_zeros():
    X = scipy.sparse.csr_matrix(
        (np.array([1.0, 2.0, 0.0]), np.array([2**62, 2**62, 5]), np.array([0, 2, 2, 3])), (3, 2**63 - 1)
    )
    keys, local = localize(X)
    assert sorted(keys.tolist()) == [5, 2**62]
    assert local.indptr.dtype == np.int32
    np.testing.assert_array_equal(local @ np.ones(2), [3.0, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(0, 10), (3, 10), (0, 0)])
def test_empty_batches(shape):
    keys, local = localize(scipy.sparse.csr_matrix(shape, dtype=np.float32))
    assert keys.dtype == np.int64
    assert len(keys) == 0
    assert local.shape == (shape[0], 0)
    assert (local @ np.ones(0)).shape == (shape[0],)
    keys, codes = localize(np.empty((0, 3), np.int64))
    assert len(keys) == 0
    assert codes.shape == (0, 3)


def test_view_of_a_larger_csr():
    X = sample()
    part = scipy.sparse.csr_matrix((10, X.shape[1]), dtype=X.dtype)
    part.data, part.indices, part.indptr = X.data, X.indices, X.indptr[20:31]
    keys, local = localize(part)
    back = scipy.sparse.csr_matrix((local.data, keys[local.indices], local.indptr), shape=part.shape)
    assert abs(back - X[20:30]).nnz == 0


def test_ids_of_many_kinds():
    ids = np.array([3, 1, 3, 200])
    for X in (
        ids,
        ids.astype(np.uint8),
        ids.astype(np.int16),
        ids.astype(np.uint32),
        ids.astype(">i4"),
        ids[::-1][::-1],
        ids.reshape(2, 2),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        pd.Series(ids, index=list("abcd")),
        pd.Series(ids, dtype="Int32"),
        pd.Series(ids, dtype="int64[pyarrow]"),
        pd.Index(ids),
    ):
        keys, codes = localize(X)
        check_ids(np.asarray(X), keys, codes)
    keys, codes = localize(np.array([2**64 - 1, 2**63], np.uint64))
    assert sorted(keys.tolist()) == [-(2**63), -1]
    assert np.uint64(2**64 - 1) == keys.view(np.uint64)[codes[0]]


def test_arrays_in_any_memory() -> None:
    """Read-only ones are not copied; unaligned ones, and those of another C type of 64 bits, are taken as well."""
    ids = np.arange(5000) % 70
    expected = unique_ids(ids)
    frozen, unaligned = ids.copy(), np.frombuffer(b"x" + ids.tobytes(), ids.dtype, offset=1)
    frozen.flags.writeable = False
    assert not unaligned.flags.aligned
    for same in (frozen, unaligned, ids.astype(np.longlong), ids[::-1].copy()[::-1]):
        for found, wanted in zip(unique_ids(same), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert unique.fingerprint(same) == unique.fingerprint(ids)
    X = sample()
    for part in (X.data, X.indices, X.indptr):
        part.flags.writeable = False
    assert localize(X)[1].data is X.data


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (da.arange(3), "one batch in memory"),
        (np.zeros((2, 2)), "make it sparse first"),
        (np.array(["a"]), "hash_strings"),
        (pd.Series(["a", "b"]), "hash_strings"),
        (pd.Series(["a", "b"], dtype="category"), "hash_strings"),
        (pd.Series([1.5]), "integer ids"),
        ([1, 2], "list"),
        (np.array([True]), "bool"),
    ],
)
def test_what_it_does_not_take(X, message):
    with pytest.raises(InputTypeError, match=message):
        localize(X)


def test_values_that_it_does_not_take():
    with pytest.raises(InputError, match="1 of 2 ids are missing"):
        localize(pd.Series([1, None], dtype="Int64"))
    with pytest.raises(InputError, match="fill_value"):
        localize(sparse.COO.from_numpy(np.eye(3)) + 1)
    with pytest.raises(InputError, match="shape"):
        localize(sparse.COO.from_numpy(np.ones((2, 2, 2))))


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [*KINDS[:4], *KINDS[5:], lambda X: X.indices.copy(), lambda X: pd.Series(X.indices)])
def test_remembered_as_long_as_the_batch_lives(kind):
    X = kind(sample())
    first = localize(X)
    assert localize(X) is first
    assert localize(X, remember=False) is not first
    assert len(module._remembered) == 1
    del X, first
    gc.collect()
    assert len(module._remembered) == 0


def test_changes_are_noticed():
    X = sample()
    first = localize(X)
    X.indices[0] = X.indices[0] + 1
    second = localize(X)
    assert second is not first
    assert X.indices[0] in second[0]
    X.indices = X.indices.copy()
    assert localize(X) is second  # the same ids
    X.data = X.data.copy()
    third = localize(X)
    assert third is not second
    assert third[1].data is X.data
    X.indices[:2] = X.indices[1::-1].copy()
    assert localize(X) is not third
    ids = np.arange(10)
    codes = localize(ids)[1]
    ids[:] = 5
    assert localize(ids)[1].max() == 0
    assert codes.max() == 9
    C = sparse.COO.from_scipy_sparse(sample())
    before = localize(C)[1]
    C.data *= 3
    np.testing.assert_allclose(localize(C)[1].data, before.data * 3)
    forget(X)
    forget(X)
    assert id(X) not in module._remembered
    assert id(C) in module._remembered


def test_fingerprint_sees_every_word_and_order():
    rng = np.random.default_rng(0)
    for n in (1, 3, 511, 512, 1030, 5000):
        words = rng.integers(0, 9, n).astype(np.int32)
        prints = {unique.fingerprint(words)}
        for i in range(n):
            words[i] += 1
            prints.add(unique.fingerprint(words))
            words[i] -= 1
        assert len(prints) == n + 1
    assert unique.fingerprint(np.zeros(3)) != unique.fingerprint(np.zeros(4))
    assert unique.fingerprint(np.array([1, 2], np.int8)) != unique.fingerprint(np.array([2, 1], np.int8))


def test_threads():
    batches = [sample(seed=s) for s in range(5)]
    wrong = []

    def work():
        for _ in range(20):
            for X in batches:
                keys, local = localize(X)
                if not np.array_equal(keys[local.indices], X.indices):
                    wrong.append(X)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(module._remembered) == 5


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("unique.pyx", "if number == 0 or slot.key != key:", "if number == 0:"),
    ("unique.pyx", "hashes[q - 1] > h", "hashes[q - 1] < h"),
    ("unique.pyx", "codes[i] = rank[codes[i]]", "pass"),
    ("unique.pyx", "(dps_mix(<uint64_t> source.key) >> shift)", "(dps_mix(<uint64_t> source.key) >> (shift + 1))"),
    ("unique.pyx", "same = same and ids[place] == key", "same = True"),
    ("unique.pyx", "h < least", "h > least"),
    ("unique.pyx", "== least:", ">= least:"),
    ("unique.pyx", "dps_mix(total ^ dps_nh(", "dps_mix(dps_nh("),
    ("unique.pyx", "dps_mix(total ^ word)", "total ^ word"),
    ("unique.pyx", "range(4 * words, size)", "range(size, size)"),
    ("unique.h", "+ secret[half + j]", "+ secret[j]"),
    ("unique.h", "words + 4 * (half + j)", "words + 4 * j"),
]


def check_all() -> None:
    for find in (unique_ids, by_sorting):
        test_ids_against_numpy(find, np.int64, 1000)
        test_ids_against_numpy(find, np.int32, 1000)
    test_chosen_ids_whose_hashes_nearly_agree()
    test_the_last_slots_and_growth()
    test_fingerprint_sees_every_word_and_order()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, file: str, old: str, new: str) -> None:
    check_all()
    wrong = variant("unique", file, old, new)
    for name in ("by_table", "by_sorting", "fingerprint"):
        monkeypatch.setattr(module, name, getattr(wrong, name))
    monkeypatch.setattr(unique, "fingerprint", wrong.fingerprint)
    with pytest.raises((AssertionError, IndexError)):
        check_all()


# ---- what the core refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("find", [unique.by_table, unique.by_sorting])
def test_arrays_that_do_not_fit_are_refused(find) -> None:
    ids, codes = np.arange(4), np.zeros(4, np.int32)
    with pytest.raises(TypeError, match="contiguous array of int64 wanted, and this is int16"):
        find(ids.astype(np.int16), codes)
    with pytest.raises(TypeError, match=r"strides \(16,\)"):
        find(ids[::2], codes[:2])
    with pytest.raises(TypeError, match="array of int32 wanted"):
        find(ids, ids.copy())
    with pytest.raises(ValueError, match="4 ids, and room for 3 codes"):
        find(ids, codes[:3])
