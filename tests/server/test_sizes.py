"""Each kind of op over real sockets, with bodies from nothing to several times what a socket holds, and with copies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from servers import Servers

import dps
from dps.arrays import ArrayNamespace, ServerStore, Space
from dps.engine.state.ops import TableSpec
from dps.engine.wire import endpoint as endpoint_module
from dps.engine.wire.sockets import SEND_BYTES
from dps.functions import deleting

DIM, MOST = 8, 70_000
SIZES = [0, 1, 1000, MOST]
assert MOST * 8 * DIM > 4 * SEND_BYTES
few = deleting(lambda rows, count: rows.keys < count)
some = deleting(lambda rows: rows.rng.random(len(rows)) < 0.7)


@dps.function(changes=True)
def add(rows, values):
    rows.values += values
    return np.sort(rows.keys)


add.merge(np.concatenate)
LOOPS = {"uvloop": endpoint_module.new_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=[(loop, copies) for loop in LOOPS for copies in (2, 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def servers(request, monkeypatch) -> Iterator[Servers]:
    loop, copies = request.param
    monkeypatch.setattr(endpoint_module, "new_loop", LOOPS[loop])
    with Servers(4) as made:
        for endpoint, role in made.alive():
            for function in (few, some, add):
                endpoint.call(role.functions.add, function.id, function.code)
        made.table(TableSpec("w", dim=DIM, dtype="float64", shards=4, copies=copies), owners=[0, 1, 0, 1])
        yield made


def same(servers: Servers, client: dps.Client, expected: np.ndarray, there: np.ndarray) -> None:
    """The rows are as expected, the table has these and no others, and all copies are equal."""
    np.testing.assert_array_equal(client.pull("w", np.arange(len(expected))), expected)
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *client.keys("w")]))
    np.testing.assert_array_equal(keys, np.flatnonzero(there))
    assert not servers.differences()


def test_ops_of_any_size(servers) -> None:
    expected, there = np.zeros((MOST, DIM)), np.zeros(MOST, bool)
    rng = np.random.default_rng(1)
    with servers.client() as client:
        for size in SIZES:
            keys, values = np.arange(size), rng.normal(size=(size, DIM))
            for _ in range(2):  # rows that are made, and rows that there are
                client.push("w", keys, values)
                expected[:size] += values
            expected[:size] += values
            np.testing.assert_array_equal(client.push_pull("w", keys, values), expected[:size])
            client.assign("w", keys, values)
            expected[:size] = values
            there[:size] = True
            same(servers, client, expected, there)
            client.delete("w", keys)
            expected[:size], there[:size] = 0, False
            same(servers, client, expected, there)


def test_functions_on_any_size(servers) -> None:
    expected, there = np.ones((MOST, DIM)), np.ones(MOST, bool)
    with servers.client() as client:
        client.push("w", np.arange(MOST), expected)
        for size in SIZES:
            called = client.call(add, "w", np.arange(size), values=2.0) if size else np.empty(0)
            np.testing.assert_array_equal(np.sort(called), np.arange(size))
            expected[:size] += 2
            same(servers, client, expected, there)
            assert client.call(few, "w", count=size) == size
            expected[:size], there[:size] = 0, False
            same(servers, client, expected, there)
            client.push("w", np.arange(size), np.ones((size, DIM)))
            expected[:size], there[:size] = 1, True
        count = client.call(some, "w")
        there[:] = False
        there[np.concatenate(list(client.keys("w")))] = True
        assert count == MOST - np.count_nonzero(there)
        assert 0.69 < count / MOST < 0.71
        expected[~there] = 0
        same(servers, client, expected, there)


@pytest.mark.parametrize("size", [0, 1, MOST])
def test_a_joiner_gets_any_number_of_rows(servers, size) -> None:
    copies = servers.tables["w"][0].copies
    with servers.client() as client:
        client.push("w", np.arange(size), np.ones((size, DIM)))
        client.delete("w", np.arange(size // 2))
        if copies < 3:
            servers.join("w", 0, 3)
        else:
            servers.kill(2)
            servers.join("w", 0, 3)
        client.push("w", np.arange(size), np.ones((size, DIM)))
        expected = np.ones((size, DIM))
        expected[size // 2 :] += 1
        same(servers, client, expected, np.ones(size, bool))


@pytest.mark.parametrize("size", [1, 1000, DIM * MOST])
def test_vectors_of_any_size(servers, size) -> None:
    copies = servers.tables["w"][0].copies

    def table(name: str, dim: int = 1, **fields) -> TableSpec:
        return servers.table(TableSpec(name, dim=dim, **{"shards": 4, **fields, "copies": copies}))

    def register(function):
        for endpoint, role in servers.alive():
            endpoint.call(role.functions.add, function.id, function.code)
        return function

    mine = np.arange(float(size))
    with servers.client() as client:
        xp = ArrayNamespace(Space(ServerStore(lambda: client, 4, table, register)))
        v, w = xp.asarray(mine), xp.ones(size)
        v *= 2.0
        v += w
        np.testing.assert_array_equal(v.to_numpy(), 2 * mine + 1)
        assert float(xp.sum(w)) == size
        assert not servers.differences()
