"""Names: the one rule for what users name, and for names that come over the network. Pure.

A name is shown on pages, in logs and in terminals, travels as UTF-8, and stands in keys, labels and paths. So it is a
short text of printable characters: no line break, no NUL, no half of a surrogate pair, nothing that cannot be seen.
Where a name becomes part of a Dask key, a label or a path it is plainer still.
"""

from __future__ import annotations

from typing import NamedTuple

from dps.errors import InputError

__all__ = ["check_name", "shown"]

PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class Rule(NamedTuple):
    """How long a name of some kind may be, and whether only letters, digits, dots, dashes and underscores will do."""

    most: int
    plain: bool = False

    def __str__(self) -> str:
        if self.plain:
            return f"1 to {self.most} letters (a to z, A to Z), digits, dots, dashes or underscores"
        return f"1 to {self.most} printable characters"

    def wrong(self, name: str) -> str | None:
        """The first character that the rule does not allow."""
        return next((c for c in name if not (c in PLAIN if self.plain else c.isprintable())), None)


RULES = {
    "parameter server": Rule(64, plain=True),  # in Dask's keys, names of threads, metrics
    "checkpoint": Rule(64, plain=True),  # a directory
    "table": Rule(200),
    "trainer": Rule(200),  # of a run that several callers share
    "metric": Rule(64),
    "machine": Rule(64),
}


def check_name(kind: str, name: object) -> str:
    """The name, if one of that kind may be called so.

    Parameters
    ----------
    kind : {"parameter server", "checkpoint", "table", "trainer", "metric", "machine"}
    name : str

    Raises
    ------
    InputError
        Names the rule, and the character that is against it.

    Examples
    --------
    >>> check_name("table", "Müller's weights")
    "Müller's weights"
    >>> check_name("table", "a\\nb")
    Traceback (most recent call last):
    dps.errors.InputError: a table's name is 1 to 200 printable characters; 'a\\nb' has '\\n' (U+000A)
    """
    rule = RULES[kind]
    about = f"a {kind}'s name is {rule}"
    if not isinstance(name, str):
        raise InputError(f"{about}, not {name!r:.100}")
    if not 0 < len(name) <= rule.most:
        raise InputError(f"{about}; {name!r:.100} has {len(name)}")
    wrong = rule.wrong(name)
    if wrong is not None:
        raise InputError(f"{about}; {name!r:.100} has {wrong!a} (U+{ord(wrong):04X})")
    return name


def shown(text: object, most: int) -> str:
    """Free text that came over the network, cut to `most` characters, with "?" for what could not be shown.

    >>> shown("line 1\\nline 2\\ud800\\0", 20)
    'line 1\\nline 2??'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)[:most])
