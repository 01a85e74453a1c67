"""The rules of progress.py: tables of small cases, many simulated runs with a known cause, and proof that these tests
would notice if the rules were wrong."""

from __future__ import annotations

import collections
import itertools
import json
import math

import numpy as np
import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from reported_runs import Run, healthy, kinds, row

from dps.engine.coordination.clock import Clock
from dps.engine.telemetry import diagnosis, rates, slow_servers
from dps.engine.telemetry.diagnosis import COLUMNS, KINDS, AutoStaleness, Diagnosis, Finding, History, ServerReading
from dps.errors import InputError

AT = {name: n for n, name in enumerate(COLUMNS)}


# -- history


@st.composite
def reported_times(draw):
    """Whole numbers, so that sums are exact."""
    counts = st.lists(st.integers(0, 1 << 30), min_size=len(COLUMNS), max_size=len(COLUMNS))
    return draw(st.lists(st.tuples(st.integers(0, 2), counts, st.booleans()), max_size=120))


@given(reported_times(), st.sampled_from([2, 4, 7, 16, 256]))
@settings(max_examples=75, deadline=None)
def test_history_remembers_the_whole_run_exactly(reports, capacity):
    history, kept = History(3, capacity), collections.defaultdict(list)
    for n, (trainer, counts, rejoins) in enumerate(reports):
        if rejoins:
            history.begin(trainer, n)
        history.report(trainer, n + 1, counts, n, {trainer: (1, counts[0])})
        kept[trainer].append((n + 1, n, counts))
    for trainer in range(3):
        mine = kept[trainer]
        expected = np.sum([c for *_, c in mine], axis=0) if mine else np.zeros(len(COLUMNS))
        np.testing.assert_array_equal(history.totals()[trainer], expected)
        times, clocks, rows = history.rows(trainer)
        assert len(rows) <= capacity
        assert len(mine) <= capacity or len(rows) > capacity // 2 - 1
        np.testing.assert_array_equal(rows.sum(axis=0), expected)
        if mine:
            assert (times[-1], clocks[-1]) == mine[-1][:2]
            assert set(times.tolist()) <= {time for time, *_ in mine}
        times, clocks, rows = history.strip(trainer)
        np.testing.assert_array_equal(rows, np.array([c for *_, c in mine[-64:]]).reshape(-1, len(COLUMNS)))
        assert list(zip(times.tolist(), clocks.tolist(), strict=True)) == [pair[:2] for pair in mine[-64:]]


@given(reported_times(), st.integers(1, 60), st.integers(0, 3))
@settings(max_examples=75, deadline=None)
def test_history_of_the_last_seconds(reports, seconds, later):
    """Of the present attempt only, and of at most 64 reports."""
    history, mine = History(3), collections.defaultdict(list)
    for n, (trainer, counts, rejoins) in enumerate(reports):
        if rejoins:
            history.begin(trainer, n)
            mine[trainer].clear()
        history.report(trainer, n + 1, counts, n, {5: (1, counts[0]), trainer: (2, 7)})
        mine[trainer].append((n + 1, counts))
    now = len(reports) + later
    recent = history.newest(history.within(seconds, now))
    servers, blocked = history.blocked(history.within(seconds, now))
    for trainer in range(3):
        inside = [counts for time, counts in mine[trainer][-64:] if time > now - seconds]
        np.testing.assert_array_equal(recent[trainer], np.sum(inside, axis=0) if inside else 0)
        if inside:
            np.testing.assert_array_equal(
                blocked[trainer, servers.index(5)], [len(inside), sum(counts[0] for counts in inside)]
            )
            np.testing.assert_array_equal(blocked[trainer, servers.index(trainer)], np.array([2, 7]) * len(inside))


