"""The dashboard in a real browser: Debian's chromium, without a window, driven by playwright."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dask.distributed import Client
from servers import PATIENCE, wait_until

import dps
from dps.engine.dashboard.pages.plots import PLOTS

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGS += ["--disable-component-update", "--disable-sync"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium, or CHROMIUM=..."),
]

enough = threading.Event()
CLOCKS = "Bokeh.documents[0].get_model_by_name('clocks').children[0].text"


def train(trainer, partitions):
    """Train until the test has seen enough."""
    for n in range(1_000_000):
        keys = np.arange(10 * trainer.number, 10 * trainer.number + 100)
        trainer.push("weights", keys, 0 * trainer.pull("weights", keys))
        trainer.log(loss=1 / (n + 1))
        trainer.tick()
        if enough.wait(0.02):
            return


@pytest.fixture(scope="module")
def url():
    """Of the dashboard of a cluster in which a run goes on."""
    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
        ThreadPoolExecutor(1) as pool,
    ):
        ps.table("weights", dim=4)
        enough.clear()
        run = pool.submit(ps.run, train, client.scatter([0, 1]), staleness=2)
        wait_until(lambda: any(min(run.clocks) > 0 for run in ps.status().runs))  # trainers are connected
        yield f"http://127.0.0.1:{cluster.scheduler.http_server.port}"
        enough.set()
        run.result(PATIENCE)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGS)
        first = browser.new_page()
        first.goto("about:blank")
        first.close()  # processes that chromium starts with its first page are there before a test begins
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """An empty page; whatever it complains of fails the test."""
    page, complaints = browser.new_page(), []
    page.set_default_timeout(1000 * PATIENCE)

    def heard(message):
        if message.type == "error" or "initial ranges" in message.text:  # a warning of Bokeh: a figure has no axes
            complaints.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
    page.on("response", lambda answer: complaints.append(f"{answer.url}: {answer.status}") if not answer.ok else None)
    yield page
    complaints_before_close = list(complaints)  # what is cut off when it closes is no complaint
    page.close()
    assert not complaints_before_close


def drawn(page) -> None:
    """Wait until all is drawn."""
    page.wait_for_function("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")


@pytest.mark.thorough
def test_the_page_is_drawn_and_follows_a_run(url, page):
    page.goto(f"{url}/dps")
    drawn(page)
    page.wait_for_function(f"/: [1-9][0-9,]* to/.test({CLOCKS})")
    seen = page.evaluate(CLOCKS)
    page.wait_for_function(f"{CLOCKS} != {seen!r}")
    assert page.locator(".bk-Figure:visible").count() == 2
    assert page.get_by_text("Does it converge?").is_visible()
    line = page.get_by_role("button", name="Servers: 1 of 1 up")
    line.click()
    page.get_by_role("columnheader", name="requests/s").wait_for()  # opened
    assert page.locator("a[href=dps]").first.text_content() == "Dps"


@pytest.mark.thorough
def test_a_narrow_window_cuts_off_nothing(url, page):
    page.set_viewport_size({"width": 600, "height": 900})
    page.goto(f"{url}/dps")
    drawn(page)
    for line in page.locator(".fold button").all():
        line.click()
    page.locator(".bk-Figure:visible").nth(6).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 600
    cut = """elements => elements.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
    assert page.locator(".heading").evaluate_all(cut) == []
    assert page.locator(".scroll").evaluate_all(cut) == []


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", PLOTS)
def test_each_plot_is_drawn(url, page, name, colours):
    page.emulate_media(color_scheme=colours)
    page.goto(f"{url}/individual-dps-{name}")
    drawn(page)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(27, 27, 27)"}[colours]
