"""The work of each shard, divided from what servers report of their tables."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from oracles import mutant

from dps.engine.telemetry import shard_work
from dps.engine.telemetry.server_telemetry import ServerTelemetry


class Servers:
    """Servers that work off requests of known cost, and report what real ones do."""

    def __init__(self, count=2, shards=4, copies=1):
        self.watches = {n: ServerTelemetry() for n in range(count)}
        self.chains = [[(shard * count // shards + k) % count for k in range(copies)] for shard in range(shards)]
        self.now, self.busy, self.starved = 0.0, [0.0] * count, [0.0] * count
        self.service = [0.0] * count
        self.keys = [[0.0] * shards for _ in range(count)]
        self.hot = (0.0, 0.0)  # accesses of the hottest key, and of all keys
        self.report()

    def work(self, loads, seconds=1.0, overhead=1.0, backup=0.0, crowded=1.0):
        """For so many seconds, each shard costs its primary so much of a core, and its backups a part of that."""
        for shard, load in enumerate(loads):
            first, *others = self.chains[shard]
            self.keys[first][shard] += 1e5 * load * seconds
            self.service[first] += load * seconds * crowded  # of elapsed time
            for n, part in ((first, overhead), *((n, backup) for n in others)):
                self.busy[n] += part * load * seconds
                self.starved[n] += part * load * seconds * (crowded - 1)
        self.now += seconds
        self.report()

    def report(self):
        for n, watch in self.watches.items():
            hits, total = self.hot
            table = {
                "pull": [1.0, 1.0, 1.0, self.service[n] / 4], "push": [1.0, 1.0, 1.0, self.service[n] * 3 / 4],
                "pull_ms": {}, "push_ms": {}, "rows": 10.0, "bytes": 100.0 * sum(n in c for c in self.chains),
                "shards": {shard: keys for shard, keys in enumerate(self.keys[n]) if keys},
                "hot": {"accesses": total, "keys": [(7, hits, 0.0), (8, hits, hits)], "more": (0.0, 0.0, 0.0)},
            }  # fmt: skip
            report = {
                "cpu": self.busy[n], "busy": self.busy[n], "polled": 0.0, "starved": self.starved[n], "host": None,
                "memory": 0.0, "lag": 0.0, "connections": 1, "unconfirmed": [0, 0, 0.0], "tables": {3: table},
                "budget": (50.0, 200.0),
            }  # fmt: skip
            watch.reported(report, self.now, self.now)

    def measured(self, since=-1.0):
        places = {3: [SimpleNamespace(chain=tuple(chain), joiner=None) for chain in self.chains]}
        return shard_work.work_of_shards(self.watches, places, since)


def check_loads_are_found(seed):
    draw = random.Random(seed)
    servers = Servers(draw.choice((1, 2, 3)), draw.choice((2, 4, 6)))
    loads = [draw.choice((0.0, 0.01, 0.1, 0.3)) for _ in servers.chains]
    for _ in range(3):
        servers.work(loads)
    work = servers.measured()
    assert [shard.busy for shard in work.tables[3]] == pytest.approx(loads, abs=1e-9)
    assert sum(server.busy for server in work.servers.values()) == pytest.approx(sum(loads))
    assert {shard.held for shard in work.tables[3]} == {100.0}
    assert {server[2:] for server in work.servers.values()} == {(50.0, 200.0)}


def test_loads_are_found():
    for seed in range(30):
        check_loads_are_found(seed)


def test_work_beside_requests_is_shared_in_proportion():
    servers = Servers()
    servers.work([0.1, 0.3, 0.1, 0.1], overhead=1.5)
    assert [shard.busy for shard in servers.measured().tables[3]] == pytest.approx([0.15, 0.45, 0.15, 0.15])


def test_a_busy_backup_does_not_make_its_own_shards_look_busy():
    servers = Servers(copies=2)
    servers.work([0.3, 0.3, 0.01, 0.01], backup=0.9)
    work = servers.measured()
    assert min(server.busy for server in work.servers.values()) > 0.5
    found = [shard.busy for shard in work.tables[3]]
    assert found[0] == pytest.approx(30 * found[2])
    assert sum(found) == pytest.approx(sum(server.busy for server in work.servers.values()))


def test_a_thread_without_a_processor_does_not_make_its_shards_heavier():
    servers = Servers()
    servers.work([0.1, 0.1, 0.1, 0.1])
    servers.work([0.1, 0.1, 0.1, 0.1], crowded=3.0)
    work = servers.measured()
    assert [shard.busy for shard in work.tables[3]] == pytest.approx([0.1] * 4)
    assert work.servers[0].used == pytest.approx(0.2 / 0.8)


def test_only_reports_since_the_last_move_count():
    servers = Servers()
    servers.work([0.4, 0.0, 0.0, 0.0])
    servers.chains[0], servers.chains[2] = servers.chains[2], servers.chains[0]
    servers.work([0.4, 0.0, 0.1, 0.0])  # perhaps half before the move and half after it
    since = servers.now - 0.5
    servers.work([0.2, 0.0, 0.1, 0.0])
    assert [shard.busy for shard in servers.measured(since).tables[3]] == pytest.approx([0.2, 0.0, 0.1, 0.0])


def test_the_part_of_the_hottest_key_is_that_which_is_certain():
    servers = Servers(count=1, shards=2)
    servers.hot = 30.0, 100.0
    servers.work([0.2, 0.2])
    assert [shard.hottest for shard in servers.measured().tables[3]] == pytest.approx([0.6, 0.6])
    servers.work([0.2, 0.0])
    assert [shard.hottest for shard in servers.measured(0.5).tables[3]] == pytest.approx([0.3, 0.0])


def test_nothing_is_known_of_an_idle_or_lost_shard():
    servers = Servers()
    servers.chains[3] = []
    servers.work([0.0, 0.0, 0.0])
    assert [tuple(shard) for shard in servers.measured().tables[3]] == [(0, 100, 0)] * 3 + [(0, 0, 0)]


def check_everything():
    for name, check in list(globals().items()):
        if name.startswith("test_") and check.__code__.co_argcount == 0:
            check()


WRONG = [
    ("sum(busy.values()) / service", "1.0"),
    ("runs[place.chain[0]] * work.service", "work.service"),
    ("keys / accesses[place.chain[0]]", "1 / len(work.shards)"),
    ("watch.busy(since)", "watch.busy()"),
    ("min(1.0, work.hottest / keys)", "min(1.0, work.hottest / sum(work.shards.values()))"),
    ("sum(runs[server] * work.service", "sum(work.service"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_division_is_caught(old, new, monkeypatch):
    monkeypatch.setattr(shard_work, "work_of_shards", mutant(shard_work.work_of_shards, old, new))
    with pytest.raises(AssertionError):
        check_everything()
