"""The plain way of a call against the general one: the same values, rows, ledgers, answers and errors, bit by bit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import socket
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import unmix
from servers import Servers, held, wait_until

import dps
from dps.engine.client import client as client_module
from dps.engine.client import plain, requests, session
from dps.engine.client.origin import Origin
from dps.engine.client.session import ClientSession
from dps.engine.coordination.placement import rechained
from dps.engine.core.requests.call import LAST_NUMBER
from dps.engine.core.requests.form import Form
from dps.engine.core.requests.meter import CallMeter
from dps.engine.core.requests.polling import Polling
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.telemetry import trainer_meter
from dps.engine.wire import channel, departures, frames
from dps.engine.wire.frames import Header, decode_header, encode_header
from dps.engine.wire.loans import Loans
from dps.errors import (
    ClosedError,
    DPSError,
    KeyRangeError,
    LimitError,
    NotFiniteError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
    UnknownTableError,
)

DONE, POSTED = "done", "posted"  # in one compiled step; prepared and sent, and its answer read later

SPECS = [
    TableSpec("a", shards=1),
    TableSpec("a", dim=3, shards=8, optimizer=dps.SGD(0.1), init=dps.Normal(1.0, seed=3), finite=True),
    TableSpec("a", dim=2, shards=4, optimizer=dps.Adagrad(0.5, l1=0.01), dtype="float64"),
    TableSpec("a", dim=16, shards=2, optimizer=dps.Adam(0.1)),
    TableSpec("a", dim=2, shards=4, dtype="int64"),
    TableSpec("a", shards=4, optimizer=dps.FTRL()),
    TableSpec("a", rows=37, dim=2, shards=5, dtype="int64"),
    TableSpec("a", rows=300, dim=1, shards=3, optimizer=dps.Momentum(0.1), init=dps.Uniform(-1.0, 1.0)),
    TableSpec("a", rows=40, dim=3, shards=4, optimizer=dps.Assign(), copies=2),
    TableSpec("a", dim=2, shards=4, optimizer=dps.SGD(0.1), copies=2),
]


@pytest.fixture(scope="module")
def pairs():
    """Two times the same servers."""
    with Servers(2) as one, Servers(2) as other:
        for servers in (one, other):  # which make their connections to each other at the first op
            servers.table(TableSpec("a", shards=2, copies=2))
            with servers.client() as client:
                client.push("a", np.arange(100), 1.0)
        yield one, other


@pytest.fixture
def servers(pairs):
    return pairs[0]


class Watched:
    """What became of calls: nothing of those that were refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.outcomes: list[str] = []
        self.handed_over = 0
        make, go_on, send = plain.PlainCalls._make, plain.PlainCalls._go_on, ClientSession.send

        def watched_make(calls, *args):
            result = make(calls, *args)
            if result is not plain.DECLINED:
                self.outcomes.append(DONE)
            return result

        def watched_send(sender, *args):
            result = send(sender, *args)
            self.outcomes.append(POSTED)
            return result

        def watched_go_on(calls, *args):
            self.handed_over += 1
            return go_on(calls, *args)

        monkeypatch.setattr(plain.PlainCalls, "_make", watched_make)
        monkeypatch.setattr(ClientSession, "send", watched_send)
        monkeypatch.setattr(plain.PlainCalls, "_go_on", watched_go_on)

    @property
    def last(self) -> str | None:
        return self.outcomes[-1] if self.outcomes else None


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def generally(client):
    """From now on, calls of this client go the general way."""
    for verb in ("pull", "push", "pull_several", "push_several"):
        setattr(client._plain, verb, lambda *args: plain.DECLINED)
    return client


# ---- the same as the general way


class Made(NamedTuple):
    """A call: of several tables at once, or of "a"; its result is asked for at once, or at the end."""

    verb: str
    keys: tuple
    values: tuple
    several: bool = False
    later: bool = False


@st.composite
def arguments(draw: st.DrawFn, spec: TableSpec):
    """Keys and values."""
    keys_of = st.integers(-2 if draw(st.integers(0, 5)) == 0 else 0, (spec.rows or 60) - 1)
    if spec.rows and draw(st.integers(0, 3)) == 0:
        first, end = sorted(draw(st.tuples(st.integers(0, spec.rows), st.integers(0, spec.rows))))
        keys: object = None if draw(st.booleans()) else slice(first, end)
        shape: tuple[int, ...] = (spec.rows if keys is None else end - first,)
    else:
        listed = draw(st.lists(keys_of, max_size=30, unique=draw(st.booleans())))
        if draw(st.booleans()):
            listed = sorted(listed)
        keys = np.array(listed, np.int64)
        if draw(st.integers(0, 4)) == 0 and len(listed) % 2 == 0:
            keys = keys.reshape(2, -1)
        shape = keys.shape
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).integers(-9, 9, (*shape, spec.dim)).astype(spec.dtype)
    if spec.dtype != "int64":
        values *= 0.1
        if draw(st.integers(0, 9)) == 0 and values.size:
            values.reshape(-1)[0] = np.nan
    if spec.dim == 1 and draw(st.booleans()):
        values = values.reshape(shape)
    return keys, values


