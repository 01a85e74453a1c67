"""Copies of shards on several servers: equal bit for bit, and nothing acknowledged is lost or done twice."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import dask
import numpy as np
import pytest
import servers as real_servers
from compiled import put_variant
from oracles import mutant
from peers import soon
from servers import SECRET, Servers, held, wait_until

import dps
from dps.engine.coordination.placement import appended, joined, rechained
from dps.engine.server import replicas
from dps.engine.server.heartbeat import Heartbeat
from dps.engine.server.pace import MOST_UNDER_WAY
from dps.engine.server.replicas import ROWS, FeedsOfJoiner, JoinerFeed
from dps.engine.server.replication import Relay
from dps.engine.server.requests import ServerRole
from dps.engine.server.tables import ServerTable
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel
from dps.engine.wire.frames import Header
from dps.errors import DPSError, MovedError, RequestTimeoutError, UnknownTableError

KEYS = np.arange(64)
COUNTS = TableSpec("n", dtype="int64", shards=8, copies=2)


class Pushers:
    """Threads that count up rows until told to stop, each with a client of its own; and what was acknowledged."""

    def __init__(self, servers: Servers, count: int = 3, table: str = "n"):
        self.table, self.total = table, np.zeros(len(KEYS), np.int64)
        self.errors: list[BaseException] = []
        self.done = [0] * count
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(servers.client(), n)) for n in range(count)]

    def _run(self, client, number: int) -> None:
        rng, total = np.random.default_rng(number), np.zeros(len(KEYS), np.int64)
        try:
            with client:
                while not self._over.is_set():
                    keys = rng.choice(KEYS, rng.integers(1, 40))  # with repeats
                    values = rng.integers(1, 9, len(keys))
                    np.add.at(total, keys, values)
                    if rng.integers(4):
                        client.push_async(self.table, keys, values)
                    else:
                        client.push(self.table, keys, values)
                    self.done[number] += 1
                client.wait()
        except BaseException as error:
            self.errors.append(error)
        with self._lock:
            self.total += total

    def more(self, count: int = 15) -> None:
        """Wait until each has pushed that many times more."""
        before = list(self.done)
        wait_until(lambda: bool(self.errors) or all(n - b >= count for n, b in zip(self.done, before, strict=True)))

    def __enter__(self) -> Pushers:
        for thread in self._threads:
            thread.start()
        self.more()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in self._threads)


def check(servers: Servers, pushers: Pushers, table: str = "n") -> None:
    """All that was pushed is in, once, and in every copy."""
    with servers.client() as client:
        np.testing.assert_array_equal(client.pull(table, KEYS), pushers.total)
    assert servers.differences() == []


# ---- copies are equal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_all_copies_are_equal_bit_for_bit(copies, seed):
    specs = [
        TableSpec("keyed", dim=3, optimizer=dps.Adagrad(0.1), init=dps.Normal(1.0, seed=4), shards=8, copies=copies),
        TableSpec("dense", rows=50, dim=2, optimizer=dps.Adam(0.1), shards=5, copies=copies, ack="memory"),
        TableSpec("sums", dim=2, aggregate="mean", optimizer=dps.Momentum(0.1), shards=4, copies=copies),
        TableSpec("int", dtype="int64", shards=4, copies=copies),
        TableSpec("rows", aggregate="mean", optimizer=dps.Momentum(0.1), shards=8, copies=copies),
    ]

    def use(client, seed, errors):
        rng = np.random.default_rng(seed)
        try:
            with client:
                for clock in range(12):
                    for _ in range(6):
                        spec = specs[rng.integers(4)]
                        keys = rng.integers(0, 50, rng.integers(0, 30))
                        values = rng.integers(-9, 9, (len(keys), spec.dim)).astype(spec.dtype)
                        values = values if spec.dim > 1 else values[:, 0]
                        verbs = [client.push, client.push_async, client.push_pull]
                        verbs += [] if spec.optimizer.derived else [client.add, client.assign]
                        verbs[rng.integers(len(verbs))](spec.name, keys, values)
                    if rng.integers(2):
                        client.push("dense", slice(3, 40), rng.random((37, 2)))
                    if client.session.own.clock >= 0:  # a mean over rows of data: also to shards without keys of it
                        keys = rng.integers(0, 50, rng.integers(0, 4))
                        client.push("rows", keys, rng.random(len(keys)), rows=int(rng.integers(0, 9)))
                    client.session.own.clock, client.session.own.number = clock, 0
        except BaseException as error:
            errors.append(error)

    with Servers(3) as servers:
        for spec in specs:
            servers.table(spec)
        errors: list[BaseException] = []
        threads = [threading.Thread(target=use, args=(servers.client(), 10 * seed + n, errors)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert servers.differences() == []
        assert all(servers.copy("keyed", n, 0) is None or len(servers.copy("keyed", n, 0).shard) for n in range(8))
        servers.settle()
        assert servers.differences() == [], "also after the open sums were closed"
        assert not servers.reports


@pytest.mark.parametrize("rows", [None, 60])
def test_rows_of_data_count_once_through_a_failover(rows):
    """In a mean over rows, what was pushed before the primary died and what is sent again count once, in all shards."""
    spec = TableSpec("w", rows, aggregate="mean", dtype="float64", optimizer=dps.SGD(1.0), shards=8, copies=2)
    with Servers(3) as servers:
        servers.table(spec)
        one, two = servers.client(), servers.client()
        with one, two:
            for client in (one, two):
                client.session.own.parties, client.session.own.clock = 2, 0
            one.push("w", [1, 2, 3], [10.0, 20.0, 30.0], rows=3)
            servers.kill(0, announce=False)
            again = two.push_async("w", [3, 50], [6.0, 70.0], rows=7)
            servers.without(0)
            again.result()
            two.push("w", slice(3, 5) if rows else [3, 4], 4.0, rows=0)
            assert servers.differences() == [], "the rows of data are in every copy of the open sums"
            sums = [
                copy.shard.sums for _, s in servers.alive() for copy in s.tables[1].replicas.values() if copy.primary
            ]
            assert [each.rows for each in sums] == [10] * 8
            servers.settle()
            assert one.pull("w", [1, 2, 3, 4, 50]).tolist() == [-1, -2, -4, -0.4, -7]
            assert servers.differences() == []


def test_the_comparison_itself_sees_a_difference():
    with Servers(2) as servers:
        servers.table(COUNTS)
        with servers.client() as client:
            client.push("n", KEYS, 1)
        assert servers.differences() == []
        servers.copy("n", 3, 1).shard.rows[0] += 1
        assert any("shard 3 of 'n'" in line for line in servers.differences())


def test_an_acknowledged_push_is_in_the_backup():
    with Servers(2) as servers:
        servers.table(COUNTS)
        with servers.client() as client:
            client.push("n", KEYS, 5)
            client.add("n", KEYS, 2)
        servers.kill(0)
        with servers.client() as client:
            assert (client.pull("n", KEYS) == 7).all()


def test_who_acknowledges_when():
    with Servers(2) as servers:
        servers.table(COUNTS, owners=[0] * 8)
        servers.table(TableSpec("fast", dtype="int64", copies=2, ack="memory"), owners=[0] * 4)
        with servers.client() as client, servers.client() as other, servers.client() as new:
            client.push("n", KEYS, 1)
            other.push("fast", KEYS, 1)
            with held(servers, 1):
                # The first push of a client goes the general way, and the later ones go through the compiled step.
                waiting = [client.push_async("n", KEYS, 1), new.push_async("n", KEYS, 1)]
                other.push("fast", KEYS, 1)
                assert (other.push_pull("fast", KEYS, 1) == 3).all()
                wait_until(lambda: (other.pull("n", KEYS) == 3).all(), what="the primary has them")
                for each in waiting:
                    with pytest.raises(RequestTimeoutError):
                        each.result(timeout=0.2)
        assert servers.differences() == []


# ---- servers go -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "victim"), [(2, "primary"), (2, "backup"), (3, "primary"), (3, "middle"), (3, "last")]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_server_that_dies_under_load(copies, victim, late):
    with Servers(4) as servers:
        spec = TableSpec("n", dtype="int64", shards=4, copies=copies)
        servers.table(spec, owners=[0, 0, 0, 0])
        number = {"primary": 0, "middle": 1, "backup": copies - 1, "last": copies - 1}[victim]
        with Pushers(servers) as pushers:
            servers.kill(number, announce=not late)
            if late:
                time.sleep(0.1)
                servers.without(number)
            pushers.more()
        assert all(len(p.chain) == copies - 1 for p in servers.tables["n"][1])
        check(servers, pushers)


def test_one_after_the_other_dies():
    with Servers(4) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=8, copies=4))
        with Pushers(servers) as pushers:
            for number in (2, 0, 3):
                servers.kill(number)
                pushers.more()
        assert {p.chain for p in servers.tables["n"][1]} == {(1,)}
        check(servers, pushers)


def test_a_repeat_is_given_the_first_answer():
    """Two count up one row and are told the new value: each number once, although connections break all the time."""
    with Servers(3) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2))
        answers: list[list[int]] = [[], []]
        errors: list[BaseException] = []

        def count(client, mine):
            try:
                with client:
                    for _ in range(60):
                        pending = [client.push_pull_async("n", [7], 1) for _ in range(5)]
                        mine.extend(int(p.result()[0]) for p in pending)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=count, args=(servers.client(), mine)) for mine in answers]
        for thread in threads:
            thread.start()
        rng = random.Random(1)
        while any(thread.is_alive() for thread in threads):
            servers.cut(lambda n: rng.random() < 0.3)
            time.sleep(0.01)
            if len(answers[0]) > 100 and not servers.servers[0].stopped:
                servers.kill(0)
        assert not errors
        assert all(mine == sorted(mine) for mine in answers)
        assert sorted(answers[0] + answers[1]) == list(range(1, 601))
        assert servers.differences() == []


def test_late_answers_do_not_spoil_each_other():
    """Each is more than a socket holds, the next is made before it has left, and nobody reads meanwhile.

    Over TCP, because a Unix socket holds so little that the server does not come to the next request.
    """
    rows = 600_000
    with dask.config.set({"dps.unix-sockets": False}), Servers(2) as servers:
        servers.table(TableSpec("n", rows=rows, dtype="int64", shards=1, copies=2), owners=[0])
        with servers.client() as client:
            with held(servers, 1):  # else the server sends the first answer, and reads no more before that is taken
                pending = [client.push_pull_async("n", slice(0, rows), np.ones(rows, np.int64)) for _ in range(3)]
                wait_until(lambda: servers.servers[0].requests >= 3)
            wait_until(lambda: servers.servers[0].relay.ops.backlog == 0)
            assert [np.unique(each.result()).tolist() for each in pending] == [[1], [2], [3]]


@pytest.mark.parametrize("copies", [2, 3])
def test_connections_that_break_cost_nothing(copies):
    with Servers(3) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=8, copies=copies))
        rng = random.Random(copies)
        with Pushers(servers) as pushers:
            for _ in range(25):
                servers.cut(lambda n: rng.random() < 0.4)
                time.sleep(0.02)
            pushers.more()
        check(servers, pushers)


def test_large_pushes_whose_connections_break():
    keys = np.arange(100_000)
    with Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", dim=4, shards=4, copies=2))
        with servers.client() as client:
            for turn in range(8):
                values = np.full((len(keys), 4), 1)
                pending = client.push_async("n", keys, values)
                values[:] = 1_000_000  # the array may be used again at once
                servers.cut(lambda n, turn=turn: n % 2 == turn % 2)
                pending.result()
            assert (client.pull("n", keys) == 8).all()
        assert servers.differences() == []


# ---- too much at a time ---------------------------------------------------------------------------------------------


def flood(servers: Servers, client, count: int = 40) -> threading.Thread:
    """Pushes of 16 KiB each, in a thread."""
    keys = np.arange(1024)
    thread = threading.Thread(target=lambda: [client.push_async("n", keys, 1) for _ in range(count)])
    thread.start()
    return thread


@pytest.fixture
def pressed():
    with dask.config.set({"dps.limits.unconfirmed": "64 KiB"}), Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2), owners=[0])
        with servers.client() as client:
            client.push("n", np.arange(1024), 1)
            yield servers, client


def suspended(servers: Servers) -> bool:
    return any(connection._suspended for connection in list(servers.endpoints[0].connections))


def test_a_primary_takes_no_more_than_its_backup_confirms(pressed):
    servers, client = pressed
    relay, limit = servers.servers[0].relay, 64 << 10
    with held(servers, 1):
        thread = flood(servers, client)
        wait_until(lambda: suspended(servers))
        time.sleep(0.1)
        assert limit < relay.ops.backlog <= limit + 2 * (16 << 10)
    thread.join(30)
    client.wait()
    assert (client.pull("n", np.arange(1024)) == 41).all()
    servers.quiet()
    assert relay.ops.backlog == 0
    assert not suspended(servers)
    assert servers.differences() == []


def test_a_backup_that_is_replaced_holds_up_nobody(pressed):
    servers, client = pressed
    with held(servers, 1):
        thread = flood(servers, client)
        wait_until(lambda: suspended(servers))
        servers.deaf.add(1)
        servers.without(1)
        thread.join(30)
        client.wait()
        assert (client.pull("n", np.arange(1024)) == 41).all()
    assert servers.servers[0].relay.ops.backlog == 0


# ---- joining, moving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [COUNTS, TableSpec("n", rows=64, dtype="int64", shards=8, copies=2)])
def test_a_server_joins_while_clients_push(spec):
    with dask.config.set({"dps.limits.move": "1 MiB"}), Servers(2) as servers:
        servers.table(spec)
        number = servers.start()
        with Pushers(servers) as pushers:
            for shard in range(8):
                servers.join("n", shard, number)
            pushers.more()
        assert all(p.chain[2:] == (number,) for p in servers.tables["n"][1])
        check(servers, pushers)
        servers.kill(0)
        servers.kill(1)
        with servers.client() as client:
            np.testing.assert_array_equal(client.pull("n", KEYS), pushers.total)


def test_a_server_joins_in_many_pieces_over_a_line_that_breaks(monkeypatch):
    monkeypatch.setattr("dps.engine.server.replication.PIECE_BYTES", 256)
    with Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", dim=1, shards=1, copies=1), owners=[0])
        with servers.client() as client:
            client.push("n", np.arange(2000), 1)
            client.push("n", np.arange(2000), 1)
        rng, over = random.Random(3), threading.Event()

        def cut():
            for _ in range(8):
                time.sleep(0.03)
                servers.cut(lambda n: rng.random() < 0.5)
            over.set()

        thread = threading.Thread(target=cut)
        thread.start()
        with Pushers(servers) as pushers:
            with contextlib.suppress(AssertionError):
                servers.join("n", 0, 1)
            over.wait(20)
            pushers.more()
        thread.join()
        pushers.total += 2
        assert any(kind == frames.CAUGHT_UP for _, kind, _ in servers.reports)
        assert servers.tables["n"][1][0].chain == (0, 1)
        check(servers, pushers)


def test_shards_that_join_at_once_take_turns_with_few_pieces_under_way(monkeypatch):
    """Pieces that do not fit the socket wait in memory that is not used again before they were confirmed."""
    piece, sent, send = 2 << 20, [], JoinerFeed._send
    for module in ("replicas", "replication"):
        monkeypatch.setattr(f"dps.engine.server.{module}.PIECE_BYTES", piece)

    def noted_send(feed, content, *what):
        send(feed, content, *what)
        feeds = [c.feed for c in feed.relay._replicas if c.feed is not None]
        sent.append((content, feed.replica.number, sum(each.under_way for each in feeds)))

    monkeypatch.setattr(JoinerFeed, "_send", noted_send)
    with Servers(1) as servers:
        servers.table(TableSpec("n", dtype="int64", dim=16, shards=4, copies=1))
        keys = np.arange(200_000)
        with servers.client() as client:
            client.push("n", keys, np.repeat(keys, 16).reshape(-1, 16))
        number, places = servers.start(), servers.tables["n"][1]
        servers.servers[0].relay.rate = 1e12  # so that nothing else makes them take turns
        places[:] = [joined(p, number, servers.epoch + 1) for p in places]
        servers.deaf.add(number)  # it joins when the dumps begin
        with held(servers, number):
            servers.place()
            time.sleep(0.1)
        servers.deaf.clear()
        for shard in range(4):
            servers.heard(0, frames.CAUGHT_UP, servers.epoch, server=number, table="n", shard=shard)
        places[:] = [appended(p, servers.epoch + 1) for p in places]
        servers.place()
        assert servers.differences() == []
    assert max(under_way for _, _, under_way in sent) < (MOST_UNDER_WAY + 1) * piece
    assert [shard for content, shard, _ in sent if content == ROWS][:4] == [0, 1, 2, 3]


def test_a_primary_hands_over_while_clients_push():
    with Servers(3) as servers:
        servers.table(COUNTS)
        with Pushers(servers) as pushers:
            for shard, p in enumerate(list(servers.tables["n"][1])):
                servers.hand_over("n", shard, p.chain[::-1])
            pushers.more()
        assert not [report for _, kind, report in servers.reports if kind == frames.SUSPECT]
        check(servers, pushers)


def test_all_shards_move_to_other_servers_while_clients_push():
    with Servers(4) as servers:
        servers.table(COUNTS, owners=[0] * 8)
        with Pushers(servers) as pushers:
            for shard in range(8):
                servers.join("n", shard, 2)
                servers.join("n", shard, 3)
                servers.hand_over("n", shard, (3, 2))
            pushers.more()
        assert servers.rows("n") > 0
        check(servers, pushers)
        for number in (0, 1):
            assert not servers.servers[number].tables[servers.tables["n"][0].id].replicas
            assert not servers.servers[number].relay.has_successors


def test_nobody_steps_down_before_all_is_confirmed():
    with Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2), owners=[0])
        (place,) = servers.tables["n"][1]
        with servers.client() as client, servers.client() as other:
            client.push("n", KEYS, 1)
            with held(servers, 1):
                pending = client.push_async("n", KEYS, 1)
                wait_until(lambda: servers.servers[0].relay.ops.backlog > 0)
                servers.deaf.add(1)
                servers.put("n", 0, place._replace(stepping_down=True))
                servers.endpoints[0].call(servers.servers[0].relay.tick)
                assert not [kind for _, kind, _ in servers.reports if kind == frames.STEPPED_DOWN]
                other.session.patience = 0.2
                with pytest.raises(RequestTimeoutError, match="does not serve shard 0 of table 'n' now"):
                    other.push("n", KEYS, 1)
            servers.heard(0, frames.STEPPED_DOWN, servers.epoch, table="n", shard=0)
            servers.deaf.clear()
            servers.put("n", 0, place)
            pending.result()
            assert (client.pull("n", KEYS) == 2).all()


def test_who_is_out_of_a_chain_says_no_more_that_it_has_stepped_down():
    """Else a later stepping down would be believed before its time."""
    with Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2), owners=[0])
        servers.hand_over("n", 0, (1,))
        servers.reports.clear()
        servers.join("n", 0, 0)
        servers.hand_over("n", 0, (0, 1))
        servers.reports.clear()
        for endpoint, role in servers.alive():
            endpoint.call(role.relay.tick)
        assert servers.reports == []


# ---- one frame for several shards, of which one goes another way ----------------------------------------------------


@contextlib.contextmanager
def on_the_way(count: int = 3):
    """Three shards on servers 0, 1, and pushes to all of them that server 1 has not seen, each in one frame."""
    with Servers(3) as servers:
        servers.table(TableSpec("n", rows=48, dtype="int64", shards=3, copies=2), owners=[0, 0, 0])
        with servers.client() as client:
            client.push("n", slice(0, 48), np.ones(48, np.int64))
            with held(servers, 1):
                servers.deaf.add(1)  # else it is told, which it cannot be
                pending = [client.push_async("n", slice(0, 48), np.ones(48, np.int64)) for _ in range(count)]
                relay = servers.servers[0].relay
                wait_until(lambda: relay.unconfirmed()[0] == count)
                yield servers, client, pending
            servers.deaf.clear()
            servers.place()
            for each in pending:
                each.result(timeout=real_servers.PATIENCE)
            assert (client.pull("n", slice(0, 48)) == 1 + count).all()
            assert servers.differences() == []


def split_over_a_line(broken: bool) -> None:
    """The frames are split because the middle shard has lost its backup; the other shards' parts are sent again."""
    with on_the_way() as (servers, client, pending):
        if broken:
            link = servers.servers[0].relay.ops.successors[1].link
            servers.endpoints[0].call(link.close)
            wait_until(lambda: servers.servers[0].relay.ops.successors[1].link is not link)
        (_, places) = servers.tables["n"]
        servers.put("n", 1, rechained(places[1], (0,), None, servers.epoch + 1))
        assert servers.servers[0].relay.unconfirmed()[0] == 2 * len(pending)
        client.pull("n", [0])  # what was answered before has come by then
        assert not any(each.done() for each in pending), "server 1 has confirmed nothing"


