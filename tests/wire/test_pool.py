"""Pool: connections kept for the next client of the same process."""

from __future__ import annotations

import contextlib
import os

import pytest
from peers import NAME, PARK, RELEASE, SECRET, Kit, soon
from servers import Servers, wait_until

from dps.engine.client.environment import ProcessEnvironment
from dps.engine.state.ops import TableSpec
from dps.engine.wire.frames import Header
from dps.engine.wire.pool import Pool
from dps.errors import AccessDeniedError, DPSError, ServerGoneError


@pytest.fixture
def kit():
    with Kit() as kit:
        yield kit


@pytest.fixture
def pool():
    pool = Pool(max_idle=3)
    yield pool
    pool.close()


def connect(pool, kit, secret=SECRET, what="the peer"):
    return pool.connect(kit.address, NAME, secret, what, ServerGoneError)


def alive(channel):
    channel.ask(Header(RELEASE)).result(soon())
    return True


def test_what_was_given_is_taken_again(kit, pool):
    one, two = connect(pool, kit), connect(pool, kit)
    assert one is not two
    pool.give_back(one)
    assert connect(pool, kit, what="the same peer") is one
    assert one.what == "the same peer"
    assert alive(one)
    pool.give_back(one)
    pool.give_back(two)
    assert len(pool) == 2
    assert [connect(pool, kit), connect(pool, kit)] == [two, one]  # the one used last comes first
    one.close()
    two.close()


def test_who_has_another_secret_proves_it_anew(kit, pool):
    pool.give_back(connect(pool, kit))
    with pytest.raises((AccessDeniedError, DPSError)):
        connect(pool, kit, secret="cd" * 32)
    assert len(pool) == 1


def test_with_something_on_its_way_it_is_closed(kit, pool):
    channel = connect(pool, kit)
    channel.ask(Header(PARK))
    pool.give_back(channel)
    assert channel.closed
    assert len(pool) == 0


def test_a_peer_that_has_gone_is_noticed(kit, pool):
    channel = connect(pool, kit)
    pool.give_back(channel)
    (connection,) = kit.endpoint.connections
    kit.endpoint.call(connection.transport.close)
    wait_until(lambda: not channel.is_idle())
    fresh = connect(pool, kit)
    assert fresh is not channel
    assert channel.closed
    assert alive(fresh)
    fresh.close()


def test_so_many_for_so_long(kit, pool, monkeypatch):
    channels = [connect(pool, kit) for _ in range(5)]
    for channel in channels:
        pool.give_back(channel)
    assert [channel.closed for channel in channels] == [True, True, False, False, False]
    pool.max_idle_seconds = -1.0
    with contextlib.closing(connect(pool, kit)) as fresh:
        assert fresh not in channels
        assert all(channel.closed for channel in channels)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_takes_none_and_harms_none(kit, pool):
    channel = connect(pool, kit)
    pool.give_back(channel)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            fresh = connect(pool, kit)
            os._exit(0 if fresh is not channel and channel.closed and alive(fresh) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connect(pool, kit) is channel
    assert alive(channel)
    channel.close()


def test_clients_one_after_the_other(pool):
    """Each is a client of its own: only the connections stay."""
    with Servers(2) as servers:
        servers.table(TableSpec("w", dtype="int64"))
        for n in range(1, 5):
            client = servers.client(ProcessEnvironment(pool))
            client.push("w", range(100), 1)
            assert client.pull("w", range(100)).tolist() == [n] * 100
            client.close()
            client.close()  # twice is once
            assert len(pool) == 2
        assert sum(len(endpoint.connections) for endpoint in servers.endpoints) == 2
        pool.close()
