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
from types import SimpleNamespace

import msgspec
import pytest
import tqdm
from dask.distributed import Client
from IPython.lib.pretty import pretty
from rich.console import Console
from servers import PATIENCE
from shell import RUNNER
from snapshots import sample_run, snapshot, typed

import dps
from dps.engine.cli import ps as group
from dps.engine.cli import top as module
from dps.engine.dashboard.notebook import CheckpointsView, ClocksView, NotebookStatus, summary
from dps.engine.dashboard.terminal import StatusOverview, average, rooms, slowest_first, split_bar
from dps.engine.telemetry.snapshot import (
    PARTS,
    Curve,
    LastCheckpoint,
    ServerPhase,
    ServerStatus,
    Status,
    Straggler,
    TableStatus,
)
from dps.engine.training import progress_bar

EVIL = "[red]<script>[/red] [/]"


def shown(thing, width=80, height=None) -> list[str]:
    console = Console(width=width, height=height or 100, record=True, file=io.StringIO())
    console.print(StatusOverview(thing, height) if type(thing) is Status else thing)
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
    assert ("17: 9.1%" in words(lines)) == ("hottest key" in words(lines)) == (width >= 120)
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
    trainers = made.runs[0].trainers
    lines = shown(made, 80, 30)
    head = next(n for n, line in enumerate(lines) if line.startswith("trainer   "))
    table = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    *some, rest = table
    order = slowest_first(made.runs[0])
    assert [int(row[0]) for row in some] == order[: len(some)]
    assert order[0] == 999  # the straggler
    assert order[1] == 1  # the lost trainer
    steps = [trainers[n].step for n in order[2:]]
    assert steps == sorted(steps, reverse=True)
    assert (rest[0], rest[1]) == (str(1000 - len(some)), "more")
    waiting = sum(trainers[n].state == "waiting" for n in order[len(some) :])
    assert (int(rest[2]), rest[3]) == (waiting, "wait")


def test_who_is_done_comes_last():
    plain = snapshot(4).to_dict()
    plain["runs"][0]["trainers"][3]["state"] = "left"
    assert slowest_first(typed(plain).runs[0])[-1] == 3


def test_a_bar_shows_where_the_time_went():
    plain = snapshot(2).to_dict()
    first, second = plain["runs"][0]["trainers"]
    first["split"] = {part: float(n == 0) for n, part in enumerate(PARTS)}
    second["split"] = {part: 0.5 if part in ("pull", "wait") else 0.0 for part in PARTS}
    made = typed(plain)
    row = next(line for line in shown(made, 80) if line.startswith("0 "))
    assert "█" in row
    assert not set("▒·▓░") & set(row)
    row = next(line for line in shown(made, 80) if line.startswith("1 "))
    assert abs(row.count("▒") - row.count("·")) <= 1
    assert "█" not in row
    assert average(made.runs[0]) == [0.5, 0.25, 0.25, 0.0, 0.0]
    for width in range(1, 60):
        assert sum(len(text) for _, text in split_bar([0.31, 0.11, 0.37, 0.2, 0.01], width)) == width


@pytest.mark.parametrize("height", range(1, 60, 7))
def test_sections_share_the_room(height):
    given = rooms({"trainers": 1000, "servers": 3, "tables": 2, "events": 50}, height)
    assert sum(rows + 2 for rows in given.values()) <= height
    if height > 2:
        assert given["trainers"] == max(given.values())


def test_what_is_unknown_is_left_out():
    made = snapshot(3).to_dict()
    run, keep = made["runs"][0], ("number", "where", "state", "clock", "age", "attempts")
    run |= {"stragglers": [], "metrics": {}, "logged": {}, "totals": None, "strips": [], "staleness": None}
    run["trainers"] = [{name: trainer[name] for name in keep} for trainer in run["trainers"]]
    made["throughput"] = {}
    text = words(shown(typed(made), 80))
    assert "staleness none" in text
    assert "loss" not in text.split("trainer")[0]
    made |= {"runs": [], "servers": [], "tables": {}, "events": []}
    assert words(shown(typed(made), 80)).endswith("no run yet")


