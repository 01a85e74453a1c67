"""What runs the suite of the array API standard: on a small stand-in for its clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import array_api_suite
import pytest
from array_api_suite import PATCH, STUBS, XFAILS

ROOT = Path(__file__).parents[2]
OPTIONS = """
from hypothesis import settings

def pytest_configure():
    settings.register_profile("array-api-tests", max_examples=7)

def pytest_addoption(parser):
    for option in ("--max-examples", "--xfails-file"):
        parser.addoption(option)
    for option in ("--derandomize", "--disable-deadline"):
        parser.addoption(option, action="store_true")
"""
TESTS = """
import os, pathlib
from hypothesis import Phase, settings

def test_lines_are_changed():
    here = pathlib.Path(__file__).parent
    assert "default=(None,)" in (here / "dtype_helpers.py").read_text()
    assert "if dh.complex_dtypes" in (here / "test_signatures.py").read_text()

def test_the_settings_arrive():
    assert os.environ["ARRAY_API_TESTS_MODULE"] == "array_api_module"
    assert settings.default.max_examples == 7
    assert Phase.shrink not in settings.default.phases
"""


def before() -> dict[str, str]:
    """The files that the patch changes, as far as it says what stands in them."""
    files: dict[str, list[str]] = {}
    for line in PATCH.read_text().splitlines():
        if line.startswith("+++ b/"):
            lines = files[line[6:]] = []
        elif found := re.match(r"@@ -(\d+)", line):
            lines.extend(["#"] * (int(found[1]) - 1 - len(lines)))
        elif files and line[:1] in (" ", "-") and not line.startswith("--- "):
            lines.append(line[1:])
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    (folder / STUBS).mkdir(parents=True)
    (folder / "array_api_tests").mkdir()
    for name, text in before().items():
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text(OPTIONS)
    (folder / "array_api_tests" / "test_stand_in.py").write_text(TESTS)
    return folder


def run(clone: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, array_api_suite.__file__, str(clone), "--ignore", "array_api_tests/test_signatures.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def content(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.thorough
def test_the_suite_runs_in_a_changed_copy_and_the_clone_stays_as_it_is(clone):
    was = content(clone)
    done = run(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert content(clone) == was


@pytest.mark.thorough
def test_the_target_fails_when_the_suite_fails(clone):
    test = clone / "array_api_tests" / "test_stand_in.py"
    test.write_text(TESTS + "\ndef test_wrong():\n    assert False\n")
    done = run(clone)
    assert done.returncode == 1, done.stdout + done.stderr
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\narray-api:") :].split("\n\n")[0]
    assert "array_api_suite.py" in recipe
    assert "|| true" not in recipe


def test_what_is_no_clone_is_told(clone, tmp_path):
    (clone / "array_api_tests" / "dtype_helpers.py").write_text("another version\n")
    assert "does not fit this version" in run(clone).stderr
    os.rename(clone / STUBS, clone / "elsewhere")
    assert "git submodule update --init" in run(clone).stderr
    assert "no clone of array-api-tests" in run(tmp_path).stderr


def test_each_expected_failure_has_a_reason():
    groups = XFAILS.read_text().strip().split("\n\n")
    for group in groups:
        assert re.match(r"# [A-Z].*\.", group), f"no reason for {group}"
        names = [line for line in group.splitlines() if not line.startswith("#")]
        assert names == sorted(set(names)), f"not sorted: {names}"
        assert all(line.startswith("array_api_tests/") for line in names)
