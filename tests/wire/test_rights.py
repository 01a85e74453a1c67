"""Who may send what: every kind of frame, with every flag, from every role, at a live server and a live controller."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import pytest
from distributed import Client
from peers import Raw, framed
from run_peers import state_of
from servers import SECRET, Servers

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.state.transfer import digest
from dps.engine.wire import frames, rights
from dps.engine.wire.frames import Header, encode_json
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.rights import CLIENT, SERVER, STRANGER, TO_CONTROLLER, TO_LENDER, TO_SERVER, TO_TRAINER
from dps.errors import ProtocolError

F = frames
NAMED = {name: value for name, value in vars(F).items() if name.isupper() and type(value) is int}
KINDS = {NAMED[name] for name in NAMED if NAMED[name] < 70 and name not in ("VERSION", "HEADER_SIZE")}
BITS = [1 << bit for bit in range(8)]
COMBINATIONS = range(256)  # all combinations of the flags that there are

# The same as in docs/design/protocol.md, said in another way: what a frame without any right must not be.
PULLS = {F.RANGE * a | flag for a in (0, 1) for flag in (0, F.CERTIFICATE, F.BORN)}
RULES = (0, F.RULE_ADD, F.RULE_ASSIGN)
PUSHES = {F.RANGE * a | rule | F.ANSWER * b for a in (0, 1) for rule in RULES for b in (0, 1)}
PULLS |= {F.NARROW | flags for flags in PULLS if not flags & F.BORN}
PULLS |= {F.LIST | flags for flags in PULLS if not flags & (F.BORN | F.RANGE)}
SHARING = {F.SHARED | flags for flags in PULLS if not flags & (F.CERTIFICATE | F.BORN)}
PULLS |= {F.CHANGED} | SHARING
PACKED = {F.NARROW | flags for flags in PUSHES if not flags & (F.RULE_ADD | F.RULE_ASSIGN)}
PACKED |= {F.LIST | flags for flags in PUSHES | PACKED if not flags & (F.RULE_ADD | F.RULE_ASSIGN | F.RANGE)}
REPLAYS = {F.REPLAYED | flags for flags in PUSHES | PACKED}
PUSHES |= {F.RULE_DELETE, F.RULE_DELETE | F.RANGE}
REPLICATES = PUSHES | {F.CONTROL, F.CONTROL | F.RULE_ADD, F.CONTROL | F.RULE_ASSIGN, F.RULE_ROWS, F.RULE_ROWS | F.RANGE}
REPLICATES |= {F.RULE_ROWS | F.ANSWER, F.RULE_ROWS | F.RANGE | F.ANSWER}
REPLICATES |= {F.RULE_ROWS | F.MORE, F.RULE_ROWS | F.RANGE | F.MORE}
REPLICATES |= {F.MORE | rule | F.ANSWER * a for rule in (0, F.RULE_ADD, F.RULE_ROWS) for a in (0, 1)}
REPLICATES |= {F.MORE | F.RANGE}
FROM_TRAINERS = (F.ROUTE, F.JOIN, F.TICK, F.COLLECT, F.LEAVE, F.RESERVE, F.PEEK, F.LEASE, F.ORIGIN, F.AWAIT)
FROM_SERVERS = (F.SERVE, F.BEAT, F.CAUGHT_UP, F.STEPPED_DOWN, F.SUSPECT, F.FAILED, F.RECORDED)
MAY = {
    ("server", CLIENT): {
        F.PULL: PULLS,
        F.PUSH: PUSHES | REPLAYS | PACKED | {F.MERGED, F.MERGED | F.RANGE},
        F.CALL: {0, F.RANGE, F.REPLAYED, F.REPLAYED | F.RANGE},
        F.COMMIT: {0},
        F.ABORT: {0},
        F.SCAN: {0, F.ANSWER},
        F.GONE: {0},
        F.STATUS: {0},
        F.SHARE: {0},
    },
    ("server", SERVER): {F.REPLICATE: REPLICATES, F.DUMP: {0}, F.GRANT: {0}, F.VERSIONS: {0}},
    ("controller", CLIENT): {kind: {0} for kind in FROM_TRAINERS},
    ("controller", SERVER): {**{kind: {0} for kind in FROM_SERVERS}, F.BEAT: {0, F.CONTROL}},
    ("trainer", CLIENT): {F.RING: {0, F.CONTROL}, F.RING_RESULT: {0}},
    ("lender", CLIENT): {F.FETCH_PARTITION: {0}},
}
TABLES = {"server": TO_SERVER, "controller": TO_CONTROLLER, "trainer": TO_TRAINER, "lender": TO_LENDER}


@pytest.mark.parametrize("where", TABLES)
@pytest.mark.parametrize("role", [STRANGER, CLIENT, SERVER])
def test_the_table_says_what_is_written_here(where: str, role: str) -> None:
    may = MAY.get((where, role), {})
    for kind in range(256):
        flags_allowed = {flags for flags in range(256) if rights.allowed(TABLES[where], role, kind, flags)}
        assert flags_allowed == may.get(kind, set())


def test_a_right_without_a_handler_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="names kinds"):
        rights.guarded(TO_SERVER, {F.PULL: lambda *_: None})


def test_a_refusal_names_roles_and_flags() -> None:
    kinds = F.PULL, F.PUSH, F.CALL, F.COMMIT, F.ABORT, F.SCAN, F.GONE, F.STATUS, F.SHARE
    kinds += F.REPLICATE, F.DUMP, F.GRANT, F.VERSIONS
    handlers = rights.guarded(TO_SERVER, dict.fromkeys(kinds, id))

    class Peer:
        session = "s"

    with pytest.raises(ProtocolError, match=r"kind 19 from a client: it is taken from a server only"):
        handlers[F.REPLICATE](Peer, Header(F.REPLICATE), memoryview(b""))
    with pytest.raises(ProtocolError, match=r"kind 16 has flags 129: from a client .* flags 0, 1, 4, 5, 8, 9, 16, "):
        handlers[F.PULL](Peer, Header(F.PULL, F.CHANGED | F.RANGE), memoryview(b""))


# ---- live -----------------------------------------------------------------------------------------------------------


def tried(kind: int, may: set[int]) -> list[int]:
    """The flags to try: all combinations where some are taken, else each by itself."""
    return sorted({*COMBINATIONS, *BITS} - may) if may else [0, *BITS]


def answer_to(address: tuple[str, int], name: str, secret: str | None, frame: bytes) -> str:
    """What the other side says to a frame before it closes; "" if it stays open and takes another."""
    with Raw(address) as raw:
        if secret is None:
            raw.frame()
        else:
            raw.send(raw.hello(secret, name))
            assert raw.frame()[0].kind == F.WELCOME
        with contextlib.suppress(ConnectionError):
            raw.send(frame)
        header, body = raw.frame()
        assert header.kind == F.ERROR
        assert raw.frame() is None
        return str(frames.decode_error(body))


def rows_of(spec: TableSpec, kind: int, flags: int, version: int) -> bytes:
    """A frame for row (or key) 0 that would be carried out, were its sender allowed to send it."""
    fields = {"table": spec.id, "epoch": 99, "flags": flags, "trainer": 1, "number": 0, "clock": 5, "shards": 1}
    fields |= {"count": 1, "parties": 1000, "attempt": 7, "start": 0}
    versions = np.array([version], np.int64).tobytes() if kind == F.REPLICATE else b""
    keys = b"" if flags & F.RANGE else np.array([1, 0], np.int64).tobytes()
    values = b"" if kind in (F.PULL, F.SCAN) else np.full(8 // spec.itemsize, 9, spec.dtype).tobytes()
    return framed(kind, versions + keys + values, **fields)


def something(kind: int, flags: int) -> bytes:
    """A frame of any other kind, with a body that one of its kind may have."""
    fields = {"server": 0, "host": "203.0.113.1", "port": 1, "table": "w", "shard": 0, "shards": [["w", 0]], "why": "-"}
    fields |= {"epoch": 1 << 30, "run": 1, "trainer": 0, "incarnation": None, "name": "x", "count": 1, "failed": "-"}
    fields |= {"meta": {}, "arrays": [], "seconds": {}}
    return framed(kind, encode_json(fields), flags=flags, count=1, clock=1, request=1)


def attempts(where: str, role: str, make):
    """Every frame that this role may not send there."""
    may = MAY.get((where, role), {})
    for kind in sorted(KINDS | {0, 7, 99, 255}):
        for flags in tried(kind, may.get(kind, set())):
            yield kind, flags, make(kind, flags)


def refused(words: str) -> bool:
    return "it is taken" in words or words.startswith("no handler for frames of kind")


@pytest.fixture(scope="module")
def servers():
    with Servers(2) as servers:
        servers.table(TableSpec("dense", rows=8, dim=1, dtype="float64", optimizer=dps.SGD(0.5), shards=1, copies=2))
        servers.table(TableSpec("keyed", dim=1, dtype="int64", shards=1, copies=2))
        with servers.client() as client:
            client.push("dense", np.arange(8), np.ones(8))
            client.push("keyed", np.arange(8), np.ones(8, int))
            servers.quiet()
            yield servers, client


@pytest.mark.quick(2)
@pytest.mark.parametrize("role", [STRANGER, CLIENT, SERVER])
@pytest.mark.parametrize("table", ["dense", "keyed"])
def test_a_server_carries_out_nothing_else(servers, role: str, table: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    servers, client = servers
    spec, name = servers.tables[table][0], of_servers("s") if role == SERVER else "s"
    primary = servers.tables[table][1][0].chain[0]
    address = servers.addresses[primary]

    def state() -> list[tuple[int, str]]:
        shards = [servers.copy(table, 0, n).shard for n in (0, 1)]
        return [(shard.version, digest(shard)) for shard in shards]

    def frame(kind: int, flags: int) -> bytes:
        if kind in (F.PULL, F.PUSH, F.REPLICATE, F.SCAN):
            return rows_of(spec, kind, flags, before[primary][0] + 1)
        return something(kind, flags)

    before, count = state(), 0
    for kind, flags, data in attempts("server", role, frame):
        if role == STRANGER and kind == F.HELLO and flags == 0:
            continue  # the one frame that it may send
        words = answer_to(address, name, None if role == STRANGER else SECRET, data)
        assert refused(words) or words.startswith(("the first frame must", "no proof")), (kind, flags, words)
        assert state() == before, (kind, flags)
        count += 1
    assert count > 250
    rows = client.pull(table, np.arange(8))
    client.push(table, np.arange(8), np.ones(8, rows.dtype))
    servers.quiet()
    assert (client.pull(table, np.arange(8)) == rows + (1 if table == "keyed" else -0.5)).all()
    assert not servers.differences()


@pytest.mark.parametrize(("role", "session"), [(CLIENT, "s"), (SERVER, of_servers("s"))])
def test_a_server_takes_what_the_table_allows(servers, role: str, session: str, caplog) -> None:
    """Frames without a body that makes sense: what is wrong with them is not who has sent them."""
    caplog.set_level(logging.CRITICAL)
    servers, _ = servers
    for kind, many in MAY["server", role].items():
        for flags in many:
            with Raw(servers.addresses[0]) as raw:
                start = -1 if flags & F.LIST and kind != F.REPLICATE else 0  # the first list of keys, which has none
                raw.send(raw.hello(SECRET, session) + framed(kind, table=77, flags=flags, start=start))
                assert raw.frame()[0].kind == F.WELCOME
                header, body = raw.frame()
                words = "" if header.kind == F.OK else str(frames.decode_error(body))
                wrong = "no table number 77" if kind != F.GRANT else "is no JSON"
                assert kind in (F.STATUS, F.ABORT, F.SHARE) if not words else wrong in words


def test_one_push_does_not_shut_out_all_clients(servers, caplog) -> None:
    """A push with the flag of a control operation was carried out as one: it retired all origins there are."""
    caplog.set_level(logging.CRITICAL)
    servers, client = servers
    spec = servers.tables["dense"][0]
    fields = {"flags": F.CONTROL | F.RULE_ADD | F.RANGE, "table": spec.id, "shards": 1, "count": 1, "parties": 65535}
    with Raw(servers.addresses[servers.tables["dense"][1][0].chain[0]]) as raw:
        raw.introduce().send(framed(F.PUSH, bytes(8), **fields))
        header, body = raw.frame()
    client.push("dense", [0], [[1.0]])
    assert header.kind == F.ERROR
    assert refused(str(frames.decode_error(body)))


@pytest.fixture(scope="module")
def cluster():
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        ps.table("w", rows=8, copies=2)
        controller = cluster.scheduler.plugins["dps-controller"]
        yield ps, controller, controller.sessions["dps"]


@pytest.mark.parametrize("role", [STRANGER, CLIENT, SERVER])
def test_a_controller_carries_out_nothing_else(cluster, role: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    ps, controller, session = cluster
    run = controller.sessions.endpoint.call(session.runs.start, 1, 0)
    name = of_servers("dps") if role == SERVER else "dps"
    secret = {STRANGER: None, CLIENT: session.secret, SERVER: session.servers_secret}[role]
    address = controller.sessions.endpoint.host, controller.sessions.endpoint.port

    def state() -> tuple:
        membership = session.membership
        where = {n: (s.address, s.up, s.leaving) for n, s in membership.servers.items()}
        return membership.epoch, dict(membership.places), where, state_of(session.runs, run)

    before, count = controller.sessions.endpoint.call(state), 0
    for kind, flags, data in attempts("controller", role, something):
        if role == STRANGER and kind == F.HELLO and flags == 0:
            continue
        words = answer_to(address, name, secret, data)
        assert refused(words) or words.startswith(("the first frame must", "no proof")), (kind, flags, words)
        count += 1
    assert count > 250
    assert controller.sessions.endpoint.call(state) == before
    controller.sessions.endpoint.call(session.runs.end, run)
    with ps.client() as client:
        client.push("w", [3], 1)
        assert client.pull("w", [3]) > 0
