"""dps.map_partitions_with_ps: lazy stages on Dask collections, in which each partition counts once."""

from __future__ import annotations

import threading

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask import delayed
from distributed import Client
from servers import wait_until

import dps
from dps.engine.training.lazy_tasks import Stage
from dps.errors import InputError, InputTypeError, StoppedError


@pytest.fixture(scope="module")
def client():
    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        ps.table("counts", rows=10, dtype="int64")
        ps.client().pull("counts")  # its connections last as long as the module
        yield ps


@pytest.fixture(autouse=True)
def zero(ps):
    FAILED.clear()
    ps.client().assign("counts", None, 0)


FAILED = []  # tables keep what attempts have pushed, this what they have done


def counts(ps):
    return ps.client().pull("counts").tolist()


def open_runs(client):
    runs = client.cluster.scheduler.plugins["dps-controller"].sessions["dps"].runs.runs
    return [run.number for run in runs.values() if run.elastic and not run.over]


def count(trainer, partition):
    """Each number of the partition is counted; the partition is returned ten times as large."""
    trainer.push("counts", np.asarray(partition).ravel(), 1)
    return partition * 10


def count_all(trainer, numbers):
    for number in numbers:
        trainer.push("counts", [number], 1)
        yield number * 10


def fail_once(trainer, numbers):
    trainer.push("counts", numbers, 1)
    if trainer.number == 1 and not FAILED:
        FAILED.append(trainer.attempt)
        raise OSError("after the push")
    trainer.push("counts", numbers, 100)
    return list(numbers)


FRAME = pd.DataFrame({"x": range(10), "word": list("ab" * 5)}, index=range(100, 110))


def frame_counts(trainer, frame):
    trainer.push("counts", frame.x, 1)
    return frame.assign(half=frame.x / 2)[["half", "x"]]


