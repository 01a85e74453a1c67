"""Pulls of rows that have changed, frame by frame: answers of a server, and bodies that are too short or too long."""

from __future__ import annotations

import numpy as np
import pytest
from noticing import assert_noticed
from peers import Raw, framed
from servers import Servers

import dps
from dps.engine.core.fingerprints import fingerprints
from dps.engine.server.changed_pulls import ChangedPulls
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.wire import frames
from dps.engine.wire.changed_rows import changed_rows_in
from dps.engine.wire.frames import ERROR, OK

SPEC = TableSpec("w", dim=6, init=dps.Normal(1.0, seed=1), shards=2, cache=dps.Cache("1 MB"))
KEYS = np.arange(20)
EXTRA = {
    "lacks a fingerprint": -8,
    "lacks all fingerprints": -160,
    "has one more": 8,
    "has as many again": 160,
}


class Asked:
    """A server with a table, and a peer that asks which rows differ from those that it has."""

    def __init__(self, servers: Servers):
        self.spec = servers.table(SPEC)
        self.servers, self.peer = servers, Raw(servers.addresses[0])
        self.peer.introduce()
        with servers.client() as client:
            client.push("w", KEYS[::2], np.ones((10, 6), np.float32))
            grouped = group(KEYS, self.spec.shard_map)
            self.keys, self.counts = grouped.keys, np.diff(grouped.starts).astype(np.int64)
            self.rows = client.pull("w", self.keys)

    def ask(self, rows: np.ndarray, extra: int = 0):
        """The answer to a pull with the fingerprints of these rows, whose body is so many bytes longer."""
        prints = fingerprints(rows, self.spec.salt)
        body = self.counts.tobytes() + self.keys.tobytes() + prints.tobytes()
        body = body + bytes(extra) if extra > 0 else body[: len(body) + extra]
        fields = {"table": self.spec.id, "shards": 2, "count": len(KEYS), "flags": frames.CHANGED, "request": 7}
        self.peer.send(framed(frames.PULL, body, **fields))
        return self.peer.frame()

    def check(self) -> None:
        """The server answers a right pull, over the same connection."""
        rows = self.rows.copy()
        rows[3:5] += 1
        header, body = self.ask(rows)
        changed, fresh = changed_rows_in(body, len(KEYS), 6, np.dtype(np.float32))
        assert (header.kind, header.request, header.count) == (OK, 7, 2)
        assert np.flatnonzero(changed).tolist() == [3, 4]
        np.testing.assert_array_equal(fresh, self.rows[3:5])


def check(extra: int) -> None:
    """A pull like that is refused, and ends its connection, as any frame does that is wrong. All else goes on."""
    with Servers(1) as servers:
        asked, other = Asked(servers), Raw(servers.addresses[0]).introduce()
        asked.check()
        header, body = asked.ask(asked.rows, extra)
        assert header.kind == ERROR
        assert "a pull of 20 rows that have changed has a body of" in bytes(body).decode()
        assert asked.peer.frame() is None
        asked.peer.sock.close()
        asked.peer = other
        asked.check()
        with servers.client() as client:
            np.testing.assert_array_equal(client.pull("w", asked.keys), asked.rows)
        assert servers.rows("w") == 10, "no row is born"
        other.sock.close()


@pytest.mark.parametrize("what", EXTRA)
def test_a_body_of_the_wrong_length_is_refused(what):
    check(EXTRA[what])


@pytest.mark.parametrize("new", ["> len(body)", "< len(body)"])
def test_a_server_that_takes_such_a_body_is_noticed(new):
    def examples() -> None:
        for extra in EXTRA.values():
            check(extra)

    assert_noticed(ChangedPulls, "_answer", "!= len(body)", new, examples)
