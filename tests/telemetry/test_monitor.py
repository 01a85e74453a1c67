"""What the controller makes of reports: rates, curves, snapshots; and the staleness bound as a dial."""

from __future__ import annotations

import json
import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask
import msgspec
import numpy as np
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from servers import wait_until
from snapshots import history as sample_history
from snapshots import snapshot as sample_snapshot

import dps
from dps.engine.telemetry.history import Series
from dps.engine.telemetry.monitor import MAX_RUNS
from dps.engine.telemetry.reports import COLUMNS, TrainerReport
from dps.engine.telemetry.run_history import RunHistory
from dps.engine.telemetry.run_telemetry import RunTelemetry
from dps.engine.telemetry.server_telemetry import ServerTelemetry
from dps.engine.telemetry.snapshot import PARTS, Curve, Status
from dps.errors import InputError

# -- curves


@given(st.integers(0, 300), st.integers(2, 20))
def test_a_series_is_bounded_and_covers_everything(count, most):
    series = Series(("time", "value"), most)
    for n in range(count):
        series.append(n, -n)
    found = series.columns()["time"]
    assert len(found) <= most
    steps = set(np.diff(found).tolist())
    assert found == sorted(found)
    assert len(steps) <= 1
    if count:
        assert found[0] == 0
        assert count - 1 - found[-1] <= max(steps, default=1)
        assert len(series.columns(5)["value"]) <= 5


# -- a run's reports


def report(number, clocks=5.0, wait=0.0, total=0.25, loss=None, **counts):
    row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": clocks, "total": total, "wait": wait, "compute": total - wait}
    row |= counts
    metrics = {} if loss is None else {"loss": (2, 2 * loss, loss)}
    return TrainerReport(number, [row[name] for name in COLUMNS], {0: (10.0, 0.01)}, metrics)


def looked(watch, now, clocks=(5, 5)):
    return watch.diagnose(now, now + 1e9, clocks, ["running"] * 2, [0.1, 0.1], [], 0)


def test_a_report_counts_once_and_that_of_a_new_attempt_again():
    watch = RunTelemetry(2)
    for _ in range(3):
        watch.reported(0, 0, report(1), 5, 1.0)
    watch.reported(0, 0, report(2), 10, 1.25)
    assert watch.totals().compute == 0.5
    watch.reported(0, 1, report(1), 10, 2.0)  # run again
    watch.reported(0, 0, report(3), 15, 2.1)  # what was left of the attempt before
    assert watch.totals().compute == 0.75


def test_metrics_are_means_over_trainers_between_two_looks():
    watch = RunTelemetry(2)
    watch.reported(0, 0, report(1, loss=0.5), 5, 1.0)
    watch.reported(1, 0, report(1, loss=0.3), 5, 1.0)
    looked(watch, 1.5)
    looked(watch, 2.5)  # nothing came
    watch.reported(0, 0, report(2, loss=0.25), 10, 3.0)
    looked(watch, 3.5, (10, 5))
    curve = watch.curves()["loss"]
    assert curve.value == pytest.approx([0.4, 0.25])
    assert curve.clock == [5, 7.5]
    assert watch.latest()["loss"].value == [0.25]
    assert watch.logged() == {"loss": [0.25, 0.3]}


def test_the_last_value_of_each_metric_and_trainer_is_kept_of_a_bounded_number():
    watch, told = RunTelemetry(2), {f"metric{n}": (1, float(n), float(n)) for n in range(32)}
    watch.reported(1, 0, report(1)._replace(metrics={"auc": (2, 1.5, 0.75), **told}), 5, 1.0)
    assert watch.logged()["auc"] == [None, 0.75]
    assert len(watch.logged()) == 16
    assert "metric31" not in watch.curves(), "32 names were known by then"