@pytest.mark.parametrize("name", ["auc", "[red]" + "x" * 59])
def test_what_is_logged_instead_of_a_loss_is_shown_of_each_trainer(name):
    made = snapshot(2).to_dict()
    run = made["runs"][0]
    run |= {"metrics": {name: run["metrics"]["loss"]}, "logged": {name: [0.625, 0.875]}}
    text = words(shown(typed(made), 80))
    assert f"keys/s {name[:12]} " in text
    assert "0.625" in text
    assert "0.875" in text


def test_text_of_others_is_no_markup():
    made = snapshot(2).to_dict()
    made["events"] = list(made["events"])
    made["events"].append([made["time"], EVIL])
    made["tables"] = {EVIL: made["tables"]["weights"]}
    made["runs"][0] |= {"state": "failed", "stopped": EVIL}
    made["runs"][0]["stragglers"][0] |= {"why": EVIL, "remedy": EVIL}
    assert words(shown(typed(made), 160)).count(EVIL) == 5


# -- the command


class Told:
    """A parameter server that knows one snapshot after the other."""

    def __init__(self, trainers=4):
        self.trainers = trainers
        self.asked = 0
        self.connection = self

    def call(self, verb):
        assert verb == "snapshot"
        self.asked += 1
        return msgspec.msgpack.encode(snapshot(self.trainers, seed=self.asked))


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
    assert [typed(json.loads(line)) for line in lines] == [snapshot(4, seed=n) for n in (1, 2, 3)]


def test_where_there_is_no_terminal_one_is_printed_after_the_other(told):
    text = invoke("--count", "2").stdout
    assert text.count("trainer 3 is slow for good") == 2
    assert "\x1b" not in text


def test_what_fails_is_one_line(told, monkeypatch):
    def fail(verb):
        raise dps.DPSError("the scheduler\nis gone")

    monkeypatch.setattr(told, "call", fail)
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
        def call(self, verb):
            now[0] += 5.0 if not waits else 0.1
            return msgspec.msgpack.encode(Status("dps", 0.0))

    def pause(seconds):
        waits.append(round(seconds, 6))
        now[0] += seconds
        return False

    assert list(module.every(1.0, 4, SimpleNamespace(connection=Slow()), pause)) == [Status("dps", 0.0)] * 4
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
    table = TableStatus(EVIL, 1, 8, 1, "float32", "SGD(0.1)", 1, chains=[[0]] * 4, joiners=[None] * 4, rows=8)
    server = ServerStatus(0, EVIL, ServerPhase.UP, rows=8, bytes=2048, requests=12345)
    run = sample_run([5, 3], planned=10, waiting=[0], staleness=1)
    last = LastCheckpoint("000001-ab", "s3://b", 1, 8, 64, None, 1.0, 1.0)
    fields = {"name": "dps", "time": 0.0, "wanted": 2, "servers": [server], "tables": {EVIL: table}, "runs": [run]}
    checkpoints = CheckpointsView(last, EVIL)
    return NotebookStatus(**{**fields, "checkpoints": checkpoints, "news": [(0.0, EVIL)], **more})


def test_status_is_a_table_in_a_terminal_and_one_line_without_rich(monkeypatch):
    failed = sample_run([4, 4], staleness=1, stopped=EVIL, stopped_by="DPSError", run=2)
    status = status_of()
    status = msgspec.structs.replace(status, runs=[failed, *status.runs])
    text = words(shown(status, 160))
    assert text.startswith("dps 1 of 2 servers last checkpoint: 000001-ab, 8 rows")
    assert text.count(EVIL) == 5  # error, worker, table, run, event
    assert "12.3k" in text
    assert f"run 2 8 iterations staleness 1 {EVIL}" in text
    assert "0 4 stopped" in text
    assert "run 1 8 of 20 iterations staleness 1" in text
    assert "0 5 of 10 waiting" in text
    assert "1 3 of 10 running" in text
    assert max(map(len, shown(status, 80))) <= 80
    assert words(pretty(status).splitlines()).startswith("dps 1 of 2 servers")  # IPython's terminal
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert (
        pretty(status) == repr(status) == "<Status of 'dps': 1 of 2 servers up, tables: 1, rows: 8, runs going on: 1>"
    )


