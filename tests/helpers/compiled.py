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
from unittest import mock

ROOT = Path(__file__).parents[2]
CORE = ROOT / "dps" / "core"


def variant(module: str, file: str, old: str, new: str) -> ModuleType:
    """dps.core.`module`, compiled with `old` replaced by `new` throughout one file of dps/core (.pyx, .pxd or .h).

    The modules that are imported already stay as they are; a test patches the names that it wants to be wrong.
    """
    return variants([module], file, old, new)[0]


def variants(modules: list[str], file: str, old: str, new: str) -> list[ModuleType]:
    """As :func:`variant`, for modules of which later ones use earlier ones."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "dps", "core")
        copy.mkdir(parents=True)
        sources = [CORE / f"{module}.pyx" for module in modules]
        for source in [CORE / "__init__.py", *sources, *CORE.glob("*.pxd"), *CORE.glob("*.h")]:
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
        with mock.patch.dict(sys.modules):
            return [loaded(f"dps.core.{module}", *copy.glob(f"{module}.*.so")) for module in modules]


def loaded(name: str, library: Path) -> ModuleType:
    """A compiled module, which those loaded after it find under its name."""
    loader = ExtensionFileLoader(name, str(library))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    made = module_from_spec(spec)
    loader.exec_module(made)
    sys.modules[name] = made
    return made