def test_the_loss_is_always_among_those_that_are_kept():
    told = {f"metric{n}": (1, float(n), float(n)) for n in range(31)}
    watch = RunTelemetry(2)
    watch.reported(0, 0, report(1)._replace(metrics={**told, "val_loss": (1, 0.5, 0.5)}), 5, 1.0)
    assert next(iter(watch.logged().items())) == ("val_loss", [0.5, None])
    assert len(watch.logged()) == 16
    watch = RunTelemetry(2)
    watch.reported(0, 0, report(1)._replace(metrics={**told, "last": (1, 0.0, 0.0)}), 5, 1.0)
    watch.reported(1, 0, report(1)._replace(metrics={"more": (1, 0.0, 0.0), "loss": (1, 0.25, 0.25)}), 5, 1.0)
    looked(watch, 1.5)
    assert watch.logged()["loss"] == [None, 0.25]
    assert watch.curves()["loss"].value == [0.25]
    assert len(watch.curves()) == 32
    assert not {"last", "more"} & watch.curves().keys()


def test_fractions_are_of_the_last_seconds_and_a_wait_that_goes_on_counts():
    watch = RunTelemetry(2)
    watch.reported(0, 0, report(1, wait=0.05, rows=100.0, keys_pulled=50.0, bytes_in=1000.0), 5, 9.0)
    found = watch.columns(9.0, {1: 7.0})
    assert sum(found[name][0] for name in PARTS) == pytest.approx(1, abs=1e-3)
    assert found["wait"] == [pytest.approx(0.2), 1.0]
    assert (found["rate"][0], found["rows_rate"][0], found["keys_rate"][0]) == pytest.approx((20, 400, 200))
    assert found["step"][0] == pytest.approx(0.04)
    late = watch.columns(59.0, {})  # nothing was heard for 50 s: its iterations may be long
    assert late["rate"] == [pytest.approx(5 / 50.25, abs=1e-3), 0]
    assert late["compute"] == [pytest.approx(50.2 / 50.25, abs=1e-3), 0]
    assert watch.columns(59.0, {}, left={0})["rate"] == [0, 0]
    watch.ended(9.5, 1e9)
    assert watch.columns(60.0, {})["rate"][0] == pytest.approx(20), "of a run that is over, how it was at its end"


def test_a_slow_trainer_is_news_once_and_so_is_its_end():
    watch, news, over = RunTelemetry(2), [], []
    for tick in range(1, 200):
        now, slow = tick / 4, tick < 100
        clocks = 5.0 if slow else 10.0
        watch.reported(0, 0, report(tick, clocks=clocks, wait=0.125 * slow), 5 * tick, now)
        watch.reported(1, 0, report(tick, clocks=clocks), 5 * tick, now)
        if tick % 4 == 0:
            new, gone = watch.diagnose(now, 1e9 + now, (5 * tick, 5 * tick), ["running"] * 2, [0.0] * 2, [], 1)
            news += new
            over += gone
    assert {finding.trainer for finding in news} == {1}
    assert "permanent" in {finding.kind for finding in news}
    assert not watch.findings
    assert {f.trainer for f in over} == {1}
    ever = watch.past_findings()
    assert ever
    assert all(entry.until is not None and entry.until >= entry.since > 1e8 for entry in ever)
    json.dumps(msgspec.to_builtins(ever), allow_nan=False)


def test_the_last_numbers_are_not_lost():
    watch = RunTelemetry(2)
    watch.reported(0, 0, report(1, loss=0.5), 5, 1.0)
    watch.ended(1.1, 1e9)
    assert watch.curves()["loss"] == Curve(time=[1e9], clock=[5.0], value=[0.5])


def test_nobody_has_reported_yet():
    """One is lost, or silent for long, before there is anything to compare with."""
    watch = RunTelemetry(2)
    for now in (1.0, 2.0, 40.0, 41.0, 42.0):
        new, _ = watch.diagnose(now, 1e9, (0, 0), ["lost", "running"], [now, now], [], 0)
        json.dumps([finding._asdict() for finding in new], allow_nan=False)
    assert {finding.kind for finding in watch.findings} == {"dead"}


