"""For every test: Hypothesis profiles; nothing may be left behind (see leaks.py); a process that hangs ends."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path

# A worker process starts in half of the time where it is forked from one that has imported Dask. Such a process
# cannot be told the number of its threads for linear algebra afterwards, as Dask tells those that it spawns.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")
# The servers of a fit end with it, or each test of an estimator would leave some behind for ten seconds.
os.environ.setdefault("DASK_DPS__TIMEOUTS__REUSE", "0s")
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import dask
import hypothesis
import leaks
import pytest
from distributed.utils import get_mp_context
from hypothesis.internal.conjecture import providers

from dps.engine.wire.endpoint import new_loop

# No test fails because the machine is busy, or because chance made the first examples large or useless; and fixtures
# that all examples of a test share are meant. The quick examples are the same in each run, so that a change is judged
# by itself and not by luck; `make explore` draws others, and more.
QUICK = hypothesis.settings(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
#
# A failing example stays as it was found, because wrong variants fail on purpose, and a smaller example of each would
# cost most of their time. The profile "small" has the same examples, and looks for a smaller one of each failure.
AS_FOUND = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile("small", QUICK, derandomize=True, database=None)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("small"), phases=AS_FOUND)
hypothesis.settings.register_profile("thorough", QUICK, max_examples=2_000, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
hypothesis.settings.load_profile(PROFILE)
if PROFILE != "thorough":
    # Hypothesis draws constants of all files that a process has imported, so that the examples of a test would depend
    # on the tests before it in the same process, and would be others after a change of any constant in any file.
    providers.is_local_module_file = lambda path: False

get_mp_context()  # once it has said what the process imports from which workers are forked, more may be said
multiprocessing.get_context("forkserver").set_forkserver_preload(["distributed", "pandas", "dps", "dps.models"])
new_loop().close()  # the first loop of a process makes a pipe that libuv keeps for ever: that is no leak
os.environ[leaks.MARK] = str(os.getpid())
# On machines of CI pytest shows how whole lists differ, which takes minutes where a wrong variant has 10,000 numbers.
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)
# Every JVM of the tests lives for seconds on few cores, where the second compiler takes half of its time.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto")
collect_ignore_glob = (
    [] if importlib.util.find_spec("pyspark") else ["system/test_spark*.py", "models/test_spark*.py"]
)  # they import it
FAILED = pytest.StashKey[bool]()
# The descriptor of the terminal, because descriptor 2 leads to a file while a test runs.
TERMINAL = pytest.StashKey[int]()
# Whether a worker of pytest-xdist has ended before its time.
DOWN = pytest.StashKey[bool]()
# After so many more seconds than pytest-timeout gives to a test, its process ends.
MORE_SECONDS = 30.0
# The fixtures of a failed test end within so many seconds, and so does what comes after the last test.
LAST_SECONDS = 120.0


# Tests of roles, and simulations, have no journal unless they ask for one: most are about rules that need none, and
# schedules with it are others. All tests with a whole cluster, and all of the documentation, have the default.
WITHOUT_JOURNAL = {"client", "controller", "coordination", "server", "simulator", "training", "wire"}


@pytest.fixture(autouse=True, scope="module")
def scheduler_grace(request):
    with contextlib.ExitStack() as stack:
        if request.path.parent.name in WITHOUT_JOURNAL:
            stack.enter_context(dask.config.set({"dps.scheduler.grace": "0 s"}))
        yield


MARKS = {"spark": 0, "yarn": 0, "processes": 1}  # files with such tests come first, in this order
OTHERS = 2


def pytest_collection_modifyitems(config, items):
    """Tests with Spark and YARN are tests of integration. Files that start processes come first: the quick ones then
    fill what is left of the time of each process.

    The name of a test is the same in each process: with an address in it, `make test` would run nothing.
    """
    turn: dict[Path, int] = {}
    cases: Counter[str] = Counter()
    is_again = config.getoption("lf", False)  # as `.ci/again` runs a command: only cases that have failed are here
    is_rest_again = is_again and config.option.markexpr.startswith("(thorough")
    for item in items:
        if quick := item.get_closest_marker("quick"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > quick.args[0] or is_rest_again:
                item.add_marker("thorough")
        if {"spark", "yarn"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker("integration")
        marked = [MARKS.get(mark.name, OTHERS) for mark in item.iter_markers()]
        turn[item.path] = min([turn.get(item.path, OTHERS), *marked])
    items.sort(key=lambda item: turn[item.path])  # stable: tests of one file stay together
    if wrong := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests with an address in memory, give them ids: {wrong}")


def pytest_collection_finish():
    """Keep the collector away from all modules and tests.

    The fixtures below, and Dask, collect garbage thousands of times, which would take a second each time at the end of
    a long run.
    """
    gc.collect()
    gc.freeze()


# What hangs. The signal of pytest-timeout raises an exception in the main thread. The exception gets lost where
# Hypothesis tries the same example again, and in a callback of uvloop; and pytest-timeout stops with the failure of a
# test. So a thread of C, which needs no interpreter, ends the process some seconds later with the stacks of its
# threads.


def pytest_configure(config):
    config.stash[TERMINAL] = os.dup(2)
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(EndAtInternalErrors(config.stash[TERMINAL]))


def limit(config, seconds):
    """End this process with the stacks of its threads in so many seconds, unless this is called off."""
    faulthandler.dump_traceback_later(seconds, file=config.stash[TERMINAL], exit=True)


def seconds_of(item):
    """The limit that pytest-timeout has for a test; 0: it has none."""
    marker, option = item.get_closest_marker("timeout"), item.config.getoption("timeout", None)
    return float((marker.args[0] if marker else option if option is not None else item.config.getini("timeout")) or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if seconds := seconds_of(item):
        limit(item.config, seconds + MORE_SECONDS)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    return result


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """What a failed test has started ends, too."""
    if isinstance(node, pytest.Item) and seconds_of(node):
        limit(node.config, LAST_SECONDS)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    limit(session.config, LAST_SECONDS)
    if session.config.stash.get(DOWN, False):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


class EndAtInternalErrors:
    """Ends a worker of pytest-xdist at an error of pytest itself, so that another one goes on as after a crash.

    pytest-xdist would end all of them, and of the tests that have not run yet nothing would be known.
    """

    def __init__(self, terminal):
        self._terminal = terminal

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr):
        os.write(self._terminal, f"\nINTERNAL ERROR of a worker, which ends:\n{excrepr}\n".encode())
        os._exit(pytest.ExitCode.INTERNAL_ERROR)


def pytest_unconfigure(config):
    """After its tests, a worker of pytest-xdist waits for the others; then pytest-xdist limits its end."""
    if hasattr(config, "workerinput"):
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """The process that runs all tests fails if a worker has ended by itself, also without a test that fails."""
    if error:
        node.config.stash[DOWN] = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from whole_files import WholeFiles  # only here, because pytest-xdist may be turned off

    return WholeFiles(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:  # its traceback keeps what it used alive, so neither it nor its module is judged
        item.stash[FAILED] = item.parent.getparent(pytest.Module).stash[FAILED] = True
    return report


@pytest.fixture(scope="module", autouse=True)
def no_leaks_of_module(request):
    """After the fixtures of a module are gone, so is everything they and the tests started."""
    before = leaks.snapshot()
    yield
    # Where two default clients were closed in the order of their making, Dask takes the first for its scheduler still.
    dask.config.config.pop("scheduler", None)
    if not request.node.stash.get(FAILED, False):
        _judge("this module", leaks.wait_for_leaks(before, orphans=True))
    # Each scheduler and worker that ran in this process has put its folder there, where each import looks.
    sys.path[:] = [path for path in sys.path if "dask-scratch-space" not in path]
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks(request, no_leaks_of_module):
    """A test ends with the threads, processes, sockets and files it began with."""
    allowed = request.node.get_closest_marker("leaks_ok")
    if allowed:
        assert allowed.args, "leaks_ok needs a reason"
        yield
        return
    before = leaks.snapshot()
    yield
    if not request.node.stash.get(FAILED, False):
        _judge("this test", leaks.wait_for_leaks(before))


def _judge(suspect: str, leaks: list[str]) -> None:
    if leaks:
        pytest.fail(f"{suspect} left behind:\n  " + "\n  ".join(leaks), pytrace=False)