def test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again():
    split_over_a_line(broken=False)


def test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again_where_the_line_broke():
    split_over_a_line(broken=True)


def test_a_refused_part_leaves_the_body_to_the_other_part():
    """A replica in the middle of a chain owes one confirmation for two shards, and is taken out of the chain of one.

    It sends the other shard's op again over a new connection, after other ops have arrived on the old one.
    """
    rows = 1 << 20  # 8 MB: so large a body is lent, and not copied; and it does not fit into the buffers of sockets
    with Servers(3) as servers:
        servers.table(TableSpec("n", rows=rows, dtype="int64", shards=2, copies=3), owners=[0, 0])
        (_, places) = servers.tables["n"]
        values = np.arange(rows)  # no two alike, because a repeat brings the same rows at another place of a buffer
        relay = servers.servers[1].relay
        with servers.client() as client:
            client.push("n", slice(0, rows), np.ones(rows, np.int64))
            with held(servers, 2):
                servers.deaf.update((0, 2))  # server 2 cannot be told; and server 0 would begin to send at once
                pending = [client.push_async("n", slice(0, rows), values)]
                wait_until(lambda: relay.unconfirmed()[0] == 1)
                servers.put("n", 1, rechained(places[1], (0, 2), None, servers.epoch + 1))
                servers.deaf.discard(0)
                servers.place()
                pending.append(client.push_async("n", slice(0, rows), np.full(rows, 500, np.int64)))
                wait_until(lambda: servers.copy("n", 0, 1).shard.version == 3)
                link = relay.ops.successors[2].link
                servers.endpoints[1].call(link.close)
                wait_until(lambda: relay.ops.successors[2].link is not link)
            servers.deaf.clear()
            servers.place()
            for each in pending:
                each.result(timeout=real_servers.PATIENCE)
            assert (client.pull("n", slice(0, rows)) == 501 + values).all()
            assert servers.differences() == []


