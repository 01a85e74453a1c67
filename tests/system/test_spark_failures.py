"""Spark's tasks that raise, executors that are killed, copies of slow tasks: each number is counted once, always."""

from __future__ import annotations

import contextlib
import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import dask
import lent_programs
import numpy as np
import psutil
import pytest
import spark_programs as programs
from background import in_thread
from pyspark.ml.linalg import Vectors
from servers import wait_until
from shell import Shell
from sparks import children, session, standalone
from survivors import Survivors

import dps
from dps.errors import InputError
from dps.models import LogisticRegression

pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone"),
]


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    """Two executors on two hosts; tasks may fail four times, and slow ones get a twin."""
    more = {
        "spark_executor_memory": "512m",
        "spark_task_maxFailures": "4",
        "spark_speculation": "true",
        "spark_speculation_quantile": "0.5",
        "spark_speculation_minTaskRuntime": "1s",
        "spark_speculation_efficiency_enabled": "false",
        "spark_scheduler_barrier_maxConcurrentTasksCheck_interval": "1s",
    }
    with standalone(tmp_path_factory.mktemp("spark")) as address, session(address, **more) as spark:
        yield spark


@pytest.fixture(autouse=True)
def both_executors(spark):
    """One that was killed is back, and tasks of the test before are over."""
    java = spark.sparkContext._jsc.sc()
    wait_until(lambda: java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile()) == 2, 120)


@pytest.fixture(scope="module")
def ps(spark):
    """No executor is back so soon: what counts is how long Spark itself has a barrier stage wait."""
    with dask.config.set({"dps.timeouts.rejoin": "0.2s"}), dps.spark.start(spark, servers=1) as ps:
        yield ps


@pytest.fixture
def table(ps):
    name = uuid.uuid4().hex
    ps.table(name, rows=120, dtype="int64")
    yield name
    ps.drop_table(name)


def counts(ps, table):
    return ps.client().pull(table).tolist()


ONCE = [1] * 100 + [0] * 20


def test_tasks_that_raise_are_run_again(spark, ps, table, tmp_path):
    rdd = spark.sparkContext.range(100, numSlices=4)
    each = dps.spark.map_partitions_with_ps(rdd, programs.each_and_fail, ps, args=(table, str(tmp_path)))
    assert each.sum() == 4950
    assert counts(ps, table) == ONCE
    assert sorted(os.listdir(tmp_path)) == [f"raised-{n}-{attempt}" for n in range(4) for attempt in range(2)]


@pytest.mark.parametrize("function", [programs.push_and_fail, programs.each_and_fail])
def test_pushes_of_foreach_count_once_though_tasks_raise(spark, ps, table, tmp_path, function):
    rdd = spark.sparkContext.range(100, numSlices=4)
    assert dps.spark.foreach_partition_with_ps(rdd, function, ps, args=(table, str(tmp_path))) is None
    assert counts(ps, table) == ONCE
    assert sorted(os.listdir(tmp_path)) == [f"raised-{n}-{attempt}" for n in range(4) for attempt in range(2)]


@pytest.mark.slow
def test_a_barrier_stage_that_raises_is_run_again(spark, ps, table, tmp_path):
    rdd = spark.sparkContext.range(100, numSlices=2)
    with pytest.raises(InputError, match=r"run the stage again 3 times"):
        ps.run(programs.count, rdd, retries=4)
    args = (table, str(tmp_path), 2)
    attempts = ps.run(programs.count_and_fail, rdd, staleness=2, retries=3, args=args)
    assert counts(ps, table) == ONCE
    assert os.listdir(tmp_path)
    assert max(attempts) >= 1
    with pytest.raises(ValueError, match="now and then"):  # one retry too few: the function's own error
        ps.run(programs.count_and_fail, rdd, staleness=2, retries=1, args=(table, str(tmp_path), 9))


def test_a_slow_task_and_its_twin(spark, ps, table, tmp_path):
    """The twin takes over; what the first one pushes meanwhile and afterwards counts once, or not."""
    rdd = spark.sparkContext.range(100, numSlices=4)
    args = (table, str(tmp_path))
    each = dps.spark.map_partitions_with_ps(rdd, programs.each_with_a_slow_twin, ps, args=args)
    assert each.sum() == 4950
    assert (tmp_path / "twin").exists()
    assert counts(ps, table) == ONCE
    assert each.count() == 100
    assert counts(ps, table) == ONCE


def test_an_executor_killed_in_an_ordinary_stage(spark, ps, table, tmp_path):
    rdd = spark.sparkContext.range(100, numSlices=4)
    each = dps.spark.map_partitions_with_ps(rdd, programs.each_and_die, ps, args=(table, str(tmp_path)))
    assert each.sum() == 4950
    assert os.listdir(tmp_path) == ["killed-each"]
    assert counts(ps, table) == ONCE


def test_an_executor_killed_in_a_barrier_stage(spark, ps, table, tmp_path):
    rdd = spark.sparkContext.range(100, numSlices=2)
    attempts = ps.run(programs.count_and_die, rdd, staleness=3, args=(table, str(tmp_path)))
    assert os.listdir(tmp_path) == ["killed"]
    assert min(attempts) >= 1
    assert counts(ps, table) == ONCE


def test_all_executors_killed_when_the_trainers_have_ticked(spark, ps, table):
    """Spark runs the stage again when it has executors again, and that takes longer than `dps.timeouts.rejoin`."""
    rdd = spark.sparkContext.range(100, numSlices=2)

    def run():
        return ps.status().runs[0]

    with ThreadPoolExecutor(1) as threads:
        before = len(ps.status().runs)
        counting = threads.submit(ps.run, programs.count_slowly_on, rdd, staleness=3, args=(table,))
        wait_until(lambda: len(ps.status().runs) > before and min(run().clocks) > 5, 120)
        found = executors()
        for executor in found:
            executor.kill()
        attempts = counting.result(200)
    assert len(found) == 2
    assert min(attempts) >= 1
    assert counts(ps, table) == ONCE