@st.composite
def calls(draw: st.DrawFn, specs: tuple[TableSpec, TableSpec]):
    """Some calls in a row."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        verb = draw(st.sampled_from(["pull", "pull", "push", "push", "push_pull", "add", "assign"]))
        keys, values = zip(*(draw(arguments(spec)) for spec in specs), strict=True)
        made.append(Made(verb, keys, values, draw(st.integers(0, 3)) == 0, draw(st.booleans())))
    return made


def listed(arrays: tuple) -> tuple:
    """The same keys or values as lists, of which the general way makes arrays."""
    return tuple(array.tolist() if isinstance(array, np.ndarray) else array for array in arrays)


def outcome(client, call: Made, later: list) -> object:
    """The result or the error; of a call whose result is asked for later, what makes it goes to `later`."""
    names = ("a", "b")[: 1 + call.several]
    keys, values = dict(zip(names, call.keys, strict=False)), dict(zip(names, call.values, strict=False))
    args: tuple[object, ...] = ("a", call.keys[0], call.values[0])
    if call.several:
        args = ({name: (keys[name], values[name]) for name in names},) if call.verb != "pull" else (keys,)
    args = args[: 2 if call.verb == "pull" else 3]
    try:
        if not call.later:
            return getattr(client, call.verb)(*args)
        pending = getattr(client, f"{call.verb}_async")(*args)
        for array in (*call.keys, *call.values):  # the arrays may be reused
            if isinstance(array, np.ndarray) and call.verb != "push_pull":
                array += 1
        later.append(pending)
    except DPSError as error:
        return type(error), str(error)
    return None


def same(one: object, other: object) -> None:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other)
        for name, values in one.items():
            same(values, other[name])
    else:
        assert one == other


def state(servers: Servers, spec: TableSpec) -> list:
    """Rows, versions, ledgers of every replica."""
    found = []
    for endpoint, role in servers.alive():
        for number, replica in sorted(role.tables[spec.id].replicas.items()):
            shard = replica.shard
            rows = endpoint.call(shard.rows[: len(shard)].tobytes)
            ledger = {name: array.tobytes() for name, array in shard.ledger.to_arrays().items()}
            found.append((role.number, number, shard.version, rows, ledger))
    return found


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(), one=st.sampled_from(SPECS), two=st.sampled_from(SPECS), sockets=st.sampled_from([True, True, False])
)
def test_the_same_as_the_general_way(pairs, data, one: TableSpec, two: TableSpec, sockets: bool) -> None:
    both = one, dataclasses.replace(two, name="b")
    specs = [[servers.table(spec) for spec in both] for servers in pairs]
    made = [Made("pull", (np.array([0]), np.array([0])), (None, None), True), *data.draw(calls(both))]
    found: list[list[object]] = []
    for servers, way in zip(pairs, (lambda c: c, generally), strict=True):
        with servers.client() as client:
            answers: list[object] = []
            later: list = []
            for n, call in enumerate(copy.deepcopy(made)):
                if n == 1 and not sockets:  # what is encrypted does not pass the channel by
                    for each in client.session._channels.values():
                        each._encrypted = each.stream.touched = True
                if way is generally and n:
                    call = call._replace(keys=listed(call.keys), values=listed(call.values))
                answers += [outcome(way(client), call, later), client.session.own.number]
            for pending in later:
                error = pending.exception()
                answers.append((type(error), str(error)) if error is not None else pending.result())
            client.session.wait()
            found.append(answers)
    for left, right in zip(*found, strict=True):
        same(left, right)
    for left, right in zip(*specs, strict=True):
        wait_until(lambda x=left, y=right: state(pairs[0], x) == state(pairs[1], y), 20)


@pytest.mark.parametrize("rows", [None, 400_000])
def test_large_calls(pairs, watched, rows: int | None) -> None:
    rng = np.random.default_rng(5)
    keys = rng.permutation(400_000)[:150_000] if rows else unmix_all(rng.integers(0, 2**63, 150_000))
    values = rng.normal(size=(len(keys), 3)).astype("float32")
    answers = []
    for servers, way in zip(pairs, (lambda c: c, generally), strict=True):
        servers.table(TableSpec("a", rows=rows, dim=3, shards=4, optimizer=dps.SGD(0.5)))
        with servers.client() as client:
            way(client).pull("a", keys[:1])
            out = np.zeros((len(keys), 3), "float32")
            client.push("a", keys, values)
            assert client.pull("a", keys, out=out) is out
            sorted_keys = np.sort(keys)
            answers.append([out, client.push_pull("a", sorted_keys, values), client.pull("a", sorted_keys)])
            if rows:
                answers[-1].append(client.pull("a"))
            pushed, pulled = client.push_async("a", keys, values), client.pull_async("a", keys)
            answers[-1] += [pulled.result(), client.push_pull_async("a", keys, values).result()]
            pushed.result()
    for one, other in zip(*answers, strict=True):
        same(one, other)
    assert watched.outcomes.count(DONE) >= 3
    assert watched.handed_over == 0


def unmix_all(hashes: np.ndarray) -> np.ndarray:
    return np.array([unmix(int(h)) for h in hashes[:1000]] + list(range(len(hashes) - 1000)), np.int64)


# ---- each reason to decline


@contextlib.contextmanager
def client_of(servers):
    """A client that has its connections."""
    servers.table(TableSpec("a", dim=2, shards=4, optimizer=dps.SGD(0.1), finite=True))
    servers.table(TableSpec("dense", rows=10, shards=3))
    servers.table(TableSpec("ftrl", optimizer=dps.FTRL()))
    with servers.client() as client:
        for name in ("a", "dense", "ftrl"):
            client.pull(name, np.arange(9))
        yield client


@pytest.fixture
def client(servers):
    with client_of(servers) as client:
        yield client


KEYS = np.arange(6)
ROWS = np.ones((6, 2), np.float32)
WIDE = np.ones((6, 4), np.float32)
PLAIN = {
    "pull": lambda c: c.pull("a", KEYS),
    "pull of any order": lambda c: c.pull("a", KEYS[::-1].copy()),
    "pull of repeats": lambda c: c.pull("a", KEYS // 2),
    "pull of two axes": lambda c: c.pull("a", KEYS.reshape(2, 3)),
    "pull into": lambda c: c.pull("a", KEYS, out=np.zeros((6, 2), np.float32)),
    "pull of a handle": lambda c: c.table("a").pull(KEYS),
    "push": lambda c: c.push("a", KEYS, ROWS),
    "push_pull": lambda c: c.push_pull("a", KEYS, ROWS),
    "push of repeats": lambda c: c.push("ftrl", KEYS // 2, np.ones(6, np.float32)),
    "add of repeats": lambda c: c.add("a", KEYS // 2, ROWS),
    "assign": lambda c: c.assign("a", KEYS, ROWS),
    "frozen arrays": lambda c: c.push("a", frozen(KEYS), frozen(ROWS)),
    "all rows": lambda c: c.pull("dense"),
    "some rows": lambda c: c.push("dense", slice(2, 9), np.ones(7, np.float32)),
    "no keys": lambda c: c.pull("a", KEYS[:0]),
    "no rows": lambda c: c.push("dense", slice(3, 3), np.ones(0, np.float32)),
    "an axis for one column": lambda c: c.push("dense", KEYS, np.ones((6, 1), np.float32)),
    "tables": lambda c: c.pull({"a": KEYS, "dense": KEYS}),
    "tables, pushed": lambda c: c.push({"a": (KEYS, ROWS), "ftrl": (KEYS // 2, np.ones(6, np.float32))}),
    "tables, pushed and pulled": lambda c: c.push_pull({"a": (KEYS, ROWS), "dense": (None, np.ones(10, np.float32))}),
    "tables, into": lambda c: c.pull({c.table("a"): KEYS, "dense": None}, out={"dense": np.zeros(10, np.float32)}),
    "a table by name and by handle": lambda c: c.push({"a": (KEYS, ROWS), c.table("a"): (KEYS, ROWS)}),
}
POSTED_CALLS = {
    "a pull that is awaited later": lambda c: c.pull_async("a", KEYS[::-1].copy()).result(),
    "a push that is awaited later": lambda c: c.push_async("a", KEYS, ROWS).result(),
    "an add that is awaited later": lambda c: c.add_async(c.table("a"), KEYS, ROWS).result(),
    "a push_pull that is awaited later": lambda c: c.push_pull_async("ftrl", KEYS // 2, ROWS[:, 0].copy()).result(),
    "tables, awaited later": lambda c: c.pull_async({"a": KEYS, "dense": None}).result(),
}
DECLINED = {
    "a list of keys": lambda c: c.pull("a", KEYS.tolist()),
    "int32 keys": lambda c: c.pull("a", KEYS.astype(np.int32)),
    "keys with gaps": lambda c: c.pull("a", np.arange(12)[::2]),
    "values of another dtype": lambda c: c.push("a", KEYS, ROWS.astype(np.float16)),
    "values with gaps": lambda c: c.push("a", KEYS, WIDE[:, ::2]),
    "one value for all": lambda c: c.push("a", KEYS, 1.0),
    "a table of several that is": lambda c: c.pull({"a": KEYS, "dense": KEYS.tolist()}),
    "a later push of a list": lambda c: c.push_async("a", KEYS.tolist(), ROWS).result(),
    "certified": lambda c: c.pull_certified("a", KEYS),
}
REFUSED = {
    "not finite": (lambda c: c.push("a", KEYS, ROWS * np.inf), NotFiniteError),
    "a row that is not there": (lambda c: c.pull("dense", KEYS * 2), KeyRangeError),
    "a range of a keyed table": (lambda c: c.pull("a"), dps.errors.InputError),
    "a wide step": (lambda c: c.pull("dense", slice(0, 8, 2)), dps.errors.InputError),
    "values of a wrong shape": (lambda c: c.push("a", KEYS, WIDE), dps.errors.InputError),
    "out of a wrong shape": (lambda c: c.pull("a", KEYS, out=WIDE), dps.errors.InputError),
    "out that is frozen": (lambda c: c.pull("a", KEYS, out=frozen(ROWS)), dps.errors.InputError),
    "add where values are derived": (lambda c: c.add("ftrl", KEYS, np.ones(6, np.float32)), dps.errors.InputError),
    "a table of several": (
        lambda c: c.push({"a": (KEYS, ROWS), "dense": (KEYS * 2, ROWS[:, 0].copy())}),
        KeyRangeError,
    ),
    "an unknown table": (lambda c: c.pull("nothing", KEYS), UnknownTableError),
}


def frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_plain(client, watched, name: str) -> None:
    PLAIN[name](client)
    assert watched.last == DONE
    assert watched.handed_over == 0


@pytest.mark.parametrize("name", POSTED_CALLS)
def test_what_is_prepared_and_sent(client, watched, name: str) -> None:
    POSTED_CALLS[name](client)
    assert watched.outcomes == [POSTED]
    assert watched.handed_over == 0


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined(client, watched, name: str) -> None:
    DECLINED[name](client)
    assert watched.outcomes == [POSTED]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_sends_nothing(client, watched, name: str) -> None:
    call, error = REFUSED[name]
    sent = [traffic.sent for traffic in client.session.meter.servers.values()]
    with pytest.raises(error):
        call(client)
    assert watched.last is None
    assert [traffic.sent for traffic in client.session.meter.servers.values()] == sent


def test_a_call_in_several_chunks(client, watched) -> None:
    client.session.chunk = 40  # of two rows
    client.forget_routes()
    client.pull("a", KEYS)
    keys, rows = np.arange(20)[::-1].copy(), np.arange(40, dtype=np.float32).reshape(20, 2)
    client.push("a", keys, rows)
    assert client.session.own.number == 10
    assert watched.last == DONE
    client.add("a", np.zeros(5, np.int64), rows[:5])
    np.testing.assert_allclose(client.pull("a", keys[:-1]), rows[:-1] * np.float32(-0.1))
    np.testing.assert_allclose(client.push_pull("a", keys[:-1], rows[:-1]), rows[:-1] * np.float32(-0.2))
    assert watched.last == POSTED  # a push, and a pull behind it
    answer = client.push_pull("ftrl", keys // 2, rows[:, 0].copy())  # whose repeats are summed before it is cut
    assert (watched.handed_over, watched.last) == (0, DONE)
    np.testing.assert_array_equal(answer, client.pull("ftrl", keys // 2))
    np.testing.assert_allclose(client.push_pull("a", [1, 2, 1], rows[:3])[0], client.pull("a", [1])[0])
    one, two = client.push_async("a", keys, rows), client.pull_async("a", keys)
    one.result()
    np.testing.assert_array_equal(two.result(), client.pull("a", keys))
    client.push("dense", None, np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(client.pull("dense"), np.arange(10))
    taken = client.session.own.number
    client.push("dense", slice(3, 3), np.ones(0, np.float32))
    assert client.session.own.number == taken


def test_many_keys_are_several_requests(client, watched, monkeypatch) -> None:
    """Because a server does nothing else during a request; but no change whose answer would lack a part of it."""
    monkeypatch.setattr(requests, "MOST_PUSHED_KEYS", 4)
    monkeypatch.setattr(requests, "MOST_DELETED_KEYS", 2)
    client.forget_routes()
    client.pull("a", KEYS)
    keys, rows = np.arange(10), np.ones((10, 2), np.float32)

    def numbers(change, *arguments) -> int:
        before = client.session.own.number
        change(*arguments)
        return client.session.own.number - before

    assert numbers(client.push, "a", keys, rows) == 3
    assert numbers(client.delete, "a", keys) == 5
    assert numbers(client.push_pull, "a", keys, rows) == 1
    np.testing.assert_allclose(client.pull("a", keys), rows * np.float32(-0.1))


@pytest.mark.parametrize("name", [*PLAIN, *POSTED_CALLS])
def test_what_is_encrypted_is_prepared_and_sent(client, watched, name: str) -> None:
    for each in client.session._channels.values():
        each._encrypted = each.stream.touched = True
    {**PLAIN, **POSTED_CALLS}[name](client)
    assert watched.outcomes == [POSTED]


def test_a_call_waits_for_no_answer_that_is_half_read(client, watched) -> None:
    pending = client.pull_async("a", KEYS)
    client.pull("a", KEYS)
    assert watched.last == POSTED  # the connections were not free
    pending.result()
    client.pull("a", KEYS)
    assert watched.last == DONE


def test_repeats_are_summed(client, watched) -> None:
    keys, ones = np.array([5, 9, 5, 7, 5]), np.ones(5, np.float32)
    answer = client.push_pull("ftrl", keys, ones)
    assert watched.last == DONE
    np.testing.assert_array_equal(
        answer[:2], client.push_pull("ftrl", np.array([105, 109]), np.array([3, 1], np.float32))
    )
    np.testing.assert_array_equal(answer, client.pull("ftrl", keys))
    assert answer[0] == answer[2] == answer[4]
    assert answer[1] == answer[3] != answer[0]


def test_what_is_sent_later_is_what_was_asked(client) -> None:
    """Requests of asynchronous calls are lost; what is sent again is what was asked, though the arrays have changed."""
    values = KEYS.repeat(2).reshape(6, 2).astype(np.float32)
    client.assign("a", KEYS, values)
    for keys in (group(KEYS, ShardMap(0, 4)).keys, KEYS[::-1].copy()):  # grouped already; in another order
        before = keys.copy()
        with lost(client):
            pulled, pushed = client.pull_async("a", keys), client.push_pull_async("ftrl", keys, values[:, 0].copy())
        keys += 1
        np.testing.assert_array_equal(pulled.result()[:, 0], before)
        np.testing.assert_array_equal(pushed.result(), client.pull("ftrl", before))
        keys, rows = before.copy(), values[before] + 10
        with lost(client):
            assigned = client.assign_async("a", keys, rows)
        keys += 1
        rows += 1
        assigned.result()
        np.testing.assert_array_equal(client.pull("a", KEYS), values + 10)
        client.assign("a", KEYS, values)


@contextlib.contextmanager
def lost(client):
    """Requests that are made within are lost: the connections break at the end, before anything is sent."""

    def lose(self: channel.Channel, part: channel.Part) -> channel.Request:
        request = channel.Request.carrying(part, self)
        self.adopt(request, self.stream.take())
        return request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel.Channel, "post", lose)
        yield
    for each in client.session._channels.values():
        each.fail(ServerGoneError("lost"))


@pytest.mark.parametrize("parties", [65_535, 65_536])
def test_more_parties_than_a_frame_can_say(servers, client, watched, parties: int) -> None:
    client.session.own.parties = parties
    if parties < 65_536:
        client.push("a", KEYS, ROWS)
        assert watched.last == DONE
        return
    with pytest.raises(LimitError, match="does not fit its place in a frame"):
        client.push("a", KEYS, ROWS)
    assert watched.last is None


def test_more_pushes_than_a_clock_has_numbers(client, watched) -> None:
    client.session.own.number = LAST_NUMBER - 2
    client.push("a", KEYS, ROWS)
    with pytest.raises(dps.errors.InputError, match="more than 4294901760 pushes by one client without a tick"):
        client.push({"a": (KEYS, ROWS), "dense": (KEYS, ROWS[:, 0].copy())})
    client.push("a", KEYS, ROWS)
    with pytest.raises(dps.errors.InputError, match="more than 4294901760 pushes by one client without a tick"):
        client.push("a", KEYS, ROWS)
    client.pull("a", KEYS)
    assert watched.outcomes == [DONE] * 3


# ---- what happens after the request has left


def test_acknowledgements_of_earlier_pushes_are_read_in_passing(client, watched) -> None:
    pending = [client.push_async("a", KEYS, ROWS) for _ in range(5)]
    np.testing.assert_allclose(client.pull("a", KEYS), -0.5, rtol=1e-6)
    assert watched.last == DONE
    assert all(each.done() for each in pending)
    pending = [client.push_async("a", KEYS, ROWS) for _ in range(5)]
    client.push("a", KEYS, ROWS)
    assert watched.last == DONE
    client.session.wait()
    np.testing.assert_allclose(client.pull("a", KEYS), -1.1, rtol=1e-6)


GOOD = Header(frames.OK, request=1, count=2, body=8)
BAD = {
    "good": GOOD,
    "another kind": GOOD._replace(kind=frames.ERROR),
    "another number": GOOD._replace(request=2),
    "a longer body": GOOD._replace(body=16),
    "a shorter body": GOOD._replace(body=0),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_is_checked(name: str) -> None:
    """What is not the answer goes to the general way, as it came."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answer = encode_header(BAD[name]) + np.array([3, 4], np.float32).tobytes()
        theirs.sendall(answer)
        form = Form(7, np.dtype("float32").num, 1, ShardMap(0, 1), False, [(0, 1)])
        meter = CallMeter(0.0)
        exchange = plain.Exchange(Polling(0.0), time.monotonic, meter, lambda channel, left: None)
        peer = SimpleNamespace(stream=channel.Stream(ours.fileno()), traffic=channel.Traffic(), is_plain=True)
        peer.acknowledged = lambda number: False
        terms = requests.Terms(form, 1, 1000, frames.PULL, 0, False, True, False)
        keys = np.array([8, 9])
        outcome = exchange.make([(plain.Wires([peer]), terms, keys, None, None)], Origin(2, 6, 4, 3, 5))
        request = theirs.recv(1000)
        header = decode_header(request, 0, 1000)
        fields = {"table": 7, "epoch": 1, "trainer": 2, "number": 0, "clock": 4, "parties": 5, "attempt": 6}
        assert header == Header(frames.PULL, request=1, shards=1, count=2, body=24, **fields)
        assert np.frombuffer(request[64:], np.int64).tolist() == [2, 8, 9]
        if name == "good":
            assert [values.tolist() for values in outcome] == [[3, 4]]
            assert (peer.traffic.sent, peer.traffic.received, peer.traffic.answers) == (88, 72, 1)
            assert (meter.pulls, meter.keys_pulled) == (1, 2)
        else:
            assert outcome is plain.OPEN
            ((at, leg, run, number, received),) = exchange.open
            (part,) = plain.parts_of(exchange.calls[at])
            assert (leg, run, number, part.run, part.shards, part.keys.tolist()) == (0, 0, 1, 0, (0, 1), [8, 9])
            assert answer.startswith(received)
            assert len(received) >= 64


