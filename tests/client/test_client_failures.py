"""Client: what is wrong is refused before anything is sent; what breaks on the way says who, and harms nothing else."""

from __future__ import annotations

import contextlib
import threading

import dask
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peers import Raw, framed
from servers import SECRET, Servers

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import (
    ClosedError,
    ControllerGoneError,
    DataLostError,
    DPSError,
    InputError,
    InputTypeError,
    KeyRangeError,
    LimitError,
    MovedError,
    NotFiniteError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
    UnknownTableError,
)


@pytest.fixture(scope="module")
def servers():
    with Servers(2) as servers:
        servers.table(TableSpec("t", shards=8, finite=True))
        servers.table(TableSpec("d", rows=10, dim=2, shards=3))
        servers.table(TableSpec("i", dtype="int64"))
        servers.table(TableSpec("f", optimizer=dps.FTRL()))
        yield servers


@pytest.fixture
def client(servers):
    with servers.client() as client:
        yield client


KEYS = np.arange(64)  # some for each server
NAN = np.where(KEYS == 63, np.nan, 1.0)
WRONG = {
    "unknown table": ("pull", ("x", [1]), UnknownTableError, "'s' has no table 'x'; it has 'd', 'f', 'i', 't'"),
    "keyed without keys": ("pull", ("t",), InputError, "table 't' is keyed: name the keys"),
    "keyed slice": ("push", ("t", slice(3), 1.0), InputError, "table 't' is keyed: name the keys; only a pull"),
    "certified keyed slice": ("pull_certified", ("t", slice(3)), InputError, "a certified pull names the keys"),
    "float keys": ("pull", ("t", [1.5]), InputTypeError, "table 't': keys are integers, not float64"),
    "row outside": ("pull", ("d", [3, 10]), KeyRangeError, "table 'd' has rows 0 to 9; key 10"),
    "row below": ("pull", ("d", [-1]), KeyRangeError, "key -1"),
    "step": ("pull", ("d", slice(0, 9, 2)), InputError, "table 'd': a slice of rows has step 1, not 2; name the keys"),
    "out": ("pull", ("d", None, np.empty((10, 2))), InputError, r"out must be float32\(10, 2\)"),
    "no values": ("push", ("t", [1]), InputError, "table 't': a push takes keys and values; values are missing"),
    "values of a wrong shape": ("push", ("t", KEYS, np.ones(63)), InputError, "64 keys of dim 1 take values of shape"),
    "values of a wrong kind": ("push", ("i", [1], [0.5]), InputError, "values of float64 would lose numbers"),
    "nan": ("push", ("t", KEYS, NAN), NotFiniteError, "row 63 of the values"),
    "nan, answered": ("push_pull", ("t", KEYS, NAN), NotFiniteError, "row 63"),
    "nan, added": ("add", ("t", KEYS, NAN), NotFiniteError, "row 63"),
    "push outside": ("push", ("d", [0, 11], 1.0), KeyRangeError, "key 11"),
    "out of a push": ("push_pull", ("d", None, 1.0, np.empty(3)), InputError, r"out must be float32\(10, 2\)"),
    "add to FTRL": ("add", ("f", [1], 1.0), InputError, "table 'f': FTRL derives the values from its state"),
    "assign to FTRL": ("assign", ("f", [1], 1.0), InputError, "only push changes them"),
    "a wrong one of several": ("push", ({"t": (KEYS, 1.0), "x": ([1], 1.0)},), UnknownTableError, "no table 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_and_nothing_applied(servers, client, name: str) -> None:
    verb, args, error, words = WRONG[name]
    tables = ["d", "f", "i"] + ["t"] * (name != "a wrong one of several")
    before = [client.pull(table, KEYS % 10) for table in tables]
    born = servers.rows("t")
    with pytest.raises(error, match=words):
        getattr(client, verb)(*args)
    for table, values in zip(tables, before, strict=True):
        np.testing.assert_array_equal(client.pull(table, KEYS % 10), values)
    assert servers.rows("t") == born or len(tables) == 3


def test_a_server_refuses_nan_by_itself(servers, client) -> None:
    """A client of another make might not look."""
    servers.table(TableSpec("strict", shards=2, finite=True))
    route = client.session.route("strict")
    with Raw(servers.addresses[0]) as raw:
        raw.introduce()
        body = words_of(1, 7) + np.array([np.nan, 0], "f4").tobytes()
        raw.send(framed(frames.PUSH, body, table=route.spec.id, shards=1, count=1))
        header, reply = raw.frame()
    assert header.kind == frames.ERROR
    assert isinstance(frames.decode_error(reply), NotFiniteError)
    assert servers.rows("strict") == 0


def test_a_closed_client(servers) -> None:
    client = servers.client()
    client.push("t", [1], 1.0)
    pending = client.pull_async("t", KEYS)
    client.close()
    client.close()
    for verb, args in [("pull", ("t", [1])), ("push", ("t", [1], 1.0)), ("pull", ("x", [1]))]:
        with pytest.raises(ClosedError, match="this client of parameter server 's' was closed; make a new one"):
            getattr(client, verb)(*args)
    with pytest.raises((ServerGoneError, ClosedError)):
        pending.result()
    assert "closed" in repr(client)


def test_no_controller() -> None:
    words = "the controller of parameter server 's' cannot be reached at 127.0.0.1:9: "
    with (
        dps.Client(dps.Ticket("s", ("127.0.0.1", 9), SECRET)) as client,
        pytest.raises(ControllerGoneError, match=words),
    ):
        client.pull("t", [1])


# ---- a server goes --------------------------------------------------------------------------------------------------


def test_rows_whose_server_goes_are_named() -> None:
    with Servers(2) as servers:
        servers.table(TableSpec("t", shards=8))
        with servers.client() as client:
            client.push("t", KEYS, 1.0)
            waiting = [client.pull_async("t", KEYS) for _ in range(3)]
            servers.kill(1)
            words = r"table 't': the last copy of shards 4 to 7 is gone, and with it \d+ keys \(.*\); start anew"
            for _ in range(3):  # and again, and again
                with pytest.raises(DataLostError, match=words):
                    client.pull("t", KEYS)
                with pytest.raises(DataLostError, match=words):
                    client.push("t", KEYS, 1.0)
            for pending in waiting:
                with contextlib.suppress(DataLostError):
                    assert (pending.result() == 1).all()
            there = set(client.pull("t", keys_of_server(0)).tolist())
            assert there <= {1.0, 2.0, 3.0, 4.0}, "the other one serves on"


def keys_of_server(number: int) -> np.ndarray:
    """Of a keyed table on two servers: those whose hash begins with that bit."""
    hashes = np.empty(len(KEYS), np.uint64)
    dps.engine.state.partition.hash_keys(KEYS, hashes)
    return KEYS[hashes >> np.uint64(63) == number]


def test_a_server_that_goes_while_a_large_call_is_on_its_way() -> None:
    with Servers(2) as servers:
        servers.table(TableSpec("d", rows=1 << 20, dim=16, shards=2))  # 64 MB
        with servers.client() as client:
            out = np.empty((1 << 20, 16), np.float32)
            waiting = [client.pull_async("d", out=out) for _ in range(3)]
            servers.kill(1)
            lost = 0
            for pending in waiting:
                try:
                    pending.result()
                except DataLostError as error:
                    lost += "rows 524288 to" in str(error)  # those of the first request that was not answered
            assert lost >= 1
            assert client.pull("d", slice(0, 10)).shape == (10, 16)


def test_a_push_that_nobody_asks_for_does_not_fail_in_silence(servers, client) -> None:
    spec = servers.table(TableSpec("lost", shards=8))
    client.push("lost", KEYS, 1.0)
    servers.forget(1, spec.id)
    client.push_async("lost", KEYS, 1.0)
    asked_for = client.push_async("lost", KEYS, 1.0)
    with pytest.raises(UnknownTableError, match="server 1 has no table"):
        asked_for.result()
    with pytest.raises(UnknownTableError, match="server 1 has no table"):
        client.wait()
    client.wait()
    servers.drop("lost")


def test_a_dropped_table_is_missed(servers, client) -> None:
    servers.table(TableSpec("gone"))
    client.push("gone", [1], 1.0)
    spec, _ = servers.tables["gone"]
    for number in range(2):
        servers.forget(number, spec.id)
    with pytest.raises(UnknownTableError, match=f"has no table number {spec.id}; was it dropped"):
        client.pull("gone", [1])
    assert client.pull("t", [1]).shape == (1,)
    servers.tables.pop("gone")


def test_a_time_out_names_the_server(servers, client) -> None:
    client.pull("t", KEYS)
    stopped, go_on = threading.Barrier(3, timeout=20), threading.Event()
    for endpoint in servers.endpoints:
        endpoint.loop.call_soon_threadsafe(lambda: (stopped.wait(), go_on.wait(20)))
    stopped.wait()
    with pytest.raises(
        RequestTimeoutError, match=r"server [01] of parameter server 's' at .* has not answered in time"
    ):
        client.pull_async("t", KEYS).result(timeout=0.2)
    go_on.set()
    assert client.pull("t", [1]).shape == (1,), "on a new connection"


# ---- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["8 B", "100 B", "1 kiB", "64 kiB"])
def test_chunks(servers, chunk: str) -> None:
    """Of any size; the values stay in order, and the last of a key is the last."""
    servers.table(TableSpec("c", dim=3, shards=8, optimizer=dps.Assign()))
    servers.table(TableSpec("r", rows=500, dim=3, shards=5))
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 100, 1500)
    values = rng.normal(size=(1500, 3)).astype(np.float32)
    last = {key: values[i] for i, key in enumerate(keys.tolist())}
    with dask.config.set({"dps.limits.chunk": chunk}), servers.client() as client:
        client.push("c", keys, values)
        np.testing.assert_array_equal(client.pull("c", keys), [last[key] for key in keys.tolist()])
        client.assign("r", None, values[:500])
        np.testing.assert_array_equal(client.pull("r"), values[:500])
        np.testing.assert_array_equal(client.pull("r", slice(77, 401)), values[77:401])
        np.testing.assert_array_equal(
            client.push_pull("r", slice(450, None), values[:50]), values[450:500] + values[:50]
        )
        requests = sum(server.requests for server in servers.servers)
        client.pull("r")
        assert sum(server.requests for server in servers.servers) - requests >= 6000 // max(
            12, dask.utils.parse_bytes(chunk)
        )


