"""Reports and timelines of a run: what is in them, that they stand alone, and that others can read them."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import shutil
import time
from collections import Counter
from html.parser import HTMLParser
from importlib.metadata import version

import msgspec
import numpy as np
import pytest
from dask.distributed import Client
from snapshots import BEGAN, history, snapshot

import dps
from dps.engine.dashboard.report import report as report_module
from dps.engine.dashboard.report import timeline as timeline_module
from dps.engine.dashboard.report import windows as windows_module
from dps.engine.dashboard.report.report import MAX_TRAINERS, SLOWEST, convergence
from dps.engine.dashboard.report.svg import Axis, Line, areas, heat, lines, ticks
from dps.engine.dashboard.report.timeline import EVENTS, SERVERS, TRAINERS
from dps.engine.dashboard.report.windows import together
from dps.engine.driver import archive
from dps.engine.telemetry.run_history import RunHistory, ServerCurves
from dps.engine.telemetry.snapshot import PARTS
from dps.errors import InputError

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
LOADS = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "onload", "onerror", "onclick"}
VERSIONS = {"dps": "0.3.0", "Python": "3.11.7"}


# Histories are dicts here, because tests change them; these read them as the driver does.


def read(made):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=RunHistory)


def report(made, versions, held="", status=None):
    return report_module.report(read(made), versions, held, status)


def timeline(made, **options):
    return timeline_module.timeline(read(made), **options)


def windows(made):
    run = read(made)
    return windows_module.windows(run.trainers, run.began)


class Page(HTMLParser):
    """HTML taken apart. Refuses tags that are not closed in order, scripts, and all that a browser would fetch."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.pieces, self.titles, self.counts = [], [], [], {}
        self.feed(html)
        self.close()
        assert not self.open, self.open
        assert "url(" not in html
        assert "@import" not in html

    def handle_starttag(self, tag, attributes):
        assert tag not in {"script", "img", "link", "iframe", "object", "image", "use", "base"}, tag
        assert not LOADS & {name for name, _ in attributes}, attributes
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            (self.titles if self.open[-1] == "title" else self.pieces).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())


def slow_history(trainers=4, points=80, slow=3, factor=2.0, staleness=1):
    """A run of which all is known: each clock takes 50 ms of computing, and `factor` times that at one trainer."""
    made = history(trainers)
    length = points * 0.25
    for n, reports in enumerate(made["trainers"]):
        clocks = 0.25 / (0.05 * factor + 0.02)
        compute = 0.05 * clocks * (factor if n == slow else 1.0)
        rows = {"compute": compute, "pull": 0.01 * clocks, "push": 0.008 * clocks, "serialise": 0.002 * clocks}
        rows["wait"] = 0.25 - sum(rows.values())
        rows |= {"clocks": clocks, "total": 0.25, "keys_pulled": 10.0, "keys_pushed": 5.0, "bytes_in": 100.0}
        reports["rows"] |= {name: [value] * points for name, value in rows.items()}
        reports["rows"] = {name: (values * points)[:points] for name, values in reports["rows"].items()}
        reports["time"] = (BEGAN + 0.25 * np.arange(1, points + 1)).tolist()
        reports["clock"] = (clocks * np.arange(1, points + 1)).astype(int).tolist()
    totals = {part: sum(sum(reports["rows"][part]) for reports in made["trainers"]) for part in PARTS}
    return {**made, "ended": BEGAN + length, "staleness": staleness, "totals": totals}


# -- the report


