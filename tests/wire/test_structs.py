"""Structs are read when they are imported, because two threads that decode one at first crash msgspec."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest

import dps

ENGINE = pathlib.Path(dps.__file__).parent / "engine"
CALL = "read_annotations(globals())"
MODULES = [
    path
    for path in sorted(ENGINE.rglob("*.py"))
    if "(msgspec.Struct" in path.read_text() or "Status, frozen=True)" in path.read_text()
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_with_structs_have_them_read(path):
    assert path.read_text().rstrip().endswith(CALL), f"{path} has structs, and does not end with {CALL}"
    module = importlib.import_module(".".join(["dps", "engine", *path.relative_to(ENGINE).with_suffix("").parts]))
    assert any(isinstance(each, type) and issubclass(each, msgspec.Struct) for each in vars(module).values())


RACE = """
import random, sys, threading, time
import msgspec
if sys.argv[1] == "wrong":  # as if no module had its structs read
    msgspec.msgpack.Decoder = lambda kind: None
from dps.engine.dashboard.notebook import NotebookStatus

sys.setswitchinterval(1e-5)
data = msgspec.msgpack.encode({"parameter_server": "x", "servers": [{}], "tables": {"a": {}}, "runs": [{}]})

def decode(seconds):
    time.sleep(seconds)
    try:
        msgspec.msgpack.decode(data, type=NotebookStatus)
    except msgspec.ValidationError:
        pass

threads = [threading.Thread(target=decode, args=(0.002 * random.random(),)) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def race(variant: str) -> int:
    """The exit code of a process in which six threads decode a status at once, which none has done before."""
    command = [sys.executable, "-c", RACE, variant]
    return subprocess.run(
        command, cwd=ENGINE.parent.parent, env=os.environ, capture_output=True, check=False
    ).returncode


def test_threads_that_decode_the_first_message_at_once_do_not_crash():
    assert [race("right") for _ in range(3)] == [0, 0, 0]


@pytest.mark.thorough
def test_without_that_they_crash():
    if any(race("wrong") for _ in range(20)):
        return
    pytest.skip("this version of msgspec does not crash")
