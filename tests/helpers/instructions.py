"""The instructions of compiled modules, and which of them x86-64-v2 lacks: ``instructions.py FOLDER`` tells them.

A wheel is built on one machine and runs on others. Newer instructions may stand only in the variants of functions that
the loader chooses for a processor that has them; the exit status is 1 where others have some.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ["CHOSEN", "functions", "newer", "too_new"]

# Instructions that x86-64-v2 lacks; those of AVX and AVX-512 begin with v. Left out are tzcnt, which an older processor
# runs as bsf (gcc uses it where both give the same), and xgetbv, because the loader asks first whether it is there.
NEWER = re.compile(r"v[a-z]\w*|andn|bextr|bls[ir]|blsmsk|bzhi|lzcnt|mulx|movbe|pdep|pext|rorx|sarx|shlx|shrx|adcx|adox")
NOT_OF_AVX = {"verr", "verw", "vmcall"}
CHOSEN = re.compile(r"[.](arch_x86_64_v[34]|v[34])\b")  # gcc's names for the variants of clones.h


@cache
def functions(module: Path) -> dict[str, set[str]]:
    """Each function of a compiled module -> the names of its instructions."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", module]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    instructions: set[str] = set()
    for line in text.splitlines():
        if line.startswith(" "):
            code = line.partition(":\t")[2].split(None, 2)
            instructions.update(code[:2])  # the second where the first is a prefix, such as rep
        elif named := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            instructions = found.setdefault(named[1], set())
    return found


def newer(instructions: set[str]) -> set[str]:
    return {name for name in instructions if NEWER.fullmatch(name)} - NOT_OF_AVX


def too_new(modules: list[Path]) -> dict[str, set[str]]:
    """Functions that no loader chooses -> their instructions that x86-64-v2 lacks; those without any are left out."""
    return {
        f"{module.name}: {name}": found
        for module in modules
        for name, instructions in functions(module).items()
        if not CHOSEN.search(name) and (found := newer(instructions))
    }


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).rglob("*.so"))
    wrong = too_new(files)
    for name, found in wrong.items():
        print(f"{name} has instructions that x86-64-v2 lacks: {' '.join(sorted(found))}", file=sys.stderr)
    if not files:
        print(f"{sys.argv[1]} has no compiled modules", file=sys.stderr)
    sys.exit(bool(wrong) or not files)
