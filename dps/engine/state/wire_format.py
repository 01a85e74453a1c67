"""Wire: how keys and rows of a table travel between trainers and servers, if not as they are. Pure.

The path: a table's definition has a ``Wire``. `client/requests.py` makes of it a codec for each server of a route, and
`core/requests/call.pyx` narrows the rows of a trainer's push as they are written, and widens those of a pull as they
arrive. A request whose values travel so has the flag NARROW; the server (`core/requests/service.pyx`, and the general
way in `server/tables.py`) widens what it brings before anything else sees it. So rows, sums, copies, checkpoints and
functions have the table's own numbers, always. `core/codec.h` has the loops. `client/held_pushes.py` has
what trainers hold back of their pushes, `client/merged_pushes.py` how those of a process are summed.
"""

from __future__ import annotations

import dataclasses

from dps.engine.core.codec import CODECS
from dps.engine.state.recipes import Description, Recipe, converted, flag, number
from dps.errors import InputError, InputTypeError

__all__ = ["Wire", "wire_of"]

FORMATS = tuple(name for name in CODECS if name is not None)


def _format(value: object, label: str, default: object) -> str | None:
    if value is not None and value not in FORMATS:
        raise InputError(f"{label} is {value!r} but must be None or one of {', '.join(map(repr, FORMATS))}")
    return None if value is None else str(value)