def test_it_says_who_why_and_what_to_do():
    made = slow_history()
    made["stragglers"][0] |= {"since": BEGAN + 5, "until": BEGAN + 15}
    page = Page(report(made, VERSIONS))
    text = page.text
    assert "run 1 of parameter server dps" in text
    assert "4 trainers made 667 iterations in 20 s, 33.3 a second." in text
    assert "The loss fell from 0.7" in text
    assert "Where the trainers' time went: compute 52%, wait 31%, pull 8%, push 7%, serialise 2%." in text
    assert "What slowed it down: trainer 3 is slow for good (permanent), 2.0 times; trainer 3 computes" in text
    assert "What to do: staleness does not help; lease its work out: ps.run(..., reassign=True)." in text
    assert "trainer 3 permanent 2.0 x 51% 5 s to 15 s" in text
    assert "staleness 1 trainers 4 servers 2 dps 0.3.0 Python 3.11.7" in text
    assert "40 s trainer 3 is slow: permanent" in text
    assert "server 0 holds shard 3 of table 'weights'" in text
    assert page.counts["svg"] == 12  # bars, areas, heat map, 2 of clocks, 2 of the loss, 5 of servers
    assert "trainer 3, compute: 16.7" in page.titles  # 20 s x 0.1 / 0.12
    assert "trainer 0, compute: 8.33" in page.titles
    assert "compute 52%, pull 8%, wait 31%, push 7%, serialise 2% from 0 s to 333 ms" in page.titles
    assert any(title.startswith("trainer 3: 1.71 x at") for title in page.titles)  # 0.12 against 0.07
    assert "3 167 120 ms 83% 8% 0% 7% 2% 1.2k" in text  # the numbers


def test_the_report_begins_with_what_the_servers_hold():
    made = report(slow_history(), VERSIONS, "1 table, 1,200 rows, 37.50 kiB")
    assert "the servers held 1 table, 1,200 rows, 37.50 kiB (copies included)" in made[: made.index("<h2>")]
    assert "the servers held" not in report(slow_history(), VERSIONS)  # they did not answer


def test_the_report_has_budgets_and_the_rows_that_went():
    status = snapshot()
    weights = msgspec.structs.replace(status.tables["weights"], name=EVIL, bytes=1 << 30)
    status = msgspec.structs.replace(status, tables={EVIL: weights, "bias": status.tables["bias"]})
    text = Page(report(slow_history(), VERSIONS, "", status)).text  # refuses tags that load or run
    assert f"{EVIL} 300k 1.00 GiB 99% full, 120k evicted, 300 expired, 90k admitted, 800k values dropped" in text
    assert "tables 98% of 1.91 MiB" in text
    many = msgspec.structs.replace(status, tables={f"t{n}": weights for n in range(60)})
    assert "... and 10 smaller ones" in Page(report(slow_history(), VERSIONS, "", many)).text
    assert "Tables and memory" not in Page(report(slow_history(), VERSIONS)).text  # servers did not answer


@pytest.mark.thorough
def test_it_is_readable_and_small_with_1000_trainers():
    made = report(slow_history(1000, points=200, slow=999), VERSIONS)
    assert len(made) < 1_000_000
    page = Page(made)
    assert "1,000 trainers made" in page.text
    assert f"The {SLOWEST} slowest of 1,000" in page.text
    assert page.text.index("trainer 999") < page.text.index("slowest quarter")
    labels = {title.split(",")[0] for title in page.titles if ", compute: " in title}
    assert len(labels) == SLOWEST + 4 <= MAX_TRAINERS
    assert "... and 984 more" in page.text


@pytest.mark.parametrize("trainers", [1, 2, MAX_TRAINERS, MAX_TRAINERS + 1])
def test_any_number_of_trainers(trainers):
    page = Page(report(slow_history(trainers, slow=None), VERSIONS))
    assert f"{trainers} trainer{'s' * (trainers > 1)} made" in page.text
    assert page.counts["svg"] == 12


def test_names_and_errors_are_text():
    made = slow_history()
    made |= {"name": EVIL, "error": EVIL, "events": [[BEGAN, EVIL]], "metrics": {EVIL: made["metrics"]["loss"]}}
    made["stragglers"][0] |= {"why": EVIL, "remedy": EVIL, "kind": EVIL}
    for reports in made["trainers"]:
        reports["where"] = EVIL
    page = Page(report(made, {EVIL: EVIL}))  # refuses tags that load or run
    assert page.text.count(EVIL) > 10


def test_the_headline_is_what_mattered_most():
    made = slow_history()
    lasting = {**made["stragglers"][0], "since": BEGAN + 5, "share": 0.5}
    passing = {**lasting, "kind": "transient", "trainer": 0, "factor": 40.0, "share": 0.97}
    passing |= {"since": BEGAN + 1, "until": BEGAN + 14}
    again = [{**passing, "trainer": 1, "since": BEGAN + n, "until": BEGAN + n + 1} for n in range(0, 20, 2)]
    made["stragglers"] = [passing, *again, lasting]
    text = Page(report(made, VERSIONS)).text
    assert "What slowed it down: trainer 3 is slow for good (permanent)" in text
    machine = {**lasting, "kind": "overloaded", "trainer": None, "host": "n7", "since": BEGAN, "share": 0.6}
    made["stragglers"].insert(0, machine)
    assert "What slowed it down: machine n7 is overloaded (overloaded); " in Page(report(made, VERSIONS)).text


