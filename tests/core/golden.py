"""Golden hashes: every bit that the compiled loops of dps compute, pinned in `golden.json`.

A case is a name and a function without arguments that returns its results: arrays, by the name of the part. The cases
go through classes and functions that other rooms use, so they know nothing of how the loops are compiled. Stored models
and replicas on other machines depend on these bits. Where a hash differs, the change is wrong, not the file, unless the
change of the bits was wanted; then write the file again, from the folder of the project::

    PYTHONPATH=.:tests/helpers python tests/core/golden.py --write
    PYTHONPATH=.:tests/helpers python tests/core/golden.py optimizer   # compare the cases whose name contains this

For each case the file holds the hash of all its parts, and for each part its dtype and shape, its first values and
the sums of up to four blocks of its rows, so that a difference can be placed.

IEEE 754 leaves the sign and the payload of a computed NaN to the processor. So every NaN counts as the same; results
whose NaN are copied and not computed are given as whole numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import feature_cases
import initializer_cases
import key_cases
import numpy as np
import optimizer_cases
import sparse_cases
import table_cases

FILE = Path(__file__).with_name("golden.json")
MODULES = (feature_cases, initializer_cases, key_cases, optimizer_cases, sparse_cases, table_cases)
FIRST = 1  # how many values of a part the file shows
BLOCKS = 4  # of rows, each with a sum of its own

Results = dict[str, np.ndarray]
CASES: dict[str, Callable[[], Results]] = {name: case for module in MODULES for name, case in module.CASES.items()}
VARIANTS: dict[str, Callable[[], Results]] = {n: case for module in MODULES for n, case in module.VARIANTS.items()}


def octets(array: np.ndarray) -> bytes:
    """The content of an array, little-endian, with one NaN for all."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def blake(content: bytes, size: int) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def blocks(array: np.ndarray) -> list[slice]:
    """The rows of an array, cut into up to BLOCKS parts."""
    rows = len(array) if array.ndim else 0
    edges = sorted({n * rows // BLOCKS for n in range(BLOCKS + 1)})
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def first_values(array: np.ndarray) -> str:
    digits = {"float32": ".9g", "float64": ".17g"}.get(array.dtype.name, "")
    return " ".join(format(value, digits) for value in array.reshape(-1)[:FIRST].tolist())


def part_entry(array: np.ndarray) -> str:
    """dtype, shape, sums of the blocks, first values."""
    shape = "x".join(map(str, array.shape))
    sums = "".join(blake(octets(array[rows]), 2) for rows in blocks(array))
    return f"{array.dtype.str[1:]} {shape} {sums or '-'} {first_values(array)}".rstrip()


def entry(results: Results) -> dict[str, str]:
    """What the file says of a case: the hash under "", and each part."""
    whole = hashlib.blake2b(digest_size=16)
    for name, array in results.items():
        content = octets(array)
        whole.update(f"{name} {array.dtype.name} {array.shape} {len(content)}\n".encode() + content)
    return {"": whole.hexdigest(), **{name: part_entry(array) for name, array in results.items()}}


def difference(expected: dict[str, str], results: Results) -> str | None:
    """Where the results of a case first differ from the file; None if every bit is the same."""
    found = entry(results)
    if found == expected:
        return None
    for name in expected:
        if name and found.get(name) != expected[name]:
            return f"part {name!r} of {[*found][1:]}: {_place(expected[name], found.get(name), results.get(name))}"
    return f"the hash is {found['']} instead of {expected['']}, and all parts look the same"


def _place(expected: str, found: str | None, array: np.ndarray | None) -> str:
    """In which block of a part the first difference is, with the first values of both."""
    if found is None or array is None:
        return "it is missing"
    there, here = expected.split(" ", 3), found.split(" ", 3)
    if there[:2] != here[:2]:
        return f"{here[0]} of shape {here[1]} instead of {there[0]} of shape {there[1]}"
    wrong = [rows for n, rows in enumerate(blocks(array)) if here[2][4 * n : 4 * n + 4] != there[2][4 * n : 4 * n + 4]]
    rows = ", ".join(f"{each.start} to {each.stop - 1}" for each in wrong)
    shown = ", its first values were {} and are {}".format(*(" ".join(each[3:]) for each in (there, here)))
    return f"rows {rows} of {len(array)} differ{shown if there[3:] != here[3:] else ', its first values are the same'}"


def read() -> dict[str, dict[str, str]]:
    return json.loads(FILE.read_text())


def write() -> None:
    """A line for each case, by name."""
    entries = {name: json.dumps(entry(CASES[name]()), separators=(",", ":")) for name in sorted(CASES)}
    lines = [f"{json.dumps(name)}: {text}" for name, text in entries.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare what dps computes with golden.json, or write that file.")
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("part", nargs="?", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    if options.write:
        write()
        return 0
    golden = read()
    names = [name for name in sorted(CASES) if options.part in name]
    wrong = [(name, text) for name in names if (text := difference(golden.get(name, {"": ""}), CASES[name]()))]
    print(*(f"{name}: {text}" for name, text in wrong), f"{len(wrong)} of {len(names)} cases differ", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
