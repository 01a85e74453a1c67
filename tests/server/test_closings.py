"""Clocks with many sums: closed shard by shard, beside the loop or in turns of it; the rows are those of one step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from oracles import mutant
from servers import Servers, wait_until
from test_large_ops import Gate

import dps
from dps.engine.server.closings import Closings
from dps.engine.state import beside, shard
from dps.engine.state.beside import MadeBeside
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import Shard

COUNT = 2000
KEYS = np.arange(COUNT)
ONES = np.ones((COUNT, 2))


@dps.function
def total(rows) -> float:
    return float(rows.values.sum())


@pytest.fixture(autouse=True)
def no_clock_is_small(monkeypatch) -> None:
    monkeypatch.setattr(beside, "LARGE_ROWS", 8)
    monkeypatch.setattr(beside, "CLOSED_AT_ONCE", 8)
    monkeypatch.setattr(shard, "PLAIN_SUMS_ROWS", 0)


@pytest.fixture
def servers():
    with Servers(3) as made:
        made.gates = []
        for endpoint, role in made.alive():
            endpoint.call(role.functions.add, total.id, total.code)
            gate = role.large._runner = Gate(endpoint)
            made.gates.append(gate)
        yield made


def at(client: dps.Client, clock: int) -> dps.Client:
    """The client, as a trainer at this clock."""
    if client.session.own.clock != clock:
        client.session.own.clock, client.session.own.number = clock, 0
    return client


def table(servers: Servers, keyed: bool, copies: int = 2, aggregate: str = "mean") -> None:
    """A table on the first server, each row of which goes down by what is pushed."""
    servers.table(
        TableSpec(
            "w",
            rows=None if keyed else COUNT,
            dim=2,
            dtype="float64",
            shards=4,
            copies=copies,
            aggregate=aggregate,
            optimizer=dps.SGD(1.0),
        ),
        owners=[0, 0, 0, 0],
    )


def pushed_twice(client: dps.Client, clock: int) -> None:
    """Pushes of 3 and 1 of two trainers: a sum of 4, a mean of 2."""
    at(client, clock).push("w", KEYS, 3 * ONES, rows=1)
    client.push("w", KEYS, ONES, rows=1)


CLOSES: dict[str, Callable[[Servers, dps.Client, int], object]] = {
    "a pull": lambda servers, client, clock: at(client, clock).pull("w", KEYS),
    "a push": lambda servers, client, clock: at(client, clock).push("w", KEYS, 0 * ONES, rows=0),
    "a function": lambda servers, client, clock: at(client, clock).call(total, "w"),
    "the end of a run": lambda servers, client, clock: servers.settle(),
}


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("what", CLOSES)
def test_a_close_is_one_step_on_all_copies(servers, monkeypatch, what: str, keyed: bool, copies: int) -> None:
    installed, install = [], MadeBeside.install
    monkeypatch.setattr(MadeBeside, "install", lambda *args: installed.append(install(*args)) or installed[-1])
    table(servers, keyed, copies)
    with servers.client() as client:
        for clock in range(2):
            pushed_twice(client, clock)
            CLOSES[what](servers, client, clock + 1)
            role = servers.servers[0]
            wait_until(lambda role=role: not role.functions.holds)
        client.session.own.clock = 9
        assert (client.pull("w", KEYS) == -4).all()
    assert not servers.differences()
    assert len(installed) >= (2 * 4 * copies if keyed else 0)
    assert all(installed)


@pytest.mark.parametrize("what", CLOSES)
def test_others_are_served_meanwhile(servers, what: str) -> None:
    """Pulls without a clock find the rows as they were, a push waits, and so does the one that closes."""
    table(servers, keyed=True)
    with servers.client() as one, servers.client() as two, servers.client() as three:
        pushed_twice(one, 0)
        servers.gates[0].go_on.clear()
        closing = threading.Thread(target=CLOSES[what], args=(servers, one, 1))
        closing.start()
        wait_until(lambda: servers.gates[0].waiting)
        assert (two.pull("w", KEYS) == 0).all()
        pending = three.push_async("w", KEYS, 0 * ONES)
        assert (two.pull("w", KEYS) == 0).all()
        assert not pending.done()
        servers.gates[0].go_on.set()
        closing.join()
        pending.result()
        assert (two.pull("w", KEYS) == -2).all()
    assert not servers.differences()


def amid(servers: Servers, change: Callable[[], object]) -> np.ndarray:
    """The rows after a close amid which something changes the shards."""
    table(servers, keyed=True)
    with servers.client() as one, servers.client() as two:
        pushed_twice(one, 0)
        servers.gates[0].go_on.clear()
        closing = threading.Thread(target=CLOSES["a pull"], args=(servers, one, 1))
        closing.start()
        wait_until(lambda: servers.gates[0].waiting)
        change()
        servers.gates[0].go_on.set()
        closing.join()
        return two.pull("w", KEYS)


def test_a_primary_that_is_lost_amid_a_close(servers) -> None:
    assert (amid(servers, lambda: servers.kill(0)) == -2).all()
    assert not servers.differences()


def test_the_end_of_a_run_amid_a_close(servers) -> None:
    """The hold is revoked: the sums are closed at once, whole, whatever the thread has made of its copies."""
    assert (amid(servers, servers.settle) == -2).all()
    assert not servers.differences()


def test_an_end_of_a_run_that_is_told_again_closes_nothing_twice(servers) -> None:
    table(servers, keyed=True)
    with servers.client() as client:
        pushed_twice(client, 0)
        for _ in range(3):
            settled, every = servers.endpoints[0].call(servers.servers[0].settle, True, [])
            wait_until(lambda every=every: every.left == 0)
            assert all(each.confirmed for each in settled)
        assert (client.pull("w", KEYS) == -2).all()


def check_a_pull(servers: Servers) -> None:
    """A close by a pull, whose hold ends in time."""
    with servers.client() as client:
        pushed_twice(client, 0)
        shards = [replica.shard for replica in next(iter(servers.servers[0].tables.values())).replicas.values()]
        versions = [each.version for each in shards]
        assert (at(client, 1).pull("w", KEYS) == -2).all()
        assert [each.version for each in shards] == [version + 1 for version in versions]
        assert not any(each.sums for each in shards)


def check_an_end(servers: Servers) -> None:
    """The end of a run, which is confirmed in time."""
    with servers.client() as client:
        pushed_twice(client, 0)
        every = servers.endpoints[0].call(servers.servers[0].settle, True, [])[1]
        wait_until(lambda: every.left == 0, 2)
        assert not any(each.shard.sums for each in next(iter(servers.servers[0].tables.values())).replicas.values())


def check_the_sums(servers: Servers) -> None:
    """Sums of which a thread has made a mean, for copies that are dropped perhaps."""
    with servers.client() as client:
        pushed_twice(client, 0)
        sums = next(iter(servers.servers[0].tables.values())).replicas[0].shard.sums.to_arrays()[1]
        at(client, 1).pull("w", KEYS)
        assert (sums == 4).all()


WRONG = {
    "sums stay open": (check_an_end, Shard, "take_over", mutant(Shard.take_over, "self.sums, ", "sums, ")),
    "nothing is taken over": (check_the_sums, Closings, "_next", mutant(Closings._next, "made.get(replica)", "None")),
    "a mean in the memory of the shard": (
        check_the_sums,
        beside,
        "own_memory",
        mutant(beside.own_memory, 'twin.spec.aggregate == "mean"', "False"),
    ),
    "only the first shard": (
        check_an_end,
        Closings,
        "_next",
        mutant(Closings._next, "if not waiting:", "if len(waiting) < len(hold.targets):"),
    ),
    "an end that is not told": (
        check_an_end,
        Closings,
        "_settle",
        mutant(Closings._settle, "owed.confirm()", "pass"),
    ),
}


@pytest.mark.parametrize("check", [check_a_pull, check_an_end, check_the_sums])
def test_what_wrong_variants_fail(servers, check: Callable[[Servers], None]) -> None:
    table(servers, keyed=True)
    check(servers)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_variant_is_caught(servers, monkeypatch, wrong: str) -> None:
    check, owner, name, variant = WRONG[wrong]
    monkeypatch.setattr(owner, name, variant)
    table(servers, keyed=True)
    with pytest.raises(AssertionError):
        check(servers)
