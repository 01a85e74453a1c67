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

import pytest

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


# Modules of the compiled step of servers, each with those that are compiled anew with it.
OF_SERVERS = {"service": ["service"], "request": ["request", "service"], "forwards": ["forwards", "service"]}


def put_variant(monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], old: str, new: str) -> None:
    """Let servers use a variant of their compiled step. One of these modules of it has the text `old`."""
    (module,) = [module for module in modules if old in (CORE / f"{module}.pyx").read_text()]
    for made in variants(OF_SERVERS[module], f"{module}.pyx", old, new):
        name = made.__name__.rpartition(".")[2]
        original = sys.modules[f"dps.core.{name}"]
        for user in [user for key, user in sys.modules.items() if key.startswith("dps.server")]:
            for used in [key for key, value in vars(user).items() if value is vars(original).get(key)]:
                monkeypatch.setattr(user, used, vars(made)[used])


def loaded(name: str, library: Path) -> ModuleType:
    """A compiled module, which those loaded after it find under its name."""
    loader = ExtensionFileLoader(name, str(library))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    made = module_from_spec(spec)
    loader.exec_module(made)
    sys.modules[name] = made
    return made
