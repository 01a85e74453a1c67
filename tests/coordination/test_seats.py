"""Which threads trainers take: the rule, its numbers, and runs that start at the same time."""

from __future__ import annotations

import threading
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import dask
import pytest
from distributed import Client, get_worker
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant
from servers import wait_until

import dps
from dps.engine.coordination import seats
from dps.engine.coordination.seats import Reservations, WorkerThreads, choose
from dps.errors import TooFewWorkersError

GO = threading.Event()  # for tasks in this process: they find this very module

# -- the rule

places = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans(), st.booleans()), min_size=0, max_size=6
).map(
    lambda rows: [
        WorkerThreads(f"w{n}", threads, [f"task-{n}-{k}" for k in range(busy)], kept, paused)
        for n, (threads, busy, kept, paused) in enumerate(rows)
    ]
)
counts = st.none() | st.integers(1, 8)


def check_all_drivers(workers, requests):
    """Drivers ask one after the other; what they have reserved has not arrived."""
    held, taken = Reservations(), Counter()
    room = {
        place.address: place.threads - len(place.busy) for place in workers if not (place.for_servers or place.paused)
    }
    for driver, (trainers, most, holding) in enumerate(requests):
        choice = seats.choose(workers, held.count(0.0, lambda key: False), trainers, most, holding)
        keys = [f"{driver}-{n}" for n in range(len(choice.workers))]
        held.reserve(keys, choice.workers, until=1.0)
        taken.update(choice.workers)
        assert all(taken[address] <= room.get(address, 0) for address in taken), "a thread is taken twice"
        free = sum(max(0, room[address] - taken[address]) for address in room) + len(choice.workers)
        assert choice.free == free
        wanted = free if trainers is None else trainers
        assert len(choice.workers) == (min(wanted, most) if 0 < wanted <= free else 0)
        assert choice.later or not choice.workers
    return held


@given(
    places,
    st.lists(st.tuples(counts, st.integers(1, 8), st.sets(st.sampled_from([f"w{n}" for n in range(6)])))),
    counts,
)
def test_no_thread_is_taken_twice(workers, requests, trainers):
    held = check_all_drivers(workers, requests)
    reserved = held.count(0.5, lambda key: False)
    assert choose(workers, reserved, trainers, 8, ()) == choose(workers, reserved, trainers, 8, ())  # deterministic
    assert not held.count(1.0, lambda key: False), "all reservations are over"


@given(places, st.dictionaries(st.sampled_from([f"w{n}" for n in range(6)]), st.integers(0, 6)))
def test_the_numbers_agree(workers, reserved):
    """Threads for servers, with tasks, reserved, paused and free add up to all threads."""
    choice = choose(workers, Counter(reserved), None, 99, ())
    whole, *parts = choice.numbers.split(", ")
    assert whole == f"of {plural(len(workers), 'worker')} with {plural(sum(p.threads for p in workers), 'thread')}"
    thread_counts = [part for part in parts if " thread" in part]
    kept = [int(part.split(" with ")[1].split()[0]) for part in thread_counts if "for servers" in part]
    others = [int(part.split()[0]) for part in thread_counts if "for servers" not in part]
    assert sum(kept + others) == sum(place.threads for place in workers)
    assert others[-1] == choice.free == len(choice.workers)


def plural(count, what):
    return f"{count} {what}{'s' * (count != 1)}"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("_parts", "busy = min(len(worker.busy), worker.threads)", "busy = 0"),
        ("_parts", "kept = min(reserved[worker.address], worker.threads - busy)", "kept = 0"),
        ("_parts", "if worker.for_servers:", "if False:"),
        ("_parts", "if worker.paused else", "if False else"),
        ("choose", "wanted > len(threads)", "False"),
        ("choose", "min(wanted, max_trainers)", "wanted"),
    ],
)
def test_wrong_rules_are_found_out(name, right, wrong, monkeypatch):
    workers = [
        WorkerThreads("a", 2, ["t"]),
        WorkerThreads("b", 2),
        WorkerThreads("c", 1, for_servers=True),
        WorkerThreads("d", 1, paused=True),
    ]
    requests = [(1, 1, {"b"}), (None, 1, set()), (2, 2, set()), (None, 9, set()), (None, 9, set())]
    check_all_drivers(workers, requests)
    monkeypatch.setattr(seats, name, mutant(getattr(seats, name), right, wrong))
    with pytest.raises(AssertionError):
        check_all_drivers(workers, requests)


