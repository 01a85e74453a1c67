"""What is published: a wheel and an sdist with all of dps in them and nothing else, and extras that install."""

from __future__ import annotations

import ast
import configparser
import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from functools import cache
from pathlib import Path

import pytest
from compiled import sources

import dps

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
LARGEST = 1_000_000  # bytes of a file in the repository
EXTRAS = {  # extra -> a module, of dps or of another package, that needs it
    "": "dps, dps.engine.cli, dps.engine.driver.preload, distributed",
    "models": "narwhals, dps.models, dps.optimize, dps.graph",
    "progress": "tqdm",
    "bfloat16": "ml_dtypes",
    "opentelemetry": "dps.opentelemetry, opentelemetry.trace; dps.opentelemetry.instrument()",
    "demo": "examples.demo, bokeh",
    "checkpoint": "dps.engine.checkpoints.store, safetensors, xxhash, pyarrow",
    "testing": "dps.testing, greenlet",
    "spark": "dps.spark, pyspark, pyarrow",
    "torch": "dps.torch, safetensors",
    "yarn": "dps.yarn, skein",
    "jupyter": "IPython, jinja2",
    "cli": "dps.engine.cli, rich",
    "dashboard": "dps.engine.dashboard, bokeh, prometheus_client",
    "complete": "dps.models, examples.demo, dps.testing, cryptography",
}
OF_DEVELOPERS = {"test", "docs", "dev", "bench"}
BESIDE = [
    ".ci",
    ".github",
    "benchmarks",
    "deploy",
    "docs",
    "examples",
    "release",
    "tests",
]  # folders that the sdist has beside the package

MODULE = "polling"  # a small one of the core
SECONDS = 500  # for one build, on a busy machine
QUICK = os.environ | {"DPS_BUILD": "quick"}  # what is in a wheel does not depend on how well it is compiled

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * SECONDS)]


def build(source: Path, *args: object) -> None:
    """Build in `source`; what is needed for it is installed here."""
    command = [sys.executable, "-m", "build", "--no-isolation", *map(str, args)]
    done = subprocess.run(command, cwd=source, env=QUICK, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), of a copy: a build leaves things behind. The wheel is built from the sdist."""
    source, out = tmp_path_factory.mktemp("source") / "dps", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for file in filter(Path.is_file, ROOT.glob("[!.]*")):
        shutil.copy(file, source)
    for folder in ("dps", *BESIDE):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build(source, "--outdir", out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_no_generated_or_large_file_is_in_the_repository():
    """A benchmark that is killed leaves its files where it ran, and `git add` would take them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 500
    assert [str(file) for file in files if file.exists() and file.stat().st_size > LARGEST] == []


