"""What parameter servers, tables, clocks and checkpoints show of themselves in a notebook."""

from __future__ import annotations

import asyncio
import json
import pickle
from html.parser import HTMLParser
from types import SimpleNamespace

import dask.widgets
import msgspec
import pytest
from distributed import Client
from snapshots import sample_run

import dps
from dps.engine.dashboard import notebook
from dps.engine.dashboard.notebook import CheckpointsView, CheckpointView, ClocksView, NotebookStatus, TablesView
from dps.engine.dashboard.rows import MAX_ROWS
from dps.engine.telemetry.snapshot import LastCheckpoint, ServerPhase, ServerStatus, TableStatus

EVIL = "<script>alert(1)</script>&\"'"
BALANCED = {"div", "table", "tr", "td", "th", "details", "summary", "h3", "p", "span", "strong", "a"}


class Page(HTMLParser):
    """HTML taken apart; refuses tags that are not closed in order."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.tags, self.pieces = [], set(), []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert tag in BALANCED, tag
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())


def text_of(thing) -> str:
    return Page(thing._repr_html_()).text


def run(*clocks, **more):
    return sample_run(clocks, **{"run": 3, "staleness": 1, **more})


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client, servers=2) as ps:
        yield ps


def count(trainer, partitions):
    for _ in trainer.iterate(partitions, epochs=3):
        trainer.push("w", [trainer.number], 1)


def test_a_parameter_server(ps, client, tmp_path):
    ps.table("w", dim=2, optimizer=dps.Adagrad(0.1))
    ps.table("n", rows=10, dtype="int64", copies=2)
    ps.client().push("w", range(7), [[1, 1]] * 7)
    page = text_of(ps)
    assert "ParameterServer dps" in page
    assert "Servers: 2 up" in page
    assert "Tables: 2" in page
    assert "w any int64 2 x float32 Adagrad" in page
    assert " 7 " in page  # rows
    assert "n 0 to 9 1 x int64 Add() 8 x 2 10" in page
    assert "ClocksView" not in page

    ps.run(count, client.scatter([1, 2]))
    ps.checkpoint(str(tmp_path))
    page = text_of(ps)
    assert "Run 3" not in page
    assert "Run 1 6 of 6 iterations, staleness 0; finished" in page
    assert str(tmp_path) in page
    assert "Run 1 6 of 6 iterations" in text_of(ps.status())
    assert text_of(ps.status().runs).startswith("Run 1 6 of 6 iterations, staleness 0; finished Trainer Clock 0 3 of 3")
    status = ps.status()
    rows = sum(table.rows for server in status.servers for table in server.tables.values())
    assert rows >= 7
    assert repr(ps).startswith("<dps.ParameterServer 'dps': 2 servers in ")
    assert f", 2 tables, {rows:,} rows, " in repr(ps)
    head = page[: page.index("Worker")]  # of the part that is folded
    assert f"Rows: {rows:,}, copies included Memory: " in head
    assert ps.dashboard_link is None or ps.dashboard_link.endswith("/dps")


def test_the_link_is_to_the_page_of_dps():
    def of(link):
        return notebook.dashboard_link(SimpleNamespace(dashboard_link=link))

    assert of("http://h:8787/status") == "http://h:8787/dps"
    assert of("/user/me/proxy/8787/status") == "/user/me/proxy/8787/dps"
    assert of(None) is None
    assert notebook.dashboard_link(None) is None  # whatever Dask raises


def test_what_is_returned_is_as_plain_as_it_was(ps, tmp_path):
    spec = ps.table("w")
    tables, done, status = ps.tables(), ps.checkpoint(str(tmp_path)), ps.status()
    assert tables == {"w": spec}
    assert repr(tables) == repr({"w": spec})
    assert json.loads(json.dumps(status.to_dict()))["tables"].keys() == {"w"}
    assert json.loads(json.dumps(done)) == done == msgspec.to_builtins(status.checkpoints.last)
    assert repr(status) == "<Status of 'dps': 2 of 2 servers up, tables: 1, rows: 0, runs going on: 0>"
    for thing in (tables, done, status):
        assert pickle.loads(pickle.dumps(thing)) == thing
        assert thing._repr_html_()


def test_a_table():
    spec = dps.TableSpec("w", rows=8, dim=3, dtype="float64", optimizer=dps.Adagrad(0.1), aggregate="mean")
    page = text_of(spec)
    assert "TableSpec w Keys: 0 to 7 Row: 3 x float64, 48 B with the optimizer's state Optimizer: Adagrad(" in page
    assert "Initial values: Zeros() Shards: 4 Copies: 1 Aggregate: mean of a clock's pushes" in page
    assert "any int64" in text_of(dps.TableSpec("w"))
    assert "acknowledged by the first one" in text_of(dps.TableSpec("w", copies=2, ack="memory"))
    assert "no tables" in text_of(TablesView())


def test_clocks():
    page = text_of(ClocksView([run(5, 3, 4, 4, 0, planned=10, waiting=[0], left=[2], lost=[3], expected=[4])]))
    assert "Run 3 16 of 50 iterations, staleness 1 ; slowest: trainer 4 at 0, 1 waiting" in page.replace("1;", "1 ;")
    for words in ("0 5 of 10 waiting", "1 3 of 10 running", "2 4 of 10 left", "3 4 of 10 lost", "4 0 of 10 expected"):
        assert words in page
    page = text_of(ClocksView([run(1, staleness=None, run=4), run(5, 3, stopped="trainer 1 failed")]))
    assert "trainer 1 failed" in page
    assert "0 5 stopped" in page
    assert page.index("Run 4 1 iterations, staleness inf") < page.index("Run 3")  # the last one first
    assert text_of(ClocksView()) == "no runs"
    assert "Run 3 0 iterations, staleness 1 Trainer" in text_of(ClocksView([run()]))  # no trainer has joined yet


def test_of_many_the_slowest_are_shown():
    many = run(*range(1000, 0, -1), waiting=[0])
    page = text_of(ClocksView([many]))
    assert "999 1 running" in page
    assert "0 1000" not in page
    assert f"... and {1000 - MAX_ROWS} more" in page
    servers = [ServerStatus(n, "tcp://h:1", ServerPhase.UP) for n in range(100)]
    page = text_of(NotebookStatus(name="dps", time=0.0, servers=servers))
    assert "Servers: 100 up" in page
    assert f"... and {100 - MAX_ROWS} more" in page


def test_checkpoints():
    done = LastCheckpoint("000001-ab", "s3://b/m", 7, 5, 2048, parent="000000-cd", seconds=0.5, when=1.0)
    page = text_of(CheckpointsView(last=done, error="disk full"))
    assert "Checkpoint 000001-ab In: s3://b/m Clock: 7 Taken:" in page
    assert "Rows: 5 Size: 2.00 kiB in 500.00 ms Builds on: 000000-cd disk full" in page
    restored = CheckpointView(name="000001-ab", clock=None, tables=["w"], passed={"000002-ef": "a bit has flipped"})
    assert text_of(restored).endswith("Tables: w 000002-ef was passed over: a bit has flipped")
    assert "Clock: none" in text_of(restored)
    assert text_of(CheckpointsView(last=None, error=None)) == "no checkpoint yet"


def test_lost_rows_are_said_first():
    table = TableStatus("w", 1, None, 1, "float32", "Add()", 1, chains=[[1], [], [1], []], joiners=[None] * 4)
    servers = [ServerStatus(1, "a", ServerPhase.UP), ServerStatus(0, "b", ServerPhase.GONE)]
    events = [(0.0, "server 0 is gone")]
    status = NotebookStatus("dps", 0.0, wanted=2, servers=servers, tables={"w": table}, events=events)
    page = text_of(status)
    assert "Servers: 1 up, 2 wanted" in page
    assert "Table w: the last copy of 2 of its 4 shards is gone; restore a checkpoint Servers Server State" in page
    assert "server 0 is gone" in page


def test_names_and_errors_are_text_and_no_html(ps):
    spec = ps.table(EVIL)
    about = {"name": EVIL, "url": EVIL, "clock": EVIL, "tables": [EVIL], "parent": EVIL, "passed": {EVIL: EVIL}}
    checkpoint = CheckpointView(about, rows=1, bytes=1, seconds=1)
    status = NotebookStatus(
        name=EVIL,
        time=0.0,
        runs=[run(1, stopped=EVIL)],
        servers=[ServerStatus(0, EVIL, ServerPhase.UP)],
        events=[(0.0, EVIL)],
        tables={EVIL: TableStatus(EVIL, 1, None, 1, EVIL, EVIL, 1, chains=[[]], joiners=[None])},
        checkpoints=CheckpointsView(LastCheckpoint(EVIL, EVIL, 1, 1, 1, EVIL, 1.0, 1.0), EVIL),
    )
    ps.drop_table(EVIL)
    for thing in (spec, TablesView({EVIL: spec}), checkpoint, status.runs, status.checkpoints, status):
        assert EVIL in text_of(thing)  # also refuses all tags but those of the templates
    assert EVIL in Page(notebook.status_html(None, name=EVIL, trouble=EVIL)).text


def test_a_dashboard_link_cannot_leave_its_attribute():
    page = notebook.status_html(NotebookStatus("dps", 0.0), dashboard="http://h/\"onclick='alert(1)'")
    assert '"onclick' not in page


def test_when_the_servers_are_gone_it_says_so(client):
    ps = dps.ParameterServer(client, servers=1)
    other = dps.ParameterServer.attach(client)
    ps.close()
    assert text_of(ps) == "ParameterServer dps closed"
    assert "there is no parameter server named 'dps'" in text_of(other)
    other.detach()


def test_a_scheduler_that_does_not_answer_is_not_waited_for(ps, cluster, monkeypatch):
    for module in (notebook, dps.engine.driver.parameter_server):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    ps.table("w")
    cut, unanswered = asyncio.Event(), {"status"}
    handlers = cluster.scheduler.handlers
    answer = handlers["dps_call"]

    async def call(verb, **fields):
        if verb in unanswered:
            await cut.wait()
        return await answer(verb=verb, **fields)

    monkeypatch.setitem(handlers, "dps_call", call)
    page = text_of(ps)  # what the controller knows without the servers is shown all the same
    assert "did not answer dps_call('status')" in page
    assert "w any int64" in page
    unanswered.update(("describe", "snapshot"))
    assert "did not answer dps_call('snapshot')" in text_of(ps)
    assert repr(ps) == "<dps.ParameterServer 'dps' (ControllerGoneError)>"
    cluster.loop.add_callback(cut.set)


def test_it_never_raises(ps, monkeypatch, tmp_path):
    monkeypatch.setattr(ps.connection, "call", lambda *args, **kwargs: 1 / 0)
    assert "ZeroDivisionError" in text_of(ps)
    monkeypatch.undo()
    (tmp_path / "dps_table.html.j2").write_text("{{ 1 / 0 }}")
    monkeypatch.setattr(dask.widgets.widgets, "TEMPLATE_PATHS", [str(tmp_path), *dask.widgets.TEMPLATE_PATHS])
    assert dps.TableSpec("w")._repr_html_() == "<pre>table: ZeroDivisionError(&#x27;division by zero&#x27;)</pre>"
    (tmp_path / "dps_table.html.j2").write_text("my own {{ spec.name }}")
    assert dps.TableSpec("<w>")._repr_html_() == "my own &lt;w&gt;"