def test_what_does_not_fit_a_frame_is_refused(servers, client) -> None:
    """Clients cut to `chunk`; one that does not is told."""
    spec = client.session.route("d").spec
    with Raw(servers.addresses[0]) as raw:
        raw.introduce()
        raw.send(framed(frames.PULL, table=spec.id, flags=frames.RANGE, shards=3, count=1 << 30))
        header, body = raw.frame()
        assert header.kind == frames.ERROR
        assert isinstance(frames.decode_error(body), LimitError)


# ---- any request to a server ----------------------------------------------------------------------------------------

words = st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**32 - 1, 255, 4096]))
halves = st.one_of(st.integers(0, 12), st.sampled_from([2**15, 2**16 - 1, 255, 4096]))
signed = st.sampled_from([-1, 0, 1, 5, 2**31 - 1, -(2**31)])
starts = st.one_of(st.integers(-3, 12), st.sampled_from([2**62, -(2**62), 2**63 - 1, -(2**63)]))
BODY = np.concatenate([[1, 2, 0, 1, 0, 0, 0, 0], np.arange(40)]).astype(np.int64).tobytes()


@settings(max_examples=400)
@example(kind=frames.PULL, table="d", fields={"shards": 2, "count": 1}, start=0, flags=0, body=24)
@given(
    kind=st.sampled_from([frames.PULL, frames.PUSH, frames.STATUS]),
    table=st.sampled_from(["t", "d", "i", "f"]),
    fields=st.fixed_dictionaries(
        {"shard": halves, "shards": halves, "count": words},
        optional={"table": words, "rows": signed, "parties": st.integers(0, 65535), "clock": starts},
    ),
    start=starts,
    flags=st.integers(0, 15),
    body=st.integers(0, len(BODY) // 8).map(lambda n: 8 * n),
)
def test_any_request_is_answered_or_refused(servers, client, kind, table, fields, start, flags, body) -> None:
    """With wrong counts, foreign shards, rows that are not there; the server stays, and so do other tables."""
    if flags & frames.RANGE and fields["shards"] > 4096:
        fields = {**fields, "shards": 4096}
    fields = {"table": client.session.route(table).spec.id, **fields}
    with Raw(servers.addresses[0]) as raw:
        raw.introduce()
        raw.send(framed(kind, BODY[:body], request=5, flags=flags, start=start, **fields))
        answer = raw.frame()
    if answer is not None:
        header, reply = answer
        assert header.kind in (frames.OK, frames.ERROR)
        if header.kind == frames.ERROR:
            error = frames.decode_error(reply)
            assert isinstance(error, DPSError)
            assert type(error) is not DPSError, f"an error without a name: {error}"
            assert header.request == (0 if isinstance(error, ProtocolError) else 5)
    assert client.pull("t", [1]).shape == (1,)


def test_rules_for_parts_of_a_request(servers, client) -> None:
    spec = client.session.route("d").spec  # rows 0-2 3-5 6-9 in shards 0 1 2: server 0 has the first two
    cases = [
        ({"flags": frames.RANGE, "shards": 2, "start": 0, "count": 6}, b"", frames.OK, ""),
        ({"flags": frames.RANGE, "shards": 3, "start": 0, "count": 6}, b"", frames.OK, ""),
        ({"flags": frames.RANGE, "shards": 2, "start": 4, "count": 0}, b"", frames.OK, ""),
        ({"flags": frames.RANGE, "shards": 3, "start": 0, "count": 7}, b"", MovedError, "does not serve shard 2"),
        (
            {"flags": frames.RANGE, "shards": 1, "start": 2, "count": 2},
            b"",
            InputError,
            "do not lie in the shards named",
        ),
        ({"flags": frames.RANGE, "shards": 2, "start": -1, "count": 2}, b"", KeyRangeError, "rows -1 to"),
        ({"flags": frames.RANGE, "shards": 2, "start": 9, "count": 2}, b"", InputError, "do not lie"),
        ({"shards": 1, "count": 1}, words_of(1, 2), frames.OK, ""),
        ({"shards": 1, "count": 1}, words_of(1, 3), KeyRangeError, "shard 0 of table 'd' has rows 0 to 2"),
        ({"shards": 1, "shard": 2, "count": 1}, words_of(1, 6), MovedError, "does not serve shard 2"),
        ({"shards": 1, "shard": 3, "count": 1}, words_of(1, 6), InputError, "has 3 shards; there is no 3"),
        ({"shards": 2, "count": 2}, words_of(1, 1, 0, 3), frames.OK, ""),
        ({"shards": 2, "count": 2}, words_of(2, 1, 0, 1), ProtocolError, "the counts of a request for 2 keys"),
        ({"shards": 2, "count": 2}, words_of(3, -1, 0, 1), ProtocolError, "counts"),
        ({"shards": 2, "count": 2}, words_of(0, 0, 0, 1), ProtocolError, "add up to 0"),
        ({"shards": 2, "count": 9}, words_of(1, 1, 0, 3), ProtocolError, "do not fit a body of 32 bytes"),
        ({"shards": 1, "count": 1}, words_of(1, 2, 9), ProtocolError, "has a body of 24 bytes, not 16"),
    ]
    for fields, body, expected, text in cases:
        with Raw(servers.addresses[0]) as raw:
            raw.introduce()
            raw.send(framed(frames.PULL, body, table=spec.id, **fields))
            header, reply = raw.frame()
        if expected == frames.OK:
            assert header == Header(frames.OK, count=fields["count"], body=8 * fields["count"])
        else:
            error = frames.decode_error(reply)
            assert type(error) is expected
            assert text in str(error)


def words_of(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()
