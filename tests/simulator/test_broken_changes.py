"""A change of replicas that breaks off, after a shard has applied an op or while it is written to a backup: the server
ends, and each op still counts once, with the result of its first run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.server.requests import ServerRole
from dps.engine.simulation.endpoint import SimConnection, SimLink
from dps.engine.state.shard import Shard
from dps.functions import deleting
from dps.testing import Simulation

ROWS, OPS, SHARE = 40, 25, 0.08


@dps.function(changes=True)
def add_and_sum(rows, value):
    rows.values += value
    return int(rows.values.sum())


add_and_sum.merge(sum)
thin_out = deleting(lambda rows: rows.rng.random(len(rows)) < 0.3)


class Breaks:
    """Lets changes of replicas break off, at moments drawn from a seed; never where the last copy would be lost."""

    def __init__(self, sim: Simulation, seed: int):
        self.sim, self.draw = sim, random.Random(f"breaks {seed}")
        self.server = ""  # whose change breaks off when an op is applied or written
        self.broken: list[str] = []

    def may_break(self) -> bool:
        controller = self.sim._controller
        whole = all(len(p.chain) > 1 for places in controller.membership.places.values() for p in places)
        return bool(self.server) and whole and not self.broken and self.draw.random() < SHARE

    def here(self) -> None:
        if self.may_break():
            self.broken.append(self.server)
            raise RuntimeError("broken off")

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        handle, apply, write = SimConnection.handle, Shard.apply, SimLink.write

        def handled(connection, header, frame):
            self.server = connection.host.name if connection.host.name.startswith("server-") else ""
            try:
                handle(connection, header, frame)
            finally:
                self.server = ""

        def applied(shard, op):
            fresh = apply(shard, op)
            self.here()
            return fresh

        def written(link, buffers):
            self.here()
            write(link, buffers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimConnection, "handle", handled)
            patch.setattr(Shard, "apply", applied)
            patch.setattr(SimLink, "write", written)
            yield


def change(client, draw: random.Random, rows: dict[int, int]) -> None:
    """One op of a random kind; its result, and what the table then has, are as expected."""
    keys = sorted(draw.sample(range(ROWS), draw.randint(1, ROWS)))
    kind = draw.choice(("push", "push_pull", "assign", "delete", "call", "call", "thin out", "thin out"))
    if kind in ("push", "push_pull"):
        for key in keys:
            rows[key] = rows.get(key, 0) + 1
        if kind == "push":
            client.push("w", keys, np.ones((len(keys), 1), np.int64))
        else:
            answer = client.push_pull("w", keys, np.ones((len(keys), 1), np.int64))
            assert answer.reshape(-1).tolist() == [rows[key] for key in keys]
    elif kind == "assign":
        client.assign("w", keys, np.full((len(keys), 1), 7))
        rows.update(dict.fromkeys(keys, 7))
    elif kind == "delete":
        client.delete("w", keys)
        for key in keys:
            rows.pop(key, None)
    elif kind == "call":
        total = client.call(add_and_sum, "w", value=2)
        rows.update({key: value + 2 for key, value in rows.items()})
        assert total == sum(rows.values())
    else:
        count, before = client.call(thin_out, "w"), dict(rows)
        stays = {key for keys in client.keys("w") for key in keys.tolist()}
        assert stays <= rows.keys()
        assert count == len(before) - len(stays)
        rows.clear()
        rows.update({key: before[key] for key in stays})


def check(seed: int, plain: bool) -> tuple[int, int]:
    """Run one schedule; how many changes broke off, and how many servers have told the controller so."""
    draw, rows, ended = random.Random(f"changes {seed}"), {}, 0
    with Simulation(seed, servers=3, copies=2) as sim:
        sim.table("w", dtype="int64", shards=4)
        for function in (add_and_sum, thin_out):
            sim.register(function)
        if not plain:
            for server in sim._controller.servers.values():
                server.endpoint.service = None
        client, breaks = sim.client(), Breaks(sim, seed)
        for _ in range(OPS):
            with breaks.under_way():
                change(client, draw, rows)
            if breaks.broken:  # if it were not over, its backups would have to have all that was acknowledged
                sim._crash(sim.parties[breaks.broken[0]], False)
                ended, breaks.broken = ended + 1, []
            sim._controller.workers.free = 1
            assert client.pull("w", range(ROWS)).reshape(-1).tolist() == [rows.get(key, 0) for key in range(ROWS)]
        sim.rest()
        told = [text for _, text in sim._controller.membership.events if "has failed: RuntimeError" in text]
    return ended, len(told)


@pytest.mark.parametrize("plain", [True, False])
def test_an_op_counts_once_although_its_server_broke_off(plain) -> None:
    ended, told = np.sum([check(seed, plain) for seed in range(8)], axis=0)
    assert ended == told > 7


@pytest.mark.parametrize("plain", [True, False])
def test_a_server_that_serves_on_is_noticed(monkeypatch, plain) -> None:
    monkeypatch.setattr(ServerRole, "fail", mutant(ServerRole.fail, "if not self.stopped:", "if False:"))
    with pytest.raises((AssertionError, RuntimeError, dps.errors.DPSError)):
        list(map(check, range(8), [plain] * 8))
