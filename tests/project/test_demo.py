"""The demo on few rows: what it prints, that it ends, and that the README shows the same."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transcripts import steps

ROOT = Path(__file__).parents[2]


def shape(lines: list[str]) -> list[str]:
    """Lines without numbers, and none twice in a row: of epochs, as many as there are."""
    masked = [" ".join(re.sub(r"\d[\d.,]*", "N", line).split()) for line in lines]
    return [line for line, _ in itertools.groupby(line for line in masked if line not in ("", "..."))]


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "examples.demo", "--rows", "20000", "--epochs", "3"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)
    if "themis" in run.stderr:
        pytest.skip("the package with the data set is not installed")
    return run


def test_the_demo(run):
    assert run.returncode == 0, run.stderr
    lines = run.stdout
    assert "20,000 rows to train on, 20,000 to test" in lines
    losses = [float(loss) for loss in re.findall(r"epoch \d: training loss (0\.\d{4})", lines)]
    assert len(losses) == 3
    assert losses[0] > losses[2]
    words = ("computing", "pulling", "waiting", "pushing", "packing")
    shares = re.search("trainers' time: " + ", ".join(rf"(\d+)% {word}" for word in words), lines)
    assert 98 <= sum(map(int, shares.groups())) <= 102
    results = re.findall(
        r"^  (dps|scikit-learn)[^|\n]*? +(0\.\d{4}) +(0\.\d{4}) +(\d+\.\d s) +(\d+\.\d s)$", lines, re.M
    )
    assert [name for name, *_ in results] == ["dps", "dps", "scikit-learn", "scikit-learn"]
    (first, first_area), (exact, exact_area), *theirs = [(float(loss), float(area)) for _, loss, area, *_ in results]
    assert first < 1.05 * min(loss for loss, _ in theirs)
    assert first_area > 0.99 * max(area for _, area in theirs)
    (their_exact, their_area) = theirs[-1]
    assert (exact, exact_area) == (pytest.approx(their_exact, abs=1e-3), pytest.approx(their_area, abs=1e-3))
    better = "dps, L-BFGS" if exact < first else "dps, Adagrad"
    assert re.search(
        rf"^{better} has the smaller log-loss: of the 200 test rows .* \d\d\.\d% are positive$", lines, re.M
    )
    assert max(map(len, lines.splitlines())) <= 100
    assert "training:" not in run.stderr, "a progress bar, where the output is no terminal"
    assert "Sending large graph" not in run.stderr
    assert f'File "{ROOT}/dps/' not in run.stderr, "a traceback; Dask's own may come when it closes, on a busy machine"


def test_the_readme_shows_a_run(run):
    (shown,) = [step.output for step in steps((ROOT / "README.md").read_text()) if step.command == "make demo"]
    installing = shown.index("")
    assert shape(shown[installing:]) == shape(run.stdout.splitlines())
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    assert not [line for line in shown[:installing] if f'echo "{line}"' not in makefile]
