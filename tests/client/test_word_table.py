"""Words and ids: a dict as the oracle of all calls, keys that collide, clients that race."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import dask.array
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from function_shards import Shards
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from word_schedules import few_keys

import dps
from dps.engine.client.word_table import BATCH, WordTable
from dps.engine.core import texts
from dps.engine.functions.words import WordLayout, assign_words
from dps.engine.state.ops import ASSIGN, TableSpec
from dps.errors import DPSError, InputError, InputTypeError, NameInUseError, UnknownTableError


def as_bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


# ---- rules


@pytest.mark.parametrize("lanes", [1, 2, 64, 1024])
def test_ids_and_counters_have_keys_of_their_own_on_the_shard_of_their_lane(lanes) -> None:
    layout = WordLayout.made(lanes, 56)
    ids = np.concatenate([np.arange(5 * lanes), 2**40 + np.arange(lanes), [-1, -(2**63), 2**63 - 1]])
    keys, counters = layout.keys_of_ids(ids), layout.counters(np.arange(lanes))
    known = keys[:-3]
    assert len(np.unique(np.concatenate([known, counters]))) == len(known) + lanes
    assert not np.isin(keys[-3:], np.concatenate([known, counters])).any(), "no id has them"
    assert np.array_equal(layout.lanes_of(known), ids[:-3] % lanes)
    assert np.array_equal(layout.lanes_of(counters), np.arange(lanes))
    spec = TableSpec("w", shards=1 if lanes == 1 else 2, **layout.of_table)
    assert WordLayout.of(spec) == layout
    shards = Shards(spec)
    for shard, own in shards.grouped(np.concatenate([known, counters])):
        assert set(layout.lanes_of(own) * spec.shards // lanes) == {shard.number}
    for lane in (0, lanes - 1):
        own, range_ = known[ids[:-3] % lanes == lane], layout.range_of_ids(lane)
        assert ((own >= range_.start) & (own < range_.stop)).all()
        assert not range_.start <= counters[lane] < range_.stop


# ---- the calls, beside a dict


class Memory:
    """A table of words in this process, without a server."""

    rehearses = False

    def __init__(self, lanes: int = 4, shards: int = 2):
        layout = WordLayout.made(lanes, 16)
        self.words = Shards(TableSpec("words", shards=shards, **layout.of_table))

    def spec_of(self, table: str) -> TableSpec:
        if table != "words":
            raise UnknownTableError(table)
        return self.words.spec

    def pull(self, table: str, keys) -> object:
        if isinstance(keys, slice):
            own = np.sort(np.concatenate([shard.keys() for shard in self.words.shards]))
            own = own[(own >= keys.start) & (own < keys.stop)]
            return own, self.pull(table, own)
        out = np.empty((len(keys), self.words.spec.dim), np.int64)
        for shard, own in self.words.grouped(keys):
            rows = np.empty((len(own), self.words.spec.dim), np.int64)
            shard.pull(own, rows)
            which = np.isin(keys, own)
            out[which] = rows[np.searchsorted(own, keys[which])]
        return out

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys and rows, as a checkpoint has them."""
        keys = np.concatenate([shard.keys() for shard in self.words.shards])
        return keys, self.pull("words", keys)

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.words = Shards(self.words.spec)
        self.words.change(ASSIGN, keys, rows)

    def call_for_itself(self, function, table, keys, **arguments) -> object:
        return self.words.call(function, keys, **arguments)

    def forget_routes(self) -> None: ...


class Words(RuleBasedStateMachine):
    """Random calls, with keys that collide, checkpoints and restores."""

    some = st.lists(st.sampled_from([*(f"w{n}" for n in range(24)), "", b"\xff", "ß", "a" * 16]), max_size=12)

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.table = WordTable("words", self.memory, self.memory)
        self.ids: dict[bytes, int] = {}
        self.kept = self.memory.contents(), {}

    @rule(words=some)
    def assign(self, words) -> None:
        for word, number in zip(map(as_bytes, words), self.table.ids(words).tolist(), strict=True):
            assert number >= 0
            if word not in self.ids:
                assert number not in self.ids.values()
                self.ids[word] = number
            assert self.ids[word] == number

    @rule(words=some)
    def look_up(self, words) -> None:
        expected = [self.ids.get(as_bytes(word), -1) for word in words]
        assert self.table.ids(words, assign=False).tolist() == expected
        assert self.table.frozen().ids(np.array(words, object)).tolist() == expected

    @rule(ids=st.lists(st.integers(-2, 60), max_size=8))
    def lead_back(self, ids) -> None:
        of_id = {number: word for word, number in self.ids.items()}
        assert self.table.words(ids, as_bytes=True) == [of_id.get(number) for number in ids]

    @rule()
    def checkpoint(self) -> None:
        self.kept = self.memory.contents(), dict(self.ids)

    @rule()
    def restore(self) -> None:
        self.memory.load(*self.kept[0])
        self.ids = dict(self.kept[1])

    @invariant()
    def all_is_there(self) -> None:
        assert {word: number for number, word in self.table.items(as_bytes=True)} == self.ids
        assert len(self.table) == len(self.ids)
        assert self.table.size == max(self.ids.values(), default=-1) + 1


