"""A test that hangs ends with the stacks of its threads, also where the signal of pytest-timeout is lost."""

from __future__ import annotations

import pathlib

import pytest

TESTS = pathlib.Path(__file__).parents[1]
# As Hypothesis and a callback of uvloop do, this loses the exception of the signal.
HANGS = """
    import pathlib, threading

    def begin(name):
        with pathlib.Path("begun").open("a") as file:
            print(name, file=file)

    def test_that_goes_on():
        begin("first")
        while True:
            try:
                threading.Event().wait()
            except BaseException:
                pass

    def test_after_it():
        begin("second")
"""
FAILS_AND_HANGS = """
    import pytest, threading

    @pytest.fixture
    def endless():
        yield
        threading.Event().wait()

    def test_of_a_fixture(endless):
        assert False

    def test_after_it(): pass
"""
HANGS_AT_THE_END = """
    import atexit, threading

    atexit.register(threading.Event().wait)

    def test_it(): pass
"""
# An error in a hook is one of pytest itself; an exit with a status of its own ends one process only.
BREAKS_PYTEST = """
    class Broken:
        def pytest_runtest_logfinish(self):
            raise RuntimeError("an error in a hook")

    def test_it(request):
        request.config.pluginmanager.register(Broken())

    def test_after_it(): pass
"""
LEAVES = """
    import pytest

    def test_it():
        pytest.exit("this process only", returncode=7)

    def test_after_it(): pass
"""
LIMITS = {"MORE_SECONDS = 30.0\n": "MORE_SECONDS = 2.0\n", "LAST_SECONDS = 120.0\n": "LAST_SECONDS = 10.0\n"}
WORKERS = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "3")


@pytest.fixture
def run(pytester, monkeypatch):
    """Run files of tests with the real conftest, whose limits are short."""
    text = TESTS.joinpath("conftest.py").read_text()
    for limit, short in LIMITS.items():
        assert limit in text
        text = text.replace(limit, short)
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "helpers"))
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "spawn")
    pytester.makeconftest(text)
    pytester.makeini("[pytest]\ntimeout = 3\nmarkers = leaks_ok(reason): x")

    def run(*options: str, **files: str):
        pytester.makepyfile(**files)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options, timeout=100)

    return run


@pytest.mark.thorough
def test_the_process_of_a_test_that_hangs_is_replaced_and_goes_on_after_it(run, pytester):
    result = run(*WORKERS, test_lost=HANGS, test_fixture=FAILS_AND_HANGS)
    result.assert_outcomes(failed=3, passed=2)
    for seconds, file, function in ((5, "lost", "test_that_goes_on"), (10, "fixture", "endless")):
        result.stderr.fnmatch_lines([f"Timeout (0:00:{seconds:02d})!", f"*test_{file}.py*in {function}"])
        result.stdout.fnmatch_lines([f"worker 'gw?' crashed while running 'test_{file}.py::*"])
    assert pytester.path.joinpath("begun").read_text().split() == ["first", "second"]


@pytest.mark.thorough
def test_what_hangs_after_all_tests_ends_and_fails(run):
    result = run(test_end=HANGS_AT_THE_END)
    result.assert_outcomes(passed=1)
    assert result.ret == 1
    result.stderr.fnmatch_lines(["Timeout (0:00:10)!"])


@pytest.mark.thorough
def test_other_processes_go_on_where_the_session_of_one_ends(run):
    result = run(*WORKERS, test_broken=BREAKS_PYTEST, test_leaves=LEAVES)
    result.assert_outcomes(failed=2, passed=3)  # a test was reported as passed before the hook after it failed
    result.stderr.fnmatch_lines(["INTERNAL ERROR of a worker, which ends:", "*RuntimeError: an error in a hook"])
    for name in ("broken", "leaves"):
        result.stdout.fnmatch_lines([f"worker 'gw?' crashed while running 'test_{name}.py::test_it'"])


@pytest.mark.thorough
def test_a_failure_takes_no_longer_on_machines_of_ci(run, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = run(test_lists="def test_it(): assert [1, 2] == [1, 3]")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Use -v to get more diff"])
