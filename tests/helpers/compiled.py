"""Deliberately wrong variants of compiled modules: of the engine's core or of kernels, with some of the text replaced.

What was compiled is kept in `build/variants`, under a hash of all that it was made of, because a variant takes five
seconds to compile and there are some hundreds: only those of which a source has changed are compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

import Cython
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CORE, LOOPS = ROOT / "dps" / "engine" / "core", ROOT / "dps" / "kernels" / "loops"
FOLDERS = [CORE, CORE / "requests", CORE / "shards", LOOPS]
FILES = {path.name: path for folder in FOLDERS for path in folder.iterdir() if path.suffix in (".pyx", ".pxd", ".h")}
KEPT = ROOT / "build" / "variants"
MAX_KEPT = 2_000  # folders, of one variant each; a module compiled without optimisation has about 0.3 MB
COMPILE_SECONDS = 240.0  # because a test has 300
BUILD = "quick"  # in setup.py: without optimisation


class Builder:
    """The process of builder.py: it starts with the first build, serves this process, and ends with it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def build(self, folder: str) -> tuple[bool, str]:
        """Whether the setup.py of a folder could be built, and what it printed."""
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.process = self._started()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n".encode())
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], COMPILE_SECONDS)[0]:
            self.end()
            raise TimeoutError(f"nothing was compiled in {COMPILE_SECONDS:.0f} s")
        status = self.process.stdout.readline()
        output = Path(folder, "output")
        return status == b"0\n", output.read_text() if output.exists() else "the process of builder.py has ended"

    def end(self) -> None:
        """End the process, if there is one; the next build starts another one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def descriptors(self) -> list[int]:
        """Of the pipes to and from the process."""
        pipes = (self.process.stdin, self.process.stdout) if self.process is not None else ()
        return [pipe.fileno() for pipe in pipes if pipe is not None and not pipe.closed]

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("builder.py"))],
            env={**os.environ, "DPS_BUILD": BUILD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


BUILDER = Builder()


def variant(module: str, file: str, old: str, new: str) -> ModuleType:
    """The compiled module of this name, with `old` replaced by `new` throughout one file (.pyx, .pxd or .h).

    The modules that are imported already stay as they are; a test patches the names that it wants to be wrong.
    """
    return variants([module], file, old, new)[0]


def variants(modules: list[str], file: str, old: str, new: str) -> list[ModuleType]:
    """As :func:`variant`, for modules of which later ones use earlier ones."""
    kept = compiled(modules, replaced(modules, file, old, new))
    # Python refuses to initialise a module of Cython twice from the same file, so each variant is loaded from a copy.
    with tempfile.TemporaryDirectory() as folder, own_modules(modules):
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return [loaded(full_name(module), *Path(folder).glob(f"{module}.*.so")) for module in modules]


@contextlib.contextmanager
def own_modules(modules: list[str]) -> Iterator[None]:
    """What is imported under these names afterwards is what was imported before.

    unittest.mock would empty sys.modules for a moment, in which an import of another thread begins everything anew.
    """
    before = {name: sys.modules[name] for name in map(full_name, modules) if name in sys.modules}
    try:
        yield
    finally:
        for name in map(full_name, modules):
            sys.modules.pop(name, None)
        sys.modules.update(before)


def full_name(module: str) -> str:
    """As Python imports it: dps.engine.core.shards.rows, for rows."""
    return ".".join(FILES[f"{module}.pyx"].relative_to(ROOT).with_suffix("").parts)


def error_beside(module: str, old: str, new: str, code: str) -> str:
    """The error of code in a process where a compiled module is a variant for all other modules, too; "" if none.

    For classes whose objects compiled modules have: these take no object of a variant of the class.
    """
    (library,) = compiled([module], replaced([module], f"{module}.pyx", old, new)).glob(f"{module}.*.so")
    start = f"import compiled, sys; sys.meta_path.insert(0, compiled.Instead({full_name(module)!r}, {str(library)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"{start}; {code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stderr


class Instead:
    """Finds a module in a library that is not its own."""

    def __init__(self, module: str, library: str):
        self._module, self._library = module, library

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self._library) if name == self._module else None


def replaced(modules: list[str], file: str, old: str, new: str) -> dict[str, str]:
    """The files of modules, by their paths; one of them with `new` in place of `old`."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sources(modules)}
    path = str(FILES[file].relative_to(ROOT))
    assert old in texts[path], f"{path} no longer contains {old!r}"
    return {**texts, path: texts[path].replace(old, new)}