def test_a_repeat_waits_for_its_own_shard_only():
    """The repeat of one shard's op follows an op on two shards, of which the other one is taken away afterwards."""
    with Servers(3) as servers:
        servers.table(TableSpec("n", rows=48, dtype="int64", shards=2, copies=3), owners=[0, 0])
        (_, places) = servers.tables["n"]
        with servers.client() as client:
            client.push("n", slice(0, 48), np.ones(48, np.int64))
            with held(servers, 2):
                servers.deaf.update((1, 2))
                pending = client.push_async("n", slice(0, 48), np.ones(48, np.int64))
                wait_until(lambda: servers.servers[1].relay.unconfirmed()[0] == 1)
                servers.put("n", 0, rechained(places[0], (0, 2), None, servers.epoch + 1))
                relay = servers.servers[1].relay
                wait_until(lambda: servers.copy("n", 1, 1).tail.followers, what="server 0 sends shard 1 again")
                servers.deaf.discard(1)
                servers.place()
                assert relay.unconfirmed()[0] == 1
            servers.deaf.clear()
            servers.place()
            pending.result(timeout=real_servers.PATIENCE)
            assert (client.pull("n", slice(0, 48)) == 2).all()
            assert servers.differences() == []


# ---- those who were replaced ----------------------------------------------------------------------------------------