def test_memory_of_many_trainers_is_bounded():
    watch = RunTelemetry(4096)
    for number in range(1, 4):
        for trainer in range(0, 4096, 64):
            watch.reported(trainer, 0, report(number), number, number / 4)
    assert len(watch.strips(1.0, 1.0)) == 32
    assert watch.totals().compute == pytest.approx(3 * 64 * 0.25)


def test_the_history_of_a_run_that_is_over_does_not_move_with_wall_time():
    watch = RunTelemetry(1)
    watch.reported(0, 0, report(1), 5, 2.0)

    def times(now, wall):
        (kept,), (strip,) = watch.rows(now, wall, {}), watch.strips(now, wall)
        assert strip.time == kept.time.tolist()
        return strip.time

    assert times(3.0, 1003.0) == [1002.0]
    assert times(3.0, 1003.5) == [1002.5]
    watch.ended(4.0, 1004.25)
    assert times(5.0, 1005.0) == times(6.0, 2000.0) == [1002.25]


# -- a server's reports


def counted(requests, seconds=0.001, memory=1e8):
    pulls = [requests, 10 * requests, 80 * requests, seconds * requests]
    table = {"pull": pulls, "push": [0, 0, 0, 0.0], "pull_ms": {9: requests}, "push_ms": {}}
    table["hot"] = {"accesses": 0.0, "keys": [], "more": (0.0, 0.0, 0.0)}
    tables = {3: {**table, "rows": 7, "bytes": 56, "shards": {0: 4 * requests, 1: 6 * requests}}}
    about = {
        "cpu": requests / 1000,
        "busy": requests / 2000,
        "polled": 0.0,
        "starved": requests / 4000,
        "host": None,
        "memory": memory,
        "lag": 0.0,
        "connections": 1,
    }
    return {**about, "unconfirmed": [0, 0, 0.0], "tables": tables}


def test_rates_are_differences_of_counters():
    watch = ServerTelemetry()
    watch.reported(counted(100), 10.0, 1e9)
    assert watch.rates().requests == 0, "one report is no rate"
    watch.reported(counted(300), 12.0, 1e9 + 2)
    rates = watch.rates()
    assert (rates.requests, rates.keys, rates.bytes) == pytest.approx((100, 1000, 8000))
    assert rates.service == pytest.approx(0.001)
    assert 2**9 * 1e-6 <= rates.p50 <= rates.p99 <= 2**10 * 1e-6
    assert watch.rates([4]).requests == 0
    assert watch.rates([3]) == rates
    assert watch.loads(3) == pytest.approx({0: 400, 1: 600})
    assert (watch.cpu(), watch.busy(), watch.starved()) == pytest.approx((0.1, 0.05, 0.025))
    assert watch.steady(9.0)
    assert not watch.steady(10.0), "only one report is later than that"
    assert watch.curves.columns()["busy"] == pytest.approx([0, 0.05])
    quiet = {**counted(300), "tables": {}}  # nothing has changed, so nothing was said
    for n in range(20):
        watch.reported(quiet, 13.0 + n, 1e9)
    assert watch.rates().requests == watch.busy() == 0
    assert watch.tables()[3]["rows"] == 7
    watch.keep({4})
    assert not watch.tables()


# -- put together


