"""Priorities of connections: a client that sends nothing large passes others on the way to the network card."""

from __future__ import annotations

import socket

import dask
import numpy as np
import pytest
from servers import Servers

import dps
from dps.engine.client.client import Client
from dps.engine.state.ops import TableSpec
from dps.engine.wire import channel as channel_module
from dps.engine.wire.sockets import INTERACTIVE

SMALL, LARGE = np.arange(100), np.arange(40_000)  # rows whose pushes take less than 16 KiB, and more

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PRIORITY"), reason="only Linux has priorities of sockets")


def priorities(client: Client) -> set[int]:
    """Those of the connections to servers."""
    channels = client.session._channels.values()
    return {each._socket._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) for each in channels}


def push(client: Client, how: str, keys: np.ndarray) -> None:
    values = np.ones(len(keys), np.float32)
    if how == "async":
        client.push_async("w", keys, values).result()
    elif how == "lists":  # which are no arrays
        client.push("w", keys.tolist(), values.tolist())
    else:
        client.push("w", keys, values)


def check(how: str) -> None:
    with dask.config.set({"dps.unix-sockets": False}), Servers(2) as servers:
        servers.table(TableSpec("w", shards=2, optimizer=dps.SGD(1.0)))
        with servers.client() as large, servers.client() as small:
            for client in (large, small):
                client.pull("w", SMALL)
                push(client, how, SMALL)
                assert priorities(client) == {INTERACTIVE}
            push(large, how, LARGE)
            assert (priorities(large), priorities(small)) == ({0}, {INTERACTIVE})
            push(large, how, SMALL)
            small.pull("w", LARGE[:400])
            assert (priorities(large), priorities(small)) == ({0}, {INTERACTIVE}), "once is for good"
            expected = np.where(LARGE < len(SMALL), -4.0, -1.0)
            np.testing.assert_array_equal(small.pull("w", LARGE), expected)  # which is large as well
            assert priorities(small) == {0}


@pytest.mark.parametrize("how", ["plain", "async", "lists"])
def test_a_connection_has_priority_until_its_first_large_request(how: str) -> None:
    check(how)


def test_sockets_of_one_machine_have_none() -> None:
    with Servers(1) as servers:
        servers.table(TableSpec("w", optimizer=dps.SGD(1.0)))
        with servers.client() as client:
            push(client, "plain", SMALL)
            push(client, "plain", LARGE)
            assert priorities(client) == {0}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("hasten", lambda sock: None), ("Plain", type("Kept", (channel_module.Plain,), {"give_way": lambda self: None}))],
)
def test_wrong_variants_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object) -> None:
    monkeypatch.setattr(channel_module, name, wrong)
    with pytest.raises(AssertionError):
        check("plain")
