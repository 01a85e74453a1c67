"""What is compiled again when a source of the core has changed: what it is part of, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = ["cuts", "rows", "unique"]
# Writes what a compiler or a linker is asked for, and nothing into it; keeps a list of what was compiled.
COMPILER = """#!{python}
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).touch()
if "-c" in sys.argv:
    print(pathlib.Path(sys.argv[sys.argv.index("-c") + 1]).stem, file=open({log!r}, "a"))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function: compiles three modules of the core, after these files have changed, and says which were compiled."""
    folder = tmp_path_factory.mktemp("core")
    core, log, compiler = folder / "dps" / "core", folder / "log", folder / "cc"
    core.mkdir(parents=True)
    sources = [*(ROOT / "dps" / "core").glob("*.[hp]*"), ROOT / "dps" / "core" / "__init__.py"]
    for file in sources:
        if file.suffix in {".h", ".pxd", ".py"} or (file.suffix == ".pyx" and file.stem in MODULES):
            shutil.copy(file, core)
    shutil.copy(ROOT / "setup.py", folder)
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log)))
    compiler.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]

    def compiled(*changed: str) -> list[str]:
        log.write_text("")
        for file in folder.rglob("*"):  # all that is there becomes older, in the same order
            os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns - 10**11))
        for name in changed:
            (folder / name).touch()
        env = os.environ | {"CC": str(compiler)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(log.read_text().split())

    assert compiled() == MODULES
    return compiled


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("", []),
        ("dps/core/unique.pyx", ["unique"]),
        ("dps/core/unique.h", ["unique"]),
        ("dps/core/cuts.pxd", ["cuts"]),
        ("dps/core/rows.h", ["cuts", "rows"]),  # which cuts.h includes
        ("dps/core/arrays.pxd", MODULES),
        ("dps/core/clones.h", MODULES),  # which no module names
        ("dps/core/slots.h", ["cuts"]),  # of the index, which the state of a shard has
        ("dps/core/exchange.h", []),
        ("setup.py", MODULES),
    ],
)
def test_what_has_changed_is_compiled_again_and_nothing_else(compiled, changed, again):
    assert compiled(*changed.split()) == again
    assert compiled() == []
