"""The table of what is supported, on docs/arrays.md, is that of the code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dps.arrays import namespace
from dps.arrays.array import FUNCTIONS, REDUCED
from dps.arrays.matrix import PSMatrix
from dps.arrays.operations import UFUNCS
from dps.arrays.sparse_vector import PSSparseVector
from dps.arrays.vector import PSVector

PAGE = Path(__file__).parents[2] / "docs" / "arrays.md"
BEGIN, END = "<!-- supported -->\n", "<!-- end -->\n"


def public(owner: type) -> list[str]:
    return sorted(name for name in dir(owner) if not name.startswith("_"))


def named(function) -> str:
    module = (function.__module__ or "numpy").removeprefix("numpy").lstrip(".")
    return f"{module}.{function.__name__}" if module == "linalg" else function.__name__


def table() -> str:
    functions = sorted({named(function) for function in FUNCTIONS})
    rows = {
        "ufuncs": sorted(UFUNCS),
        "ufuncs with `.reduce`": sorted(REDUCED),
        "functions of numpy": functions,
        "of `PSVector`": public(PSVector),
        "further of `PSMatrix`": sorted({*public(PSMatrix)} - {*public(PSVector)}),
        "further of `PSSparseVector`": sorted({*public(PSSparseVector)} - {*public(PSVector)}),
        "of `xp`": sorted(set(dir(namespace.ArrayNamespace)) - set(dir(object)) | set(namespace.SHARED)),
    }
    lines = ["| what | names |", "| --- | --- |"]
    for what, names in rows.items():
        lines.append(f"| {what} | {', '.join(f'`{name}`' for name in names if not name.startswith('_'))} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_code():
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), f"put this there:\n{table()}"


def test_what_is_listed_of_the_namespace_is_there():
    assert not [name for name in namespace.SHARED if not hasattr(np, name)]
