"""What servers count, against numpy: on a server alone, on a fake endpoint, and over the wire to the controller."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from delays import slow_server
from distributed import Client
from lone_server import NO_RUNNER
from servers import Servers, held, wait_until

import dps
from dps.engine.controller.failover import Membership
from dps.engine.server.heartbeat import BEATS_PER_REPORT, HEARTBEAT_SECONDS
from dps.engine.server.requests import ServerRole
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.reports import MAX_TABLES, ServerReport, quantile
from dps.engine.telemetry.server_meter import MAX_SIZED_SHARDS, ServerMeter, process_usage
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, padded
from dps.engine.wire.messages import Placement, ShardPlace
from dps.errors import DPSError


class FakeEndpoint:
    """Time is a number, timers go off when `run` says so, and connections are at once."""

    frame_limit, host, port, connections = 1 << 26, "here", 1, ("one", "two")

    def __init__(self):
        self.time = 0.0
        self.timers, self.links = [], []

    def now(self):
        return self.time

    def later(self, seconds, function, *args):
        self.timers.append((self.time + seconds, function, args))

    def connect(self, address, session, secret, on_up, on_frame, on_end):
        link = FakeLink()
        self.links.append((link, on_up, on_frame, on_end))
        return link

    def run(self, late=0.0):
        """The next timer goes off, so much late."""
        when, function, args = self.timers.pop(0)
        self.time = max(self.time, when) + late
        function(*args)


class FakeLink:
    def __init__(self):
        self.open, self.refused, self.sent = True, False, []

    def send(self, header, buffers=()):
        assert header.body == sum(len(piece) for piece in buffers)
        self.sent.append((header, b"".join(bytes(piece) for piece in buffers)))

    def close(self):
        self.open = False

    def reports(self):
        """What went with each beat."""
        return [body and ServerReport.decode(body) for header, body in self.sent if header.kind == frames.BEAT]


class FakePeer:
    """A connection of a client that takes everything."""

    session = "s"
    transport = SimpleNamespace(is_closing=lambda: False, close=lambda: None)

    def outgoing(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def write(self, data): ...

    def reply(self, header, body=b""): ...

    def acknowledge(self, header): ...

    def deliver(self, answers): ...


class Clock:
    """Each request takes as long as was said; any other time one asks, it is the sum of what has been."""

    def __init__(self):
        self.time, self.takes = 0.0, []

    def __call__(self):
        now = self.time
        if self.takes:
            self.time += self.takes.pop(0)
        return now


ONE = (TableSpec("w", id=1, shards=1),)


def role(clock=None, tables=ONE, usage=None):
    endpoint = FakeEndpoint()
    server = ServerRole(
        endpoint, "s", 0, "ab", ("there", 1), NO_RUNNER, NO_RUNNER, ServerMeter(clock or endpoint.now, usage)
    )
    places = {}
    for spec in tables:
        server.create(spec, range(spec.shards))
        places[spec.id] = [ShardPlace([0], None, [1], False)] * spec.shards
    server.adopt(Placement(1, {0: ("here", 1)}, places))
    return endpoint, server


def request(spec, kind, counts, flags=0, low=0):
    """A frame for so many keys, or rows, of each shard from `low` on."""
    count = sum(counts)
    body = b""
    header = Header(kind, flags, table=spec.id, shard=low, shards=len(counts), count=count)
    if spec.rows is None:
        body += np.array(counts, np.int64).tobytes() + np.arange(count).tobytes()
    else:
        first = spec.rows // spec.shards * low
        header = header._replace(start=first, flags=flags | frames.RANGE)
    if kind == frames.PUSH:
        body += np.ones(count * spec.dim, np.float32).tobytes()
    body = body.ljust(padded(len(body)))
    return header._replace(body=len(body)), memoryview(bytearray(body))


def tell(server):
    """What a report says, over the wire."""
    return ServerReport.decode(server._make_report(anew=True))


SPECS = (TableSpec("keyed", id=1, dim=3, shards=4), TableSpec("dense", id=2, rows=80, dim=2, shards=8))


@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_an_oracle(seed):
    rng, clock = np.random.default_rng(seed), Clock()
    _, server = role(clock, SPECS)
    seen = {(spec.id, verb): [] for spec in SPECS for verb in ("pull", "push")}  # (keys, bytes, seconds)
    shards = {spec.id: np.zeros(spec.shards, int) for spec in SPECS}
    for _ in range(300):
        spec = SPECS[rng.integers(2)]
        low = int(rng.integers(spec.shards))
        high = int(rng.integers(low, spec.shards)) + 1
        counts = rng.integers(0, 9, high - low).tolist() if spec.rows is None else [10] * (high - low)
        verb = ("pull", "push")[rng.integers(2)]
        answers = verb == "pull" or bool(rng.integers(2))
        flags = frames.ANSWER if answers and verb == "push" else 0
        header, body = request(spec, getattr(frames, verb.upper()), counts, flags, low)
        seconds = float(10 ** rng.uniform(-7, 1))
        clock.takes = [seconds]
        server.handlers[header.kind](FakePeer(), header, body)
        nbytes = len(body) + answers * padded(sum(counts) * spec.dim * 4)
        seen[spec.id, verb].append((sum(counts), nbytes, seconds))
        shards[spec.id][low:high] += counts
    about = tell(server)
    for (table, verb), found in seen.items():
        keys, nbytes, seconds = np.array(found).T
        told = about["tables"][table]
        assert told[verb] == [len(found), keys.sum(), nbytes.sum(), pytest.approx(seconds.sum())]
        buckets = np.maximum(0, np.floor(np.log2(seconds * 1e6))).astype(int)
        assert told[f"{verb}_ms"] == dict(zip(*np.unique(buckets, return_counts=True), strict=True))
    for table, keys in shards.items():
        assert about["tables"][table]["shards"] == {n: count for n, count in enumerate(keys) if count}
    assert about["tables"][2]["rows"] == 80
    assert about["tables"][1]["rows"] > 0
    assert {n: t["bytes"] for n, t in about["tables"].items()} == {
        spec.id: server.status().tables[spec.name].bytes for spec in SPECS
    }


def test_what_is_refused_is_not_counted():
    _, server = role(tables=SPECS)
    header, body = request(SPECS[1], frames.PULL, [10])
    server.handlers[frames.PULL](FakePeer(), header, body)
    for wrong in (header._replace(start=75), header._replace(table=9)):
        with pytest.raises(DPSError):
            server.handlers[frames.PULL](FakePeer(), wrong, body)
    assert tell(server)["tables"][2]["pull"][:2] == [1, 10]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_in_the_bucket_of_the_true_one(seed, q):
    times = np.random.default_rng(seed).lognormal(4, 2, 777) + 1  # microseconds
    buckets, counts = np.unique(np.floor(np.log2(times)).astype(int), return_counts=True)
    found = 1e6 * quantile(dict(zip(buckets.tolist(), counts.tolist(), strict=True)), q)
    true = np.quantile(times, q, method="inverted_cdf")
    assert 2.0 ** np.floor(np.log2(true)) <= found <= 2.0 ** (np.floor(np.log2(true)) + 1)
    assert quantile({}, q) == 0.0


def test_only_what_changed_is_told_again():
    _, server = role(tables=SPECS)
    whole = ServerReport.decode(server._make_report(anew=True))
    assert set(whole["tables"]) == {1, 2}
    assert not ServerReport.decode(server._make_report(anew=False))["tables"]
    server.handlers[frames.PULL](FakePeer(), *request(SPECS[1], frames.PULL, [10]))
    assert set(ServerReport.decode(server._make_report(anew=False))["tables"]) == {2}
    server.tables[1].replicas[0].shard.reserve(1 << 16)  # grows without a request, as in a restore or on a backup
    assert set(ServerReport.decode(server._make_report(anew=False))["tables"]) == {1}


def test_many_tables_take_turns():
    specs = [TableSpec(f"t{n}", id=n, shards=1) for n in range(1, 2 * MAX_TABLES + 10)]
    _, server = role(tables=specs)
    told = []
    for _ in range(3):
        for spec in specs:
            server.handlers[frames.PULL](FakePeer(), *request(spec, frames.PULL, [1]))
        told.append(list(ServerReport.decode(server._make_report(anew=False))["tables"]))
    assert [len(numbers) for numbers in told] == [MAX_TABLES] * 3
    assert set().union(*told) == {spec.id for spec in specs}


def test_many_shards_are_looked_at_by_turns():
    specs = [TableSpec(f"t{n}", id=n, shards=64) for n in range(1, 11)]
    _, server = role(tables=specs)
    server._make_report(anew=True)
    for spec in specs:
        server.handlers[frames.PUSH](FakePeer(), *request(spec, frames.PUSH, [1]))
    rows = {}
    told = []
    for _ in range(-(-10 * 64 // MAX_SIZED_SHARDS) + 1):
        about = ServerReport.decode(server._make_report(anew=False))["tables"]
        rows |= {number: table["rows"] for number, table in about.items()}
        told.append(about)
    assert {n: table["push"][0] for n, table in told[0].items()} == dict.fromkeys(range(1, 11), 1), (
        "counts come at once"
    )
    assert rows == dict.fromkeys(range(1, 11), 1)


def test_every_second_beat_has_a_report_and_so_has_the_first_over_a_connection():
    endpoint, server = role()
    server.start()
    link, on_up, on_frame, on_end = endpoint.links[0]
    on_up(link)
    for _ in range(8):
        for header, _ in link.sent[-1:]:
            on_frame(link, Header(frames.OK, request=header.request), memoryview(b""))
        endpoint.run()
    reports = link.reports()
    assert set(reports[1]["tables"]) == {1}, "the first over this connection"  # the one before it went to no controller
    assert [bool(report) for report in reports[2:]] == [n % BEATS_PER_REPORT == 1 for n in range(2, len(reports))]
    assert not any(report["tables"] for report in reports[2:] if report), "nothing has changed"
    on_end(link)
    while len(endpoint.links) < 2:
        endpoint.run()
    again, on_up, _, _ = endpoint.links[1]
    on_up(again)
    assert set(again.reports()[0]["tables"]) == {1}, "it may go to another controller"


def test_a_late_timer_and_a_handler_that_sleeps_are_lag():
    endpoint, server = role(tables=SPECS)
    server.start()
    assert tell(server)["lag"] == 0
    endpoint.run()
    endpoint.run(late=0.05)
    assert tell(server)["lag"] == pytest.approx(0.05)
    assert tell(server)["lag"] == 0, "the worst since the last report"
    table = server.tables[2]
    answer = table.answer

    def slow(*args):
        endpoint.time += 0.3 - HEARTBEAT_SECONDS / 2
        answer(*args)

    table.answer = slow
    server.handlers[frames.PULL](FakePeer(), *request(SPECS[1], frames.PULL, [10]))
    about = tell(server)
    assert about["lag"] == pytest.approx(0.3 - HEARTBEAT_SECONDS / 2)
    assert about["tables"][2]["pull"][3] == pytest.approx(0.3 - HEARTBEAT_SECONDS / 2)


def test_use_of_the_machine_is_told_if_there_is_a_way_to_know_it(monkeypatch):
    _, server = role()
    assert (tell(server)["cpu"], tell(server)["memory"], tell(server)["connections"]) == (0, 0, 2)
    _, server = role(usage=lambda: (1.5, 0.5, 4096))
    assert [tell(server)[name] for name in ("cpu", "busy", "memory")] == [1.5, 0.5, 4096]
    cpu, busy, memory = process_usage()
    assert min(cpu, busy) > 0
    assert memory > 1 << 20

    def nothing(*args, **kwargs):
        raise FileNotFoundError("no /proc")

    monkeypatch.setattr("builtins.open", nothing)
    most = process_usage()[2]
    assert most > 0.5 * memory, "the most it ever had"
    monkeypatch.setattr("dps.engine.telemetry.server_meter.resource", None)
    assert process_usage()[2] == 0


def test_what_a_backup_has_not_confirmed_is_told_with_its_age():
    with Servers(2) as servers, servers.client() as client:
        servers.table(TableSpec("n", dtype="int64", shards=1, copies=2), owners=[0])
        endpoint, server = servers.endpoints[0], servers.servers[0]

        def lag():
            return tuple(ServerReport.decode(endpoint.call(server._make_report, True))["unconfirmed"])

        assert lag() == (0, 0, 0)
        with held(servers, 1):
            pending = [client.push_async("n", [1, 2, 3], 1) for _ in range(2)]
            wait_until(lambda: lag()[0] == 2)
            ops, nbytes, age = lag()
            assert (ops, nbytes) == (2, 2 * 3 * 16)
            wait_until(lambda: lag()[2] > age)
        for push in pending:
            push.result()
        servers.quiet()
        assert lag() == (0, 0, 0)
        assert tell(server)["tables"][1]["push"][:3] == [2, 6, 2 * (8 + 3 * 16)], "each push counts once"


def test_the_controller_is_told_exactly_what_was_asked_for(monkeypatch):
    """Over real sockets, in one process: every report of every server, as it comes in a beat."""
    told, beat = {}, Membership.beat

    def heard(self, connection, header, body):
        if len(body):
            for table, about in ServerReport.decode(body)["tables"].items():
                told[connection.party.number, table] = about
        return beat(self, connection, header, body)

    monkeypatch.setattr(Membership, "beat", heard)
    rng = np.random.default_rng(0)
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
        ps.client() as user,
    ):
        ps.table("w", dim=2, shards=8)
        pulled = pushed = 0
        for _ in range(50):
            keys = np.unique(rng.integers(0, 1 << 40, rng.integers(1, 100)))
            user.push("w", keys, np.ones((len(keys), 2)))
            user.pull("w", keys[::2])
            pushed, pulled = pushed + len(keys), pulled + len(keys[::2])

        def total(verb, column):
            return sum(about[verb][column] for about in list(told.values()))

        wait_until(lambda: total("push", 1) == pushed and total("pull", 1) == pulled)
        shards = {shard: keys for about in told.values() for shard, keys in about["shards"].items()}
        assert sum(shards.values()) == pushed + pulled
        assert len(shards) == 8
        assert sum(about["rows"] for about in told.values()) == pushed
        assert total("push", 0) == sum(sum(about["push_ms"].values()) for about in told.values()) > 0
        assert total("pull", 3) > 0
        assert {server for server, _ in told} == {0, 1}


def test_a_slow_server_is_seen_in_its_times():
    with Servers(2) as servers, servers.client() as client:
        spec = servers.table(TableSpec("n", rows=20, shards=2), owners=[0, 1])

        def told():
            pairs = zip(servers.endpoints, servers.servers, strict=True)
            return [ServerReport.decode(endpoint.call(server._make_report, True)) for endpoint, server in pairs]

        with slow_server(0.02, server=1, kinds={frames.PULL}):
            for _ in range(3):
                client.pull("n")
                client.push("n", np.arange(20), np.ones(20))
        quick, slow = told()
        pulls = slow["tables"][spec.id]["pull"]
        assert pulls[3] / pulls[0] >= 0.02
        assert quantile(slow["tables"][spec.id]["pull_ms"], 0.5) > 0.016, "the bucket that 20 ms are in"
        assert slow["lag"] >= 0.02
        assert min(slow["tables"][spec.id]["pull_ms"]) >= 14, "each of them took 20 ms or more"
        assert sum(slow["tables"][spec.id]["push_ms"].values()) == 3
        assert quick["tables"][spec.id]["pull"][:2] == [3, 30]