def test_history_forgets_servers_that_are_gone():
    """A run outlives many servers; what is kept of them does not grow."""
    history = History(2)
    for n in range(400):
        for trainer in range(2):
            history.report(trainer, n, row(clocks=1), n, {n // 10: (1, 0.5)})
    servers, blocked = history.blocked(history.reports() * 0 + 20)
    assert len(servers) <= 64 // 10 + 3
    assert blocked[0, servers.index(39)].tolist() == [10, 5.0]
    assert blocked[0, servers.index(38)].tolist() == [10, 5.0]
    assert blocked[0].sum() == 30.0


def test_history_knows_as_many_servers_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr("dps.engine.telemetry.history.MAX_REPORT_SERVER_PAIRS", 2 * 64 * 3)
    history = History(2)
    for n in range(200):
        for trainer in range(2):
            history.report(trainer, n, row(clocks=1), n, {100 * (n // 100) + server: (1, 0.5) for server in range(5)})
            assert len(history.blocked(history.reports() * 0 + 1)[0]) <= 3
    servers, blocked = history.blocked(history.reports() * 0 + 20)
    assert set(servers) <= {100, 101, 102, 103, 104}, "those that are gone make way"
    assert blocked[0].tolist() == [[20, 10.0]] * 3


def test_history_of_many_trainers_and_servers_stays_small():
    history, blocked = History(4096, capacity=16), dict.fromkeys(range(16), (1.0, 0.5))
    for trainer in range(4096):
        history.report(trainer, 1.0, row(clocks=1), 1, blocked)
    assert sum(x.nbytes for x in vars(history).values() if isinstance(x, np.ndarray)) < 40e6
    for n in range(2, 40):
        history.report(7, n, row(clocks=n), n, blocked)
    kept = history.within(100, 40.0)
    assert kept[7] == history.kept == 16
    assert history.newest(kept)[7, COLUMNS.index("clocks")] == sum(range(24, 40))
    assert history.blocked(kept)[1][7].tolist() == [[16, 8.0]] * 16
    assert history.strip(7)[1].tolist() == list(range(24, 40))


def test_history_says_what_it_cannot_keep():
    with pytest.raises(InputError, match="not of 0 and 256"):
        History(0)
    with pytest.raises(InputError, match="not of 2 and 1"):
        History(2, capacity=1)
    assert [len(x) for x in History(1).rows(0)] == [0, 0, 0]
    assert History(2).newest(History(2).within(10, 0.0)).tolist() == [[0.0] * len(COLUMNS)] * 2


# -- rates


@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=12))
def test_the_median_of_the_others(values):
    array = np.array([math.nan if v is None else v for v in values])
    for n, median in enumerate(rates.others(array)):
        rest = sorted(v for m, v in enumerate(values) if m != n and v is not None)
        if rest:
            assert median == rest[(len(rest) - 1) // 2]
        else:
            assert math.isnan(median)


def test_noise_is_that_of_the_reports_and_not_of_a_straggler():
    rng, history = np.random.default_rng(0), History(4)
    for n in range(60):
        for trainer in range(4):
            slow = 3.0 if trainer == 3 and n > 30 else 1.0
            history.report(trainer, n, row(clocks=1, compute=slow * rng.lognormal(0, 0.2), wait=n), n, {})
    assert 0.15 < rates.noise(history) < 0.25
    assert 0 < rates.noise(History(2)) < 0.2, "something is supposed before there is anything to see"


# -- one kind after the other


def test_nobody_is_slow():
    run = Run()
    assert not any(run.go(1) for _ in range(20))


@pytest.mark.parametrize("trainers", [2, 3, 64])
def test_slow_lately_and_then_for_good(trainers):
    run, slow = Run(trainers), trainers - 1
    run.go(5)
    reported = {slow: {"compute": 0.03}}
    assert kinds(run.go(2, reported=reported)) == [("transient", slow, None)]
    assert "ps.set_staleness(4)) would let" in run.findings[0].remedy
    run.staleness = 4
    assert "the staleness absorbs it" in run.go(1, reported=reported)[0].remedy
    assert kinds(run.go(6, reported=reported)) == [("permanent", slow, None)]
    [finding] = run.findings
    assert finding.factor == pytest.approx(33 / 13, rel=0.01)
    assert finding.share == pytest.approx(20 / 33, rel=0.02)
    assert finding.since == pytest.approx(5, abs=1.5)
    assert f"trainer {slow} takes 33 ms a clock, the others 13 ms (2.5 times as long) for 9 s" in finding.why
    assert "20 ms more to compute" in finding.why
    assert "reassign=True" in finding.remedy
    assert not run.go(5), "it is over"


def test_a_pause_is_transient():
    run = Run()
    run.go(5)
    waiting = dict.fromkeys((0, 1, 2), "waiting")
    run.go(1, silent={3: 1.5, 0: 1.5, 1: 1.5, 2: 1.5}, states=waiting)
    assert kinds(run.findings) == [("transient", 3, None)]
    assert "nothing was heard of trainer 3 for 1.5 s" in run.findings[0].why
    assert not run.go(5)


def test_a_pause_of_all_is_nobodys_fault():
    run = Run()
    run.go(5)
    for n in range(1, 20):
        assert not run.go(1, silent=dict.fromkeys(range(4), float(n)))


def test_waiting_is_not_slowness():
    """The fast ones wait for the slow one: theirs is the longer iteration's wait, not the work."""
    run = Run()
    reported = {n: {"wait": 0.02} for n in range(3)} | {3: {"compute": 0.03}}
    assert kinds(run.go(8, reported=reported)) == [("permanent", 3, None)]


@pytest.mark.parametrize(
    ("reported", "kind", "words"),
    [
        ({"compute": 0.03}, "permanent", "20 ms more to compute"),
        ({"compute": 0.03, "rows": 300}, "skew", "3.0 times the rows"),
        ({"compute": 0.03, "keys_pulled": 1500}, "skew", "3.0 times the keys"),
        ({"compute": 0.03, "rows": 110}, "permanent", "to compute"),
        ({"compute": 0.05, "rows": 150}, "permanent", "to compute"),
        ({"pull": 0.052}, "network", "50 ms more waiting for servers"),
        ({"push": 0.051, "again": 1}, "network", "had to be sent again"),
        ({"pull": 0.02, "push": 0.01, "keys_pulled": 5000}, "skew", "10.0 times the keys"),
        ({"pull": 0.02, "pulls": 10}, "skew", "10.0 times the requests"),
    ],
)
def test_the_part_that_is_slow_tells_the_kind(reported, kind, words):
    run = Run()
    run.go(8, reported={2: reported})
    assert kinds(run.findings) == [(kind, 2, None)]
    assert words in run.findings[0].why


SLOW = ServerReading(1, 0.05, 0.06, 0.05, True, 0.2)


@pytest.mark.parametrize(
    ("at", "servers", "named"),
    [
        ({0: 0.001, 1: 0.05}, [healthy(0), SLOW], True),
        ({0: 0.05, 1: 0.0}, [SLOW._replace(number=0), healthy(1)], True),
        ({0: 0.05, 1: 0.0}, [healthy(0), healthy(1)], True),  # 50 ms for a few kilobytes: the way to it, if not itself
        ({0: 0.012, 1: 0.0}, [healthy(0), healthy(1)], False),  # the first one waited for costs more
        ({0: 0.001, 1: 0.05}, [healthy(0), healthy(1)._replace(lag=0.05)], True),
        ({0: 0.001, 1: 0.001}, [healthy(0), SLOW], False),  # no trainer loses time by it
        ({0: 0.05}, [SLOW._replace(number=0)], True),
        ({0: 0.012}, [healthy(0)], False),
        ({0: 0.03}, [healthy(0)._replace(lag=0.09)], True),
    ],
)
def test_a_slow_server(at, servers, named):
    run = Run(servers=len(servers))
    reported = {n: {"pull": sum(at.values()), "bytes_in": 4000} for n in range(4)}
    run.go(5, reported=reported, servers=servers, at=at)
    number = max(at, key=lambda n: at[n])
    assert kinds(run.findings) == ([("server", None, number)] if named else [])
    if named:
        assert f"for server {number}" in run.findings[0].why
        assert "ps.scale" in run.findings[0].remedy
        assert run.findings[0].share > 0.2
        assert ("the way to it" in run.findings[0].why) == (servers == [healthy(0), healthy(1)])


def test_a_slow_server_is_no_trainers_fault():
    """Some wait longer in its queue than others."""
    run = Run(servers=2)
    for n in range(8):
        reported = {m: {"pull": 0.05 + 0.04 * (m + n) % 3} for m in range(4)}
        run.go(1, reported=reported, servers=[healthy(0), SLOW], at={0: 0.001, 1: 0.05})
    assert ("server", None, 1) in kinds(run.findings)
    one = Run(trainers=4, servers=2)
    mine = {"pull": 0.051}
    one.go(8, reported={2: mine}, at={0: 0.0, 1: 0.0})
    assert kinds(one.findings) == [("network", 2, None)], "and what one trainer alone suffers is not the server's"


def test_a_trainer_is_not_compared_with_others_that_have_done_no_work():
    """Those have just come, and have asked once."""
    idle = {"compute": 0.0, "pull": 0.0, "push": 0.0, "wait": 0.02, "rows": 0, "keys_pulled": 0}
    run = Run()
    run.go(8, reported={1: idle, 2: idle, 3: idle})
    assert kinds(run.findings) == []


def test_a_silent_server_explains_silent_trainers():
    run = Run(servers=2)
    run.go(5)
    for n in range(3, 12):
        servers = [healthy(0), ServerReading(1, 2e-4, 1e-3, 1e-3, n < 5, float(n))]
        run.go(1, silent=dict.fromkeys(range(4), float(n)), servers=servers)
        assert kinds(run.findings) == [("server", None, 1)]
    assert "its connection is lost" in run.findings[0].why
    assert not run.go(4)


def test_with_one_trainer_only_servers_can_be_compared():
    run = Run(trainers=1, servers=2)
    assert not run.go(4, reported={0: {"compute": 1.0}})
    assert not run.go(4)
    assert not run.go(2, silent={0: 20.0}), "an evaluation, say"
    assert kinds(run.go(1, silent={0: 31.0})) == [("dead", 0, None)]
    assert not run.go(1)
    reported = {0: {"pull": 0.05}}
    assert kinds(run.go(4, reported=reported, servers=[healthy(0), SLOW], at={0: 0.001, 1: 0.049})) == [
        ("server", None, 1)
    ]


@pytest.mark.parametrize(
    ("state", "age", "dead"),
    [
        ("lost", 0.1, True),
        ("running", 4.9, False),
        ("running", 5.1, True),
        ("waiting", 100.0, False),
        ("left", 100.0, False),
        ("expected", 29.0, False),
        ("expected", 31.0, True),
    ],
)
def test_dead(state, age, dead):
    run = Run()
    run.go(5, states={3: state} if state in ("expected", "left") else {}, silent={3: 0} if state == "expected" else {})
    run.go(1, states={3: state, 0: "waiting", 1: "waiting"}, silent={3: age})
    assert [f.kind == "dead" for f in run.findings if f.trainer == 3 and f.kind != "transient"] == [True] * dead
    if dead:
        assert run.findings[0].factor >= 1
        assert not run.go(1), "and back"


def test_ten_usual_clocks_are_no_death():
    run = Run()
    long = {n: {"compute": 2.0} for n in range(4)}
    run.go(12, reported=long)
    assert not run.go(1, reported=long, silent={3: 11.9})
    assert kinds(run.go(1, reported=long, silent={3: 12.9})) == [("transient", 3, None)]
    assert kinds(run.go(1, reported=long, silent={3: 20.5})) == [("dead", 3, None)]


def test_a_judge_that_slept_condemns_nobody():
    run = Run(servers=1)
    run.go(5)
    run.now += 60
    old = [ServerReading(0, 2e-4, 1e-3, 1e-3, True, 60.0)]
    assert not run.go(1, silent=dict.fromkeys((1, 2), 60.0), servers=old)
    assert not run.go(1)


def test_few_reports_no_findings():
    history = History(3)
    diagnosis = Diagnosis(history)
    assert diagnosis.diagnose(0.0, [0] * 3, ["expected"] * 3, [0.0] * 3, [], 0) == []
    history.report(0, 1.0, row(clocks=1, compute=5.0), 1, {})
    history.report(1, 1.0, row(clocks=1, compute=0.1), 1, {})
    assert diagnosis.diagnose(1.0, [1, 1, 0], ["running"] * 3, [0.0] * 3, [], 0) == []


def test_a_trainer_at_its_first_clock_is_not_silent_while_its_connection_lives():
    """It reads its data, imports, compiles: no other clock tells how long that takes."""
    history = History(3)
    diagnosis = Diagnosis(history)
    for now in np.arange(0.0, 60.0):
        assert diagnosis.diagnose(now, [0] * 3, ["running"] * 3, [now] * 3, [], 0) == []
    for n in (0, 1):
        history.report(n, 60.0, row(clocks=1, compute=0.1), 1, {})
    for now in np.arange(60.0, 600.0):
        assert diagnosis.diagnose(now, [1, 1, 0], ["waiting"] * 2 + ["running"], [0.0, 0.0, now], [], 0) == []
    findings = diagnosis.diagnose(600.0, [1, 1, 0], ["waiting"] * 2 + ["lost"], [0.0, 0.0, 600.0], [], 0)
    assert kinds(findings) == [("dead", 2, None)]
    history.report(2, 601.0, row(clocks=1, compute=600.0), 1, {})
    for now in np.arange(601.0, 606.0):  # from now on it is known
        assert diagnosis.diagnose(now, [1, 1, 1], ["waiting"] * 2 + ["running"], [0.0, 0.0, now - 601], [], 0) == []


def test_the_only_trainer_is_judged_by_its_own_clocks():
    """Clocks of 20 s: half a minute without a word is nothing."""
    history = History(1)
    diagnosis, dead = Diagnosis(history), []
    for now in np.arange(0.0, 60.0):
        if now and now % 20 == 0:
            history.report(0, now, row(clocks=1, compute=20.0), int(now / 20), {})
        assert diagnosis.diagnose(now, [int(now / 20)], ["running"], [now % 20], [], 0) == []
    for now in np.arange(60.0, 400.0):
        dead += [now - 40] * bool(diagnosis.diagnose(now, [2], ["running"], [now - 40], [], 0))
    assert dead[0] == 201, "ten usual clocks"


def test_leased_work_is_compared_by_the_pull():
    """There a clock is an epoch: reports come in between, and ticks, which the ages are from, much later."""
    run = Run()
    run.coarse = True
    assert not run.go(20)
    run.go(8, reported={3: {"compute": 0.03}})
    assert kinds(run.findings) == [("permanent", 3, None)]
    assert "33 ms a pull, the others 13 ms" in run.findings[0].why
    assert "do its work (reassign=True, ps.set_reassign(True))" in run.findings[0].remedy
    ages = [100.0] * 4
    diagnosed = run.diagnosis.diagnose(run.now + 1, [0] * 4, ["running"] * 4, ages, [], 0)
    assert kinds(diagnosed) == [("permanent", 3, None)], "a report is a sign of life, too"


def test_a_new_attempt_begins_anew():
    run = Run()
    run.go(8, reported={3: {"compute": 0.03}})
    run.history.begin(3, run.now)
    run.go(4)
    assert not run.findings


def test_findings_are_plain_values():
    """They go into JSON."""
    run = Run(servers=2)
    run.go(8, reported={2: {"compute": 0.03}}, silent={3: 9.0}, servers=[healthy(0), SLOW._replace(alive=False)])
    assert {f.kind for f in run.findings} >= {"permanent", "server"}
    for finding in run.findings:
        assert finding.kind in KINDS
        plain = json.loads(json.dumps(finding._asdict(), allow_nan=False))
        assert plain == finding._asdict()
        assert [type(x) for x in finding[1:3]] in ([int, type(None)], [type(None), int])


def test_no_flapping():
    """A trainer that hovers about the limit is named once, for as long as it does."""
    run, rng = Run(), np.random.default_rng(0)
    run.go(4)
    seen = [bool(run.go(1, reported={3: {"compute": 0.0195 * rng.uniform(0.95, 1.2)}})) for _ in range(30)]
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert any(seen)
    assert changes <= 1


def test_another_kind_must_show_three_times():
    run = Run()
    run.go(8, reported={3: {"compute": 0.03}})
    assert kinds(run.go(3, reported={3: {"pull": 0.05}})) == [("permanent", 3, None)]
    assert kinds(run.go(8, reported={3: {"pull": 0.05}})) == [("network", 3, None)]


# -- simulated runs


@pytest.mark.parametrize("staleness", [0, 1, 2, math.inf])
def test_traces_wait_as_the_clock_says(staleness):
    """The recurrence of the traces, against the rule of the controller, event by event."""
    work = np.random.default_rng(1).lognormal(0, 0.5, (40, 5))
    begins, ticks = traces._ticks(np.zeros(5), work, staleness)
    clock, since = Clock(staleness, 5), {}
    for n in range(5):
        clock.join(n, 1, 0.0)
    for when, n in sorted((ticks[c, n], n) for c in range(40) for n in range(5)):
        since[n] = clock.clock_of(n) + 1
        for released in clock.tick(n, since[n], when):
            done = clock.clock_of(released)
            if done < 40:
                assert begins[done, released] == when
    assert clock.minimum == 40


COUNT = 30


@pytest.mark.quick(1)
@pytest.mark.parametrize("cause", traces.CAUSES)
def test_the_diagnosis_is_right(cause):
    """Kind and party are right in 95 of 100 runs; of healthy runs, at most 5 of 100 have a finding.

    An overload is named in 90 of 100, because a machine is not called overloaded for as many threads as a small cluster
    has by itself.
    """
    verdicts = [traces.judge(traces.make(cause, seed)) for seed in range(COUNT)]
    wrong = {seed: verdict.kind for seed, verdict in enumerate(verdicts) if not verdict.right}
    assert len(wrong) <= (0.1 if cause == "overloaded" else 0.05) * COUNT, wrong


@pytest.mark.parametrize("factor", [2.0, 1.4])
@pytest.mark.parametrize("usual", [0.02, 1.0, 2.0])
def test_slow_for_good_is_named_within_ten_seconds(factor, usual):
    fixed = {"factor": factor, "usual": usual, "trainers": 4, "begin": 0.0}
    verdicts = [traces.judge(traces.make("permanent", seed, **fixed)) for seed in range(4)]
    assert [v.kind for v in verdicts] == ["permanent"] * 4
    assert sum(v.seconds <= 10 for v in verdicts) >= 3, [v.seconds for v in verdicts]


@pytest.mark.parametrize("where", ["compute", "pull", "push", "server"])
@pytest.mark.parametrize("usual", [0.005, 0.05])
def test_50_ms_are_named_within_two_seconds(where, usual):
    kind = {"compute": "transient", "server": "server"}.get(where, "network")
    fixed = {"usual": usual, "begin": 6.0, "trainers": 4, "servers": 2, "staleness": 2}
    in_time = 0
    for seed in range(5):
        if kind == "transient":
            trace = traces.make("permanent", seed, **fixed, factor=1 + 0.05 / usual, how="slow")
        else:
            how = "service" if where == "server" else where
            trace = traces.make(kind, seed, **fixed, factor=0.05 / usual, how=how)
        expected = kind, trace.trainer, trace.server
        named = [now for now, findings in trace.diagnoses() if expected in kinds(findings)]
        assert named
        in_time += trace.began < named[0] <= trace.began + 2
    assert in_time >= 4


# -- wrong variants, which the simulated runs must tell from the right one


def _mean_of_all(values):
    return np.full(len(values), values[~np.isnan(values)].mean() if not np.isnan(values).all() else math.nan)


def _median_of_all(values):
    return np.full(len(values), np.median(values[~np.isnan(values)]) if not np.isnan(values).all() else math.nan)


def _always_slow(diagnosis):
    every = np.ones(diagnosis.history.trainers)
    return -100 * every, 100 * every, every


class WaitingIsWork(rates.Window):
    def __init__(self, history, counts):
        super().__init__(history, counts)
        self.step = self.step + history.newest(counts)[:, AT["wait"]] / self.clocks


WRONG = {
    "the mean of all": (rates, "others", _mean_of_all, "permanent", {"trainers": 3, "factor": 1.4}),
    "the median of all": (rates, "others", _median_of_all, "permanent", {"trainers": 2, "factor": 1.4}),
    "waiting is work": (diagnosis, "Window", WaitingIsWork, "permanent", {"trainers": 8, "staleness": 0}),
    "silence is death": (diagnosis, "DEAD_SECONDS", 0.0, "transient", {"how": "pause", "factor": 30.0, "trainers": 4}),
    "slow is slow for good": (Diagnosis, "_streaks", _always_slow, "transient", {"how": "neighbour", "factor": 4.0}),
    "loads do not matter": (diagnosis, "SKEW_FACTOR", math.inf, "skew", {"trainers": 4}),
    "trainers are taken at their word": (slow_servers, "SLOW_SERVICE_FACTOR", 0.0, "none", {"servers": 4}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found_out(name, monkeypatch):
    where, attribute, wrong, cause, fixed = WRONG[name]

    def right():
        return sum(traces.judge(traces.make(cause, seed, **({"usual": 0.1} | fixed))).right for seed in range(8))

    assert right() >= 7
    monkeypatch.setattr(where, attribute, wrong)
    assert right() <= 6


def test_a_second_straggler_does_not_hide_the_first(monkeypatch):
    reported = {1: {"compute": 0.0152}, 2: {"compute": 0.0152}}  # 1.4 times as long as trainer 0
    assert {f.trainer for f in Run(3).go(12, reported=reported)} == {1, 2}
    monkeypatch.setattr(rates, "others", lambda values: (np.nansum(values) - values) / 2)
    assert not Run(3).go(12, reported=reported), "the mean of the others does"


def _erratic(seconds=30):
    """The number of ticks with a finding, where each report is 1.5 times as long as another by chance alone."""
    rng, history, named = np.random.default_rng(0), History(4), 0
    diagnosis = Diagnosis(history)
    for n in range(4 * seconds):
        for trainer in range(4):
            history.report(trainer, n / 4, row(clocks=5, compute=0.25 * rng.lognormal(0, 0.4)), 5 * n, {})
        if n % 4 == 3:
            named += bool(diagnosis.diagnose(n / 4, [5 * n] * 4, ["running"] * 4, [0.0] * 4, [], 0))
    return named


def test_where_all_is_erratic_nobody_stands_out(monkeypatch):
    assert _erratic() == 0
    monkeypatch.setattr(diagnosis, "noise", lambda history: 0.0)
    assert _erratic() > 5, "chance has to be allowed for"


# -- the automatic staleness


def stalenesses(automatic, seconds, share, loss=lambda now: None, findings=(), begin=0):
    return [automatic.update(now, share, loss(now), findings) for now in range(begin, begin + seconds)]


def named(kind, since=0.0):
    return [Finding(kind, 1, None, 2.0, since, 0.5, "", "")]


def test_staleness_rises_while_there_is_waiting_and_one_at_a_time():
    stalenesses_chosen = stalenesses(AutoStaleness(maximum=4), 40, 0.3)
    assert stalenesses_chosen[:5] == [0] * 5
    assert stalenesses_chosen[-1] == 4
    assert set(np.diff(stalenesses_chosen)) == {0, 1}
    steps = np.flatnonzero(np.diff(stalenesses_chosen))
    assert (np.diff(steps) >= 5).all()
    assert stalenesses(AutoStaleness(), 40, 0.05) == [0] * 40


@pytest.mark.parametrize(
    ("kind", "rises"),
    [("transient", True), ("server", True), ("permanent", False), ("skew", False), ("dead", False), ("network", False)],
)
def test_staleness_rises_only_where_it_helps(kind, rises):
    assert (stalenesses(AutoStaleness(), 40, 0.3, findings=named(kind, since=-10.0))[-1] > 0) == rises


def test_staleness_is_taken_back_when_the_loss_gets_worse():
    automatic, rng = AutoStaleness(), np.random.default_rng(0)

    def loss(now):
        return 1 / (1 + 0.1 * now) + 0.3 * max(0, automatic.value - 1) + rng.normal(0, 0.005)

    stalenesses_chosen = stalenesses(automatic, 50, 0.3, loss)
    assert max(stalenesses_chosen) == 2
    assert stalenesses_chosen[-1] == 1
    assert sum(step > 0 for step in np.diff(stalenesses_chosen)) == 2, "it is not tried again so soon"
    later = stalenesses(automatic, 600, 0.3, loss, begin=50)
    assert max(later) == 2, "but it is"
    assert sum(value == 2 for value in later) < 100


def test_staleness_rises_while_the_loss_flattens():
    rng = np.random.default_rng(0)
    stalenesses_chosen = stalenesses(
        AutoStaleness(maximum=8), 120, 0.3, lambda now: 0.3 + math.exp(-now / 20) + rng.normal(0, 0.01)
    )
    assert stalenesses_chosen[-1] == 8
    assert (np.diff(stalenesses_chosen) >= 0).all()


def test_staleness_falls_when_nobody_waits():
    automatic = AutoStaleness(start=3)
    assert stalenesses(automatic, 19, 0.01) == [3] * 19
    assert stalenesses(automatic, 70, 0.01, begin=19)[-1] == 0
    assert stalenesses(AutoStaleness(start=3), 90, 0.05)[-1] == 3, "some waiting: it is left alone"


def test_staleness_does_not_swing():
    """Waiting is much at 1 and none at 2: it must settle."""
    automatic, share, stalenesses_chosen = AutoStaleness(start=1), 0.3, []
    for now in range(1200):
        stalenesses_chosen.append(automatic.update(now, share, None, []))
        share = 0.3 if stalenesses_chosen[-1] < 2 else 0.0
    assert sum(step != 0 for step in np.diff(stalenesses_chosen)) < 16
    assert sum(step != 0 for step in np.diff(stalenesses_chosen[600:])) <= 4


def test_staleness_begins_within_its_bounds():
    with pytest.raises(InputError, match="between 0 and 4"):
        AutoStaleness(maximum=4, start=5)
    first = stalenesses(AutoStaleness(), 100, 0.2, lambda now: 1 / (1 + now))
    assert first == stalenesses(AutoStaleness(), 100, 0.2, lambda now: 1 / (1 + now)), "no chance in it"
