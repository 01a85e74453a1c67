"""What clients count of their work: where the time goes, calls, keys, bytes; and their reports."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import Servers, wait_until

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.hosts import HostLoad
from dps.engine.telemetry.reports import COLUMNS, MAX_METRIC_VALUE, MAX_METRICS, ServerReport, TrainerReport
from dps.engine.telemetry.trainer_meter import TrainerMeter
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE
from dps.errors import ControllerGoneError, InputError, ProtocolError, StoppedError
from dps.testing import Faults, Simulation

SPLIT = ("compute", "pull", "wait", "push", "serialise")
VERBS = ("pull", "push", "wait")


def column(report, name):
    return report.row[COLUMNS.index(name)]


# -- the meter


steps = st.tuples(
    st.sampled_from(["begin", "prepared", "lap", "held", "take", "nothing"]),
    st.sampled_from(VERBS),
    st.floats(0, 10),
)


@given(st.lists(steps, max_size=40))
def test_no_moment_counts_twice_or_is_lost(steps):
    now, meter, reports = 100.0, TrainerMeter(100.0), []
    for kind, verb, seconds in steps:
        now += seconds
        if kind in ("begin", "take"):
            meter.begin(now)
        if kind == "take":
            reports.append(meter.take(now))
        elif kind == "held":
            meter.begin(now - seconds)
            meter.held += seconds / 2
            meter.prepared(verb, now)
        elif kind in ("prepared", "lap") and now - meter.mark <= seconds:
            (meter.prepared if kind == "prepared" else meter.lap)(verb, now)
    reports.append(meter.take(now))
    assert [report.number for report in reports] == list(range(1, len(reports) + 1))
    for report in reports:
        assert min(report.row) >= 0
        assert column(report, "total") == pytest.approx(sum(column(report, name) for name in SPLIT))
    assert sum(column(report, "total") for report in reports) == pytest.approx(now - 100)
    split = meter.split(now)
    for name in SPLIT:
        assert sum(column(report, name) for report in reports) == pytest.approx(split[name], abs=1e-9)


def test_what_holds_up_preparing_a_call_is_no_work_of_ours():
    meter = TrainerMeter(0.0)
    meter.begin(1.0)
    meter.held += 2.0
    meter.prepared("push", 4.0)
    assert meter.split(10.0) == {"compute": 7.0, "pull": 0.0, "push": 2.0, "wait": 0.0, "serialise": 1.0}


def test_a_report_is_the_difference_to_the_one_before():
    meter = TrainerMeter(0.0)
    for _ in range(3):
        meter.counted(True, 10)
        meter.traffic(4).answers += 1
        meter.traffic(4).received += 100
    meter.log("loss", 2)
    assert not meter.due(0.24)
    assert meter.due(0.25)
    first = meter.take(0.25)
    assert (first.servers, first.metrics) == ({4: (3.0, 0.0)}, {"loss": (1, 2.0, 2.0)})
    assert not meter.due(0.49)
    meter.counted(False, 7)
    meter.traffic(4).blocked += 0.125
    second = meter.take(0.5)
    assert (second.servers, second.metrics) == ({4: (0.0, 0.125)}, {})
    counts = COLUMNS[COLUMNS.index("pulls") :]
    assert [column(first, name) for name in counts] == [3, 0, 30, 0, 300, 0, 0, 0]
    assert [column(second, name) for name in counts] == [0, 1, 0, 7, 0, 0, 0, 0]


def test_many_trainers_report_more_rarely():
    meter = TrainerMeter(0.0)
    meter.start(4, 10.0)
    assert meter.due(10.25)
    meter.start(2000, 10.0)
    assert not meter.due(11.9)
    assert meter.due(12.0)
    meter.take(12.0)
    assert not meter.due(13.9)


# -- reports


numbers = st.one_of(st.integers(0, 10**15), st.floats(0, 1e15))
metric = st.floats(-1e6, 1e6)
labels = st.sampled_from(["as they are", "as bfloat16 with lists"])
reports = st.builds(
    TrainerReport,
    st.integers(1, 1 << 40),
    st.lists(numbers.map(float), min_size=len(COLUMNS), max_size=len(COLUMNS)),
    st.dictionaries(st.integers(0, 4000), st.tuples(numbers.map(float), numbers.map(float)), max_size=5),
    st.dictionaries(
        st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=64),
        st.tuples(st.integers(0, 1000), metric, st.one_of(st.none(), metric)),
        max_size=5,
    ),
    st.sampled_from([None, HostLoad("n7", 2, 3.0, 0.75, 0.25)]),
    st.dictionaries(
        st.sampled_from(["w", "v"]),
        st.tuples(labels, st.dictionaries(labels, labels)),
    ),
)


@given(reports)
def test_a_report_arrives_as_it_was_sent(report):
    body = report.encode()
    assert len(body) % 8 == 0
    arrived_reports = TrainerReport.decode(body)
    assert arrived_reports.row == pytest.approx(report.row, abs=1e-9)
    assert (arrived_reports.number, arrived_reports.metrics, arrived_reports.load) == (
        report.number,
        report.metrics,
        report.load,
    )
    assert {n: pytest.approx(pair, abs=1e-9) for n, pair in report.servers.items()} == arrived_reports.servers
    assert arrived_reports.wires == report.wires


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=16), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=20,
)
SERVER = {
    "cpu": 1.0, "busy": 0.5, "polled": 0.0, "starved": 0.25, "host": ["n7", 2, 3.0, 0.5, 0.0],
    "memory": 2, "lag": 0.0, "connections": 1,
    "unconfirmed": [0, 0, 0.0],
    "tables": {"3": {"pull": [1, 2, 3, 0.1], "push": [0, 0, 0, 0.0], "rows": 4, "bytes": 16,
                     "pull_ms": {"5": 1}, "push_ms": {}, "shards": {"0": 2},
                     "hot": {"accesses": 2.0, "keys": [[-7, 2.0, 0.5]], "more": [1, 0.5, 0.25]}}},
}  # fmt: skip
LOAD = HostLoad("n7", 2, 3.0, 0.75, 0.25)
TRAINER = TrainerReport(1, [1.0] * len(COLUMNS), {0: (1.0, 0.5)}, {"loss": (1, 2.0, 2.0)}, LOAD).asdict()


def places(value, path=()):
    """The way to everything in a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def put(value, path, other):
    """A copy with `other` at that place."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], other)
    return copy


@pytest.mark.parametrize(("kind", "whole"), [(TrainerReport, TRAINER), (ServerReport, SERVER)])
@given(data=st.data())
def test_what_is_no_report_is_refused(kind, whole, data):
    path = data.draw(st.sampled_from(list(places(whole))))
    body = json.dumps(put(whole, path, data.draw(json_values))).encode()
    arrived_reports = None
    with contextlib.suppress(ProtocolError):  # and no other error
        arrived_reports = kind.decode(body)
    text = repr(arrived_reports)  # what is taken is finite
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 0}, "`int` >= 1 - at `\\$.r`"),
        ({"t": [1.0] * 6}, "length >= 9 - at `\\$.t`"),
        ({"n": [1.0] * 7 + [-1]}, "`float` >= 0.0 - at `\\$.n\\[7\\]`"),
        ({"n": [1.0] * 7 + [math.nan]}, "`float` >= 0.0 - at `\\$.n\\[7\\]`"),
        ({"s": {"x": [1, 1]}}, "`int`, got `str` - at `key` in `\\$.s`"),
        ({"s": {"1": [1, math.inf]}}, "`float` <= 1e\\+18 - at `\\$.s"),
        ({"m": {"": [1, 1, 1]}}, "name is 1 to 64 printable characters; '' has 0"),
        ({"m": {"x" * 65: [1, 1, 1]}}, "name is 1 to 64 .* has 65"),
        ({"m": {"loss": [1, math.nan, 1]}}, "metric 'loss': its sum is a finite number, not nan"),
        ({"m": {"loss": [1, 1, math.inf]}}, "its last value is a finite number, not inf"),
        ({"h": ["n7", 2, 1.0, 0.5]}, "length 5, got 4 - at `\\$.h`"),
        ({"h": ["n7", 0, 1.0, 0.5, 0.0]}, "`int` >= 1 - at `\\$.h\\[1\\]`"),
        ({"h": ["n7", 2, 1.0, 1.5, 0.0]}, "`float` <= 1.0 - at `\\$.h\\[3\\]`"),
        ({"h": ["a\nb", 2, 1.0, 0.5, 0.0]}, "a machine's name is 1 to 64 printable characters"),
        ({"m": {str(n): [1, 1, 1] for n in range(33)}}, "length <= 32 - at `\\$.m`"),
    ],
)
def test_what_is_wrong_with_a_report_is_named(change, words):
    with pytest.raises(ProtocolError, match=words):
        TrainerReport.read({**TRAINER, **change})


def test_a_server_report_has_numbers_for_keys():
    report = ServerReport.decode(ServerReport.encode(SERVER))
    assert report["tables"][3]["pull_ms"] == {5: 1}
    assert report["tables"][3]["shards"] == {0: 2}
    with pytest.raises(ProtocolError, match=r"missing required field `push` - at `\$.tables"):
        ServerReport.decode(ServerReport.encode({**SERVER, "tables": {3: {"pull": [1, 1, 1, 1]}}}))


# -- numbers of the user's own


@pytest.mark.parametrize("value", [3, 0.5, True, np.float32(2), np.int64(3), np.array(1.5)])
def test_numbers_that_may_be_logged(value):
    meter = TrainerMeter(0.0)
    meter.log("x", value)
    assert meter.take(1.0).metrics == {"x": (1, float(value), float(value))}


@pytest.mark.parametrize("value", ["3", None, [1.0], np.ones(1), np.ones(2), 1j, 10**400])
def test_what_is_no_number_is_not_logged(value):
    meter = TrainerMeter(0.0)
    with pytest.raises(InputError, match="metric 'x' is one number, not"):
        meter.log("x", value)
    assert not meter.take(1.0).metrics


def test_what_diverges_is_told_and_spoils_no_mean():
    meter = TrainerMeter(0.0)
    for value in (1.0, 3.0, math.nan, -math.inf, 10 * MAX_METRIC_VALUE):
        meter.log("loss", value)
    report = meter.take(1.0)
    assert report.metrics == {"loss": (2, 4.0, None)}
    assert TrainerReport.decode(report.encode()).metrics == report.metrics


def test_names_are_few_and_short():
    meter = TrainerMeter(0.0)
    for name in ("", "x" * 65, "a\nb"):
        with pytest.raises(InputError, match="1 to 64 printable"):
            meter.log(name, 1)
    for n in range(MAX_METRICS):
        meter.log(f"m{n}", n)
    meter.take(1.0)
    with pytest.raises(InputError, match="metric 'more' is one too many: 32 names"):
        meter.log("more", 1)
    meter.log("m0", 1)


# -- a client


@pytest.fixture(scope="module")
def servers():
    with Servers(2) as servers:
        yield servers


def requests(servers):
    return sum(endpoint.call(role.status).requests for endpoint, role in servers.alive())


def test_counts_are_exact(servers):
    servers.table(TableSpec("keyed", dim=3, shards=4, optimizer=dps.Adagrad(1.0)))
    servers.table(TableSpec("dense", rows=50, dim=1, shards=2))
    before = requests(servers)
    with servers.client() as client:
        client.push("keyed", np.arange(100), np.ones((100, 3)))
        client.pull("keyed", np.arange(60))
        client.push("keyed", [5, 5, 6], 1.0)  # travels as two keys, and counts as what was asked for
        client.pull("dense")
        client.push_pull("dense", [0, 49], 1.0)
        client.pull({"keyed": [1], "dense": [2]})
        client.push({"keyed": ([1, 2], 1.0), "dense": (slice(0, 10), 2.0)})
        pending = [client.pull_async("keyed", [n]) for n in range(20)]
        client.wait()
        assert all(one.done() for one in pending)
        meter = client.session.meter
        assert (meter.pulls, meter.pushes) == (1 + 1 + 2 + 20, 2 + 1 + 2)
        assert meter.keys_pulled == 60 + 50 + 2 + 20
        assert meter.keys_pushed == 100 + 3 + 2 + 2 + 10
        answers = sum(traffic.answers for traffic in meter.servers.values())
        assert answers == requests(servers) - before
        assert set(meter.servers) == {0, 1}
        assert meter.resent == 0


def test_bytes_are_those_on_the_wire(servers):
    servers.table(TableSpec("bytes", dim=3, shards=1))
    with servers.client() as client:
        client.pull("bytes", [1])
        (traffic,) = client.session.meter.servers.values()
        sent, received = traffic.sent, traffic.received
        client.push("bytes", [1, 2, 3], np.ones((3, 3)))
        assert traffic.sent - sent == HEADER_SIZE + 8 + 3 * 8 + 40  # how many in the shard, keys, padded values
        assert traffic.received - received == HEADER_SIZE
        client.pull("bytes", [1, 2])
        assert traffic.received - received == 2 * HEADER_SIZE + 24
        report = client.session.meter.take(client.session.now())
        assert (column(report, "bytes_out"), column(report, "bytes_in")) == (traffic.sent, traffic.received)
        assert report.servers == {0: (3.0, traffic.blocked)}


def test_calls_on_their_way_share_the_time(servers):
    """However many there are at once, in several threads: their times add up to no more than there was."""
    servers.table(TableSpec("shared", shards=2))
    with servers.client() as client:
        began = client.session.now()

        def work():
            for n in range(50):
                client.push_async("shared", np.arange(n + 1), 1.0)
                client.pull_async("shared", np.arange(n + 1))
                if n % 10 == 0:
                    client.wait()
            client.pull("shared", [1])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.wait()
        seconds = client.session.meter.seconds
        assert sum(seconds.values()) <= client.session.now() - began
        assert min(seconds[verb] for verb in ("pull", "push", "serialise")) > 0
        assert sum(traffic.blocked for traffic in client.session.meter.servers.values()) <= sum(seconds.values())
        assert client.session.meter.pulls == 3 * 51


def test_a_server_that_takes_no_bytes_does_not_make_preparing_slow(servers):
    spec = servers.table(TableSpec("large", rows=1 << 23, shards=1))
    go_on, values = threading.Event(), np.ones(spec.rows, np.float32)
    with servers.client() as client:
        client.pull("large", [0])
        traffic, before = client.session.meter.servers[0], dict(client.session.meter.seconds)
        servers.endpoints[0].loop.call_soon_threadsafe(go_on.wait)
        try:
            thread = threading.Thread(target=client.push, args=("large", slice(None), values))
            already = traffic.blocked
            thread.start()
            wait_until(lambda: traffic.blocked > already)
        finally:
            stalled = traffic.blocked - already
            go_on.set()
            thread.join()
        assert client.session.meter.seconds["push"] - before["push"] >= stalled > 0
        assert client.session.meter.seconds["pull"] == before["pull"]
        assert client.pull("large", [spec.rows - 1]).tolist() == [1.0]


def test_what_is_sent_again_is_told(servers):
    servers.table(TableSpec("again", shards=2))
    with servers.client() as client:
        client.push("again", np.arange(10), 1.0)
        assert client.session.meter.resent == 0
        servers.cut()
        client.push("again", np.arange(10), 1.0)
        assert client.pull("again", np.arange(10)).tolist() == [2.0] * 10
        assert client.session.meter.keys_pushed == 20
        pushes = [client.push_async("again", np.arange(10), 1.0) for _ in range(20)]
        servers.cut()
        for pending in pushes:
            pending.result()
        assert client.pull("again", np.arange(10)).tolist() == [22.0] * 10
        assert client.session.meter.keys_pushed == 220


# -- trainers on virtual time, where all is exact


def test_each_second_is_in_the_right_part():
    def train(trainer, partitions):
        for seconds in partitions:
            trainer.pull("w", [1, 2, 3, 4])
            trainer.client.session.sleep(seconds)
            pending = [trainer.push_async("w", [n], 1.0) for n in range(10)]
            trainer.wait()
            assert all(one.done() for one in pending)
            trainer.tick()
        return (
            trainer.time_spent(),
            trainer.client.session.now() - trainer.client.session.meter.began,
            trainer.client.session.meter,
        )

    with Simulation(servers=2, trainers=2) as sim:
        sim.table("w", shards=2)
        (fast, fast_total, _), (slow, slow_total, meter) = sim.run(train, [1.0, 3.0, 1.0, 3.0, 1.0, 3.0])
        for split, total in ((fast, fast_total), (slow, slow_total)):
            assert sum(split.values()) == pytest.approx(total)
            assert split["serialise"] == 0  # work takes no virtual time
        assert fast["compute"] == pytest.approx(3.0)
        assert slow["compute"] == pytest.approx(9.0)
        assert fast["wait"] == pytest.approx(6.0, abs=0.1)
        assert slow["wait"] < 0.1
        blocked = sum(traffic.blocked for traffic in meter.servers.values())
        assert 0 < blocked <= slow["pull"] + slow["push"]
        assert (meter.clocks, meter.pulls, meter.pushes) == (3, 3, 30)


@pytest.mark.parametrize("slow", [0, 1])
def test_time_is_lost_to_the_server_that_stands_still(slow):
    def train(trainer, partitions):
        for _ in partitions:
            trainer.pull("w", np.arange(100))
            sim.stop(f"server-{slow}", seconds=0.125)
            trainer.pull("w", np.arange(100))
            trainer.tick()
        return trainer.client.session.meter.servers, trainer.time_spent()

    with Simulation(servers=2, trainers=1) as sim:
        sim.table("w", shards=2)
        ((traffic, split),) = sim.run(train, [None] * 8)
        assert traffic[slow].blocked == pytest.approx(1.0, rel=0.1)
        assert traffic[1 - slow].blocked < 0.1
        assert split["pull"] == pytest.approx(1.0, rel=0.1)
        assert split["compute"] == pytest.approx(0.0, abs=1e-6)


def test_rows_of_batches_are_counted():
    def train(trainer, partitions, size):
        for _ in trainer.iterate(partitions, epochs=2, batch_size=size):
            pass
        return trainer.client.session.meter.rows

    with Simulation(trainers=1) as sim:
        pair = (np.zeros((10, 2)), np.zeros(10))
        assert sim.run(train, [pair, np.zeros(5)], args=(4,)) == [30]
        odd = [(np.zeros(2), np.zeros(3)), {"not": "rows"}]  # items, which may be anything
        assert sim.run(train, [odd], args=(None,)) == [0]


@pytest.mark.parametrize("seed", range(3))
def test_times_add_up_whatever_goes_wrong(seed):
    def train(trainer, partitions):
        for _ in partitions:
            trainer.push("w", np.arange(20), 1.0)
            trainer.client.session.sleep(random.Random(trainer.clock).random() / 10)
            trainer.pull("w", np.arange(20))
            trainer.tick()
        report = trainer.client.session.meter.take(trainer.client.session.now())
        return report, trainer.client.session.now() - trainer.client.session.meter.began, trainer.time_spent()

    with Simulation(seed, servers=2, trainers=2, copies=2, faults=Faults(breaks=0.5, cuts=0.1)) as sim:
        sim.table("w")
        for report, total, split in sim.run(train, [None] * 40, staleness=1):
            assert TrainerReport.decode(report.encode()).number == report.number
            assert sum(split.values()) == pytest.approx(total)
            assert min(report.row) >= 0


# -- trainers of a parameter server


@pytest.fixture(scope="module")
def ps():
    with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        ps.table("w")
        yield ps


@pytest.fixture
def arrived_reports(ps, monkeypatch):
    """Reports as they reach the controller, in whatever frame."""
    reports, read = [], TrainerReport.read.__func__

    def noted(cls, value):
        reports.append(read(cls, value))
        return reports[-1]

    monkeypatch.setattr(TrainerReport, "read", classmethod(noted))
    return reports


@pytest.fixture
def trainer_of(ps):
    """A function that makes a trainer of a new run."""
    made = []

    def make(staleness=0, trainers=1):
        run = ps.connection.call("start_run", trainers=trainers, staleness=None if math.isinf(staleness) else staleness)
        made.append(dps.Trainer.join(ps.ticket, run, 0))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def tick_when_due(trainer):
    wait_until(lambda: trainer.client.session.meter.due(trainer.client.session.now()))
    trainer.tick()


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_reports_come_with_ticks_and_add_up(arrived_reports, trainer_of, staleness):
    trainer = trainer_of(staleness)
    for n in range(3):
        for _ in range(20):
            trainer.pull("w", [1, 2])
            trainer.push("w", [1], 1.0)
            trainer.log(loss=n, other=2 * n)
            trainer.tick()
        tick_when_due(trainer)
    trainer.leave()
    assert [report.number for report in arrived_reports] == list(range(1, len(arrived_reports) + 1))
    assert len(arrived_reports) >= 3
    sums = dict(zip(COLUMNS, np.sum([report.row for report in arrived_reports], axis=0), strict=True))
    assert [sums[name] for name in ("clocks", "pulls", "pushes", "keys_pulled", "keys_pushed")] == [63, 60, 60, 120, 60]
    assert sums["total"] == pytest.approx(sum(sums[name] for name in SPLIT))
    assert sums["pull"] == pytest.approx(trainer.client.session.meter.seconds["pull"], abs=1e-6)
    losses = [report.metrics["loss"] for report in arrived_reports if "loss" in report.metrics]
    assert sum(count for count, _, _ in losses) == 60
    assert sum(total for _, total, _ in losses) == 60


@pytest.mark.parametrize("staleness", [0, math.inf])
def test_a_report_is_sent_again_until_its_tick_is_answered(arrived_reports, trainer_of, staleness, monkeypatch):
    trainer = trainer_of(staleness)
    trainer.log(loss=1.5)
    kind = type(trainer.client.session.controller())
    real, failures = kind.ask, [2]

    def fails(channel, header, *args):
        answer = real(channel, header, *args)
        if failures[0] and header.kind == frames.TICK and trainer._participant._report is not None:
            failures[0] -= 1
            channel.close()
            raise ControllerGoneError("broke before the answer")
        return answer

    monkeypatch.setattr(kind, "ask", fails)
    tick_when_due(trainer)
    trainer.log(loss=2.5)
    trainer.tick()
    wait_until(lambda: len(arrived_reports) == 3)
    assert [report.number for report in arrived_reports] == [1, 1, 1]
    assert arrived_reports[0] == arrived_reports[1] == arrived_reports[2]
    assert not failures[0]
    tick_when_due(trainer)
    trainer.leave()
    assert [report.number for report in arrived_reports[3:]] == [2, 3]
    assert arrived_reports[3].metrics == {"loss": (1, 2.5, 2.5)}


def test_a_trainer_that_fails_reports_too(ps, arrived_reports):
    def train(trainer, partitions):
        trainer.pull("w", [1])
        trainer.log(loss=math.inf)
        raise ValueError("as ordered")

    with pytest.raises(ValueError, match="as ordered"):
        ps.run(train, ps.dask_client.scatter([1]), trainers=1, progress=False)
    wait_until(lambda: bool(arrived_reports))
    assert arrived_reports[-1].metrics == {"loss": (0, 0.0, None)}
    assert column(arrived_reports[-1], "keys_pulled") == 1


def test_what_is_logged_is_checked(trainer_of):
    trainer = trainer_of()
    with pytest.raises(InputError, match="metric 'loss' is one number, not"):
        trainer.log(loss=[1, 2])
    with pytest.raises(InputError, match="printable"):
        trainer.log(**{"": 1})
    trainer.leave()


def test_staleness_is_a_dial(ps, trainer_of):
    trainer = trainer_of(2, trainers=2)
    other = dps.Trainer.join(ps.ticket, trainer.run, 1)
    try:
        for staleness in (0, 3, math.inf, 1):
            bound = None if math.isinf(staleness) else staleness
            ps.connection.call("set_staleness", run=trainer.run, staleness=bound)
            for _ in range(3):  # the answer to a tick without a bound is read at the next one
                thread = threading.Thread(target=other.tick)
                thread.start()
                trainer.tick()
                thread.join()
            assert trainer.staleness == other.staleness == staleness
        ps.connection.call("set_staleness", run=trainer.run, staleness=None)
        for _ in range(10):
            trainer.tick()  # alone: there is no bound
        assert trainer.clock == other.clock + 10
        ps.connection.call("set_staleness", run=trainer.run, staleness=0)
        for _ in range(10):
            other.tick()
        thread = threading.Thread(target=trainer.tick)
        thread.start()
        other.tick()
        thread.join()
        assert trainer.clock == other.clock
    finally:
        other.leave()
    trainer.leave()


def test_a_run_that_is_stopped_stops_a_trainer_without_a_bound(ps, trainer_of):
    trainer = trainer_of(math.inf)
    trainer.tick()
    ps.connection.call("stop_run", run=trainer.run, reason="enough")
    trainer.tick()  # reads the answer to the one before
    with pytest.raises(StoppedError, match="enough"):
        trainer.tick()
