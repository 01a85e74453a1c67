"""No byte of a data connection is unpickled: every place that unpickles is known, with where its bytes come from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dps").rglob("*.py"))

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "distributed.protocol.pickle"}
OPENING = {"load", "loads", "Unpickler", "open"}

ALLOWED = {  # file: where its pickles come from
    "engine/daskapi/refusals.py": "the scheduler's answer to a driver, through Dask, which unpickles itself",
    "engine/controller/actors.py": "the answer of a worker to the scheduler, through Dask, which unpickles itself",
    "engine/functions/definition.py": "a function of the user, which the driver sends through Dask's scheduler",
    "engine/state/user_code.py": "a class or function of the user in a table's definition, of which Dask runs more",
    "engine/training/partition_peer.py": "partitions of trainers of one run, which alone know its secret",
    "engine/training/spark.py": "results of Spark's tasks and pieces that Spark has shuffled, which Spark brings",
    "engine/training/spark_tasks.py": "an error that this process has pickled itself, to see whether a driver could",
}


def unpickling(tree: ast.AST):
    """(line, source) of each use of what opens a pickle, called or passed on."""
    modules, names = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names if each.name in PICKLES}
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if node.module in PICKLES and each.name in OPENING:
                    names[each.asname or each.name] = node.module
                elif f"{node.module}.{each.name}" in PICKLES:
                    modules[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OPENING and ast.unparse(node.value) in modules:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            yield from [] if any(each.arg == "allow_pickle" for each in node.keywords) else [(node.lineno, "np.load")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_only_known_places_unpickle(file):
    places = list(unpickling(ast.parse(file.read_text())))
    known = file.relative_to(ROOT / "dps").as_posix() in ALLOWED
    assert bool(places) == known, (
        f"{places}: send plain values (dps/engine/wire/values.py), or say where the bytes come from"
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import pickle\npickle.loads(b'')\npickle.dumps(1)", 1),
        ("import cloudpickle as c\nx = c.loads", 1),
        ("from distributed.protocol.pickle import loads as opened\nmap(opened, [])", 1),
        ("from distributed.protocol import pickle\npickle.loads(b'')", 1),
        ("import pickle\nclass C(pickle.Unpickler): pass", 1),
        ("np.load(f)\nnp.load(f, allow_pickle=True)\nnp.load(f, allow_pickle=False)", 2),
        ("import json\njson.loads('')\nfile.load()", 0),
    ],
)
def test_what_counts_as_unpickling(source, count):
    assert len(list(unpickling(ast.parse(source)))) == count