def test_the_wheel_has_all_of_dps_and_nothing_else(built):
    info = f"dps-{dps.__version__}.dist-info/"
    files = {file for file in (ROOT / "dps").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    sources = {file for file in files if file.suffix in {".pyx", ".pxd", ".h"}}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")  # other Pythons compile their own modules beside the sources
    modules = {file.with_suffix(suffix) for file in sources if file.suffix == ".pyx"}
    libraries = {file for file in files if file.suffix == ".so"}
    assert {name for name in names(built[0]) if not name.startswith(info)} == {
        file.relative_to(ROOT).as_posix() for file in files - sources - libraries | modules
    }
    assert {"dps/py.typed", "dps/dps.yaml", info + "entry_points.txt"} <= names(built[0])


def test_the_wheel_is_for_this_python_on_this_kind_of_machine(built):
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert built[0].name == f"dps-{dps.__version__}-{python}-{python}-{platform}.whl"


def test_what_the_wheel_says_of_itself(built):
    with zipfile.ZipFile(built[0]) as archive:
        info = f"dps-{dps.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["Version"] == dps.__version__
    assert metadata["License-File"] == "LICENSE"
    assert set(metadata.get_all("Provides-Extra")) == set(SETUP["options.extras_require"])
    assert "ps = dps.engine.cli:ps" in commands
    assert not [line for line in metadata.get_all("Requires-Dist") if "<" in line.split(";")[0]]


def test_the_sdist_has_what_a_user_reads_runs_and_tests(built):
    with tarfile.open(built[1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {p for folder in BESIDE for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert not {file.relative_to(ROOT).as_posix() for file in files} - packed
    assert {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "environment.yml",
        "examples/quickstart.ipynb",
        "examples/vectors.ipynb",
    } <= packed


PULL_AND_PUSH = """
import sys
import numpy as np
import dps.engine.core.grouping
from dps.testing import Simulation

print(dps.engine.core.grouping.__file__)
with Simulation(seed=1, servers=2, trainers=1) as sim:
    sim.table("w", dim=2)
    sim.run(lambda trainer, parts: trainer.push("w", [7, 3, 7], np.ones((3, 2), np.float32)), [1.0])
    print(sim.client().pull("w", [3, 5, 7]).tolist())
"""


def test_the_wheel_works_on_a_machine_without_a_compiler(built, tmp_path):
    """In a folder of its own, before all that is installed. A clean environment is among the slow tests."""
    bare = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "there")}
    assert shutil.which("cc", path=bare["PATH"]) is None
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "there", built[0]]
    for args in (install, ["-c", PULL_AND_PUSH]):
        command = [sys.executable, *args]
        done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    module, rows = done.stdout.splitlines()
    assert Path(module).parent == tmp_path / "there" / "dps" / "engine" / "core"
    assert rows == "[[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]"


# ---- where the core cannot be compiled ------------------------------------------------------------------------------


@cache
def no_compiler() -> str:
    """The message of setup.py, which is a program: to import it is to build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NO_COMPILER":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no NO_COMPILER")


def compile_core(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Compile one module of the core in a copy of its sources: Cython would need half a minute for all."""
    for source in sources([MODULE]):
        copy = folder / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    shutil.copy(ROOT / "setup.py", folder)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    env = {name: value for name, value in QUICK.items() if name != "CC"} | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize(
    ("variables", "compiler", "problem"),
    [
        ({"CC": "/nonexistent"}, "/nonexistent", "is not on this machine"),
        ({"CC": "false -O2"}, "false", "failed; its messages stand above"),
        ({"PATH": "/nonexistent"}, None, "is not on this machine"),
    ],
)
def test_what_is_said_without_a_compiler(tmp_path, variables, compiler, problem):
    done = compile_core(tmp_path, **variables)
    own = (sysconfig.get_config_var("CC") or "cc").split()[0]
    assert done.returncode == 1
    assert no_compiler().format(compiler=compiler or own, problem=problem).strip() in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.so"))
    # Cython is not asked before it is known that there is a compiler.
    assert bool(list(tmp_path.rglob(f"{MODULE}.c"))) == (problem != "is not on this machine")


def test_pip_shows_what_is_said_without_a_compiler(built, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    env = QUICK | {"CC": "/nonexistent"}
    done = subprocess.run([*command, built[1]], env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    text = " ".join((done.stdout + done.stderr).split())
    assert "apt-get install gcc python3-dev" in text
    assert "the C compiler '/nonexistent' is not on this machine" in text


def test_every_extra_is_tried():
    assert set(SETUP["options.extras_require"]) == EXTRAS.keys() - {""} | OF_DEVELOPERS


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_is_enough(built, extra, tmp_path):
    what = f"{built[0]}[{extra}]" if extra else str(built[0])
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:  # up to a gigabyte, which pytest would keep
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        bare = os.environ | {"PATH": str(python.parent)}  # no compiler
        program = f"import {EXTRAS[extra]}" if extra != "testing" else PULL_AND_PUSH
        for args in (["-m", "pip", "install", "-q", what], ["-m", "pip", "check"], ["-c", program]):
            done = subprocess.run([python, *args], cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import dps  # needs none of them
try:
    importlib.import_module(sys.argv[1])
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("module", "absent", "extra"),
    [
        ("dps.models", "sklearn", "models"),
        ("dps.optimize", "scipy", "models"),
        ("dps.graph", "scipy", "models"),
        ("dps.models.spark", "pyspark", "spark"),
        ("dps.torch", "torch", "torch"),
        ("dps.yarn", "skein", "yarn"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module, absent, extra):
    command = [sys.executable, "-c", WITHOUT, module, absent]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert absent in printed
    assert f"pip install 'dps[{extra}]'" in printed
