"""Sessions of a shell in the documentation: run them, compare, or write anew what they print.

A block of the language ``console`` is run line by line, all blocks of a page in one shell: ``$ `` begins a command,
``> `` goes on with it, and what follows is what it prints. ``python tests/helpers/transcripts.py docs/dask.md`` writes
that into the page.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

PORTS = ("8786", "8787")  # in the text; free ones are taken instead
CHANGING_COMMANDS = re.compile(
    r"dask ps (status|clocks|tables)\b"
)  # what it says changes by itself: asked until it is as written
PATIENCE = 100.0  # a limit for a broken product, not a measurement
SETTLED = 5.0  # seconds after which it is written anew


class Step(NamedTuple):
    """A command and what it printed."""

    line: int
    command: str
    output: list[str]


def steps(text: str) -> list[Step]:
    """Those of a page."""
    parsed: list[Step] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith("$ "):
            parsed.append(Step(number, line[2:], []))
        elif inside and line.startswith(">") and not parsed[-1].output:
            parsed[-1] = parsed[-1]._replace(command=f"{parsed[-1].command}\n{line[2:]}")
        elif inside:
            parsed[-1].output.append(line)
    return parsed


# What bash says of a process that was killed, and dps of workers that take long to come up.
BY_CHANCE = re.compile(r"^bash: line |: waiting up to .* \(dps\.timeouts\.start\) for ")


def alike(line: str) -> str:
    """A line without what differs from time to time: addresses, sizes, times; and in tables all numbers.

    >>> alike("server 0 in tcp://127.0.0.1:4711: 3 rows, 1.25 kiB, 0.1 s")
    'server N in ADDRESS: 3 rows, SIZE, NUMBER s'
    >>> alike("     0  tcp://127.0.0.1:35685  up  1,028") == alike("  1   tcp://127.0.0.1:1  up   7")
    True
    """
    line = re.sub(r"(tcp|tls)://[\d.:]+\d", "ADDRESS", line.rstrip())
    line = re.sub(r"[\d.,]+ ([kMG]i)?B\b", "SIZE", line)
    line = re.sub(r"\b\d{6}-[0-9a-f]{6}\b", "NAME", line)
    line = re.sub(r"\d+\.\d+", "NUMBER", line)
    line = re.sub(r"\bserver \d+", "server N", line)
    if "  " in line:
        line = re.sub(r"\s+", " ", re.sub(r"[\d,]+", "N", line))
    return line.strip()


class Bash:
    """A shell in a folder, with the programs of this Python in its path. All it started ends with it."""

    def __init__(self, folder: Path):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        env["DASK_DPS__TIMEOUTS__CONNECT"] = "60 s"  # a busy machine takes long to start a scheduler
        self.process = subprocess.Popen(
            ["bash", "--norc"], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Bash:
        return self

    def __exit__(self, *exc: object) -> None:
        for end in (signal.SIGTERM, signal.SIGKILL):  # Dask's workers may wait long for a scheduler that ends as well
            until = time.monotonic() + 5
            while self._alive() and time.monotonic() < until:
                os.killpg(self.process.pid, end)
                self.process.poll()
                time.sleep(0.1)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def run(self, command: str) -> list[str]:
        """What a command prints."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        limit = threading.Timer(PATIENCE, os.killpg, (self.process.pid, signal.SIGKILL))
        limit.start()
        try:
            self.process.stdin.write(f"{command}\necho; echo =END=\n")
            self.process.stdin.flush()
            lines: list[str] = []
            for line in self.process.stdout:
                if line == "=END=\n":
                    break
                if not BY_CHANCE.search(line):
                    lines.append(line.rstrip("\n"))
            else:
                raise AssertionError(f"{command!r} took more than {PATIENCE:g} s\n" + "\n".join(lines))
        finally:
            limit.cancel()
            limit.join()
        return lines[:-1] if lines[-1] == "" else lines


def play(text: str, folder: Path, patience: float = PATIENCE) -> list[tuple[Step, list[str]]]:
    """Each step of a page, with what it prints now, or within `patience` if that changes by itself."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    played = []
    with Bash(folder) as bash:
        for step in steps(text):
            until = time.monotonic() + patience
            while True:
                output = [swap(line, {b: a for a, b in ports.items()}) for line in bash.run(swap(step.command, ports))]
                same = list(map(alike, output)) == list(map(alike, step.output))
                if same or not CHANGING_COMMANDS.match(step.command) or time.monotonic() > until:
                    break
            played.append((step, output))
    return played


def swap(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


def free_ports(count: int) -> list[str]:
    """Whether the port is free at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main(page: Path, folder: Path) -> None:
    """Write into the page what its commands print."""
    lines = page.read_text().splitlines()
    for step, output in reversed(play("\n".join(lines), folder, SETTLED)):
        after = step.line + step.command.count("\n")
        lines[after : after + len(step.output)] = output
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    import tempfile

    main(Path(sys.argv[1]), Path(tempfile.mkdtemp()))