@pytest.fixture(scope="module")
def ready():
    with (
        dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        ps.table("w", dim=2)
        ps.client().pull("w", np.arange(64))  # its connections stay
        yield client, ps


def snapshot_of(ps) -> Status:
    return msgspec.msgpack.decode(ps.connection.call("snapshot"), type=Status)


def history_of(ps, **fields):
    return msgspec.msgpack.decode(ps.connection.call("history", **fields), type=RunHistory)


def same_shape(sample, real, path="snapshot"):
    """The sample that pages and reports are tested with has all that the real one has, and no more."""
    if isinstance(sample, dict) and isinstance(real, dict) and not {"w", "weights", "loss"} & (sample.keys() | real):
        assert sample.keys() == real.keys(), path
        for name in sample:
            same_shape(sample[name], real[name], f"{path}.{name}")
    elif isinstance(sample, dict) and isinstance(real, dict):
        if sample and real:
            same_shape(next(iter(sample.values())), next(iter(real.values())), f"{path}[]")
    elif isinstance(sample, list) and isinstance(real, list):
        if sample and real:
            same_shape(sample[0], real[0], f"{path}[]")
    elif sample is not None and real is not None:
        numbers = isinstance(sample, (int, float)) and isinstance(real, (int, float))
        assert numbers or type(sample) is type(real), f"{path}: {sample!r} and {real!r}"


def step(trainer, parts, seconds):
    keys = np.arange(100) + 50 * trainer.number
    for _ in trainer.iterate(parts, epochs=10**6):
        trainer.push("w", keys, np.ones((100, 2)))
        trainer.pull("w", keys)
        trainer.log(loss=1 / (1 + trainer.clock))
        if trainer.clock > 3 and trainer.pull("w", [10**9])[0, 0]:
            return trainer.time_spent()


def test_a_snapshot_of_a_run_adds_up(ready):
    _client, ps = ready
    found = []

    def look():
        def seen():
            snapshot = snapshot_of(ps)
            run = snapshot.current_run
            if run is None or run.over or not all(trainer.rate for trainer in run.trainers):
                return None
            return snapshot if snapshot.servers[0].p50 > 0 and run.metrics["loss"].value else None

        wait_until(lambda: found.append(seen()) or found[-1])
        del found[:-1]
        found.append(msgspec.to_builtins(history_of(ps)))
        ps.client().push("w", [10**9], [[1.0, 1.0]])

    thread = threading.Thread(target=look)
    thread.start()
    splits = ps.run(step, [dask.delayed(n) for n in range(2)], staleness=1, args=(0,), progress=False)
    thread.join()
    snapshot, past = found
    same_shape(sample_snapshot().to_dict(), snapshot.to_dict())
    same_shape(msgspec.to_builtins(msgspec.convert(sample_history(), RunHistory)), past, "history")
    run = snapshot.runs[0]
    for n in range(2):
        assert run.trainers[n].split.total == pytest.approx(1, abs=0.01)
    assert run.maximum - run.minimum <= 2
    assert run.metrics["loss"].value
    assert snapshot.tables["w"].rows == sum(server.rows for server in snapshot.servers) == 150
    assert sum(snapshot.tables["w"].load) > 0
    assert past["trainers"][0]["clock"]
    assert past["ended"] is None
    json.dumps([snapshot.to_dict(), past], allow_nan=False)
    after = snapshot_of(ps).runs[0]
    assert after.state == "finished"
    assert {trainer.state for trainer in after.trainers} == {"left"}
    for name in PARTS:  # the last report comes with the leave: nothing is missing
        assert getattr(after.totals, name) == pytest.approx(sum(split[name] for split in splits), rel=0.02, abs=0.02)
    assert history_of(ps).ended is not None


def push_once(trainer, parts):
    trainer.push("w", [trainer.number], [[1.0, 1.0]])


def test_a_run_in_which_parties_only_met_takes_the_place_of_no_other(ready):
    """As a fit with Spark has one, of its driver and its first trainer, beside the run."""
    client, _ = ready
    with dps.ParameterServer(client, servers=1, name="met") as ps:
        ps.table("w", dim=2)
        for n in range(MAX_RUNS + 1):
            with ps.open_run(trainers=2) as meeting:
                going = snapshot_of(ps).runs[0]
                assert (going.run, going.state) == (meeting.number, "running"), "while it goes on it is seen"
                ps.run(push_once, [dask.delayed(n)], progress=False)
                with ThreadPoolExecutor(2) as threads:
                    assert list(threads.map(lambda k: meet(meeting, k), range(2))) == [[b"0", b"1"]] * 2
        runs = snapshot_of(ps).runs
        assert [run.run for run in runs] == [2 * n + 2 for n in range(MAX_RUNS, 0, -1)]
        assert all(run.totals for run in runs)
        wait_until(lambda: not history_of(ps, run=2).trainers)  # of the first nothing is kept
        assert all(history_of(ps, run=run.run).trainers for run in runs)
        with ps.open_run(trainers=2) as meeting, ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda k: meet(meeting, k), range(2)))
        assert history_of(ps, run=0).run == runs[0].run, "which ps.report takes by itself"