def collections():
    numbers = da.arange(10, chunks=3)
    frame = dd.from_pandas(FRAME, npartitions=3)
    yield "bag", db.range(10, npartitions=3), count_all, lambda result: list(result)
    yield "array", numbers, count, lambda result: (result // 1).tolist()
    yield "blocks", numbers.reshape(2, 5).rechunk((1, 2)), count, lambda result: result.ravel().tolist()
    yield "frame", frame, frame_counts, lambda result: (result.half * 20).astype(int).tolist()
    yield "series", frame.x, count, lambda result: result.tolist()
    yield (
        "delayed",
        [delayed(np.arange)(0, 4), delayed(np.arange)(4, 10)],
        count,
        lambda result: np.hstack(result).tolist(),
    )


@pytest.mark.parametrize("kind", ["bag", "array", "blocks", "frame", "series", "delayed"])
def test_each_kind_is_lazy_keeps_its_kind_and_counts_once(ps, kind):
    data, function, values = next(rest for name, *rest in collections() if name == kind)
    result = dps.map_partitions_with_ps(data, function, ps)
    assert type(result) is type(data)
    assert counts(ps) == [0] * 10
    for _ in range(2):
        computed = dask.compute(result)[0]
        assert values(computed) == list(range(0, 100, 10))
        assert counts(ps) == [1] * 10
    dps.end_run(result)


def test_one_delayed_value(ps):
    result = dps.map_partitions_with_ps(delayed(np.arange)(10), count, ps)
    assert counts(ps) == [0] * 10
    assert (result + 1).compute().tolist() == list(range(1, 100, 10))
    assert counts(ps) == [1] * 10


def test_what_the_result_looks_like_is_found_out_without_pushing(ps):
    def sums(trainer, block):
        assert trainer.tick() == 1
        trainer.push({"counts": ([0], 1)})
        assert trainer.push_pull("counts", [5, 5], 3).shape == (2,)
        assert trainer.push_pull("counts", slice(2, 5), 3).shape == (3,)
        assert trainer.pull("counts", [5])[0] >= 0
        return block.sum(axis=1, dtype="float32")

    blocks = da.ones((4, 6), chunks=(2, 6))
    result = dps.map_partitions_with_ps(blocks, sums, ps, drop_axis=1)
    assert (result.shape, result.dtype, result.chunks) == ((4,), np.float32, ((2, 2),))
    assert counts(ps) == [0] * 10
    assert result.compute().tolist() == [6, 6, 6, 6]
    assert counts(ps)[:6] == [2, 0, 6, 6, 6, 12]

    frame = dps.map_partitions_with_ps(dd.from_pandas(FRAME, npartitions=2), frame_counts, ps)
    assert frame.dtypes.to_dict() == {"half": np.float64, "x": np.int64}
    assert not frame.known_divisions


def test_with_meta_the_function_is_not_called(ps):
    calls = []

    def note(trainer, part):
        calls.append(trainer.number)
        return part.astype("float32")

    array = dps.map_partitions_with_ps(da.arange(4, chunks=2), note, ps, meta=np.empty(0, "float32"))
    frame = dps.map_partitions_with_ps(dd.from_pandas(FRAME[["x"]], npartitions=2), note, ps, meta={"x": "float32"})
    assert not calls
    assert array.dtype == frame.x.dtype == np.float32
    assert array.sum().compute() == 6
    assert frame.x.sum().compute() == 45
    with pytest.raises(InputError, match=r"KeyError\('y'\).*made-up partition \(DataFrame of 2 rows\); pass meta="):
        dps.map_partitions_with_ps(dd.from_pandas(FRAME, npartitions=2), lambda trainer, frame: frame["y"], ps)
    with pytest.raises(InputTypeError, match="returns an array, not a int"):
        dps.map_partitions_with_ps(da.arange(4, chunks=2), lambda trainer, block: 1, ps)
    with pytest.raises(InputTypeError, match="a frame or a series, not a int"):
        dps.map_partitions_with_ps(dd.from_pandas(FRAME, npartitions=2), lambda trainer, frame: 1, ps)


def test_a_task_that_is_retried_counts_once(ps, client):
    result = dps.map_partitions_with_ps(db.range(10, npartitions=2), fail_once, ps)
    assert client.compute(result, retries=1).result() == list(range(10))
    assert FAILED == [0]
    assert counts(ps) == [101] * 10


def test_some_partitions_now_and_all_of_them_later(ps):
    frame = dps.map_partitions_with_ps(dd.from_pandas(FRAME, npartitions=5), frame_counts, ps)
    assert frame.partitions[2].x.compute().tolist() == [4, 5]
    assert counts(ps) == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert len(frame.tail(1)) == 1
    assert frame.x.sum().compute() == 45
    assert counts(ps) == [1] * 10
    array = dps.map_partitions_with_ps(da.arange(10, chunks=2), count, ps)
    assert array[4:6].compute().tolist() == [40, 50]
    assert array.blocks[2].compute().tolist() == [40, 50]
    assert array.sum().compute() == 450
    assert counts(ps) == [2] * 10


def test_two_branches_of_one_graph_count_once(ps):
    numbers = dps.map_partitions_with_ps(db.range(10, npartitions=3), count_all, ps)
    assert dask.compute(numbers.sum(), numbers.map(str).count(), numbers.max()) == (450, 10, 90)
    assert counts(ps) == [1] * 10


@pytest.mark.parametrize("scheduler", ["threads", "sync"])
def test_without_a_worker(ps, scheduler):
    numbers = dps.map_partitions_with_ps(db.range(10, npartitions=3), count_all, ps)
    assert numbers.sum().compute(scheduler=scheduler) == 450
    assert numbers.sum().compute() == 450
    assert counts(ps) == [1] * 10


class Gated:
    """Computes one partition several times at once: each attempt pushes, waits for its gate, and pushes again."""

    def __init__(self, ps):
        self.gates = [threading.Event() for _ in range(3)]
        self.begun, self.outcomes = [], {}
        run = ps.connection.call("start_run", trainers=1, staleness=None, elastic=True)
        self.stage = Stage(ps.ticket, run, "token", self.function, (), {})
        self.threads = []

    def function(self, trainer, partition):
        trainer.push("counts", [0], 1)
        self.begun.append(trainer.attempt)
        assert self.gates[min(trainer.attempt, 2)].wait(60)
        trainer.push("counts", [1], 1)
        return trainer.attempt

    def compute(self):
        """Another attempt, which has begun when this returns."""
        name, before = len(self.threads), len(self.begun)

        def work():
            try:
                self.outcomes[name] = self.stage("partition", 0)
            except Exception as error:
                self.outcomes[name] = error

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        wait_until(lambda: len(self.begun) > before)

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_a_zombie_counts_once_although_it_ends_last(ps):
    gated = Gated(ps)
    gated.compute()
    gated.compute()
    gated.gates[1].set()
    wait_until(lambda: gated.outcomes)
    assert gated.outcomes == {1: 1}
    gated.gates[0].set()  # the push after that is refused: the later attempt has pushed to this shard
    gated.gates[2].set()
    gated.join()
    assert gated.outcomes == {0: 2, 1: 1}  # and its function was called once more
    assert counts(ps)[:2] == [1, 1]


def test_of_two_at_once_the_earlier_waits_for_the_later(ps):
    gated = Gated(ps)
    gated.compute()
    gated.compute()
    gated.gates[0].set()
    gated.gates[2].set()
    with dask.config.set({"dps.timeouts.clock": "50 ms"}):  # one that would wait for ever gives up
        gated.threads[0].join(60)
    assert "partition 0 is computed twice at once, and attempt 0 has waited for attempt 1" in str(gated.outcomes[0])
    assert isinstance(gated.outcomes[0], StoppedError)
    gated.gates[1].set()
    gated.join()
    assert gated.outcomes[1] == 1
    assert counts(ps)[:2] == [1, 1]


def test_the_end(ps, client):
    before = open_runs(client)
    numbers = dps.map_partitions_with_ps(db.range(10, npartitions=3), count_all, ps)
    values = dps.map_partitions_with_ps([delayed(np.arange)(10)], count, ps)
    assert len(open_runs(client)) == len(before) + 2
    numbers.compute()
    dps.end_run(numbers)
    dps.end_run(values)
    assert open_runs(client) == before
    with pytest.raises(StoppedError, match="was closed"):
        numbers.compute()
    for wrong in (numbers, values, db.range(3, npartitions=1), "text", 3, None, []):
        with pytest.raises(InputError, match="is not a result of map_partitions_with_ps"):
            dps.end_run(wrong)
    assert counts(ps) == [1] * 10


def test_what_cannot_be_done_is_refused(ps, client):
    before, numbers = open_runs(client), db.range(4, npartitions=2)
    for data in (3, [1, 2], np.arange(3), "text", (numbers, numbers), [delayed(1), numbers]):
        with pytest.raises(InputTypeError, match="takes a Dask bag, array or dataframe, a delayed value or a list"):
            dps.map_partitions_with_ps(data, count, ps)
    with pytest.raises(InputError, match="no partitions"):
        dps.map_partitions_with_ps([], count, ps)
    with pytest.raises(InputError, match="bags and delayed values have none"):
        dps.map_partitions_with_ps(numbers, count, ps, meta=[])
    with pytest.raises(InputTypeError, match="chunks: only arrays"):
        dps.map_partitions_with_ps(numbers, count, ps, chunks=3)
    with pytest.raises(InputTypeError, match="staleness; there are chunks"):
        dps.map_partitions_with_ps(da.arange(4, chunks=2), count, ps, staleness=1)
    with pytest.raises(InputTypeError, match="compute them first"):
        dps.map_partitions_with_ps(numbers, count, ps, args=(delayed(1),))
    with pytest.raises(InputTypeError, match="meta of an array is an empty array"):
        dps.map_partitions_with_ps(da.arange(4, chunks=2), count, ps, meta={"x": int})
    with pytest.raises(InputError, match="axis 0 has 2 blocks: to drop it"):
        dps.map_partitions_with_ps(da.arange(4, chunks=2), count, ps, drop_axis=0)
    assert open_runs(client) == before
    with pytest.raises(InputTypeError, match="returns an iterable or None, not a int"):
        dps.map_partitions_with_ps(numbers, lambda trainer, part: 1, ps).compute()
    assert dps.map_partitions_with_ps(numbers, lambda trainer, part: None, ps).compute() == []
