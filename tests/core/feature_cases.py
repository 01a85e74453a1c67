"""Golden cases: hashes of texts and columns, the unique ids of a batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.sparse
import streams
from oracles import unmix

from dps.engine.training.localize import localize
from dps.features.hashing import hash_columns, hash_strings

SEEDS = (0, 1, -1, 2**63, 2**64 - 1)
LETTERS = "abcdefghij XYZ0123456789_"
OTHERS = "äöüßéñ東京🚀\u0000\udc80"  # of two, three and four bytes; a zero; half a surrogate pair
NAN = float("nan")


def texts(name: str, count: int, letters: str = LETTERS, longest: int = 40) -> list[str]:
    """Texts of 0 to `longest` letters, so that they end everywhere in a word of eight bytes; some several times."""
    lengths = streams.integers(f"{name} lengths", count, 0, longest + 1).tolist()
    drawn = iter(streams.integers(name, sum(lengths), 0, len(letters)).tolist())
    return ["".join(letters[next(drawn)] for _ in range(length)) for length in lengths]


def strings(letters: str, seed: int) -> dict[str, np.ndarray]:
    """The same texts in each container that there is."""
    values = texts("strings", 300, letters)
    ordinary = "\udc80" not in letters and "\0" not in letters  # arrow cannot hold the one, numpy's U not the other
    made = {"list": values, "repeats": values[:20] * 9, "object": np.array([*values, None], object)[:-1]}
    made["bytes"] = [value.encode("utf-8", "surrogatepass") for value in values]
    made["series"] = pd.Series([*values, None], dtype=object)
    if ordinary:
        made["category"] = pd.Series(pd.Categorical(values[:20] * 9))
        made |= {"U": np.array(values).reshape(-1, 3), "S": np.array(made["bytes"])}
        made["arrow"] = pd.Series([*values, None], dtype=pd.ArrowDtype(pa.string()))
        made["string"] = pd.Series([*values, None], dtype="string")
        made["slice"] = made["arrow"].iloc[7:-5]
    return {name: hash_strings(container, seed) for name, container in made.items()}


def mixed(seed: int) -> dict[str, np.ndarray]:
    """Lists of anything that has a text: whole numbers, floats, bools, bytes, missing values."""
    values = [0, 1, -1, 2**63, -(2**70), True, False, np.int32(7), np.uint64(2**64 - 1), np.bool_(True)]
    values += [0.0, -0.0, 0.1, 1e300, 5e-324, float("inf"), NAN, None, pd.NA, pd.NaT, np.float64(0.1), 1.0]
    values += ["", "a", b"a", b"\xff\x00", bytearray(b"12345678"), "12345678", "123456789", "nan", "None"]
    values += streams.integers("mixed", 50, -(2**40), 2**40).tolist() + streams.floats("mixed", (50,)).tolist()
    numbers = pd.Series(pd.Categorical([3, 1, None, 2**40, 3]))
    return {
        "mixed": hash_strings(values, seed),
        "categories": hash_strings(numbers, seed),
        "float categories": hash_strings(pd.Series(pd.Categorical([0.5, NAN, -1e30])), seed),
        "bools": hash_strings(pd.Series([True, False, True]), seed),
        "fixed width": hash_strings(np.array(["a\0b", "", "a", "\0a"]), seed),
        "fixed bytes": hash_strings(np.array([b"a\0b", b"", b"12345678", b"123456789abcdefg"]), seed),
        "nothing": hash_strings([], seed),
    }


def columns(bits: int | None, seed: int, name: str = "columns") -> dict[str, np.ndarray]:
    """Columns of text, bytes, bools, categories and missing values, by several kinds of names."""
    frame = {
        "text": texts(name, 120),
        "the same again": texts(name, 120),
        7: np.array(texts(f"{name} fixed", 120)),
        "": np.array(texts(f"{name} short", 120, longest=3)).astype("S"),
        "flag": streams.integers(name, 120, 0, 2).astype(bool),
        "numbers": pd.Series(pd.Categorical(streams.integers(name, 120, 0, 9))),
        "missing": [None, NAN, "x"] * 40,
    }
    return {"dict": hash_columns(frame, bits, seed), "frame": hash_columns(pd.DataFrame(frame), bits, seed)}


def several(bits: int, seed: int) -> dict[str, np.ndarray]:
    """Columns with several values in a cell."""
    lengths = streams.integers("cells", 60, 0, 6).tolist()
    tags = [texts(f"cell {n}", length, longest=9) for n, length in enumerate(lengths)]
    ids: list = [set(streams.integers(f"ids {n}", 3, 0, 99).tolist()) for n in range(58)]
    ids += [None, np.array([1, 2, 1])]
    frame = {"plain": texts("plain", 60), "tags": tags, "ids": ids, "last": [tuple(tag) for tag in tags]}
    X = hash_columns(frame, bits, seed, multi=["tags", "ids", "last"])
    return {"keys": X.indices.astype(np.int64), "ends": X.indptr.astype(np.int64), "ones": X.data}


# ---- unique ids ------------------------------------------------------------------------------------------------------


def skewed(count: int, size: int, dtype: str) -> np.ndarray:
    """Ids of which few take most of the places."""
    return streams.repeated("skewed", streams.keys(f"skewed {size}", size), count).astype(dtype)


def attack(kind: str) -> np.ndarray:
    """Ids chosen by their hashes: with one home, or equal in the upper half of the hash but not in the lower one."""
    tops = np.repeat(streams.words("attack", 40) >> np.uint64(32), 5) if kind == "halves" else np.full(400, 9 << 20)
    hashes = [int(top) << 32 | int(low) >> 40 for top, low in zip(tops, streams.words(kind, len(tops)), strict=True)]
    ids = np.array([unmix(h) for h in hashes])
    return np.concatenate([ids, ids[streams.permutation(kind, len(ids))], ids[:50]])


IDS = {
    "none": lambda: np.zeros(0, np.int64),
    "one": lambda: np.array([[-(2**63)]]),
    "few": lambda: skewed(50, 9, "int64"),
    "skewed": lambda: skewed(30_000, 900, "int64"),
    "skewed int32": lambda: skewed(30_000, 900, "int32"),
    "growing": lambda: np.concatenate([skewed(3000, 10, "int64"), *[streams.keys("growing", 2000)] * 6]),
    "distinct": lambda: streams.keys("distinct", 20_000),
    "distinct int32": lambda: np.unique(streams.keys("distinct", 20_000).astype(np.int32)),
    "neighbours": lambda: np.arange(-500, 9000).reshape(-1, 5),
    "one home": lambda: attack("homes"),
    "halves": lambda: attack("halves"),
    "halves among many": lambda: np.concatenate([streams.keys("halves", 9000), attack("halves")]),
    "uint64": lambda: skewed(500, 50, "int64").view(np.uint64),
    "uint8": lambda: streams.integers("uint8", 700, 0, 256).astype(np.uint8),
    "int16": lambda: streams.integers("int16", 700, -300, 300).astype(np.int16),
}


def unique_case(kind: str) -> dict[str, np.ndarray]:
    keys, local = localize(IDS[kind](), remember=False)
    return {"keys": keys, "codes": local}


def matrix_case(form: str) -> dict[str, np.ndarray]:
    """A sparse matrix, and a part of it that does not begin at its first element."""
    ids = np.abs(skewed(2000, 300, "int64") % 10_000)
    ends = np.append(0, np.sort(streams.integers("ends", 99, 0, 2001)))
    whole = scipy.sparse.csr_matrix((streams.values("data", (2000,), "float32"), ids, np.append(ends, 2000)))
    made = {}
    for name, X in (("whole", whole), ("part", whole[20:60])):
        keys, local = localize(X.asformat(form), remember=False)
        parts = {"keys": keys, "indices": local.indices, "ends": local.indptr, "data": local.data}
        made |= {f"{name} {part}": array for part, array in parts.items()}
    return made


CASES = {f"texts / ascii / {seed}": partial(strings, LETTERS, seed) for seed in SEEDS}
CASES |= {f"texts / any / {seed}": partial(strings, LETTERS + OTHERS[:-2], seed) for seed in SEEDS}
CASES |= {"texts / strange / 3": partial(strings, OTHERS, 3)}
CASES |= {f"texts / mixed / {seed}": partial(mixed, seed) for seed in SEEDS}
CASES |= {f"columns / {bits} / {seed}": partial(columns, bits, seed) for bits in (None, 1, 20, 63) for seed in (0, 5)}
CASES |= {f"several in a cell / {bits} / {seed}": partial(several, bits, seed) for bits in (20, 62) for seed in (0, 5)}
CASES |= {f"unique / {kind}": partial(unique_case, kind) for kind in IDS}
CASES |= {f"unique / matrix {form}": partial(matrix_case, form) for form in ("csr", "csc", "coo")}

VARIANTS = {
    "texts / ascii / 0": partial(strings, LETTERS, 2),
    "texts / any / 0": partial(strings, LETTERS, 0),
    "texts / mixed / 1": partial(mixed, 3),
    "columns / 20 / 0": partial(columns, 19, 0),
    "columns / None / 0": partial(columns, None, 0, "others"),
    "several in a cell / 20 / 0": partial(several, 20, 1),
    "unique / skewed": partial(unique_case, "growing"),
}