def meet(meeting, number):
    with meeting.trainer() as trainer:
        return sorted(trainer.allgather(b"%d" % number))


# -- the dial


def until_told(trainer, parts, bound):
    seen = [trainer.staleness]
    while trainer.staleness != bound:
        trainer.tick()
        if trainer.staleness != seen[-1]:
            seen.append(trainer.staleness)
        time.sleep(0.001)
    return seen


def while_running(ps, function, *args):
    """`ps.run` of two trainers in a thread; [its results], when it is joined."""
    found = []
    before = len(ps.status().runs)

    def work():
        found.append(ps.run(function, [dask.delayed(n) for n in range(2)], args=args, progress=False))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(ps.status().runs) > before and ps.status().runs[0].joined == 2)
    return thread, found


def test_the_bound_changes_while_a_run_goes_on(ready):
    client, ps = ready
    thread, found = while_running(ps, until_told, 7)
    for bound in (3, math.inf, 2, 7):
        ps.set_staleness(bound)
        assert ps.staleness() == bound
        time.sleep(0.05)
    thread.join(30)
    assert all(seen[0] == 0 and seen[-1] == 7 for seen in found[0])
    texts = [event["event"] for _, event in client.get_events("dps")]
    assert any("staleness 3, before 0" in text for text in texts)
    assert any("staleness inf, before 3" in text for text in texts)
    assert any("staleness 3, before 0" in text for _, text in ps.status().events)


def test_the_bound_holds_again_when_it_comes_back(ready):
    """From no bound to one: the fast trainer is held where it should be, one iteration later at most."""
    _client, ps = ready

    def race(trainer, parts):
        lead, before = [], trainer.staleness
        for _ in range(400):
            trainer.tick()
            if trainer.staleness == 1 and before == 1:
                lead.append(trainer.clock)
            before = trainer.staleness
            if trainer.number:
                time.sleep(0.002)
                trainer.assign("w", [10**8], [[trainer.clock, 0]])
            elif lead and trainer.clock > lead[0] + 2:
                slow = int(trainer.pull("w", [10**8])[0, 0])
                if trainer.clock - slow > 1 + 1 and slow < 400:  # one more: what was told a moment ago
                    return f"at {trainer.clock}, the other at {slow}"
        return "good"

    thread, found = while_running(ps, race)
    ps.set_staleness(math.inf)
    time.sleep(0.1)
    ps.set_staleness(1)
    thread.join(60)
    assert found[0] == ["good", "good"]


def test_what_the_dial_refuses(ready):
    _client, ps = ready
    with pytest.raises(InputError, match=r"no run .* goes on, so neither staleness"):
        ps.set_staleness(3)
    for wrong in (-1, 1.5, "fast", True):
        with pytest.raises(InputError, match="staleness is 0, 1, 2"):
            ps.set_staleness(wrong)
    ps.table("sums", rows=2, aggregate="sum")
    try:
        with pytest.raises(InputError, match=r"table 'sums' collects a clock's pushes"):
            ps.set_staleness(3)
    finally:
        ps.drop_table("sums")