def test_a_large_request_waits_for_rows_that_are_owed() -> None:
    """The peer reads a request when its last answer is taken; request and answer are too large for the connection."""
    ours, theirs = socket.socketpair()
    keys = np.arange(100_000)
    waits: list[int] = []

    def serve() -> None:
        for number in (1, 2):
            left = 64 + 8 + keys.nbytes
            while left:
                got = len(theirs.recv(min(left, 1 << 16)))
                left = left - got if got else 0
            answer = Header(frames.OK, request=number, count=len(keys), body=4 * len(keys))
            with contextlib.suppress(BrokenPipeError):  # the test has given up
                theirs.sendall(encode_header(answer) + np.full(len(keys), number, np.float32).tobytes())

    def idle(channel, left: int) -> None:
        waits.append(left)
        if len(waits) == 8:
            raise RequestTimeoutError("neither side reads")

    thread = threading.Thread(target=serve)
    with ours, theirs:
        thread.start()
        exchange = plain.Exchange(Polling(0.0), time.monotonic, CallMeter(0.0), idle)
        peer = SimpleNamespace(stream=channel.Stream(ours.fileno()), traffic=channel.Traffic(), is_plain=True)
        peer.acknowledged = lambda number: False
        form = Form(7, np.dtype("float32").num, 1, ShardMap(0, 1), False, [(0, 1)])
        terms = requests.Terms(form, 1, 1 << 22, frames.PULL, 0, False, True, False)
        asked = (plain.Wires([peer]), terms, keys, None, None)
        try:
            one, two = exchange.make([asked, asked], Origin(2, 6, 4, 3, 5))
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert (one == 1).all()
    assert (two == 2).all()


