"""Functions on servers: atomic over shards, exactly once, and requests that wait for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import function_gates
import numpy as np
import pytest
from oracles import mutant
from servers import Servers, held, wait_until

import dps
from dps.engine.client.functions import FunctionCaller
from dps.engine.server import functions
from dps.engine.server.changes import Changes
from dps.engine.server.functions import FunctionCalls, Hold
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import DPSError, FunctionError, InputError, InputTypeError, ProtocolError, UnknownFunctionError
from dps.functions import library

ROWS = 40
KEYS = np.arange(ROWS)


@dps.function(changes=True)
def add_one(rows):
    rows.values += 1
    return len(rows)


@dps.function(changes=True)
def fails_on_a_late_shard(rows, writes):
    if writes:
        rows.values += 1
    if rows.shard == 3:
        raise ValueError("shard three")
    rows.values += 1


@dps.function(changes=True)
def waits_and_adds(rows):
    import function_gates

    rows.values += 100
    if rows.shard == 0:
        function_gates.wait()


@dps.function
def sees(rows):
    import function_gates

    before = float(rows.values.sum())
    if rows.shard == 0:
        function_gates.wait()
    return [before, float(rows.values.sum())]


@dps.function(changes=True)
def keeps_views(rows):
    import function_gates

    function_gates.kept += [rows.before, rows.values]


MINE = [add_one, fails_on_a_late_shard, waits_and_adds, sees, keeps_views]


def known(servers: Servers) -> Servers:
    """Servers that have these functions."""
    for endpoint, role in servers.alive():
        for function in MINE:
            endpoint.call(role.functions.add, function.id, function.code)
    return servers


@pytest.fixture(autouse=True)
def gates():
    function_gates.reset()
    yield
    function_gates.go_on.set()


@pytest.fixture
def servers():
    with Servers(2) as made:
        yield known(made)


def dense(servers: Servers, name: str = "w", **fields) -> None:
    servers.table(TableSpec(name, **{"rows": ROWS, "shards": 4, "dtype": "float64", **fields}))


# ---- what is called


@pytest.mark.parametrize(("first", "count"), [(0, 0), (4, 0), (0, 5), (3, 2), (9, 1)])
@pytest.mark.parametrize("kind", [frames.COMMIT, frames.CALL])
def test_a_call_of_no_shard_and_of_shards_that_are_not_there_are_refused(servers, kind, first, count) -> None:
    servers.table(TableSpec("w", rows=ROWS, shards=4, dtype="float64"), owners=[0] * 4)
    _, role = servers.alive()[0]
    (table,) = role.tables.values()
    header = Header(kind, frames.RANGE, table=table.spec.id, shard=first, shards=count, trainer=1)
    if kind == frames.COMMIT:
        handler, subject = role.functions.commit, None
    else:
        handler, subject = role.functions._targets, table
    with pytest.raises(ProtocolError, match=rf"a call of {count} shards from shard {first}: table 'w' has 4"):
        handler(subject, header, memoryview(b""))


@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("keys", [None, slice(5, 33), [0, 7, 7, 39, 20], slice(12, 13)])
def test_values_are_changed_and_results_merged(servers, owners, keys) -> None:
    servers.table(TableSpec("w", rows=ROWS, shards=4, dtype="float64"), owners=owners)
    chosen = KEYS if keys is None else KEYS[keys] if isinstance(keys, slice) else np.unique(keys)
    with servers.client() as client:
        client.push("w", KEYS, np.arange(float(ROWS)))
        assert sum(client.call(add_one, "w", keys)) == len(chosen)
        expected = np.arange(float(ROWS))
        expected[chosen] += 1
        assert np.array_equal(client.pull("w", KEYS), expected)
        assert client.call(library.sum, "w", keys) == expected[chosen].sum()


def test_shards_of_one_server_that_do_not_lie_together_are_prepared_together(servers, monkeypatch) -> None:
    rounds, ask = [], FunctionCaller._ask
    monkeypatch.setattr(FunctionCaller, "_ask", lambda *args: (rounds.append(1), ask(*args)))
    servers.table(TableSpec("w", rows=ROWS, shards=4, dtype="float64"), owners=[0, 1, 0, 1])
    with servers.client() as client:
        client.call(library.add_scalar, "w", value=1)
        assert client.call(library.sum, "w") == ROWS
    assert len(rounds) == 2, "no call was made again"


def test_keyed_tables(servers) -> None:
    servers.table(TableSpec("t", shards=4, dim=2, dtype="float64", init=dps.Constant(5.0)))
    with servers.client() as client:
        client.push("t", [3, -9, 2**60], 1)
        assert sum(client.call(add_one, "t")) == 3
        assert client.pull("t", [3, -9, 2**60, 8]).tolist() == [[7, 7]] * 3 + [[5, 5]]
        assert sum(client.call(add_one, "t", [3, 3, 1000])) == 2
        assert client.pull("t", [3, -9, 1000]).tolist() == [[8, 8], [7, 7], [6, 6]]
        assert client.call(library.size, "t") == 4
        with pytest.raises(InputError, match="keyed: a slice names no keys"):
            client.call(add_one, "t", slice(0, 3))


def test_what_is_refused(servers) -> None:
    dense(servers)
    with servers.client() as client:
        with pytest.raises(UnknownFunctionError, match=r"ps\.register"):
            client.call(dps.function(lambda rows: 5), "w")
        with pytest.raises(InputTypeError, match="call takes a function"):
            client.call(len, "w")
        with pytest.raises(InputTypeError, match=r"the arguments of function 'add_one': a builtins\.set"):
            client.call(add_one, "w", numbers={1})
        with pytest.raises(InputError, match="it takes rows of dim 3"):
            client.call(dps.Function(add_one.part, True, dim=3), "w")
        with pytest.raises(FunctionError, match="unexpected keyword argument 'factor'"):
            client.call(add_one, "w", factor=3)
        assert not client.pull("w", KEYS).any()


# ---- atomic


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("writes", [False, True])
def test_a_part_that_fails_leaves_all_rows_of_all_servers(servers, writes, copies) -> None:
    dense(servers, copies=copies)
    with servers.client() as client:
        client.push("w", KEYS, 2)
        with pytest.raises(FunctionError, match="ValueError: shard three") as caught:
            client.call(fails_on_a_late_shard, "w", writes=writes)
        assert "no row was changed" in str(caught.value)
        assert "fails_on_a_late_shard" in str(caught.value)
        assert (client.pull("w", KEYS) == 2).all()
        client.push("w", KEYS, 1)
        client.call(add_one, "w")
        assert (client.pull("w", KEYS) == 4).all()


def test_a_rehearsal_changes_nothing(servers) -> None:
    dense(servers)
    with servers.client() as client:
        caller = FunctionCaller(client.session)
        assert caller.call(add_one, "w", None, {}, rehearses=True) == [10] * 4
        assert not client.pull("w", KEYS).any()
        client.push("w", KEYS, 1)
        assert (client.pull("w", KEYS) == 1).all()


# ---- requests meanwhile


@pytest.mark.parametrize("rows", [40, 200_000])
def test_pushes_wait_and_pulls_do_not(servers, rows) -> None:
    dense(servers, rows=rows)
    dense(servers, "other")
    with servers.client() as client, servers.client() as other, ThreadPoolExecutor(3) as pool:
        client.push("w", slice(None), np.ones(rows))
        call = pool.submit(client.call, waits_and_adds, "w")
        assert function_gates.began.wait(60)
        assert (other.pull("w", slice(None)) == 1).all(), "as they were"
        other.push("other", KEYS, 1)
        pending = [other.push_async("w", slice(None), np.full(rows, 2.0)), other.push_async("w", [0], [5.0])]
        assert not any(each.done() for each in pending)
        assert not call.done()
        function_gates.go_on.set()
        call.result(60)
        for each in pending:
            each.result()
        expected = np.full(rows, 103.0)
        expected[0] += 5
        assert np.array_equal(other.pull("w", slice(None)), expected)


def test_a_reading_function_sees_one_moment(servers) -> None:
    dense(servers, shards=1)
    with servers.client() as client, servers.client() as other, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, sees, "w")
        assert function_gates.began.wait(60)
        pending = other.push_async("w", KEYS, np.ones(ROWS))
        function_gates.go_on.set()
        assert call.result(60) == [[0.0, 0.0]]
        pending.result()
        assert client.call(library.sum, "w") == ROWS


def test_two_clients_that_change_the_same_rows_lose_nothing(servers) -> None:
    dense(servers)

    def work(client) -> None:
        for _ in range(15):
            client.call(add_one, "w")
            client.push("w", KEYS, 1)

    with servers.client() as client, servers.client() as other, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, each) for each in (client, other)]:
            future.result(120)
        assert (client.pull("w", KEYS) == 60).all()


def test_views_that_a_function_keeps_stay_as_they_were(servers) -> None:
    for spec in (TableSpec("t", shards=1, dtype="float64"), TableSpec("w", rows=4, shards=1, dtype="float64")):
        function_gates.kept.clear()
        servers.table(spec)
        with servers.client() as client:
            client.push(spec.name, [0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
            client.call(keeps_views, spec.name)
            kept = [view.copy() for view in function_gates.kept]
            client.push(spec.name, [0, 1, 2, 3], 1)
            if spec.keyed:
                client.push(spec.name, np.arange(100_000), 1)
            assert all(map(np.array_equal, kept, function_gates.kept))
            function_gates.kept[1][...] = 77
            assert client.pull(spec.name, [0, 1]).tolist() == ([3.0, 4.0] if spec.keyed else [2.0, 3.0])


# ---- exactly once


def test_a_client_that_ends_before_commit_frees_the_shards(servers, monkeypatch) -> None:
    dense(servers)

    def dies(self, running, *args) -> None:
        raise SystemExit

    monkeypatch.setattr(FunctionCaller, "_commit", dies)
    monkeypatch.setattr(FunctionCaller, "_abort", lambda self, running: None)
    with servers.client() as other:
        client = servers.client()
        with pytest.raises(SystemExit):
            client.call(add_one, "w")
        assert any(endpoint.call(lambda role=role: set(role.functions.holds)) for endpoint, role in servers.alive())
        pending = other.push_async("w", KEYS, np.ones(ROWS))
        client.close()
        servers_drop_what_is_lost(servers)
        pending.result()
        assert (other.pull("w", KEYS) == 1).all()


def servers_drop_what_is_lost(servers: Servers) -> None:
    """As the endpoints of real servers do when a connection ends."""

    def free() -> bool:
        for endpoint, role in servers.alive():
            endpoint.call(role.functions.drop_lost)
        return not any(role.functions.holds for _, role in servers.alive())

    wait_until(free)


@pytest.mark.parametrize("owners", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_a_lost_answer_counts_once(servers, owners) -> None:
    servers.table(TableSpec("w", rows=ROWS, shards=4, dtype="float64"), owners=owners)
    with servers.client() as client, ThreadPoolExecutor(1) as pool:
        client.push("w", KEYS, 1)
        call = pool.submit(client.call, waits_and_adds, "w")
        assert function_gates.began.wait(60)
        servers.cut()
        function_gates.go_on.set()
        call.result(60)
        assert (client.pull("w", KEYS) == 101).all()


@pytest.mark.parametrize("when", ["prepared", "running"])
def test_a_primary_that_is_killed(when, monkeypatch) -> None:
    """The call goes on with the successor, and counts once."""
    with known(Servers(3)) as servers:
        dense(servers, copies=2)
        with servers.client() as client, ThreadPoolExecutor(1) as pool:
            client.push("w", KEYS, 1)
            if when == "prepared":
                commit = FunctionCaller._commit

                def kills(self, running, deadline) -> None:
                    if not servers.servers[0].stopped:
                        servers.kill(0)
                    commit(self, running, deadline)

                monkeypatch.setattr(FunctionCaller, "_commit", kills)
                client.call(add_one, "w")
                expected = 2
            else:
                call = pool.submit(client.call, waits_and_adds, "w")
                assert function_gates.began.wait(60)
                function_gates.go_on.set()
                servers.kill(0)
                call.result(60)
                expected = 101
            assert (client.pull("w", KEYS) == expected).all()
            assert not servers.differences()


@pytest.mark.parametrize("keyed", [False, True])
def test_copies_have_the_same_bits(keyed) -> None:
    with known(Servers(3)) as servers:
        fields = {"copies": 3, "shards": 4, "dim": 3, "optimizer": dps.Adagrad(0.1), "init": dps.Normal(1.0, seed=3)}
        servers.table(TableSpec("w", **fields) if keyed else TableSpec("w", rows=ROWS, **fields))
        with servers.client() as client:
            client.push("w", KEYS, np.ones((ROWS, 3)))
            for keys in (None, [1, 2, 39]):
                client.call(library.normal, "w", keys, std=2.0)
                client.call(add_one, "w", keys)
                client.push("w", KEYS, np.ones((ROWS, 3)))
            assert not servers.differences()


def test_what_is_on_its_way_to_a_copy_does_not_change_with_the_rows(servers) -> None:
    """The function replaces all rows of a shard, and a push changes them while the backup reads nothing."""
    count = 2_000_000
    dense(servers, rows=count, shards=1, copies=2)

    def on_their_way() -> int:
        return servers.endpoints[0].call(servers.servers[0].relay.unconfirmed)[0]

    with servers.client() as first, servers.client() as second, ThreadPoolExecutor(1) as pool:
        with held(servers, 1):
            call = pool.submit(first.call, library.add_scalar, "w", value=1.0)
            wait_until(lambda: on_their_way() == 1)
            push = second.push_async("w", [0, count - 1], 100.0)
            wait_until(lambda: on_their_way() == 2)
        call.result(60)
        push.result()
    assert not servers.differences()


def test_sums_of_earlier_clocks_are_closed_first_and_a_close_revokes(servers) -> None:
    """The end of a run closes the sums of rows that a function holds: the function runs again, on the new rows."""
    dense(servers, shards=1, optimizer=dps.SGD(1.0), aggregate="sum")
    with servers.client() as client, ThreadPoolExecutor(1) as pool:
        client.session.own.clock = 0
        client.push("w", KEYS, -np.ones(ROWS))
        client.session.own.clock = 1
        client.session.own.number = 0
        assert client.call(library.sum, "w") == ROWS
        client.push("w", KEYS, -np.ones(ROWS))
        call = pool.submit(client.call, waits_and_adds, "w")
        assert function_gates.began.wait(60)
        servers.settle()
        function_gates.go_on.set()
        call.result(60)
        assert (client.pull("w", KEYS) == 102).all()


# ---- wrong variants


def scene(check, *args) -> None:
    with Servers(2) as servers:
        check(known(servers), *args)


WRONG = {
    "nothing is held": (Hold, "__init__", "target.replica.hold = self", "pass",
                        lambda: scene(test_pushes_wait_and_pulls_do_not, 40)),
    "applied before all are prepared": (
        FunctionCalls, "_prepare", "hold.effects = effects",
        "hold.effects = []; [m.replica.shard.apply(op_of(hold.header, m.effect, None, m.replica)) for m in effects]",
        lambda: scene(test_a_part_that_fails_leaves_all_rows_of_all_servers, True, 1)),
    "a repeat counts twice": (FunctionCalls, "_apply", "op_of(header, made", "op_of(header._replace(trainer=0), made",
                              lambda: scene(test_a_lost_answer_counts_once, [0, 0, 0, 0])),
    "abort keeps the effect": (FunctionCalls, "abort", "if hold is not None:",
                               "if hold is not None:\n        self._apply(connection, header, hold, Header(0), b'')",
                               lambda: scene(test_a_rehearsal_changes_nothing)),
    "other rows forwarded": (Changes, "_pass_on", "op.keys, op.values, owed", "op.keys, op.values + 1, owed",
                             lambda: test_copies_have_the_same_bits(False)),
    "rows on their way change": (functions, "op_of", "op._replace(values=op.values.view())", "op",
                                 lambda: scene(test_what_is_on_its_way_to_a_copy_does_not_change_with_the_rows)),
    "view not detached": (Hold, "take_back", "replica.shard.detach()", "pass",
                          lambda: scene(test_views_that_a_function_keeps_stay_as_they_were)),
    "lost connections hold": (FunctionCalls, "drop_lost", "self._drop(hold)", "pass",
                              lambda: scene(lost_client)),
}  # fmt: skip


def lost_client(servers: Servers) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_a_client_that_ends_before_commit_frees_the_shards(servers, monkeypatch)


QUICK = "abort keeps the effect"  # most of the other variants are noticed only when a time limit has passed


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != QUICK)) for n in WRONG])
def test_a_wrong_server_is_caught(name, monkeypatch) -> None:
    where, method, old, new, check = WRONG[name]
    monkeypatch.setattr(where, method, mutant(getattr(where, method), old, new))
    monkeypatch.setattr("servers.PATIENCE", 1.0)
    with pytest.raises((AssertionError, DPSError, ValueError)):
        check()
