"""The matrix of verbs has no holes: each has an asynchronous form, takes several tables, and is a handle's method."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from servers import Servers

import dps
from dps.engine.client.table import through
from dps.engine.client.verbs import MergingVerbs, Verbs
from dps.engine.state.ops import TableSpec
from dps.errors import DataLostError, InputError, InputTypeError, RequestTimeoutError, UnknownTableError
from dps.functions import library

VERBS = ("pull", "pull_certified", "push", "push_pull", "add", "assign")
READERS = ("pull", "pull_certified")  # take keys; the others keys and values
ENDINGS = ("delete", "clear")  # of rows
OTHERS = ("call", "keys")
MERGING = ("increment", "merge_max", "merge_min")  # of trainers
ALL = [*VERBS, *ENDINGS, *OTHERS]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers():
    with Servers(2) as servers:
        servers.table(TableSpec("a", dim=2, dtype="int64", shards=4))
        servers.table(TableSpec("b", rows=9, dtype="int64", shards=3))
        yield servers


@pytest.fixture
def client(servers):
    with servers.client() as client:
        yield client


def parameters(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("verb", ALL)
@pytest.mark.parametrize("owner", [dps.Client, dps.Trainer, dps.Table])
def test_each_verb_has_an_asynchronous_form_with_the_same_parameters(owner, verb):
    now, later = getattr(owner, verb), getattr(owner, f"{verb}_async")
    assert parameters(now) == parameters(later)
    wanted = parameters(getattr(dps.Client, verb))
    of_owner = [p for p in wanted if owner is not dps.Table or p[0] != "table"]
    if verb == "delete" and owner is dps.Table:  # of one table, so the keys are not left out
        of_owner = [("keys", inspect.Parameter.empty) if p[0] == "keys" else p for p in of_owner]
    assert parameters(now) == of_owner


def names_of(owner):
    return {name for name in vars(owner) if not name.startswith("_")}


def test_no_verb_is_missing_here():
    found = {name.removesuffix("_async") for name, _ in inspect.getmembers(dps.Client) if name.endswith("_async")}
    assert found == {*ALL}
    assert names_of(Verbs) == {*ALL, *(f"{verb}_async" for verb in ALL)}
    assert names_of(MergingVerbs) == {*MERGING}


@pytest.mark.parametrize("verb", sorted(names_of(Verbs)))
def test_a_client_takes_what_the_verb_says(verb):
    own = inspect.signature(getattr(dps.Client, verb), follow_wrapped=False)
    assert [(p.name, p.default, p.kind) for p in own.parameters.values()] == [
        (p.name, p.default, p.kind) for p in inspect.signature(getattr(Verbs, verb)).parameters.values()
    ]


@pytest.mark.parametrize("verb", sorted(names_of(Verbs) | names_of(MergingVerbs)))
def test_each_verb_is_documented_once_and_shown_on_each_class(verb):
    owners = [dps.Trainer, dps.Table] if verb in MERGING else [dps.Client, dps.Trainer, dps.Table]
    text = inspect.getdoc(getattr(MergingVerbs, verb))
    for owner in owners:
        shown = inspect.getdoc(getattr(owner, verb))
        if owner is not dps.Table:
            assert shown == text
            continue
        assert shown.splitlines()[0] == text.splitlines()[0]
        assert not re.search("^table : |^Examples$|everal tables|dict of", shown, re.M), shown
        listed = set(re.findall(r"^\*{0,2}(\w+) : |^\*\*(\w+)$", shown.partition("Returns\n")[0], re.M))
        if "Parameters\n" in shown:
            wanted = [p.name for p in inspect.signature(getattr(dps.Table, verb)).parameters.values()]
            assert {name for pair in listed for name in pair if name} == {*wanted} - {"self"}


def test_the_table_in_the_documentation_is_the_matrix():
    page = (ROOT / "docs/concepts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([a-z, ]+) \| `\{table: (.+)\}` \|", page, re.M)
    assert {verb for verb, *_ in rows} == {*ALL}
    others = {"call": ("function, keys", "keys"), "keys": ("shard", "shard"), "clear": ("nothing", "None")}
    for verb, later, takes, several in rows:
        assert later == f"{verb}_async"
        if verb in others:
            assert (takes, several) == others[verb]
            continue
        keys_only = verb in (*READERS, "delete")
        assert (takes, several) == (("keys", "keys") if keys_only else ("keys, values", "(keys, values)"))


def plain(answer):
    return answer[0].tolist() if isinstance(answer, tuple) else None if answer is None else answer.tolist()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_several_tables_are_as_one_after_the_other(client, verb, later):
    a, b = client.table("a"), client.table("b")
    before = {a: [[3, 4], [5, 6]], b: [7, 8]}
    handed = {a: ([1, 2], [[1, 1], [2, 2]]), b: (slice(4, 6), [3, 4])}

    def call(*args):
        if not later:
            return getattr(client, verb)(*args)
        pending = getattr(client, f"{verb}_async")(*args)
        assert pending.exception() is None
        assert pending.done()
        return pending.result()

    for spelled in (lambda table: table, lambda table: table.name):
        seen = []
        for together in (False, True):
            for table, rows in before.items():
                table[handed[table][0]] = rows
            asked = {spelled(table): keys if verb in READERS else (keys, g) for table, (keys, g) in handed.items()}
            if together:
                answers = call(asked)
            else:
                answers = {t: call(t, keys) if verb in READERS else call(t, *keys) for t, keys in asked.items()}
            if answers is None:
                answers = dict.fromkeys(asked)
            assert list(answers) == list(asked)
            seen.append([[plain(answers[spelled(t)]), t[handed[t][0]].tolist()] for t in before])
        assert seen[0] == seen[1]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in READERS])
def test_what_is_wrong_with_one_of_several_tables_is_found_before_anything_is_sent(client, verb):
    before = client.pull("a", [1])
    for call in (getattr(client, verb), getattr(client, f"{verb}_async")):
        with pytest.raises(InputError):
            call({"a": ([1], 1), "b": ([1], [1, 2, 3])})
        with pytest.raises(UnknownTableError):
            call({"a": ([1], 1), "c": ([1], 1)})
    np.testing.assert_array_equal(client.pull("a", [1]), before)


def test_places_for_the_answers_of_several_tables(client):
    outs = {"a": np.zeros((2, 2), np.int64), "b": np.zeros(9, np.int64)}
    for answers in (
        client.pull({"a": [1, 2], "b": None}, out=outs),
        client.push_pull({"a": ([1, 2], 1), "b": (None, 1)}, out=outs),
        client.pull_async({"a": [1, 2], "b": None}, out=outs).result(),
    ):
        assert all(answers[name] is outs[name] for name in outs)
    for wrong in (np.zeros(3), 5, [np.zeros(3)]):
        with pytest.raises(InputError, match=f"a mapping .*; not {type(wrong).__name__}"):
            client.pull({"a": [1, 2], "b": None}, out=wrong)


def test_rows_of_several_tables_are_deleted_at_once(client):
    def fill():
        client.assign({"a": ([1, 2, 3], 7), "b": (None, 8)})

    for later in (False, True):
        fill()
        deleted = {"a": [1, 3, 100], "b": slice(2, 4)}
        assert (client.delete_async(deleted).result() if later else client.delete(deleted)) is None
        assert client.pull("a", [1, 2, 3]).tolist() == [[0, 0], [7, 7], [0, 0]]
        assert client.pull("b").tolist() == [8, 8, 0, 0, 8, 8, 8, 8, 8]
        fill()
        cleared = {"a": None, client.table("b"): None}
        assert (client.clear_async(cleared).result() if later else client.clear(cleared)) is None
        assert not client.pull("b").any()
        assert list(client.keys("a")) == []
        client.assign("b", None, 8)
        with pytest.raises(InputError, match=r"clear deletes all rows: .* table 'b'"):
            client.clear({"a": None, "b": [1]})
        assert client.pull("b").all()
        with pytest.raises(UnknownTableError):
            client.clear({"b": None, "c": None})
        assert client.pull("b").all()


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1 << 20, 7])
def test_keys_of_several_tables_and_without_waiting(servers, client, monkeypatch, most):
    monkeypatch.setattr("dps.engine.client.scans.KEYS_A_SCAN", most)
    servers.table(TableSpec("k", dtype="int64", shards=4))
    servers.table(TableSpec("l", dtype="int64", shards=2))
    wanted = {"k": list(range(100)), "l": [5, 6]}
    client.push({name: (keys, 1) for name, keys in wanted.items()})

    def sorted_keys(parts):
        parts = list(parts)
        assert all(len(part) <= most for part in parts)
        return sorted(np.concatenate([*parts, np.zeros(0, np.int64)]).tolist())

    assert {name: sorted_keys(parts) for name, parts in client.keys({"k": None, "l": None}).items()} == wanted
    pending = client.keys_async({"k": None, client.table("l"): None})
    client.push("k", [7], 1)  # another call goes past it
    assert {str(getattr(t, "name", t)): sorted_keys(parts) for t, parts in pending.result().items()} == wanted
    assert pending.done()
    by_shard = [client.keys_async("k", shard).result() for shard in range(4)]
    assert [[part.tolist() for part in parts] for parts in by_shard] == [
        [part.tolist() for part in client.keys({"k": shard})["k"]] for shard in range(4)
    ]
    assert sorted_keys(part for parts in by_shard for part in parts) == wanted["k"]
    table = client.table("k")
    assert sorted_keys(table.keys_async().result()) == wanted["k"]
    assert sorted_keys(table.keys_async(shard=2).result()) == sorted_keys(by_shard[2])
    with pytest.raises(InputError, match="table 'b' is dense"):
        client.keys_async("b")
    with pytest.raises(UnknownTableError):
        client.keys_async({"k": None, "c": None})


def test_keys_that_were_asked_for_of_a_table_that_is_gone(servers):
    gone = TableSpec("gone", dtype="int64", shards=2)
    servers.table(gone)
    with servers.client() as client:
        client.push("gone", [1], 1)
        assert [part.tolist() for part in client.keys_async("gone").result()] == [[1]]
        servers.table(gone)
        client.forget_routes()
        assert client.keys_async("gone").result() == []
        servers.drop("gone")
        assert isinstance(client.keys_async("gone").exception(), UnknownTableError)


# ---- functions ------------------------------------------------------------------------------------------------------


def test_functions_are_called_without_waiting(client):
    client.assign({"a": ([1, 2, 3], 2), "b": (None, 1)})
    a, b = client.table("a"), client.table("b")
    asked = [
        client.call_async(library.asum, "a", [1, 2]),
        a.call_async(library.asum, keys=[2]),
        b.call_async(library.asum),
    ]
    client.add("b", [0], 5)  # on the same connections, while answers are on their way
    assert client.pull("b", [0, 1]).tolist() == [6, 1]
    pulled = client.pull_async("a", [1])
    assert [asked[0].result(), asked[1].result()] == [8, 4]
    assert asked[2].result() in (9, 14)  # before the addition, or behind it
    assert pulled.result().tolist() == [[2, 2]]
    assert asked[0].done()
    assert asked[0].result() == 8
    assert asked[0].exception() is None


def test_functions_are_called_on_several_tables(client):
    client.assign({"a": ([1, 2, 3], 2), "b": (None, 1)})
    wanted = {"a": client.call(library.asum, "a", [1, 2]), "b": client.call(library.asum, "b")}
    assert wanted == {"a": 8, "b": 9}
    assert client.call(library.asum, {"a": [1, 2], "b": None}) == wanted
    pending = client.call_async(library.asum, {"a": [1, 2], "b": None})
    assert pending.result() == wanted
    for turn, call in enumerate((client.call, lambda *args, **named: client.call_async(*args, **named).result()), 1):
        call(library.scale, {"a": [1], "b": slice(0, 2)}, value=2)
        assert client.pull("a", [1, 2]).tolist() == [[2 * 2**turn] * 2, [2, 2]]
        assert client.pull("b").tolist() == [2**turn] * 2 + [1] * 7


def test_a_function_that_changes_rows_has_ended_when_its_call_returns(client):
    client.assign("b", None, 1)
    pending = client.call_async(library.scale, "b", value=3)
    assert pending.done()
    assert client.pull("b").tolist() == [3] * 9
    assert pending.exception() is None
    with pytest.raises(InputTypeError, match="call takes a function"):
        client.call_async(len, "b")
    with pytest.raises(UnknownTableError):
        client.call_async(library.asum, "c")
    with pytest.raises(UnknownTableError):
        client.call_async(library.asum, {"b": None, "c": None})


def test_what_was_asked_is_asked_again_where_a_server_is_gone():
    with Servers(3) as servers:
        servers.table(TableSpec("t", dtype="int64", shards=8, copies=2))
        with servers.client() as client:
            client.push("t", range(64), 1)
            called, scanned = client.call_async(library.asum, "t"), client.keys_async("t")
            servers.kill(1)
            assert called.result() == 64
            assert sorted(np.concatenate(scanned.result()).tolist()) == list(range(64))
            servers.kill(2)  # found when the call is made
            called, scanned = client.call_async(library.asum, "t"), client.keys_async("t")
            assert isinstance(called.exception(), DataLostError | None)
            assert isinstance(scanned.exception(), DataLostError | None)


# ---- futures --------------------------------------------------------------------------------------------------------


def test_done_becomes_true_without_a_call_that_waits(client):
    pending = client.pull_async({"a": range(1000), "b": None})
    deadline = client.session.now() + 20
    while not pending.done():
        assert client.session.now() < deadline
        client.session.sleep(0.001)
    assert pending.result()["b"].shape == (9,)


def test_the_error_of_a_call_is_its_exception(servers):
    gone = TableSpec("gone", dtype="int64", shards=2)
    servers.table(gone)
    with servers.client() as client:
        client.pull("gone", [1])
        servers.drop("gone")
        pending = client.push_async("gone", [1], 1)
        error = pending.exception()
        assert isinstance(error, UnknownTableError)
        assert pending.done()
        with pytest.raises(UnknownTableError):
            pending.result()
        client.wait()  # the error was asked for


def test_a_time_out_ends_the_call(client):
    pending = client.pull_async("a", range(1 << 17))
    if not pending.done():
        error = pending.exception(timeout=0)
        assert isinstance(error, RequestTimeoutError | None)
    assert client.pull("b").shape == (9,)


def test_a_function_that_is_not_answered_in_time(client):
    client.assign("b", None, 1)
    pending = client.call_async(library.asum, "b")
    error = pending.exception(timeout=0)
    if error is not None:
        assert isinstance(error, RequestTimeoutError)
        assert pending.exception() is error
    assert client.call(library.asum, "b") == 9


# ---- handles --------------------------------------------------------------------------------------------------------


def test_a_handle_is_called_as_the_table(client, servers):
    fresh = servers.table(TableSpec("w", dim=2, dtype="int64", shards=4))
    w = client.table("w")
    assert (w.name, w.dim, w.spec, len(w), bool(w)) == ("w", 2, fresh, 0, True)
    w.push([1, 2], [[1, 1], [2, 2]])
    w.add([1], [[10, 10]])
    w.assign([5], 7)
    w[6] = [8, 9]
    assert w.pull([1, 2, 5]).tolist() == w[[1, 2, 5]].tolist() == [[11, 11], [2, 2], [7, 7]]
    assert w[6].tolist() == [8, 9]
    assert w.push_pull([1], 1).tolist() == [[12, 12]]
    assert w.push_pull_async([1], 1).result().tolist() == [[13, 13]]
    for pending in (w.push_async([2], 1), w.add_async([2], 1), w.assign_async([3], 1)):
        assert pending.result() is None
    assert w.pull_async([2, 3]).result().tolist() == [[4, 4], [1, 1]]
    (values, certificate), later = w.pull_certified([2]), w.pull_certified_async([2]).result()
    assert values.tolist() == later[0].tolist() == [[4, 4]]
    assert certificate == later[1]
    assert sorted(np.concatenate(list(w.keys())).tolist()) == [1, 2, 3, 5, 6]
    assert len(w) == 5
    dense = client.table("b")
    dense[:] = 0
    dense[2:4] = [5, 6]
    assert (len(dense), dense[:].tolist()) == (9, [0, 0, 5, 6, 0, 0, 0, 0, 0])


def test_a_handle_stands_for_the_name_of_its_table(client, servers):
    a = through(servers.client(), servers.tables["a"][0])
    with a._client():
        assert client.push_pull(a, [77], 1).tolist() == client.pull("a", [77]).tolist()
        assert client.pull({a: [77]})[a].tolist() == client.pull(a, [77]).tolist()
        assert sum(map(len, client.keys(a))) == sum(map(len, client.keys("a")))
        mine = client.table(a)
        assert mine == a
        assert hash(mine) == hash(a)
        assert mine != client.table("b")
        assert mine != "a"


def test_only_a_handle_of_a_trainer_merges(client):
    for verb in MERGING:
        with pytest.raises(InputError, match="until the trainer's next tick"):
            getattr(client.table("a"), verb)([1], 1)


def test_a_handle_is_neither_walked_nor_searched(client):
    a = client.table("a")
    with pytest.raises(TypeError, match="not iterable"):
        iter(a)
    with pytest.raises(TypeError):
        5 in a  # noqa: B015


@pytest.mark.parametrize("table", [5, None, b"a", ["a"]])
def test_what_is_no_table(client, table):
    with pytest.raises(InputError, match="a table's name is 1 to 200"):
        client.pull(table, [1])


def test_a_table_that_there_is_not(client):
    with pytest.raises(UnknownTableError, match="no table 'c'; it has"):
        client.table("c")
