"""What is compiled again when a source of the core has changed: what it is part of, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from compiled import FILES, FOLDERS, ROOT

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
    log, compiler = folder / "log", folder / "cc"
    for file in [*FILES.values(), *(path / "__init__.py" for path in FOLDERS)]:
        if file.suffix != ".pyx" or file.stem in MODULES:
            copy = folder / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("", []),
        ("dps/engine/core/unique.pyx", ["unique"]),
        ("dps/engine/core/unique.h", ["unique"]),
        ("dps/engine/core/shards/cuts.pxd", ["cuts"]),
        ("dps/engine/core/shards/rows.h", ["cuts", "rows"]),  # which cuts.h includes
        ("dps/engine/core/arrays.pxd", MODULES),
        ("dps/engine/core/clones.h", MODULES),  # which no module names
        ("dps/engine/core/slots.h", ["cuts"]),  # of the index, which the state of a shard has
        ("dps/engine/core/requests/exchange.h", []),
        ("setup.py", MODULES),
    ],
)
def test_what_has_changed_is_compiled_again_and_nothing_else(compiled, changed, again):
    assert compiled(*changed.split()) == again
    assert compiled() == []
