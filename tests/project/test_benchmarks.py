"""The harness of the benchmarks: rows, verdicts, turns, bare sockets; and that every program starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import common, exchange, peers, pull_push, staleness  # noqa: E402
from dps.engine.state.ops import TableSpec  # noqa: E402
from dps.engine.state.optimizers import Adagrad  # noqa: E402

PROGRAMS = sorted(f.stem for f in (ROOT / "benchmarks").glob("*.py") if "__main__" in f.read_text())
KEYS = ["case", "value", "unit", "against", "ratio", "reach", "ok"]


def test_the_readme_of_the_benchmarks_lists_every_program_and_no_other():
    listed = re.findall(r"^\| `(\w+)\.py` \|", (ROOT / "benchmarks" / "README.md").read_text(), re.M)
    assert sorted(listed) == PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(program, capsys):
    module = importlib.import_module(f"benchmarks.{program}")
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert "--json" in output
    assert "--quick" in output
    assert module.__doc__.splitlines()[0].split()[0] in output


@pytest.mark.parametrize(
    ("reach", "value", "ratio", "ok"),
    [
        ("<= 1.5 x", 100.0, 1.5, True),
        ("<= 1.5 x", 0.1, 1.51, False),
        ("< 1 x", 0.1, 1.0, False),
        (">= 1 x (aim 1.5)", 0.1, 1.2, True),
        (">= 30,000 ticks/s", 30_000.0, None, True),
        (">= 30,000 ticks/s", 29_999.0, 5.0, False),
        ("<= 0.15 ms", 0.1501, None, False),
        ("<= 1e-8", 3e-4, None, False),
        ("<= 1e-8", 3e-11, None, True),
        ("> 2 examples", 3.0, 0.1, True),  # no word of its own: the value
        (None, 1.0, 1.0, None),
    ],
)
def test_a_reach_is_its_own_rule(reach, value, ratio, ok):
    assert common.reached(reach, value, ratio) is ok


@pytest.mark.parametrize("reach", ["fast", "1.5 x", "<= x"])
def test_a_reach_that_is_no_rule(reach):
    with pytest.raises(ValueError, match="reads"):
        common.reached(reach, 1.0, 1.0)


def test_a_reach_on_a_ratio_needs_one():
    with pytest.raises(ValueError, match="there is none"):
        common.reached("<= 1.5 x", 1.0, None)


def test_table_and_file_hold_the_same_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    with common.Report("a title", str(file)) as report:
        report.duration("pull", 30e-6, "floor", 25e-6, "<= 1.5 x")
        report.duration("push", 40e-6, "floor", 25e-6, "<= 1.5 x")
        report.add("bytes", 44.71234, "bytes/key")
        report.add("loss not reached", 1.0, "s", "Spark", 20.0, "<= 0.1 x", failed=True)
        report.note("Ray is not installed")
    rows = json.loads(file.read_text())
    assert [list(row) for row in rows] == [KEYS] * 6
    assert [row["case"][:12] for row in rows] == [
        "machine: loa",
        "pull",
        "push",
        "bytes",
        "loss not rea",
        "machine: loa",
    ]
    assert rows[1] == dict(zip(KEYS, ("pull", 30.0, "us", "floor", 1.2, "<= 1.5 x", True), strict=True))
    assert rows[2]["ok"] is False
    assert rows[3] == dict(zip(KEYS, ("bytes", 44.71, "bytes/key", None, None, None, None), strict=True))
    assert rows[4]["ok"] is False
    shown = capsys.readouterr().out
    for text in ("a title", "cores, load average", "Python 3.", "numpy", "floor = 25", "1 of 3 figures reached"):
        assert text in shown
    assert "not: push" in shown
    assert "-- Ray is not installed" in shown


def test_numbers_of_numpy_become_json(tmp_path):
    file = tmp_path / "rows.json"
    with common.Report("a title", str(file)) as report:
        report.add("slowest", np.float32(2.0), "ms", "other", np.float64(4.0), "<= 50 ms")
        report.add("count", np.int64(3), "keys")
    rows = json.loads(file.read_text())
    assert (rows[1]["value"], rows[1]["ratio"], rows[1]["ok"], rows[2]["value"]) == (2.0, 0.5, True, 3.0)


def test_a_program_that_breaks_writes_no_file(tmp_path):
    file = tmp_path / "rows.json"
    with pytest.raises(ZeroDivisionError), common.Report("a title", str(file)):
        raise ZeroDivisionError
    assert not file.exists()


@pytest.mark.parametrize(("seconds", "unit"), [(2e-5, "us"), (2e-3, "ms"), (2.0, "ms"), (20.0, "s")])
def test_units_of_time(seconds, unit):
    factor, unit_chosen = common.time_unit(seconds)
    assert unit_chosen == unit
    assert factor == {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]


def test_turns_alternate():
    order = []
    results = common.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, turn=0.0)
    assert order == [*"aaabbb", *"ababab"]  # three calls of each to warm up and measure, then A B A B
    assert results.keys() == {"a", "b"}
    assert all(seconds >= 0 for seconds in results.values())


def test_no_turn_is_longer_than_it_needs(monkeypatch):
    calls = []
    common.interleave({"a": lambda: calls.append(0)}, rounds=1, turn=100.0)
    assert len(calls) == 3 + common.MOST_CALLS


def test_costs_count_the_processor_time_of_all_that_work():
    """A helper computes for 20 ms while the caller sleeps: the time of the call is the helper's."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as helper:

        def call():
            until = common.processor_seconds([helper.pid]) + 0.02
            while common.processor_seconds([helper.pid]) < until:
                time.sleep(0.005)

        try:
            found = common.costs({"with": call, "without": call}, {"with": [helper.pid]}, 3, 0.0)
        finally:
            helper.kill()
    assert found["without"].cpu < 0.02 <= found["with"].cpu


