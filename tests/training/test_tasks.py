"""Clients in Dask tasks: what a task pushes counts once, however often Dask runs it."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading

import dask.bag as db
import numpy as np
import pytest
from distributed import Client, get_worker, worker_client
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from servers import wait_until

import dps
from dps.engine.coordination.origins import TaskOrigins, decode_key, encode_key
from dps.engine.core.shards.ledger import Ledger
from dps.errors import InputError, LimitError, StoppedError

pytestmark = pytest.mark.leaks_ok(
    "the clients of tasks end with the tasks' records at Dask; after the module all are gone"
)

# -- the rules


def numbers():
    count = itertools.count(1)
    return lambda many: next(count)


KEYS = st.recursive(
    st.text(max_size=5) | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=4),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=6,
)


@pytest.mark.thorough
@given(KEYS)
def test_keys_travel(key):
    assert decode_key(encode_key(key)) == key


def test_each_client_of_a_task_is_an_origin_and_each_run_an_attempt():
    origins = TaskOrigins(numbers())
    assert origins.assign("x", "life", 3, 3, 0) == (1, 0)
    assert origins.assign("x", "life", 3, 3, 0) == (1, 0)  # the answer was lost
    assert origins.assign("x", "life", 3, 3, 1) == (2, 0)
    assert origins.assign("y", "life of y", 4, 4, 0) == (3, 0)
    assert origins.assign("x", "life", 9, 9, 0) == (1, 1)
    assert origins.assign("x", "life", 9, 9, 1) == (2, 1)
    assert len(origins) == 3


def test_a_run_that_is_over_is_refused():
    origins = TaskOrigins(numbers())
    origins.assign("x", "life", 3, 3, 0)
    for latest, run in ((5, 3), (5, 4)):  # Dask has begun another, which has not pushed yet
        with pytest.raises(StoppedError, match=f"run {run} of task 'x' is over: Dask has begun run 5"):
            origins.assign("x", "life", latest, run, 0)
    assert origins.assign("x", "life", 5, 5, 0) == (1, 1)
    with pytest.raises(StoppedError, match="run 3 of task 'x' is over: Dask has begun run 5"):
        origins.assign("x", "life", 3, 3, 0)  # also where the scheduler's record is read too early
    with pytest.raises(LimitError, match="more than 1024 clients"):
        origins.assign("x", "life", 5, 5, 1024)


def test_a_task_that_has_ended_is_retired_and_its_key_counts_again():
    origins = TaskOrigins(numbers())
    assert [origins.assign(name, f"{name}1", 1, 1, 0)[0] for name in "abcd"] == [1, 2, 3, 4]
    assert origins.assign("a", "a2", 8, 8, 0) == (5, 0)  # the same key, submitted again
    origins.sweep(lambda task, life: life not in ("b1", "d1"))
    assert origins.ended
    assert origins.take_ended() == [[1, 2], [4, 1]]
    assert not origins.ended
    assert len(origins) == 2


def test_the_oldest_tasks_are_spent_and_refused_but_not_those_at_work():
    lives = {name: object() for name in "ABCDE"}
    origins = TaskOrigins(numbers(), at_work=lambda life: life is lives["A"], max_origins=3)
    for name, life in lives.items():
        origins.assign(name, life, 1, 1, 0)
    assert len(origins) == 3
    assert origins.take_ended() == [[2, 2]]
    assert origins.assign("A", lives["A"], 2, 2, 0) == (1, 1)
    with pytest.raises(StoppedError, match="it is unknown which of its pushes counted: the pushes of 3 clients"):
        origins.assign("B", lives["B"], 2, 2, 0)
    assert origins.assign("B", "submitted anew", 3, 3, 0) == (6, 0)
    origins.sweep(lambda task, life: False)
    assert not len(origins)
    assert origins.assign("C", "C", 4, 4, 0) == (7, 0)


class Renewing(TaskOrigins):
    """What each client did before: it is a new origin each time it is unpickled."""

    def assign(self, task, life, latest, run, client):
        return self._allot(1), 0


def lives_of(draw, origins):
    """Random lives of three tasks: all that they push, and what a shard's ledger lets count.

    A run makes ops 0, 1, 2, ...; it is begun again at any moment, and an earlier one may go on as a zombie. Returns how
    often each op of each life counted.
    """
    ledger, counted, run_ids = Ledger(), {}, itertools.count()
    tasks = {name: [0, next(run_ids)] for name in "xyz"}  # its life and latest run
    running = []  # [name, life, run, origin and attempt, next op]
    for _ in range(draw(st.integers(10, 60))):
        name = draw(st.sampled_from("xyz"))
        what = draw(st.sampled_from(["begin", "again", "push", "push", "push", "forget"]))
        if what == "begin":
            running.append([name, *tasks[name], None, 0])
        elif what == "again":
            tasks[name][1] = next(run_ids)
        elif what == "forget":
            tasks[name] = [tasks[name][0] + 1, next(run_ids)]
            origins.sweep(lambda task, life: tasks[task][0] == life)
            for first, count in origins.take_ended():
                ledger.retire(first, count)
        elif running:
            each = draw(st.sampled_from(running))
            name, life, run, origin, op = each
            try:
                if origin is None:
                    if tasks[name][0] != life:
                        continue  # the scheduler does not know it any more
                    origin = each[3] = origins.assign(name, life, tasks[name][1], run, 0)
                if not ledger.seen(*origin, -1, op):
                    ledger.note(*origin, -1, op)
                    counted[name, life, op] = counted.get((name, life, op), 0) + 1
                each[4] += 1
            except StoppedError:
                running.remove(each)
    return counted


@given(st.data())
def test_each_op_of_a_life_counts_once(data):
    counted = lives_of(data.draw, TaskOrigins(numbers()))
    assert set(counted.values()) <= {1}
    for name, life, op in counted:  # and none is passed over
        assert op == 0 or (name, life, op - 1) in counted


@pytest.mark.parametrize("wrong", [Renewing])
def test_wrong_rules_are_found_out(wrong):
    @settings(phases=[Phase.generate])  # because making the example small takes most of the time
    @given(st.data())
    def lives_end_once(data):
        assert set(lives_of(data.draw, wrong(numbers())).values()) <= {1}

    with pytest.raises(AssertionError):
        lives_end_once()


# -- real tasks


@pytest.fixture(scope="module")
def client():
    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client
        # What the scheduler keeps of a task, with its arguments' connections, goes with the worker's next heartbeat.
        wait_until(lambda: not any(worker.executing for worker in cluster.scheduler.workers.values()))


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps


@pytest.fixture
def table(ps, request):
    name = request.node.name.replace("[", "-").replace("]", "")
    ps.table(name, dtype="int64")
    yield name
    ps.drop_table(name)


def origins_of(client):
    return client.cluster.scheduler.plugins["dps-controller"].sessions["dps"].runs.tasks


def counts(ps, table, keys):
    return ps.client().pull(table, keys).tolist()


FAILURES, RUNS, GO, HERE = [], [], threading.Event(), threading.Event()  # of tasks in this process


def pushing(client, table, count, fail_at):
    """Push keys 0, 1, ... one after the other; raise before some of them, the first time that they are reached."""
    RUNS.append(table)
    for key in range(count):
        if key in fail_at and key not in FAILURES:
            FAILURES.append(key)
            raise RuntimeError(f"before key {key}")
        client.push(table, [key], 1)
    return count


def totals(dps_client, table):
    values = [int(dps_client.push_pull(table, [7], 1)[0]) for _ in range(3)]
    if not FAILURES:
        FAILURES.append(values)
        raise RuntimeError("once more")
    return values


def zombie(dps_client, table):
    """The first attempt waits in the middle, and goes on when it is told to."""
    first = not HERE.is_set()
    HERE.set()
    try:
        for key in range(10):
            if first and key == 4:
                GO.wait(60)
            dps_client.push(table, [key], 1)
    except StoppedError as error:
        FAILURES.append(str(error))
        raise
    return get_worker().address


def on_scheduler(client, act):
    """Call it in the scheduler's loop."""
    done = threading.Event()
    client.cluster.scheduler.loop.add_callback(lambda: (act(), done.set()))
    assert done.wait(30)


