"""Pulls that backups answer: the rules by which they may, and servers that have not heard of the last placement."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from noticing import assert_noticed, put_wrong
from servers import Servers, held, wait_until

import dps
from dps.engine.client.client import Client
from dps.engine.coordination.placement import rechained
from dps.engine.server import backup_pulls
from dps.engine.server.backup_pulls import UNTOLD, BackupPulls, has_version, version_for
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import ShardPlace
from dps.errors import InputError

KEYS = np.arange(64)


# ---- the rules


def replica(version: int = 7, serves: bool = True, joining: bool = False, **place: Any) -> Any:
    at = {"chain": [0, 1, 2], "joiner": 3, "fences": [1, 4, 5, 6], "stepping_down": False} | place
    return SimpleNamespace(
        serves=serves, joining=joining, place=ShardPlace(**at), shard=SimpleNamespace(version=version)
    )


def check_primary() -> None:
    """A primary tells its version to its backups, by their fences, and to no other server."""
    assert [version_for(replica(), server, fence) for server, fence in ((1, 4), (2, 5))] == [7, 7]
    others = {"an old fence": (1, 3), "a later fence": (1, 5), "the joiner": (3, 6), "itself": (0, 1), "left": (9, 4)}
    assert {why: version_for(replica(), *asked) for why, asked in others.items()} == dict.fromkeys(others, UNTOLD)
    assert version_for(replica(serves=False), 1, 4) == UNTOLD, "it has stepped down, or is a backup"
    assert version_for(None, 1, 4) == UNTOLD
    assert version_for(replica(chain=[0], joiner=None, fences=[1]), 1, 4) == UNTOLD


def check_backup() -> None:
    """A backup answers for the replica of which it has asked, as soon as that has the version."""
    own = replica(version=7)
    assert [has_version(own, own, version) for version in (6, 7, 8)] == [True, True, False]
    assert has_version(own, own, UNTOLD) is None
    assert has_version(own, replica(version=9), 7) is None, "it has joined again, and that is another replica"
    assert has_version(own, None, 7) is None
    joiner = replica(version=9, joining=True)
    assert has_version(joiner, joiner, 7) is None


def test_the_rules() -> None:
    check_primary()
    check_backup()


WRONG = {
    "a fence does not count": (version_for, "backups.get(server) == fence", "server in backups"),
    "older fences do": (version_for, "backups.get(server) == fence", "backups.get(server, -1) >= fence"),
    "a joiner is told": (version_for, "zip(place.chain[1:],", "zip([*place.chain[1:], place.joiner],"),
    "a primary that has stepped down tells": (version_for, "not replica.serves", "False"),
    "any replica answers": (has_version, "now is not replica", "now is None"),
    "a joiner answers": (has_version, "replica.joining", "False"),
    "what is not told counts": (has_version, " or version == UNTOLD", ""),
    "a version is not waited for": (has_version, ">= version", ">= 0"),
    "the next version is waited for": (has_version, ">= version", "> version"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(name: str) -> None:
    function, old, new = WRONG[name]
    assert_noticed(
        backup_pulls, function.__name__, old, new, check_of_module(check_primary), check_of_module(check_backup)
    )


def check_of_module(check: Any) -> Any:
    """The check of the functions that the module has by now."""

    def run() -> None:
        names = ("version_for", "has_version")
        own = {name: globals()[name] for name in names}
        globals().update({name: getattr(backup_pulls, name) for name in names})
        try:
            check()
        finally:
            globals().update(own)

    return run


# ---- the table asks for it


def test_a_table_that_only_its_primaries_may_read_is_refused() -> None:
    for wrong, message in (
        ({"copies": 1}, "needs copies=2"),
        ({"ack": "memory"}, "needs ack='copies'"),
        ({"aggregate": "sum"}, "close clocks"),
        ({"life": dps.engine.state.life.RowLife(max_bytes=1 << 20)}, "does not go with expire="),
        ({"reads": "backup"}, "reads is 'primary' or 'copies', not 'backup'"),
    ):
        with pytest.raises(InputError, match=message):
            TableSpec("w", **{"copies": 2, "reads": "copies", **wrong})
    spec = TableSpec("w", copies=2, reads="copies")
    assert TableSpec.from_dict(spec.to_dict()) == spec
    assert "reads" not in TableSpec("w").to_dict()


# ---- servers


@pytest.fixture
def servers():
    with Servers(3) as servers:
        yield servers


def made(servers: Servers, **options: Any) -> TableSpec:
    fields = {"dtype": "int64", "shards": 1, "copies": 3, "reads": "copies"} | options
    return servers.table(TableSpec("w", **fields), owners=[0] * fields["shards"])


def reader_of(servers: Servers, server: int) -> Client:
    """A client whose pulls that server answers, as long as it may."""
    while True:
        client = servers.client()
        client.pull("w", [0])
        ((chosen, _, _),) = client.session._tables["w"].read_runs
        if chosen == server:
            return client
        client.close()


def answered(servers: Servers) -> list[int]:
    """How many pulls each server has answered as a backup."""
    number = servers.tables["w"][0].id
    return [role.tables[number].meter.pulls_as_backup for role in servers.servers]


@pytest.mark.parametrize(
    "options", [{}, {"rows": 64, "shards": 4}, {"shards": 4, "dtype": "float32", "wire": dps.Wire(pull="bfloat16")}]
)
def test_each_copy_answers_the_clients_that_have_chosen_it(servers, options) -> None:
    made(servers, **options)
    writer = servers.client()
    writer.push("w", KEYS, np.arange(64))
    readers = [servers.client() for _ in range(3)]
    for reader in readers:
        for _ in range(5):
            assert reader.pull("w", KEYS).tolist() == list(range(64))
        values, certificate = reader.pull_certified("w", KEYS)
        assert values.tolist() == list(range(64))
        assert all(certificate.contains(writer.origin, -1, 0, shard) for shard in certificate.shards)
        assert [each.tolist() for each in reader.pull("w", [3, 70], born=True)] if options.get("rows") is None else True
    assert sorted(answered(servers)) == [0, 6, 6]
    for client in (writer, *readers):
        client.close()


def test_a_pull_of_several_tables_and_of_no_key(servers) -> None:
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as reader:
        servers.table(TableSpec("other", dtype="int64", shards=1))
        writer.push("w", KEYS, 1)
        writer.push("other", KEYS, 2)
        both = reader.pull({"w": KEYS, "other": KEYS})
        assert (both["w"].sum(), both["other"].sum()) == (64, 128)
        assert reader.pull("w", []).tolist() == []
        pending = [reader.pull_async("w", KEYS) for _ in range(10)]
        assert all(each.result().sum() == 64 for each in pending)


def check_a_backup_that_has_left(servers: Servers) -> None:
    """Server 2 has not heard that it is out of the chain; pushes are acknowledged without it."""
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as reader:
        writer.push("w", KEYS, 1)
        assert reader.pull("w", KEYS).sum() == 64
        servers.deaf.add(2)
        servers.put("w", 0, rechained(servers.tables["w"][1][0], (0, 1), None, servers.epoch + 1))
        writer.push("w", KEYS, 1)
        assert servers.copy("w", 0, 2).shard.version == 1
        assert reader.pull("w", KEYS).sum() == 128
        assert answered(servers)[2] > 0


def check_a_primary_that_was_replaced(servers: Servers) -> None:
    """Servers 0 and 2 have not heard that server 1 leads, and server 0 has no lease."""
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as reader:
        writer.push("w", KEYS, 1)
        servers.deaf |= {0, 2}
        servers.servers[0].heartbeat.lease_until = 0.0
        servers.put("w", 0, rechained(servers.tables["w"][1][0], (1,), None, servers.epoch + 1))
        with servers.client() as other:
            other.push("w", KEYS, 1)
        assert reader.pull("w", KEYS).sum() == 128


def check_a_backup_that_is_late(servers: Servers) -> None:
    """What the primary has shown, a backup shows, too: server 2 has not got the op yet."""
    made(servers)
    with servers.client() as writer, reader_of(servers, 0) as first, reader_of(servers, 2) as second:
        with held(servers, 1):
            pending = writer.push_async("w", KEYS, 1)
            wait_until(lambda: first.pull("w", KEYS).sum() == 64)
            assert servers.copy("w", 0, 2).shard.version == 0
            assert second.pull("w", KEYS).sum() == 64, "it was refused, and the primary has answered"
        pending.result()


def check_own_pushes(servers: Servers) -> None:
    """A pull behind a push that is on its way shows it, though the primary has not read the push yet."""
    made(servers)
    result: list[int] = []
    with reader_of(servers, 2) as client:
        client.push("w", KEYS, 0)  # so that the connection to the primary is there
        thread = threading.Thread(target=lambda: result.append(int(client.pull("w", KEYS).sum())))
        with held(servers, 0):
            client.push_async("w", KEYS, 1)
            thread.start()
            time.sleep(0.05)
        thread.join(30)
        assert result == [64]


CHECKS = [check_a_backup_that_has_left, check_a_primary_that_was_replaced, check_a_backup_that_is_late]
CHECKS += [check_own_pushes]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_a_pull_from_a_backup_shows(servers, check) -> None:
    check(servers)


WRONG_SERVERS = {
    "a backup asks nobody": (
        *(BackupPulls, "_take", "leaders.add(replica.place.chain[0])"),
        "pull.versions[replica.number] = 0",
        check_a_backup_that_has_left,
    ),
    "a primary without a lease tells": (
        *(BackupPulls, "tell", "table.reads_copies and self._holds_lease()", "True"),
        check_a_primary_that_was_replaced,
    ),
    "a backup does not wait": (backup_pulls, "has_version", ">= version", ">= 0", check_a_backup_that_is_late),
}


@pytest.mark.parametrize("name", WRONG_SERVERS)
def test_a_wrong_server_is_noticed(name, monkeypatch) -> None:
    *wrong, check = WRONG_SERVERS[name]
    put_wrong(monkeypatch, *wrong)
    with Servers(3) as servers, pytest.raises(AssertionError):
        check(servers)


def test_a_backup_that_gets_no_answer_refuses_and_primaries_are_asked_for_a_while(servers) -> None:
    """Server 2 asks server 0, which stands still; the pull goes to server 0 then, and is answered when that goes on."""
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as reader:
        writer.push("w", KEYS, 1)
        before = answered(servers)[2]
        result: list[int] = []
        with held(servers, 0):
            thread = threading.Thread(target=lambda: result.append(int(reader.pull("w", KEYS).sum())))
            thread.start()
            time.sleep(0.6)
            assert not result
        thread.join(30)
        assert result == [64]
        assert reader.pull("w", KEYS).sum() == 64
        assert answered(servers)[2] == before, "primaries alone are asked for a second"
        wait_until(lambda: reader.pull("w", KEYS).sum() == 64 and answered(servers)[2] > before)


class FakeLink:
    """A connection to a primary, which keeps what is asked."""

    open = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def send(self, header: Header, buffers: object = ()) -> None:
        self.asked.append(header.request)

    def close(self) -> None:
        """The backup has given it up."""


def test_an_answer_counts_for_pulls_that_came_before_it_was_asked_for(servers) -> None:
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as first, reader_of(servers, 2) as second:
        writer.push("w", KEYS, 1)
        pulls, endpoint, link = servers.servers[2].backup_pulls, servers.endpoints[2], FakeLink()
        endpoint.call(pulls._links.__setitem__, 0, link)
        before = answered(servers)[2]
        threads = [threading.Thread(target=reader.pull, args=("w", KEYS)) for reader in (first, second)]
        threads[0].start()
        wait_until(lambda: len(link.asked) == 1)
        threads[1].start()
        wait_until(lambda: len(pulls._waiting) == 2)
        version = np.array([1], np.int64)
        endpoint.call(pulls._on_frame, 0, link, Header(frames.OK, request=link.asked[0]), memoryview(version.tobytes()))
        assert len(link.asked) == 2, "the second pull has a question of its own"
        assert answered(servers)[2] == before + 1
        for thread in threads:
            thread.join(30)


def test_a_backup_dies_and_its_readers_go_on(servers) -> None:
    made(servers)
    with servers.client() as writer, reader_of(servers, 2) as reader:
        writer.push("w", KEYS, 1)
        servers.kill(2)
        for _ in range(3):
            assert reader.pull("w", KEYS).sum() == 64
        servers.kill(0)
        writer.push("w", KEYS, 1)
        assert reader.pull("w", KEYS).sum() == 128


def test_a_table_of_primaries_is_refused_by_backups(servers) -> None:
    made(servers, reads="primary")
    with servers.client() as client:
        client.push("w", KEYS, 1)
        route = client.session._tables["w"]
        assert not route.reads_copies
        route.runs[:] = [(2, 0, 1)]
        assert client.pull("w", KEYS).sum() == 64
    assert answered(servers) == [0, 0, 0]