@settings(max_examples=25, stateful_step_count=12)
class WithCollisions(Words):
    """As most tables never are: with 16 keys in a lane."""

    def __init__(self) -> None:
        self._patch = mock.patch.object(texts, "keys_of", few_keys)
        self._patch.start()
        super().__init__()

    def teardown(self) -> None:
        self._patch.stop()


TestWordsWithCollisions = WithCollisions.TestCase


def test_where_all_keys_are_taken_an_error_says_so() -> None:
    def one_key(octets, ends, which, bits, probe, out) -> None:
        out[...] = np.iinfo(np.int64).min

    table = WordTable("words", memory := Memory(), memory)
    with mock.patch.object(texts, "keys_of", one_key), pytest.raises(DPSError, match="2 words found 64 keys taken"):
        table.ids(["a", "b", "c"])


def test_many_words_go_in_batches_and_none_is_named_if_one_is_too_long() -> None:
    table = WordTable("words", memory := Memory(), memory)
    words = [f"w{n}" for n in range(BATCH + 10)]
    with pytest.raises(InputError, match=f"word {BATCH + 9} has 17 bytes, and words have at most 16: cut it"):
        table.ids([*words[:-1], "x" * 17])
    assert len(table) == 0
    ids = table.ids(words)
    assert len(set(ids.tolist())) == BATCH + 10
    assert table.words(ids) == words
    assert table.size < 1.1 * BATCH