def test_an_old_primary_is_refused_and_its_clients_lose_nothing():
    with Servers(3) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=2, copies=2), owners=[0, 0])
        with servers.client() as client, Pushers(servers) as pushers:
            client.push("n", KEYS, 1)
            servers.deaf.add(0)
            servers.without(0)
            assert client.session.epoch < servers.epoch
            client.push("n", KEYS, 1)  # it goes to the old one first, who does not know
            assert client.session.epoch == servers.epoch
            assert servers.copy("n", 0, 0).deposed or servers.copy("n", 1, 0).deposed
            pushers.more()
        pushers.total += 2
        assert {p.chain for p in servers.tables["n"][1]} == {(1,)}
        check(servers, pushers)
        assert not [report for _, kind, report in servers.reports if kind == frames.SUSPECT]


def test_without_a_lease_no_replicated_rows_are_read():
    with Servers(2) as servers:
        servers.table(COUNTS)
        servers.table(TableSpec("single"))
        with servers.client() as client:
            client.push("n", KEYS, 1)
            client.push("single", KEYS, 1)
            servers.servers[0].heartbeat.lease_until = 0.0
            usual, client.session.patience = client.session.patience, 1.0
            with pytest.raises(RequestTimeoutError, match="found no server for 1 s"):
                client.pull("n", KEYS)
            client.session.patience = usual
            owned = servers.servers[0].tables[servers.tables["n"][0].id]
            ask = Header(frames.PULL, table=owned.spec.id, shard=0, shards=1)
            channel = Channel(servers.addresses[0], "s", SECRET, "server 0")
            with contextlib.closing(channel), pytest.raises(MovedError, match="0 has lost its lease"):
                channel.ask(ask, bytes(8)).result(soon())
            client.push("n", KEYS, 1)
            assert (client.pull("single", KEYS) == 1).all(), "nobody else has these"
            servers.servers[0].heartbeat.lease_until = 1e12
            assert (client.pull("n", KEYS) == 2).all()


