"""A server in which a change breaks off ends itself: another one takes over, and a new one takes its place."""

from __future__ import annotations

import threading

import numpy as np
from distributed import Client
from servers import wait_until

import dps
from dps.engine.wire.link import Link


def test_a_server_whose_change_breaks_off_is_replaced(monkeypatch) -> None:
    keys, broken, write = np.arange(1000), [], Link.write

    def written(link, buffers) -> None:
        if not broken:
            broken.append(threading.current_thread().name)
            raise TypeError("broken off")
        write(link, buffers)

    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        table = ps.table("w", dtype="int64", copies=2)
        table.push(keys, np.ones((1000, 1), np.int64))
        monkeypatch.setattr(Link, "write", written)
        table.push(keys, np.ones((1000, 1), np.int64))
        assert (table.pull(keys) == 2).all()
        assert len(broken) == 1
        number = int(broken[0].rpartition("-")[2])
        assert any(f"server {number} " in text and "TypeError: broken off" in text for _, text in ps.status().events)

        def replaced() -> bool:
            servers = ps.status().servers
            return len(servers) == 2 and number not in [each.number for each in servers] and ps.status().up == 2

        wait_until(replaced, 60)
        table.push(keys, np.ones((1000, 1), np.int64))
        assert (table.pull(keys) == 3).all()