def labelled(spark):
    """A DataFrame of two partitions."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(400, 6))
    y = (X @ [1, -2, 0.5, 0, 3, -1] + draw.logistic(size=400) > 0).astype(float)
    rows = [(Vectors.dense(row), float(label)) for row, label in zip(X, y, strict=True)]
    return spark.sparkContext.parallelize(rows, 2).toDF(["features", "label"])


def executors():
    """Spark's, JVMs all of them."""
    found = []
    for process in children(os.getpid()):
        with contextlib.suppress(psutil.Error):  # others come and go
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_an_executor_killed_while_a_model_is_fitted(spark, ps):
    """Trainers go on where they were: the numbers equal those without a failure, to the last bit, and all are known."""
    frame, steady = labelled(spark), {"aggregate": True, "batch_size": 20, "epochs": 150, "progress": False}

    def clocks():
        runs = [run for run in ps.status().runs if run.stopped is None and run.trainers[0].planned]
        return runs[0].clocks if runs else [0]

    undisturbed = LogisticRegression(client=ps, **steady).fit(frame)
    found = executors()
    with ThreadPoolExecutor(1) as threads:
        before = len(ps.status().runs)
        fitting = threads.submit(LogisticRegression(client=ps, **steady).fit, frame)
        wait_until(lambda: len(ps.status().runs) > before and 100 < min(clocks()) < 1000, 120)
        found[0].kill()
        model = fitting.result(200)
    assert len(found) == 2
    assert max(ps.status().runs[0].attempts) > 1
    np.testing.assert_array_equal(model.coef_, undisturbed.coef_)
    np.testing.assert_array_equal(model.intercept_, undisturbed.intercept_)
    known = np.flatnonzero(~np.isnan(model.loss_curve_))
    assert 1 < known[0] < 149
    assert known.tolist() == list(range(known[0], 150))
    np.testing.assert_array_equal(model.loss_curve_[known[1] :], undisturbed.loss_curve_[known[1] :])  # one in part


@pytest.mark.thorough
def test_a_run_on_spark_outlives_the_scheduler_of_dask(spark, tmp_path):
    """Its trainers wait for the next scheduler, and its driver finds it, also when its Dask client has given up."""
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell)
        with cluster.client(2) as first:
            ps = dps.ParameterServer(first, servers=2)
            ps.table("counts", rows=120, dtype="int64", copies=2)
            client, go = ps.client(), tmp_path / "go"
            rdd, how = spark.sparkContext.range(1000, numSlices=2), {"staleness": 1, "progress": False}
            end = in_thread(ps.run, programs.count_slowly, rdd, args=("counts", str(go)), **how)
            wait_until(lambda: client.pull("counts").sum() > 20)
            first._timeout = 0.1  # of its attempts to connect again: as if the scheduler was away for longer
            cluster.kill_scheduler()
            wait_until(lambda: first.status == "closed")
            cluster.start_scheduler()
            before = client.pull("counts").sum()
            wait_until(lambda: client.pull("counts").sum() > before + 20)
            go.touch()
            assert end() == [0, 0], "no trainer began again"
            assert client.pull("counts").tolist() == [10] * 100 + [0] * 20
            assert ps.dask_client is not first
            ps.close()
        first._loop_runner.stop()  # Dask leaves its thread running when a client has given up by itself


def of_epochs(client, table, rows, epochs):
    """How often each row was counted in each epoch, by the functions of `lent_programs`."""
    return client.pull(table, np.add.outer(lent_programs.EPOCH * np.arange(epochs), np.arange(rows)))


def test_an_executor_killed_while_it_works_on_the_partition_of_another(spark, ps, tmp_path):
    """Spark begins all trainers again: those of whom others had portions, too."""
    name = uuid.uuid4().hex
    ps.table(name, dtype="int64")
    rdd = spark.sparkContext.range(200, numSlices=2)
    how = {"staleness": 1, "reassign": True, "progress": False}
    results = ps.run(lent_programs.count_unevenly_and_die, rdd, args=(name, str(tmp_path)), **how)
    assert os.listdir(tmp_path) == ["killed"]
    assert all(attempt >= 1 and clock == 3 for attempt, clock in results)
    assert (of_epochs(ps.client(), name, 200, 3) == 1).all()


@pytest.mark.thorough
def test_a_run_with_lent_partitions_outlives_the_scheduler_of_dask(spark, tmp_path):
    """The next controller knows no portion, and its trainers go on in the epochs that they had come to."""
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell)
        with cluster.client(2) as first:
            ps = dps.ParameterServer(first, servers=2)
            ps.table("counts", dtype="int64", copies=2)
            client, go = ps.client(), tmp_path / "go"
            rdd, how = spark.sparkContext.range(200, numSlices=2), {"staleness": 1, "reassign": True, "progress": False}
            end = in_thread(ps.run, lent_programs.count_until, rdd, args=("counts", str(go)), **how)

            def sums():
                return of_epochs(client, "counts", 200, 6).sum(axis=1)

            wait_until(lambda: sums()[1] > 60)
            cluster.kill_scheduler()
            cluster.start_scheduler()
            before = sums().sum()
            wait_until(lambda: sums().sum() > before + 100)
            go.touch()
            assert end() == [(0, 6), (0, 6)], "no trainer began again"
            assert (of_epochs(client, "counts", 200, 6) == 1).all()
            assert ps.status().runs[0].portions.moved > 0
            ps.close()
