"""CachedTables: a trainer's pulls and pushes of tables with ``cache=``, past the rows that its process keeps.

`row_cache.py` says which rows those are. Trainers of one run that are in one process share them (`CacheShelf`). A pull
asks the servers for the rows that are missing, and for those that have changed among the ones that are here and too old
(`refreshed_rows.py`), and puts all of them together. A push tells the cache what it changes, before it is sent. All of
this but the end of a pull happens under the session's lock.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dps.engine.client.inputs import as_keys, flat_keys, flat_rows, split_sparse
from dps.engine.client.refreshed_rows import RefreshedRows
from dps.engine.client.requests import Prepared, TableRoute, TableTerms, room_for, same_rows
from dps.engine.client.row_cache import History, JoinedRows, OpenChange, PushOutcome, RowCache, Step, in_doubt
from dps.engine.client.rows_under_way import RowsUnderWay
from dps.engine.client.ticket import Pending, SentCall
from dps.engine.client.verbs import Keys
from dps.engine.core.shards import optimizers as kernels
from dps.engine.functions.definition import Function
from dps.engine.state.dtypes import is_half
from dps.engine.state.ops import ADD, ASSIGN, DELETE, PUSH, TableSpec
from dps.engine.state.optimizers import SGD, Add, Assign
from dps.errors import DPSError, FunctionError, InputError, InputTypeError, KeyRangeError

if TYPE_CHECKING:
    from dps.engine.client.session import ClientSession

__all__ = ["REFUSALS", "CachedTables", "changing_all", "send_changes"]

NO_NUMBERS = np.empty(0, np.float64)
REFUSALS = (InputError, InputTypeError, KeyRangeError, FunctionError)  # a push that ends with one is not sent again
Change = tuple[TableRoute, Any, Any]  # the table, and the keys and values as they were given; keys None: all rows


class RunStanding(Protocol):
    """What a trainer knows of the other trainers of its run."""

    others_clock: float  # all other trainers have reached this clock

    def bound_of(self, spec: TableSpec) -> float:
        """How stale the trainer's reads of a table may be."""