def test_a_task_that_is_retried_counts_once(client, ps, table):
    FAILURES.clear()
    future = client.submit(pushing, ps.client(), table, 6, [2, 5], retries=2)
    assert future.result() == 6
    assert FAILURES == [2, 5]
    assert counts(ps, table, range(7)) == [1] * 6 + [0]


def test_several_clients_of_a_task_are_told_apart(client, ps, table):
    def two(first, second, again):
        with first.__class__(first.ticket) as third:
            for key in range(4):
                second.push_async(table, [key], 1)
                first.add(table, [key], 10)
                third.push({table: ([key], 100)})
            second.wait()
        if not FAILURES:
            FAILURES.append(again)
            raise RuntimeError("once more")

    FAILURES.clear()
    client.submit(two, ps.client(), ps.client(), 0, retries=1).result()
    assert counts(ps, table, range(4)) == [111] * 4


def test_a_client_that_tasks_share_is_each_tasks_own(client, ps, table):
    """One that was scattered is unpickled once by a worker: the tasks there use the same object, from two threads."""
    FAILURES.clear()
    shared = client.scatter(ps.client(), broadcast=True)
    futures = [client.submit(pushing, shared, table, 5, [3], retries=1, key=f"{table}-{n}") for n in range(6)]
    assert client.gather(futures) == [5] * 6
    assert counts(ps, table, range(5)) == [6] * 5


