"""Programs without ``if __name__ == "__main__":`` are refused before they start a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dps.engine.deploy import main_guard

ROOT = Path(__file__).parents[2]
SECONDS = 300  # a limit for what hangs, on a busy machine

START = "dps.LocalCluster(servers=1, trainers=1, dashboard_address=None)"
SPARK = """
    class Session:  # all that `dps.spark.start` asks of a session before it starts its servers
        conf = {"spark.driver.host": "127.0.0.1"}
"""


def run(tmp_path: Path, text: str, *, module: bool = False) -> subprocess.CompletedProcess:
    """A program, run as a file or as a module."""
    (tmp_path / "first.py").write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, *(["-m", "first"] if module else [tmp_path / "first.py"])],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.processes
@pytest.mark.parametrize("module", [False, True])
def test_a_program_without_guard_is_refused_before_a_process_starts(tmp_path, module):
    text = f"""
    import dps

    def start():
        return {START}

    with start() as cluster:
        print("started")
    """
    done = run(tmp_path, text, module=module)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dps.errors.UnguardedMainError: ")
    assert "first.py, line 7, starts worker processes outside of `if __name__ ==" in last
    assert "processes=False" in last, "the remedy"
    assert done.stderr.count("Traceback") == 1, "no worker process was started"


@pytest.mark.processes
def test_servers_beside_spark_are_refused_likewise(tmp_path):
    done = run(tmp_path, "import dps\n" + textwrap.dedent(SPARK) + "dps.spark.start(Session)\n")
    assert done.returncode == 1
    assert "UnguardedMainError" in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("Traceback") == 1


@pytest.mark.thorough
@pytest.mark.processes
def test_under_another_condition_the_worker_process_refuses(tmp_path):
    text = f"""
    import sys

    import dps

    if sys.argv:  # true in worker processes as well
        {START}
    """
    done = run(tmp_path, text)
    assert done.returncode == 1
    assert "dps.errors.UnguardedMainError: a worker process has imported this program" in done.stderr
    assert "An attempt has been made to start a new process" not in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        f"""
        import dps

        if __name__ == "__main__":
            with {START}:
                print("started")
        """,
        f"""
        import dps

        def main():
            with {START}:
                print("started")

        __name__ == "__main__" and main()
        """,
        """
        import dps

        with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None):
            print("started")
        """,
    ],
)
@pytest.mark.thorough
def test_programs_that_work_are_not_refused(tmp_path, text):
    done = run(tmp_path, text)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("start()\nif __name__ == '__main__':\n    start()\n    start()\nstart()\n", [3, 4]),
        ("with a:\n    start()\nb = start() if c else d\n", [3]),
        ("match a:\n    case 1:\n        start()\nfor a in b:\n    start()\n", [3]),
    ],
)
def test_which_lines_have_a_condition(tmp_path, text, lines):
    path = tmp_path / "first.py"
    path.write_text(text)
    starting = [n for n, line in enumerate(text.splitlines(), 1) if "start()" in line]
    assert [n for n in starting if main_guard.is_conditional(str(path), n)] == lines


def test_a_program_whose_source_cannot_be_read_is_not_refused(tmp_path):
    assert main_guard.is_conditional(str(tmp_path / "nowhere.py"), 1)
    (tmp_path / "old.py").write_text("print 'of Python 2'")
    assert main_guard.is_conditional(str(tmp_path / "old.py"), 1)