def test_a_stray_answer_ends_the_connection(client, watched) -> None:
    """An answer to no request, of the right length: nobody may take it for the values."""
    client.push("a", KEYS, ROWS)
    for each in client.session._channels.values():
        number = each.stream.number
        each.send(Header(frames.PULL, table=client.session._tables["a"].spec.id, epoch=client.session.epoch), ())
        each._requests.clear()
        each.stream.number = number + 1
    with pytest.raises(ProtocolError, match="which was never made"):
        client.pull("a", KEYS)
    assert watched.handed_over == 1


def test_an_error_of_the_server_is_the_callers(servers, client, watched) -> None:
    spec = servers.tables["a"][0]
    for endpoint, role in servers.alive():
        endpoint.call(role.drop, spec.id)
    with pytest.raises(UnknownTableError, match="was it dropped"):
        client.push("a", KEYS, ROWS)
    assert watched.handed_over == 1


def test_an_error_for_the_second_of_several_tables(servers, client, watched) -> None:
    """One of its servers says so; the other parts are done."""
    endpoint, role = servers.endpoints[1], servers.servers[1]
    endpoint.call(role.drop, servers.tables["a"][0].id)
    client.session.patience = 5
    with pytest.raises(UnknownTableError, match="was it dropped"):
        client.push({"dense": (KEYS, np.ones(6, np.float32)), "a": (KEYS, ROWS)})
    assert watched.handed_over == 1
    np.testing.assert_array_equal(client.pull("dense", KEYS), 1)