def test_workers_with_data_come_first_and_the_order_stays():
    workers = [WorkerThreads("a", 2), WorkerThreads("b", 1), WorkerThreads("c", 2)]
    assert choose(workers, Counter(), None, 9, ()).workers == ["a", "b", "c", "a", "c"]
    assert choose(workers, Counter(), 3, 9, {"c", "b"}).workers == ["b", "c", "c"]
    assert choose(workers, Counter(), None, 2, {"c"}).workers == ["c", "c"]


def test_whether_it_is_worth_to_ask_again():
    assert choose([WorkerThreads("a", 1, ["t"])], Counter(), 1, 1, ()).later
    assert choose([WorkerThreads("a", 2, ["t"])], Counter(), 2, 2, ()).later
    assert not choose([WorkerThreads("a", 2)], Counter(), 3, 3, ()).later
    assert not choose([WorkerThreads("a", 2, for_servers=True)], Counter(), None, 3, ()).later
    assert not choose([], Counter(), None, 3, ()).later


def test_a_reservation_ends_with_its_task_its_driver_or_its_time():
    held = Reservations()
    held.reserve(["d"], ["y"], until=9.0, driver="notebook")
    assert held.count(1.0, lambda key: False) == {"y": 1}
    held.release_driver("notebook")
    held.reserve(["e", "f"], ["y", "x"], until=9.0, session="dps")
    held.reserve(["g"], ["z"], until=9.0, session="other")
    held.release_session("dps")  # its driver cannot give them back any more
    assert held.count(1.0, lambda key: False) == {"z": 1}
    held.release_session("other")
    held.reserve(["a", "b", "c"], ["x", "x", "y"], until=2.0)
    assert held.count(1.0, lambda key: key == "a") == {"x": 1, "y": 1}
    assert held.count(1.0, lambda key: False) == {"x": 1, "y": 1}  # a task that has had its thread needs no reservation
    held.release(["c", "unknown"])
    assert held.count(1.0, lambda key: False) == {"x": 1}
    assert held.count(2.0, lambda key: False) == {}


# -- runs


