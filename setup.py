"""Compile the loops of dps. Everything else about the package stands in setup.cfg."""

import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

import Cython
import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Floating point is exact and the same on every processor: no contraction to fused multiply-adds, no reordering. The
# second flag lets square roots be vectorised, because nothing reads errno. The last one silences a note on vectors that
# are parameters, because functions with such parameters are inlined.
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]
FOLDERS = [
    Path("dps/engine/core"),
    Path("dps/engine/core/requests"),
    Path("dps/engine/core/shards"),
    Path("dps/kernels/loops"),
]
BUILDS = {  # by the environment variable DPS_BUILD
    "release": ["-O3", "-g0", *EXACT],
    "sanitized": ["-O1", *SANITIZERS, *EXACT],  # see `make sanitize`
    "quick": ["-O0", "-g0", *EXACT],  # for the wrong variants of the tests
}
NO_COMPILER = """
dps could not compile its loops (dps/engine/core and dps/kernels/loops), because the C compiler {compiler!r} {problem}.
Install a C compiler and the headers of Python, then repeat:
    Debian, Ubuntu     apt-get install gcc python3-dev
    Fedora, RHEL       dnf install gcc python3-devel
    conda              conda install c-compiler
    macOS              xcode-select --install
A wheel needs no compiler: `make wheel` makes one, on a machine that has one.
"""


class BuildCore(build_ext):
    """Compile the modules of the core side by side; say what to install where that fails."""

    def initialize_options(self):
        super().initialize_options()
        self.parallel = os.cpu_count()

    def build_extensions(self):
        compiler = self.compiler.compiler[0]
        if shutil.which(compiler) is None:
            sys.exit(NO_COMPILER.format(compiler=compiler, problem="is not on this machine"))
        translate(self.extensions)
        try:
            super().build_extensions()
        except Exception as error:
            sys.exit(f"{error}\n{NO_COMPILER.format(compiler=compiler, problem='failed; its messages stand above')}")


def headers(source):
    """The headers (.h) that a module is compiled with. Cython itself knows its declarations (.pxd)."""
    found = set()
    waiting = [source, source.with_suffix(".pxd")]
    while waiting:
        text = file.read_text() if (file := waiting.pop()).exists() else ""
        declared = re.findall(r"^from (dps\.[\w.]+) cimport", text, re.M)
        included = re.findall(r'^(?:#include|cdef extern from) "(\w+\.h)"', text, re.M)
        new = {Path(*name.split(".")).with_suffix(".pxd") for name in declared}
        new |= {folder / name for name in included for folder in FOLDERS if (folder / name).exists()}
        waiting += new - found
        found |= new
    return sorted(str(file) for file in found if file.suffix == ".h")


def extensions():
    flags = BUILDS[os.environ.get("DPS_BUILD", "release")]
    return [
        Extension(
            ".".join(source.with_suffix("").parts),
            [str(source)],
            depends=["setup.py", *headers(source)],  # which has the flags
            include_dirs=[np.get_include(), *map(str, FOLDERS)],
            define_macros=[
                ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
                ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
            ],
            extra_compile_args=flags,
            extra_link_args=[flag for flag in flags if flag.startswith("-fsanitize")],
        )
        for folder in FOLDERS
        for source in sorted(folder.glob("*.pyx"))
    ]


def translate(modules):
    """Let the sources of modules be the C that Cython makes of them.

    It takes half a minute, and only compiling needs it: a source distribution and the metadata do without.
    """
    made = cythonize(
        modules,
        # Cython translates side by side in processes. Where these are not forked, each would run this file again.
        nthreads=os.cpu_count() if multiprocessing.get_start_method() == "fork" else 0,
        # Several environments may share this folder, and C made of one numpy's declarations needs that numpy's headers.
        build_dir=f"build/cython-{Cython.__version__}-numpy-{np.__version__}",
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "embedsignature": True,
        },
    )
    sources = {module.name: module.sources for module in made}
    for module in modules:
        module.sources = sources[module.name]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCore})