def test_status_tells_of_stragglers():
    found = snapshot(4).runs[0].stragglers * 6
    text = words(shown(status_of(runs=[sample_run([1], stragglers=found)])))
    assert text.count("trainer 3 is slow for good (permanent)") == 4
    assert "... and 2 more stragglers" in text


def seen(**more):
    return sample_run([7, 7, 6], **{"planned": 10, "waiting": [0], "run": 7, "staleness": 1, **more})


SLOW = Straggler("network", trainer=1, factor=3.25, share=0.5)


def test_progress_names_the_slowest_its_kind_and_the_loss():
    assert summary(seen()) == "slowest: trainer 2 at 6, 1 waiting"
    other = msgspec.structs.replace(SLOW, trainer=0, factor=2.0)
    told = {"stragglers": [SLOW, other], "metrics": {"auc": Curve(value=[0.5]), "loss": Curve(value=[0.123456])}}
    assert summary(seen(**told)) == "slowest: trainer 1 at 7 (network, 3.2x), 1 waiting, loss 0.1235"
    page = ClocksView([seen(**told)])._repr_html_()
    assert "slowest: trainer 1 at 7 (network, 3.2x), 1 waiting, loss 0.1235" in page
    assert summary(seen(**told, left=[1])).startswith("slowest: trainer 0 at 7 (network, 2.0x)")
    server = Straggler("server", server=4)
    assert "server 4 is slow (server)" in summary(seen(stragglers=[server]))
    machine = Straggler("overloaded", host="n7", factor=3.25)
    assert summary(seen(stragglers=[machine])) == "slowest: trainer 2 at 6, machine n7 is overloaded, 1 waiting"
    over = ClocksView([seen(**told, left=[0, 1, 2])])._repr_html_()
    assert "finished; loss 0.1235" in over
    assert "slowest" not in over


def test_the_bar_tells_it_too(monkeypatch, capsys):
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # no thread
    with progress_bar.ProgressBar(True) as bar:
        bar.show(seen(stragglers=[SLOW], metrics={"loss": Curve(value=[0.5])}))
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


def test_long_events_are_broken_between_words_and_fill_no_more_than_their_lines():
    plain = snapshot(2).to_dict()
    long = "run 1: machine n7 is overloaded: " + "7.0 threads want its 2 processors, " * 9
    plain["events"] = [[0.0, "server 0 is up"], [1.0, long], [2.0, "server 1 is lost"]]
    for width, height in ((80, 24), (80, 60), (160, 40), (80, None)):
        lines = shown(typed(plain), width, height)
        head = next(n for n, line in enumerate(lines) if line.startswith("time "))
        events = [line[len("12:34:56  ") :].rstrip() for line in lines[head + 1 :]]
        assert "…" not in "".join(lines)
        assert height is None or len(lines) <= height
        assert events[-1] == "server 1 is lost", "the newest"
        told = " ".join(events[:-1]).removeprefix("server 0 is up").strip()
        assert long.startswith(told.removesuffix(" ..."))
        assert {word for line in events for word in line.split()} <= {
            *("server", "0", "is", "up", "1", "lost", "..."),
            *long.split(),
        }
    assert told == long.strip(), "with room for it, all of it"


def test_a_staleness_is_shown_as_a_whole_number():
    plain = snapshot(2).to_dict()
    plain["runs"][0]["staleness"] = 3.0
    text = words(shown(typed(plain)))
    assert "staleness 3 " in text
    assert "staleness 3.0" not in text