def sources(modules: list[str]) -> list[Path]:
    """The files of which modules are made: their own, and all declarations and headers that these name."""
    waiting = [FILES[f"{module}.pyx"] for module in modules]
    waiting += [FILES[name] for module in modules if (name := f"{module}.pxd") in FILES]
    needed = {folder / "__init__.py" for folder in FOLDERS}
    while waiting:
        path = waiting.pop()
        if path not in needed:
            needed.add(path)
            text = path.read_text()
            names = [f"{name}.pxd" for name in re.findall(r"^from dps\.[\w.]*\.(\w+) cimport", text, re.M)]
            names += re.findall(r'^\s*(?:#\s*include|cdef extern from) "(\w+\.h)"', text, re.M)
            waiting += [FILES[name] for name in names]
    return sorted(needed)


def compiled(modules: list[str], texts: dict[str, str]) -> Path:
    """The folder with these modules, compiled now where they are not kept from before."""
    setup = (ROOT / "setup.py").read_text()
    versions = [sys.version, EXTENSION_SUFFIXES[0], Cython.__version__, np.__version__, os.environ.get("CC"), BUILD]
    made_of = repr((modules, sorted(texts.items()), setup, versions))
    kept = KEPT / hashlib.sha256(made_of.encode()).hexdigest()
    if kept.exists():
        os.utime(kept)  # its last use, by which the oldest are found
        return kept
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:  # on the same disk, so that it moves in one step
        libraries = Path(folder, "libraries")
        libraries.mkdir()
        for name, text in texts.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text)
        Path(folder, "setup.py").write_text(setup)
        works, output = BUILDER.build(folder)
        assert works, output
        for module in modules:
            shutil.copy(*Path(folder, "dps").rglob(f"{module}.*.so"), libraries)
        try:
            libraries.rename(kept)
        except OSError:  # another process has compiled the same meanwhile
            assert kept.exists()
    forget_oldest()
    return kept


def forget_oldest() -> None:
    """Remove the variants whose last use is longest ago, beyond MAX_KEPT."""
    folders = sorted((path for path in KEPT.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)), key=last_use)
    for path in folders[:-MAX_KEPT]:
        shutil.rmtree(path, ignore_errors=True)  # another process may remove it, too


def last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


# Modules of the compiled step of servers, each with those that are compiled anew with it.
# What is compiled anew with a module of the step of servers, and of the shards: those that call its C functions, too.
OF_SERVERS = {
    "service": ["service"],
    "request": ["request", "service"],
    "answers": ["answers", "forwards", "service"],
    "forwards": ["forwards", "service"],
    "apply": ["apply", "service"],
}
OF_SHARDS = {"apply": ["apply"], "cuts": ["cuts", "apply"]}


def put_variant(monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], old: str, new: str) -> None:
    """Let servers use a variant of their compiled step. One of these modules of it has the text `old`."""
    (module,) = [module for module in modules if old in FILES[f"{module}.pyx"].read_text()]
    _put(monkeypatch, "dps.engine.server", variants(OF_SERVERS[module], f"{module}.pyx", old, new))


def put_shard_variant(monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str) -> None:
    """Let shards use a variant of what is compiled of them; the step of servers stays as it is."""
    _put(monkeypatch, "dps.engine.state", variants(OF_SHARDS[module], f"{module}.pyx", old, new))


def _put(monkeypatch: pytest.MonkeyPatch, room: str, wrong: list[ModuleType]) -> None:
    for made in wrong:
        name = made.__name__.rpartition(".")[2]
        original = sys.modules[full_name(name)]
        for user in [user for key, user in sys.modules.items() if key.startswith(room)]:
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
