"""Where the processes of a machine put their sums together: the ends of several processes, each in a thread here."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.engine.client import machine_meeting
from dps.engine.client.environment import ProcessEnvironment
from dps.engine.client.machine_meeting import MachineMeeting
from dps.engine.client.row_cache import PushOutcome
from dps.engine.client.sum_choice import SumChoice
from dps.engine.client.ticket import Ticket
from dps.engine.wire.table_sums import TableSum, joined_sums, pack_sums, unpack_sums
from dps.errors import ProtocolError, StoppedError

TICKET = Ticket("a session", ("127.0.0.1", 1), "0123456789abcdef")
ACKNOWLEDGED, DOUBTFUL = PushOutcome.ACKNOWLEDGED, PushOutcome.DOUBTFUL


def summed(origin, keys, value=1.0):
    rows = np.full((len(keys), 2), value, np.float32)
    return TableSum(np.array([[origin, 0, 0, 0]]), np.asarray(keys, np.int64), rows)


class Processes:
    """Ends of some processes, and what their aggregator sends to the servers."""

    def __init__(self, count, run=1):
        self.ends = [MachineMeeting(TICKET, run) for _ in range(count)]
        self.sent, self.begun = [], []  # sums; processes whose sums have left them
        for end in self.ends:
            end.enter(self)

    def send(self, sums):
        self.sent.append(sums)
        return dict.fromkeys(sums, ACKNOWLEDGED)

    def bring(self, number, clock, sums, send=None, check=lambda: None):
        begin = functools.partial(self.begun.append, number)
        return self.ends[number].bring(clock, sums, begin, send or self.send, check, ProcessEnvironment())

    def together(self, clock, *parts):
        """What each of the processes is told, all of which bring their sums at once."""
        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(lambda n: self.bring(n, clock, parts[n]), range(len(parts))))

    def close(self):
        for end in self.ends:
            end.leave(self)


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(machine_meeting, "STRAGGLER_SECONDS", 20.0)  # because the machine may be busy
    monkeypatch.setattr(machine_meeting, "EXPIRY_SECONDS", 40.0)
    monkeypatch.setattr(machine_meeting, "ANSWER_SECONDS", 60.0)
    processes = Processes(3)
    try:
        for number in range(3):  # the first one is the aggregator, and learns of the others
            assert processes.bring(number, 0, {"w": summed(number, [1])}) is None
        assert not processes.sent
        assert processes.begun == [1, 2], "the sums of the first one have not left it"
        yield processes
    finally:
        processes.close()


def test_one_process_sends_the_sum_of_all(three):
    told = three.together(1, {"w": summed(7, [1, 5])}, {"w": summed(8, [5, 9], 2.0), "v": summed(8, [3])}, {})
    assert told == [{"w": ACKNOWLEDGED, "v": ACKNOWLEDGED}, {"w": ACKNOWLEDGED, "v": ACKNOWLEDGED}, {}]
    (sums,) = three.sent
    assert sums["w"].keys.tolist() == [1, 5, 9]
    assert sums["w"].rows[:, 0].tolist() == [1.0, 3.0, 2.0]
    assert sorted(sums["w"].stamps[:, 0].tolist()) == [7, 8]
    assert sums["v"].stamps[:, 0].tolist() == [8]


def test_a_sum_that_servers_have_not_taken_is_in_doubt(three):
    def fails(sums):
        return {"w": PushOutcome.REFUSED}

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda n: three.bring(n, 1, {"w": summed(n, [1])}, fails), range(3)))
    assert told == [{"w": PushOutcome.REFUSED}, {"w": DOUBTFUL}, {"w": DOUBTFUL}]


def test_the_sums_of_a_process_that_comes_too_late_go_back(three):
    three.ends[1].leave(three)
    three.ends[2].leave(three)
    time.sleep(0.05)
    three.ends[1].enter(three)
    assert three.bring(0, 5, {"w": summed(0, [1])}) is None  # it waits for no process that has gone
    assert three.bring(1, 5, {"w": summed(1, [1])}) is None
    assert three.bring(1, 4, {"w": summed(1, [1])}) is None
    assert not three.sent


def test_another_process_takes_over(three):
    three.ends[0].leave(three)
    assert three.bring(1, 1, {"w": summed(1, [1])}) in ({"w": DOUBTFUL}, None)  # its connection is there no more
    three.ends[2].leave(three)
    three.ends[2].enter(three)
    others = Processes(2, run=1)
    others.ends[0] = three.ends[2]
    try:
        assert others.bring(0, 2, {"w": summed(2, [1])}) is None  # it is the aggregator now
        assert others.bring(1, 2, {"w": summed(3, [1])}) is None
        told = others.together(3, {"w": summed(2, [1])}, {"w": summed(3, [1])})
        assert told == [{"w": ACKNOWLEDGED}] * 2
    finally:
        others.close()


def test_sums_for_which_the_aggregator_does_not_come_go_back(three, monkeypatch):
    monkeypatch.setattr(machine_meeting, "EXPIRY_SECONDS", 0.05)
    assert three.bring(1, 1, {"w": summed(1, [1])}) is None
    told = three.together(1, {"w": summed(0, [1])}, {"w": summed(1, [1])}, {"w": summed(2, [1])})
    assert told == [{"w": ACKNOWLEDGED}] * 3
    (sums,) = three.sent
    assert sums["w"].stamps[:, 0].tolist().count(1) == 1


def test_a_trainer_that_is_stopped_leaves_nothing_behind(three):
    def stopped():
        raise StoppedError("the run was stopped")

    for number in (0, 1):
        with pytest.raises(StoppedError):
            three.bring(number, 1, {"w": summed(number, [1])}, check=stopped)
    parts = [{"w": summed(number, [1])} for number in range(3)]
    three.together(2, *parts)  # which may not wait for the process that has broken its connection
    assert three.together(3, *parts) == [{"w": ACKNOWLEDGED}] * 3


def test_an_answer_that_never_comes_leaves_the_sum_in_doubt(three, monkeypatch):
    monkeypatch.setattr(machine_meeting, "ANSWER_SECONDS", 0.05)
    goes_on = threading.Event()
    three.ends[2].leave(three)
    time.sleep(0.05)

    def send(sums):
        assert goes_on.wait(20)
        return three.send(sums)

    with ThreadPoolExecutor(2) as pool:
        aggregator = pool.submit(three.bring, 0, 1, {"w": summed(0, [1])}, send)
        assert three.bring(1, 1, {"w": summed(1, [1])}) == {"w": DOUBTFUL}
        assert three.bring(1, 2, {"w": summed(1, [1])}) is None  # for a while it sends its own
        goes_on.set()
        assert aggregator.result(20) == {"w": ACKNOWLEDGED}


def test_without_unix_sockets_each_process_sends_its_own():
    with dask.config.set({"dps.unix-sockets": False}):
        processes = Processes(2, run=2)
        for clock in range(2):
            assert processes.together(clock, {"w": summed(0, [1])}, {"w": summed(1, [1])}) == [None, None]
        processes.close()


def test_another_run_has_another_aggregator(three):
    others = Processes(1, run=2)
    assert others.bring(0, 1, {"w": summed(9, [1])}) is None
    others.close()


# ---- What travels


@given(
    st.lists(
        st.dictionaries(st.sampled_from("uvw"), st.dictionaries(st.integers(0, 20), st.integers(-9, 9), min_size=1)),
        max_size=4,
    )
)
def test_joined_sums_are_those_of_dicts(parts):
    given = [
        {
            table: TableSum(np.array([[n, 0, 0, 0]]), np.sort([*rows]), np.array([[rows[k]] for k in sorted(rows)]))
            for table, rows in part.items()
        }
        for n, part in enumerate(parts)
    ]
    travelled = []
    for part in given:
        text_bytes, pieces = pack_sums(part)
        travelled.append(unpack_sums(text_bytes, memoryview(b"".join(bytes(memoryview(each)) for each in pieces))))
    joined = joined_sums(travelled)
    for table in set().union(*parts):
        expected: dict[int, int] = {}
        for part in parts:
            for key, value in part.get(table, {}).items():
                expected[key] = expected.get(key, 0) + value
        assert joined[table].keys.tolist() == sorted(expected)
        assert joined[table].rows[:, 0].tolist() == [expected[key] for key in sorted(expected)]
        assert joined[table].stamps[:, 0].tolist() == [n for n, part in enumerate(parts) if table in part]


@pytest.mark.parametrize(
    "wrong",
    [
        summed(1, [1])._replace(keys=np.array([1, 2])),
        summed(1, [1])._replace(keys=np.array([1.0])),
        summed(1, [1])._replace(stamps=np.array([[1, 0, 0]])),
        summed(1, [1])._replace(rows=np.float32([1.0])),
        summed(1, []),
    ],
    ids=["keys", "dtype", "stamps", "rows", "nothing"],
)
def test_other_arrays_are_refused(wrong):
    text_bytes, pieces = pack_sums({"w": wrong})
    with pytest.raises(ProtocolError, match="'w'"):
        unpack_sums(text_bytes, memoryview(b"".join(bytes(memoryview(each)) for each in pieces)))


# ---- Whether it pays


@pytest.mark.parametrize("costs", [(1.0, 1.3), (1.3, 1.0), (1.0, 1.1), (1.1, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_of_a_process_is_the_faster_way(costs, seed):
    draw, choice, now = np.random.default_rng(seed), SumChoice(), 0.0
    for clock in range(2000):
        pause = 5.0 if draw.random() < 0.01 else 0.0
        now += costs[0 if choice.ended(clock, now) else 1] * draw.uniform(0.9, 1.1) + pause
    assert choice.chosen == ("as sums of a process" if costs[0] < costs[1] else "push by push")
    assert set(choice.found()) == {"as sums of a process", "push by push"}
