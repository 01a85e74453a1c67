"""Training on Spark's partitions: RDDs, DataFrames, errors, lazy stages, several callers on one clock."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.bag
import numpy as np
import pandas as pd
import psutil
import pytest
import spark_programs as programs
import sparks
from servers import wait_until

import dps
from dps.engine.training.data import arrays
from dps.errors import InputError, InputTypeError, StoppedError, TooFewWorkersError, UnknownTableError

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone"),
]


@pytest.fixture
def table(ps):
    """A table of 120 integers, dropped at the end."""
    name = uuid.uuid4().hex
    ps.table(name, rows=120, dtype="int64")
    yield name
    ps.drop_table(name)


def counts(ps, table):
    return ps.client().pull(table).tolist()


def once(rows):
    return [1] * rows + [0] * (120 - rows)


# -- ps.run


def test_rdd(spark, ps, table):
    rdd = spark.sparkContext.range(100, numSlices=2)
    told = ps.run(programs.count, rdd, staleness=100, args=(table,))
    assert counts(ps, table) == once(100)
    assert [t["trainer"] for t in told] == [0, 1]
    assert [t["rows"] for t in told] == [[list(range(50))], [list(range(50, 100))]]
    assert [t["clients"] for t in told] == [0, 0]  # no Dask client there
    assert len({t["pid"] for t in told}) == 2


def test_more_partitions_than_slots_are_shared_whole_and_in_order(spark, ps, table):
    rdd = spark.sparkContext.range(100, numSlices=5)
    told = ps.run(programs.count, rdd, staleness=100, args=(table,))
    assert counts(ps, table) == once(100)
    parts = [list(range(20 * n, 20 * n + 20)) for n in range(5)]
    assert [t["rows"] for t in told] == [parts[::2], parts[1::2]]


def test_results_by_partition(spark, ps):
    def largest(trainer, partitions):
        return [(number, max(rows)) for number, rows in zip(trainer.partition_numbers, partitions, strict=True)]

    rdd = spark.sparkContext.range(100, numSlices=5)
    assert ps.run(largest, rdd, staleness=100, by="partition") == [(n, 20 * n + 19) for n in range(5)]
    lazy = dps.spark.map_partitions_with_ps(rdd, lambda trainer, rows: [(trainer.partition_numbers, max(rows))], ps)
    assert lazy.collect() == [([n], 20 * n + 19) for n in range(5)]
    dps.spark.end_run(lazy)


def test_fewer_trainers(spark, ps, table):
    rdd = spark.sparkContext.parallelize(range(30), 3).filter(lambda n: n >= 10)  # the first partition is empty
    (told,) = ps.run(programs.count, rdd, trainers=1, args=(table,))
    assert told["rows"] == [[], list(range(10, 20)), list(range(20, 30))]
    assert counts(ps, table) == [0] * 10 + [1] * 20 + [0] * 90


@pytest.mark.parametrize("partitions", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_dataframe(spark, ps, table, partitions):
    frame = spark.range(100, numPartitions=partitions).where("id >= 20 or id < 10 or id = 12")
    told = ps.run(programs.count, frame, staleness=math.inf, args=(table,))
    assert counts(ps, table) == [1] * 10 + [0, 0, 1] + [0] * 7 + [1] * 80 + [0] * 20
    assert sum(len(t["rows"]) for t in told) == partitions
    assert [t["clients"] for t in told] == [0, 0]


@pytest.mark.parametrize("partitions", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_a_dataframe_shuffles_is_computed_once(spark, ps, table, partitions):
    """Though the number of its partitions is known only when that is done."""
    frame, computed = shuffled(spark, partitions)
    told = ps.run(programs.count, frame, args=(table,), staleness=math.inf)
    assert counts(ps, table) == once(100)
    assert sum(len(t["rows"]) for t in told) == partitions
    assert computed.value == 100


def shuffled(spark, partitions):
    """A DataFrame behind a shuffle, and how many rows went in."""
    computed = spark.sparkContext.accumulator(0)

    def counted(batches):
        for batch in batches:
            computed.add(batch.num_rows)
            yield batch

    return spark.range(100, numPartitions=2).mapInArrow(counted, "id long").repartition(partitions), computed


def test_columns_are_the_arrays_that_they_are_on_dask(spark, ps):
    """With columns= the same function trains on frames of Spark and of Dask; it was given pandas, blocks or records."""
    rows = [(n, n % 3, n / 2 if n else None, chr(97 + n), ["x"] * (n % 3)) for n in range(10)]
    frame = spark.createDataFrame(rows, "id long, `a.b` int, half double, word string, tags array<string>").repartition(
        3
    )
    choice = (["id", "a.b"], "half", "word", "tags")
    parts = [part for parts in ps.run(programs.given, frame, columns=choice, trainers=2) for part in parts]
    assert len(parts) == 3
    assert {type(part) for part in parts} == {tuple}
    expected = arrays(pd.DataFrame(rows, columns=["id", "a.b", "half", "word", "tags"]), choice)
    order = np.argsort(np.concatenate([part[0][:, 0] for part in parts]))
    for found, wanted in zip(zip(*parts, strict=True), expected, strict=True):
        whole = np.concatenate(found)[order]
        assert (type(whole), whole.dtype.kind, whole.shape) == (np.ndarray, wanted.dtype.kind, wanted.shape)
        same = [list(cell) for cell in whole] == [list(cell) for cell in wanted] if whole.dtype.kind == "O" else None
        assert np.array_equal(whole, wanted, equal_nan=True) if same is None else same
    with pytest.raises(InputError, match=r"no columns 'nope'; it has 'id', 'a\.b', 'half'"):
        ps.run(programs.given, frame, columns=["id", "nope"])
    with pytest.raises(InputTypeError, match=r"a Spark DataFrame; a .*RDD has none: \.toDF\(\)"):
        ps.run(programs.given, frame.rdd, columns=["id"])


def test_modules_of_torch_train_on_executors(spark, ps):
    """An embedding on the servers, and a layer whose gradients the trainers average, beside torch in one process."""
    torch = pytest.importorskip("torch")
    table = uuid.uuid4().hex
    ps.table(table, 3, rows=7, init=dps.Constant(0.1), optimizer=dps.SGD(0.5), aggregate="mean")
    frame = spark.range(40, numPartitions=2).selectExpr("id % 7 as user", "float(id) / 20 as target")
    weights = ps.run(programs.embed, frame, columns=("user", "target"), args=(table,))
    rows, line = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        rows.weight.fill_(0.1)
        line.weight.fill_(1.0)
    descent = torch.optim.SGD([*rows.parameters(), *line.parameters()], lr=0.5)
    users, targets = torch.arange(40) % 7, torch.arange(40) / 20
    for _ in range(5):
        descent.zero_grad()
        (line(rows(users))[:, 0] - targets).square().mean().backward()
        descent.step()
    assert len(weights) == 2
    for found in weights:
        np.testing.assert_allclose(found, line.weight.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(ps.client().pull(table), rows.weight.detach().numpy(), rtol=1e-5)
    ps.drop_table(table)


def test_dataframe_read_by_a_function(spark, ps):
    frame = dps.spark.read_with(spark.range(100, numPartitions=5).where("id >= 20 and id < 41"), programs.read_ids)
    parts = [(n, [i for i in range(20 * n, 20 * n + 20) if 20 <= i < 41]) for n in range(5)]
    assert ps.run(programs.given, frame) == [parts[::2], parts[1::2]]
    frame = dps.spark.read_with(spark.range(10, numPartitions=2), programs.read_ids)
    assert ps.run(programs.given, frame) == [[(0, list(range(5)))], [(1, list(range(5, 10)))]]
    for wrong in (frame, [1]):
        with pytest.raises(InputTypeError, match="an RDD or a DataFrame of Spark's, not a"):
            dps.spark.read_with(wrong, programs.read_ids)
    with pytest.raises(InputTypeError, match="not a ReadWith"):
        dps.spark.map_partitions_with_ps(frame, programs.count_frames, ps, schema="id long")


def test_rdd_read_by_a_function(spark, ps):
    rdd = spark.sparkContext.range(100, numSlices=5)
    parts = [(n, sum(range(20 * n, 20 * n + 20))) for n in range(5)]
    totals = dps.spark.read_with(rdd, programs.total)
    assert ps.run(programs.given, totals) == [parts[::2], parts[1::2]]


def test_connections_outlive_tasks(spark, ps, table):
    rdd = spark.sparkContext.range(2, numSlices=2)
    ps.run(programs.count, rdd, args=(table,))
    told = ps.run(programs.kept, rdd)
    # to the controller in use; one to a server each at least to spare, and no more than there are servers
    assert all(1 <= idle <= 2 and not used for _, idle, used in told), told


def test_the_error_of_a_trainer_arrives_as_it_is(spark, ps):
    rdd = spark.sparkContext.range(2, numSlices=2)
    with pytest.raises(programs.Mine) as caught:
        ps.run(programs.fail, rdd, staleness=math.inf, args=(programs.Mine,))
    assert (caught.value.number, caught.value.place) == (1, "here")
    assert "In trainer 1" in caught.value.__notes__[0]
    assert "spark_programs.py" in caught.value.__notes__[0]
    with pytest.raises(dps.DPSError, match=r"cannot be pickled.*(\n.*)*stubborn 1"):
        ps.run(programs.fail, rdd, args=(programs.Stubborn,))
    with pytest.raises(InputTypeError, match=r"function of trainer 0 returned cannot be pickled"):
        ps.run(programs.unpicklable, rdd)
    assert ps.run(programs.kept, rdd)  # the session is as good as before


@pytest.mark.slow
def test_a_trainer_that_does_not_listen_is_ended_by_spark(spark, ps):
    rdd = spark.sparkContext.range(2, numSlices=2)
    told = (StoppedError, ValueError)  # the second one if trainer 1 could tell its error itself before Spark ended it
    with dask.config.set({"dps.timeouts.stop": "2 s"}), pytest.raises(told, match=r"trainer 1 failed: ValueErr|mine"):
        ps.run(programs.fail_beside_a_deaf_one, rdd)
    assert len(ps.run(programs.kept, rdd)) == 2  # which needs both slots


@pytest.mark.slow
def test_errors_of_the_data_are_sparks_own(spark, ps):
    rdd = spark.sparkContext.range(2, numSlices=2).map(lambda n: 1 // n)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        ps.run(programs.kept, rdd)
    union = spark.sparkContext.range(1, numSlices=1).union(spark.sparkContext.range(1, numSlices=1))
    with pytest.raises(Exception, match="SPARK-24820") as caught:
        ps.run(programs.kept, union)
    assert "repartition" in caught.value.__notes__[0]
    assert len(ps.run(programs.kept, union.repartition(2))) == 2


def test_what_cannot_be_done_is_said_at_once(spark, ps, table):
    rdd = spark.sparkContext.range(4, numSlices=4)
    with pytest.raises(TooFewWorkersError, match=r"3 trainers asked for, and Spark can run 2 tasks"):
        ps.run(programs.kept, rdd, trainers=3)
    with pytest.raises(InputError, match=r"retries=1.*local\[2,4\]"):
        ps.run(programs.kept, rdd, retries=1)
    with pytest.raises(InputTypeError, match=r"rdd.zip"):
        ps.run(programs.kept, (rdd, rdd))
    with pytest.raises(InputError, match=r"nothing to go on with"):
        ps.run(programs.kept, rdd, resume=True)
    with pytest.raises(InputError, match=r"ps.run\(function, data, staleness=2\)"):
        dps.spark.map_partitions_with_ps(rdd, programs.count_each, ps, staleness=2)
    with pytest.raises(InputError, match=r"needs the schema="):
        dps.spark.map_partitions_with_ps(spark.range(3), programs.count_frames, ps)
    with pytest.raises(InputError, match=r"an RDD has no schema"):
        dps.spark.map_partitions_with_ps(rdd, programs.count_each, ps, schema="id long")
    with pytest.raises(InputTypeError, match=r"not a range"):
        dps.spark.map_partitions_with_ps(range(3), programs.count_each, ps)
    with pytest.raises(InputError, match=r"not a result of map_partitions_with_ps"):
        dps.spark.end_run(rdd)


def test_a_run_goes_on_from_a_checkpoint(spark, ps, table, tmp_path):
    rdd = spark.sparkContext.range(1000, numSlices=4)
    store, signal = str(tmp_path / "store"), str(tmp_path / "signal")

    def run(**options):
        return ps.run(programs.count_slowly, rdd, staleness=3, args=(table, signal), **options)

    def under_way():
        runs = [run for run in ps.status().runs if run.run not in before]
        return first.done() or (runs and min(runs[0].clocks) > 5)

    before = {run.run for run in ps.status().runs}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(run)
        wait_until(under_way, 120)
        clock = ps.checkpoint(store)["clock"]
        (tmp_path / "signal").touch()
        assert first.result() == [0, 0]
    assert 5 < clock < 500
    assert counts(ps, table) == [10] * 100 + [0] * 20
    ps.restore(store)
    assert sum(counts(ps, table)) == 2 * clock
    assert run(resume=True) == [clock, clock]
    assert counts(ps, table) == [10] * 100 + [0] * 20


# -- ordinary stages


def test_computed_again_is_pushed_once(spark, ps, table):
    rdd = spark.sparkContext.range(100, numSlices=5)
    counted = dps.spark.map_partitions_with_ps(rdd, programs.count_each, ps, args=(table,))
    assert counts(ps, table) == once(0)  # it is lazy
    assert counted.take(3) == [0, 1, 2]  # and read no further than needed
    assert 3 <= sum(counts(ps, table)) < 100
    assert counted.map(lambda n: 2 * n).sum() == 9900
    assert counts(ps, table) == once(100)
    assert counted.count() == 100
    assert counts(ps, table) == once(100)
    runs = [run for run in ps.status().runs if run.stopped is None]
    assert max(runs[0].attempts) == 3
    dps.spark.end_run(counted)
    with pytest.raises(Exception, match="was closed"):
        counted.count()


def test_dataframe_in_ordinary_stages(spark, ps, table):
    frame = spark.range(100, numPartitions=3)
    counted = dps.spark.map_partitions_with_ps(frame, programs.count_frames, ps, schema="id long", args=(table,))
    assert counted.selectExpr("sum(id)").first()[0] == 4950
    assert counted.count() == 100
    assert counts(ps, table) == once(100)
    dps.spark.end_run(counted)


def test_what_a_dataframe_shuffles_is_computed_once_in_ordinary_stages_too(spark, ps, table):
    frame, computed = shuffled(spark, 3)
    counted = dps.spark.map_partitions_with_ps(frame, programs.count_frames, ps, schema="id long", args=(table,))
    assert [counted.count() for _ in range(2)] == [100, 100]
    assert counts(ps, table) == once(100)
    assert computed.value == 100
    dps.spark.end_run(counted)


def test_a_function_without_results(spark, ps, table):
    rdd = spark.sparkContext.range(10, numSlices=2)
    assert dps.spark.map_partitions_with_ps(rdd, programs.silent, ps, args=(table,)).collect() == []
    assert counts(ps, table) == once(10)


def test_trainers_that_come_and_go_cannot_meet(spark, ps):
    rdd = spark.sparkContext.range(2, numSlices=2)
    with pytest.raises(Exception, match="come and go: they cannot meet"):
        dps.spark.map_partitions_with_ps(rdd, programs.meet, ps).collect()


@pytest.mark.slow
def test_partitions_that_one_task_computes(spark, ps, table):
    rdd = spark.sparkContext.range(100, numSlices=4)
    counted = dps.spark.map_partitions_with_ps(rdd, programs.count_each, ps, args=(table,))
    assert counted.coalesce(1).count() == 100  # RDDs give the number of the partition in every task
    assert counts(ps, table) == once(100)
    other = uuid.uuid4().hex
    ps.table(other, rows=120, dtype="int64")
    frame = spark.range(100, numPartitions=4)
    counted = dps.spark.map_partitions_with_ps(frame, programs.count_frames, ps, schema="id long", args=(other,))
    with pytest.raises(Exception, match="two partitions computed by one task"):
        counted.coalesce(1).count()
    assert counted.repartition(1).count() == 100
    assert counts(ps, other) == once(100)
    ps.drop_table(other)


# -- several callers


def a_process(run, table, name):
    run = pickle.loads(run)
    with run.trainer(name) as trainer:
        for number in range(100, 110):
            trainer.push(table, [number], 1)
            trainer.tick()


def test_dask_spark_and_a_plain_process_on_one_clock(spark):
    other = spark.sparkContext.range(60, numSlices=2)
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, dps.ParameterServer(cluster) as ps:
        ps.table("mixed", rows=120, dtype="int64")
        bag = dask.bag.from_sequence(range(60, 100), npartitions=2)
        told = {}
        with ps.open_run(trainers=5, staleness=2) as run:
            plain = multiprocessing.get_context("spawn").Process(
                target=a_process, args=(pickle.dumps(run), "mixed", "the plain one")
            )
            threads = [
                threading.Thread(
                    target=lambda: told.update(dask=ps.run(programs.count, bag, run=run, args=("mixed",)))
                ),
                threading.Thread(
                    target=lambda: told.update(spark=ps.run(programs.count, other, run=run, args=("mixed",)))
                ),
            ]
            for thread in [*threads, plain]:
                thread.start()
            for thread in [*threads, plain]:
                thread.join(120)
            assert plain.exitcode == 0
            (seen,) = ps.status().runs
        assert len(told["dask"]) == len(told["spark"]) == 2
        assert sorted(seen.clocks) == [10, 20, 20, 30, 30]
        assert ps.client().pull("mixed").tolist() == [1] * 110 + [0] * 10


def test_an_open_run_counts_its_trainers(ps):
    with ps.open_run(trainers=3, staleness=1) as run:
        assert run.reserve(2, "a") == run.reserve(2, "a") == 0
        assert run.reserve(1) == 2
        with pytest.raises(InputError, match=r"1 trainers under the name 'b' do not fit .* 2 for 'a'"):
            run.reserve(1, "b")
        copy = pickle.loads(pickle.dumps(run))
        assert (copy.number, copy.trainers, copy.staleness) == (run.number, 3, 1)
        with pytest.raises(InputError, match="where it was opened"):
            copy.close()
    with pytest.raises(StoppedError, match="was closed"):
        copy.reserve(1, "a")


def test_a_plain_process_comes_back_under_its_name(ps, table):
    with ps.open_run(trainers=1, staleness=0) as run:

        def work(trainer, numbers):
            for number in numbers:
                trainer.push(table, [number], 1)
                trainer.tick()

        dead = dps.Trainer.join(run.ticket, run.number, run.reserve(name="me"), None)
        work(dead, range(5))
        dead.push(table, [5], 1)
        dead.close()
        wait_until(lambda: ps.status().runs[0].lost == [0])
        with run.trainer("me") as trainer:
            work(trainer, range(10))
            assert trainer.attempt == 1
    assert counts(ps, table) == once(10)


def test_an_error_in_one_caller_stops_the_others(spark, ps):
    rdd = spark.sparkContext.range(2, numSlices=2)
    run = ps.open_run(trainers=3, staleness=5)
    caught = []

    def caller():
        try:
            ps.run(programs.count, rdd, run=run, args=("nowhere",))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=caller)
    thread.start()

    def work():
        with run.trainer() as trainer:
            while True:
                trainer.tick()

    with pytest.raises(StoppedError, match="nowhere"):
        work()
    thread.join(60)
    assert isinstance(caught[0], UnknownTableError)
    run.close()


# -- where the servers are


def test_an_existing_dask_cluster_by_address(spark):
    cluster = dps.LocalCluster(servers=2, trainers=0, dashboard_address=None)
    with cluster, dps.ParameterServer(cluster.scheduler_address, servers=2) as ps:
        ps.table("t", rows=120, dtype="int64", copies=2)
        ps.run(programs.count, spark.sparkContext.range(20, numSlices=2), staleness=20, args=("t",))
        assert counts(ps, "t") == once(20)


def test_foreach_partition_of_a_frame(spark, ps, table):
    frame = spark.range(100, numPartitions=3)
    assert dps.spark.foreach_partition_with_ps(frame, programs.push_frames, ps, args=(table,)) is None
    assert counts(ps, table) == once(100)


def test_get_or_create_finds_the_same_until_it_is_closed(spark):
    first = dps.spark.get_or_create(spark, servers=1, name="once")
    assert dps.spark.get_or_create(spark.newSession(), servers=7) is first
    first.table("t", rows=1)
    assert list(dps.spark.get_or_create(spark).tables()) == ["t"]
    first.close()
    with dps.spark.get_or_create(spark, servers=1, name="twice") as second:
        assert second is not first
        assert second.tables() == {}


# The last one: it stops the session that all others share.
def test_spark_stop_closes_the_parameter_server(spark):
    created = dps.spark.get_or_create(spark, servers=1, name="created")
    another = dps.spark.start(spark, servers=1, name="embedded")
    another.table("t", rows=1)
    pids = [nanny.pid for nanny in another.dask_client.cluster.workers.values()]
    spark.stop()
    wait_until(lambda: another.closed and created.closed, 60)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
