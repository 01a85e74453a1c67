"""The thread of functions: time limits, functions that never end, and no exception after the end."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import pytest
from oracles import mutant
from servers import wait_until

from dps.engine.server import function_thread
from dps.engine.server.beside_thread import Outcome
from dps.engine.server.function_thread import MAX_ABANDONED, FunctionThread, Job
from dps.engine.wire.endpoint import Endpoint
from dps.errors import FunctionTimeoutError, LimitError

LONG = 60.0  # seconds, a limit that does not expire


class Functions:
    """A thread of functions on an endpoint of its own."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("functions", "127.0.0.1", {})
        self.thread = FunctionThread(self.endpoint, "functions-of-test")

    def start(self, work, seconds: float = LONG) -> list[Outcome]:
        """Have it run; where its outcome will be."""
        outcomes: list[Outcome] = []
        self.endpoint.call(self.thread.run, work, seconds, outcomes.append)
        return outcomes

    def run(self, work, seconds: float = LONG) -> Outcome:
        outcomes = self.start(work, seconds)
        wait_until(lambda: outcomes)
        return outcomes[0]

    def close(self) -> None:
        self.endpoint.call(self.thread.close)
        self.endpoint.stop()


@pytest.fixture
def functions():
    made = Functions()
    yield made
    made.close()
    wait_until(lambda: not alive(), what="a thread is left")


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "functions-of-test"]


def fail() -> None:
    raise KeyError("mine")


def endless() -> None:
    for _ in itertools.count():
        pass


def endless_and_deaf() -> None:
    """It catches what it can by accident."""
    while True:
        try:
            endless()
        except Exception:
            pass


def test_what_becomes_of_a_function(functions) -> None:
    assert functions.run(lambda: 5) == Outcome(5, None)
    outcome = functions.run(fail)
    assert outcome.value is None
    assert isinstance(outcome.error, KeyError)
    assert not outcome.abandoned
    assert functions.run(lambda: threading.current_thread().name).value == "functions-of-test"


def test_an_exit_of_a_function_ends_nothing_else(functions) -> None:
    def leave() -> None:
        raise SystemExit

    assert isinstance(functions.run(leave).error, SystemExit)
    assert functions.run(lambda: 5).value == 5


def test_one_after_the_other_in_the_order_of_the_calls(functions) -> None:
    running, order, most = [0], [], [0]

    def work(number: int) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        order.append(number)
        time.sleep(0.001)
        running[0] -= 1

    outcomes = [functions.start(lambda n=n: work(n)) for n in range(20)]
    wait_until(lambda: all(outcomes))
    assert order == list(range(20))
    assert most[0] == 1


@pytest.mark.parametrize("work", [endless, endless_and_deaf], ids=["plain", "catches Exception"])
def test_an_endless_loop_is_interrupted(functions, work) -> None:
    outcome = functions.run(work, 0.05)
    assert isinstance(outcome.error, FunctionTimeoutError)
    assert not outcome.abandoned
    assert "within 0.05 s (dps.timeouts.function)" in str(outcome.error)
    assert functions.run(lambda: 5) == Outcome(5, None), "in the same thread"
    assert len(alive()) == 1


def test_the_time_of_a_function_begins_when_it_runs(functions) -> None:
    """Those that wait for others are not too slow."""
    first = functions.start(lambda: time.sleep(0.3), LONG)
    second = functions.start(lambda: 5, 0.2)
    wait_until(lambda: first and second)
    assert second[0] == Outcome(5, None)


