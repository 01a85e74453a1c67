"""A server whose change of replicas breaks off ends itself; the next one has the op whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from servers import Servers, wait_until

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import Shard
from dps.engine.wire.link import Link
from dps.errors import DPSError, FunctionError, StoppedError
from dps.functions import deleting

KEYS = np.arange(40)
odd = deleting(lambda rows: rows.keys % 2 == 1)


@dps.function(changes=True)
def double(rows):
    rows.values *= 2
    return float(rows.values.sum())


double.merge(sum)


@dps.function(changes=True)
def fails(rows):
    rows.values *= 3
    raise ValueError("in a function")


class Break:
    """Breaks one change off, once it is armed: when a shard has applied an op, or where the op is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str):
        self.armed, self.happened = False, 0
        apply, close, write = Shard.apply, Shard.close, Link.write

        def here() -> None:
            if self.armed:
                self.armed, self.happened = False, self.happened + 1
                raise MemoryError("broken off")

        def after(change: Callable) -> Callable:
            def changed(shard, op):
                result = change(shard, op)
                here()
                return result

            return changed

        def written(link, buffers) -> None:
            here()
            write(link, buffers)

        if where == "applied":
            monkeypatch.setattr(Shard, "apply", after(apply))
            monkeypatch.setattr(Shard, "close", after(close))
        else:
            monkeypatch.setattr(Link, "write", written)


def carry_out(kind: str, servers: Servers, client: dps.Client, expected: np.ndarray) -> None:
    """An op of that kind, and what it makes of the rows."""
    if kind == "push":
        client.push("w", KEYS, np.ones((40, 1)))
        expected += 1
    elif kind == "push_pull":
        assert client.push_pull("w", KEYS, np.ones((40, 1))).reshape(-1).tolist() == (expected + 1).tolist()
        expected += 1
    elif kind == "assign":
        client.assign("w", KEYS, np.full((40, 1), 5.0))
        expected[:] = 5
    elif kind == "delete":
        client.delete("w", KEYS[:30])
        expected[:30] = 0
    elif kind == "call":
        assert client.call(double, "w") == 2 * expected.sum()
        expected *= 2
    else:
        assert client.call(odd, "w") == 20
        expected[1::2] = 0


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("where", ["applied", "written"])
@pytest.mark.parametrize("kind", ["push", "push_pull", "assign", "delete", "call", "delete_where"])
def test_the_next_server_takes_over_and_the_op_counts_once(monkeypatch, kind, where, plain) -> None:
    if plain and where == "applied" and kind in ("push", "push_pull", "assign"):
        where = "written"  # because the compiled step calls no method of a shard
    broken = Break(monkeypatch, where)
    with Servers(2) as servers, servers.client() as client, ThreadPoolExecutor() as pool:
        for endpoint, role in servers.alive():
            endpoint.service = endpoint.service if plain else None
            for function in (double, odd):
                endpoint.call(role.functions.add, function.id, function.code)
        servers.table(TableSpec("w", dtype="float64", shards=2, copies=2), owners=[0, 0])
        client.push("w", KEYS, 1.0 + KEYS.reshape(-1, 1))
        expected = 1.0 + KEYS
        broken.armed = True
        call = pool.submit(carry_out, kind, servers, client, expected)
        wait_until(lambda: servers.servers[0].stopped)
        servers.without(0)
        call.result(60)
        assert broken.happened == 1
        assert client.pull("w", KEYS).reshape(-1).tolist() == expected.tolist()
        assert not servers.differences()


@pytest.mark.parametrize("kind", ["close", "retire", "backup"])
def test_changes_that_no_client_asks_for(monkeypatch, kind) -> None:
    """Sums are closed, origins retired, and a backup follows: where that breaks off, the server ends, too."""
    broken = Break(monkeypatch, "applied")
    with Servers(2) as servers, servers.client() as client:
        failing = int(kind == "backup")
        servers.endpoints[failing].service = None
        servers.table(TableSpec("w", dtype="float64", shards=2, copies=2, aggregate="sum"), owners=[0, 0])
        client.push("w", KEYS, np.ones((40, 1)))
        broken.armed = True
        if kind == "backup":
            with ThreadPoolExecutor() as pool:
                call = pool.submit(client.push, "w", KEYS, np.ones((40, 1)))
                wait_until(lambda: servers.servers[1].stopped)
                servers.without(1)
                call.result(60)
            assert (client.pull("w", KEYS) == 2).all()
        else:
            role = servers.servers[0]
            over = [[client.session.own.id, 1]] if kind == "retire" else []
            with pytest.raises(DPSError, match="server 0 has failed: MemoryError: broken off"):
                servers.endpoints[0].call(role.settle, None if over else True, over)
        assert servers.servers[failing].stopped
        assert not servers.servers[failing].tables


def test_what_is_refused_before_the_first_change_ends_no_server() -> None:
    with Servers(2) as servers, servers.client() as client, servers.client() as other:
        for endpoint, role in servers.alive():
            endpoint.call(role.functions.add, fails.id, fails.code)
        servers.table(TableSpec("w", dtype="float64", shards=2, copies=2), owners=[0, 0])
        client.push("w", KEYS, np.ones((40, 1)))
        for _ in range(2):  # the first push of an origin that is unknown goes the general way
            other.push("w", KEYS, np.ones((40, 1)))
        servers.endpoints[0].call(servers.servers[0].settle, None, [[other.session.own.id, 1]])
        with pytest.raises(StoppedError):
            other.push("w", KEYS, np.ones((40, 1)))
        with pytest.raises(FunctionError):
            client.call(fails, "w")
        assert not any(role.stopped for role in servers.servers)
        assert (client.pull("w", KEYS) == 3).all()
        assert not servers.differences()


def test_the_first_result_is_given_again_also_by_the_next_primary() -> None:
    """An earlier attempt of a task has deleted the rows; the next attempt calls again, after a failover or without."""
    with Servers(3) as servers, servers.client() as client:
        for endpoint, role in servers.alive():
            endpoint.call(role.functions.add, odd.id, odd.code)
        servers.table(TableSpec("w", dtype="float64", shards=4, copies=2), owners=[0, 1, 2, 0])
        client.push("w", KEYS, np.ones((40, 1)))
        number = client.session.own.number
        assert client.call(odd, "w") == 20
        for lost in (None, 0):
            if lost is not None:
                servers.kill(lost)
            client.session.own.number = number
            assert client.call(odd, "w") == 20
        assert (client.pull("w", KEYS)[::2] == 1).all()
        assert not servers.differences()