@pytest.mark.parametrize(
    "given_",
    [
        ["a", "b", "a"],
        ("a", b"b", "a"),
        np.array(["a", "b", "a"]),
        np.array([b"a", b"b", b"a"]),
        np.array(["a", "b", "a"], object),
        pd.Series(["a", "b", "a"]),
        pd.Series(["a", "b", "a"], dtype="category"),
        pd.Categorical(["a", "b", "a"]),
        pd.Index(["a", "b", "a"]),
        pa.array(["a", "b", "a"]),
        pa.chunked_array([["a"], ["b", "a"]]),
        (word for word in "aba"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_words_are_taken_in_any_form(given_) -> None:
    table = WordTable("words", memory := Memory(lanes=1, shards=1), memory)
    ids = table.ids(given_)
    assert ids.dtype == np.int64
    assert ids.tolist() == [0, 1, 0]
    assert table.words(ids) == ["a", "b", "a"]
    assert table.ids(np.array([["a"], ["b"]])).shape == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ("word", InputTypeError, "not 'word' alone"),
        ([1], InputTypeError, "word 0 is no text but a int"),
        (["a", None], InputTypeError, "word 1 is no text but a NoneType"),
        (np.array([1.5]), InputTypeError, "no text but a float"),
        (pd.Series(["a", None], dtype="category"), InputTypeError, "1 of 2 words are missing"),
        (dask.array.ones(3), InputTypeError, "map its partitions"),
        (["\ud800"], InputError, "no text that UTF-8 can write"),
    ],
)
def test_what_is_no_text_is_refused(wrong, error, said) -> None:
    table = WordTable("words", memory := Memory(), memory)
    with pytest.raises(error, match=said):
        table.ids(wrong)
    assert len(table) == 0


def test_what_is_no_id_and_what_is_not_counted_is_refused() -> None:
    table = WordTable("words", memory := Memory(), memory)
    with pytest.raises(InputTypeError, match="ids are whole numbers"):
        table.words([0.5])
    for call in (table.count, table.counts):
        with pytest.raises(InputError, match="counts=True"):
            call([])
    ids = table.ids([b"\xff"])
    with pytest.raises(InputError, match="ask as_bytes=True"):
        table.words(ids)
    assert table.words(ids, as_bytes=True) == [b"\xff"]
    assert table.words([]) == []
    assert table.ids([]).tolist() == []


# ---- on servers


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=2, trainers=2, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2, copies=2) as made,
    ):
        yield made


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_clients_that_race_get_the_same_ids(ps) -> None:
    ps.vocabulary("raced")
    rounds, authors = 20, 4
    given_ = [[f"w{n}" for n in range(50 * turn, 50 * turn + 80)] for turn in range(rounds)]
    found: list = [[] for _ in range(authors)]
    barrier = threading.Barrier(authors)

    def name(author: int) -> None:
        with dps.Client(ps.ticket) as client:
            words = client.vocabulary("raced")
            for batch in given_:
                barrier.wait()
                found[author].append(words.ids(batch[:: 1 if author % 2 else -1]).tolist()[:: 1 if author % 2 else -1])

    threads = [threading.Thread(target=name, args=(author,)) for author in range(authors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == found[0] for each in found)
    ids = {
        word: number
        for batch, ids in zip(given_, found[0], strict=True)
        for word, number in zip(batch, ids, strict=True)
    }
    assert len(set(ids.values())) == len(ids) == len(ps.vocabulary("raced"))


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_trainers_count_and_share_words_and_a_restored_vocabulary_goes_on(ps, tmp_path) -> None:
    words = ps.vocabulary("text", counts=True)

    def train(trainer, parts) -> list:
        seen = trainer.vocabulary("text")
        return [seen.count(batch).tolist() for _ in range(2) for part in parts for batch in [part]]

    parts = ps.dask_client.scatter([["a", "b", "a"], ["b", "c"]])
    found = [each for each in ps.run(train, parts) if each]
    a, b, c = words.ids(["a", "b", "c"], assign=False).tolist()
    assert [batch for each in found for batch in each]  # each trainer has named words
    assert len({a, b, c}) == 3
    assert words.counts([a, b, c]).tolist() == [4, 4, 2]
    ps.checkpoint(str(tmp_path))
    late = words.ids(["late"])
    ps.restore(str(tmp_path))
    assert words.ids(["a", "b", "c", "late"], assign=False).tolist() == [a, b, c, -1]
    assert words.words(late) == [None]
    ps.drop_table("text")
    with pytest.raises(UnknownTableError, match="'text'"):
        words.ids(["a"])
    assert len(ps.vocabulary("text", lanes=1)) == 0
    assert words.ids(["z"]).tolist() == [0]


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_words_apart_have_connections_of_their_own_which_are_closed(ps) -> None:
    words = ps.vocabulary("apart")
    with words.apart() as own, words.frozen().apart() as frozen:
        ids = own.ids(["a", "b"])
        assert (words.ids(["b", "a"]) == ids[::-1]).all()
        assert frozen.ids(["b", "c"]).tolist() == [ids[1], -1], "it is frozen as the words were"
    with pytest.raises(DPSError, match="closed"):
        own.ids(["a"])
    assert (words.ids(["a", "b"]) == ids).all()


def test_a_vocabulary_is_made_once(ps) -> None:
    made = ps.vocabulary("once", lanes=2, width=16)
    assert ps.vocabulary("once").ids(["a"]) == made.ids(["a"])
    with pytest.raises(NameInUseError, match="lanes=2 and width=16, not lanes=4"):
        ps.vocabulary("once", lanes=4)
    ps.table("other")
    for name in (ps, ps.client()):
        with pytest.raises(InputError, match="table 'other' is no vocabulary"):
            name.vocabulary("other")
    for wrong in ({"lanes": 3}, {"lanes": 2048}, {"width": 12}, {"width": 256}, {"width": True}):
        with pytest.raises(InputError, match=r"lanes is a power of two|width is the bytes"):
            ps.vocabulary("new", **wrong)
    with pytest.raises(UnknownTableError):
        ps.client().vocabulary("none")


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_function_of_a_user_puts_rows_on_all_copies(ps) -> None:
    near = ps.table("near", dtype="int64", shards=2, partition=dps.BlockPartition(8))

    @dps.function(changes=True)
    def index(rows):
        rows.values += 1
        rows.put(rows.keys + 100, rows.values * 10)

    ps.call(index, near, keys=[1, 2, 768])
    ps.call(index, near, keys=[1])
    assert near.pull([1, 2, 768, 101, 102, 868]).tolist() == [2, 1, 1, 20, 10, 10]
    assert len(near) == 6


def test_the_function_puts_words_that_have_no_row_only() -> None:
    memory = Memory(lanes=1, shards=1)
    layout = WordLayout.of(memory.words.spec)
    keys, rows = np.array([5 - 2**63, 9 - 2**63]), np.array([[1, 97, 0], [1, 98, 0]])
    named = np.concatenate([keys, layout.counters(np.array([0]))])
    for _ in range(2):  # a repeat changes nothing
        memory.call_for_itself(assign_words, "words", named, at=keys, turns=np.array([7, 3]), words=rows)
        assert memory.pull("words", keys)[:, 0].tolist() == [2 << 8 | 1, 1 << 8 | 1]
        assert memory.pull("words", layout.counters(np.array([0])))[0, 0] == 2