class CachedTables:
    """The tables of one trainer of which its process keeps rows.

    `run` names the run among all of the process.
    """

    def __init__(self, session: ClientSession, standing: RunStanding, run: tuple[object, ...]):
        self._session, self._standing, self._run = session, standing, run
        self._caches: dict[str, RowCache] = {}
        self._under_way: dict[str, list[RowsUnderWay]] = {}  # by table, in the order in which they were asked for

    def has(self, spec: TableSpec, keys: Keys) -> bool:
        """Whether rows of the table are kept, by keys of this form."""
        return spec.cache.nbytes > 0 and keys is not None and not isinstance(keys, slice)

    def pull(
        self, route: TableRoute, terms: TableTerms, keys: Keys, out: object, keep: bool = False, ahead: int = 0
    ) -> Pending[object]:
        """A pull on its way, for use so many clocks `ahead`. With `keep`, the caller may change the keys before the
        answer is here.

        A pull ahead waits for rows that an earlier pull has on its way; whether it is done does not tell of these.
        """
        return self._pull(route, terms, keys, out, keep, self._session.own.clock + ahead, joins=ahead > 0)

    def survey(self, spec: TableSpec, keys: np.ndarray, ahead: int) -> tuple[np.ndarray, np.ndarray]:
        """Two masks of the keys of a batch that comes so many clocks `ahead`: their rows are here or on their way, but
        too old for it; their rows are neither here nor on their way."""
        session, cache = self._session, self._cache(spec)
        with session.lock:
            history = cache.enter(spec, session.epoch)
            level = session.own.clock + ahead - self._standing.bound_of(spec)
            pulls = [each.pull for each in self._take_in(spec.name)]
            return cache.survey(pulls, keys, level, session.now(), history)

    def _pull(
        self, route: TableRoute, terms: TableTerms, keys: Keys, out: object, keep: bool, clock: int, joins: bool
    ) -> Pending[object]:
        """A pull for use at a clock. With `joins`, it takes rows of pulls on their way."""
        session, spec = self._session, route.spec
        sparse = split_sparse(spec.name, spec, keys)
        named, shape = as_keys(keys if sparse is None else sparse[0], spec.name)
        answer = room_for(out, shape, spec)
        rows, now = answer.reshape(-1, spec.dim), session.now()
        cache, level = self._cache(spec), clock - self._standing.bound_of(spec)
        history = cache.enter(spec, session.epoch)
        open_rows = self._take_in(spec.name)
        aged = np.zeros(len(named), np.bool_) if route.compares and cache.comparisons.begin() else None
        missing = cache.read(named, level, now, history, rows, aged)
        if missing is None:
            return Pending((), lambda: answer)
        joined = list[tuple[RowsUnderWay, JoinedRows]]()
        if joins and open_rows:
            lacking, by_pull = np.flatnonzero(missing), {each.pull: each for each in open_rows}
            for some in cache.join([*by_pull], named[lacking], level, now, history):
                places = lacking[some.places]
                joined.append((by_pull[some.pull], some._replace(places=places)))
                missing[places] = False
        asked = None
        if missing.any():
            # Into an array of its own, because the caller may change `out` before the rows are kept.
            fresh = RefreshedRows(route, rows[missing], None if aged is None else aged[missing])
            asked = self._ask(route, terms, named[missing], fresh, history, keep)

        def finish() -> np.ndarray:
            if asked is not None:
                rows[missing] = self._take(asked)
            for under_way, some in joined:
                rows[some.places] = self._joined(route, under_way, some.at, clock)
            return answer

        return Pending(() if asked is None else (asked.sent,), finish)

    def _ask(
        self, route: TableRoute, terms: TableTerms, keys: np.ndarray, fresh: RefreshedRows, history: History, keep: bool
    ) -> RowsUnderWay:
        """Ask the servers for rows."""
        session, spec, bound = self._session, route.spec, self._standing.bound_of(route.spec)
        clock, level = session.own.clock, self._standing.others_clock
        # A trainer that is alone takes its own clock, because another trainer may join, at that clock or a later one.
        # Rows of a table with aggregate= have no later level either, because they have no pushes of this clock yet.
        level = clock if math.isinf(level) or (spec.aggregate is not None and level > clock) else level
        until = session.now() + spec.cache.seconds(bounded=math.isfinite(bound))
        opened = self._cache(spec).begin_pull(self, keys, level, until, history)
        (sent,) = session.send([fresh.prepared(terms, session.acting, keys)], keep)
        asked = RowsUnderWay(self._cache(spec), opened, fresh, sent)
        self._under_way.setdefault(spec.name, []).append(asked)
        return asked

    def _take(self, asked: RowsUnderWay) -> np.ndarray:
        """The rows that were asked for, when they are here."""
        with self._session.lock:
            return asked.take()

    def _take_in(self, table: str) -> list[RowsUnderWay]:
        """Keep the rows of a table that are here by now, because a push would spoil them; those still on their way."""
        open_rows = self._under_way.get(table)
        if not open_rows:
            return []
        still = []
        for each in open_rows:
            if not each.sent.done:
                self._session.poll(each.sent)
            if not each.sent.done:
                still.append(each)
            elif each.is_here:
                try:
                    each.take()
                except DPSError:  # the pull that asked for them raises it
                    each.give_up()
        self._under_way[table] = still
        return still

    def _joined(self, route: TableRoute, under_way: RowsUnderWay, at: np.ndarray, clock: int) -> np.ndarray:
        """Rows of an earlier pull, for use at a clock; if it has failed, they are asked for again."""
        try:
            return Pending((under_way.sent,), lambda: self._take(under_way)).result()[at]
        except DPSError:
            session, spec = self._session, route.spec
            under_way.give_up()
            with session.lock:
                route = session.ready(spec.name)
                if not same_rows(route.spec, spec):
                    raise
                terms = session.terms(route)
                again = self._pull(route, terms, under_way.pull.keys[at], None, True, clock, joins=False)
        return np.asarray(again.result()).reshape(-1, spec.dim)

    @property
    def is_used(self) -> bool:
        """Whether rows of a table have been asked for."""
        return bool(self._caches)

    def expect(self, coming: Sequence[tuple[int, str, np.ndarray]]) -> None:
        """The trainer knows which keys of which tables its coming batches name, by the clocks of these batches."""
        for name, cache in self._caches.items():
            cache.expect(self, [(clock, keys) for clock, table, keys in coming if table == name])

    def begin_change(self, route: TableRoute, keys: Any, values: Any, rule: int) -> OpenChange | None:
        """Rows are about to be changed; None where the process keeps none of the table."""
        spec = route.spec
        if not spec.cache.nbytes or (spec.aggregate is not None and rule == PUSH):  # shown when the clock has ended
            return None
        cache = self._cache(spec)
        history = cache.enter(spec, self._session.epoch)
        self._take_in(spec.name)
        if rule == DELETE:
            return cache.change(self, None if keys is None else flat_keys(spec, keys)[0])
        named, rows = flat_rows(spec, keys, values)
        # A trainer that is run again steps no rows, because servers may take its push for a repeat of an earlier one.
        # Nor does one that goes on after another attempt has come, because that one may have made the push.
        own = self._session.own
        step = step_of(spec, rule, own.clock) if own.id not in cache.replaced else None
        return cache.change(self, named, rows, step, history)

    @contextlib.contextmanager
    def changing_all(self, route: TableRoute) -> Iterator[None]:
        """Within the block, any row of a table may change, and by what is not known."""
        cache = self._cache(route.spec) if route.spec.cache.nbytes else None
        change = None if cache is None else cache.change(self, None)
        try:
            yield
        finally:
            if cache is not None and change is not None:
                cache.end(change)

    def forget(self) -> None:
        """Pull all rows anew, because the trainer has heard of others by other ways."""
        for cache in self._session.environment.caches.of_run(self._run):
            cache.clear()

    def close(self) -> None:
        """The trainer makes no more calls."""
        caches, self._caches, self._under_way = self._caches, {}, {}
        for cache in caches.values():
            cache.leave(self)

    def _cache(self, spec: TableSpec) -> RowCache:
        cache = self._caches.get(spec.name)
        if cache is None:
            cache = self._caches[spec.name] = self._session.environment.caches.cache(self._run, spec)
            if self._session.own.attempt:  # because the pushes of its first attempt went through another process
                cache.replace(self._session.own.id)
        return cache


