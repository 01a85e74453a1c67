"""Figures of the package's structure: `make house` prints them, so that a change can be compared with what was before.

Imports for type checkers count as arrows here, because a reader has to follow them, too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dps"
ENGINE = "dps.engine"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of all lines of docstrings."""
    nodes = [node.body[0] for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(text: str) -> set[int]:
    """The numbers of all lines that have more than a comment."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in blank]
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def anys(tree: ast.Module) -> int:
    """How often the type Any is used."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of modules, or of what they define, that a module imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """The room of the engine that a name is in."""
    parts = name.split(".")
    return parts[2] if name.startswith(f"{ENGINE}.") else None


def is_circle_free(arrows: set[tuple[str, str]]) -> bool:
    graph: dict[str, set[str]] = {}
    for a, b in arrows:
        graph.setdefault(a, set()).add(b)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def circles(trees: dict[str, ast.Module]) -> int:
    """Rooms of the engine in which files import each other in a circle."""
    inner: dict[str, set[tuple[str, str]]] = {}
    for module, tree in trees.items():
        own = room(module)
        for name in imported(tree):
            target = name if name in trees else name.rpartition(".")[0]
            if own and room(target) == own and target in trees and target != module:
                inner.setdefault(own, set()).add((module, target))
    return sum(not is_circle_free(arrows) for arrows in inner.values())


def figures() -> dict[str, int]:
    """Each figure by its name."""
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {module_of(file): ast.parse(file.read_text()) for file in files}
    docs = {module: docstring_lines(tree) for module, tree in trees.items()}
    code = {module_of(file): code_lines(file.read_text()) for file in files}
    arrows = {(room(module), room(name)) for module, tree in trees.items() for name in imported(tree)}
    between = {(str(a), str(b)) for a, b in arrows if a and b and a != b}
    top = [path for path in PACKAGE.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("__py")]
    compiled = [path for end in ("pyx", "pxd", "h") for path in PACKAGE.rglob(f"*.{end}")]
    return {
        "names at the top of dps/": sum(path.name != "py.typed" for path in top),
        "files of Python": len(files),
        "lines of code": sum(len(code[module] - docs[module]) for module in trees),
        "lines of docstrings": sum(map(len, docs.values())),
        "lines of Cython and C": sum(len(path.read_text().splitlines()) for path in compiled),
        "arrows between rooms of the engine": len(between),
        "circles of rooms": int(not is_circle_free(between)),
        "rooms with circles of files": circles(trees),
        "uses of Any": sum(map(anys, trees.values())),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{value:8,}  {name}", file=sys.stdout)
