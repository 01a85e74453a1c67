"""Snapshots in a terminal: `dask ps top`, the table of ps.status(), progress. Only the last test has a cluster."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import sys
import threading
import time

import pytest
import tqdm
from dask.distributed import Client
from IPython.lib.pretty import pretty
from rich.console import Console
from servers import PATIENCE
from shell import RUNNER
from snapshots import snapshot

import dps
from dps.cli import ps as group
from dps.cli import top as module
from dps.dashboard.palette import PARTS
from dps.dashboard.terminal import Overview, average, rooms, slowest_first, split_bar
from dps.display import Clocks, Status, summary
from dps.training import progress

EVIL = "[red]<script>[/red] [/]"


def shown(thing, width=80, height=None) -> list[str]:
    console = Console(width=width, height=height or 100, record=True, file=io.StringIO())
    console.print(Overview(thing, height) if isinstance(thing, dict) and "throughput" in thing else thing)
    return console.export_text().splitlines()


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("height", [24, 45])
@pytest.mark.parametrize(("trainers", "servers"), [(4, 2), (1000, 32)])
def test_it_fits_the_terminal(width, height, trainers, servers):
    lines = shown(snapshot(trainers, servers), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = words(lines)
    assert f"trainer {trainers - 1} is slow for good (permanent), 2.0 times" in text
    assert "do: staleness does not help; lease its work out: ps.run(..., reassign=True)" in text
    assert f"{servers} of {servers} servers" in text
    assert "loss 0.1" in text
    assert "…" not in text  # nothing was cut
    for section in ("trainer ", "server ", "table ", "time "):
        assert any(line.startswith(section) for line in lines), section


def test_the_slowest_come_first_and_the_others_are_summed():
    made = snapshot(1000)
    of = made["runs"][0]["trainers"]
    lines = shown(made, 80, 30)
    head = next(n for n, line in enumerate(lines) if line.startswith("trainer   "))
    table = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    *some, rest = table
    order = slowest_first(made["runs"][0])
    assert [int(row[0]) for row in some] == order[: len(some)]
    assert order[0] == 999  # the straggler
    assert order[1] == 1  # who is lost
    steps = [of["step"][n] for n in order[2:]]
    assert steps == sorted(steps, reverse=True)
    assert (rest[0], rest[1]) == (str(1000 - len(some)), "more")
    waiting = sum(of["state"][n] == "waiting" for n in order[len(some) :])
    assert (int(rest[2]), rest[3]) == (waiting, "wait")


def test_who_is_done_comes_last():
    run = snapshot(4)["runs"][0]
    run["trainers"]["state"][3] = "left"
    assert slowest_first(run)[-1] == 3


def test_a_bar_shows_where_the_time_went():
    made = snapshot(2)
    of = made["runs"][0]["trainers"]
    for n, part in enumerate(PARTS):
        of[part] = [1.0 if n == 0 else 0.0, 0.5 if part in ("pull", "wait") else 0.0]
    row = next(line for line in shown(made, 80) if line.startswith("0 "))
    assert "█" in row
    assert not set("▒·▓░") & set(row)
    row = next(line for line in shown(made, 80) if line.startswith("1 "))
    assert abs(row.count("▒") - row.count("·")) <= 1
    assert "█" not in row
    assert average(made["runs"][0]) == [0.5, 0.25, 0.25, 0.0, 0.0]
    for width in range(1, 60):
        assert sum(len(text) for _, text in split_bar([0.31, 0.11, 0.37, 0.2, 0.01], width)) == width


@pytest.mark.parametrize("height", range(1, 60, 7))
def test_sections_share_the_room(height):
    given = rooms({"trainers": 1000, "servers": 3, "tables": 2, "events": 50}, height)
    assert sum(rows + 2 for rows in given.values()) <= height
    if height > 2:
        assert given["trainers"] == max(given.values())


def test_what_is_unknown_is_left_out():
    made = snapshot(3)
    run = made["runs"][0]
    run |= {"stragglers": [], "metrics": {}, "logged": {}, "totals": {}, "strip": [], "staleness": None}
    run["trainers"] = {name: run["trainers"][name] for name in ("where", "state", "clock", "age", "attempts")}
    made["throughput"] = {name: [] for name in made["throughput"]}
    text = words(shown(made, 80))
    assert "staleness none" in text
    assert "loss" not in text.split("trainer")[0]
    made |= {"runs": [], "servers": [], "tables": {}, "events": []}
    assert words(shown(made, 80)).endswith("no run yet")


@pytest.mark.parametrize("name", ["auc", "[red]" + "x" * 59])
def test_what_is_logged_instead_of_a_loss_is_shown_of_each_trainer(name):
    made = snapshot(2)
    run = made["runs"][0]
    run |= {"metrics": {name: run["metrics"]["loss"]}, "logged": {name: [0.625, 0.875]}}
    text = words(shown(made, 80))
    assert f"keys/s {name[:12]} " in text
    assert "0.625" in text
    assert "0.875" in text


def test_text_of_others_is_no_markup():
    made = snapshot(2)
    made["events"].append([made["time"], EVIL])
    made["tables"] = {EVIL: made["tables"]["weights"]}
    made["runs"][0] |= {"error": EVIL}
    made["runs"][0]["stragglers"][0] |= {"why": EVIL, "remedy": EVIL}
    assert words(shown(made, 160)).count(EVIL) == 5


# -- the command


class Told:
    """A parameter server that knows one snapshot after the other."""

    def __init__(self, trainers=4):
        self.trainers = trainers
        self.asked = 0

    def _call(self, verb):
        assert verb == "snapshot"
        self.asked += 1
        return json.dumps(snapshot(self.trainers, seed=self.asked))


@pytest.fixture
def told(monkeypatch):
    ps = Told()
    monkeypatch.setattr(module, "attached", lambda where: contextlib.nullcontext(ps))
    return ps


def invoke(*args, status=0):
    result = RUNNER.invoke(group, ["top", "--interval", "0.1", *args])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def test_as_json_there_is_one_in_each_line(told):
    lines = invoke("--json", "--count", "3").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [snapshot(4, seed=n) for n in (1, 2, 3)]


def test_where_there_is_no_terminal_one_is_printed_after_the_other(told):
    text = invoke("--count", "2").stdout
    assert text.count("trainer 3 is slow for good") == 2
    assert "\x1b" not in text


def test_what_fails_is_one_line(told, monkeypatch):
    def fail(verb):
        raise dps.DPSError("the scheduler\nis gone")

    monkeypatch.setattr(told, "_call", fail)
    result = invoke(status=1)
    assert result.stderr == "Error: the scheduler is gone\n"
    invoke("--interval", "0", status=2)
    invoke("--count", "0", status=2)


def test_without_rich_it_says_what_to_install(told, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert "pip install 'dps[cli]'" in invoke("--count", "1", status=1).stderr
    assert json.loads(invoke("--count", "1", "--json").stdout)["name"] == "dps"


def test_it_does_not_hurry_after_a_long_answer(monkeypatch):
    now, waits = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    class Slow:
        def _call(self, verb):
            now[0] += 5.0 if not waits else 0.1
            return "{}"

    def pause(seconds):
        waits.append(round(seconds, 6))
        now[0] += seconds
        return False

    assert list(module.every(1.0, 4, Slow(), pause)) == ["{}"] * 4
    assert waits == [0.0, 0.9, 0.9]


def read(number, until: bytes, seconds=PATIENCE) -> bytes:
    """What a terminal shows, until something is in it."""
    end, found = time.monotonic() + seconds, b""
    while until not in found and time.monotonic() < end:
        if select.select([number], [], [], 0.1)[0]:
            found += os.read(number, 65536)
    assert until in found, found[-2000:]
    return found


def test_on_a_terminal_it_fills_the_screen_until_q(monkeypatch):
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0, closefd=True) as terminal:
        side = io.TextIOWrapper(terminal, encoding="utf8", write_through=True)
        monkeypatch.setattr(sys, "stdin", side)
        monkeypatch.setattr(sys, "stdout", side)
        for name, value in {"COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"}.items():
            monkeypatch.setenv(name, value)
        before = module.termios.tcgetattr(theirs)
        ps = Told(1000)
        watching = threading.Thread(target=module.watch, args=(ps, 0.1, None))
        watching.start()
        try:
            seen = read(ours, b"more")
            assert b"\x1b[?1049h" in seen  # a screen of its own
            os.write(ours, b"x")
            asked = ps.asked
            while ps.asked < asked + 2:  # another key does not end it
                read(ours, b"\x1b[", 1)
        finally:
            os.write(ours, b"q")
            while watching.is_alive():
                if select.select([ours], [], [], 0.05)[0]:
                    seen = os.read(ours, 65536)
            watching.join()
        assert module.termios.tcgetattr(theirs) == before
        side.detach()
    os.close(ours)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_q_is_seen_behind_other_keys_and_where_there_is_no_time_to_wait(monkeypatch, seconds):
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with module.keys() as pressed:
            assert not pressed(seconds)
            os.write(ours, b"xq")
            assert select.select([theirs], [], [], PATIENCE)[0]
            assert pressed(seconds)
    os.close(ours)


# -- ps.status(), progress


def status_of(**more):
    spec = dps.TableSpec(EVIL, rows=8, optimizer=dps.SGD(0.1)).to_dict()
    table = {"spec": spec, "chains": [[0]] * 4}
    server = {"number": 0, "worker": EVIL, "alive": True, "leaving": False, "requests": 12345}
    server["tables"] = {EVIL: {"rows": 8, "bytes": 2048}}
    run = {"run": 1, "staleness": 1, "clocks": [5, 3], "planned": [10, 10], "waiting": [0], "left": [], "lost": []}
    run |= {"connected": [0, 1], "stopped": EVIL, "error": "DPSError"}
    fields = {"name": "dps", "wanted": 2, "servers": [server], "tables": {EVIL: table}, "runs": [run]}
    checkpoints = {"last": {"name": "000001-ab", "rows": 8}, "error": EVIL}
    return Status.of({**fields, "checkpoints": checkpoints, "news": [[0.0, EVIL]], **more})


def test_status_is_a_table_in_a_terminal_and_stays_a_dict():
    status = status_of()
    text = words(shown(status, 160))
    assert text.startswith("dps 1 of 2 servers last checkpoint: 000001-ab, 8 rows")
    assert text.count(EVIL) == 5  # error, worker, table, run, event
    assert "12.3k" in text
    assert f"run 1 8 of 20 iterations staleness 1 {EVIL}" in text
    assert "0 5 of 10 waiting" in text
    assert "1 3 of 10 at work" in text
    assert max(map(len, shown(status, 80))) <= 80
    assert repr(status) == repr(dict(status))
    assert words(pretty(status).splitlines()).startswith("dps 1 of 2 servers")  # IPython's terminal


def test_status_tells_of_stragglers():
    found = [{"run": 1, **finding} for finding in snapshot(4)["runs"][0]["stragglers"]] * 6
    text = words(shown(status_of(stragglers=found)))
    assert text.count("trainer 3 is slow for good (permanent)") == 4
    assert "... and 2 more stragglers" in text


def seen(**more):
    run = {"run": 7, "staleness": 1, "clocks": [7, 7, 6], "planned": [10] * 3, "waiting": [0], "left": [], "lost": []}
    return {**run, "connected": [0, 1, 2], "stopped": None, "error": None, **more}


SLOW = {"kind": "network", "trainer": 1, "server": None, "factor": 3.25, "share": 0.5}


def test_progress_names_the_slowest_its_kind_and_the_loss():
    assert summary(seen()) == "slowest: trainer 2 at 6, 1 waiting"
    told = {"stragglers": [SLOW, {**SLOW, "trainer": 0, "factor": 2.0}], "metrics": {"auc": 0.5, "loss": 0.123456}}
    assert summary(seen(**told)) == "slowest: trainer 1 at 7 (network, 3.2x), 1 waiting, loss 0.1235"
    page = Clocks([seen(**told)])._repr_html_()
    assert "slowest: trainer 1 at 7 (network, 3.2x), 1 waiting, loss 0.1235" in page
    assert summary(seen(**told, left=[1])).startswith("slowest: trainer 0 at 7 (network, 2.0x)")
    server = {**SLOW, "kind": "server", "trainer": None, "server": 4, "factor": None}
    assert "server 4 is slow (server)" in summary(seen(stragglers=[server]))
    machine = {**SLOW, "kind": "overloaded", "trainer": None, "host": "n7"}
    assert summary(seen(stragglers=[machine])) == "slowest: trainer 2 at 6, machine n7 is overloaded, 1 waiting"
    over = Clocks([seen(**told, left=[0, 1, 2])])._repr_html_()
    assert "finished; loss 0.1235" in over
    assert "slowest" not in over


def test_the_bar_tells_it_too(monkeypatch, capsys):
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread
    with progress.ProgressBar(True) as bar:
        bar.show(seen(stragglers=[SLOW], metrics={"loss": 0.5}))
    error = capsys.readouterr().err
    assert "20/30" in error
    assert "slowest: trainer 1 at 7 (network, 3.2x), 1 waiting, loss 0.5" in error


# -- a real one


def train(trainer, partitions):
    for step, keys in enumerate(trainer.iterate(partitions, epochs=30)):
        trainer.push("w", keys, 1)
        trainer.log(loss=1 / (step + 1))


def test_top_of_a_cluster():
    options = {"processes": False, "protocol": "tcp", "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        with dps.ParameterServer(client) as ps:
            ps.table("w", dtype="int64")
            ps.run(train, client.scatter([[1, 2], [3, 4]]))
            where = ["--scheduler", cluster.scheduler_address, "--count", "1"]
            (line,) = invoke("--json", *where).stdout.splitlines()
            assert [run["state"] for run in json.loads(line)["runs"]] == ["finished"]
            text = words(invoke(*where).stdout.splitlines())
            assert "1 of 1 servers" in text
            assert "run 1 finished" in text
            assert "clocks 60 to 60 of 60" in text
        missing = invoke(*where, status=1)
        assert "there is no parameter server named 'dps'" in missing.stderr
