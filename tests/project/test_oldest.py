"""setup.cfg, the Makefile, README and environment.yml say the same of Pythons and of the oldest releases."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import oldest
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OF_USERS = ["complete", "spark", "yarn"]
# conda-forge's names, where they are not PyPI's.
ON_CONDA = {"prometheus-client": "prometheus_client", "xxhash": "python-xxhash"}
# The oldest releases that SPEC 0 asks for on 2026-11-22. No lower bound may be above them.
SUPPORTED = dict.fromkeys(("dask", "distributed"), "2024.12") | {
    "bokeh": "3.7",
    "ipython": "8.30",
    "numpy": "2.2",
    "pandas": "2.3",
    "pyarrow": "18.1",
    "scikit-learn": "1.6",
    "scipy": "1.15",
    "uvloop": "0.22",
}


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def makefile(variable: str) -> list[str]:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    return re.search(rf"^{variable} [?:]= (.*)$", text, re.M)[1].split()


def test_the_lower_bounds_are_no_higher_than_what_is_supported():
    bounds = oldest.bounds(OF_USERS)
    assert not {name for name, least in SUPPORTED.items() if number(bounds[name]) > number(least)}


def test_the_oldest_releases_are_those_of_setup_cfg():
    lines = oldest.oldest(["test"])
    assert "numpy==" + oldest.bounds([])["numpy"] in lines
    assert not [line for line in lines if "==" not in line or ">=" in line]
    left_out = oldest.bounds(OF_USERS).keys() - oldest.bounds(["test"]).keys()
    assert left_out == {"pyspark"}, "this and no other is not tried with its oldest release"
    printed = subprocess.run([sys.executable, oldest.__file__], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == lines


def test_what_a_build_needs_has_the_same_bounds():
    """And the tests have it: they compile, and build in the environment that they run in."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {name for name, _, _ in (need.partition(">=") for need in needed)} == {"cython", "numpy", "setuptools"}
    bounds = oldest.bounds(["test"])
    assert {need: f"{need.partition('>=')[0]}>={bounds[need.partition('>=')[0]]}" for need in needed} == {
        need: need for need in needed
    }


def test_there_are_no_upper_bounds():
    assert not [m[0] for m in oldest.requirements(OF_USERS) if re.search("<|~=|==", m[0].split(";")[0])]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("numpy", "numpy has no lower bound"),
        ("numpy>=2\n    numpy>=3", "two lower bounds, 2 and 3"),
        ("a b>", "'a b>'"),
    ],
)
def test_bounds_that_cannot_be_tested(tmp_path, lines, problem):
    setup = tmp_path / "setup.cfg"
    setup.write_text(f"[options]\ninstall_requires =\n    {lines}\n")
    with pytest.raises(ValueError, match=problem):
        oldest.bounds([], setup)


def test_an_extra_of_dps_stands_for_what_it_brings():
    assert {"scipy", "tqdm"} <= oldest.bounds(["complete"]).keys()
    assert "dps" not in oldest.bounds(["complete"])


def test_the_environment_for_conda_is_the_extra_complete():
    packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "c-compiler" in packages, "for `pip install --no-deps .`"
    stated = dict(package.split(">=") for package in packages if package not in {"pip", "c-compiler"})
    assert f">={stated.pop('python')}" == SETUP["options"]["python_requires"]
    assert stated == {ON_CONDA.get(name, name): least for name, least in oldest.bounds(["complete"]).items()}


def test_the_environment_for_developers_installs_as_make_does():
    packages = yaml.safe_load((ROOT / "environment-dev.yml").read_text())["dependencies"]
    assert packages[-1] == {"pip": [f"--editable .[{makefile('EXTRAS')[0]}]"]}
    assert f"python{SETUP['options']['python_requires']}" in packages


def test_readme_classifiers_and_ci_name_the_same_pythons():
    whole = re.search(r"find-python (3\.\d+)", (ROOT / ".ci" / "run").read_text())[1]
    tested = sorted([whole, *makefile("PYTHONS")], key=number)
    classifiers = re.findall(r"Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.M)
    assert classifiers == tested
    assert SETUP["options"]["python_requires"] == f">={tested[0]}"
    assert f"Python {tested[0]} to {tested[-1]} on Linux or macOS." in (ROOT / "README.md").read_text()
    commands = (ROOT / ".ci" / "run").read_text().split()
    assert {"test-pythons", "test-oldest-quickly", "test"} <= set(commands)


@pytest.mark.parametrize("variable", ["PORTABLE", "SENSITIVE"])
def test_the_tests_of_a_list_are_there(variable):
    assert not [name for name in makefile(variable) if not list((ROOT / "tests").rglob(f"test_{name}.py"))]


def test_a_python_is_found_or_not():
    find = ROOT / ".ci" / "find-python"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    finished = subprocess.run([find, version], capture_output=True, text=True, check=False)
    if finished.returncode == 0:  # one that is neither on the path nor pyenv's may run this
        stated = subprocess.run([finished.stdout.strip(), "-V"], capture_output=True, text=True, check=True).stdout
        assert stated.startswith(f"Python {version}.")
    nowhere = subprocess.run([find, "3.99"], capture_output=True, text=True, check=False)
    assert (nowhere.returncode, nowhere.stdout) == (1, "")


FAKE_MAKE = """#!/usr/bin/env bash
echo "$@" >>calls
mkdir -p .pytest_cache/v/cache
{failures}
[[ $2 == ARGS=--last-failed ]] && exit {second}
exit {first}
"""


@pytest.mark.parametrize(
    ("failed", "first", "second", "calls", "status"),
    [(0, 0, 1, 1, 0), (1, 2, 0, 2, 0), (3, 2, 2, 2, 2), (4, 2, 0, 1, 2), (0, 2, 0, 1, 2)],
    ids=["all pass", "a failure that passes then", "failures that stay", "too many", "no test ran"],
)
def test_ci_runs_few_failures_again(tmp_path, failed: int, first: int, second: int, calls: int, status: int) -> None:
    (tmp_path / ".ci").mkdir()
    again, make = tmp_path / ".ci" / "again", tmp_path / "make"
    shutil.copy(ROOT / ".ci" / "again", again)
    names = json.dumps({f"tests/test_x.py::test_{n}": True for n in range(failed)}, indent=2)
    write = f"echo '{names}' >.pytest_cache/v/cache/lastfailed" if failed else ""
    make.write_text(FAKE_MAKE.format(failures=write, first=first, second=second))
    make.chmod(0o755)
    done = subprocess.run([again, "./make", "test"], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert (tmp_path / "calls").read_text().splitlines() == ["test", "test ARGS=--last-failed"][:calls]
    assert ("test_x.py::test_0" in done.stdout) == (calls == 2)
