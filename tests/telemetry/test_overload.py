"""Overloaded machines: how their load is read, when a finding names them, and that no remedy moves anything then."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import traces
from reported_runs import Run, healthy, kinds

from dps.engine.telemetry import hosts
from dps.engine.telemetry.diagnosis import ServerReading
from dps.engine.telemetry.findings import KINDS, Finding
from dps.engine.telemetry.hosts import Counters, HostAverage, HostLoad, Hosts, LoadReader, ThreadUsage
from dps.engine.telemetry.monitor import Monitor
from dps.engine.telemetry.reports import COLUMNS
from dps.engine.telemetry.snapshot import HostStatus
from dps.engine.telemetry.trainer_meter import TrainerMeter

CPU, STARVED = COLUMNS.index("cpu"), COLUMNS.index("starved")
CALM, BUSY = HostAverage("n7", 2, 1.5, 0.6), HostAverage("n7", 2, 6.0, 1.0)


class There(Run):
    """A run whose trainers say where they run and what they get of the processors."""

    def __init__(self, hosts=(CALM,), **how):
        super().__init__(**how)
        self.hosts, self.ever = hosts, []
        self.where = [hosts[n % len(hosts)].name if hosts else None for n in range(self.trainers)]
        diagnose = self.diagnosis.diagnose
        self.diagnosis.diagnose = lambda *args: self.note(diagnose(*args, self.hosts, self.where))

    def note(self, findings):
        self.ever.append(findings)
        return findings


def crowded(trainers, wall=0.03, cpu=0.01, measured=True):
    """An iteration that needs 10 ms of a processor and takes 30."""
    reported = {"compute": wall, "cpu": cpu, "starved": wall - cpu if measured else 0.0}
    return {n: dict(reported) for n in trainers}


def moves(findings):
    return [f.remedy for f in findings if any(words in f.remedy for words in traces.MOVING)]


# -- reading it


def test_the_load_is_read_once_a_second_for_all_parties_of_a_process():
    reads, now = [], [0.0]

    def read():
        reads.append(now[0])
        return Counters(4.0, 100.0 * (1 + now[0]), 10.0 * now[0], 20.0 * now[0])

    reader = LoadReader(read, lambda: now[0])
    assert reader() is None, "of the first second nothing is known"
    for now[0] in (0.3, 0.9, 1.0, 1.5, 1.9):
        load = reader()
    assert reads == [0.0, 1.0]
    assert load[2:] == pytest.approx((4.0, 0.9, 0.2))


def test_where_there_is_no_proc_the_load_average_is_taken_and_where_there_is_none_nothing(monkeypatch):
    monkeypatch.setattr(hosts.os, "getloadavg", lambda: (3.0, 2.0, 1.0), raising=False)
    monkeypatch.setattr(hosts.os, "cpu_count", lambda: 2)
    assert LoadReader(lambda: None)()[1:] == (2, 3.0, 1.0, 0.0)
    monkeypatch.delattr(hosts.os, "getloadavg")
    assert LoadReader(lambda: None)() is None


def test_the_thread_that_works_is_measured():
    before = hosts.thread_usage()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    after = hosts.thread_usage()
    assert after.thread == before.thread == threading.get_ident()
    assert after.cpu - before.cpu >= 0.02
    assert after.starved >= before.starved >= 0


def test_a_trainers_report_says_what_its_thread_had_of_the_processors():
    usage = iter([ThreadUsage(1, 1.0, 0.5), ThreadUsage(1, 1.2, 0.9), ThreadUsage(2, 7.0, 7.0), ThreadUsage(2, 7.1, 7)])
    load = HostLoad("n7", 2, 3.0, 1.0)
    meter = TrainerMeter(0.0, lambda: next(usage), lambda: load)
    meter.start(1, 0.0)
    first, second, third = meter.take(1.0), meter.take(2.0), meter.take(3.0)
    assert [first.row[CPU], first.row[STARVED]] == pytest.approx([0.2, 0.4])
    assert second.row[CPU] == 1.0, "another thread: it is taken to have run all the time"
    assert third.row[CPU] == pytest.approx(0.1)
    assert (first.load, second.load) == (load, None), "a reading is told once"


def test_a_machine_counts_once_and_is_forgotten():
    hosts = Hosts()
    for n in range(40):
        hosts.add(HostLoad("n7", 2, 4.0 + n % 2, 1.0), 0.1 * n)
    hosts.add(HostLoad("n8", 8, 1.0, 0.1), 4.0)
    assert [(h.name, round(h.tasks, 1)) for h in hosts.averages(4.0)] == [("n7", 4.5), ("n8", 1.0)]
    assert [h.name for h in hosts.averages(13.95)] == ["n8"]
    for n in range(5000):
        hosts.add(HostLoad(f"m{n}", 2, 4.0, 1.0), 14.0)
    assert len(hosts.averages(14.0)) <= 4096


# -- naming it


@pytest.mark.parametrize("measured", [True, False])
def test_equal_trainers_on_a_busy_machine_are_never_told_to_move(measured):
    run = There()
    run.go(5, reported=crowded(range(4), 0.01))
    run.hosts = (BUSY,)
    rng = np.random.default_rng(0)
    for _ in range(30):  # one of them is always worse off than the others
        reported = {n: crowded([n], 0.03 * rng.uniform(0.7, 1.3) * (1 + n / 2), measured=measured)[n] for n in range(4)}
        run.go(1, reported=reported)
    assert kinds(run.findings) == [("overloaded", None, None)]
    assert not any(moves(findings) for findings in run.ever)
    assert not [f for findings in run.ever for f in findings if f.kind == "permanent"]
    findings = run.findings[0]
    assert (findings.host, KINDS.index(findings.kind)) == ("n7", 6)
    assert "6.0 threads want its 2 processors; trainers 0, 1, 2, 3 have one for" in findings.why
    run.hosts = (CALM,)
    assert not run.go(15, reported=crowded(range(4), 0.01)), "it is over"


def test_without_the_load_the_same_trainers_would_have_been_called_slow_for_good():
    run = There(hosts=())
    reported = {n: crowded([n], 0.03 * (1 + n), measured=False)[n] for n in range(4)}
    assert ("permanent", 3, None) in kinds(run.go(12, reported=reported))


def test_one_that_needs_more_processor_time_is_slow_on_an_overloaded_machine_too():
    run = There(hosts=(BUSY,))
    reported = crowded(range(4)) | crowded([3], 0.09, 0.03)
    run.go(12, reported=reported)
    assert {f.kind: f.trainer for f in run.findings} == {"overloaded": None, "permanent": 3}
    slow = next(f for f in run.findings if f.kind == "permanent")
    assert "reassign=True" in slow.remedy
    assert "overloaded" not in slow.remedy, "that is a finding of its own"
    assert not any(moves(findings) for findings in run.ever)


def test_one_that_sleeps_is_slow_by_itself_where_its_machine_is_calm():
    run = There()
    assert kinds(run.go(12, reported=crowded([2], 0.05, 0.0, measured=False))) == [("permanent", 2, None)]
    assert moves(run.findings)


def test_only_those_on_the_machine_are_excused():
    run = There(hosts=(BUSY, HostAverage("n8", 2, 1.0, 0.5)))
    reported = crowded([0, 2]) | crowded([1], 0.01) | {3: {"compute": 0.05, "cpu": 0.05, "starved": 1e-4}}
    run.go(12, reported=reported)
    assert {(f.kind, f.trainer, f.host) for f in run.findings} == {("overloaded", None, "n7"), ("permanent", 3, None)}


def test_a_container_that_is_held_to_few_processors_is_named_though_the_machine_is_calm():
    run = There(hosts=(HostAverage("n7", 64, 9.0, 0.2),))
    run.go(6, reported=crowded([0, 2], 0.0101) | crowded([1, 3], 0.02))
    assert kinds(run.findings) == [("overloaded", None, None)]
    assert "trainers 1, 3 have one for" in run.findings[0].why


def test_processors_that_a_hypervisor_takes_away_are_named():
    run = There(hosts=(HostAverage("n7", 4, 4.0, 1.0, stolen=0.5),))
    run.go(6, reported={n: reported | {"starved": 1e-4} for n, reported in crowded(range(4)).items()})
    assert kinds(run.findings) == [("overloaded", None, None)]
    assert "4.0 threads want its 4 processors, of which others are given 50 %" in run.findings[0].why


SLOWED = ServerReading(1, 0.05, 0.06, 0.09, True, 0.2, "n7", ran=0.01, starved=0.2, cost=2e-4)


@pytest.mark.parametrize("others", [[healthy(0)], []])
def test_a_server_that_hardly_works_is_not_told_to_retire_because_its_machine_is_overloaded(others):
    servers = [*others, SLOWED._replace(number=len(others))]
    run = There(hosts=(BUSY,), servers=len(servers))
    at = {server.number: 0.05 if server.host else 0.001 for server in servers}
    reported = {n: reported | {"pull": 0.051, "bytes_in": 4000} for n, reported in crowded(range(4)).items()}
    run.go(12, reported=reported, at=at, servers=servers)
    assert kinds(run.findings) == [("overloaded", None, None)]
    assert not any(moves(findings) for findings in run.ever)
    assert f"server {len(others)} has one for 5 %" in run.findings[0].why
    calm = There(hosts=(CALM,), servers=len(servers))
    usual = [server._replace(starved=0.0) for server in servers]
    reported = {n: {"pull": 0.051, "bytes_in": 4000, "cpu": 0.01} for n in range(4)}
    calm.go(12, reported=reported, at=at, servers=usual)
    assert kinds(calm.findings) == [("server", None, len(others))], "without the overload it is slow itself"


def test_a_load_that_hovers_about_the_limit_is_named_once():
    rng, run, seen = np.random.default_rng(0), There(), []
    for _ in range(60):
        tasks = float(rng.uniform(1.5, 8.0))
        run.hosts = (HostAverage("n7", 2, tasks, 1.0),)
        seen.append(bool(run.go(1, reported=crowded(range(4), 0.01 * max(1.0, tasks / 2)))))
    assert any(seen)
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 2


def test_the_first_finding_is_the_one_that_matters_most():
    run = There(hosts=(BUSY,))
    run.go(10, reported=crowded(range(4)) | crowded([3], 0.09, 0.03))
    run.go(1, reported=crowded(range(4)) | crowded([3], 0.09, 0.03) | {0: {"compute": 0.2, "cpu": 0.2}})
    assert {f.kind for f in run.findings} == {"overloaded", "permanent", "transient"}
    assert run.findings[-1].kind == "transient"
    passing, lasting = Finding("transient", 0, None, 20, 59, 0.9, "", ""), Finding("skew", 1, None, 1.5, 0, 0.3, "", "")
    assert lasting.weight(60.0) > passing.weight(60.0)
    assert json.loads(json.dumps(run.findings[0]._asdict(), allow_nan=False)) == run.findings[0]._asdict()


def test_a_small_machine_that_only_the_cluster_crowds_is_not_named_and_excuses_its_trainers():
    """Two trainers, a server, the driver and the scheduler on two processors, as in the demo."""
    server = ServerReading(0, 2e-4, 3e-4, 1e-3, True, 0.2, "n7", ran=0.3, starved=0.3, cost=2e-4)
    reported = {0: crowded([0], 0.02)[0], 1: crowded([1], 0.04)[1]}  # one of them is worse off than the other
    run = There(hosts=(HostAverage("n7", 2, 5.0, 1.0),), trainers=2)
    run.go(20, reported=reported, servers=[server])
    assert not [f for findings in run.ever for f in findings if f.kind in ("overloaded", "permanent", "server")]
    others = There(hosts=(HostAverage("n7", 2, 7.0, 1.0),), trainers=2)  # two threads more: of other programs
    assert kinds(others.go(20, reported=reported, servers=[server])) == [("overloaded", None, None)]
    many = There(hosts=(HostAverage("n7", 2, 7.0, 1.0),))  # four trainers on two processors
    assert kinds(many.go(20, reported=crowded(range(4)), servers=[server])) == [("overloaded", None, None)]


# -- telling it


def test_the_monitor_tells_each_machine_once_and_who_is_on_it():
    runs, membership = SimpleNamespace(runs={}, session="s"), SimpleNamespace(servers={})
    monitor = Monitor(runs, membership, lambda: 3.0, lambda: 1e9)
    usual = {"cpu": 1.0, "busy": 1.0, "polled": 0.0, "starved": 0.0, "memory": 1, "lag": 0.0}
    usual |= {"connections": 0, "tables": {}}
    for number in (0, 1):
        monitor.heartbeat(number, {**usual, "host": HostLoad("n7", 2, 4.0 + number, 1.0)})
    (machine,) = monitor.machines()
    assert machine == HostStatus("n7", cores=2, tasks=4.5, busy=1.0, servers=[0, 1])


def test_what_the_monitor_tells_of_a_machine_names_it_once():
    run, texts = There(hosts=(BUSY,)), []
    run.go(10, reported=crowded(range(4)))
    runs = SimpleNamespace(runs={}, session="s")
    membership = SimpleNamespace(servers={}, note=lambda text, **fields: texts.append(text), mention=texts.append)
    Monitor(runs, membership, lambda: 3.0, lambda: 1e9)._announce(1, run.findings, [])
    (text,) = texts
    assert text.startswith("run 1: machine n7 is overloaded: 6.0 threads want its 2 processors; trainers 0, 1, 2, 3 ")
    assert text.count("overloaded") == text.count("n7") == 1


def test_the_parameter_servers_of_a_cluster_note_an_overload_once_and_mention_it_then():
    run, noted, mentioned, announced = There(hosts=(BUSY,)), [], [], set()
    run.go(10, reported=crowded(range(4)))
    runs = SimpleNamespace(runs={}, session="s")
    membership = SimpleNamespace(servers={}, note=lambda text, **fields: noted.append(text), mention=mentioned.append)
    for number in range(1, 4):  # the fits of a search, each with a parameter server of its own
        Monitor(runs, membership, lambda: 3.0, lambda: 1e9, announced=announced)._announce(number, run.findings, [])
    assert [text[:5] for text in noted] == ["run 1"]
    assert [text[:5] for text in mentioned] == ["run 2", "run 3"]
    elsewhere = [run.findings[0]._replace(host="n8")]
    Monitor(runs, membership, lambda: 3.0, lambda: 1e9, announced=announced)._announce(4, elsewhere, [])
    assert len(noted) == 2, "another machine is news"
