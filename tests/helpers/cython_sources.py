"""What stands in the sources of the compiled core: their functions, signatures and prose, without compiling them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

DOCSTRING = re.compile(r'"""(.*?)"""', re.S)
HEADER = re.compile(r"^(?P<indent> *)(?P<kind>cdef class|cdef|cpdef|def) (?P<rest>[^\n]*)", re.M)
INTEGERS = {"int", "long", "bint", "size_t", "Py_ssize_t"}
INTEGERS |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class Block:
    """A function or a class: its header (up to the colon), the lines below it, and the class that it stands in."""

    kind: str  # def, cpdef, cdef or cdef class
    name: str
    header: str
    line: int
    body: list[str]
    owner: str

    @property
    def public(self) -> bool:
        return self.kind in {"def", "cpdef"} and not self.name.startswith("_")

    @property
    def docstring(self) -> str | None:
        match = DOCSTRING.match("\n".join(self.body).lstrip())
        return match and match[1]

    @property
    def lines(self) -> int:
        """Its length without the docstring."""
        return len(self.header.split("\n")) + len(DOCSTRING.sub("", "\n".join(self.body), count=1).rstrip().split("\n"))


def blocks(text: str) -> Iterator[Block]:
    """The functions and classes of a .pyx file. A declaration without a body is none."""
    owner = ""
    for match in HEADER.finditer(text):
        indent = len(match["indent"])
        if not indent:
            owner = ""
        header, rest = _header(text, match.start())
        if not header.rstrip().endswith(":"):
            continue
        named = re.search(r"class (\w+)" if match["kind"] == "cdef class" else r"(\w+)\s*\(", header)
        if named is None:  # cdef extern from, cdef packed struct
            continue
        body = _indented(rest, indent)
        yield Block(match["kind"], named[1], header, text.count("\n", 0, match.start()) + 1, body, owner)
        if match["kind"] == "cdef class":
            owner = named[1]


def _header(text: str, start: int) -> tuple[str, str]:
    """(text up to the end of the line on which all brackets are closed, what comes after it)."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] in "([") - (text[end] in ")]")
        if text[end] == "\n" and depth == 0:
            return re.sub(r"  #.*", "", text[start:end]), text[end + 1 :]
    return text[start:], ""


def _indented(text: str, indent: int) -> list[str]:
    lines = []
    for line in text.split("\n"):
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        lines.append(line)
    return lines


def python_type(declared: str, *, never_none: bool) -> str | None:
    """The annotation that a C type has in a stub, or None for one that the stub may choose."""
    name = declared.split(".")[-1].split()[-1] if declared.split() else "object"
    if name == "ndarray":
        return "np.ndarray" if never_none else "np.ndarray | None"
    if name in INTEGERS:
        return "bool" if name == "bint" else "int"
    if name in {"float", "double"}:
        return "float"
    if name in {"tuple", "list", "dict", "bytes", "str"}:
        return name if never_none else f"{name} | None"
    return None


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: str | None
    optional: bool


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [" ".join(part.split()) for part in parts if part.strip()]


def signature(header: str) -> tuple[list[Parameter], str | None]:
    """(parameters but `self`, annotation of what is returned) of the header of a `def`."""
    inside, _, after = header[header.index("(") + 1 :].rpartition(")")
    if "->" in header:
        inside, _, after = header[header.index("(") + 1 :].rpartition("->")
        inside = inside.strip().removesuffix(")")
    found = []
    for part in _split(inside):
        declared, _, default = part.partition("=")
        never_none = declared.strip().endswith("not None")
        declared = re.sub(r"(const )?\w+\[::1\]", "object", declared.strip().removesuffix("not None").strip())
        if ":" in declared:
            name, _, annotation = (piece.strip() for piece in declared.partition(":"))
        else:
            kind, _, name = declared.rpartition(" ")
            annotation = python_type(kind, never_none=never_none)
        if name not in {"self", "cls"} and not name.startswith("*"):
            found.append(Parameter(name, annotation, bool(default)))
    returned = after.strip().rstrip(":").strip() if "->" in header else None
    return found, returned


def stub_signature(node: ast.FunctionDef) -> tuple[list[Parameter], str]:
    arguments = [*node.args.posonlyargs, *node.args.args]
    first_default = len(arguments) - len(node.args.defaults)
    found = [
        Parameter(argument.arg, ast.unparse(argument.annotation) if argument.annotation else None, n >= first_default)
        for n, argument in enumerate(arguments)
        if argument.arg not in {"self", "cls"}
    ]
    return found, ast.unparse(node.returns) if node.returns else ""


def fits(declared: str | None, annotation: str | None) -> bool:
    """Whether an annotation of a stub says the same as the C type; `tuple` may be said in more detail."""
    return declared is None or annotation is None or annotation == declared or annotation.startswith(f"{declared}[")


def attributes(text: str, owner: str) -> set[str]:
    """Names of the C attributes of a class that Python sees: `cdef readonly` and `cdef public`."""
    found: set[str] = set()
    for block in blocks(text):
        if block.kind == "cdef class" and block.name == owner:
            for line in block.body:
                match = re.match(r"\s+cdef (?:readonly|public) (.+?)(?:  #.*)?$", line)
                if match:
                    found |= {re.split(r"[ *]", part)[-1] for part in _split(match[1])}
    return found


def constants(text: str) -> set[str]:
    """Public names that are assigned at the top of a module."""
    found = set()
    for names in re.findall(r"^([A-Za-z][\w, ]*?)(?:: \w+)? = ", text, re.M):
        if not names.startswith(("cdef ", "ctypedef ")):
            found |= {name.strip() for name in names.split(",")}
    return {name for name in found if not name.startswith("_")}


def prose(text: str) -> list[tuple[int, str]]:
    """(line, text) of each comment and each line of a docstring, of Cython or C."""
    lines = []
    for match in [*DOCSTRING.finditer(text), *re.finditer(r"/\*(.*?)\*/", text, re.S)]:
        first = text.count("\n", 0, match.start()) + 1
        lines += [(first + n, line) for n, line in enumerate(match[1].split("\n"))]
    blank = DOCSTRING.sub(lambda match: "\n" * match[0].count("\n"), text)
    for n, line in enumerate(blank.split("\n"), 1):
        match = re.search(r"(?:^|\s)#\s(.*)", re.sub(r'"[^"]*"', '""', line))
        if match:
            lines.append((n, match[1]))
    return sorted(lines)