def outcome_of(call: SentCall) -> PushOutcome:
    """The outcome of a push, as far as the trainer has read the answers of the servers."""
    requests = call.requests  # once, because another thread may send some again meanwhile
    if not all(request.done for request in requests):
        return PushOutcome.OPEN
    errors = [request.error for request in requests if request.error is not None]
    if not errors:
        return PushOutcome.ACKNOWLEDGED
    return PushOutcome.REFUSED if all(isinstance(error, REFUSALS) for error in errors) else PushOutcome.DOUBTFUL


def send_changes(
    session: ClientSession, changes: Sequence[Change], prepared: Sequence[Prepared], rule: int, keep: bool
) -> list[SentCall]:
    """Send the calls that change rows, and let the caches know of them: before, because the rows change here, too."""
    cached = session.cached
    if cached is None:
        return session.send(prepared, keep)
    begun: list[OpenChange | None] = []
    sent: list[SentCall] | None = None
    try:
        for route, keys, values in changes:
            begun.append(cached.begin_change(route, keys, values, rule))
        sent = session.send(prepared, keep)
    finally:
        for n, change in enumerate(begun):
            if change is not None:
                change.outcome = in_doubt if sent is None else functools.partial(outcome_of, sent[n])
    return sent


def changing_all(session: ClientSession, function: Function, table: str) -> contextlib.AbstractContextManager[None]:
    """Within, a function on the servers may change any row of a table."""
    cached = session.cached
    if cached is None or not function.changes:
        return contextlib.nullcontext()
    return cached.changing_all(session.ready(table))


def step_of(spec: TableSpec, rule: int, clock: int) -> Step | None:
    """The function that changes rows here as servers change theirs; None where a row does not tell what becomes of it.

    Halves are added up in float32, and rounded once for all repeats of a key in a push, which a step for each is not.
    """
    adds = rule == ADD or (rule == PUSH and type(spec.optimizer) is not Assign)
    if is_half(spec.dtype) and adds:
        return None
    if rule == ADD:
        return lambda rows, places, values: kernels.add(rows, places, 0, values, NO_NUMBERS)
    if rule == ASSIGN:
        return lambda rows, places, values: kernels.assign(rows, places, 0, values, NO_NUMBERS)
    optimizer = spec.optimizer
    has_no_state = type(optimizer) in (Add, Assign, SGD) and not optimizer.uses_lag
    if rule != PUSH or not has_no_state or optimizer.repeats == "sum":
        return None
    numbers, kernel = optimizer.numbers(clock), optimizer.kernel
    return lambda rows, places, values: kernel(rows, places, 0, values, numbers)
