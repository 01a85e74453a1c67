"""The pages, the JSON and the metrics that the scheduler's dashboard has of dps; test_browser.py opens a browser."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import snapshots
import tornado.escape
from bokeh.document import Document as BokehDocument
from bokeh.models import ColumnDataSource, DataRange1d, Div, GlyphRenderer, HelpTool, Line, Plot, Scatter
from dask.distributed import Client, LocalCluster
from prometheus_client.parser import text_string_to_metric_families
from servers import PATIENCE, wait_until
from tornado.websocket import websocket_connect

import dps
from dps.engine.dashboard import Surfaces, prometheus
from dps.engine.dashboard.pages import documents, routes
from dps.engine.dashboard.pages.plots import PLOTS, Headline
from dps.engine.dashboard.prometheus import METRICS, ONE_BY_ONE
from dps.engine.telemetry.snapshot import Status, Throughput

ROOT = Path(__file__).parents[2]
KINDS = {"headline": Headline, **PLOTS}
NAME = "<img src=x onerror=alert(1)>$$x$$"  # of a table, a metric, a place, in an error: anybody's


class Shown:
    """In the place of a session's monitor: what it has seen is what the test says. The rest is the monitor's."""

    def __init__(self, snapshot, of=None):
        self.snapshot, self.of = snapshot, of

    def view(self):
        if isinstance(self.snapshot, Status):
            now = max(self.snapshot.time, time.time() - 0.5)
            self.snapshot = msgspec.structs.replace(self.snapshot, time=now)
        return self.snapshot

    def __getattr__(self, name):
        return getattr(self.of, name)


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ps(cluster):
    with Client(cluster) as client, dps.ParameterServer(client, servers=1) as ps:
        ps.table("weights", dim=4)
        yield ps


@pytest.fixture(scope="module")
def controller(cluster, ps):
    return cluster.scheduler.plugins["dps-controller"]


@pytest.fixture
def show(controller):
    """Have the monitor of the session "dps" show a snapshot."""
    session = controller.sessions["dps"]
    real = getattr(session, "monitor", None)

    def show(snapshot):
        session.monitor = Shown(snapshot, real)

    yield show
    session.monitor = real


@pytest.fixture
def get(cluster):
    def get(path: str) -> str:
        return fetch(cluster.scheduler, path)

    return get


def fetch(scheduler, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{scheduler.http_server.port}{path}", timeout=PATIENCE) as answer:
        assert answer.status == 200
        return answer.read().decode()


def families(text: str) -> dict:
    return {family.name: family for family in text_string_to_metric_families(text)}


def document(snapshot, kinds=KINDS) -> tuple[BokehDocument, dict]:
    """A document with plots that show a snapshot."""
    made, plots = BokehDocument(), {name: kind() for name, kind in kinds.items()}
    for plot in plots.values():
        plot.update(snapshot)
        made.add_root(plot.root)
    return made, plots


def words(plot) -> str:
    """All that a plot says in HTML."""
    return "\n".join(model.text for model in plot.root.select({"type": Div}))


# -- in a real scheduler


@pytest.mark.thorough
def test_the_page_and_a_page_for_each_plot_are_served(controller, show, get):
    show(snapshots.snapshot(4))
    page = get("/dps")
    assert "<div id='dps'>" in page
    assert '<a href="dps">Dps</a>' in get("/events")  # the bar at the top of Dask's own pages
    listed = json.loads(get("/individual-plots.json"))  # what JupyterLab's extension reads
    for name in PLOTS:
        assert f"/individual-dps-{name}" in listed.values()
        assert f'<a href="individual-dps-{name}">' in page  # the menu "More..."
        assert "<!DOCTYPE html>" in get(f"/individual-dps-{name}")
        assert "bokeh" in get(f"/individual-dps-{name}/autoload.js?bokeh-autoload-element=1").lower()


@pytest.mark.thorough
def test_json(controller, show, get):
    show(snapshots.snapshot(4))
    found = json.loads(get("/json/dps.json"))["parameter_servers"]
    assert list(found) == ["dps"]
    clocks = [trainer["clock"] for trainer in found["dps"]["runs"][0]["trainers"]]
    assert clocks == snapshots.snapshot(4).runs[0].clocks
    show(None)
    assert json.loads(get("/json/dps.json")) == {"parameter_servers": {"dps": None}}


def test_a_real_run_is_seen(ps, get):
    def train(trainer, partitions):
        for n in range(40):
            keys = np.arange(100 * trainer.number, 100 * trainer.number + 100)
            trainer.push("weights", keys, trainer.pull("weights", keys) + 1)
            trainer.log(loss=1 / (n + 1))
            trainer.tick()
            time.sleep(0.02)

    ps.run(train, ps.dask_client.scatter([0, 1]), staleness=2)

    def seen() -> Status | None:
        plain = json.loads(get("/json/dps.json"))["parameter_servers"]["dps"]
        view = plain and snapshots.typed(plain)
        over = view and view.runs and view.runs[0].state == "finished"
        return view if over and view.servers[0].rows == 200 else None

    wait_until(seen)
    view = seen()
    assert view.runs[0].minimum == view.runs[0].maximum == 40
    made, plots = document(view)
    made.to_json()
    assert "run 1: finished after" in words(plots["headline"])
    assert "weights" in words(plots["placement-and-events"])
    assert plots["clocks"].title(view).startswith("Clocks: 40 to 40")
    assert "40 to 40" in words(plots["clocks"])
    assert plots["split"].title(view).startswith("Where the time goes, in the whole run: compute")
    found = families(get("/metrics"))
    assert found["dask_dps_run_running"].samples[0].value == 0
    assert found["dask_dps_table_rows"].samples[0].value == 200
    assert set(found) & {"dask_dps_share", "dask_dps_time_seconds"}


def test_json_without_numbers_that_are_none(controller, show, get):
    sample = snapshots.snapshot(1)
    series = msgspec.structs.replace(sample.throughput, p50=[math.nan, 1.5], p99=[-math.inf])
    show(msgspec.structs.replace(sample, throughput=series))
    found = json.loads(get("/json/dps.json"))["parameter_servers"]["dps"]["throughput"]
    assert (found["p50"], found["p99"]) == ([None, 1.5], [None])


def test_metrics_parse_and_are_those_that_are_described(controller, show, get):
    show(snapshots.snapshot(4))
    found = {name: family for name, family in families(get("/metrics")).items() if name.startswith("dask_dps_")}
    assert found["dask_dps_clock"].samples[0].labels == {"session": "dps", "end": "slowest"}
    assert found["dask_dps_clock"].samples[0].value == 399
    assert len(found["dask_dps_trainer_share"].samples) == 4 * 5
    assert found["dask_dps_time_seconds"].type == "counter"
    assert found["dask_dps_metric"].samples[0].labels["metric"] == "loss"
    left = {f"dask_dps_{name.removesuffix('_total')}" for name in METRICS} - set(found)
    assert left == {"dask_dps_portions"}  # of runs that lease their work
    show(None)
    assert "dask_dps_clock" not in get("/metrics")


def test_many_trainers_make_no_more_series(controller, show, get):
    counts = {}
    for trainers in (ONE_BY_ONE, ONE_BY_ONE + 1, 1000):
        show(snapshots.snapshot(trainers))
        found = families(get("/metrics"))
        counts[trainers] = sum(len(family.samples) for name, family in found.items() if "dps" in name)
        assert ("dask_dps_trainer_clock" in found) == (trainers == ONE_BY_ONE)
    assert counts[1000] <= counts[ONE_BY_ONE + 1] + 10 < counts[ONE_BY_ONE]


def at_777(snapshot: Status) -> Status:
    """A second later, when the slowest trainer is at clock 777."""
    plain = snapshot.to_dict()
    plain["time"] += 1
    plain["runs"][0]["minimum"] = 777
    plain["runs"][0]["trainers"][0]["clock"] = 778
    return snapshots.typed(plain)


def test_an_open_page_follows_what_happens(controller, show, cluster, get):
    show(snapshots.snapshot(4))
    page = get("/individual-dps-clocks")
    (token,) = re.findall(r'"token":"(.*?)"', page)
    url = f"ws://127.0.0.1:{cluster.scheduler.http_server.port}/individual-dps-clocks/ws"

    async def browse() -> None:
        """As a browser does: connect, and wait for what travels."""
        socket = await websocket_connect(url, subprotocols=["bokeh", token])
        try:
            show(at_777(snapshots.snapshot(4)))
            while b"777 to 778" not in tornado.escape.utf8(await socket.read_message() or b"777 to 778 was not told"):
                pass
            assert socket.close_code is None
        finally:
            socket.close()
            while await socket.read_message() is not None:
                pass

    asyncio.run(asyncio.wait_for(browse(), PATIENCE))


def test_a_document_is_updated_by_what_bokeh_documents_alone(monkeypatch):
    """Sessions have private attributes that differ between releases of Bokeh: here the session has none at all."""
    views = {"dps": snapshots.snapshot(4)}
    plots = [KINDS["clocks"](), KINDS["headline"]()]
    shown, made = documents.Document(lambda: views, plots), BokehDocument()
    for plot in plots:
        made.add_root(plot.root)
    made.add_root(shown.choice)
    shown.update()
    heard = []
    made.on_change(heard.append)
    monkeypatch.setattr(BokehDocument, "session_context", SimpleNamespace(session=object()))
    views["dps"] = at_777(snapshots.snapshot(4))
    shown.update()
    assert "777 to 778" in words(plots[0])
    assert {event.model for event in heard} >= {plots[0].source, plots[0].heading, plots[1].root}


OTHERS = {
    "core.PrometheusHandler._collectors",
    "ps.connection.call",
}  # of distributed, where the code works without; our handle
PUBLIC = {"_fields", "_replace", "_repr_pretty_"}  # of namedtuples, and of IPython


def test_the_dashboard_uses_nothing_private():
    """What is private in Bokeh differs between its releases: 3.10 took to another kind of messages."""
    found = set()
    for file in (ROOT / "dps" / "engine" / "dashboard").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in PUBLIC:
                found.add(ast.unparse(node))
    assert {name for name in found if not re.match(r"(self|cls)\._\w+$", name)} <= OTHERS


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dashboard.scheduler.template_variables", "dashboard.components.scheduler.env"])
def test_without_an_interface_of_distributed_the_page_is_there_all_the_same(name, controller, monkeypatch, caplog):
    module, _, attribute = f"distributed.{name}".rpartition(".")
    with LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as other:
        monkeypatch.delattr(sys.modules[module], attribute)
        routes.frame.cache_clear()
        surfaces, sessions = Surfaces(), {"other": SimpleNamespace(monitor=Shown(snapshots.snapshot(1)))}
        other.sync(in_loop, surfaces.install, SimpleNamespace(scheduler=other.scheduler, sessions=sessions))
        page = fetch(other.scheduler, "/dps")
        assert "<div id='dps'>" in page
        assert "<!DOCTYPE html>" in fetch(other.scheduler, "/individual-dps-clocks")
        assert ('class="navbar"' in page) == (attribute != "env")
        assert ("has no list of pages" if attribute != "env" else "without Dask's bar") in caplog.text
        other.sync(in_loop, surfaces.uninstall)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(other.scheduler, "/dps")
    routes.frame.cache_clear()


def test_one_update_of_the_page_is_few_changes():
    """Bokeh sends a message for each of them, and that is most of what an open page costs the scheduler."""
    made, plots = document(snapshots.snapshot(1000))
    heard = []
    made.on_change(heard.append)
    for plot in plots.values():
        plot.update(snapshots.snapshot(1000, seed=7))
    changed = [(event.model.id, getattr(event, "attr", None)) for event in heard]
    assert len(changed) == len(set(changed)), "a plot changes the same thing twice"
    assert len(changed) <= 40


def folded(views) -> tuple[documents.Document, dict]:
    plots = {"clocks": KINDS["clocks"](), "servers": KINDS["servers"](), "throughput": KINDS["throughput"]()}
    shown = documents.Document(lambda: views, list(plots.values()))
    shown.fold("Servers", [plots["servers"], plots["throughput"]])
    shown.update()
    return shown, plots


def test_what_is_folded_tells_its_gist_and_is_not_updated_until_it_is_opened():
    views = {"dps": snapshots.snapshot(4)}
    shown, plots = folded(views)
    (fold,) = shown.folds
    assert fold.line.label.startswith("Servers: 2 of 2 up, ")
    assert [plot.root.visible for plot in plots.values()] == [True, False, False]
    before = words(plots["servers"])
    for seed in range(1, 5):
        plain = snapshots.snapshot(4, seed=seed).to_dict()
        plain["time"] += seed
        plain["servers"][1]["state"] = "gone"
        views["dps"] = snapshots.typed(plain)
        shown.update()
    assert fold.line.label.startswith("Servers: 1 of 2 up, ")
    assert words(plots["servers"]) == before
    fold.line.active = True
    assert "1 of 2 up" in words(plots["servers"])
    assert fold.line.label == "Servers"
    assert all(plot.root.visible for plot in plots.values())
    fold.line.active = False
    assert not plots["throughput"].root.visible


def test_the_page_begins_with_what_matters_first(controller, show, get):
    inside = [name for names in documents.FOLDS.values() for name in names]
    assert [name for name in PLOTS if name not in inside] == ["clocks", "split", "stragglers"]
    assert sorted(inside) == sorted(set(PLOTS) - {"clocks", "split", "stragglers"})
    page = get("/dps")
    assert page.count("<div class='fold'>") == len(documents.FOLDS)


def test_figures_have_the_tools_and_the_help_of_dasks_plots(controller, get):
    """As ``distributed.dashboard.components.scheduler`` has them: above, with a link to what the plot is."""
    made, plots = document(snapshots.snapshot(4))
    page = get("/dps-help")
    for figure in made.select({"type": Plot}):
        assert figure.toolbar_location == "above"
        assert {type(tool).__name__ for tool in figure.toolbar.tools} >= {"ResetTool", "PanTool", "WheelZoomTool"}
        assert figure.toolbar.active_scroll is None, "the wheel scrolls the page"
        (help_,) = figure.select({"type": HelpTool})
        assert f"id='{help_.redirect.removeprefix('dps-help#')}'" in page
        assert len(help_.description) > 40
        assert not figure.title.text, "Bokeh cuts off what is wider than the figure"
    for name, plot in plots.items():
        assert f"<dt id='{name}'>" in page
        if name != "headline":
            assert f"href='dps-help#{name}'" in words(plot)
            assert plot.title(None)


def test_the_documentation_tells_of_each_plot_what_the_help_does():
    told = (ROOT / "docs" / "dashboard.md").read_text()
    for name, kind in PLOTS.items():
        assert kind.name == name
        assert f"| {name} | {kind.asks} | {kind.shows} |" in told


def test_browsers_say_nothing_back_of_what_they_draw():
    made, _ = document(snapshots.snapshot(4))
    figures = list(made.select({"type": Plot}))
    assert figures
    assert not any(model.syncable for figure in figures for model in (figure, figure.x_range, figure.y_range))


@pytest.mark.thorough
def test_two_clusters_in_one_process_do_not_mix(controller, show, get):
    show(snapshots.snapshot(4))
    assert "dask_dps_clock" in get("/metrics")
    with LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as other:
        surfaces, sessions = Surfaces(), {"other": SimpleNamespace(monitor=Shown(snapshots.snapshot(1)))}
        stand_in = SimpleNamespace(name="dps-controller", scheduler=other.scheduler, sessions=sessions)
        other.scheduler.plugins["dps-controller"] = stand_in
        try:
            other.sync(in_loop, surfaces.install, stand_in)
            assert list(json.loads(fetch(other.scheduler, "/json/dps.json"))["parameter_servers"]) == ["other"]
            told = families(fetch(other.scheduler, "/metrics"))["dask_dps_epoch"].samples
            assert [sample.labels["session"] for sample in told] == ["other"]
            told = families(get("/metrics"))["dask_dps_epoch"].samples
            assert [sample.labels["session"] for sample in told] == ["dps"]
            assert "/individual-dps-clocks" in fetch(other.scheduler, "/individual-plots.json")
            other.sync(in_loop, surfaces.uninstall)
            for path in ("/dps", "/json/dps.json", "/individual-dps-clocks"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    fetch(other.scheduler, path)
            assert "dps" not in fetch(other.scheduler, "/individual-plots.json")
            assert 'href="dps"' not in fetch(other.scheduler, "/events")
            assert 'href="individual-dps' not in fetch(other.scheduler, "/events")
            other.sync(in_loop, surfaces.install, stand_in)  # once more
            assert "<div id='dps'>" in fetch(other.scheduler, "/dps")
        finally:
            del other.scheduler.plugins["dps-controller"]


async def in_loop(function, *args):
    function(*args)


def test_what_cannot_be_added_is_logged_and_the_rest_goes_on(controller, caplog, monkeypatch):
    """All interfaces that are not public may change: the scheduler's plugin starts all the same."""
    scheduler = SimpleNamespace(http_application=SimpleNamespace(applications=[object()]))
    Surfaces().install(SimpleNamespace(scheduler=scheduler, sessions={}))
    assert "the scheduler goes without /json/dps.json" in caplog.text
    broken = SimpleNamespace(view=lambda: 1 / 0)
    monkeypatch.setattr(prometheus, "logged", set())
    for _ in range(3):
        assert prometheus.snapshots(SimpleNamespace(sessions={"a": SimpleNamespace(monitor=broken)})) == {}
    assert caplog.text.count("ZeroDivisionError") == 1


