"""Pictures of the dashboard for these pages: ``python docs/screenshots.py`` writes docs/_static/dashboard-*.png.

A scheduler serves samples of what the monitor says (tests/helpers/snapshots.py), of 4 and of 1,000 trainers, and a
browser without a window takes the pictures. Needs playwright and Debian's chromium (or what CHROMIUM names).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed import Scheduler
from PIL import Image, ImageChops
from playwright.async_api import async_playwright

from dps.engine.dashboard import Surfaces
from dps.engine.dashboard.pages.plots import PLOTS
from dps.engine.telemetry.snapshot import Status

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests" / "helpers"))
import snapshots  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGS += ["--disable-component-update", "--disable-sync"]
SIZES = (4, 1000)
PAGE, PLOT = {"width": 1400, "height": 1560}, {"width": 900, "height": 360}
COLOURS = 256  # of a picture: enough, and a third of the bytes
SETTLE = 1.5  # seconds for what is drawn after the socket has been opened


class Sample:
    """A monitor that has always just seen the same."""

    def __init__(self, trainers: int):
        self.snapshot = snapshots.snapshot(trainers)

    def view(self) -> Status:
        return self.snapshot


class SampleController:
    """A controller of one parameter server with so many trainers, that is only looked at."""

    def __init__(self, scheduler: Scheduler, trainers: int):
        self.scheduler = scheduler
        self.sessions = {"dps": SimpleNamespace(monitor=Sample(trainers))}


async def shoot(browser: Any, url: str, file: Path, size: dict[str, int], dark: bool = False) -> None:
    context = await browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_function("window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    await asyncio.sleep(SETTLE)
    picture = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    paper = Image.new("RGB", picture.size, picture.getpixel((picture.width - 1, picture.height - 1)))
    *_, bottom = ImageChops.difference(picture, paper).getbbox() or picture.getbbox()
    picture = picture.crop((0, 0, picture.width, min(picture.height, bottom + 8)))
    picture = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    await context.close()
    print(f"{file.name} {file.stat().st_size / 1000:.0f} kB")


async def main(folder: Path, only: str) -> None:
    async with async_playwright() as tools:
        browser = await tools.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGS)
        for trainers in SIZES:
            async with Scheduler(
                dashboard=True, dashboard_address="127.0.0.1:0", port=0, host="127.0.0.1"
            ) as scheduler:
                surfaces = Surfaces()
                surfaces.install(SampleController(scheduler, trainers))
                url = f"http://127.0.0.1:{scheduler.http_server.port}"
                for name in ("page", *(["page-dark"] if trainers == SIZES[0] else []), *PLOTS):
                    if only not in f"{name}-{trainers}":
                        continue
                    file = folder / f"dashboard-{name}-{trainers}.png"
                    if name.startswith("page"):
                        await shoot(browser, f"{url}/dps", file, PAGE, dark="dark" in name)
                    else:
                        await shoot(browser, f"{url}/individual-dps-{name}", file, PLOT)
                surfaces.uninstall()
        await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DOCS / "_static")
    parser.add_argument("--only", default="", help="a part of the names of those to take")
    options = parser.parse_args()
    began = time.monotonic()
    asyncio.run(main(options.folder, options.only))
    print(f"{time.monotonic() - began:.0f} s")
