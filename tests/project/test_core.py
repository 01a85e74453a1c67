"""The sources of the compiled core: what test_style and test_words ask of Python, and stubs that say what there is."""

from __future__ import annotations

import ast
import re

import pytest
from compiled import FILES, ROOT, full_name
from cython_sources import (
    INTEGERS,
    Parameter,
    attributes,
    blocks,
    constants,
    fits,
    prose,
    python_type,
    signature,
    stub_signature,
)
from rules import each
from test_style import LINES_OF_FILE, LINES_OF_FUNCTION
from test_words import nounless, repeats_name

from dps.engine.wire import frames

MODULES = {path.stem: path for path in sorted(FILES.values()) if path.suffix == ".pyx"}
SOURCES = {path.name: path for path in sorted(FILES.values())}

each_module, each_source = each(MODULES), each(SOURCES)


# ---- stubs ----------------------------------------------------------------------------------------------------------


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class of a stub only says what arguments have to be, so that the module has no such class."""
    return any(ast.unparse(base) == "Protocol" for base in node.bases)


def differences(source: str, stub: str, declarations: str = "") -> list[str]:
    """What a stub (.pyi) says otherwise than the module (.pyx, .pxd), name by name."""
    tree = ast.parse(stub)
    stated = {("", node.name): node for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    texts = [f"constant {name}" for name in names ^ constants(source)]
    classes = {block.name for block in blocks(source) if block.kind == "cdef class"}
    classes |= set(re.findall(r"^class (\w+)", source, re.M))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and is_protocol(node))]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            stated |= {(node.name, n.name): n for n in node.body if isinstance(n, ast.FunctionDef)}
            fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
            there = attributes(source, node.name) | attributes(declarations, node.name)
            texts += [f"attribute {node.name}.{name}" for name in fields ^ there]
    texts += [f"class {name}" for name in classes ^ {n.name for n in tree.body if isinstance(n, ast.ClassDef)}]
    compiled = {}
    for block in blocks(source):
        name = {"__cinit__": "__init__"}.get(block.name, block.name)
        special = name.startswith("__") and name != "__dealloc__"
        if block.public or (block.kind == "def" and special):
            compiled[block.owner, name] = signature(block.header)
    texts += [f"function {'.'.join(filter(None, name))}" for name in compiled.keys() ^ stated.keys()]
    for name in compiled.keys() & stated.keys():
        (wanted, returned), (given, answer) = compiled[name], stub_signature(stated[name])
        same = [(p.name, p.optional) for p in wanted] == [(p.name, p.optional) for p in given]
        if not same or not all(fits(a.annotation, b.annotation) for a, b in zip(wanted, given, strict=True)):
            texts.append(f"parameters of {name[1]}")
        if not fits(returned, answer) or not answer:
            texts.append(f"what {name[1]} returns")
    return sorted(texts)


@each_module
def test_a_stub_says_what_the_module_has(module):
    stub = MODULES[module].with_suffix(".pyi")
    declarations = MODULES[module].with_suffix(".pxd")
    text = declarations.read_text() if declarations.exists() else ""
    stated = stub.read_text() if stub.exists() else ""  # a module that Python cannot call needs none
    assert differences(MODULES[module].read_text(), stated, text) == []


def test_every_stub_has_its_module():
    stubs = (ROOT / "dps").rglob("*.pyi")
    assert {path.with_suffix(".pyx") for path in stubs} <= set(MODULES.values())


def test_each_compiled_source_has_a_name_of_its_own():
    """Tests call a source by its name alone, and so do headers that include another."""
    found = [path for end in ("pyx", "pxd", "h") for path in (ROOT / "dps").rglob(f"*.{end}")]
    assert sorted(found) == sorted(FILES.values())


PYX = '''
A, B = 1, 2

def add(cnp.ndarray keys not None, int64_t count, cnp.ndarray order, double by=0.5) -> int:
    """Add."""

cdef int hidden(int x) noexcept nogil:
    return x

cdef class Index:
    """An index."""
    cdef readonly int64_t count, moved
    cdef int64_t *_rows

    def __cinit__(self, int bits=0):
        pass

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return 0

    def find(
        self,
        tuple keys not None,
    ):
        """Find."""
'''
PYI = """
A: int
B: int
def add(keys: np.ndarray, count: int, order: np.ndarray | None, by: float = ...) -> int: ...
class Index:
    count: int
    moved: int
    def __init__(self, bits: int = 0) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def find(self, keys: tuple[np.ndarray, ...]) -> np.ndarray: ...
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("B: int", "C: int", ["constant B", "constant C"]),
        ("def add(", "def append(", ["function add", "function append"]),
        ("count: int, order", "counts: int, order", ["parameters of add"]),
        ("count: int, order", "count: float, order", ["parameters of add"]),
        ("np.ndarray | None", "np.ndarray", ["parameters of add"]),
        ("by: float = ...", "by: float", ["parameters of add"]),
        (", by: float = ...", "", ["parameters of add"]),
        ("= ...) -> int", "= ...) -> float", ["what add returns"]),
        ("    moved: int\n", "", ["attribute Index.moved"]),
        ("class Index", "class Indices", ["class Index", "class Indices"]),
        ("def nbytes", "def size", ["function Index.nbytes", "function Index.size"]),
        ("tuple[np.ndarray, ...]", "list[np.ndarray]", ["parameters of find"]),
        ("bits: int = 0", "bits: int", ["parameters of __init__"]),
    ],
)
def test_the_rule_for_stubs_itself(old, new, found):
    assert old in PYI
    assert set(found) <= set(differences(PYX, PYI.replace(old, new, 1)))
    assert bool(found) == bool(differences(PYX, PYI.replace(old, new, 1)))


