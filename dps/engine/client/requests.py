"""A call, prepared: what is wrong with it is found before any of it, or of its fellows, is sent.

`call.pyx` takes arrays as they are where they fit, groups the keys and cuts the call into one request for each
server, run of neighbouring shards and chunk. Where they do not fit, `inputs.py` makes keys and rows of what came in, or
an error says what is wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from dps.engine.client.byte_rows import bytes_in, bytes_of, room_of
from dps.engine.client.inputs import as_keys, as_rows, check_out, row_shape, split_sparse
from dps.engine.client.origin import Origin
from dps.engine.client.verbs import Keys
from dps.engine.client.wire_choice import TableTrial, WireTrials
from dps.engine.core.blocks import empty
from dps.engine.core.requests import call as core
from dps.engine.core.requests.form import Form
from dps.engine.core.requests.part import Part
from dps.engine.core.requests.terms import Terms
from dps.engine.state.custom import Custom
from dps.engine.state.dtypes import is_half
from dps.engine.state.ops import ADD, ASSIGN, PUSH, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.wire_format import Wire
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, encode_header
from dps.engine.wire.messages import Located
from dps.engine.wire.sockets import is_own_address
from dps.errors import DataLostError, InputError

__all__ = ["Prepared", "Run", "TableRoute", "TableTerms", "outs_of", "prepared_born", "prepared_deletion"]
__all__ += ["chosen_copy", "lost_rows", "prepared_pull", "prepared_push", "refuse", "route_of", "same_rows", "terms_of"]

FLAGS = {PUSH: 0, ADD: frames.RULE_ADD, ASSIGN: frames.RULE_ASSIGN}
NO_KEYS = np.empty(0, np.int64)
LEAST_COMPARED_BYTES = 17  # Shorter rows are not compared, because a fingerprint of 8 bytes costs what it saves.
MAX_ROWS = 1 << 31  # of data, that a push may stand for: fewer
# The largest requests into which a call is cut: a server works for some milliseconds on one, and serves no other then.
MOST_BYTES, MOST_PULLED_KEYS, MOST_PUSHED_KEYS, MOST_DELETED_KEYS = 1 << 24, 1 << 17, 1 << 15, 1 << 14


Run = tuple[int, int, int]  # of neighbouring shards: their server, the first one, the end


def runs_of(servers: Sequence[int]) -> list[Run]:
    """The runs of shards that have these servers."""
    cuts = [0, *(n for n in range(1, len(servers)) if servers[n] != servers[n - 1]), len(servers)]
    return [(servers[a], a, b) for a, b in itertools.pairwise(cuts)]


def chosen_copy(chain: Sequence[int], reader: int) -> int:
    """The server that answers the pulls of a client with that number.

    Clients with neighbouring numbers choose each server of a chain equally often, and one client chooses the same
    server for shards with the same copies, whichever leads.

    >>> [chosen_copy([2, 0, 1], reader) for reader in range(4)]
    [0, 1, 2, 0]
    """
    return sorted(chain)[reader % len(chain)]


class TableRoute:
    """A table as a client sees it: its spec, and which server holds which run of neighbouring shards.

    With `chains`, all copies answer pulls, and the client has the number `reader`. Its pulls go to the servers of
    `read_runs`, unless `reads_copies` is false or primaries have to answer them.
    """

    def __init__(
        self,
        spec: TableSpec,
        owners: list[int],
        ancestors: Iterable[int] = (),
        servers: Mapping[int, tuple[str, int]] | None = None,
        chains: Sequence[Sequence[int]] = (),
        reader: int = 0,
    ):
        self.spec, self._servers = spec, servers or {}
        self.ancestors = frozenset(ancestors)  # the numbers that it had before it was split or merged
        self.runs = self.read_runs = runs_of(owners)
        self.form = self.read_form = self._form(self.runs, spec.dim, servers)
        self.wide_form = self._form(self.runs, spec.dim + 1, None)  # rows with a column more: BORN
        shards = [(first, end) for _, first, end in self.runs]
        # The form of fingerprints (frames.CHANGED). Narrow rows have none, because a server compares exact bits.
        self.print_form = Form(spec.id, np.dtype(np.int64).num, 1, spec.shard_map, False, shards)
        travels = self._codecs(self.runs, spec.wire) if spec.cache.nbytes and spec.wire.asks else []
        compared = spec.cache.nbytes > 0 and spec.dim * spec.itemsize >= LEAST_COMPARED_BYTES
        self.compares = compared and not any(pulled for pulled, _, _ in travels)
        copies = [chosen_copy(chain, reader) if chain else -1 for chain in chains]
        self.reads_copies = bool(copies) and copies != owners  # else primaries answer all pulls
        if self.reads_copies:
            self.read_runs = runs_of(copies)
            self.read_form = self._form(self.read_runs, spec.dim, servers)
        # Whether lists of keys may have numbers on some link; a trainer may choose to send none.
        self.has_lists = spec.wire.lists and any(lists for *_, lists in self._codecs(self.runs, spec.wire))
        self.terms: TableTerms | None = None  # once a call was made
        self._ways: tuple[Wire, ...] = ()  # once one of them was chosen
        self.trial: TableTrial | None = None  # once a trainer has made one, where its links are measured

    def _form(self, runs: list[Run], dim: int, servers: Mapping[int, tuple[str, int]] | None) -> Form:
        """The form of rows of that width; without `servers` they travel as they are."""
        spec, shards = self.spec, [(first, end) for _, first, end in runs]
        codecs = self._codecs(runs, spec.wire) if spec.wire.asks and servers is not None else []
        return Form(spec.id, np.dtype(spec.dtype).num, dim, spec.shard_map, spec.finite, shards, codecs)

    def _codecs(self, runs: list[Run], wire: Wire) -> list[tuple[int, int, bool]]:
        """For each run, how rows travel from and to its server."""
        here = set[int]()
        if not wire.local:  # else it is the same for all, and nothing is asked of the system
            here = {server for server, (host, _) in self._servers.items() if is_own_address(host)}
        return [wire.between(server in here) for server, _, _ in runs]

    @property
    def is_measured(self) -> bool:
        """Whether a trainer may choose how rows travel, on some link."""
        wire = self.spec.wire
        return wire.measured and any(map(any, self._codecs(self.runs + self.read_runs, wire)))

    def travel(self, way: int) -> None:
        """Let calls travel by one of the wire's candidates from now on."""
        self._ways = self._ways or self.spec.wire.candidates
        wire = self._ways[way]
        for form, runs in ((self.form, self.runs), (self.read_form, self.read_runs)):
            form.travel(self._codecs(runs, wire))

    def form_of(self, part: Part) -> Form:
        """The form of the rows of a part of a call to this table, or to one whose place it has taken."""
        if part.is_changed:
            return self.print_form
        return self.form if part.dim == self.spec.dim else self.wide_form

    def has_moved(self, server: int, owners: list[int]) -> bool:
        """Whether a shard that the server had by this route is not its own any more."""
        return any(owner == server and {*owners[first:end]} != {server} for owner, first, end in self.runs)

    def has_left(self, server: int, chains: Sequence[Sequence[int]]) -> bool:
        """Whether the server is asked as a copy of a shard that it does not have any more."""
        of_server = [(first, end) for copy, first, end in self.read_runs if self.reads_copies and copy == server]
        return any(server not in chain for first, end in of_server for chain in chains[first:end] or [()])

    def runs_by(self, form: Form) -> list[Run]:
        """The runs by which calls of that form are cut."""
        return self.read_runs if form is self.read_form else self.runs

    def merges(self, part: Part) -> bool:
        """Whether shards to which a part of a push may have gone were merged since."""
        return part.pushes and part.table in self.ancestors and not self.spec.shard_map.refines(part.shard_map)