WITHOUT = """
import sys, json, urllib.request, urllib.error
from importlib.abc import MetaPathFinder
class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"bokeh", "prometheus_client"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import dps
from dask.distributed import Client
with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, Client(cluster) as client:
    with dps.ParameterServer(client) as ps:
        def get(path):
            url = f"http://127.0.0.1:{cluster.scheduler.http_server.port}{path}"
            with urllib.request.urlopen(url, timeout=100) as answer:
                return answer.read().decode()
        print(list(json.loads(get("/json/dps.json"))["parameter_servers"]), "not available" in get("/metrics"))
        try:
            get("/dps")
        except urllib.error.HTTPError as error:
            print(error.code)
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_without_bokeh_and_prometheus_client_all_else_works():
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines() == ["['dps'] True", "404"], done.stdout + done.stderr
    assert "the scheduler goes without" not in done.stderr


# -- plots, without a server


@pytest.mark.thorough
@pytest.mark.parametrize("trainers", [1, 4, 1000])
def test_plots_show_snapshots_and_follow_them(trainers):
    made, plots = document(snapshots.snapshot(trainers))
    made.validate()
    before = len(list(made.models))
    for seed in range(1, 4):
        for plot in plots.values():
            plot.update(snapshots.snapshot(trainers, seed=seed))
    assert len(list(made.models)) == before  # an update makes nothing new
    made.to_json()


def test_an_update_with_nothing_new_sends_nothing():
    snapshot = snapshots.snapshot(1000)
    made, plots = document(snapshot)
    heard = []
    made.on_change(heard.append)
    for plot in plots.values():
        plot.update(snapshot)
    assert not heard
    plain = snapshot.to_dict()
    plain["runs"][0]["trainers"][3]["clock"] += 1
    plots["clocks"].update(snapshots.typed(plain))
    assert heard


@pytest.mark.parametrize("kind", KINDS)
def test_plots_without_anything_to_show(kind):
    nothing = msgspec.structs.replace(
        snapshots.snapshot(1), runs=[], servers=[], tables={}, events=[], throughput=Throughput()
    )
    plain = snapshots.snapshot(2).to_dict()  # a run of which no trainer has reported: too many, or not yet
    run, keep = plain["runs"][0], ("number", "where", "state", "clock", "age", "attempts")
    run |= {"totals": None, "stragglers": [], "strips": [], "metrics": {}, "staleness": None}
    run["trainers"] = [{name: trainer[name] for name in keep} for trainer in run["trainers"]]
    silent = snapshots.typed(plain)
    made, plots = document(None, {kind: KINDS[kind]})
    for snapshot in (nothing, silent, snapshots.snapshot(4), silent, nothing, None):
        plots[kind].update(snapshot)
        text = words(plots[kind]).lower()
        assert text
        assert "nan" not in re.findall(r"\w+", text)
    made.to_json()


def has_a_point(figure: Plot) -> bool:
    """Whether a figure has anything to find its ranges from."""
    for renderer in figure.select({"type": GlyphRenderer}):
        glyph, data = renderer.glyph, renderer.data_source.data
        if isinstance(glyph, (Line, Scatter)):
            points = [np.asarray(data.get(getattr(end, "field", end), []), float) for end in (glyph.x, glyph.y)]
            if np.isfinite(points[0] + points[1]).any():
                return True
    return False


@pytest.mark.parametrize("kind", ["clocks", "loss-time", "loss-clock"])
def test_a_figure_always_has_a_point_because_a_browser_may_draw_between_two_changes(kind):
    nothing = msgspec.structs.replace(snapshots.snapshot(1), runs=[])
    plain = snapshots.snapshot(2).to_dict()
    plain["runs"][0]["metrics"]["loss"]["value"] = [math.nan] * len(plain["runs"][0]["metrics"]["loss"]["value"])
    plain["runs"][0]["metrics"] = {"loss": plain["runs"][0]["metrics"]["loss"]}
    made, plots = document(None, {kind: KINDS[kind]})
    figures, changes = list(made.select({"type": Plot})), []
    made.on_change(lambda event: changes.append(all(map(has_a_point, figures))))
    assert figures
    for snapshot in (nothing, snapshots.snapshot(4), snapshots.typed(plain), snapshots.snapshot(4), nothing):
        plots[kind].update(snapshot)
    assert len(changes) >= 6
    assert all(changes)


def test_hot_keys_are_told_with_their_shares():
    seen = snapshots.snapshot(4)
    _, plots = document(seen)
    told = words(plots["hot-keys"])
    assert "key 17 of &#x27;weights&#x27; has 9.1% of the accesses to this table" in told
    assert "17: 81k, -4: 40.5k" in told
    assert "25.0 to 25.2%" in told
    weights = msgspec.structs.replace(seen.tables["weights"], hot_keys=[])
    even = msgspec.structs.replace(seen, tables={"weights": weights})
    plots["hot-keys"].update(even)
    assert "no key is hot" in words(plots["hot-keys"])
    assert plots["hot-keys"].title(even) == "Hot keys: none"


def test_a_failed_run_without_servers_says_so():
    plain = snapshots.snapshot(2).to_dict()
    plain["runs"][0] |= {"state": "failed", "stopped": "<b>disk</b> full"}
    plain["servers"][0]["state"] = "gone"
    plain["tables"]["weights"]["chains"][3] = []
    _, plots = document(snapshots.typed(plain))
    assert "&lt;b&gt;disk&lt;/b&gt; full" in words(plots["headline"])
    assert "gone" in words(plots["servers"])
    assert "no server: 3" in words(plots["placement-and-events"])
    assert "(62% of pulls by backups)" in words(plots["placement-and-events"])


def test_names_of_others_are_escaped():
    plain = snapshots.snapshot(4).to_dict()
    run = plain["runs"][0]
    plain["name"] = NAME
    plain["tables"] = {NAME: plain["tables"]["weights"]}
    plain["events"] = [[0.0, NAME]]
    last = {"name": NAME, "url": "", "clock": 1, "rows": 1, "bytes": 1, "parent": None, "seconds": 1.0, "when": 0.0}
    plain["checkpoints"] = {"last": last, "error": NAME}
    plain["servers"][0]["worker"] = NAME
    run |= {"state": "failed", "stopped": NAME}
    run["metrics"] = {NAME: run["metrics"]["loss"]}
    for trainer in run["trainers"]:
        trainer["where"] = NAME
    run["stragglers"][0] |= {"why": NAME, "remedy": NAME, "kind": NAME}
    made, _ = document(snapshots.typed(plain))
    divs = [div.text for div in made.select({"type": Div})]
    assert sum("&lt;img" in text for text in divs) == 8
    assert not any("<img" in text for text in divs)
    drawn = [label for figure in made.select({"type": Plot}) for label in figure.yaxis.major_label_overrides.values()]
    drawn += [item.label.value for figure in made.select({"type": Plot}) for it in figure.legend for item in it.items]
    assert sum("onerror" in text for text in drawn) >= 3
    assert not any("$$" in text for text in drawn)  # else Bokeh would take it for TeX
    told = [hover.tooltips for figure in made.select({"type": Plot}) for hover in figure.hover]
    assert "safe" not in str(told)  # Bokeh escapes what a tooltip shows, unless told that it is {safe}


def test_the_headline_answers_who_and_what_and_what_to_do():
    _, plots = document(snapshots.snapshot(4))
    text = words(plots["headline"])
    for answer in (
        "still falling",
        "trainer 3, 2.0 times slower",
        "the trainer itself",
        "move its work",
        "reassign=True",
    ):
        assert answer in text
    quiet = snapshots.snapshot(4).to_dict()
    quiet["runs"][0]["stragglers"] = []
    plots["headline"].update(snapshots.typed(quiet))
    assert "<b>nothing</b>" in words(plots["headline"])


def test_clocks_of_many_are_sorted_and_the_band_is_the_staleness():
    _, plots = document(snapshots.snapshot(1000), {"clocks": KINDS["clocks"]})
    clocks = plots["clocks"]
    shown = clocks.source.data["clock"]
    assert (shown[1:] >= shown[:-1]).all()
    band = clocks.source.data["low"], clocks.source.data["high"]
    assert [column[~np.isnan(column)].tolist() for column in band] == [[399], [401]]
    few = snapshots.snapshot(4)
    clocks.update(few)
    assert clocks.source.data["clock"] == few.runs[0].clocks


def test_the_split_begins_with_the_straggler_and_adds_up():
    _, plots = document(snapshots.snapshot(1000), {"split": KINDS["split"]})
    lanes, groups = plots["split"].lanes.data, plots["split"].groups.data
    assert lanes["trainer"][0] == 999
    assert lanes["compute"][lanes["trainer"] == 999].mean() > 0.7 > lanes["compute"][lanes["trainer"] == 0].mean()
    assert abs(groups["b5"] - 1).max() < 1e-3
    assert groups["right"][-1] == 1000
    assert groups["trainer"][0].startswith("999")


def test_a_chart_with_many_shards_and_tables_stays_small():
    plain = snapshots.snapshot(4).to_dict()
    wide = plain["tables"]["weights"]
    wide |= {name: wide[name] * 64 for name in ("load", "chains", "joiners")}
    plain["tables"] = {f"table-{n}": wide for n in range(100)}
    plain["servers"] *= 100
    _, plots = document(snapshots.typed(plain))
    assert len(plots["shards"].source.data["load"]) <= 16 * 128
    assert all(len(words(plot)) < 20_000 for plot in plots.values())


def test_one_of_several_parameter_servers_is_chosen():
    idle = msgspec.structs.replace(snapshots.snapshot(1), runs=[])
    views = {"idle": idle, "busy": snapshots.snapshot(4)}
    plot = KINDS["clocks"]()
    shown = documents.Document(lambda: views, [plot])
    shown.update()
    assert shown.choice.visible
    assert shown.choice.options == ["idle", "busy"]
    assert shown.choice.value == "busy"
    assert "399 to 402" in words(plot)
    shown.choice.value = "idle"
    assert "nothing has been run" in words(plot)
    del views["idle"]
    shown.update()
    assert not shown.choice.visible
    assert "399 to 402" in words(plot)
    views.clear()
    shown.update()
    assert "nothing has been run" in words(plot)


def test_one_broken_plot_does_not_stop_the_others(caplog, monkeypatch):
    monkeypatch.setattr(prometheus, "logged", set())
    good, bad = KINDS["clocks"](), KINDS["stragglers"]()
    views = {"dps": snapshots.snapshot(4)}
    broken = msgspec.structs.replace(views["dps"].runs[0], stragglers=5)
    views["dps"] = msgspec.structs.replace(views["dps"], runs=[broken])
    shown = documents.Document(lambda: views, [bad, good])
    for seconds in range(3):
        views["dps"] = msgspec.structs.replace(views["dps"], time=views["dps"].time + seconds)
        shown.update()
    assert "399 to 402" in words(good)
    assert caplog.text.count("the plot StragglersPlot fails") == 1


def test_sources_hold_columns_of_one_length_and_kind():
    made, _ = document(snapshots.snapshot(1000))
    for source in made.select({"type": ColumnDataSource}):
        assert len({len(column) for column in source.data.values()}) == 1
        assert all(column.dtype.kind in "if" for column in source.data.values() if hasattr(column, "dtype"))


def test_grafana_draws_metrics_that_there_are():
    board = json.loads((ROOT / "dps" / "engine" / "dashboard" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    used = {name for expression in expressions for name in re.findall(r"dask_dps_(\w+)", expression)}
    assert len(used) > 20
    assert used <= set(METRICS)
    for name in used:  # and each label is one that this metric has
        for expression in expressions:
            for labels in re.findall(rf"dask_dps_{name}{{(.*?)}}", expression):
                assert set(re.findall(r"(\w+)=", labels)) <= {"session", *METRICS[name][1]}


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("seen", [None, snapshots.typed(snapshots.snapshot(4).to_dict())], ids=["nothing yet", "a run"])
def test_each_figure_has_points_from_which_bokeh_finds_its_ranges(name, seen):
    """Without any, Bokeh warns in the console of the browser: could not set initial ranges."""
    plot = PLOTS[name]()
    plot.update(seen)
    for figure in plot.root.select({"type": Plot}):
        if any(isinstance(each, DataRange1d) for each in (figure.x_range, figure.y_range)):
            drawn = [r for r in figure.renderers if isinstance(r, GlyphRenderer)]
            assert any(len(column) for r in drawn for column in r.data_source.data.values()), figure.xaxis.axis_label
