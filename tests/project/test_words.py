"""The words of the code: comments and docstrings that a reader understands, class names that mean one thing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rules import each

import dps
from dps.engine.coordination.clock import Clock
from dps.engine.dashboard.pages.trainers import ClocksPlot
from dps.engine.dashboard.text import STALENESS_RULE

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT / "dps").as_posix(): path for path in sorted((ROOT / "dps").rglob("*.py"))}

# Parties and machines are "it"; people may be "who".
PEOPLE = r"(?:users?|people|readers?|callers?|authors?|person|operators?|administrators?|anyone|those)"
PRONOUN = re.compile(r"\b(?:whoever|whom|somebody|someone|nobody|everybody|everyone)\b", re.I)
ONE = re.compile(r"(?:^|[.:;] )One (?:is|has|can|that|may|needs|must|does|will|of|who|which|knows|goes|says)\b")
FILLERS = "a an the of to for in on at is are be it its this that with and or by as from what which how"
STOP = set(re.findall(r"\w+", FILLERS))


@cache
def prose(file: str) -> list[tuple[int, str]]:
    """(line, text) of each comment, and of each line of a docstring; without code in backticks and examples."""
    text = FILES[file].read_text()
    lines = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            if doc:
                first = node.body[0].lineno
                lines += [(first + n, line) for n, line in enumerate(doc.split("\n"))]
    return [(n, re.sub(r"``.*?``|`.*?`|\".*?\"", "", line)) for n, line in lines if not line.strip().startswith(">>>")]


def nounless(line: str) -> bool:
    """Whether a pronoun stands for a party: "who", "nobody", "one"."""
    line = re.sub(rf"\b{PEOPLE},? (?:and \w+ )?who\b", "", line, flags=re.I)
    return bool(PRONOUN.search(line) or re.search(r"\bwho\b", line, re.I) or ONE.search(line.strip()))


def test_the_rule_for_pronouns_itself():
    bad = ["Whoever is left ends.", "told by who waits", "One of the three.", "nobody is dead", "x. One has looked"]
    good = [
        "A user who waits",
        "each one of the servers",
        "whole",
        "The lease of a server whose host is gone",
        "users who",
    ]
    assert [nounless(line) for line in bad] == [True] * len(bad)
    assert [nounless(line) for line in good] == [False] * len(good)


@each(FILES)
def test_parties_are_named(file):
    lines_found = [f"{n}: {line.strip()}" for n, line in prose(file) if nounless(line)]
    assert not lines_found, "say which party, by its noun"


def words(text: str) -> list[str]:
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).replace("_", " ").lower()
    return [re.sub(r"(?:s|ed|ing)$", "", word) for word in re.findall(r"[a-z]+", text) if word not in STOP]


def repeats_name(name: str, doc: str) -> bool:
    """Whether a docstring of one line says nothing that the name does not say."""
    doc = doc.strip()
    return "\n" not in doc and bool(doc) and set(words(doc)) <= set(words(name))


def test_the_rule_for_docstrings_itself():
    assert repeats_name("close_connections", "Close the connections.")
    assert repeats_name("ServerMeter", "The meter of a server.")
    assert not repeats_name("close_connections", "Close the connections that no request uses.")


@each(FILES)
def test_no_docstring_repeats_its_name(file):
    lines_found = []
    for node in ast.walk(ast.parse(FILES[file].read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and repeats_name(node.name, doc):
                lines_found.append(f"{node.lineno}: {node.name}: {doc}")
    assert not lines_found, "say what it is, its unit, why it exists; or nothing"


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for file, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
    assert not {name: files for name, files in places.items() if len(files) > 1}


PLACES_OF_THE_RULE = ["README.md", "docs/consistency.md", "docs/concepts.md", "docs/dashboard.md"]


@pytest.mark.parametrize("page", PLACES_OF_THE_RULE)
def test_what_the_staleness_bounds_is_said_in_one_sentence(page):
    assert STALENESS_RULE in " ".join((ROOT / page).read_text().split())


def test_the_sentence_stands_in_the_docstring_and_on_the_page_too():
    assert STALENESS_RULE in " ".join(dps.ParameterServer.run.__doc__.split())
    assert STALENESS_RULE in ClocksPlot.shows


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_sentence_is_true_of_the_clock(staleness):
    rng, clock, going = np.random.default_rng(staleness), Clock(staleness, 3), {0, 1, 2}
    for n in range(3):
        clock.join(n, 1, 0.0)
    apart = []
    for _ in range(2000):
        n = int(rng.choice(sorted(going)))
        going -= {n}
        going |= set(clock.tick(n, clock.clock_of(n) + 1, 0.0))
        clocks = [clock.clock_of(n) for n in range(3)]
        assert all(clocks[n] - min(clocks) <= staleness for n in going), "they begin an iteration"
        apart.append(max(clocks) - min(clocks))
    assert max(apart) == staleness + 1