def test_what_push_pull_answers_is_answered_again(client, ps, table):
    FAILURES.clear()
    assert client.submit(totals, ps.client(), table, retries=1).result() == [1, 2, 3]
    assert FAILURES == [[1, 2, 3]]
    assert counts(ps, table, [7]) == [3]


def test_a_zombie_is_fenced_off(client, ps, table):
    """A first attempt goes on pushing while and after a second one has run: each push counts once."""
    FAILURES.clear(), GO.clear(), HERE.clear()
    future = client.submit(zombie, ps.client(), table, pure=False)
    assert HERE.wait(60)
    wait_until(lambda: counts(ps, table, [3]) == [1])
    scheduler = client.cluster.scheduler
    (before,) = (address for address, keys in client.processing().items() if future.key in keys)
    others = [w for w, state in scheduler.workers.items() if w != before and not state.resources]

    def take_away():  # as Dask does where a worker was lost, or another one is to have the task
        scheduler.set_restrictions({future.key: others})
        scheduler.transitions({future.key: "released"}, "test")

    on_scheduler(client, take_away)
    assert future.result(timeout=60) in others
    assert counts(ps, table, range(10)) == [1] * 10
    GO.set()
    wait_until(lambda: FAILURES)
    assert "attempt 0 of origin" in FAILURES[0] or "is over" in FAILURES[0]
    assert counts(ps, table, range(10)) == [1] * 10


def test_the_same_key_counts_once_while_dask_knows_it_and_again_afterwards(client, ps, table):
    FAILURES.clear()
    first = client.submit(pushing, ps.client(), table, 2, [])
    first.result()
    second = client.submit(pushing, ps.client(), table, 2, [])
    second.result()
    assert first.key == second.key
    assert counts(ps, table, [0]) == [1]
    key = first.key
    del first, second
    wait_until(lambda: key not in client.cluster.scheduler.tasks)
    client.submit(pushing, ps.client(), table, 2, []).result()
    assert counts(ps, table, [0]) == [2]
    client.submit(pushing, ps.client(), table, 2, [], pure=False).result()
    assert counts(ps, table, [0]) == [3]


def test_what_a_lost_result_takes_to_compute_again_counts_once(client, ps, table):
    """As long as something depends on a task Dask may run it again, though its own future was released."""
    RUNS.clear()
    first = client.submit(pushing, ps.client(), table, 3, [])
    second = client.submit(sum, [first, 1])
    assert second.result() == 4
    key = first.key
    del first
    scheduler = client.cluster.scheduler
    wait_until(lambda: not scheduler.tasks[key].who_has)
    on_scheduler(client, lambda: scheduler.transitions({second.key: "released"}, "test"))
    wait_until(lambda: scheduler.tasks[second.key].state == "memory")
    assert second.result() == 4
    assert len(RUNS) == 2  # it was computed once more
    assert counts(ps, table, range(3)) == [1, 1, 1]


def test_the_origins_of_tasks_that_have_ended_are_forgotten_and_refused(client, ps, table):
    futures = client.map(pushing, [ps.client()] * 20, [table] * 20, [1] * 20, [[]] * 20, pure=False)
    client.gather(futures)
    origins, keys = origins_of(client), [future.key for future in futures]
    last = max(origin for key in keys for origin, _, _ in origins._known[key].clients.values())
    del futures
    wait_until(lambda: not origins.ended and not any(key in origins._known for key in keys))
    late = ps.client()
    late.session.own.id = last

    def refused():
        late.session.own.number += 100
        try:
            late.push(table, [0], 1)
        except StoppedError as error:
            return "was retired" in str(error)

    wait_until(refused)
    late.close()


