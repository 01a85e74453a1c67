"""Every example in the documentation runs: the blocks of the pages, and those of the docstrings."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import dask
import numpy as np
import pytest
from blocks import Block, blocks
from rules import each
from shared_clusters import SharedClusters

import dps

ROOT = Path(__file__).parents[2]
PAGES = ["CONTRIBUTING.md", "README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/**/*.md"))]
PROGRAMS = ["README.md", "docs/quickstart.md"]  # each block of python of these is a whole program
LANGUAGES = {"python", "bash", "console", "", "text", "yaml", "toml", "json"}  # exactly so: no "python no-run"
LANGUAGES |= {"{toctree}", "{include} ../CHANGELOG.md"}  # Sphinx's: no code
SECONDS = 600  # a limit for what hangs, on a busy machine


def story(page: Path) -> str:
    """A program that runs the python blocks of `page` in order, in its ``__main__``, with the line numbers of the page.

    Workers that are spawned import the program again; for them it does nothing.
    """
    parts = [(b.line, b.code) for b in blocks(page.read_text()) if b.language == "python"]
    return f"""
if __name__ == "__main__":
    for _line, _code in {parts!r}:
        exec(compile("\\n" * (_line - 1) + _code, {str(page)!r}, "exec"), globals())
"""


def needs_spark(page: Path) -> bool:
    """Whether a python block of `page` imports pyspark, which is installed for developers only."""
    code = "\n".join(b.code for b in blocks(page.read_text()) if b.language == "python")
    return re.search(r"^\s*(import|from) pyspark\b", code, re.M) is not None


def needs_torch(page: Path) -> bool:
    """Whether a python block of `page` imports torch, or uses dps.torch, which not all developers have."""
    code = "\n".join(b.code for b in blocks(page.read_text()) if b.language == "python")
    return re.search(r"^\s*(import|from) torch\b|\bdps\.torch\b", code, re.M) is not None


def run(program: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of a program run in its own folder. Its processes end with it."""
    with subprocess.Popen(
        [sys.executable, program],
        cwd=program.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def check_command(command: str) -> str | None:
    """What is wrong with a line for the shell, as far as one can tell without running it."""
    words = [w for w in command.split() if not re.fullmatch(r"[A-Z_]+=\S*", w)]  # PYTHON=... make test
    if not words:
        return None
    program = words.pop(0)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        unknown = [w for w in words if not w.startswith("-") and w not in targets]
        return f"no such target: {unknown}" if unknown else None
    if program.endswith("python"):
        if words[:1] == ["-m"]:
            return None if importlib.util.find_spec(words[1]) else f"no module {words[1]}"
        if words and not words[0].startswith("-"):
            return None if (ROOT / words[0]).exists() else f"no file {words[0]}"
    return None


@each(PAGES)
def test_blocks_have_a_known_language(page):
    for block in blocks((ROOT / page).read_text()):
        assert block.language in LANGUAGES, f"{page}:{block.line - 1}"


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("page", [page for page in PAGES if page not in PROGRAMS])
def test_page_runs_as_a_story(page, tmp_path):
    if not any(b.language == "python" for b in blocks((ROOT / page).read_text())):
        return
    if needs_spark(ROOT / page):
        pytest.importorskip("pyspark")
    if needs_torch(ROOT / page):
        pytest.importorskip("torch")
    program = tmp_path / "story.py"
    program.write_text(story(ROOT / page))
    status, output = run(program, SECONDS)
    assert status is not None, f"{page} took more than {SECONDS} s\n{output[-4000:]}"
    assert status == 0, f"{page}\n{output[-4000:]}"


def programs() -> list:
    """Each block of python of the pages in PROGRAMS, named by its page and line."""
    return [
        pytest.param(block.code, id=f"{page}:{block.line}")
        for page in PROGRAMS
        for block in blocks((ROOT / page).read_text())
        if block.language == "python"
    ]


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("code", programs())
def test_a_block_runs_as_a_file(code, tmp_path):
    program = tmp_path / "first.py"
    program.write_text(code)
    status, output = run(program, SECONDS)
    assert status == 0, output[-4000:]
    assert f'File "{ROOT}/dps/' not in output, "a traceback; Dask's own may come when it closes, on a busy machine"


STARTS = re.compile(r"\bLocalCluster\((?!.*\bprocesses=False)|\bdps\.spark\.(start|get_or_create)\(")


@each(PAGES)
def test_blocks_that_start_processes_have_a_guard(page):
    for block in blocks((ROOT / page).read_text()):
        if block.language == "python" and STARTS.search(block.code):
            assert 'if __name__ == "__main__":' in block.code, f"{page}:{block.line}"


WIDTH = 120  # so that a diff of prose can be read
UNBROKEN = re.compile(r"#|\||!\[[^]]*\]\(\S+\)$|\S+$")  # a heading, a row of a table, a picture, a word without a space


@each([*PAGES, "CHANGELOG.md"])
def test_lines_of_prose_are_short(page):
    code, wide = False, []
    for n, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        text = line.strip()
        code ^= text.startswith("```")
        if len(line) > WIDTH and not code and not UNBROKEN.match(text.removeprefix("- ")):
            wide.append(f"{page}:{n}: {len(line)} characters")
    assert not wide, wide


@each(PAGES)
def test_commands_exist(page):
    for block in blocks((ROOT / page).read_text()):
        if block.language in {"bash", "console"}:
            for i, line in enumerate(block.code.splitlines()):
                if block.language == "bash" or line.startswith("$ "):
                    wrong = check_command(line.removeprefix("$ ").split("#")[0])
                    assert not wrong, f"{page}:{block.line + i}: {wrong}"


@each(PAGES)
def test_links_inside_the_project_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert not [t for t in targets if t and not ((ROOT / page).parent / t).exists()]


@each(["docs/production.md", "docs/concepts.md"])
def test_settings_that_a_page_names_exist(page):
    groups = "timeouts|limits|adaptive|yarn"
    names = re.findall(rf"`dps\.((?:{groups})\.[a-z-]+|shards-per-server)`", (ROOT / page).read_text())
    assert names
    assert not [name for name in names if dask.config.get(f"dps.{name}", default=...) is ...]


# The pages as Sphinx builds them


def test_dps_torch_is_described_without_torch():
    pytest.importorskip("sphinx")
    code = """
from sphinx.ext.autodoc.mock import mock
with mock(["torch", "safetensors"]):  # as docs/conf.py asks for where they are missing
    import dps.torch
    dps.torch.save
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_ci_builds_the_pages():
    assert "make docs" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.integration
@pytest.mark.timeout(SECONDS)
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    # As `make docs` does, so that pages which that has read are not read again.
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", ROOT / "build" / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", tmp_path / "html"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert built.returncode == 0, built.stderr[-4000:]
    for page in PAGES:
        if page.startswith("docs/"):
            assert (tmp_path / "html" / page.removeprefix("docs/")).with_suffix(".html").exists()
    for file in [*(tmp_path / "html").rglob("*.html"), *(tmp_path / "html").rglob("*.css")]:
        assert not fetched_from_elsewhere(file.read_text()), file


def fetched_from_elsewhere(text: str) -> list[str]:
    """Addresses of other sites that a browser asks by itself when it shows this page or style sheet."""
    loads = r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"|"""
    loads += r"""(?:@import|url)\s*\(?\s*(?:url\()?["']?((?:https?:)?//[^"')\s]+)"""
    return [first or second for first, second in re.findall(loads, text)]


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ('@import url("https://fonts.example/css2");', ["https://fonts.example/css2"]),
        ('<script src="https://tags.example/x.js">', ["https://tags.example/x.js"]),
        ('<link rel="stylesheet" href="//cdn.example/a.css"/>', ["//cdn.example/a.css"]),
        ('<a href="https://docs.dask.org/">Dask</a><img src="_static/a.png">', []),
        ("src: url(../webfonts/fa.woff2)", []),
    ],
)
def test_what_a_page_fetches_from_elsewhere(text, addresses):
    assert fetched_from_elsewhere(text) == addresses


