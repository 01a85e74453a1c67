"""Names: the one rule for names that users give, and for names that come over the network. Pure.

A name is shown on pages, in logs and in terminals, travels as UTF-8, and stands in keys, labels and paths. So it is a
short text of printable characters: no line break, no NUL, no half of a surrogate pair, no invisible character. Where a
name becomes part of a Dask key, a label or a path, its rule allows letters, digits and a few signs only.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dps.errors import InputError, told

__all__ = ["Named", "check_name", "shown", "table_name"]

PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Rule(NamedTuple):
    """How long a name of some kind may be, and whether it may hold only letters, digits and the signs of `PLAIN`."""

    max_length: int
    plain: bool = False

    def __str__(self) -> str:
        if self.plain:
            return f"1 to {self.max_length} letters (a to z, A to Z), digits, dots, dashes or underscores"
        return f"1 to {self.max_length} printable characters"

    def first_forbidden(self, name: str) -> str | None:
        """The first character of `name` that the rule does not allow; None if all are allowed."""
        return next((c for c in name if not (c in PLAIN if self.plain else c.isprintable())), None)


RULES = {
    "parameter server": Rule(64, plain=True),  # part of Dask keys, names of threads, metrics
    "checkpoint": Rule(64, plain=True),  # the name of a directory
    "table": Rule(200),
    "trainer": Rule(200),  # in a run that several callers share
    "metric": Rule(64),
    "machine": Rule(64),
    "wire": Rule(100),  # in words, as a trainer tells its choice
}


def check_name(kind: str, name: object) -> str:
    """The name, if the rule for that kind allows it.

    The kinds are "parameter server", "checkpoint", "table", "trainer", "metric", "machine" and "wire".
    Raises InputError, whose message says the rule, and the character that it does not allow.

    Examples
    --------
    >>> check_name("table", "Müller's weights")
    "Müller's weights"
    >>> check_name("table", "a\\nb")
    Traceback (most recent call last):
    dps.errors.InputError: a table's name is 1 to 200 printable characters; 'a\\nb' has '\\n' (U+000A)
    """
    rule = RULES[kind]
    expected = f"a {kind}'s name is {rule}"
    if not isinstance(name, str):
        raise InputError(f"{expected}, not {told(name)}")
    if not 0 < len(name) <= rule.max_length:
        raise InputError(f"{expected}; {name!r:.100} has {len(name)}")
    if rule.plain and not name.strip("."):  # as the name of a directory, "." and ".." lead elsewhere
        raise InputError(f"{expected}; {name!r} has dots only")
    forbidden = rule.first_forbidden(name)
    if forbidden is not None:
        raise InputError(f"{expected}; {name!r:.100} has {forbidden!a} (U+{ord(forbidden):04X})")
    return name


class Named(Protocol):
    """A table's handle, which stands wherever the table's name does."""

    @property
    def name(self) -> str: ...


def table_name(table: str | Named) -> str:
    if isinstance(table, str):
        return table
    return check_name("table", getattr(table, "name", table))


def shown(text: object, max_length: int) -> str:
    """Free text that came over the network, cut to `max_length` characters, with "?" for each that is not printable.

    >>> shown("line 1\\nline 2\\ud800\\0", 20)
    'line 1\\nline 2??'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)[:max_length])