def test_who_is_in_no_task_is_an_origin_of_its_own(client, ps, table):
    """Threads that a task has started itself, coroutines, actors: as it is outside of Dask."""

    class Adding:
        def __init__(self, dps_client):
            self.client = dps_client

        def add(self):
            self.client.push(table, [0], 1)

    adding = client.submit(Adding, ps.client(), actor=True).result()
    for _ in range(3):  # each call would be one and the same task
        adding.add().result()
    assert counts(ps, table, [0]) == [3]

    def threads(dps_client):
        started = [threading.Thread(target=dps_client.push, args=(table, [1], 1)) for _ in range(3)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    client.submit(threads, ps.client()).result()
    assert counts(ps, table, [1]) == [3]


def test_a_task_that_leaves_its_thread_and_comes_back(client, ps, table):
    def seceding(dps_client):
        dps_client.push(table, [0], 1)
        with worker_client() as dask:
            dps_client.push(table, [1], 1)
            dask.submit(pushing, dps_client, table, 2, [], key=f"{table}-inner").result()
        dps_client.push(table, [2], 1)
        if not FAILURES:
            FAILURES.append(1)
            raise RuntimeError("once more")

    FAILURES.clear()
    client.submit(seceding, ps.client(), retries=1).result()
    assert counts(ps, table, [2]) == [1]
    assert counts(ps, table, [0, 1]) in ([2, 2], [3, 3])  # the inner task counts once more where it was forgotten


def with_a_handle(ps, table, number):
    """A task that is given the parameter server itself."""
    with ps:
        attached = repr(ps)
        spec = ps.tables()[table]
        ps.client().push(table, [number], 1)
    assert ps.closed
    return type(ps).__name__, attached, spec.name, os.getpid()


def test_a_parameter_server_in_the_arguments_is_an_attached_handle(client, ps, table):
    kind, attached, name, _ = client.submit(with_a_handle, ps, table, 5).result()
    assert (kind, name) == ("ParameterServer", table)
    assert attached.startswith("<dps.ParameterServer 'dps': 1 server in")
    assert counts(ps, table, [5]) == [1]  # the servers are still up


def test_a_handle_that_no_client_is_there_for(ps, monkeypatch):
    there = pickle.loads(pickle.dumps(ps))
    monkeypatch.setattr("dps.engine.driver.connection.get_client", lambda: (_ for _ in ()).throw(ValueError("none")))
    with pytest.raises(InputError, match=r"was pickled, and there is no Dask client .* pass ps.client\(\)"):
        print(there.tables())
    assert repr(there) == "<dps.ParameterServer 'dps' (InputError)>"


@pytest.fixture(scope="module")
def apart():
    """Workers that are processes."""
    with (
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n", dtype="int64")
        yield client, ps


@pytest.mark.processes
def test_a_parameter_server_in_the_arguments_of_another_process(apart):
    client, ps = apart
    futures = client.map(with_a_handle, [ps] * 4, ["n"] * 4, [10] * 4, pure=False)
    assert {kind for kind, *_ in client.gather(futures)} == {"ParameterServer"}
    assert os.getpid() not in {pid for *_, pid in client.gather(futures)}
    assert counts(ps, "n", [10]) == [4]


@pytest.mark.processes
def test_a_worker_that_is_killed_after_the_push(apart, tmp_path):
    """Dask runs the task again on another worker; with plain clients each of its pushes counted twice."""

    def dying(dps_client, folder, number):
        dps_client.push("n", np.arange(4), 1)
        if number == 1 and not os.path.exists(folder):
            with open(folder, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        dps_client.push("n", np.arange(4), 10)
        return number

    client, ps = apart
    futures = client.map(dying, [ps.client()] * 4, [str(tmp_path / "died")] * 4, range(4))
    assert client.gather(futures) == [0, 1, 2, 3]
    assert (tmp_path / "died").exists()
    assert ps.client().pull("n", np.arange(4)).tolist() == [44] * 4


@pytest.mark.processes
def test_a_worker_that_is_killed_in_a_lazy_stage(apart, tmp_path):
    def dying(trainer, numbers, folder):
        trainer.push("lazy", numbers, 1)
        if trainer.number == 1 and not os.path.exists(folder):
            with open(folder, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.push("lazy", numbers, 10)
        return numbers

    client, ps = apart
    ps.table("lazy", rows=8, dtype="int64")
    stage = dps.map_partitions_with_ps(db.range(8, npartitions=4), dying, ps, args=(str(tmp_path / "died"),))
    assert client.compute(stage.sum()).result() == 28
    assert (tmp_path / "died").exists()
    assert ps.client().pull("lazy").tolist() == [11] * 8


@dps.function(changes=True)
def one_more(rows):
    rows.values += 1


def changing(dps_client, table, v, fail_at):
    """Pushes, calls, deletes, and changes a vector in place; fails once at each of these steps."""
    for step in range(6):
        dps_client.push(table, [1, 2], 10)
        dps_client.call(one_more, table, [2, 3])
        v[step % 5 : step % 5 + 1] += 1.0
        if step == 3:
            dps_client.delete(table, [1])
            dps_client.delete_async(table, [3])
        if step in fail_at and step not in FAILURES:
            FAILURES.append(step)
            raise RuntimeError("not yet")


def test_calls_deletions_and_vectors_of_a_task_that_is_retried_count_once(client, ps, table):
    ps.register(one_more)
    FAILURES.clear()
    v = dps.arrays.on(ps).zeros(5)
    client.submit(changing, ps.client(), table, v, [1, 4, 5], retries=3).result()
    assert FAILURES == [1, 4, 5]
    assert counts(ps, table, [1, 2, 3]) == [20, 66, 2]
    assert v.tolist() == [2.0, 1.0, 1.0, 1.0, 1.0]
