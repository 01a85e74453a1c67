"""The notebooks, in a real kernel, as JupyterLab would run them; and what a run shows while it goes on."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

pytestmark = [pytest.mark.integration, pytest.mark.processes]


def execute(notebook, folder) -> list[list[dict]]:
    """The outputs of each cell of code, run in a kernel of this Python; an error in a cell is raised here."""
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": folder}})

    async def run():
        async with client.async_setup_kernel():
            for number, cell in enumerate(notebook.cells):
                await client.async_execute_cell(cell, number)

    asyncio.run(run())
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def html_of(outputs: list[dict]) -> str:
    return "".join(output["data"].get("text/html", "") for output in outputs if "data" in output)


def test_the_quickstart_runs_and_shows_what_it_does(tmp_path):
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    outputs = execute(notebook, tmp_path)
    pages = "\n".join(map(html_of, outputs))
    for words in ("ParameterServer", "2 up", "Adagrad", "0 to 19", "Run 1", "Checkpoint"):
        assert words in pages, words
    (run,) = [
        cell for cell in outputs if "Run 1" in html_of(cell) and any(o["output_type"] == "display_data" for o in cell)
    ]
    assert "200 of 200" in html_of(run)  # 8 blocks of 10 batches, 5 epochs, 2 trainers


def test_the_vectors_run_and_show_what_they_are(tmp_path):
    outputs = execute(nbformat.read(EXAMPLES / "vectors.ipynb", as_version=4), tmp_path)
    pages = "\n".join(map(html_of, outputs))
    for words in ("dps.PSVector", "(1000000,)", "float32", "3.81 MiB", "expression", "Run 1"):
        assert words in pages, words
    *_, top, _ = outputs
    assert re.match(r"\{\d+: \d+(, \d+: \d+){4}\}", top[0]["data"]["text/plain"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_magic(path):
    notebook = json.loads(path.read_text())
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    source = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert not re.search(r"^\s*[%!]|get_ipython", source, re.M), "no magic: it has to work in every front end"


PROGRESS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "helpers")!r})

from dps.engine.training.progress_bar import ProgressBar
from snapshots import sample_run

def seen(*clocks, waiting=()):
    return sample_run(clocks, planned=10, waiting=waiting, run=7, staleness=None)
"""


def test_progress_changes_one_output_in_its_place(tmp_path):
    quiet = "with ProgressBar(False) as bar:\n    bar.show(seen(1, 2))"
    shown = """
with ProgressBar(None) as bar:
    bar.show(seen(2, 1))
    bar.show(seen(6, 4, waiting=[0]))
"""
    failed = """
try:
    with ProgressBar(True) as bar:
        bar.show(seen(3, 3, waiting=[1]))
        raise ValueError("<no more>")
except ValueError:
    pass
"""
    cells = [new_code_cell(text) for text in (PROGRESS, quiet, shown, failed)]
    _, nothing, live, stopped = execute(new_notebook(cells=cells), tmp_path)
    assert nothing == []
    (output,) = live  # updates have changed it: the last one is what there is
    assert output["output_type"] == "display_data"
    page = output["data"]["text/html"]
    assert "10 of 20" in page
    assert "slowest: trainer 1 at 4, 1 waiting" in page
    assert "slowest: trainer 1 at 4, 1 waiting" in output["data"]["text/plain"]
    (output,) = stopped
    page = output["data"]["text/html"]
    assert "&lt;no more&gt;" in page
    assert "<no more>" not in page
    assert "waiting" not in page