def route_of(table: Located, servers: Mapping[int, tuple[str, int]], reader: int) -> TableRoute:
    """A table of the controller's route, for a client with the number `reader`."""
    spec = TableSpec.from_dict(table.spec)
    return TableRoute(spec, table.owners, table.ancestors, servers, table.chains, reader)


class TableTerms:
    """The terms of all calls of a client to a table, by one route.

    A request has at most `chunk` bytes; a larger call is cut.
    `changes` has the terms of the changes that the table takes, by rule and whether new values come back.
    `replays` has the same, for changes that were acknowledged to an earlier attempt.
    Where the client has a clock, its pulls and its pushes by the table's own rule travel as the table's `wire` says.
    `pull` and `certified` are those of calls that primaries answer; `of_copies` has them for copies.
    """

    def __init__(self, route: TableRoute, epoch: int, chunk: int, clocked: bool):
        spec, form = route.spec, route.form
        parts = form, epoch, min(chunk, MOST_BYTES)
        at_once = spec.aggregate is None or not clocked  # else the servers sum, also repeats
        half = is_half(spec.dtype)  # whose sums are rounded once if they are summed here, and else after each addition
        sums = at_once and (spec.optimizer.repeats == "sum" or (half and spec.optimizer.repeats == "any"))
        self.clocked = clocked
        # Pulls are cut as pushes are where these name the lists of pulls.
        most = MOST_PUSHED_KEYS if route.has_lists and clocked else MOST_PULLED_KEYS

        def pulls(form: Form) -> list[Terms]:
            parts, flags = (form, epoch, min(chunk, MOST_BYTES)), (0, frames.CERTIFICATE)
            return [Terms(*parts, frames.PULL, flag, False, True, False, most, clocked) for flag in flags]

        self.pull, self.certified = pulls(form)
        self.of_primaries = self.of_copies = self
        wide = route.wide_form, epoch, min(chunk, MOST_BYTES)
        self.born = Terms(*wide, frames.PULL, frames.BORN, False, True, False, MOST_PULLED_KEYS)
        # A chunk has as many keys as it would have of rows, because all of them may have changed.
        fits = max(1, min(chunk, MOST_BYTES) // (8 + spec.dim * spec.itemsize))
        asked = route.print_form, epoch, MOST_BYTES, frames.PULL, frames.CHANGED
        self.changed = Terms(*asked, False, False, False, min(fits, MOST_PULLED_KEYS))
        self.deletion = Terms(*parts, frames.PUSH, frames.RULE_DELETE, True, False, False, MOST_DELETED_KEYS)

        def change(flags: int, answered: bool, merges: bool) -> Terms:
            # The user's code may refuse a push, and one that is refused has changed nothing. And if a key may come
            # twice, an answer to one part would lack what the next part changes.
            narrow = clocked and not flags & frames.RULE_DELETE
            if isinstance(spec.optimizer, Custom) or (answered and not merges):
                return Terms(form, epoch, chunk, frames.PUSH, flags, True, answered, merges, narrow=narrow)
            return Terms(*parts, frames.PUSH, flags, True, answered, merges, MOST_PUSHED_KEYS, narrow)

        rules = [(PUSH, sums)] if spec.optimizer.derived else [(PUSH, sums), (ADD, half), (ASSIGN, False)]
        self.changes, self.replays = (
            {
                (rule, answered): change(FLAGS[rule] | asks | more, answered, merges)
                for rule, merges in rules
                for answered, asks in ((False, 0), (True, frames.ANSWER))
            }
            for more in (0, frames.REPLAYED)
        )
        if route.reads_copies:
            self.of_copies = copy.copy(self)
            self.of_copies.pull, self.of_copies.certified = pulls(route.read_form)


def terms_of(route: TableRoute, trials: WireTrials, epoch: int, chunk: int, clocked: bool) -> TableTerms:
    """The terms of a call that is made now, by which it may be a trainer's turn to travel another way."""
    if route.terms is None:
        route.terms = TableTerms(route, epoch, chunk, clocked)
        spec = route.spec
        if clocked and route.is_measured:
            labels = [wire.label for wire in spec.wire.candidates]
            route.trial = trials.of((spec.name, spec.dim, spec.wire), spec.name, labels, route.travel)
    if route.trial is not None:
        route.trial.called()
    return route.terms


class Prepared(NamedTuple):
    """A call that has been checked and grouped, ready to be sent."""

    route: TableRoute
    calls: tuple[core.Call, ...]  # one after the other
    finish: Callable[[], Any]  # makes the result, once they are answered: mostly an array, or None


def prepared_pull(
    route: TableRoute, terms: TableTerms, origin: Origin, keys: Keys, out: object, certified: bool = False
) -> Prepared:
    agreed = terms.certified if certified else terms.pull
    if route.spec.bytes_width:
        return _prepared_bytes(route, agreed, origin, keys, out)
    call = core.Call.of(agreed, origin, keys, None, out)
    if call is not None:
        return Prepared(route, (call,), call.finish)
    sparse = split_sparse(route.spec.name, route.spec, keys)
    target, shape = named(route, keys if sparse is None else sparse[0])
    answer = room_for(out, shape, route.spec)
    call = core.Call.of(agreed, origin, target, None, flat(answer, route.spec))
    return refuse(route, frames.PULL, origin, target) if call is None else into(answer, route, call)


def _prepared_bytes(route: TableRoute, agreed: Terms, origin: Origin, keys: Keys, out: object) -> Prepared:
    """A pull of rows of bytes."""
    spec = route.spec
    target, shape = named(route, keys)
    answer = room_for(room_of(out, spec), shape, spec)
    call = core.Call.of(agreed, origin, target, None, flat(answer, spec))
    if call is None:
        refuse(route, frames.PULL, origin, target)

    def finish() -> np.ndarray:
        call.finish()
        return bytes_of(answer, spec) if out is None else cast(np.ndarray, out)

    return Prepared(route, (call,), finish)


def prepared_born(route: TableRoute, terms: TableTerms, origin: Origin, keys: Keys, out: object) -> Prepared:
    """A pull that also tells which of the rows there are: its result is a pair of the values and a mask."""
    spec = route.spec
    if out is not None:
        raise InputError(f"table {spec.name!r}: a pull with born=True makes new arrays: leave out= out")
    sparse = split_sparse(spec.name, spec, keys)
    target, shape = named(route, keys if sparse is None else sparse[0])
    rows = empty((math.prod(shape), spec.dim + 1), spec.dtype)
    call = core.Call.of(terms.born, origin, target, None, rows)
    if call is None:
        refuse(route, frames.PULL, origin, target)

    def finish() -> tuple[np.ndarray, np.ndarray]:
        call.finish()
        values = np.ascontiguousarray(rows[:, :-1]).reshape(row_shape(shape, spec))
        return bytes_of(values, spec), (rows[:, -1] != 0).reshape(shape)

    return Prepared(route, (call,), finish)


def prepared_push(
    route: TableRoute,
    terms: TableTerms,
    origin: Origin,
    keys: Keys,
    values: object,
    rule: int,
    answered: bool = False,
    out: object = None,
    rows: int | None = None,
    replays: bool = False,
) -> Prepared:
    """With `replays`, an earlier attempt has made the push."""
    spec = route.spec
    changes = terms.replays if replays else terms.changes
    agreed = changes.get((rule, answered))
    if agreed is None:
        derives = f"{spec.optimizer.kind} derives the values from its state"
        raise InputError(f"table {spec.name!r}: {derives}; only push changes them")
    if spec.bytes_width:
        if rule != ASSIGN or answered:
            raise InputError(
                f"table {spec.name!r} holds bytes of width {spec.bytes_width}, which are not pushed or added up: "
                "assign(keys, values) puts them in place"
            )
        values = None if values is None else bytes_in(values, spec)
    weight = -1 if rows is None else weight_of(spec, rows, terms.clocked)
    call = core.Call.of(agreed, origin, keys, values, out, weight)
    if call is not None:
        return Prepared(route, (call,), call.finish)
    sparse = split_sparse(spec.name, spec, keys)
    if sparse is not None:
        keys, values = sparse[0], sparse[1] if values is None else values
    if values is None:
        raise InputError(f"table {spec.name!r}: a push takes keys and values; values are missing")
    target, shape = named(route, keys)
    array = as_rows(values, shape, len(target) if isinstance(target, np.ndarray) else shape[0], spec)
    answer = room_for(out, shape, spec) if answered else None
    room = None if answer is None else flat(answer, spec)
    call = core.Call.of(agreed, origin, target, array, room, weight)
    if call is not None:
        return into(answer, route, call)
    # Of several chunks a later one may repeat a key of an earlier one, so the values are asked for behind all of them.
    push = core.Call.of(changes[rule, False], origin, target, array, None, weight) if answered else None
    pull = None if push is None else core.Call.of(terms.of_primaries.pull, origin, target, None, room)
    if push is None or pull is None:
        refuse(route, frames.PUSH, origin, target)
    return into(answer, route, push, pull)


def prepared_deletion(route: TableRoute, terms: TableTerms, origin: Origin, keys: Keys, every: bool) -> Prepared:
    """The deletion of these rows or, with `every`, of all rows, in the name of that origin."""
    agreed = terms.deletion
    if every:  # in all shards, as a push that stands for rows of data
        call = core.Call.of(agreed, origin, NO_KEYS, None, None, 1)
        return refuse(route, frames.PUSH, origin, NO_KEYS) if call is None else Prepared(route, (call,), call.finish)
    if keys is None:
        raise InputError(f"table {route.spec.name!r}: a deletion names the keys; clear() deletes all rows")
    sparse = split_sparse(route.spec.name, route.spec, keys)
    target, _ = named(route, keys if sparse is None else sparse[0])
    call = core.Call.of(agreed, origin, target, None, None)
    return refuse(route, frames.PUSH, origin, target) if call is None else Prepared(route, (call,), call.finish)


def into(answer: np.ndarray | None, route: TableRoute, *calls: core.Call) -> Prepared:
    def finish() -> np.ndarray | None:
        for call in calls:
            call.finish()
        return answer

    return Prepared(route, calls, finish)


def named(route: TableRoute, keys: Keys) -> tuple[np.ndarray | slice, tuple[int, ...]]:
    """The keys as int64, flat and contiguous, or a range of rows of a dense table; and the shape of what they name."""
    spec = route.spec
    if keys is not None and not isinstance(keys, slice):
        return as_keys(keys, spec.name)
    if spec.rows is None:
        how = "only a pull takes a range of them" if keys else "a pull of slice(None) gives all rows with their keys"
        raise InputError(f"table {spec.name!r} is keyed: name the keys; {how}")
    start, stop, step = (keys or slice(None)).indices(spec.rows)
    if step != 1:
        raise InputError(f"table {spec.name!r}: a slice of rows has step 1, not {step}; name the keys")
    stop = max(start, stop)
    return slice(start, stop), (stop - start,)


def lost_rows(spec: TableSpec, part: Part, remedy: str) -> DataLostError:
    """The error for rows whose last copy is gone."""
    keys, (first, end) = part.keys, part.shards
    if keys is None:
        what = f"rows {part.span[0]} to {part.span[1] - 1}"
    else:
        shown = ", ".join(map(str, keys[:5].tolist())) + (", ..." if len(keys) > 5 else "")
        what = f"{len(keys)} keys ({shown})"
    return DataLostError(
        f"table {spec.name!r}: the last copy of shards {first} to {end - 1} is gone, and with it {what}; {remedy}"
    )


def same_rows(one: TableSpec, other: TableSpec) -> bool:
    """Whether two tables differ at most in their numbers, salts, copies, shards, edges and staleness."""
    kept = {name: getattr(other, name) for name in ("id", "salt", "copies", "shards", "edges", "staleness")}
    same = dataclasses.replace(one, **kept)
    return same == other


def weight_of(spec: TableSpec, rows: object, clocked: bool) -> int:
    """How many rows of data a push stands for, as it travels."""
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or not 0 <= rows < MAX_ROWS:
        raise InputError(
            f"table {spec.name!r}: rows is how many rows of data a push stands for, 0 or more; not {rows!r}"
        )
    if spec.aggregate != "mean" or not clocked:
        why = "this client has no clock" if spec.aggregate == "mean" else f"it has aggregate={spec.aggregate!r}"
        raise InputError(
            f"table {spec.name!r}: rows= weighs the pushes of trainers in a table with aggregate='mean', and {why}"
        )
    return int(rows)


def outs_of(out: object) -> Mapping[Any, np.ndarray]:
    if out is not None and not isinstance(out, Mapping):
        what = type(out).__name__
        raise InputError(f"out of several tables is a mapping {{table: array}}, as the tables are; not {what}")
    return out or {}


def room_for(out: object, shape: tuple[int, ...], spec: TableSpec) -> np.ndarray:
    full = row_shape(shape, spec)
    if out is None:
        return empty(full, spec.dtype)
    return check_out(out, full, spec)


def flat(answer: np.ndarray, spec: TableSpec) -> np.ndarray:
    """The same memory, with one axis for the keys."""
    return answer.reshape(-1) if spec.dim == 1 else answer.reshape(-1, spec.dim)


def refuse(route: TableRoute, kind: int, origin: Origin, target: np.ndarray | slice) -> NoReturn:
    """Say why a call cannot be made although its arrays have the right types and shapes."""
    spec = route.spec
    if isinstance(target, np.ndarray) and spec.rows is not None:
        group(target, spec.shard_map, spec.name)
    encode_header(Header(kind, table=spec.id, trainer=origin.id, parties=origin.parties, attempt=origin.attempt))
    count = len(target) if isinstance(target, np.ndarray) else target.stop - target.start
    raise InputError(
        f"table {spec.name!r}: a call has at most 2147483647 keys or rows, and this one has {count}; make several calls"
    )