def test_a_certificate_names_the_last_op_of_everybody_also_after_a_failure():
    with Servers(2) as servers:
        servers.table(COUNTS)
        with servers.client() as one, servers.client() as two:
            for _ in range(3):
                one.push("n", KEYS, 1)
            two.session.own.clock = 5
            two.push("n", KEYS, 1)
            for survivor in (False, True):
                if survivor:
                    servers.kill(1)
                values, certificate = one.pull_certified("n", KEYS)
                assert (values == 4).all()
                assert set(certificate.shards) == set(range(8))
                assert all(ops == {one.origin: (-1, 2), two.origin: (5, 0)} for ops in certificate.shards.values())


def test_a_dropped_table_harms_no_other():
    """Its backups forget it a moment before its primary does."""
    with Servers(2) as servers:
        gone = servers.table(TableSpec("gone", dtype="int64", shards=2, copies=2), owners=[0, 0])
        servers.table(COUNTS)
        with servers.client() as client, Pushers(servers) as pushers:
            client.push("gone", KEYS, 1)
            servers.forget(1, gone.id)
            pending = client.push_async("gone", KEYS, 1)
            wait_until(lambda: any(kind == frames.SUSPECT for _, kind, _ in servers.reports))
            servers.drop("gone")
            with pytest.raises(UnknownTableError):
                pending.result()
            pushers.more()
        shards_reported = [
            shard for _, kind, report in servers.reports for shard in report.shards if kind == frames.SUSPECT
        ]
        assert {name for name, _ in shards_reported} == {"gone"}
        check(servers, pushers)
        assert servers.servers[0].relay.ops.backlog == 0