@pytest.mark.processes
@pytest.mark.parametrize("kind", peers.KINDS)
@pytest.mark.parametrize("spin", [0.0, 50e-6])
@pytest.mark.parametrize("count", [1, 2])
def test_bare_sockets_move_what_was_asked(kind, spin, count):
    with peers.Peers(count) as started:
        both = [peers.Bare(started.ports, kind, spin) for _ in range(2)]  # a peer serves several at a time
        try:
            for sent, wanted in ((0, 0), (40, 8), (1 << 20, 0), (0, 1 << 20), (300_000, 200_000), (8, 8)):
                for bare in both:
                    bare.prepare(sent, wanted)
                    bare.exchange()
                    bare.exchange()
        finally:
            for bare in both:
                bare.close()


@pytest.mark.processes
@pytest.mark.skipif(common.cores() < 2, reason="one core")
@pytest.mark.parametrize(("place", "cores"), [("one core", {1}), ("two cores", {1, 2}), ("free", set())])
def test_processes_are_kept_where_they_are_wanted(place, cores):
    with peers.Peers(1) as started:
        pids = [os.getpid(), *started.pids]
        free = [os.sched_getaffinity(pid) for pid in pids]
        before = exchange.placed(place, started.pids)
        kept = [os.sched_getaffinity(pid) for pid in pids]
        for pid, allowed in before.items():
            exchange.keep_on(pid, allowed)
        assert [os.sched_getaffinity(pid) for pid in pids] == free
    if place == "free":
        assert kept == free
    else:
        assert [len(allowed) for allowed in kept] == [1, 1]
        assert len(set.union(*kept)) == max(cores)


class Session:
    """What `pull_push.plans` asks of a parameter server."""

    def __init__(self, servers):
        self.count, self.tables = servers, []

    def servers(self):
        return self.count

    def table(self, name, **options):
        self.tables.append(name)
        return types.SimpleNamespace(spec=TableSpec(name, **options))

    def drop_table(self, name):
        assert self.tables[-1] == name


def test_pull_push_measures_what_was_asked_for(monkeypatch):
    """Every size of the figures that are asked for, in both orders; one key in both places."""
    monkeypatch.setattr(pull_push, "cores", lambda: 2)
    session = Session(1)
    cases = [wanted for plan in pull_push.placed_plans(session, False, []) for wanted in plan.wanted]
    names = [(wanted.case, wanted.place) for wanted in cases]
    assert len(set(names)) == len(names)
    sizes = {re.split(", (?=pull|push|random|localize)", case)[0] for case, _ in names}
    assert sizes == {
        "1 key",
        *(f"keyed {keys} x 16" for keys in ("1,000", "10,000", "100,000")),
        *(f"keyed 100,000 x {row}" for row in ("1", "64", "64 int16")),
        *(f"dense {size}" for size in ("4 KB", "1 MB", "64 MB")),
    }
    assert {place for case, place in names if case.startswith("1 key")} == {"one core", "two cores"}
    assert {order for wanted in cases if wanted.case.startswith("keyed") for order in [wanted.order]} == {
        "random",
        "localize",
    }
    for row in pull_push.AT_MOST:
        assert any(case.startswith(f"{row},") for case, _ in names)


def test_rows_of_pull_push_can_be_chosen():
    session = Session(1)
    cases = [w.case for plan in pull_push.plans(session, True, ["1 key, pull", "64 MB"]) for w in plan.wanted]
    assert cases == ["1 key, pull", "dense 64 MB, pull", "dense 64 MB, push Add", "dense 64 MB, push Adagrad"]
    assert session.tables == ["one-Add", "dense-262144-Add", "dense-262144-Adagrad"]  # no other is made and filled


def test_rivals_get_every_size_in_one_order():
    plans = list(pull_push.rival_plans(Session(1), False, []))
    assert {wanted.order for plan in plans for wanted in plan.wanted} == {"random"}
    assert max(plan.born for plan in plans) == 2 * pull_push.KEYS