def test_of_a_run_that_has_told_nothing_yet():
    made = history(2)
    for reports in made["trainers"]:
        reports |= {"time": [], "clock": [], "rows": {name: [] for name in reports["rows"]}}
    made |= {"metrics": {}, "stragglers": [], "servers": [], "events": [], "totals": dict.fromkeys(PARTS, 0.0)}
    text = Page(report(made, {})).text
    assert "No trainer has told of its time." in text
    assert "No loss was logged" in text
    assert "Nothing slowed it down." in text
    assert "still going on" in text
    made |= {"trainers": [], "totals": None}
    assert "Nothing is kept of its trainers" in Page(report(made, {})).text


def test_waiting_for_each_other_is_nobodys_fault():
    made = slow_history(slow=None)
    made["stragglers"] = []
    assert "No single party slowed it down" in Page(report(made, VERSIONS)).text


def test_what_lost_most_time_is_named_first():
    made = slow_history()
    (finding,) = made["stragglers"]
    brief = {**finding, "trainer": 0, "kind": "transient", "since": BEGAN, "until": BEGAN + 1, "share": 0.9}
    long = {**finding, "trainer": 1, "since": BEGAN + 2, "until": BEGAN + 18, "share": 0.5}
    server = {**finding, "trainer": None, "server": 1, "kind": "server", "since": BEGAN, "until": BEGAN + 1}
    text = Page(report({**made, "stragglers": [brief, long, server]}, VERSIONS)).text
    assert "What slowed it down: trainer 1 is slow for good" in text
    assert "2 more were named: server 1, trainer 0." in text
    many = [{**brief, "trainer": n} for n in range(200)]
    assert "... and 150 more" in Page(report({**made, "stragglers": many}, VERSIONS)).text


@pytest.mark.parametrize(
    ("curve", "sentence"),
    [
        (lambda t: np.exp(-t), "is still falling"),
        (lambda t: np.exp(-50 * t), "has levelled off"),
        (lambda t: 1 + t, "is rising"),
        (lambda t: 0.69 - 0.01 * t, "is still falling"),
    ],
)
@pytest.mark.parametrize("points", [20, 1000])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_whether_it_converges(curve, sentence, points, noise):
    rng = np.random.default_rng(0)
    assert sentence in convergence((curve(np.linspace(0, 1, points)) + rng.normal(0, noise, points)).tolist())


def test_what_is_not_finite_does_not_disturb():
    assert convergence([None, math.nan]) == "has no finite value"
    made = slow_history()
    made["metrics"]["loss"]["value"][10:20] = [math.nan] * 10
    page = Page(report(made, VERSIONS))
    assert "NaN" not in page.text
    assert not any("nan" in title.lower() for title in page.titles)


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it_without_a_network(tmp_path):
    sync = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "run.html"
    path.write_text(report(slow_history(), VERSIONS))
    wrong, asked, backs = [], [], []
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, offline=True)
            page = context.new_page()
            page.on("console", lambda message: wrong.append(message.text))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            charts = page.locator("svg").all()
            boxes = [chart.bounding_box() for chart in charts]
            assert all(box["width"] > 400 and box["height"] > 50 for box in boxes)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            context.close()
        browser.close()
    assert len(boxes) == 12
    assert not wrong
    assert asked == [path.as_uri()] * 2
    assert backs == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


# -- windows and charts