def test_a_backup_that_confirms_nothing_is_reported():
    with dask.config.set({"dps.timeouts.silence": "0.2 s"}), Servers(2) as servers:
        servers.table(COUNTS, owners=[0] * 8)
        relay = servers.servers[0].relay
        with servers.client() as client:
            client.push("n", KEYS, 1)
            time.sleep(0.3)
            servers.endpoints[0].call(relay.tick)
            assert not servers.reports, "it owes nothing"
            with held(servers, 1):
                client.push_async("n", KEYS, 1)
                time.sleep(0.3)
                servers.endpoints[0].call(relay.tick)
                (reporter, kind, report), *_ = servers.reports
                assert (reporter, kind, report.server, len(report.shards)) == (0, frames.SUSPECT, 1, 8)
                assert "has confirmed nothing for 0." in report.why
            client.wait()


def test_a_server_that_loses_two_shards_at_once_sends_no_op_under_the_epoch_that_takes_them(monkeypatch):
    """A frame holds an op of both shards, and the successor has not confirmed it when the placement comes."""
    take, epochs = ServerRole._take_op, []

    def noted(role, connection, header, body, release):
        epochs.append(header.epoch)
        take(role, connection, header, body, release)

    monkeypatch.setattr(ServerRole, "_take_op", noted)
    with Servers(2) as servers:
        servers.table(TableSpec("n", rows=48, dtype="int64", shards=2, copies=2), owners=[0, 0])
        with servers.client() as client:
            client.push("n", slice(0, 48), np.ones(48, np.int64))
            before = servers.epoch
            with held(servers, 1):
                servers.deaf.add(1)
                pending = client.push_async("n", slice(0, 48), np.ones(48, np.int64))
                wait_until(lambda: servers.servers[0].relay.unconfirmed()[0] == 1)
                servers.without(0)
                assert not servers.servers[0].relay.unconfirmed()[0]
            servers.deaf.clear()
            servers.place()
            pending.result(timeout=real_servers.PATIENCE)
            assert (client.pull("n", slice(0, 48)) == 2).all()
    assert all(epoch <= before for epoch in epochs)