def test_verdicts_of_pull_push_count_the_same_socket_and_each_core_once(monkeypatch):
    """10 us over Unix, 30 over TCP, kernels of 20 us on two cores: 30 us are 1.5 times the floor."""
    costs = {name: common.Cost(us * 1e-6, us * 1e-6) for name, us in (("dps", 30), ("unix", 10), ("tcp", 30))}
    costs["kernels"] = common.Cost(20e-6, 20e-6)
    monkeypatch.setattr(pull_push, "cores", lambda: 2)
    with common.Report("rows") as report:
        pull_push.rows_of(report, "keyed 5 x 1, pull", costs, 2)
        pull_push.one_key_rows(report, "1 key, pull", costs | {f"{k} sleeping": costs[k] for k in ("unix", "tcp")}, 1)
    judged = [(row.case, row.ratio, row.ok) for row in report.rows if row.reach]
    assert judged == [
        ("keyed 5 x 1, pull", 1.5, True),
        ("1 key, pull", 3.0, False),
        ("1 key, pull: CPU", 3.0, True),  # below 45 us
    ]


def test_keys_are_distinct():
    keys = np.concatenate([exchange.distinct_keys(0, 10_000), exchange.distinct_keys(10_000, 20_000)])
    assert keys.dtype == np.int64
    assert len(np.unique(keys)) == 20_000


@pytest.mark.parametrize("order", ["random", "localize"])
def test_kernels_of_the_floor_do_the_work(order):
    spec = TableSpec("w", dim=3, optimizer=Adagrad(0.1), shards=4)
    local = exchange.Local(spec)
    exchange.fill_local(local, 1000)
    assert sum(len(shard) for shard in local.shards) == 1000
    wanted = exchange.Wanted("case", "pull", 200, order)
    plan = exchange.Plan(spec, 1000, (wanted,), 1, 1, 0.0)
    keys = exchange.pick(plan, wanted)
    assert len(np.unique(keys)) == 200
    grouped = exchange.group(keys, spec.shard_map).keys
    before, after = np.zeros((200, 3), np.float32), np.zeros((200, 3), np.float32)
    local.pull(grouped, before)()
    exchange.kernel_call(local, exchange.Wanted("case", "push", 200, order), keys, 200)()
    local.pull(grouped, after)()
    assert before.any(axis=1).all()
    assert (before != after).any(axis=1).all()


def test_kernels_of_a_dense_floor_cover_all_rows():
    local = exchange.Local(TableSpec("w", rows=10, dim=2, shards=4))
    exchange.kernel_call(local, exchange.Wanted("case", "push"), None, 10)()
    out = np.zeros((10, 2), np.float32)
    local.pull_all(out)()
    assert (out == exchange.values_for(local.spec, 10)).all()


def test_bytes_on_the_wire_are_those_of_a_frame():
    keyed, dense = TableSpec("w", dim=3, shards=8), TableSpec("d", rows=10, dim=3, shards=8)
    pull, push = exchange.Wanted("", "pull"), exchange.Wanted("", "push")
    plan = exchange.Plan(keyed, 0, (), 2, 1, 0.0)
    assert exchange.wire_bytes(plan, pull, 10, 2) == (8 * 4 + 8 * 5, 64)  # counts, keys; 5 rows of 12 bytes, padded
    assert exchange.wire_bytes(plan, push, 10, 2) == (8 * 4 + 8 * 5 + 64, 0)
    plan = exchange.Plan(dense, 0, (), 1, 1, 0.0)
    assert exchange.wire_bytes(plan, pull, 10, 1) == (0, 120)
    assert exchange.wire_bytes(plan, push, 10, 1) == (120, 0)


@pytest.mark.parametrize(("bound", "waited", "total"), [(0, 1, 3 + 4), (1, 0, 2 + 4), (16, 0, 2 + 4)])
def test_simulated_trainers_wait_as_one_can_work_out_by_hand(bound, waited, total):
    """Steps of 1 s and of 2 s: at 0 the first trainer waits after its first step, and not for its own end."""
    assert staleness.simulate(np.array([[1.0, 1.0], [2.0, 2.0]]), bound) == pytest.approx(waited / total)


@pytest.mark.parametrize("bound", staleness.BOUNDS)
def test_a_simulated_trainer_that_is_slow_for_good_keeps_the_others_waiting(bound):
    steps = np.ones((4, 1000))
    steps[0] = 2.0
    lasted = 2 * (999 - bound) + 1  # the three make their last step when trainer 0 has made 999 - bound of its own
    assert staleness.simulate(steps, bound) == pytest.approx(3 * (lasted - 1000) / (2000 + 3 * lasted))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs(program, tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{program}", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads(file.read_text())
    assert len(rows) > 6
    for row in rows:
        assert list(row) == KEYS
        assert np.isfinite(row["value"])
        assert (row["ok"] is None) == (row["reach"] is None)
