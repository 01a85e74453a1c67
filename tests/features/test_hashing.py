"""Stable hashes of text: pinned values, the same for every container, a plain Python oracle."""

import math
import os
import subprocess
import sys

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st
from oracles import mix

from dps.engine.training.localize import localize
from dps.errors import InputError, InputTypeError
from dps.features import hashing as module
from dps.features.hashing import hash_columns, hash_strings
from dps.kernels.loops import hashing as core

WORD = 2**64 - 1

GOLDEN = {  # stored models depend on these: never change them
    "": -2152535657050944081,
    "a": 6774081908283191102,
    "dask": -3345755086307462500,
    "12345678": -8945296240283771741,
    "parameter server": 2888854401873774355,
    "Zürich 東京 🚀": 8566381988060531091,
    None: -9146223387810816685,
}


def signed(h):
    return h - 2**64 if h >= 2**63 else h


def unsigned_oracle(value, seed=0):
    if value is None:
        return mix((seed & WORD) ^ 0x6D697373696E67)
    octets = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    h = mix((seed + len(octets)) & WORD)
    for at in range(0, len(octets), 8):
        h = mix(h ^ int.from_bytes(octets[at : at + 8], "little"))
    return h


def oracle(value, seed=0):
    return signed(unsigned_oracle(value, seed))


def test_pinned_values():
    assert dict(zip(GOLDEN, hash_strings(list(GOLDEN)).tolist(), strict=True)) == GOLDEN


@pytest.mark.thorough
def test_the_same_in_another_process():
    code = (
        "import numpy as np; from dps.features.hashing import hash_strings; print(hash_strings(['dask', 'a']).tolist())"
    )
    for hash_seed in ("0", "1"):
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=True)
        assert run.stdout.strip() == str([GOLDEN["dask"], GOLDEN["a"]])


@given(
    st.lists(st.one_of(st.none(), st.text(), st.binary(), st.sampled_from(["x", "y"]))), st.integers(-(2**70), 2**70)
)
def test_lists_against_python(values, seed):
    keys = hash_strings(values, seed)
    assert keys.dtype == np.int64
    assert keys.tolist() == [oracle(v, seed) for v in values]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_every_container_agrees(texts):
    expected = [oracle(text) for text in texts]
    series = pd.Series(texts, dtype=object)
    arrow = pd.ArrowDtype(pa.string())
    for values in (
        texts,
        tuple(texts),
        iter(texts),
        np.array(texts),
        np.array([text.encode() for text in texts]),
        np.array(texts, object),
        np.array(texts, np.dtypes.StringDType()),
        np.array(texts)[::-1][::-1],
        np.array(texts).astype(np.array(texts).dtype.newbyteorder()),
        series,
        pd.Index(texts),
        series.astype("str"),
        series.astype("string[python]"),
        series.astype("string[pyarrow]"),
        series.astype(arrow),
        series.astype(pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))),
        series.astype("category"),
        pd.CategoricalIndex(texts),
        pd.concat([series.astype(arrow)] * 2).iloc[: len(texts)],  # several chunks
        pd.concat([series.astype("str")] * 2).iloc[len(texts) :],  # an offset
    ):
        assert hash_strings(values).tolist() == expected


@pytest.mark.parametrize("length", range(40))
def test_lengths_around_a_word(length):
    text = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrst"[:length]
    for values in ([text], np.array([text]), np.array([text.encode()]), pd.Series([text], dtype="str")):
        assert hash_strings(values).tolist() == [oracle(text)]
    assert hash_strings([text + "\0"]) != hash_strings([text])


def test_texts_in_any_memory() -> None:
    expected = hash_strings(["abc", "de", "f"])
    for dtype in ("U3", "S3"):
        texts = np.array(["abc", "de", "f"], dtype)
        frozen, unaligned = texts.copy(), np.frombuffer(b"x" + texts.tobytes(), dtype, offset=1)
        frozen.flags.writeable = False
        for same in (frozen, unaligned, texts[::-1].copy()[::-1]):
            np.testing.assert_array_equal(hash_strings(same), expected)