# ---- the tests themselves -------------------------------------------------------------------------------------------


def shards_take_turns() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_shards_that_join_at_once_take_turns_with_few_pieces_under_way(monkeypatch)


def no_op_leaves_early() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_a_server_that_loses_two_shards_at_once_sends_no_op_under_the_epoch_that_takes_them(monkeypatch)


WRONG = [
    (ServerRole, "_check_fence", "header.epoch < replica.fence", "False",
     test_an_old_primary_is_refused_and_its_clients_lose_nothing),
    (Heartbeat, "holds_lease", "now <= self.lease_until", "True",
     test_without_a_lease_no_replicated_rows_are_read),
    (ServerRole, "_take_push", "owed if table.waits else OwedAnswer()", "OwedAnswer()", test_who_acknowledges_when),
    (ServerTable, "_kept_answer", "if kept is None", "if kept is not None or kept is None",
     test_a_repeat_is_given_the_first_answer),
    (Relay, "_report_stepped_down", "if replica.drained:", "if True:", test_nobody_steps_down_before_all_is_confirmed),
    (Relay, "drop", "replica.stepping_down = False", "pass",
     test_who_is_out_of_a_chain_says_no_more_that_it_has_stepped_down),
    (Relay, "settle", "self.ops.write(successor, number)", "pass",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again),
    (Relay, "_withdraw", "self._rewritten.append((successor, again))", "kept.pop(again)",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again_where_the_line_broke),
    (Relay, "_withdraw", "kept[again] = single", "self.ops.write(successor, number)",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again_where_the_line_broke),
    (Relay, "_withdraw", "for single in forward.split():", "for single in [forward]:",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again_where_the_line_broke),
    (Relay, "_on_up", "self.ops.send(successor.number, forward)",
     "len(forward.replicas) > 1 and self.ops.send(successor.number, forward)",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again_where_the_line_broke),
    (Relay, "_withdraw", "successor.replace(kept)",
     "successor.replace(kept); [self.ops.write(s, n) for s, n in self._rewritten if n in s.unconfirmed]",
     no_op_leaves_early),
    (Relay, "throttle", "not self.ops.full", "True",
     lambda: within(test_a_primary_takes_no_more_than_its_backup_confirms)),
    (JoinerFeed, "_send", "self.relay.ops.send(", "self.relay.memory.release(memory), self.relay.ops.send(",
     shards_take_turns),
    (FeedsOfJoiner, "go_on", "self.queue.append(feed)", "self.queue.insert(0, feed)", shards_take_turns),
    (replicas, "next_piece", "MOST_UNDER_WAY - 1", "10 * MOST_UNDER_WAY", shards_take_turns),
]  # fmt: skip