class Stuck:
    """Functions in the middle of a call of C that no exception ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.began = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        self.lock.acquire()
        return "late"


@pytest.fixture
def stuck(monkeypatch):
    monkeypatch.setattr(function_thread, "GRACE_SECONDS", 0.02)
    made = Stuck()
    yield made
    for _ in range(2 * MAX_ABANDONED):
        if alive():
            if made.lock.locked():
                made.lock.release()
            time.sleep(0.02)


def abandon(functions: Functions, stuck: Stuck) -> Outcome:
    """The outcome of one that is stuck; on a busy machine, the time may be over before it begins."""
    while not (outcome := functions.run(stuck, 0.05)).abandoned:
        pass
    return outcome


def test_a_call_of_c_is_abandoned_and_the_next_function_runs_in_another_thread(functions, stuck) -> None:
    assert isinstance(abandon(functions, stuck).error, FunctionTimeoutError)
    assert functions.run(lambda: 5) == Outcome(5, None)
    assert len(alive()) == 2
    stuck.lock.release()
    wait_until(lambda: len(alive()) == 1, what="an abandoned thread ends with its function")
    assert functions.run(lambda: 6).value == 6


def test_one_more_than_may_be_abandoned_is_refused(functions, stuck) -> None:
    for _ in range(MAX_ABANDONED):
        abandon(functions, stuck)
    outcome = functions.run(lambda: 5)
    assert isinstance(outcome.error, LimitError)
    assert "never ended" in str(outcome.error)
    stuck.lock.release()
    wait_until(lambda: len(alive()) < MAX_ABANDONED)
    assert functions.run(lambda: 5).value == 5, "functions that have ended after all no longer count"


def work_of(seconds: float):
    """Work of Python instructions that takes about that long."""

    def work() -> int:
        until, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            count += 1
        return count

    return work


@pytest.mark.thorough
def test_no_exception_arrives_after_the_end(functions) -> None:
    """The limit expires about when the functions end. Each either ends or is too slow, and the thread lives on."""
    failed = []
    hook, threading.excepthook = threading.excepthook, lambda args: failed.append(args)
    try:
        late, seconds = 0, 0.002
        for _ in range(200):
            outcome = functions.run(work_of(seconds), 0.002)
            assert outcome.error is None or isinstance(outcome.error, FunctionTimeoutError)
            late += outcome.error is not None
            seconds *= 1.02 if outcome.error is None else 0.98  # because the timer's resolution differs by machine
        assert functions.run(work_of(0.05)).error is None
    finally:
        threading.excepthook = hook
    assert not failed
    assert len(alive()) == 1
    assert 0 < late < 200, "some were interrupted, and some were not"


def job_of(work) -> Job:
    return Job(work, LONG, lambda outcome: None)


def interrupted_at_the_end() -> None:
    """The limit expires when a job has just ended, or before it has begun."""
    job = job_of(lambda: None)
    job.begin()
    job.end()
    job.interrupt()
    sum(range(100))
    job_of(lambda: None).interrupt()
    sum(range(100))


def begun_too_late() -> None:
    began: list[int] = []
    job = job_of(lambda: began.append(1))
    job.interrupt()
    assert isinstance(function_thread._outcome(job).error, FunctionTimeoutError)
    assert not began


def interrupted_by_itself() -> None:
    """The exception is on its way when the function ends."""
    job = job_of(lambda: None)
    job.begin()
    with pytest.raises(function_thread.TimeIsOver):
        job.interrupt()
    job.interrupt()  # at most once, so that none comes while the first is handled
    sum(range(100))
    job.end()


@pytest.mark.parametrize("check", [interrupted_at_the_end, begun_too_late, interrupted_by_itself])
def test_no_exception_but_while_it_runs(check) -> None:
    check()


WRONG = [
    ("interrupt", "self._thread is not None and not again", "not again", begun_too_late),
    ("interrupt", "again, self._interrupted = self._interrupted, True", "again = False", begun_too_late),
    ("interrupt", " and not again", "", interrupted_by_itself),
    ("end", "self._thread = None", "pass", interrupted_at_the_end),
]


@pytest.mark.parametrize(("method", "old", "new", "check"), WRONG)
def test_an_exception_at_another_time_is_caught(method, old, new, check, monkeypatch) -> None:
    monkeypatch.setattr(Job, method, mutant(getattr(Job, method), old, new))
    with pytest.raises((function_thread.TimeIsOver, AssertionError, TypeError)):
        check()


def test_close_leaves_no_thread() -> None:
    for work in (lambda: 5, endless, None):
        functions = Functions()
        outcomes: list[Any] = [] if work is None else functions.start(work)
        if work not in (None, endless):
            wait_until(lambda outcomes=outcomes: outcomes)
        waiting = functions.start(lambda: 7) if work is endless else []
        functions.close()
        wait_until(lambda: not alive(), what="a thread is left")
        assert not waiting, "what has not begun is dropped"
        assert not outcomes or outcomes[0].value == 5


def test_close_does_not_wait_for_what_cannot_be_interrupted(stuck) -> None:
    functions = Functions()
    outcomes = functions.start(stuck, LONG)
    wait_until(stuck.began.is_set)
    functions.close()
    assert len(alive()) == 1
    assert not outcomes
    stuck.lock.release()
    wait_until(lambda: not alive())


def test_python_does_not_go_on_to_look_for_exceptions(functions) -> None:
    """A flag of Python that stays set would slow all threads down, and a traced function would never begin."""
    for _ in range(3):
        functions.run(lambda: 1, 5.0)
    code = compile("def traced():\n    return 1\n", "traced", "exec")
    names: dict = {}
    exec(code, names)
    ended = threading.Event()

    def trace() -> None:
        sys.setprofile(lambda *_: None)
        names["traced"]()
        sys.setprofile(None)
        ended.set()

    threading.Thread(target=trace, daemon=True).start()
    assert ended.wait(10)
