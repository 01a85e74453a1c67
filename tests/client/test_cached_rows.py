"""Tables with ``cache=``: which rows a trainer need not pull again, what they hold, and how many bytes that saves."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import wait_until

import dps
from dps.engine.client.cached_tables import step_of
from dps.engine.client.row_cache import ROW_BYTES, CacheShelf, PushOutcome, RowCache
from dps.engine.state.ops import ADD, ASSIGN, PUSH, TableSpec
from dps.errors import InputError, InputTypeError, NotFiniteError

DIM, KEYS = 4, 100
ALL = np.arange(KEYS)
HERE = 0, 0  # the table's number, and the epoch


def drawn(seed: int, count: int = KEYS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def cache_of(rows: int, dim: int = 1) -> RowCache:
    """A cache with room for so many rows."""
    return RowCache(TableSpec("w", dim=dim, dtype="int64", cache=dps.Cache(rows * (8 * dim + ROW_BYTES))))


def read(cache: RowCache, keys: list[int], level: float = 0, now: float = 0.0) -> list[int | None]:
    """The rows that are in the cache; None for those that are not."""
    rows = np.full((len(keys), 1), -1)
    missing = cache.read(np.array(keys, np.int64), level, now, HERE, rows)
    left = np.zeros(len(keys), bool) if missing is None else missing
    return [None if gone else int(row) for row, gone in zip(rows[:, 0], left, strict=True)]


def keep(cache: RowCache, keys: list[int], level: float = 0, until: float = math.inf) -> None:
    """Pull rows that hold a thousand times their key."""
    wanted = np.array(keys, np.int64)
    cache.keep(cache.begin_pull("a", wanted, level, until, HERE), 1000 * wanted[:, None])


# ---- The rules, beside a list


class ListedCache:
    """The same in a few lines: keys in the order of their last use, oldest first; all that a read wants is there."""

    def __init__(self, room: int):
        self.room, self.rows = room, dict[int, tuple[int, float]]()

    def keep(self, keys: list[int], level: float) -> None:
        for key in dict.fromkeys(keys[-self.room :]):
            self.rows.pop(key, None)
            self.rows[key] = 1000 * key, level

    def read(self, keys: list[int], level: float) -> list[int | None]:
        found = [self.rows[key] if key in self.rows and self.rows[key][1] >= level else None for key in keys]
        for key, row in zip(keys, found, strict=True):
            if row is not None:
                self.rows[key] = self.rows.pop(key)
        return [None if row is None else row[0] for row in found]


batches = st.lists(st.integers(-20, 20), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["keep", "read", "change"]), batches, st.integers(0, 3)), max_size=60))
def test_kept_rows_beside_a_list(calls):
    """With room for all keys, the cache gives what the list gives."""
    cache, listed = cache_of(100), ListedCache(100)
    for call, keys, level in calls:
        if call == "keep":
            keep(cache, keys, level)
            listed.keep(keys, level)
        elif call == "read":
            assert read(cache, keys, level) == listed.read(keys, level)
        else:
            cache.change("a", np.array(keys, np.int64)).outcome = lambda: PushOutcome.ACKNOWLEDGED
            for key in keys:
                listed.rows.pop(key, None)


@given(st.lists(st.tuples(st.booleans(), batches), max_size=60), st.integers(1, 24))
def test_the_rows_go_that_were_not_used_for_longest(calls, room):
    cache, listed = cache_of(room), ListedCache(room)
    for keeps, keys in calls:
        if keeps:
            keep(cache, keys)
            listed.keep(keys, 0)
        else:
            read(cache, keys)
            listed.read(keys, 0)
        assert len(cache) <= room
    newest = list(listed.rows)[-1:]
    if newest and calls[-1][0]:
        assert read(cache, newest) == [1000 * newest[0]], "the row that was used last is there"
    for key in range(-20, 21):
        assert read(cache, [key]) in ([None], [1000 * key])


def add(rows: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
    np.add.at(rows, places, values)


def test_rows_change_with_the_pushes_of_the_process():
    cache = cache_of(9)
    keep(cache, [1, 2])
    cache.change("a", np.array([2, 3, 2]), np.array([[5], [7], [1]]), add)
    assert read(cache, [1, 2, 3]) == [1000, 2006, None]
    cache.change("a", np.array([1]))
    assert read(cache, [1, 2]) == [None, 2006], "only the servers know what became of the row"
    cache.change("a", None)
    assert read(cache, [1, 2]) == [None, None]


@pytest.mark.parametrize("other", ["a", "b"])
def test_rows_of_a_pull_beside_a_push_are_not_kept(other):
    """Unless the trainer pulls behind its own push."""
    cache = cache_of(9)
    push = cache.change("a", np.array([1, 2]))
    behind = cache.begin_pull(other, np.array([1, 3]), 0, math.inf, HERE)
    before = cache.begin_pull(other, np.array([4, 5]), 0, math.inf, HERE)
    cache.change("a", np.array([4])).outcome = lambda: PushOutcome.ACKNOWLEDGED
    cache.keep(behind, np.array([[1], [3]]))
    cache.keep(before, np.array([[4], [5]]))
    assert read(cache, [1, 3, 4, 5]) == [1 if other == "a" else None, 3, None, 5]
    push.outcome = lambda: PushOutcome.ACKNOWLEDGED
    keep(cache, [1])
    assert read(cache, [1]) == [1000]


def test_rows_of_a_push_that_failed_go_until_it_is_acknowledged():
    cache = cache_of(9)
    keep(cache, [1, 2])
    push = cache.change("a", np.array([1]), np.array([[1]]), add)
    push.outcome = lambda: PushOutcome.DOUBTFUL
    assert read(cache, [1, 2]) == [None, 2000]
    keep(cache, [1])
    assert read(cache, [1]) == [None], "it may yet be sent again, and arrive behind this pull"
    push.outcome = lambda: PushOutcome.ACKNOWLEDGED
    keep(cache, [1])
    assert read(cache, [1]) == [1000]


def test_with_many_failed_pushes_no_row_is_kept():
    cache = cache_of(9)
    keep(cache, [1])
    for _ in range(100):
        cache.change("a", np.array([2])).outcome = lambda: PushOutcome.DOUBTFUL
    assert read(cache, [1]) == [None]
    keep(cache, [1])
    assert read(cache, [1]) == [None]


def test_rows_that_a_trainer_has_left_in_doubt_go():
    cache = cache_of(9)
    keep(cache, [1, 2])
    cache.change("a", np.array([1]), np.array([[1]]), add)
    cache.leave("a")
    assert read(cache, [1, 2]) == [None, 2000]


def test_rows_of_a_push_that_was_refused_go():
    cache = cache_of(9)
    keep(cache, [1, 2])
    cache.change("a", np.array([1]), np.array([[1]]), add).outcome = lambda: PushOutcome.REFUSED
    assert read(cache, [1, 2]) == [None, 2000]
    keep(cache, [1])
    assert read(cache, [1]) == [1000], "no part of it is sent again"


def test_keys_may_be_changed_once_they_were_given():
    cache, keys = cache_of(9), np.array([1, 2])
    pull = cache.begin_pull("a", keys, 0, math.inf, HERE)
    push = cache.change("a", keys)
    keys[:] = 3, 4
    cache.keep(pull, np.array([[1], [2]]))
    assert read(cache, [1, 2, 3, 4]) == [None] * 4
    assert push.keys.tolist() == [1, 2]


def test_rows_grow_old_and_belong_to_an_epoch_and_a_number():
    spec = TableSpec("w", dtype="int64", cache=dps.Cache(1000))
    cache = RowCache(spec)
    keep(cache, [1], until=5.0)
    assert read(cache, [1], now=5.0) == [1000]
    assert read(cache, [1], now=5.1) == [None]
    keep(cache, [2])
    pull = cache.begin_pull("a", np.array([3]), 0, math.inf, HERE)
    push = cache.change("a", np.array([7]))
    assert cache.enter(spec, 1) == (0, 1), "a server has died since"
    cache.keep(pull, np.array([[3]]))
    assert read(cache, [2, 3]) == [None, None]
    wider = dataclasses.replace(spec, id=5, dim=2)
    history, rows = cache.enter(wider, 1), np.zeros((2, 2), np.int64)
    cache.keep(cache.begin_pull("b", np.array([7, 8]), 0, math.inf, history), np.array([[7, 7], [8, 8]]))
    missing = cache.read(np.array([7, 8]), 0, 0.0, history, rows)
    assert missing.tolist() == [True, False], "a push to the table as it was may be sent again to the new one"
    assert rows.tolist() == [[0, 0], [8, 8]]
    assert read(cache, [8]) == [None], "a trainer that knows of the old table only"
    cache.change("a", np.array([8]), np.array([[1]]), add, HERE)
    assert cache.read(np.array([8]), 0, 0.0, history, rows[:1]) is not None, "its push is not one to these rows"
    assert push.outcome() is PushOutcome.OPEN


def test_pulls_that_are_given_up_are_forgotten():
    cache = cache_of(9)
    pull = cache.begin_pull("a", np.array([3]), 0, math.inf, HERE)
    cache.keep(pull, np.array([[3]]))
    cache.keep(pull, np.array([[4]]))
    assert read(cache, [3]) == [3], "the rows of a pull count once"
    pull = cache.begin_pull("a", np.array([3]), 0, math.inf, HERE)
    assert len(cache._pulls) == 1
    del pull
    assert len(cache._pulls) == 0


def test_a_shelf_has_one_cache_for_a_run_and_a_table():
    shelf, spec = CacheShelf(), TableSpec("w", id=3, cache=dps.Cache("1 kB"))
    one = shelf.cache(("run", 1), spec)
    assert shelf.cache(("run", 1), spec) is one
    assert shelf.cache(("run", 2), spec) is not one
    assert shelf.cache(("run", 1), TableSpec("v", id=4, cache=dps.Cache("1 kB"))) is not one
    assert shelf.cache(("run", 1), TableSpec("w", id=4, cache=dps.Cache("1 kB"))) is one, "it was restored"
    assert shelf.of_run(("run", 1)) == [one]


OPTIMIZERS = [dps.Add(), dps.Assign(), dps.SGD(0.1), dps.SGD(0.1, l1=0.1), dps.SGD(dps.InverseTime(0.1, 0.5))]
OPTIMIZERS += [dps.Adagrad(0.1), dps.Adam(0.1), dps.SGD(dps.StalenessAware(0.1)), dps.FTRL(0.1)]


@pytest.mark.parametrize("rule", [PUSH, ADD, ASSIGN])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_steps_are_those_of_the_servers(optimizer, rule):
    spec = TableSpec("w", dim=DIM, optimizer=optimizer)
    step = step_of(spec, rule, 7)
    stepped = rule != PUSH or repr(optimizer) in map(repr, (*OPTIMIZERS[:3], OPTIMIZERS[4]))
    assert (step is not None) == stepped
    if step is None:
        return
    rows, values, places = drawn(0), drawn(1, 20), np.random.default_rng(2).permutation(KEYS)[:20]
    expected = rows.copy()
    if rule == PUSH:
        stepping = expected[places]
        optimizer.step(stepping, values, clock=7)
        expected[places] = stepping
    else:
        expected[places] = values if rule == ASSIGN else expected[places] + values
    step(rows, places, values)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rule", [PUSH, ADD])
def test_halves_are_not_added_up_one_by_one(dtype, rule):
    """Because repeats of a key in a push are summed in float32, and rounded once."""
    step = step_of(TableSpec("w", dtype=dtype), rule, 0)
    assert (step is None) == (dtype == "float16")
    assert step_of(TableSpec("w", dtype=dtype), ASSIGN, 0) is not None


# ---- Trainers


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=2, processes=False) as started:
        yield started


def in_all_ways(trainer, parts, name):
    """What a trainer reads of a table, beside changes of its own in all ways."""
    got, table = [], trainer.table(name)
    for clock, rows in trainer.iterate(range(5), pull=lambda clock: {name: ALL[clock : 50 + clock]}, ahead=2):
        got.append(rows[name].values.copy())
        got.append(trainer.pull(name, ALL))
        rows[name].values[...] = 7.0  # they belong to the batch
        trainer.push(name, ALL[::2], drawn(clock, 50))
        got.append(table.pull(ALL.reshape(5, 20)))
        trainer.push_async(name, [3, 4, 3], drawn(clock, 3))
        got.append(trainer.pull({name: [3, 3, 4]})[name])
        trainer.add(name, [5], drawn(clock, 1))
        trainer.assign(name, [6], drawn(clock, 1))
        got.append(trainer.pull(name, [[5], [6]], out=np.empty((2, 1, DIM), np.float32)))
        trainer.delete(name, [8, 9])
        got.append(trainer.pull_async(name, ALL).result())
        got.append(trainer.push_pull(name, [10, 11], drawn(clock, 2)))
        trainer.increment(name, [12], drawn(clock, 1)) if clock % 2 else None
        got.append(trainer.pull(name, ALL[9:14]))
        if clock == 3:
            trainer.clear(name)
            got.append(trainer.pull(name, ALL[9:14]))
    return got


@pytest.mark.parametrize("staleness", [0, 3, math.inf])
@pytest.mark.parametrize("optimizer", [None, dps.SGD(0.1), dps.Adagrad(0.1), dps.Assign()], ids=repr)
def test_one_trainer_reads_bit_for_bit_what_it_reads_without(cluster, optimizer, staleness):
    with dps.ParameterServer(cluster) as ps:
        read = []
        for cache in (None, "1 MB", 2000):  # the last one has room for 30 rows
            ps.table("w", dim=DIM, optimizer=optimizer, cache=cache, exist_ok=True)
            read.append(ps.run(in_all_ways, [0], trainers=1, staleness=staleness, args=("w",), progress=False)[0])
            ps.drop_table("w")
        for with_cache in read[1:]:
            for one, other in zip(read[0], with_cache, strict=True):
                np.testing.assert_array_equal(one, other)


def pulls(trainer, parts, clocks, changes):
    """Pull all rows twice in each clock."""
    for _ in trainer.iterate(range(clocks)):
        for _ in range(2):
            trainer.pull("w", ALL)
        if changes:
            trainer.push("w", ALL, np.ones((KEYS, DIM), np.float32))


@pytest.mark.parametrize("optimizer", [dps.SGD(0.1), dps.Adagrad(0.1)], ids=repr)
@pytest.mark.parametrize(("staleness", "clocks_a_pull"), [(0, 1), (3, 4)])
def test_rows_are_pulled_once_in_so_many_clocks(cluster, optimizer, staleness, clocks_a_pull):
    """The servers count the bytes. A row whose optimizer has a state is pulled after each push."""
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=optimizer, cache="1 MB")
        ps.run(pulls, [0], trainers=1, staleness=staleness, args=(8, True), progress=False)
        times = 8 if isinstance(optimizer, dps.Adagrad) else 8 // clocks_a_pull
        wait_until(lambda: ps.status().tables["w"].traffic.pulled == times * KEYS * 4 * DIM)


TURN = threading.Barrier(2)


def take_turns(trainer, parts):
    for _ in trainer.iterate(range(4)):
        for number in range(2):
            TURN.wait(30)
            if trainer.number == number:
                trainer.pull("w", ALL)


def test_trainers_of_a_process_share_rows(cluster):
    """Two trainers in threads pull once what each of them would have pulled."""
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, cache="1 MB")
        ps.run(take_turns, [0, 1], trainers=2, progress=False)
        wait_until(lambda: ps.status().tables["w"].traffic.pulled == 4 * KEYS * 4 * DIM)


def test_sums_of_a_clock_are_read_when_it_has_ended(cluster):
    def train(trainer, parts):
        seen = []
        for _ in trainer.iterate(range(4)):
            seen.append(trainer.pull("w", [1]).item(0))
            trainer.push("w", [1], np.ones((1, DIM), np.float32))
            seen.append(trainer.pull("w", [1]).item(0))
        return seen

    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, aggregate="sum", cache="1 MB")
        for seen in ps.run(train, [0, 1], trainers=2, progress=False):
            assert seen == [0, 0, 2, 2, 4, 4, 6, 6]


def reuse_arrays(trainer, parts):
    """Arrays are used again while calls are on their way; what the servers have, and what is read, of keys 1 to 4."""
    trainer.push("w", [1, 2, 3, 4], np.arange(4 * DIM, dtype=np.float32).reshape(4, DIM))
    keys, out = np.array([1, 2]), np.zeros((2, DIM), np.float32)
    pending = trainer.pull_async("w", keys)
    keys[:] = 3, 4
    pending.result()
    pending = trainer.pull_async("w", [3, 4], out=out)
    trainer.wait()
    out -= 5
    pending.result()
    trainer.push_async("w", keys, np.ones((2, DIM), np.float32))
    keys[:] = 1, 2
    with dps.Client(trainer.client.ticket) as client:
        trainer.wait()
        return client.pull("w", [1, 2, 3, 4]), trainer.pull("w", [1, 2, 3, 4])


def test_arrays_may_be_used_again_while_a_call_is_on_its_way(cluster):
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, cache="1 MB")
        ((there, read),) = ps.run(reuse_arrays, [0], trainers=1, progress=False)
        np.testing.assert_array_equal(read, there)


def test_a_push_that_is_refused_leaves_nothing(cluster):
    def train(trainer, parts):
        trainer.pull("w", [1, 2])
        with pytest.raises(NotFiniteError):
            trainer.push("w", [1, 2], np.full((2, DIM), np.nan, np.float32))
        return trainer.pull("w", [1, 2])

    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.SGD(0.1), cache="1 MB")
        np.testing.assert_array_equal(ps.run(train, [0], trainers=1, progress=False)[0], np.zeros((2, DIM)))


@dps.function(changes=True)
def double(rows):
    rows.values += rows.values


def test_functions_change_rows_that_are_kept(cluster):
    def train(trainer, parts):
        trainer.push("w", [1], np.ones((1, DIM), np.float32))
        before = trainer.pull("w", [1]).item(0)
        trainer.call(double, "w", [1])
        return before, trainer.pull("w", [1]).item(0)

    with dps.ParameterServer(cluster) as ps:
        ps.register(double)
        ps.table("w", dim=DIM, cache="1 MB")
        assert ps.run(train, [0], trainers=1, progress=False) == [(1.0, 2.0)]


def test_what_clients_change_is_seen_after_a_while(cluster):
    """A row has an age; and a client without a clock reads what there is."""

    def train(trainer, parts):
        before = trainer.pull("w", [1]).item(0)
        outside = trainer.client.ticket
        with dps.Client(outside) as client:
            client.push("w", [1], np.ones((1, DIM), np.float32))
            assert client.pull("w", [1]).item(0) == 1.0
        kept = trainer.pull("w", [1]).item(0)
        wait_until(lambda: trainer.pull("w", [1]).item(0) == 1.0)
        return before, kept

    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, cache=dps.Cache("1 MB", age="2 s"))
        assert ps.run(train, [0], trainers=1, staleness=5, progress=False) == [(0.0, 0.0)]


# ---- What is refused


@pytest.mark.parametrize(
    ("cache", "error", "words"),
    [
        ("64 lightyears", InputError, "nbytes"),
        (-1, InputError, "nbytes"),
        (True, InputError, "cache is bytes"),
        (dps.Wire(), InputError, "nbytes"),
    ],
)
def test_wrong_caches_are_refused(cluster, cache, error, words):
    with dps.ParameterServer(cluster) as ps, pytest.raises(error, match=words):
        ps.table("w", cache=cache)


def test_tables_that_keep_no_rows():
    with pytest.raises(InputError, match="bytes of width 8"):
        TableSpec("w", dtype="S8", optimizer=dps.Assign(), cache=dps.Cache("1 MB"))
    with pytest.raises(InputTypeError, match=r"a dps\.Cache"):
        TableSpec("w", cache="1 MB")  # type: ignore[arg-type]
    spec = TableSpec("w", cache=dps.Cache("1 MB", age=3))
    assert TableSpec.from_dict(spec.to_dict()) == spec
    assert "cache" not in TableSpec("w").to_dict()
