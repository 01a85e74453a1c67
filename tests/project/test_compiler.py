"""`make compiler` on machines without a C compiler or Python's headers: what it installs, and what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEV = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
# Installed packages bring what they are installed for; those that apt-get does not know leave everything as it was.
APT_GET = """#!/bin/bash
echo "apt-get $*" >>{calls}
[[ {works} == yes && " $* " == *" install "* ]] || exit {works_not}
[[ " $* " != *" gcc "* ]] || {{ echo >{bin}/test-cc; {chmod} +x {bin}/test-cc; }}
[[ " $* " != *" {dev} "* ]] || echo >{headers}/Python.h
"""
SUDO = '#!/bin/bash\necho sudo >>{calls}\n"$@"\n'
ID = "#!/bin/bash\necho {uid}\n"
# Python asks its own build which compiler it had and where its headers are: here, those of the machine of the test.
SITE = """
import sysconfig

sysconfig.get_config_var = {{"CC": "test-cc -pthread"}}.get
sysconfig.get_path = {{"include": {headers!r}}}.get
"""


class Machine:
    """A folder of programs, the only ones on the path, and a folder for headers."""

    def __init__(self, folder: Path, uid: int, works: bool):
        self.bin, self.headers, self.site, self.calls = (folder / name for name in ("bin", "include", "site", "calls"))
        for each in (self.bin, self.headers, self.site):
            each.mkdir()
        self.names = {"bin": self.bin, "headers": self.headers, "calls": self.calls, "dev": DEV, "uid": uid}
        self.names |= {"works": "yes" if works else "no", "works_not": 0 if works else 100}
        self.names["chmod"] = shutil.which("chmod")
        (self.site / "sitecustomize.py").write_text(SITE.format(headers=str(self.headers)))
        self.program("id", ID)

    def program(self, name: str, text: str = "") -> None:
        (self.bin / name).write_text(text.format(**self.names))
        (self.bin / name).chmod(0o755)

    def make(self, **variables: str) -> tuple[int, str, str, list[str]]:
        """(status, what was printed, errors, calls of apt-get and sudo) of `make compiler`."""
        command = [shutil.which("make"), "--no-print-directory", "compiler", f"PYTHON={sys.executable}"]
        env = {"PATH": str(self.bin), "PYTHONPATH": str(self.site), **variables}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return done.returncode, done.stdout, done.stderr, calls


def machine(folder: Path, has: str, uid: int = 0, works: bool = True) -> Machine:
    """A machine that has some of: compiler, headers, apt-get, sudo."""
    made = Machine(folder, uid, works)
    for name, program, text in [("compiler", "test-cc", ""), ("apt-get", "apt-get", APT_GET), ("sudo", "sudo", SUDO)]:
        if name in has.split():
            made.program(program, text)
    if "headers" in has.split():
        (made.headers / "Python.h").touch()
    return made


def test_where_nothing_is_missing_nothing_is_installed(tmp_path):
    assert machine(tmp_path, "compiler headers apt-get sudo").make() == (0, "", "", [])


@pytest.mark.parametrize(
    ("has", "missing"),
    [("apt-get", f"gcc libc6-dev {DEV}"), ("apt-get headers", "gcc libc6-dev"), ("apt-get compiler", DEV)],
)
@pytest.mark.parametrize(("uid", "sudo"), [(0, []), (1000, ["sudo"])])
def test_what_is_missing_is_installed_with_apt(tmp_path, has, missing, uid, sudo):
    status, printed, errors, calls = machine(tmp_path, f"{has} sudo", uid).make()
    assert (status, printed) == (0, f"dps compiles its core: installing {missing}\n"), errors
    install = f"apt-get -qq install --yes --no-install-recommends {missing}"
    assert calls == [*sudo, "apt-get -qq update", *sudo, install]


@pytest.mark.parametrize(
    ("has", "uid", "works", "tried"),
    [("", 0, True, False), ("sudo", 1000, True, False), ("apt-get", 1000, True, False), ("apt-get", 0, False, True)],
    ids=["no apt-get", "no apt-get, no root", "no root, no sudo", "an apt-get that fails"],
)
def test_where_apt_does_not_help_the_message_says_what_is_missing(tmp_path, has, uid, works, tried):
    there = machine(tmp_path, has, uid, works)
    status, _, errors, calls = there.make()
    assert (status, bool(calls)) == (2, tried)
    assert f"dps compiles its core with test-cc and {there.headers}/Python.h, and one of them is missing." in errors
    assert f"Install a C compiler and the headers of {sys.executable}, then repeat." in errors
    assert f"On Debian: gcc libc6-dev {DEV}" in errors


def test_a_compiler_that_was_chosen_is_not_replaced(tmp_path):
    status, _, errors, calls = machine(tmp_path, "compiler headers apt-get").make(CC="my-cc -O2")
    assert (status, calls) == (2, [])
    assert "dps compiles its core with my-cc and" in errors


def test_each_target_that_compiles_asks_for_the_compiler_first():
    """At an environment that is there nothing is installed, and at one that is not, before packages are fetched."""
    rules = [line for line in (ROOT / "Makefile").read_text().splitlines() if "$(CORE)" in line and ": " in line]
    assert len(rules) == 3
    assert not [rule for rule in rules if not rule.endswith("| compiler")]
