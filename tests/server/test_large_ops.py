"""Ops on many rows: carried out beside the loop, which goes on; whole and once, on all copies, whatever breaks."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
from servers import Servers, wait_until

import dps
from dps.engine.server.beside_thread import Outcome
from dps.engine.state import beside
from dps.engine.state.ops import TableSpec
from dps.functions import deleting

COUNT = 3000
KEYS = np.arange(COUNT)
cold = deleting(lambda rows: rows.keys % 3 != 1)
COLD = KEYS % 3 != 1


@dps.function(changes=True)
def double(rows):
    rows.values *= 2


class Gate:
    """A runner whose ops wait until they may begin. Memory that is given back in its thread is no op."""

    def __init__(self, endpoint):
        self._endpoint, self.go_on, self.waiting = endpoint, threading.Event(), 0
        self.go_on.set()

    def run(self, work, seconds, done) -> None:
        if done.__name__ == "_nothing":
            work()
            return

        def begin() -> None:
            self.waiting += 1
            self.go_on.wait(100)
            self.waiting -= 1
            with contextlib.suppress(dps.errors.ServerGoneError):  # the endpoint has been closed
                self._endpoint.submit(done, Outcome(work(), None))

        threading.Thread(target=begin, daemon=True).start()

    def close(self) -> None:
        self.go_on.set()


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(beside, "LARGE_ROWS", 500)
    with Servers(3) as made:
        made.gates = []
        for endpoint, role in made.alive():
            for function in (cold, double):
                endpoint.call(role.functions.add, function.id, function.code)
            gate = role.large._runner = Gate(endpoint)
            made.gates.append(gate)
        yield made


def table(servers: Servers, keyed: bool = True, copies: int = 2) -> np.ndarray:
    """A table on the first server; what it holds."""
    spec = TableSpec("w", rows=None if keyed else COUNT, dim=2, dtype="float64", shards=2, copies=copies)
    servers.table(spec, owners=[0, 0])
    values = np.random.default_rng(0).normal(size=(COUNT, 2))
    with servers.client() as client:
        client.push("w", KEYS, values)
    return values


def without(values: np.ndarray, gone: np.ndarray) -> np.ndarray:
    return np.where(gone[:, None], 0.0, values)


THINGS = {
    "delete": (lambda client: client.delete("w", KEYS[COLD]), lambda values: without(values, COLD)),
    "delete_where": (lambda client: client.call(cold, "w"), lambda values: without(values, COLD)),
    "function": (lambda client: client.call(double, "w"), lambda values: 2 * values),
}


CASES = list(itertools.product(THINGS, [True, False], [1, 2, 3]))
CASES.remove(("function", False, 1))  # because a dense shard without copies takes over the rows of an effect at once


@pytest.mark.parametrize(("what", "keyed", "copies"), CASES)
def test_pulls_go_on_and_see_all_of_an_op_or_nothing(servers, what: str, keyed: bool, copies: int) -> None:
    """The op waits before the thread that carries it out; then a push waits for it, and pulls do not."""
    values = table(servers, keyed, copies)
    thing, after = THINGS[what]
    expected = after(values)
    gate = servers.gates[0]
    with servers.client() as one, servers.client() as two, servers.client() as three:
        gate.go_on.clear()
        begun = threading.Thread(target=thing, args=(one,))
        begun.start()
        wait_until(lambda: gate.waiting)
        for _ in range(3):
            assert np.array_equal(two.pull("w", KEYS), values)
        pushed = three.push_async("w", [1], np.ones((1, 2)))
        assert np.array_equal(two.pull("w", KEYS), values)
        gate.go_on.set()
        begun.join()
        pushed.result()
        expected[1] += 1
        assert np.array_equal(two.pull("w", KEYS), expected)
    assert not servers.differences()


def test_the_ops_are_put_in_place_as_they_were_made_beside(servers, monkeypatch) -> None:
    """On the primary and on the backup, without that the loop carries them out once more."""
    table(servers)
    installed, install = [], beside.MadeBeside.install
    monkeypatch.setattr(beside.MadeBeside, "install", lambda *args: installed.append(install(*args)) or installed[-1])
    with servers.client() as client:
        for thing, _ in THINGS.values():
            thing(client)
            client.push("w", KEYS, np.ones((COUNT, 2)))
    assert installed.count(True) == len(installed)
    assert len(installed) >= 2 * 2 * len(THINGS), "two shards, two copies"
    assert not servers.differences()


@pytest.mark.parametrize("what", THINGS)
def test_a_primary_that_is_lost_meanwhile(servers, what: str) -> None:
    """Nothing of the op counts before it is put in place; the client asks the next primary."""
    values = table(servers)
    thing, after = THINGS[what]
    with servers.client() as one, servers.client() as two:
        servers.gates[0].go_on.clear()
        begun = threading.Thread(target=thing, args=(one,))
        begun.start()
        wait_until(lambda: servers.gates[0].waiting)
        servers.kill(0)
        servers.gates[0].go_on.set()
        begun.join()
        assert np.array_equal(two.pull("w", KEYS), after(values))
    assert not servers.differences()


@pytest.mark.parametrize("what", THINGS)
def test_a_backup_carries_the_op_out_beside_too(servers, what: str) -> None:
    """It serves other tables meanwhile, and the answer waits for it."""
    values = table(servers)
    thing, after = THINGS[what]
    servers.table(TableSpec("other", shards=1), owners=[1])
    with servers.client() as one, servers.client() as two:
        two.push("other", [5], [3.0])
        servers.gates[1].go_on.clear()
        begun = threading.Thread(target=thing, args=(one,))
        begun.start()
        wait_until(lambda: servers.gates[1].waiting)
        assert two.pull("other", [5]).tolist() == [3.0]
        assert begun.is_alive()
        servers.gates[1].go_on.set()
        begun.join()
        assert np.array_equal(two.pull("w", KEYS), after(values))
    assert not servers.differences()


def test_a_table_that_is_dropped_meanwhile(servers) -> None:
    table(servers, copies=1)
    with servers.client() as one:
        servers.gates[0].go_on.clear()
        pending = one.delete_async("w", KEYS[COLD])
        wait_until(lambda: servers.gates[0].waiting)
        endpoint, role = servers.alive()[0]
        endpoint.call(role.drop, servers.tables["w"][0].id)
        servers.gates[0].go_on.set()
        with pytest.raises(dps.errors.DPSError):
            pending.result()
    assert not role.functions.holds


def test_what_a_checkpoint_has_kept_is_freed_between_requests(servers, monkeypatch) -> None:
    """Until then the server says that it keeps the memory."""
    monkeypatch.setattr("dps.engine.state.deletion.KEYS_FREED_AT_ONCE", 100)
    monkeypatch.setattr("dps.engine.state.deletion.COMPACT_AT_ROWS", 100)
    table(servers, copies=1)
    endpoint, role = servers.alive()[0]
    held = next(iter(role.tables.values()))
    shards = [replica.shard for replica in held.replicas.values()]
    for shard in shards:
        endpoint.call(shard.pin)
    with servers.client() as client:
        client.delete("w", KEYS[COLD])
        for shard in shards:
            endpoint.call(shard.unpin)
        assert endpoint.call(held.held).kept >= 16 * COLD.sum()
        endpoint.call(role.large.tidy, list(held.replicas.values()))  # as a server does with each heartbeat
        wait_until(lambda: not any(shard.is_untidy for shard in shards))
        assert endpoint.call(held.held).kept == 0
        assert np.array_equal(client.pull("w", KEYS[COLD]), np.zeros((COLD.sum(), 2)))