@pytest.mark.thorough
def test_the_automatic_setting(ready):
    """One that pauses now and then: the bound rises from 1, and a number ends it."""
    _client, ps = ready

    def uneven(trainer, parts):
        for _ in range(100_000):
            trainer.log(loss=1.0)
            time.sleep(0.3 if trainer.clock % 40 == 20 * trainer.number else 0.005)
            trainer.tick()
            if trainer.staleness == 9:
                return max(seen)
            seen.add(trainer.staleness)

    seen = set()
    thread, found = while_running(ps, uneven)
    ps.set_staleness("auto")
    wait_until(lambda: snapshot_of(ps).runs[0].auto)
    wait_until(lambda: ps.staleness() > 1)
    ps.set_staleness(9)
    assert not snapshot_of(ps).runs[0].auto
    thread.join(30)
    assert found
    assert max(found[0]) > 1
    assert any("by the automatic setting" in text for _, text in ps.status().events)


@pytest.mark.thorough
def test_what_fails_at_looking_harms_no_run(ready, monkeypatch):
    _, ps = ready

    def fail(*args):
        raise ZeroDivisionError("a bug in here")

    def work(trainer, parts):
        for _ in range(50):
            time.sleep(0.02)
            trainer.tick()
        return trainer.clock

    for name in ("reported", "diagnose"):
        with monkeypatch.context() as patch:
            patch.setattr(RunTelemetry, name, fail)
            assert ps.run(work, [dask.delayed(n) for n in range(2)], progress=False) == [50, 50]
            run = snapshot_of(ps).runs[0]
        assert run.clocks == [50, 50]
        assert not [found for found in run.stragglers if found.kind != "overloaded"]


@pytest.mark.thorough
def test_an_elastic_run_misses_nobody(ready):
    """Trainers of an ordinary Spark stage come when they are scheduled."""
    _, ps = ready
    run = ps.connection.call("start_run", trainers=64, staleness=None, elastic=True)
    trainer = dps.Trainer.join(ps.ticket, run, 3, None)
    trainer.tick()
    time.sleep(2.5)
    assert not [found for found in ps.status().stragglers if found.kind != "overloaded"]
    trainer.close()
    ps.connection.call("end_run", run=run)


@pytest.mark.thorough
def test_the_automatic_setting_begins_where_the_run_is(ready):
    _, ps = ready

    def work(trainer, parts):
        while trainer.staleness != 9:
            time.sleep(0.01)
            trainer.tick()
        return trainer.staleness

    thread, _ = while_running(ps, work)
    ps.set_staleness(5)
    ps.set_staleness("auto")
    time.sleep(1.2)
    assert ps.staleness() in (4, 5)
    assert ps.status().runs[0].auto
    ps.set_staleness(9)
    assert not ps.status().runs[0].auto
    thread.join(30)


def test_a_run_whose_automatic_setting_is_refused_does_not_go_on(ready):
    _, ps = ready
    ps.table("sums", rows=2, aggregate="sum")
    try:
        with pytest.raises(InputError, match="collects a clock's pushes"):
            ps.run(step, [dask.delayed(1)], staleness="auto", progress=False)
        assert "running" not in [run.state for run in snapshot_of(ps).runs]
        thread, found = while_running(ps, until_told_later)
        ps.set_staleness(0)  # what it is already, and all that it may be
        thread.join(30)
        assert found
    finally:
        ps.drop_table("sums")


def until_told_later(trainer, parts):
    for _ in range(100):
        time.sleep(0.01)
        trainer.tick()


def test_the_bound_of_one_of_two_runs(ready):
    _, ps = ready
    with ps.open_run(trainers=1) as one, ps.open_run(trainers=1) as other:
        with one.trainer("a") as a, other.trainer("b") as b:
            one.set_staleness(3)
            a.tick()
            b.tick()
            assert (a.staleness, b.staleness) == (3, 0)
        assert one.staleness == 3
        with pytest.raises(InputError, match="a copy"):
            pickle.loads(pickle.dumps(one)).set_staleness(1)
