"""A process that compiles wrong variants, one after the other, each in a fork.

It has imported setuptools, numpy and Cython once, because that takes longer than to translate and to compile a module.
Each line that it reads names a folder with a setup.py. It answers with the status of the build, whose output is in the
file `output` of that folder.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

__all__: list[str] = []


def warm_up() -> None:
    """Import all that a build needs. Cython imports most of itself when it translates something."""
    import numpy as np  # noqa: F401
    import setuptools  # noqa: F401
    from Cython.Build import cythonize

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "nothing.pyx").write_text("cdef class Nothing:\n    def do(self, int x):\n        return x + 1\n")
        cythonize([f"{folder}/nothing.pyx"], build_dir=folder, language_level=3, quiet=True)


def build() -> None:
    """Run the setup.py of this folder as `python setup.py` would; SystemExit says whether it worked."""
    sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
    runpy.run_path("setup.py", run_name="__main__")


def fork(folder: str) -> int:
    """The status of a build in a folder."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        build()
        status = 0
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # because whatever a build prints is no answer
    warm_up()
    for line in sys.stdin:
        print(fork(line.rstrip("\n")), file=answers, flush=True)