def on_the_api_page() -> list[str]:
    """What is described there, as module.name."""
    pytest.importorskip("pyspark", reason="dps.models.spark, which is described too, needs pyspark")
    pytest.importorskip("torch", reason="dps.torch, which is described too, needs torch")
    listed, module = [], ""
    for line in (ROOT / "docs" / "api.rst").read_text().splitlines():
        if match := re.fullmatch(r"\.\. (\w+):: ([\w.]+)", line):
            if match[1] == "currentmodule":
                module = match[2]
            elif match[1] == "automodule":
                listed += [f"{match[2]}.{name}" for name in importlib.import_module(match[2]).__all__]
            else:
                listed.append(f"{module}.{match[2]}")
    return listed


@pytest.mark.parametrize(
    "module",
    [
        "dps",
        "dps.graph",
        "dps.kernels",
        "dps.models",
        "dps.opentelemetry",
        "dps.optimize",
        "dps.sampling",
        "dps.spark",
        "dps.yarn",
        "dps.errors",
        "dps.testing",
        "dps.torch",
    ],
)
def test_the_api_page_leaves_out_no_public_name(module):
    described = [pkgutil.resolve_name(name) for name in on_the_api_page()]
    public = {name: getattr(importlib.import_module(module), name) for name in importlib.import_module(module).__all__}
    assert not [name for name, thing in public.items() if thing not in described and not inspect.ismodule(thing)]