@dataclasses.dataclass(frozen=True, repr=False)
class Wire(Recipe):
    """How the rows of a float32 table travel between trainers and servers, in fewer bytes than they have in memory.

    It is for links between machines, where bytes take longer than the work on them. The table itself, its sums, its
    copies and its checkpoints stay float32, and each number is rounded once on its way. It holds for the pulls and the
    pushes of trainers; what a client without a clock pulls, what `add` and `assign` bring, and what comes back from
    `push_pull`, functions and scans travels as it is.

    Parameters
    ----------
    pull, push : {None, "float16", "bfloat16", "int8"}
        The numbers in which rows travel to a trainer, and those in which pushes travel to a server; None: float32.

        ``"bfloat16"`` has the range of float32 and 8 bits of precision: half the bytes, for everything. ``"float16"``
        has 11 bits, and numbers beyond 65,504 arrive as 65,504; below 6e-5 it loses precision, below 3e-8 all. With
        ``"int8"`` a row is a byte for each number and 4 bytes for its least number, rounded down to bfloat16, and its
        step: a 255th of the row's range and of a 128th of that least number. It is for rows of more than 4 numbers
        around zero. Numbers that are pulled are rounded to the nearest step. Those that are pushed are
        rounded up or down at random, up with the probability of what is left over, so that sums of many pushes are
        right; what is drawn follows from the push and from the row. A row with NaN or infinity arrives as NaN.
    local : bool, optional
        Also between processes of one machine, where it costs time and saves none. True by default;
        ``wire="auto"`` of :meth:`dps.ParameterServer.table` stands for ``Wire("bfloat16", "bfloat16", local=False,
        lists=True, measured=True)``, and ``"lists"`` for ``Wire(local=False, lists=True)``, which loses nothing.
    lists : bool, optional
        Keep lists of keys at both ends of a connection, so that a push to the rows that were pulled just before, and a
        list that comes again in the next epoch, travels without its keys, and a new one in fewer than 8 bytes a key
        where keys ascend or have few bits. Both ends keep 4 MiB for each connection.
        False by default; True with ``wire="auto"``.
    keep : float, optional
        Which share of the rows of a trainer's push travels: those with the largest norms, rounded up to whole rows. The
        trainer holds the other rows back, and adds them to what it pushes to the same rows later. 1.0 by default: all.
    least : float, optional
        The norm of a row below which it is held back, together with what is held back of it already. 0.0 by default.
    hold : int, optional
        Clocks for which a change may be held back: what a trainer pushes at clock c is on the servers when the trainer
        has completed clock c + hold. A pull at clock c then sees every push that any trainer, also its own, made before
        its clock c - staleness - hold. 8 by default. With `keep` and `least`, wherever the servers are.
    measured : bool, optional
        Each trainer tries rows as they are, with lists (where `lists` says so), and in the numbers of `pull` and
        `push`, for some batches each, and goes on with what takes the least time; :meth:`dps.ParameterServer.status`
        has its choice among the events. The choice depends on measured times, so two runs need not have the same bits.
        False by default: these numbers, always. True with ``wire="auto"``. With `merge` it is not the numbers that are
        tried, but whether to sum: pushes of some clocks are summed and those of as many are not, in turns.
    merge : bool, optional
        Sum the pushes that the trainers of one process (threads), and of all processes of one machine, make in a clock,
        and send the sum to each server as one message, which counts once for each of them. A push then returns before
        servers have it; it leaves when the trainer reads the table, changes it otherwise, meets the others or ends its
        iteration. False by default. It is for tables with :class:`~dps.Add`, with :class:`~dps.SGD` without penalties,
        or with ``aggregate=``, and it saves bytes with staleness 0, where trainers end their iterations together.
        Processes find each other on Linux, without TLS, where ``dps.unix-sockets`` is on.

    Raises
    ------
    InputError
        Another format.

    Examples
    --------
    >>> import dps
    >>> dps.Wire(pull="bfloat16", push="bfloat16")
    Wire(pull='bfloat16', push='bfloat16')
    >>> dps.Wire(keep=0.25, hold=4)
    Wire(keep=0.25, hold=4)
    """

    pull: str | None = converted(None, _format)
    push: str | None = converted(None, _format)
    local: bool = flag(True)
    lists: bool = flag(False)
    keep: float = number(1.0, above=0, most=1)
    least: float = number(0.0, least=0)
    hold: int = number(8, least=1, most=1 << 20, whole=True)
    measured: bool = flag(False)
    merge: bool = flag(False)

    @staticmethod
    def from_dict(description: Description) -> Wire:
        """The value that :meth:`to_dict` described."""
        return Wire(**{name: value for name, value in description.items() if name != "name"})

    @property
    def asks(self) -> bool:
        """Whether anything travels otherwise than it is."""
        return self.pull is not None or self.push is not None or self.lists or self.holds or self.merge

    @property
    def holds(self) -> bool:
        """Whether trainers hold back rows of their pushes."""
        return self.keep < 1 or self.least > 0

    @property
    def codecs(self) -> tuple[int, int]:
        """The numbers of the codecs of pulls and pushes: see `codec.pyx`."""
        return CODECS[self.pull], CODECS[self.push]

    def between(self, same_machine: bool) -> tuple[int, int, bool]:
        """The codecs between a trainer and a server, which may be on one machine; and whether lists have numbers.

        >>> Wire("int8", "float16", local=False).between(True), Wire("int8", "float16").between(True)
        ((0, 0, False), (3, 1, False))
        """
        return (*self.codecs, self.lists) if self.local or not same_machine else (0, 0, False)

    @property
    def candidates(self) -> tuple[Wire, ...]:
        """What a trainer chooses from, what loses nothing first; of a wire that is not measured only itself.

        >>> [wire.label for wire in wire_of("auto").candidates]
        ['as they are', 'as they are with lists', 'as bfloat16 with lists']
        """
        if not self.measured:
            return (self,)
        plain = dataclasses.replace(self, pull=None, push=None, lists=False)
        return tuple(dict.fromkeys((plain, dataclasses.replace(plain, lists=self.lists), self)))

    @property
    def label(self) -> str:
        """How rows travel, in words."""
        pull, push = ("as they are" if name is None else f"as {name}" for name in (self.pull, self.push))
        numbers = pull if pull == push else f"{push} to servers and {pull} from them"
        return numbers + (" with lists" if self.lists else "")


# The wires that have a name. Both hold between machines only, because within one machine bytes cost little.
NAMED = {
    "auto": Wire("bfloat16", "bfloat16", local=False, lists=True, measured=True),
    "lists": Wire(local=False, lists=True),
}


def wire_of(wire: Wire | str | None) -> Wire:
    """The Wire that ``wire=`` of :meth:`dps.ParameterServer.table` stands for; None means that all travels as it is.

    >>> wire_of("auto").between(same_machine=True), wire_of(None).asks
    ((0, 0, False), False)
    >>> wire_of("lists")
    Wire(local=False, lists=True)
    """
    if wire is None:
        return Wire()
    if isinstance(wire, str) and wire in NAMED:
        return NAMED[wire]
    if not isinstance(wire, Wire):
        raise InputTypeError(
            f"wire is a dps.Wire, such as dps.Wire(pull='bfloat16'), or 'auto', or 'lists', not {wire!r}"
        )
    return wire