def test_how_signatures_are_read():
    header = "def f(cnp.ndarray a not None, b, bint c=False, cnp.ndarray d not None=_ALL) -> tuple[int, int]:"
    assert signature(header) == (
        [
            Parameter("a", "np.ndarray", False),
            Parameter("b", None, False),
            Parameter("c", "bool", True),
            Parameter("d", "np.ndarray", True),
        ],
        "tuple[int, int]",
    )
    assert python_type("const uint64_t", never_none=False) == "int"
    assert {"uint8_t", "int64_t"} <= INTEGERS


# ---- sanitizers -----------------------------------------------------------------------------------------------------


def test_make_sanitize_runs_tests_of_each_module():
    """A test that runs there names the module, a wrong variant of it, or a module that calls it."""
    stated = re.search(r"^SANITIZER_TESTS = (.*)", (ROOT / "Makefile").read_text(), re.M)[1]
    files = {file for name in re.findall(r"tests/\S+", stated) for file in [ROOT / name, *(ROOT / name).glob("*.py")]}
    files |= {file for file in ROOT.glob("tests/*/test_*.py") if "\nfrom compiled import" in file.read_text()}
    text = "\n".join(file.read_text() for file in files if file.is_file())
    tested = {
        name for name in MODULES if re.search(rf'\b{re.escape(full_name(name))}\b|"{name}(\.pyx|\.pxd|\.h)?"', text)
    }
    sources = {
        name: "".join(file.read_text() for file in path.parent.glob(f"{name}.p*")) for name, path in MODULES.items()
    }
    calls = {name: set(re.findall(r"^from dps\.[\w.]*\.(\w+) c?import", sources[name], re.M)) for name in MODULES}
    while called := {callee for name in tested for callee in calls[name] & MODULES.keys()} - tested:
        tested |= called
    assert sorted(MODULES.keys() - tested) == []


# ---- shape ----------------------------------------------------------------------------------------------------------


@each_module
def test_every_function_is_documented(module):
    text = MODULES[module].read_text()
    assert text.startswith('"""')
    found = [block for block in blocks(text) if block.public or block.kind == "cdef class"]
    assert not [f"{block.line}: {block.name}" for block in found if not (block.docstring or "").strip()]
    repeated = [f"{block.line}: {block.name}" for block in found if repeats_name(block.name, block.docstring)]
    assert not repeated, "say what it is, its unit, why it exists"


@each_source
def test_sources_are_short(source):
    lines = SOURCES[source].read_text().split("\n")
    assert not [n for n, line in enumerate(lines, 1) if len(line) > 120 or line != line.rstrip() or "\t" in line]
    text = re.sub(r'"""(.*?)"""', "", "\n".join(lines), flags=re.S)
    assert text.count("\n") <= LINES_OF_FILE
    if source.endswith(".h"):
        functions = [(m[0].split("(")[0], m[0].count("\n") + 1) for m in re.finditer(r"^\w.*?^\}", text, re.M | re.S)]
    else:
        functions = [(block.name, block.lines) for block in blocks("\n".join(lines)) if block.kind != "cdef class"]
    assert not [(name, length) for name, length in functions if length > LINES_OF_FUNCTION]


@each_source
def test_headers_say_what_they_are_for(source):
    if source.endswith(".h"):
        assert SOURCES[source].read_text().startswith("/* ")


@each_source
def test_parties_are_named_in_comments(source):
    lines = [(n, re.sub(r"``.*?``|`.*?`|\".*?\"", "", line)) for n, line in prose(SOURCES[source].read_text())]
    assert not [f"{n}: {line.strip()}" for n, line in lines if nounless(line)], "say which party, by its noun"


def test_how_sources_are_read():
    found = {block.name: block for block in blocks(PYX)}
    assert list(found) == ["add", "hidden", "Index", "__cinit__", "nbytes", "find"]
    assert [block.owner for block in found.values()] == ["", "", "", "Index", "Index", "Index"]
    assert [found[name].docstring for name in ("add", "hidden", "Index", "find")] == [
        "Add.",
        None,
        "An index.",
        "Find.",
    ]
    assert found["hidden"].lines == 2
    assert found["find"].line == 23
    text = 'x = "#no"  # who waits\n"""One\nline."""\n/* of C */'
    assert prose(text) == [(1, "who waits"), (2, "One"), (3, "line."), (4, " of C ")]


def test_the_core_and_python_mean_the_same_frames():
    named = dict(re.findall(r"^    ([A-Z_]+) = (\w+)$", SOURCES["frame.pxd"].read_text(), re.M))
    python = {**vars(frames), "HEADER": frames.HEADER_SIZE}
    assert len(named) > 10
    assert {name: int(value, 0) for name, value in named.items()} == {name: python[name] for name in named}