def test_an_answer_that_is_late_goes_the_general_way(servers, client, watched) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    servers.endpoints[0].loop.call_soon_threadsafe(lambda: (stuck.set(), go_on.wait()))
    assert stuck.wait(10)
    threading.Timer(0.6, go_on.set).start()
    try:
        np.testing.assert_array_equal(client.pull("a", KEYS), 0)
    finally:
        go_on.set()
    assert watched.handed_over == 1
    client.pull("a", KEYS)
    assert watched.handed_over == 1


def test_an_answer_for_one_of_several_tables_that_is_late(servers, client, watched) -> None:
    client.push({"a": (KEYS, ROWS), "dense": (KEYS, ROWS[:, 0].copy())})
    stuck, go_on = threading.Event(), threading.Event()
    servers.endpoints[1].loop.call_soon_threadsafe(lambda: (stuck.set(), go_on.wait()))
    assert stuck.wait(10)
    threading.Timer(0.6, go_on.set).start()
    try:
        answers = client.pull({"a": KEYS, "dense": KEYS})
    finally:
        go_on.set()
    np.testing.assert_allclose(answers["a"], -0.1)
    np.testing.assert_array_equal(answers["dense"], 1)
    assert watched.handed_over == 1


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["push", "pull"])
def test_a_server_that_stands_still_is_not_waited_for_for_ever(servers, verb: str) -> None:
    """It stops in the middle of a message; afterwards the client is as good as new."""
    spec = servers.table(TableSpec("a", rows=1 << 22, shards=1), owners=[0])
    values, go_on = np.ones(spec.rows, np.float32), threading.Event()
    endpoint, send = servers.endpoints[0], departures.send_soon

    def stop_in_the_middle(fd: int, data: np.ndarray, count: int, patience: int) -> tuple[int, int]:
        done = send(fd, data, count, patience)
        go_on.wait()
        return done

    with servers.client() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loans, "offered", staticmethod(lambda mark: None))  # else it sends no rows
        client.pull("a", [0])
        client.session.patience = 0.6
        if verb == "push":
            endpoint.loop.call_soon_threadsafe(go_on.wait)
        else:
            patch.setattr(departures, "send_soon", stop_in_the_middle)
        try:
            why = r"server 0 .* has moved no bytes for 0.6 s \(dps.timeouts.request\)"
            with pytest.raises(RequestTimeoutError, match=why):
                client.pull("a") if verb == "pull" else client.push("a", None, values)
        finally:
            patch.undo()
            go_on.set()
        client.session.patience = 60
        assert client.pull("a", KEYS).shape == (6,)


