"""The compiled core runs on every x86-64 processor: newer instructions are only where the loader chooses them.

A wheel is built on one machine and runs on others. An instruction that the other processor lacks would end its process
with SIGILL, and no test on the machine that built the wheel would notice.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import instructions
import pytest
from instructions import CHOSEN, functions, newer, too_new

import dps

MODULES = sorted(Path(dps.__path__[0]).rglob("*.so"))

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64 processors"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump"),
]


def test_newer_instructions_are_only_in_variants_for_newer_processors():
    assert len(MODULES) > 30
    assert too_new(MODULES) == {}


def test_variants_for_newer_processors_are_there_and_use_them():
    """Otherwise the test above would see nothing."""
    variants = [code for module in MODULES for name, code in functions(module).items() if CHOSEN.search(name)]
    if not variants:
        pytest.skip("this compiler makes no variants: see clones.h")
    assert len(variants) > 50
    assert sum(bool(newer(code)) for code in variants) > len(variants) / 2


def test_a_module_for_this_processor_alone_is_noticed(tmp_path):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    source = tmp_path / "sum.c"
    source.write_text("double sum(const double *x, long n) { double s = 0; while (n--) s += x[n] * x[n]; return s; }")
    flags = ["-O3", "-shared", "-fPIC"]
    for machine, has_newer in (("x86-64-v2", False), ("x86-64-v3", True)):
        library = tmp_path / machine / "sum.so"
        library.parent.mkdir()
        subprocess.run([compiler, *flags, f"-march={machine}", source, "-o", library], check=True)
        assert bool(newer(functions(library)["sum"])) == has_newer
        # This is the program that looks at each wheel.
        done = subprocess.run([sys.executable, instructions.__file__, library.parent], capture_output=True, text=True)
        assert done.returncode == has_newer
        assert ("sum.so: sum has instructions that x86-64-v2 lacks: v" in done.stderr) == has_newer