@pytest.fixture(scope="module")
def client():
    with (
        dps.LocalCluster(servers=1, trainers=4, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps


@pytest.fixture
def go():
    GO.clear()
    yield GO
    GO.set()


def scattered(client, count):
    return client.scatter(list(range(count)), broadcast=True, hash=False)  # by hash they may be about to be released


def meet(trainer, parts):
    """All trainers of the run are at work at once."""
    trainer.barrier()
    return get_worker().address


def meet_others(trainer, parts, me):
    """All trainers of both runs are at work at once."""
    trainer.push("here", [2 * me + trainer.number], 1)
    wait_until(lambda: trainer.pull("here", [0, 1, 2, 3]).all())
    return get_worker().address


def stay(trainer, parts):
    GO.wait(60)


def test_two_runs_that_start_together_have_all_threads_between_them(client, ps, go):
    data = scattered(client, 2)
    with Client(client.scheduler.address) as other, dps.ParameterServer.attach(other) as attached:
        theirs = scattered(other, 2)
        with ThreadPoolExecutor(2) as pool:
            for turn in range(8):
                ps.table("here", dtype="int64")
                second = (ps, data) if turn % 2 else (attached, theirs)  # of the same driver, or of another one
                runs = [
                    pool.submit(handle.run, meet_others, rows, trainers=2, args=(me,))
                    for me, (handle, rows) in enumerate([(ps, data), second])
                ]
                places = [place for run in runs for place in run.result(timeout=60)]
                assert len(set(places)) == 4
                ps.drop_table("here")


def test_threads_are_taken_when_they_are_chosen(client, ps, monkeypatch):
    """The second run chooses between the choice of the first one and its tasks."""
    data, first, second = scattered(client, 2), threading.Event(), threading.Event()
    ps.table("here", dtype="int64")

    def check_versions_of(*args):
        if not first.is_set():
            first.set()
            assert second.wait(100), "the second run has not chosen"
        else:
            second.set()

    monkeypatch.setattr("dps.engine.training.launch.check_versions_of", check_versions_of)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(ps.run, meet_others, data, trainers=2, args=(0,))]
        assert first.wait(100), "the first run has not chosen"
        runs.append(pool.submit(ps.run, meet_others, data, trainers=2, args=(1,)))
        assert len({place for run in runs for place in run.result(timeout=200)}) == 4
    ps.drop_table("here")


def test_a_run_that_finds_no_thread_says_where_they_are(client, ps, go):
    data = scattered(client, 4)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ps.run, stay, data, trainers=3)
        wait_until(lambda: any(len(run.connected) == 3 for run in ps.status().runs))
        numbers = (
            r"\(5 tries within 1 s\): of 5 workers with 5 threads, 1 worker with 1 thread is for servers, 3 threads "
            r"have tasks \(dps-train-dps-\w+, dps-train-dps-\w+, dps-train-dps-\w+\), 1 thread is free"
        )
        with pytest.raises(TooFewWorkersError, match=rf"2 trainers asked for and 1 threads? .* free .*{numbers}"):
            ps.run(meet, data, trainers=2)
        assert len(ps.run(meet, data)) == 1
        GO.set()
        first.result(timeout=60)
    assert len(ps.run(meet, data)) == 4


def test_a_run_takes_the_threads_of_one_that_ends_meanwhile(client, ps, go, monkeypatch):
    data = scattered(client, 4)
    pauses = []

    def first_ends(seconds):
        pauses.append(seconds)
        GO.set()
        first.result(timeout=60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ps.run, stay, data)
        wait_until(lambda: any(len(run.connected) == 4 for run in ps.status().runs))
        monkeypatch.setattr("dps.engine.training.threads.time", types.SimpleNamespace(sleep=first_ends))
        assert len(ps.run(meet, data, trainers=4)) == 4
    assert len(pauses) == 1


def take_threads(ps, *, driver, trainers, most, seconds):
    """Choose and reserve threads as a driver does, without a run."""
    fields = {"driver": driver.id, "trainers": trainers, "most": most, "holding": [], "seconds": seconds}
    return ps.connection.call("take_threads", **fields)


def test_the_reservation_of_a_driver_that_died_is_over(client, ps):
    with Client(client.scheduler.address) as other, dps.ParameterServer.attach(other) as attached:
        taken = take_threads(attached, driver=other, trainers=3, most=3, seconds=600)
        assert len(taken["seats"]) == 3
        assert take_threads(ps, driver=client, trainers=2, most=2, seconds=0.0)["free"] == 1
    wait_until(lambda: take_threads(ps, driver=client, trainers=5, most=5, seconds=0.0)["free"] == 4)


def test_the_reservation_of_a_driver_that_hangs_ends(client, ps):
    """It has asked for threads, and its tasks do not come."""
    data = scattered(client, 4)
    with dask.config.set({"dps.timeouts.join": "30 s"}):
        taken = take_threads(ps, driver=client, trainers=3, most=3, seconds=0.5)
        assert len({worker for worker, _ in taken["seats"]}) == 3
        answer = take_threads(ps, driver=client, trainers=2, most=2, seconds=0.5)
        assert (answer["seats"], answer["free"], answer["later"]) == ([], 1, True)
        assert "3 threads are reserved for another run, 1 thread is free" in answer["numbers"]
        assert len(ps.run(meet, data, trainers=4)) == 4  # one of its tries is later than the end


def test_a_run_that_does_not_begin_gives_its_threads_back(client, ps):
    data = scattered(client, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dps.engine.training.launch.begin", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ps.run(meet, data)
    assert take_threads(ps, driver=client, trainers=1, most=1, seconds=0.0)["free"] == 4