def test_shapes_and_nothing():
    assert hash_strings(np.array([["a", "b"], ["c", "é"]])).shape == (2, 2)
    assert hash_strings(np.array("a")).shape == ()
    for empty in (
        [],
        np.array([], "U3"),
        np.array([], "U"),
        np.array([], "S"),
        np.array([], object),
        pd.Series([], dtype="str"),
    ):
        assert hash_strings(empty).shape == (0,)
    assert hash_strings(pd.Series([], dtype="category")).shape == (0,)
    assert hash_strings(np.empty(3, "U0")).tolist() == [GOLDEN[""]] * 3


def test_missing_values():
    missing = [None, math.nan, pd.NA, pd.NaT, np.float32("nan")]
    assert hash_strings(missing).tolist() == [GOLDEN[None]] * 5
    for dtype in ("str", "string", object, "category", pd.ArrowDtype(pa.large_string())):
        keys = hash_strings(pd.Series(["a", None, "dask"], dtype=dtype))
        assert keys.tolist() == [GOLDEN["a"], GOLDEN[None], GOLDEN["dask"]]
        assert hash_strings(pd.Series([None, None], dtype=dtype)).tolist() == [GOLDEN[None]] * 2


def test_numbers_among_objects_and_categories_are_their_text():
    assert hash_strings([1, True, 1.5, np.int8(1), np.bool_(True)]).tolist() == [
        oracle(text) for text in ("1", "True", "1.5", "1", "True")
    ]
    assert hash_strings(pd.Series([3, 1, 3], dtype="category")).tolist() == [oracle("3"), oracle("1"), oracle("3")]
    assert hash_strings(pd.Series([True, None], dtype="boolean")).tolist() == [oracle("True"), GOLDEN[None]]


def test_categories_are_hashed_once():
    class Counted(str):
        count = 0

        def encode(self, *args):
            Counted.count += 1
            return str.encode(self, *args)

    categories = pd.Index([Counted("a"), Counted("b")], dtype=object)
    series = pd.Series(pd.Categorical.from_codes([0, 1, -1, 0] * 100, categories))
    assert hash_strings(series).tolist() == [oracle("a"), oracle("b"), GOLDEN[None], oracle("a")] * 100
    assert Counted.count == 2


