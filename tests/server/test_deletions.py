"""Deletions on servers: once, on all copies, whatever breaks between the request and its answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from oracles import mutant
from servers import Servers

import dps
from dps.engine.server.changes import Changes
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import Shard
from dps.engine.wire import endpoint
from dps.errors import DPSError

COUNT = 60
KEYS = np.arange(COUNT)


@pytest.fixture
def servers():
    with Servers(3) as made:
        yield made


def table(servers: Servers, keyed: bool, **fields) -> TableSpec:
    spec = {"rows": None if keyed else COUNT, "dim": 2, "dtype": "float64", "shards": 2, "copies": 2}
    return servers.table(TableSpec("w", **spec | fields), owners=[0, 0])


def stored(servers: Servers) -> list[int]:
    """The keys that a keyed table has."""
    with servers.client() as client:
        return sorted(key for keys in client.keys("w") for key in keys.tolist())


def change(client: dps.Client, how: str) -> np.ndarray:
    """Delete some rows, make some of them anew; what the table then holds."""
    if how == "clear":
        client.clear("w")
        gone = KEYS
    else:
        gone = KEYS[5:25]
        client.delete("w", gone)
    client.push("w", [6, 7], np.full((2, 2), 9.0))
    expected = np.ones((COUNT, 2))
    expected[gone] = 0
    expected[[6, 7]] = 9
    return expected


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_primary_that_is_lost_after_a_deletion(servers, how, keyed) -> None:
    table(servers, keyed)
    with servers.client() as client:
        client.push("w", KEYS, np.ones((COUNT, 2)))
        expected = change(client, how)
        servers.kill(0)
        np.testing.assert_array_equal(client.pull("w", KEYS), expected)
    assert not keyed or stored(servers) == np.flatnonzero(expected[:, 0]).tolist()
    assert not servers.differences()


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("how", ["delete", "clear"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_deletion_that_is_sent_again_counts_once(servers, how, keyed, lost) -> None:
    """Its answer is lost, or so is the server; the rows that another client has made anew meanwhile stay."""
    table(servers, keyed)
    with servers.client() as first, servers.client() as second:
        first.push("w", KEYS, np.ones((COUNT, 2)))
        expected = change(first, how)
        number = first.session.own.number
        second.push("w", [8, 9], np.full((2, 2), 4.0))
        expected[[8, 9]] += 4
        if lost:
            servers.kill(0)
        first.session.own.number = 1  # that of the deletion: the push came before it
        first.clear("w") if how == "clear" else first.delete("w", KEYS[5:25])
        first.session.own.number = number
        np.testing.assert_array_equal(second.pull("w", KEYS), expected)
        first.delete("w", [0])
        assert second.pull("w", [0]).tolist() == [[0.0, 0.0]], "the next one counts"
    assert not servers.differences()


def test_connections_that_break_meanwhile(servers) -> None:
    table(servers, True)
    rng, model = np.random.default_rng(0), {}
    with servers.client() as client:
        for turn in range(60):
            keys = rng.choice(COUNT, 10, replace=False)
            pending = [client.push_async("w", keys, np.full((10, 2), turn)), client.delete_async("w", keys[:5])]
            if turn % 5 == 0:
                pending.append(client.clear_async("w"))
            if turn % 3 == 0:
                servers.cut(lambda n, turn=turn: n % 2 == turn % 2)
            for each in pending:
                each.result()
            model = {k: v + turn * (k in keys) for k, v in {**dict.fromkeys(keys.tolist(), 0), **model}.items()}
            model = {k: v for k, v in model.items() if k not in keys[:5] and turn % 5}
        assert {k: v[0] for k, v in zip(KEYS.tolist(), client.pull("w", KEYS), strict=True) if k in model} == model
    assert stored(servers) == sorted(model)
    assert not servers.differences()


@pytest.mark.parametrize("keyed", [True, False])
def test_a_joiner_is_fed_while_rows_go_and_come(servers, keyed) -> None:
    """Each piece of the dump is small, so rows go before, in and behind the piece that is on its way."""
    rng, rows = np.random.default_rng(1), 3000
    table(servers, keyed, rows=None if keyed else rows, copies=1)
    feeder = servers.servers[0].relay
    feeder.piece, feeder.rate = 2000, 4e5  # bytes, and bytes a second
    with servers.client() as client, ThreadPoolExecutor(1) as pool:
        client.push("w", np.arange(rows), np.ones((rows, 2)))
        client.delete("w", np.arange(0, rows, 7))
        joining = pool.submit(lambda: [servers.join("w", shard, 2) for shard in range(2)])
        turn = 0
        while not joining.done():
            turn += 1
            client.delete("w", rng.choice(rows, 30))
            client.push("w", rng.choice(rows, 10, replace=False), np.ones((10, 2)))
            if turn == 10:
                client.clear("w")
                client.push("w", np.arange(0, rows, 2), np.ones((rows // 2, 2)))
        joining.result()
        assert turn > 12
        assert not servers.differences()
        values = client.pull("w", np.arange(rows))
        before = stored(servers) if keyed else None
        servers.kill(0)
        np.testing.assert_array_equal(client.pull("w", np.arange(rows)), values)
        assert before is None or stored(servers) == before


WRONG = {
    "a repeat counts again": (Shard, "apply", "if origin and self", "if origin and op.rule != 4 and self"),
    "deletions are not passed on": (
        Changes,
        "push",
        "if _is_forwarded(fresh)",
        "if ops[0].rule != 4 and _is_forwarded(fresh)",
    ),
}


@pytest.mark.parametrize("name", [next(iter(WRONG)), pytest.param([*WRONG][1], marks=pytest.mark.slow)])
def test_what_is_wrong_is_noticed(monkeypatch, name) -> None:
    owner, method, old, new = WRONG[name]
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))
    monkeypatch.setattr("servers.PATIENCE", 2.0)

    def is_noticed(check, *args) -> bool:
        try:
            with Servers(3) as servers:
                check(servers, *args)
        except (AssertionError, DPSError):
            return True
        return False

    checks = [(test_a_deletion_that_is_sent_again_counts_once, how, True, False) for how in ("delete", "clear")]
    assert any(is_noticed(*each) for each in [*checks, (test_a_primary_that_is_lost_after_a_deletion, "delete", True)])


@pytest.mark.parametrize("count", [10_000, 60_000])
@pytest.mark.parametrize("make_loop", [endpoint.new_loop, asyncio.new_event_loop])
def test_the_copies_follow_a_large_deletion(make_loop, count, monkeypatch) -> None:
    """What goes to the copies of a large one are views of its body; its values have no bytes."""
    monkeypatch.setattr(endpoint, "new_loop", make_loop)
    with Servers(2) as servers, servers.client() as client:
        servers.table(TableSpec("w", dim=1, shards=4, copies=2))
        client.push("w", np.arange(70_000), np.ones((70_000, 1)))
        client.delete("w", np.arange(count))
        assert sorted(np.concatenate(list(client.keys("w"))).tolist()) == list(range(count, 70_000))
        assert not servers.differences()