def test_the_api_page_lists_what_it_describes():
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs" / "api.rst").read_text(), re.M)
    described = [name.rpartition(".") for name in on_the_api_page()]
    assert listed == [name for module, _, name in described if module != "dps.errors"]


# Docstrings


def modules() -> list[str]:
    return ["dps", *sorted(modules_below(dps.__path__, "dps."))]


def modules_below(path: Iterable[str], prefix: str) -> Iterator[str]:
    """As pkgutil.walk_packages, which imports each package: that of torch would take seconds of each process."""
    for finder, name, is_package in pkgutil.iter_modules(path, prefix):
        yield name
        if is_package:
            yield from modules_below([os.path.join(finder.path, name.rpartition(".")[2])], f"{name}.")


# A cluster takes ten times as long to make as most examples to run. Examples of the room of clusters make their own.
OWN_CLUSTERS = "dps.engine.deploy"
# Its two examples are whole fits, which take as long as the examples of thirty other modules.
LONG = {"dps.models.factors.machines": pytest.mark.thorough}


@pytest.fixture(scope="module")
def clusters():
    shared = SharedClusters()
    yield shared
    shared.close()


@pytest.mark.leaks_ok("clusters stay for the examples of other modules; the module's fixture judges what is left")
@pytest.mark.parametrize(
    "name",
    [pytest.param(m, marks=LONG.get(m, ())) for m in modules() if not m.endswith("__main__")],
)
def test_docstrings(name, clusters):
    try:
        module = importlib.import_module(name)
    except ImportError as e:
        if (e.name or "").split(".")[0] == "dps":
            raise
        pytest.skip(f"needs {e.name}")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed = []
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    for example in doctest.DocTestFinder().find(module, name, extraglobs={"dps": dps, "np": np}):
        if not example.examples:
            continue  # as of nine in ten docstrings: to ask for the clusters, and leave them empty, is work
        with nullcontext() if name.startswith(OWN_CLUSTERS) else clusters.shared():
            runner.run(example, out=failed.append)
    assert not failed, "".join(failed)


def test_examples_share_a_cluster_and_leave_it_empty(clusters):
    before = clusters.made
    with clusters.shared():
        first = dps.LocalCluster(servers=1, trainers=1, processes=False)
        left = dps.ParameterServer(first, name="left-open")
        first.close()
    with clusters.shared(), dps.LocalCluster(servers=1, trainers=1, processes=False) as second:
        assert second is first
        with dps.ParameterServer(second, name="left-open") as ps:  # the name is free again
            assert len(ps.table("w")) == 0
    left.close()
    assert clusters.made <= before + 1
    assert dps.LocalCluster is not first.__class__


# The tools of this file


def write(tmp_path, *lines):
    page = tmp_path / "page.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def test_a_story_goes_on_from_block_to_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("""# A
```python
def f():
    return '''a
b'''
```
- x
  ```python
  print(f())
  ```