def test_no_collisions_and_even_bits():
    hashes = hash_strings([f"feature-{i}" for i in range(100_000)])
    assert len(np.unique(hashes)) == 100_000
    bits = (hashes.view(np.uint64)[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert (abs(bits.mean(axis=0) - 0.5) < 0.01).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.arange(3), "integer ids need no hash"),
        (pd.Series([1, 2]), "int64"),
        (pd.Series([1, None], dtype="Int64"), "Int64"),
        (pd.Series([1, 2], dtype=pd.ArrowDtype(pa.int64())), "int64"),
        (pd.Series(pd.to_datetime(["2020-01-01"])), "datetime64"),
        (np.array([True]), "bool"),
        ("text", r"hash \[value\]"),
        (3, "single int"),
        ([("a",)], "value 0, a tuple"),
        (dd.from_pandas(pd.Series(["a"]), npartitions=1), "map_partitions"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(InputTypeError, match=message):
        hash_strings(values)


def test_columns():
    frame = pd.DataFrame({"from": ["JFK", "LGA", None], "to": ["LGA", "JFK", None], "night": [True, False, True]})
    keys = hash_columns(frame)
    assert keys.shape == (3, 3)
    assert keys.flags.c_contiguous
    assert len(np.unique(keys)) == 8
    assert keys[0, 2] == keys[2, 2]
    for c, name in enumerate(frame):
        for r in range(3):
            value = frame[name][r]
            text = None if pd.isna(value) else str(value)
            assert keys[r, c] == signed(mix(unsigned_oracle(name) ^ mix(unsigned_oracle(text))))
    assert keys[0].tolist() == [-5353935649183692372, -2693508160424875557, -1694852650754245946]  # pinned
    np.testing.assert_array_equal(hash_columns(dict(frame.items())), keys)
    np.testing.assert_array_equal(hash_columns(frame.astype({"from": "category"})), keys)
    np.testing.assert_array_equal(hash_columns(frame[["to"]])[:, 0], keys[:, 1])
    np.testing.assert_array_equal(hash_columns(frame, bits=10), keys & 1023)
    np.testing.assert_array_equal(hash_columns({"night": frame["night"].to_numpy()})[:, 0], keys[:, 2])
    assert not (hash_columns(frame, seed=1) == keys).any()
    assert (hash_columns(frame, bits=63) >= 0).all()


def test_columns_of_odd_frames():
    assert hash_columns(pd.DataFrame(index=range(3))).shape == (3, 0)
    assert hash_columns(pd.DataFrame({"a": pd.Series([], dtype="str")})).shape == (0, 1)
    assert hash_columns({}).shape == (0, 0)
    twice = pd.DataFrame([["x", "x"]], columns=["a", "a"])
    assert hash_columns(twice)[0, 0] == hash_columns(twice)[0, 1]
    assert hash_columns({0: ["x"]})[0, 0] == hash_columns({"0": ["x"]})[0, 0]


@pytest.mark.parametrize("bits", [0, 64, -1, 2.5, True])
def test_bad_bits(bits):
    with pytest.raises(InputError, match="bits"):
        hash_columns({"a": ["x"]}, bits=bits)


def test_columns_that_are_refused():
    with pytest.raises(InputTypeError, match=r"column 'age'.*astype\('category'\)"):
        hash_columns(pd.DataFrame({"age": [1, 2]}))
    with pytest.raises(InputTypeError, match="to_frame"):
        hash_columns(pd.Series(["a"]))
    with pytest.raises(InputTypeError, match="map_partitions"):
        hash_columns(dd.from_pandas(pd.DataFrame({"a": ["x"]}), npartitions=1))
    with pytest.raises(InputError, match="column 'b' has shape"):
        hash_columns({"a": ["x"], "b": ["x", "y"]})
    with pytest.raises(InputError, match="seed"):
        hash_strings(["a"], seed=0.5)


# ---- several values in a cell ---------------------------------------------------------------------------------------

TAGS = [["sea", "old"], [], None, ("sea",), np.array(["new", "sea", "new"]), "alone", {"b", "a"}, [7, None]]
FLAT = [["sea", "old"], [], [None], ["sea"], ["new", "sea", "new"], ["alone"], ["a", "b"], ["7", None]]


def key_of(column, value):
    return mix(unsigned_oracle(column) ^ mix(unsigned_oracle(value)))


@pytest.mark.parametrize("container", [list, lambda cells: pd.Series(cells, dtype=object)], ids=["list", "series"])
@pytest.mark.parametrize("bits", [10, 62])
def test_each_value_of_a_cell_is_a_feature_of_its_column(bits, container):
    """Lists, tuples, sets and arrays in a cell were refused; a value has the key that it has where it stands alone."""
    city = [str(n) for n in range(len(TAGS))]
    X = hash_columns({"tags": container(TAGS), "city": city}, bits=bits, multi=["tags"])
    assert X.shape == (len(TAGS), 2**bits)
    assert X.dtype == np.float32
    for n, values in enumerate(FLAT):
        expected = [key_of("tags", value) % 2**bits for value in values] + [key_of("city", city[n]) % 2**bits]
        assert X.indices[X.indptr[n] : X.indptr[n + 1]].tolist() == expected
    assert (X.data == 1).all()


def test_ints_in_cells_and_arrow_lists():
    ids = [[1, 2], [], [3]]
    expected = [key_of("ids", text) % 2**40 for text in "123"]
    columns = [
        ids,
        [np.array(each, np.int32) for each in ids],
        pd.Series(ids, dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
    ]
    for column in columns:
        X = hash_columns(pd.DataFrame({"ids": pd.Series(list(column), dtype=object)}), bits=40, multi="ids")
        assert (X.indices.tolist(), X.indptr.tolist()) == (expected, [0, 2, 2, 3])
    assert hash_columns(pd.DataFrame({"ids": columns[2]}), bits=40, multi=["ids"]).indices.tolist() == expected


def test_features_of_several_values_can_be_localized():
    X = hash_columns({"tags": [["a", "b"], ["b", "b"]]}, bits=62, multi=["tags"])
    keys, small = localize(X)
    assert sorted(keys.tolist()) == sorted(hash_columns({"tags": ["a", "b"]}, bits=62)[:, 0].tolist())
    assert sorted(small.sum(axis=0).A1.tolist()) == [1, 3]
    assert hash_columns({"tags": []}, bits=8, multi=["tags"]).shape == (0, 256)


def test_several_values_that_are_refused():
    for cell in (["a"], ("a",), {"a"}, np.array(["a"])):
        with pytest.raises(InputTypeError, match=r"column 't'.*several values in a cell.*multi=\['t'\]"):
            hash_columns({"t": [cell, "b"]})
    for bits in (None, 63):
        with pytest.raises(InputError, match=rf"bits={bits}: .* from 1 to 62"):
            hash_columns({"t": [["a"]]}, bits=bits, multi=["t"])
    with pytest.raises(InputError, match="multi names 'u', and the columns are 't'"):
        hash_columns({"t": [["a"]]}, bits=9, multi=["u"])
    with pytest.raises(InputError, match="column 'b' has shape"):
        hash_columns({"a": [["x"]], "b": ["x", "y"]}, bits=9, multi=["a"])
    with pytest.raises(InputTypeError, match="column 't': cannot hash value 0, a dict"):
        hash_columns({"t": [[{}]]}, bits=9, multi=["t"])


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("text.h", "(uint64_t)p[7] << 56", "(uint64_t)p[6] << 56"),
    ("text.h", "(uint64_t)p[b] << (8 * b)", "(uint64_t)p[b] << b"),
    ("text.h", "(64 - 8 * count)", "(56 - 8 * count)"),
    ("text.h", "seed + (uint64_t)length", "seed"),
    ("text.h", "all < 128", "all < 256"),
    ("text.h", "column ^ dps_mix(hashes[i])", "column ^ hashes[i]"),
    ("text.h", ") & mask);", "));"),
    ("text.h", "out[i * stride]", "out[i]"),
    ("hashing.pyx", "(text + end[i], ", "(text, "),
    ("hashing.pyx", "and text[length - 1] == 0", "and False"),
    ("hashing.pyx", "and point[length - 1] == 0", "and False"),
    ("hashing.pyx", "point += width", "pass"),
]


def check_all() -> None:
    for length in (0, 1, 7, 8, 9, 20):
        test_lengths_around_a_word(length)
    texts = ["", "a", "abcdefg", "abcdefgh", "parameter server", "é", "東京"]
    for values in (texts, texts[:5], np.array(texts), np.array(texts[:5]), np.array([t.encode() for t in texts])):
        assert hash_strings(values, 7).tolist() == [oracle(text, 7) for text in texts[: len(values)]]
    assert hash_strings(np.array(["é", "è"])).tolist() == [oracle("é"), oracle("è")]
    test_columns()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, file: str, old: str, new: str) -> None:
    check_all()
    wrong = variant("hashing", file, old, new)
    for name in ("hash_bytes", "hash_fixed", "hash_points", "combine"):
        monkeypatch.setattr(module, name, getattr(wrong, name))
    with pytest.raises(AssertionError):
        check_all()


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused() -> None:
    octets, out = np.zeros(6, np.uint8), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="2 ends for 2 texts"):
        core.hash_bytes(octets, np.array([0, 6]), 0, out)
    for ends in ([0, 3, 7], [-1, 3, 6], [3, 2, 6]):
        with pytest.raises(ValueError, match=r"text . from -?\d to \d, and there are 6 bytes"):
            core.hash_bytes(octets, np.array(ends), 0, out)
    with pytest.raises(TypeError, match="array of uint8 wanted"):
        core.hash_bytes(octets.astype(np.int8), np.array([0, 3, 6]), 0, out)
    with pytest.raises(ValueError, match=r"texts of shape \(3, 2\), and room for 2 hashes"):
        core.hash_fixed(octets.reshape(3, 2), 0, out)
    with pytest.raises(ValueError, match=r"texts of shape \(6,\)"):
        core.hash_points(octets.astype(np.uint32), 0, out)
    with pytest.raises(ValueError, match=r"column 3 of keys of shape \(2, 3\) for 2 hashes"):
        core.combine(0, out, 0, np.zeros((2, 3), np.int64), 3)
    with pytest.raises(ValueError, match="for 2 hashes"):
        core.combine(0, out, 0, np.zeros((1, 3), np.int64), 0)
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writeable: False"):
        core.hash_fixed(octets.reshape(2, 3), 0, frozen)