def test_windows_never_overlap_and_sums_stay():
    made = slow_history(2, points=50)
    late = np.random.default_rng(0).uniform(0, 0.2, 50)  # reports travel
    made["trainers"][0]["time"] = (np.array(made["trainers"][0]["time"]) + late).tolist()
    for one in windows(made):
        assert (one.start >= 0).all()
        assert (one.end >= one.start).all()
        assert (one.start[1:] >= one.end[:-1] - 1e-9).all()
        assert one.end - one.start == pytest.approx(one.rows["total"])  # as long as it was measured
        edges = np.linspace(0, 20, 7)
        edges[-1] = one.end[-1]
        for part in PARTS:
            assert one.during(part, edges).sum() == pytest.approx(one.rows[part].sum())
    assert together(windows(made), "clocks", np.array([0.0, 100.0])).ravel() == pytest.approx([50 * 0.25 / 0.12] * 2)


def test_clocks_at_a_time():
    one, _ = windows(slow_history(2, points=10))
    assert np.isnan(one.clocks(np.array([-1.0])))
    assert one.clocks(np.array([0.0, 2.5, 99.0])) == pytest.approx([0, 20, 20], abs=1)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (-7, 12), (1e6, 1.1e6), (5, 5), (0, 12345)])
def test_ticks_are_round_and_inside(low, high):
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 8
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in marks)
    assert len({f"{b - a:.6g}" for a, b in itertools.pairwise(marks)}) <= 1


def test_charts_of_nothing_and_of_one_value():
    for picture in (
        lines([], Axis("x"), Axis("y")),
        lines([Line("a", [1.0], [2.0], "#000")], Axis("x"), Axis("y")),
        lines([Line("a", [1.0, 2.0], [math.nan, math.nan], "#000")], Axis("x"), Axis("y")),
        areas([0.0, 0.0], {"a": [1.0]}, {"a": "#000"}, Axis("x")),
        heat(np.full((1, 1), np.nan), ["a"], [0, 1], Axis("x"), colours=["#000", "#fff"], bounds=[1]),
    ):
        Page(picture)
        assert "nan" not in picture


def test_servers_outlive_a_run():
    made = slow_history()
    for server in made["servers"]:
        server["time"] = np.linspace(BEGAN - 1000, BEGAN + 1000, len(server["time"])).tolist()
    picture = report(made, VERSIONS).split("<h2>Servers</h2>")[1]
    path = picture.split('class="line"')[1].split(' d="')[1].split('"')[0]
    places = [float(point.split()[0]) for point in path.replace("L", "M").split("M") if point]
    assert 1 <= len(places) <= 3  # of 120 points in 2,000 s, those of 20 s
    assert all(70 <= place <= 548 for place in places)
    counted = [event["ts"] for event in valid(timeline(made)) if event["ph"] == "C"]
    assert len(counted) == 2 * 4 * len(places)
    assert max(counted) <= 20_000_000


def test_a_curve_is_broken_where_it_is_unknown():
    picture = lines([Line("a", [0, 1, 2, 3], [1, math.nan, 2, 3], "#000")], Axis("x"), Axis("y"))
    path = picture.split('class="line"')[1].split(' d="')[1].split('"')[0]
    assert (path.count("M"), path.count("L")) == (2, 1)


# -- the timeline


