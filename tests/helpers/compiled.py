"""Deliberately wrong variants of the compiled core: a module of dps/core, compiled with some of its text replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
CORE = ROOT / "dps" / "core"


def variant(module: str, file: str, old: str, new: str) -> ModuleType:
    """dps.core.`module`, compiled with `old` replaced by `new` throughout one file of dps/core (.pyx, .pxd or .h).

    The modules that are imported already stay as they are; a test patches the names that it wants to be wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "dps", "core")
        copy.mkdir(parents=True)
        for source in [CORE / "__init__.py", CORE / f"{module}.pyx", *CORE.glob("*.pxd"), *CORE.glob("*.h")]:
            shutil.copy(source, copy)
        text = (copy / file).read_text()
        assert old in text, f"dps/core/{file} no longer contains {old!r}"
        (copy / file).write_text(text.replace(old, new))
        shutil.copy(ROOT / "setup.py", folder)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(
            build, cwd=folder, env={**os.environ, "DPS_BUILD": "quick"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (library,) = copy.glob(f"{module}.*.so")
        name = f"dps.core.{module}"
        loader = ExtensionFileLoader(name, str(library))
        spec = spec_from_loader(name, loader)
        assert spec is not None
        made = module_from_spec(spec)
        loader.exec_module(made)
    return made
