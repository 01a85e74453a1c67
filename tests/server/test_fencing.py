"""A server that is refused for one shard of a request goes on with the others, and skips nothing there."""

from __future__ import annotations

import threading

import numpy as np
from servers import Servers, wait_until

from dps.engine.coordination.placement import rechained
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames

KEYS = np.arange(64)


def test_a_request_that_is_refused_for_one_shard_reaches_the_backups_of_the_others():
    with Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=2, copies=2), owners=[0, 0])
        with servers.client() as client:
            client.push("n", KEYS, 1)
            servers.deaf.add(0)  # it does not hear that shard 1 has another primary
            places = servers.tables["n"][1]
            servers.put("n", 1, rechained(places[1], (1,), None, servers.epoch + 1))
            pushing = threading.Thread(target=client.push, args=("n", KEYS, 1))
            pushing.start()  # both shards at once, to server 0
            wait_until(lambda: servers.copy("n", 1, 0).deposed)
            servers.deaf.discard(0)
            servers.place()
            pushing.join(30)
            assert not pushing.is_alive()
            assert servers.differences() == []  # what is acknowledged is in both copies of shard 0
            servers.kill(0)
            assert (client.pull("n", KEYS) == 2).all()
        assert not [report for _, kind, report in servers.reports if kind == frames.SUSPECT]