def test_a_client_that_is_closed_during_a_call_touches_no_other_file(servers, client, monkeypatch) -> None:
    """The system gives the number of a closed socket to the next file; a call that goes on would read from that."""
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            client.pull("a", KEYS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pull)
    with held(servers, 0):
        thread.start()
        streams = [each.stream for each in client.session._channels.values()]
        wait_until(lambda: any(stream.calls for stream in streams))
        client.close()
        others = [socket.socketpair() for _ in range(64)]
        numbers = {end.fileno() for pair in others for end in pair}
        for one, other in others:
            one.sendall(b"kept")
            other.sendall(b"kept")
        assert not numbers & {stream.fd for stream in streams if stream.calls}
        thread.join(20)
    try:
        assert [type(error) for error in errors] == [ClosedError]
        assert all(end.recv(4) == b"kept" for pair in others for end in pair)
    finally:
        for one, other in others:
            one.close()
            other.close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_is_not_written_to_a_socket_that_is_closed(ended: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        stream = channel.Stream(ours.fileno())
        stream.ended = ended
        form = Form(7, np.dtype("float32").num, 1, ShardMap(0, 1), False, [(0, 1)])
        terms = requests.Terms(form, 1, 1000, frames.PULL, 0, False, True, False)
        (part,) = plain.parts_of(requests.core.Call.of(terms, Origin(2), np.array([8, 9]), None, None))
        left = b"".join(stream.write(part, 3))
        written = left if ended else theirs.recv(1000)
        assert len(written) == part.sent == 64 + 8 + 16
        assert decode_header(written, 0, 1000).request == 3
        assert stream.calls == 0
        if ended:
            with pytest.raises(BlockingIOError):
                theirs.recv(1000)
        else:
            assert not left


def test_a_server_that_serves_every_other_run(servers, watched) -> None:
    """Its requests and answers are too large for the buffers of its connection, also those of several tables."""
    for name in ("a", "b"):
        servers.table(TableSpec(name, dim=4, shards=8), owners=[0, 1, 0, 1, 1, 0, 0, 1])
    keys = np.arange(800_000)  # of which a socket cannot hold what two runs ask for, and the answers
    values = np.random.default_rng(0).normal(size=(len(keys), 4)).astype("float32")
    with servers.client() as client:
        client.pull("a", keys[:100])
        client.push("a", keys, values)
        np.testing.assert_array_equal(client.pull("a", keys), values)
        np.testing.assert_array_equal(client.push_pull("a", keys, values), values * 2)
        client.pull("b", keys[:100])
        both = {"a": (keys, values), "b": (keys, values)}
        client.push(both)
        for answers, b in (client.pull({"a": keys, "b": keys}), 1), (client.push_pull(both), 2):
            np.testing.assert_array_equal(answers["a"], values * (b + 2))
            np.testing.assert_array_equal(answers["b"], values * b)
    assert watched.outcomes == [POSTED, *[DONE] * 7]
    assert watched.handed_over == 0


def test_servers_may_answer_their_second_run_first(watched) -> None:
    """Each of two primaries has two runs of shards, and the backup of its first one is late."""
    with Servers(4) as servers:
        servers.table(TableSpec("a", dim=2, shards=4, dtype="int64", copies=2), owners=[0, 1, 0, 1])
        places = servers.tables["a"][1]
        for shard, backup in enumerate((2, 2, 3, 3)):
            if backup not in places[shard].chain:
                servers.join("a", shard, backup)
                chain = (places[shard].chain[0], backup)
                servers.put("a", shard, rechained(places[shard], chain, None, servers.epoch + 1))
        keys = np.arange(200)
        with servers.client() as client:
            client.push("a", keys, np.ones((200, 2), np.int64))
            go_on = threading.Event()
            servers.endpoints[2].loop.call_soon_threadsafe(go_on.wait, 30)
            threading.Timer(0.6, go_on.set).start()
            client.push("a", keys, np.ones((200, 2), np.int64))
            assert watched.handed_over == 1
            np.testing.assert_array_equal(client.pull("a", keys), 2)


def test_servers_may_answer_the_second_table_first(watched) -> None:
    """The first one has a backup, which is late."""
    with Servers(2) as servers:
        servers.table(TableSpec("a", dim=2, shards=2, dtype="int64", copies=2), owners=[0, 1])
        servers.table(TableSpec("b", dim=2, shards=2, dtype="int64"), owners=[0, 1])
        servers.table(TableSpec("c", shards=1), owners=[1])
        both = {name: (KEYS, np.ones((6, 2), np.int64)) for name in ("a", "b")}
        with servers.client() as client:
            client.push(both)
            client.pull("c", KEYS)  # so that the two connections count their requests differently
            client.push(both)
            assert (watched.handed_over, watched.last) == (0, DONE)
            go_on = threading.Event()
            servers.endpoints[1].loop.call_soon_threadsafe(go_on.wait, 30)
            threading.Timer(0.6, go_on.set).start()
            client.push(both)
            assert watched.handed_over == 1
            for values in client.pull({"a": KEYS, "b": KEYS}).values():
                np.testing.assert_array_equal(values, 3)
            assert (watched.handed_over, watched.last) == (1, DONE)


@pytest.mark.parametrize("verb", ["pull", "push", "push_pull"])
@pytest.mark.parametrize("announce", [True, False])
def test_a_server_that_dies_loses_nothing_of_several_tables(watched, verb: str, announce: bool) -> None:
    with Servers(3) as servers:
        for name in ("a", "b"):
            servers.table(TableSpec(name, dim=2, shards=4, dtype="int64", copies=2))
        changes = {name: (KEYS, np.ones((6, 2), np.int64)) for name in ("a", "b")}
        keys = {"a": KEYS, "b": KEYS}
        with servers.client() as client:
            client.push(changes)
            client.push(changes)
            servers.kill(0, announce=announce)
            if not announce:
                threading.Timer(0.3, servers.without, (0,)).start()
            expected = 2 if verb == "pull" else 3
            answer = client.pull(keys) if verb == "pull" else getattr(client, verb)(changes)
            for values in (answer or {}).values():
                np.testing.assert_array_equal(values, expected)
            for values in client.pull(keys).values():
                np.testing.assert_array_equal(values, expected)
            assert watched.handed_over == 1


@pytest.mark.parametrize("verb", ["pull", "push", "push_pull"])
@pytest.mark.parametrize("announce", [True, False])
def test_a_server_that_dies_loses_nothing(watched, verb: str, announce: bool) -> None:
    with Servers(3) as servers:
        servers.table(TableSpec("a", dim=2, shards=4, dtype="int64", copies=2))
        ones = np.ones((6, 2), np.int64)
        with servers.client() as client:
            client.push("a", KEYS, ones)
            client.push("a", KEYS, ones)
            if announce:
                servers.kill(0)
            else:
                servers.kill(0, announce=False)
                threading.Timer(0.3, servers.without, (0,)).start()
            expected = 2 if verb == "pull" else 3
            answer = client.pull("a", KEYS) if verb == "pull" else getattr(client, verb)("a", KEYS, ones)
            if answer is not None:
                np.testing.assert_array_equal(answer, expected)
            np.testing.assert_array_equal(client.pull("a", KEYS), expected)
            assert watched.handed_over == 1


@pytest.mark.parametrize("announce", [True, False])
def test_a_server_that_dies_loses_nothing_that_is_on_its_way(watched, announce: bool) -> None:
    """Asynchronous calls, with repeated keys, and calls of several tables: the arrays are changed meanwhile."""
    with Servers(3) as servers:
        for name in ("a", "b"):
            servers.table(TableSpec(name, dim=2, shards=4, dtype="int64", copies=2, optimizer=dps.Add()))
        servers.table(TableSpec("c", shards=4, copies=2, optimizer=dps.Momentum(1.0, momentum=0.5)))
        with servers.client() as client:
            expected = {name: np.zeros((6, 2), np.int64) for name in ("a", "b")}
            client.push({"a": (KEYS, np.zeros((6, 2), np.int64)), "b": (KEYS, np.zeros((6, 2), np.int64))})
            client.push("c", KEYS, np.zeros(6, np.float32))
            pending = []
            for n in range(12):
                if n == 4:
                    servers.kill(0, announce=announce)
                    if not announce:
                        threading.Timer(0.3, servers.without, (0,)).start()
                keys, rows = np.roll(KEYS, n), np.arange(12).reshape(6, 2) + n
                for table in expected.values():
                    table[keys] += rows
                if n % 3 == 0:
                    client.push({"a": (keys, rows), "b": (keys, rows)})
                else:
                    pending += [client.push_async("a", keys, rows), client.push_pull_async("b", keys, rows)]
                    pending.append(client.push_async("c", keys // 2, np.ones(6, np.float32)))
                    pending.append(client.pull_async({"a": keys, "b": keys}))
                keys += 100
                rows += 100
            for each in pending:
                each.result()
            for name, table in expected.items():
                np.testing.assert_array_equal(client.pull(name, KEYS), table)
            moved = np.float32(0)
            momentum = np.float32(0)
            for _ in range(8):  # each key came twice in each push, and the sum is one step
                momentum = np.float32(0.5) * momentum + np.float32(2)
                moved -= momentum
            np.testing.assert_allclose(client.pull("c", KEYS), [moved] * 3 + [0] * 3)
            assert watched.outcomes.count(POSTED) > 20


def test_many_threads_take_turns(client) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                client.add("a", KEYS, ROWS)
                client.pull("a", KEYS)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    np.testing.assert_array_equal(client.pull("a", KEYS), 200)


def test_its_times_and_counts_are_those_of_the_general_way(pairs) -> None:
    meters = []
    for servers, way in zip(pairs, (lambda c: c, generally), strict=True):
        servers.table(TableSpec("a", dim=2, shards=4))
        with servers.client() as client:
            way(client).pull("a", KEYS)
            before = time.monotonic()
            for _ in range(10):
                client.push("a", KEYS, ROWS)
                client.pull("a", KEYS)
                client.pull({"a": KEYS, client.table("a"): KEYS})
            took = time.monotonic() - before
            meter = client.session.meter
            counts = meter.pulls, meter.pushes, meter.keys_pulled, meter.keys_pushed
            meters.append((counts, [(t.sent, t.received, t.answers) for t in meter.servers.values()]))
            assert 0 < sum(meter.seconds.values()) < 10 * took + 1
            assert all(seconds >= 0 for seconds in meter.seconds.values())
    assert meters[0] == meters[1]


# ---- broken variants must not pass

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("call.pyx", "head.request == leg.number and ", ""),
    ("call.pyx", " and head.body == self.body_of(leg)", ""),
    ("call.pyx", "head.kind == OK and ", ""),
    ("call.pyx", "if not fits(form, listed, count, rows, False, cnp.NPY_ARRAY_CARRAY_RO) or not", "if not"),
    ("call.pyx", "or not is_finite(form, rows)", ""),
    ("call.pyx", "if distinct == count:", "if True:"),
    ("call.pyx", "parties > LARGEST_SHORT or ", ""),
    ("call.pyx", "dps_take(self.room, self.target, self.asked, out,", "dps_take(self.room, self.target, 0, out,"),
    ("call.pyx", "self.form.row_bytes, self.order, a, self.room)", "self.form.row_bytes, self.order, 0, self.room)"),
    ("call.pyx", "made.shard, made.shards = <uint16_t> leg.first,", "made.shard, made.shards = 0,"),
    ("part.pyx", "self.call.put(self.piece, self.at, rows, self.leg.pulled)", "pass"),
    ("call.pyx", "memcpy(rows, self.rows, self.count * row)", "pass"),
    ("call.pyx", "memcpy(keys, self.keys, self.count * 8)", "pass"),
    ("exchange.pyx", "if call.room != NULL and call.leg[m].state == SENT and streams", "if False and streams"),
    ("exchange.pyx", "or wires.channels[leg.run].acknowledged(head.request)", "or True"),
    ("exchange.pyx", "and call.leg[m].number == head.request:", "and True:"),
    ("exchange.pyx", "if streams[call.leg[m].run] is stream:", "if True:"),
    ("call.pyx", "pieces[3].iov_base, pieces[3].iov_len = &ZEROS, -(leg.b - leg.a) * sent & 7", "pass"),
    ("call.pyx", "origin.number += self.numbers", "origin.number += 1"),
    ("call.pyx", "made.number += leg.chunk", "pass"),
    ("call.pyx", " or not (terms.pushes and terms.answered) or terms.merges", " or True"),
    ("exchange.pyx", "arrived.pop((n, leg.run)", "arrived.pop((n, 0)"),
    ("exchange.pyx", "arrived.pop((n, leg.run)", "arrived.pop((0, leg.run)"),
    ("exchange.pyx", "        for n in range(self.at + 1):", "        for n in range(self.at, self.at + 1):"),
    ("exchange.pyx", "if not self.channels[n].is_plain:", "if False:"),
    ("exchange.pyx", "if self.ended:", "if False:"),
    ("exchange.pyx", "if origin.number + numbers > LAST_NUMBER:", "if False:"),
]


def use(monkeypatch, call, part, exchange) -> None:
    """Let clients that are made from now on use these variants of dps.engine.core.requests.call, part and exchange."""
    count = {name: vars(trainer_meter.ServerTraffic)[name] for name in ("__init__", "stall")}
    monkeypatch.setattr(trainer_meter, "ServerTraffic", type("ServerTraffic", (exchange.Traffic,), count))
    monkeypatch.setattr(requests, "core", call)
    for owner in (plain, session):
        monkeypatch.setattr(owner, "parts_of", part.parts_of)
    for owner, names in (
        (plain, ("Exchange", "Wires", "DECLINED", "OPEN")),
        (client_module, ("DECLINED",)),
        (channel, ("Stream", "Traffic")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(exchange, name))


def check_all(pairs, monkeypatch) -> None:
    """What sees the errors of a wrong step: the tests above, without those of what is never wrong in it."""
    test_large_calls(pairs, Watched(monkeypatch), None)
    test_large_calls(pairs, Watched(monkeypatch), 400_000)
    test_a_server_that_serves_every_other_run(pairs[0], Watched(monkeypatch))
    test_servers_may_answer_their_second_run_first(Watched(monkeypatch))
    test_servers_may_answer_the_second_table_first(Watched(monkeypatch))
    checks = [lambda c, n=name: test_what_is_refused_sends_nothing(c, Watched(monkeypatch), n) for name in REFUSED]
    checks.append(lambda c: test_repeats_are_summed(c, Watched(monkeypatch)))
    checks.append(lambda c: test_acknowledgements_of_earlier_pushes_are_read_in_passing(c, Watched(monkeypatch)))
    checks.append(lambda c: test_a_stray_answer_ends_the_connection(c, Watched(monkeypatch)))
    checks.append(lambda c: test_an_error_of_the_server_is_the_callers(pairs[0], c, Watched(monkeypatch)))
    checks.append(lambda c: test_an_error_for_the_second_of_several_tables(pairs[0], c, Watched(monkeypatch)))
    checks.append(lambda c: test_a_call_waits_for_no_answer_that_is_half_read(c, Watched(monkeypatch)))
    checks.append(lambda c: test_more_parties_than_a_frame_can_say(pairs[0], c, Watched(monkeypatch), 65_536))
    checks.append(test_what_is_sent_later_is_what_was_asked)
    checks.append(lambda c: test_a_call_in_several_chunks(c, Watched(monkeypatch)))
    checks.append(lambda c: test_more_pushes_than_a_clock_has_numbers(c, Watched(monkeypatch)))
    for name in BAD:
        test_an_answer_is_checked(name)
    test_a_large_request_waits_for_rows_that_are_owed()
    test_a_request_is_not_written_to_a_socket_that_is_closed(True)
    for check in checks:
        with client_of(pairs[0]) as client:
            check(client)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(pairs, monkeypatch, file: str, old: str, new: str) -> None:
    use(monkeypatch, *variants(["call", "part", "exchange"], file, old, new))
    with pytest.raises((AssertionError, DPSError, pytest.fail.Exception)):
        check_all(pairs, monkeypatch)


@pytest.mark.slow
def test_the_right_variant_is_not(pairs, monkeypatch) -> None:
    use(monkeypatch, *variants(["call", "part", "exchange"], "call.pyx", "head.magic == MAGIC", "head.magic == MAGIC"))
    check_all(pairs, monkeypatch)


# ---- memory of results


def test_a_result_that_is_kept_is_never_overwritten(servers):
    """Results of all calls lie in memory of their own for as long as a view of them is used, and no longer."""
    servers.table(TableSpec("kept", rows=3000, dim=64, shards=4))
    with servers.client() as client:
        ones = np.ones((3000, 64), np.float32)
        kept, addresses = [], set()
        for number in range(12):
            general = number % 3 == 2
            with contextlib.ExitStack() as stack:
                caller = generally(stack.enter_context(servers.client())) if general else client
                result = caller.pull("kept") if number % 2 else caller.push_pull("kept", None, ones)
            kept.append(result if number % 4 else result[5:, 3])
            addresses.add(result.ctypes.data)
            if number % 2:
                client.push("kept", None, ones)
            del result
        assert all((array == number // 2 * 2 + 1).all() for number, array in enumerate(kept))
        assert len(addresses) == len(kept)
        freed = kept.pop().ctypes.data
        assert client.pull("kept").ctypes.data == freed