# ---- memory that begins at any byte, as that of a partition which Dask has sent


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    memory[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = memory.view(array.dtype).reshape(array.shape)
    assert not moved.flags.aligned or array.dtype.itemsize == 1 or array.dtype.kind == "S"
    return moved


def test_text_that_is_not_aligned() -> None:
    texts = ["a", "", "longer than a word", "ä"]
    expected = hash_strings(texts)
    np.testing.assert_array_equal(hash_strings(unaligned(np.array(texts))), expected)
    octets = "".join(texts).encode()
    ends = np.cumsum([0, *(len(text.encode()) for text in texts)]).astype(np.int64)
    moved = pa.py_buffer(b"x" + ends.tobytes()).slice(1)
    array = pa.Array.from_buffers(pa.large_string(), len(texts), [None, moved, pa.py_buffer(octets)])
    series = pd.Series(array, dtype=pd.ArrowDtype(pa.large_string()))
    np.testing.assert_array_equal(hash_strings(series), expected)


def test_numbers_that_are_not_aligned() -> None:
    ids = np.array([900, 7, 900, -3])
    for dtype in (np.int64, np.int32, np.int16):
        keys, codes = localize(unaligned(ids.astype(dtype)))
        np.testing.assert_array_equal(keys[codes], ids)
    matrix = scipy.sparse.csr_matrix(([1.0, 2.0, 3.0], [900, 7, 900], [0, 2, 3]), shape=(2, 1000))
    expected_keys, expected = localize(matrix)
    for name in ("data", "indices", "indptr"):
        setattr(matrix, name, unaligned(getattr(matrix, name)))
    keys, local = localize(matrix)
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(local.toarray(), expected.toarray())


# ---- a vocabulary in place of hashes


class Numbers:
    """A vocabulary in this process."""

    def __init__(self, frozen=False):
        self.words, self.frozen = {}, frozen

    def ids(self, words):
        for word in () if self.frozen else words:
            self.words.setdefault(word, len(self.words))
        return np.array([self.words.get(word, -1) for word in words], np.int64)


def test_columns_are_numbered_by_a_vocabulary():
    words = Numbers()
    frame = pd.DataFrame({"from": ["JFK", None, "LGA"], "to": pd.Categorical([7, 8, 7]), "late": [True, False, True]})
    keys = hash_columns(frame, vocabulary=words)
    named = ["from=JFK", "from", "from=LGA", "to=7", "to=8", "late=True", "late=False"]
    assert list(words.words) == named
    assert keys.tolist() == [[0, 3, 5], [1, 4, 6], [2, 3, 5]]
    assert hash_columns({"from": np.array(["LGA", "JFK"])}, vocabulary=words).tolist() == [[2], [0]]
    assert hash_columns({"from": [b"LGA", "OSL"]}, vocabulary=words).tolist() == [[2], [7]]
    words.frozen = True
    assert hash_columns({"from": ["OSL", "CDG"]}, vocabulary=words).tolist() == [[7], [-1]]


def test_several_values_in_a_cell_are_numbered_without_those_that_are_unknown():
    words = Numbers()
    words.ids(["tags=a", "tags=b", "city=Oslo"])
    words.frozen = True
    X = hash_columns({"city": ["Oslo", "Rome"], "tags": [["a", "?"], ["b", "a"]]}, 3, multi=["tags"], vocabulary=words)
    assert X.toarray()[:, :4].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert X.shape == (2, 8)


def test_what_a_vocabulary_does_not_take_is_refused():
    words = Numbers()
    for arguments, said in (
        (({"a=b": ["c"]},), "rename the column"),
        (({"a": ["b"]}, None, 5), "a vocabulary has no seed"),
        (({"a": list("bcd")}, 1), "an id of the vocabulary is 2, and bits=1 takes ids below 2"),
    ):
        with pytest.raises(InputError, match=said):
            hash_columns(*arguments, vocabulary=words)
    for wrong in (np.arange(3), pd.Series([1.5]), [["a"]]):
        with pytest.raises(InputTypeError, match=r"column 'a'|must be text"):
            hash_columns({"a": wrong}, vocabulary=words)
