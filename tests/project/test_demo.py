"""The demo on few rows: what it prints, and that it ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_demo(tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "examples.demo", "--rows", "20000", "--epochs", "3"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)
    if "themis" in run.stderr:
        pytest.skip("the package with the data set is not installed")
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
    assert [name for name, *_ in results] == ["dps", "scikit-learn", "scikit-learn"]
    (ours, our_area), *theirs = [(float(loss), float(area)) for _, loss, area, *_ in results]
    assert ours < 1.05 * min(loss for loss, _ in theirs)
    assert our_area > 0.99 * max(area for _, area in theirs)
    assert max(map(len, lines.splitlines())) <= 100
    assert "training:" not in run.stderr, "a progress bar, where the output is no terminal"
    assert "Sending large graph" not in run.stderr
    assert f'File "{ROOT}/dps/' not in run.stderr, "a traceback; Dask's own may come when it closes, on a busy machine"