""")
    program = tmp_path / "story.py"
    program.write_text(story(page))
    assert run(program, SECONDS) == (0, "a\nb\n")


def test_a_failure_names_the_line_of_the_page(tmp_path):
    page = write(tmp_path, "# A", "", "```python", "x = 1", "1 / 0", "```")
    program = tmp_path / "story.py"
    program.write_text(story(page))
    status, output = run(program, SECONDS)
    assert status == 1
    assert 'page.md", line 5' in output
    assert "ZeroDivisionError" in output


def test_a_story_without_end_is_ended(tmp_path):
    program = tmp_path / "story.py"
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    for seconds in (1, 10, 100):  # Python may take long to start
        status, output = run(program, seconds)
        assert status is None
        if output:
            break
    assert output == "begun\n"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_story_may_start_worker_processes(tmp_path):
    page = write(
        tmp_path,
        "```python",
        "from distributed import Client, LocalCluster",
        "cluster = LocalCluster(n_workers=1, dashboard_address=None)",
        "client = Client(cluster)",
        "def double(x): return 2 * x",
        "```",
        "```python",
        "assert client.submit(double, 4).result() == 8",
        "client.close(); cluster.close()",
        "```",
    )
    program = tmp_path / "story.py"
    program.write_text(story(page))
    status, output = run(program, SECONDS)  # Dask may have to say something about a busy machine
    assert status == 0, output


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("make test", None),
        ("PYTHON=python3.13 make install test", None),
        ("make coffee", "coffee"),
        ("python -m dps.nothing", "dps.nothing"),
        (".venv/bin/python -m pytest", None),
        ("python nowhere.py", "nowhere.py"),
        ("git clone x", None),
    ],
)
def test_check_command(command, wrong):
    problems_found = check_command(command)
    assert (problems_found is None) if wrong is None else wrong in problems_found


def test_no_escape():
    (block,) = blocks("```python no-run\nx\n```\n")
    assert block == Block("python no-run", 2, "x\n")
    assert block.language not in LANGUAGES


# The public names of CHANGELOG.md's table for 0.6.0 that are no more, and how each would stand in a page or an example.
OLD_NAMES = {
    "dps.Trainer(ticket, run, number, ...)": r"dps\.Trainer\(",
    "client.trainer": r"client\.trainer\b",
    "trainer.trainer": r"trainer\.trainer\b",
    "dps.Client(ticket, pool)": r"dps\.Client\(\w+, pool",
    "client.seconds": r"client\.seconds\b",
    "client.meter": r"client\.meter\b",
    "client.parties": r"client\.parties\b",
    "trainer.seconds": r"trainer\.seconds\b",
    "trainer.meter": r"trainer\.meter\b",
    "trainer.parties": r"trainer\.parties\b",
    "trainer.split()": r"trainer\.split\b",
    'ps.table("w")': None,  # the name stays
    "TableSpec": None,
    "ps.servers": r"ps\.servers\b(?!\()",
    "ps.tables": r"ps\.tables\b(?!\()",
    "pending.done": r"pending\.done\b(?!\()",
    "ps.staleness": r"ps\.staleness\b(?!\()",
    "ps.staleness = 4": r"ps\.staleness =",
    "run.staleness = 4": r"run\.staleness =",
    "ps.open_run": None,
    'ps.drop("w")': r"ps\.drop\(",
    "ps.run(..., within=run)": r"\bwithin=|\"within\"",
    'ps.checkpoint(url, every="10 min")': r"\.checkpoint\([^)]*\bevery=",
    "clocks=": r"\.checkpoint\([^)]*\bclocks=",
    'ps.export("w", form="numpy")': r"\bform=",
    "dps.export_checkpoint(..., form=)": r"\bform=",
    "dps.finished(result)": r"dps\.finished\b",
    "dps.spark.finished(result)": r"spark\.finished\b",
    'ps.status()["runs"][-1]["clocks"]': r"\.status\(\)\[",
    'run.progress()["connected"]': r"\.progress\(\)\[",
    "/json/dps.json": None,
    "dask ps status --json": None,
    "dps.testing.Schedule": r"dps\.testing\.Schedule\b",
    ".check_schedule": r"testing\.check_schedule\b",
}


def old_names() -> list[str]:
    """What stands in the column "before" of the table of public names."""
    section = (ROOT / "CHANGELOG.md").read_text().split("| before | now |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


def test_no_old_name_is_left():
    assert sorted(old_names()) == sorted(OLD_NAMES), "each name that has changed needs its pattern"
    places = [ROOT / page for page in PAGES if page != "docs/changes.md"]
    places += [p for folder in ("examples", "benchmarks") for p in ROOT.glob(f"{folder}/**/*") if p.is_file()]
    texts = {p: p.read_text() for p in places if p.suffix in (".py", ".md", ".ipynb", ".yaml", ".j2")}
    for name, pattern in OLD_NAMES.items():
        if pattern is not None:
            left = [str(p.relative_to(ROOT)) for p, text in texts.items() if re.search(pattern, text)]
            assert not left, f"{name} is no more, and stands in {left}"
