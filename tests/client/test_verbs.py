"""The matrix of verbs has no holes: each has an asynchronous form, takes several tables, and is a handle's method."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from servers import Servers

import dps
from dps.engine.client.table import Verbs, through
from dps.engine.state.ops import TableSpec
from dps.errors import InputError, RequestTimeoutError, UnknownTableError

VERBS = ("pull", "pull_certified", "push", "push_pull", "add", "assign")
READERS = ("pull", "pull_certified")  # take keys; the others keys and values
ENDINGS = ("delete", "clear")  # of rows
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


@pytest.mark.parametrize("verb", [*VERBS, *ENDINGS])
@pytest.mark.parametrize("owner", [dps.Client, dps.Trainer, dps.Table])
def test_each_verb_has_an_asynchronous_form_with_the_same_parameters(owner, verb):
    now, later = getattr(owner, verb), getattr(owner, f"{verb}_async")
    assert parameters(now) == parameters(later)
    wanted = parameters(getattr(dps.Client, verb))
    of_owner = [p for p in wanted if owner is not dps.Table or p[0] != "table"]
    if verb == "delete" and owner is dps.Table:  # of one table, so the keys are not left out
        of_owner = [("keys", inspect.Parameter.empty) if p[0] == "keys" else p for p in of_owner]
    assert parameters(now) == of_owner


def test_no_verb_is_missing_here():
    found = {name.removesuffix("_async") for name, _ in inspect.getmembers(dps.Client) if name.endswith("_async")}
    assert found == {*VERBS, *ENDINGS}
    assert {name for name in vars(Verbs) if not name.startswith("_")} == {
        *VERBS,
        *ENDINGS,
        *(f"{v}_async" for v in (*VERBS, *ENDINGS)),
        "call",
        "keys",
    }


def test_the_table_in_the_documentation_is_the_matrix():
    page = (ROOT / "docs/concepts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([a-z, ]+) \| `\{table: (.+)\}` \|", page, re.M)
    assert {verb for verb, *_ in rows} == {*VERBS, "delete"}
    for verb, later, takes, several in rows:
        assert later == f"{verb}_async"
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
