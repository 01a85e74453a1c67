"""The array API standard, function by function: what the page says of it is what the code does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import array_api
import numpy as np
import pytest
from array_api import NAMES, STANDARD, difference, lacking, report
from memory_store import MemoryStore

from dps.arrays import ArrayNamespace, Space

PAGE = Path(__file__).parents[2] / "docs" / "arrays.md"
BEGIN, END = "<!-- standard -->\n", "<!-- end of standard -->\n"
SECTIONS = ("functions, constants, dtypes", "linalg", "fft")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    xp = ArrayNamespace(Space(MemoryStore(3)))
    return report(xp, xp.asarray)


def section(name: str) -> str:
    return name.partition(".")[0] if "." in name else SECTIONS[0]


def table(found: dict[str, str]) -> str:
    """Section by section, how many names pass, and which do not."""
    lines = ["| section | pass | in part | not there |", "| --- | --- | --- | --- |"]
    for part in SECTIONS:
        names = [name for name in NAMES if section(name) == part]
        passing = Counter(not found[name] for name in names)[True]
        missing = [name for name in names if re.search("^missing$|does not compute on the servers", found[name])]
        partial = [name for name in names if found[name] and name not in missing]
        cells = [", ".join(f"`{name.partition('.')[2] or name}`" for name in group) for group in (partial, missing)]
        lines.append(f"| {part} | {passing} of {len(names)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_code_does(found):
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(found), f"put this there:\n{table(found)}"


def test_what_fails_is_refused_and_never_wrong(found):
    wrong = {name: text for name, text in found.items() if text and text != "missing" and "Error: " not in text}
    assert not wrong


def test_numpy_passes_but_for_what_it_calls_otherwise():
    """The oracle itself: numpy follows the standard, but for parameters that it has not."""
    wrong = {name: text for name, text in report(np, np.asarray).items() if text}
    assert wrong == {
        "argsort": "no parameter descending",
        "sort": "no parameter descending",
        "fft.fftfreq": "no parameter dtype",
        "fft.rfftfreq": "no parameter dtype",
    }


class Wrong:
    """A namespace with a function that gives another dtype, shape or number, lacks a parameter, or is not there."""

    def __init__(self, **functions):
        self.functions = functions

    def __getattr__(self, name):
        if name.startswith("__") or self.functions.get(name, 1) is None:
            raise AttributeError(name)
        return self.functions.get(name, getattr(np, name))


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("sqrt", lambda x, /: np.sqrt(x).astype("f8"), "float64 .* instead of float32"),
        ("sqrt", lambda x, /: np.sqrt(x) * 1.001, "other values"),
        ("sqrt", lambda x, /: np.sqrt(x)[:-1], "instead of"),
        ("sqrt", lambda x, /: 1 / 0, "ZeroDivisionError"),
        ("sum", lambda x, /, *, axis=None, keepdims=False: np.sum(x), "no parameter dtype"),
        ("sum", lambda x, /, *, axis=None, dtype=None, keepdims=False: np.sum(x, dtype=dtype), "instead of|other"),
        ("sort", None, "missing"),
    ],
)
def test_wrong_variants_are_noticed(name, function, words, monkeypatch):
    cases = [each for each in array_api.elementwise() if each[0] == name]
    cases += [each for each in array_api.reductions() if each[0] == name]
    monkeypatch.setattr(array_api, "elementwise", lambda: cases)
    monkeypatch.setattr(array_api, "reductions", list)
    monkeypatch.setattr(array_api, "written", list)
    xp = Wrong(**{name: function})
    monkeypatch.setattr(array_api, "STANDARD", [line for line in STANDARD if line.startswith(f"{name}(")])
    monkeypatch.setattr(array_api, "NAMES", [name])
    (text,) = report(xp, np.asarray).values()
    assert re.search(words, text), text


@pytest.mark.processes
def test_the_module_for_the_suite_of_the_standard_makes_arrays():
    """On a real cluster: hypothesis draws arrays through the namespace's own functions, as that suite does."""
    import array_api_module as xp
    from hypothesis import given, settings
    from hypothesis.extra.array_api import make_strategies_namespace

    xps = make_strategies_namespace(xp)

    @settings(max_examples=10, deadline=None)
    @given(xps.arrays(xps.real_dtypes(), xps.array_shapes(max_dims=2, max_side=5)))
    def summed(x):
        values = x.to_numpy()
        assert (x.dtype, x.shape) == (values.dtype, values.shape)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(xp.maximum(x, -x).to_numpy(), np.maximum(values, -values))

    try:
        summed()
    finally:
        xp.close()


def test_the_oracles_parts():
    assert difference([np.ones(2)], [np.ones(2)]) == ""
    assert "other values" in difference(np.ones(2), np.zeros(2))
    assert lacking(np, "sqrt(x, /)") == ""
    assert len(STANDARD) == len(set(NAMES)) == 191
