"""Code that others wrote for numpy runs unmodified on vectors of the servers; the page's table of it is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import outside_code
import pytest
from outside_code import TRIALS, VERSIONS, Trial, installed, outcome

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "arrays.md"
BEGIN, END = "<!-- outside -->\n", "<!-- end of outside -->\n"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Of a process of its own, because scipy reads when it is imported whether it is to dispatch by the array API."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, outside_code.__file__]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.package}.{trial.name}")
def test_outside_code_gives_what_it_gives_on_numpy(trial: Trial, outcomes):
    if not installed(trial.package):
        pytest.skip(f"{trial.package} is not installed")
    found = outcomes[f"{trial.package}.{trial.name}"]
    assert found == trial.stays or found.startswith(f"{trial.stays}: "), found


def test_a_wrong_answer_is_noticed():
    """The oracle: a trial whose result differs on the servers, or whose error is another one, is told."""
    wrong = Trial("numpy", "wrong", lambda problem: 1.0 if isinstance(problem.right, np.ndarray) else 2.0, "servers")
    assert outcome(wrong, lambda array: list(np.asarray(array)), []).startswith("differs by 1.0")


def table() -> str:
    """The trials by package and by where vectors stay."""
    lines = [
        "| package | on the servers | works, with copies in the driver | does not work |",
        "| --- | --- | --- | --- |",
    ]
    for package, version in VERSIONS.items():
        columns: dict[str, list[str]] = {"servers": [], "copies": [], "fails": []}
        reasons = dict.fromkeys((each.stays, each.why) for each in TRIALS if each.package == package)
        for stays, why in reasons:
            names = [f"`{t.name}`" for t in TRIALS if (t.package, t.stays, t.why) == (package, stays, why)]
            column = columns.get(stays, columns["fails"])
            column.append(", ".join(names) + (f" ({why})" if why else ""))
        lines.append(f"| {package} {version} | " + " | ".join("; ".join(each) for each in columns.values()) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_trials():
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table(), f"put this there:\n{table()}"
    assert {trial.package for trial in TRIALS} == set(VERSIONS)
