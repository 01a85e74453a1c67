"""The pages on the design name files that there are, and walks that are real."""

from __future__ import annotations

import re
from pathlib import Path

import dask
import pytest
import walks
from rules import each
from walks import Seen

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"
PAGES = [PAGE, *sorted((ROOT / "docs" / "design").glob("*.md"))]
FOLDERS = ("dps", "tests", "docs", "benchmarks", "examples")
FILE = re.compile(r"\b(?:[a-z_]+/)*[a-z_]+\.(?:pyx|py|h)\b")
WALKS = {"push": 9, "tick": 12, "failover": 22}  # with the number of files: lower one when a walk gets shorter
# Files in which a thread or an event loop begins, so that no file above calls them.
LOOPS = {"wire/connection.py", "wire/link.py"}
BEGIN = {
    "push": LOOPS,
    "tick": LOOPS,
    "failover": LOOPS | {"controller/plugin.py", "client/plain.py", "client/session.py"},
}


def absent(text: str) -> list[str]:
    """The files that a page names and that there are not; a file of dps is named as room/file.py."""
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if FILE.fullmatch(path.name)}
    paths = {name for name in FILE.findall(text) if "/" in name}
    places = [ROOT, ROOT / "dps", ROOT / "dps" / "engine"]
    wrong = {name for name in paths if not any((place / name).exists() for place in places)}
    return sorted(wrong | {name for name in FILE.findall(text) if "/" not in name and name not in names})


@each(PAGES)
def test_the_pages_name_no_file_that_is_gone(page):
    assert not absent(page.read_text())


def test_what_is_absent():
    assert absent("`state/shard.py`, `shard.py`, `tests/helpers/walks.py`") == []
    assert absent("`state/nothing.py`, `wire/shard.py`, `nothing.py`") == [
        "nothing.py",
        "state/nothing.py",
        "wire/shard.py",
    ]


# ---- The walks


def walk(name: str) -> list[str]:
    """The files of a walk on the page, in order."""
    (section,) = re.findall(rf"^## The walk of a {name}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)


def problems(name: str, files: list[str], traced: tuple) -> list[str]:
    """What is wrong with a walk, beside what was traced: the files it must and may name, and the callers of each."""
    must: set[str] = traced[0][name]
    may: dict[str, Seen] = traced[1][name]
    texts = [f"{file}: the walk does not go there" for file in files if file not in may]
    texts += [f"{file}: the walk leaves it out" for file in sorted(must - set(files))]
    texts += [f"{file}: stands there twice" for file in sorted(set(files)) if files.count(file) > 1]
    for n, file in enumerate(files):
        if file in may and n and file not in BEGIN[name] and not may[file].callers & set(files[:n]):
            texts.append(f"{file}: no file above calls it, but {sorted(may[file].callers)}")
    return texts


@pytest.fixture(scope="module")
def traced():
    with dask.config.set({"dps.scheduler.grace": "0 s"}):  # the page tells how a journal comes in
        return walks.walks()


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_goes_through_the_files_that_run(name, traced):
    assert not problems(name, walk(name), traced)


@pytest.mark.parametrize("name", WALKS)
def test_a_wrong_walk_is_caught(name, traced):
    files = walk(name)
    for n, file in enumerate(files):
        if file in traced[0][name]:
            assert problems(name, files[:n] + files[n + 1 :], traced), f"without {file}"
    for stray in ("deploy/yarn.py", "coordination/leases.py", "client/nothing.py"):
        assert problems(name, [files[0], stray, *files[1:]], traced) == [f"{stray}: the walk does not go there"]
    assert f"{files[0]}: stands there twice" in problems(name, [*files, files[0]], traced)
    assert problems(name, files[::-1], traced)


@pytest.mark.parametrize("name", WALKS)
def test_the_page_says_how_long_a_walk_is(name):
    assert len(walk(name)) == WALKS[name]
    assert f"A {name} walks through {WALKS[name]} files" in " ".join(PAGE.read_text().split())


FIT = 14  # files of the library before the first pull: lower it when the walk gets shorter


def test_a_fit_walks_through_the_files_that_the_page_names():
    (section,) = re.findall(r"^## The walk of a fit\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)
    seen = walks.files_of_fit()
    assert len(seen) > 8, "the recorder sees a fit"
    assert sorted(files) == sorted(seen)
    assert len(files) == FIT
    assert f"A fit walks through {FIT} files" in section


def test_what_a_walk_leaves_out_exists():
    assert not [file for file in walks.LEFT_OUT if not (ROOT / "dps" / "engine" / file).exists()]
