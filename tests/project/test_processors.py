"""The compiled core runs on every x86-64 processor: newer instructions are only where the loader chooses them.

A wheel is built on one machine and runs on others. An instruction that the other processor lacks would end its process
with SIGILL, and no test on the machine that built the wheel would notice.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

import dps

# Instructions that x86-64-v2 lacks; those of AVX and AVX-512 begin with v. Left out are tzcnt, which an older processor
# runs as bsf (gcc uses it where both give the same), and xgetbv, because the loader asks first whether it is there.
NEWER = re.compile(r"v[a-z]\w*|andn|bextr|bls[ir]|blsmsk|bzhi|lzcnt|mulx|movbe|pdep|pext|rorx|sarx|shlx|shrx|adcx|adox")
NOT_OF_AVX = {"verr", "verw", "vmcall"}
CHOSEN = re.compile(r"[.](arch_x86_64_v[34]|v[34])\b")  # gcc's names for the variants of clones.h
MODULES = sorted(Path(dps.__path__[0]).rglob("*.so"))

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64 processors"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump"),
]


@cache
def functions(module: Path) -> dict[str, set[str]]:
    """Each function of a compiled module -> the names of its instructions."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", module]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if named := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            instructions = found.setdefault(named[1], set())
        elif line.startswith(" ") and (code := line.partition(":\t")[2].split()):
            instructions.update(code[:2])  # the second where the first is a prefix, such as rep
    return found


def newer(instructions: set[str]) -> set[str]:
    return {name for name in instructions if NEWER.fullmatch(name)} - NOT_OF_AVX


def test_newer_instructions_are_only_in_variants_for_newer_processors():
    assert len(MODULES) > 30
    wrong = {
        f"{module.name}: {name}": found
        for module in MODULES
        for name, instructions in functions(module).items()
        if not CHOSEN.search(name) and (found := newer(instructions))
    }
    assert wrong == {}


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
        library = tmp_path / f"{machine}.so"
        subprocess.run([compiler, *flags, f"-march={machine}", source, "-o", library], check=True)
        assert bool(newer(functions(library)["sum"])) == has_newer
