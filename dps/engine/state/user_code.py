"""Code of the user in a table's definition: as cloudpickle by value, with a hash that tells whether two are the same.

It goes along by value, because other processes cannot import the user's notebook or script. To open it runs code, so a
table's definition, a checkpoint's too, is for processes that trust the driver or the file.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import io
import pickle
import sys
import traceback
import types
from types import CodeType, FunctionType
from typing import Any, NamedTuple, Protocol

import cloudpickle

from dps.errors import FunctionError, InputTypeError, LimitError

__all__ = ["MAX_BYTES", "UserCode", "add_code", "code_of_function", "last_lines", "opened", "packed"]

MAX_BYTES = 1 << 20  # of the code: it is part of the table's definition, which each client is told
TRACEBACK_LINES = 6  # that an error tells of the user's traceback
MAX_TEXT_LENGTH = 1500  # characters of them: the text of an error frame is limited


class UserCode(NamedTuple):
    sha256: str
    pickled: str  # in base64


def packed(
    value: object, module: str | None, what: str, pickler: type[cloudpickle.CloudPickler] = cloudpickle.CloudPickler
) -> UserCode:
    """A value as cloudpickle, with what it uses of a module by value.

    `module` names the one in which it is defined; None: what it uses is imported where it is opened.
    Errors call it `what`, such as "optimizer Slow".
    Raises InputTypeError or LimitError if it cannot be pickled, or is too large.
    """
    home = sys.modules.get(module) if module else None
    by_value = home is not None and home.__name__ not in cloudpickle.list_registry_pickle_by_value()
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(home)
        with io.BytesIO() as file:
            pickler(file).dump(value)
            data = file.getvalue()
    except Exception as error:
        raise InputTypeError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(home)
    if len(data) > MAX_BYTES:
        raise LimitError(
            f"{what} has {len(data)} bytes with all that it uses, and {MAX_BYTES} at most: does it refer to a large "
            "array?"
        )
    return UserCode(hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode())


def opened(code: UserCode, what: str) -> Any:
    """The value. This unpickles, and so runs code of the user.

    Raises FunctionError if it cannot be opened here. The message has the cause.
    """
    data = base64.b64decode(code.pickled)
    if hashlib.sha256(data).hexdigest() != code.sha256:
        raise FunctionError(f"{what} is not what its hash says: its description is damaged")
    try:
        return pickle.loads(data)
    except Exception as error:
        raise FunctionError(
            f"{what} cannot be opened here: {last_lines(error)}\n"
            "(this takes the modules that it imports, and the driver's version of Python)"
        ) from None


class HashState(Protocol):
    """A hash that is being computed, as `hashlib` makes it."""

    def update(self, data: bytes, /) -> object: ...


def add_code(sums: HashState, code: CodeType) -> None:
    """Add to a hash what code does, whatever the file and lines in which it stands."""
    sums.update(code.co_code)
    sums.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            add_code(sums, constant)
        else:  # the order of a set differs from process to process
            sums.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())


def code_of_function(function: object) -> str:
    """A hash of what a callable does: of its code, its defaults, and the values and functions that it refers to."""
    sums, seen = hashlib.sha256(), set[int]()

    def add(value: object) -> None:
        if isinstance(value, types.ModuleType):
            sums.update(value.__name__.encode())
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *sorted(value.keywords.items())):
                add(each)
        elif isinstance(value, FunctionType):
            if id(value) in seen:  # functions may refer to each other
                return
            seen.add(id(value))
            sums.update(repr((value.__defaults__, value.__kwdefaults__)).encode())
            add_code(sums, value.__code__)
            used = inspect.getclosurevars(value)
            for name, each in sorted({**used.globals, **used.nonlocals}.items()):
                sums.update(name.encode())
                add(each)
        else:
            sums.update(cloudpickle.dumps(value))

    add(function)
    return sums.hexdigest()


def last_lines(error: BaseException) -> str:
    """What an error says, and the end of its traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return (
        f"{type(error).__name__}: {error}\n"[:MAX_TEXT_LENGTH]
        + "\n".join(lines[-TRACEBACK_LINES:])[-MAX_TEXT_LENGTH // 2 :]
    )
