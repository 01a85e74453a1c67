"""Run array-api-tests, the suite of the array API standard, on ``dps.arrays.on(ps)``.

``python tests/helpers/array_api_suite.py CLONE [arguments of pytest]`` runs a clone of
https://github.com/data-apis/array-api-tests with its submodule. The clone stays as it is, because the suite runs in a
copy, to which ``array_api_tests.patch`` is applied: two lines that let a namespace have no complex numbers. Failures
that are expected stand with their reasons in ``array_api_tests_xfails.txt``; the exit status is pytest's, so any other
failure is an error.

This module is the suite's plugin, too: failing examples are not made smaller, because most failures are expected, and
each of a thousand smaller examples would go to the servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings

HERE = Path(__file__).resolve().parent
PATCH, XFAILS = HERE / "array_api_tests.patch", HERE / "array_api_tests_xfails.txt"
STUBS = Path("array-api", "src", "array_api_stubs")
EXAMPLES = 20  # that hypothesis draws for each test; the same in each run
SETTINGS = {
    "ARRAY_API_TESTS_MODULE": "array_api_module",
    "ARRAY_API_TESTS_VERSION": "2024.12",
    "ARRAY_API_TESTS_SKIP_DTYPES": "complex64,complex128",
}


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Load the suite's own profile of hypothesis, without the phase in which failing examples are made smaller."""
    own = settings.get_profile("array-api-tests")
    settings.register_profile("array-api-suite", parent=own, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("array-api-suite")


def patched(clone: Path, copy: Path) -> None:
    """Copy the clone, and change the two lines there."""
    if not (clone / "array_api_tests").is_dir():
        raise SystemExit(f"{clone} is no clone of array-api-tests: it has no folder array_api_tests")
    if not (clone / STUBS).is_dir():
        raise SystemExit(f"{clone} has no {STUBS}: run `git submodule update --init` in it")
    shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".hypothesis"))
    # git takes the copy for a part of any repository that it lies in, and would then look for the files there.
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    done = subprocess.run(["git", "apply", str(PATCH)], cwd=copy, env=alone, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{PATCH.name} does not fit this version of array-api-tests:\n{done.stderr}")


def run(clone: Path, arguments: list[str]) -> int:
    """The exit status of pytest, with the expected failures."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "suite")
        patched(clone, copy)
        paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "array_api_tests", "-q", "-rfE", "-p", "no:cacheprovider"]
        command += ["-p", "array_api_suite"]
        command += ["--max-examples", str(EXAMPLES), "--derandomize", "--disable-deadline", "--tb=short"]
        command += ["--xfails-file", str(XFAILS), *arguments]
        env = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=copy, env=env).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(run(Path(sys.argv[1]).resolve(), sys.argv[2:]))