WRONG_CORE = [
    ("return 0 if self._parts.forwards and table.waits else size", "return size", test_who_acknowledges_when),
    ("(<ShardState> part[n].shard).version\n", "1\n", test_an_acknowledged_push_is_in_the_backup),
    ("if self.left == 0 or self.error is not None:", "if True:", test_who_acknowledges_when),
    ("owed.left += len(singles) - 1", "pass",
     test_the_neighbours_of_a_shard_that_goes_another_way_are_sent_again),
    ("if self.left == 0 and self.learning == 0 and self._at_end", "if self.learning == 0 and self._at_end",
     test_a_refused_part_leaves_the_body_to_the_other_part),
    ("if follower[0] is replica", "", test_a_repeat_waits_for_its_own_shard_only),
    ("not tail.done", "False", lambda: within(repeats_wait)),
]  # fmt: skip


def within(scenario) -> None:
    """With little room for what is not confirmed."""
    with dask.config.set({"dps.limits.unconfirmed": "64 KiB"}), Servers(2) as servers:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2), owners=[0])
        with servers.client() as client:
            client.push("n", np.arange(1024), 1)
            scenario((servers, client))


def repeats_wait(pressed) -> None:
    """A repeat is not acknowledged before the first is."""
    servers, client = pressed
    with held(servers, 1):
        pending = client.push_async("n", KEYS, 1)
        wait_until(lambda: servers.servers[0].relay.ops.backlog > 0)
        channel = client.session._channels[0]
        servers.endpoints[0].call(lambda: [c.transport.abort() for c in servers.endpoints[0].connections])
        with pytest.raises(RequestTimeoutError):
            pending.result(timeout=0.5)
        assert channel.closed


def test_a_repeat_is_acknowledged_when_the_first_is(pressed):
    repeats_wait(pressed)


@pytest.mark.parametrize(
    ("where", "name", "old", "new", "scenario"), WRONG, ids=[f"{w[0].__name__}.{w[1]}" for w in WRONG]
)
def test_a_wrong_server_is_caught(where, name, old, new, scenario, monkeypatch):
    original = where.__dict__[name]
    wrong = mutant(getattr(where, name), old, new)
    monkeypatch.setattr(where, name, staticmethod(wrong) if isinstance(original, staticmethod) else wrong)
    monkeypatch.setattr("servers.PATIENCE", 1.0)
    with pytest.raises((AssertionError, DPSError, pytest.fail.Exception)):
        scenario()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "scenario"),
    [WRONG_CORE[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG_CORE[1:])],
)
def test_a_wrong_core_is_caught(old, new, scenario, monkeypatch):
    put_variant(monkeypatch, ("service", "forwards", "answers"), old, new)
    monkeypatch.setattr("servers.PATIENCE", 1.0)
    with pytest.raises((AssertionError, DPSError, pytest.fail.Exception)):
        scenario()


# ---- a new table ----------------------------------------------------------------------------------------------------


def test_a_copy_that_has_not_heard_its_place_takes_no_ops():
    """It does not know who is behind it, so it would confirm what the last in the chain has never got."""
    with Servers(3) as servers:
        servers.deaf.add(1)
        servers.table(TableSpec("new", dtype="int64", shards=1, copies=3))
        with servers.client() as client:
            pending = client.push_async("new", KEYS, 1)
            wait_until(lambda: servers.copy("new", 0, 0).shard.version == 1)
            time.sleep(0.2)  # for what must not happen
            assert [servers.copy("new", 0, n).shard.version for n in (1, 2)] == [0, 0]
            servers.deaf.clear()
            servers.place()
            pending.result()
            assert servers.differences() == []
            assert [servers.copy("new", 0, n).shard.version for n in range(3)] == [1, 1, 1]