def valid(trace: dict) -> list[dict]:
    """Its events, after a look at what the format asks for."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events, last, ends, names = trace["traceEvents"], 0, {}, set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["ph"] in {"X", "C", "i", "M"}
        assert all(isinstance(event[field], int) for field in ("pid", "tid", "ts"))
        assert event["ts"] >= last  # in order
        last = event["ts"]
        key = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] > 0
            assert event["ts"] >= ends.get(key, 0), "slices of one thread overlap"
            ends[key] = event["ts"] + event["dur"]
            assert key in names
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        elif event["name"] == "thread_name":
            names.add(key)
    return events


def test_a_timeline_of_a_run():
    made = slow_history()
    made["stragglers"][0] |= {"since": BEGAN + 5, "until": BEGAN + 15}
    events = valid(timeline(made))
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {TRAINERS}
    for reports in made["trainers"]:
        own = [event for event in slices if event["tid"] == reports["trainer"] + 1]
        for part in PARTS:
            seconds = sum(event["dur"] for event in own if event["name"] == part) / 1e6
            assert seconds == pytest.approx(sum(reports["rows"][part]), abs=1e-3)
        assert [event["name"] for event in own[:2]] == ["compute", "pull"]
    ticked = [event for event in events if event["ph"] == "i" and event["pid"] == TRAINERS]
    assert len(ticked) == 4 * 80
    assert ticked[-1]["name"] == "clock 166"
    assert ticked[-1]["args"]["keys_pulled"] == 10.0
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {f"server {n} {what}" for n in (0, 1) for what in ("requests/s", "keys/s", "p99 ms", "busy")}
    assert {event["pid"] for event in events if event["ph"] == "C"} == {SERVERS}
    noted = [event["name"] for event in events if event["pid"] == EVENTS and event["ph"] == "i"]
    assert noted[:2] == [
        "server 0 holds shard 3 of table 'weights'",
        "trainer 3 is slow for good (permanent), 2.0 times",
    ]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert "trainer 3 (tcp://10.0.0.3:40003)" in names


def test_reports_that_come_late_make_no_slices_that_overlap():
    made = slow_history(3)
    rng = np.random.default_rng(1)
    for reports in made["trainers"]:
        reports["time"] = (np.array(reports["time"]) + rng.uniform(-0.3, 0.3, len(reports["time"]))).tolist()
    valid(timeline(made))


@pytest.mark.thorough
def test_of_very_many_windows_neighbours_are_joined():
    made = slow_history(1000, points=100)
    events = valid(timeline(made, max_windows=10_000))
    slices = [event for event in events if event["ph"] == "X"]
    assert 40_000 < len(slices) <= 50_000
    seconds = sum(event["dur"] for event in slices if event["name"] == "compute") / 1e6
    assert seconds == pytest.approx(made["totals"]["compute"], rel=1e-3)


def test_a_timeline_of_nothing():
    made = history(2)
    for reports in made["trainers"]:
        reports |= {"time": [], "clock": [], "rows": {name: [] for name in reports["rows"]}}
    made |= {
        "servers": [{"number": 0} | {name: [] for name in ServerCurves.__struct_fields__[1:]}],
        "stragglers": [],
    }
    assert not [event for event in valid(timeline(made)) if event["ph"] in "XC"]


# -- written by a parameter server


def train(trainer, partitions):
    for step, keys in enumerate(trainer.iterate(partitions, epochs=20)):
        trainer.push("w", keys, 1)
        trainer.log(loss=1 / (step + 1))
        if trainer.number == 1:
            time.sleep(0.02)


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    with (
        dps.LocalCluster(servers=1, trainers=2, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("w", dtype="int64")
        ps.run(train, client.scatter([[1, 2], [3, 4]]))
        yield ps


def test_a_report_of_a_real_run(ps, tmp_path):
    path = str(tmp_path / "run.html")
    assert ps.report(path) == path
    page = Page(tmp_path.joinpath("run.html").read_text())
    assert "run 1 of parameter server dps" in page.text
    assert "2 trainers made 80 iterations" in page.text
    assert f"dps {version('dps')}" in page.text
    assert "still going on" not in page.text
    assert "w 4 " in page.text[page.text.index("Tables and memory") :]
    assert "rows stay" in page.text
    (tmp_path / "run.html").write_text("old")
    assert ps.report(tmp_path / "run.html", run=1) == path
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_timeline_of_a_real_run(ps, tmp_path):
    path = ps.timeline(tmp_path / "run.json")
    with open(path) as file:
        events = valid(json.load(file))
    durations = Counter[tuple[int, str]]()  # shorter than what was measured where reports came late, on a busy machine
    for event in events:
        if event["ph"] == "X":
            durations[event["tid"], event["name"]] += event["dur"]
    assert {(1, "wait"), (2, "compute")} <= set(durations)
    assert {name for _, name in durations} <= set(PARTS) - {"pull"}
    assert durations[2, "compute"] == max(durations[2, part] for part in PARTS)  # it sleeps in each step
    with gzip.open(ps.timeline(tmp_path / "run.json.gz")) as file:
        assert json.load(file)["traceEvents"] == events


def test_where_it_cannot_be_written(ps, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no folder"):
        ps.report(tmp_path / "nowhere" / "run.html")
    (tmp_path / "run.html").write_text("old")

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(archive.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        ps.report(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text() == "old"
    assert os.listdir(tmp_path) == ["run.html"]
    with pytest.raises(dps.DPSError, match="7"):
        ps.timeline(tmp_path / "run.json", run=7)
