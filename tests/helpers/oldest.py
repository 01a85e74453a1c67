"""The oldest releases that setup.cfg allows, as lines for pip: `make test-oldest` runs the tests with exactly these.

``python tests/helpers/oldest.py`` prints them for the extra ``test``, which brings all that users install but Spark.
It needs nothing but Python, because it runs before anything is installed.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SETUP = Path(__file__).parents[2] / "setup.cfg"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,]+)\])?(?:[>=]=(?P<version>[\w.]+))?(?: *;.*)?")


def requirements(extras: Iterable[str], setup: Path = SETUP) -> Iterator[re.Match[str]]:
    """What dps itself and these extras ask for, with what the extras of dps stand for in place of ``dps[...]``."""
    config = configparser.ConfigParser()
    config.read(setup)
    yield from _expand(config["options"]["install_requires"], config)
    for extra in extras:
        yield from _expand(config["options.extras_require"][extra], config)


def _expand(text: str, config: configparser.ConfigParser) -> Iterator[re.Match[str]]:
    for line in filter(None, map(str.strip, text.splitlines())):
        match = REQUIREMENT.fullmatch(line)
        if match is None:
            raise ValueError(f"setup.cfg: cannot read the requirement {line!r}")
        if match["name"] == "dps":
            for extra in match["extras"].split(","):
                yield from _expand(config["options.extras_require"][extra], config)
        else:
            yield match


def bounds(extras: Iterable[str], setup: Path = SETUP) -> dict[str, str]:
    """Name of each package -> the lowest version that is allowed.

    Raises
    ------
    ValueError
        A package has no lower bound, or two extras say two different ones.
    """
    versions: dict[str, str] = {}
    for match in requirements(extras, setup):
        name, version = match["name"], match["version"]
        if version is None:
            raise ValueError(f"setup.cfg: {name} has no lower bound")
        if versions.setdefault(name, version) != version:
            raise ValueError(f"setup.cfg: {name} has two lower bounds, {versions[name]} and {version}")
    return versions


def oldest(extras: Iterable[str], setup: Path = SETUP) -> list[str]:
    """The same requirements, each at its lower bound: ``numpy>=2.1`` as ``numpy==2.1``."""
    lines = {m[0].replace(">=", "==", 1) for m in requirements(extras, setup)}
    return sorted(lines)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["test"]
    bounds(chosen)
    print("\n".join(oldest(chosen)))
