"""A client's calls arrive in order, once, whatever servers do: refuse, fall silent, break off, move."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noticing import assert_noticed
from oracles import mutant
from servers import SECRET, LocalSession, Servers, wait_until

from dps.engine.client import route_changes
from dps.engine.client.client import Client
from dps.engine.client.requests import prepared_push
from dps.engine.client.route_changes import LEASE_TRIES, MAX_SETBACKS, refused_by_leases
from dps.engine.client.session import ClientSession
from dps.engine.client.ticket import Certificate
from dps.engine.coordination.placement import Place
from dps.engine.state.ops import PUSH, TableSpec
from dps.engine.wire import frames
from dps.engine.wire.channel import Request
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_header, encode_json
from dps.errors import (
    ClosedError,
    DataLostError,
    DPSError,
    InputError,
    LeaseError,
    MovedError,
    RequestTimeoutError,
    ServerGoneError,
    StoppedError,
    UnknownTableError,
)

OK, MOVED, CLOSE, LATE, SILENT, HALF, BAD = "ok", "moved", "close", "late", "silent", "half", "bad"
SLOW, GONE = "slow", "gone"


class Fake:
    """A server of one keyed table that does with each frame what its script says, and notes what it took.

    MOVED refuses, SLOW does so after 0.3 s, CLOSE closes before, LATE after it took the op, SILENT says nothing, HALF
    breaks off in its answer. GONE does not know the table, which `restore` has replaced just before.
    """

    restore = None

    def __init__(self, script=(), after=OK):
        self.script, self.after = list(script), after
        self.frames: list[tuple[Header, tuple, tuple]] = []  # all that came: header, keys, values
        self.taken: list[int] = []  # numbers of pushes, without repeats
        self.endpoint = Endpoint("fake", "127.0.0.1", {frames.PUSH: self._handle, frames.PULL: self._handle})
        self.endpoint.call(self.endpoint.secrets.__setitem__, "s", SECRET)
        self.address = (self.endpoint.host, self.endpoint.port)

    def _handle(self, connection, header, body):
        words = np.frombuffer(body, np.int64)
        keys = words[header.shards : header.shards + header.count]
        values = words[header.shards + header.count :]
        self.frames.append((header, tuple(keys.tolist()), tuple(values.tolist())))
        does = self.script.pop(0) if self.script else self.after
        if does == GONE:
            self.restore()
            raise UnknownTableError("no such table")
        if does == SLOW:
            time.sleep(0.3)
        if does in (MOVED, SLOW):
            raise MovedError("this server does not serve the shard now")
        if does == BAD:
            raise InputError("no")
        if does == CLOSE:
            connection.transport.abort()
        elif does in (OK, LATE) and header.kind == frames.PUSH and header.number > max(self.taken, default=-1):
            self.taken.append(header.number)
        if does == LATE:
            connection.transport.abort()
        if does not in (OK, HALF):
            return
        answer = Header(frames.OK, request=header.request, count=header.count)
        if header.kind == frames.PULL:
            rows = (keys * 10).tobytes()
            frame = encode_header(answer._replace(body=len(rows))) + rows
            connection.transport.write(frame if does == OK else frame[: HEADER_SIZE + len(rows) // 2])
        else:
            connection.reply(answer)
        if does == HALF:
            connection.transport.close()


class Probe(LocalSession):
    """A session with fakes; it may be interrupted while it waits."""

    interrupted = False

    def _check_server(self, server, asked):
        if self.interrupted:
            raise KeyboardInterrupt


@contextlib.contextmanager
def fakes(*scripts, after=OK, owners=None, shards=4, chunk="256 MiB"):
    """That many fakes and a client of theirs."""
    spec = TableSpec("t", dtype="int64", shards=shards, id=1)
    with dask.config.set({"dps.limits.chunk": chunk}):
        servers = [Fake(script, after) for script in scripts]
        owners = owners or [n * len(servers) // shards for n in range(shards)]
        known = SimpleNamespace(
            epoch=1,
            addresses={n: fake.address for n, fake in enumerate(servers)},
            tables={"t": (spec, [Place((owner,) if owner >= 0 else ()) for owner in owners])},
        )
        try:
            session = Probe(known, 7)
            with Client(session.ticket, session=session) as client:
                client.session.patience = 10.0
                yield known, client, servers
        finally:
            for fake in servers:
                fake.endpoint.stop()


# ---- order ----------------------------------------------------------------------------------------------------------


def test_what_comes_after_a_refused_push_comes_after_it():
    with fakes([OK, OK, MOVED]) as (_, client, (fake,)):
        waiting = [client.push_async("t", [n], n) for n in range(10)]
        client.wait()
        assert all(pending.done() for pending in waiting)
        assert fake.taken == list(range(10))
        assert [values for header, _, values in fake.frames if header.number == 2] == [(2,), (2,)]


def test_a_push_whose_route_was_renewed_goes_before_what_follows():
    """As where one call pushes to two tables, and recovers from the failure of the first one's server."""
    with fakes([], [], shards=1, owners=[0]) as (known, client, (before, after)):
        session = client.session
        with session.lock:
            route = session.ready("t")
            push = prepared_push(route, session.terms(route), session.acting, np.array([3]), np.array([5]), PUSH)
            known.epoch, known.tables = 2, {"t": (known.tables["t"][0], [Place((1,))])}
            session.fetch_route()
            session.send([push])
            pulled = client.pull_async("t", [3])
        assert pulled.result().tolist() == [30]
        client.wait()
    assert [header.kind for header, *_ in after.frames] == [frames.PUSH, frames.PULL]
    assert not before.frames


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(st.sampled_from([OK, OK, OK, MOVED, CLOSE, LATE]), max_size=14),
    how=st.lists(st.sampled_from(["async", "push", "add", "wait"]), min_size=8, max_size=14),
)
def test_pushes_arrive_in_order_whatever_happens(script, how):
    with fakes(script) as (_, client, (fake,)):
        count = 0
        for verb in how:
            if verb == "wait":
                client.wait()
                continue
            call = {"async": client.push_async, "push": client.push, "add": client.add}[verb]
            call("t", [count, count + 1], [count, 5])
            count += 1
        client.wait()
        assert fake.taken == list(range(count)), "all of them, in order"
        sent = {}
        for header, keys, values in fake.frames:
            what = (header.trainer, header.clock, header.flags, keys, values)
            assert sent.setdefault(header.number, what) == what, "a number stands for one op"
            assert header.trainer == 7


def test_of_several_servers_each_gets_its_part_in_order():
    with fakes([OK, CLOSE, OK, MOVED], [LATE, OK, MOVED, MOVED]) as (_, client, servers):
        keys = np.arange(64)
        for n in range(12):
            client.push_async("t", keys, n)
        client.wait()
        for fake in servers:
            assert fake.taken == list(range(12))
        parts = [{keys for _, keys, _ in fake.frames} for fake in servers]
        assert [len(part) for part in parts] == [1, 1], "always the same keys"
        assert sorted(k for part in parts for k in next(iter(part))) == keys.tolist()


def test_an_error_of_ones_own_does_not_hold_up_the_others():
    with fakes([OK, BAD, OK, CLOSE]) as (_, client, (fake,)):
        waiting = [client.push_async("t", [n], n) for n in range(3)]
        waiting[2].result()  # now the refusal is read, which would be lost with the connection that breaks next
        waiting += [client.push_async("t", [n], n) for n in (3, 4)]
        with pytest.raises(InputError, match="no"):
            client.wait()
        assert [header.number for header, _, _ in fake.frames].count(1) == 1, "it is not sent again"
        assert fake.taken == [0, 2, 3, 4]
        for n, pending in enumerate(waiting):
            if n != 1:
                pending.result()


# ---- another route --------------------------------------------------------------------------------------------------


def chunks_of(servers) -> dict[int, set]:
    """Which keys each number stands for."""
    chunks: dict[int, set] = {}
    for fake in servers:
        for header, keys, _ in fake.frames:
            chunks.setdefault(header.number, set()).update(keys)
    return chunks


def test_a_large_push_is_cut_the_same_way_whoever_serves_it():
    keys = np.arange(1000)
    with fakes([], chunk="1 KiB") as (_, client, servers):
        client.push("t", keys, 1)
        expected = chunks_of(servers)
    assert len(expected) == 16
    with fakes([], [OK, MOVED], after=OK, chunk="1 KiB") as (known, client, servers):
        servers[1].after = MOVED
        pending = client.push_async("t", keys, 1)
        wait_until(lambda: any(f.frames for f in servers))
        spec, places = known.tables["t"]
        known.tables = {"t": (spec, [Place((0,)) for _ in places])}
        pending.result()
        client.push("t", keys, 1)
        first = [n for n in chunks_of(servers) if n < 16]
        assert sorted(first) == sorted(expected)
        assert {n: chunks_of(servers)[n] for n in first} == expected, "its numbers mean what they meant"
        assert max(chunks_of(servers)) == 31


def test_a_pull_that_broke_off_is_filled_anew():
    keys = np.arange(1000)[::-1]
    for shape in ("ordered", "mixed"):
        with fakes([HALF, CLOSE], [OK, HALF, MOVED]) as (_, client, _):
            asked = np.sort(keys) if shape == "ordered" else keys
            out = np.full(1000, -1)
            assert client.pull("t", asked, out=out) is out
            np.testing.assert_array_equal(out, asked * 10)
            pending = [client.pull_async("t", asked) for _ in range(3)]
            for one in pending:
                np.testing.assert_array_equal(one.result(), asked * 10)


def test_arrays_may_be_used_again_although_nothing_could_be_sent():
    """A push that failed at once, behind one that is still on its way, is sent later."""
    with Servers(2) as servers:
        servers.table(TableSpec("t", dtype="int64", rows=100, shards=2, copies=2))
        with servers.client() as client:
            client.push("t", slice(50, 100), 0)
            stopped, go_on = threading.Event(), threading.Event()
            servers.endpoints[1].loop.call_soon_threadsafe(lambda: (stopped.set(), go_on.wait(20)))
            assert stopped.wait(20)
            client.push_async("t", slice(50, 100), 1)
            servers.kill(0, announce=False)
            keys, values = np.arange(50), np.ones(50, np.int64)
            pending = client.push_async("t", keys, values)
            keys[:], values[:] = 7, 1_000_000
            go_on.set()
            servers.without(0)
            pending.result()
            client.wait()
            assert (client.pull("t") == 1).all()


def test_a_table_that_is_dropped_meanwhile_is_missed():
    with fakes([OK, MOVED], after=MOVED) as (known, client, (fake,)):
        client.push("t", [1], 1)
        pending = client.push_async("t", [2], 1)
        wait_until(lambda: len(fake.frames) == 2)
        known.tables = {}
        with pytest.raises(UnknownTableError, match="table"):
            pending.result()


def test_a_table_that_is_restored_again_and_again_is_followed():
    with fakes([OK, GONE, MOVED, GONE, GONE]) as (known, client, (fake,)):

        def restore():
            spec, places = known.tables["t"]
            known.tables = {"t": (dataclasses.replace(spec, id=spec.id + 1), places)}

        fake.restore = restore
        client.push("t", [1], 1)
        client.push("t", [2], 1)
        assert [header.table for header, _, _ in fake.frames] == [1, 1, 2, 2, 3, 4]
        assert fake.taken == [0, 1]


# ---- waiting, and not waiting any more ------------------------------------------------------------------------------


def test_a_server_that_says_nothing_is_named_with_the_time():
    with fakes([OK], after=SILENT) as (_, client, (fake,)):
        client.push("t", [1], 1)
        client.session.patience = 0.3
        host, port = fake.address
        began = time.monotonic()
        with pytest.raises(
            RequestTimeoutError, match=f"server 0 of parameter server 's' at {host}:{port} has not answ"
        ):
            client.push("t", [1], 1)
        assert 0.25 < time.monotonic() - began < 30  # not the 60 s of dps.timeouts.request
        fake.after = OK
        client.push("t", [1], 1)
        assert fake.taken == [0, 2], "what timed out is not sent again: nobody knows whether it arrived"


def test_a_server_that_refuses_for_ever_is_asked_now_and_then():
    with fakes([], after=MOVED) as (_, client, (fake,)):
        client.session.patience = 1.0
        with pytest.raises(RequestTimeoutError, match=r"found no server for 1 s \(dps.timeouts.request\): "):
            client.push("t", [1], 1)
        assert 2 <= len(fake.frames) < 60
        fake.after = OK
        client.pull("t", [1])


@contextlib.contextmanager
def insisting(client):
    """Notes when the session insists on an answer of the controller, which nothing else gives it."""
    insisted, session = [], client.session
    fetch = session.fetch_route
    session.renew_route = lambda: None
    session.fetch_route = lambda: (insisted.append(session.now()), fetch())
    yield insisted
    del session.renew_route, session.fetch_route


def check_broken_connections() -> None:
    """A server that has no lease refuses and closes the connection; the refusal is lost if the client still writes.

    So a broken connection is made again before the controller is insisted on, because that may have gone.
    """
    with fakes([OK, *[CLOSE] * 5], [OK]) as (_, client, (one, _)):
        client.pull("t", np.arange(100))
        with insisting(client) as insisted:
            client.push("t", np.arange(100), 1)
            client.pull("t", np.arange(100))
        assert len(one.frames) == 8
        assert not insisted


def check_server_that_is_gone() -> None:
    """If that does not help, only the controller knows which server has the rows now."""
    with fakes([], []) as (known, client, (one, two)):
        client.pull("t", np.arange(100))
        one.after = CLOSE
        with insisting(client) as insisted:
            known.tables["t"] = (known.tables["t"][0], [Place((1,))] * 4)
            client.push("t", np.arange(100), 1)
        assert len(insisted) == 1
        assert two.taken


def check_server_that_was_replaced() -> None:
    """A controller that is there is asked soon, because it may have put another server in the place of the one."""
    with fakes([], []) as (known, client, (one, two)):
        client.pull("t", np.arange(100))
        one.after = CLOSE
        known.tables["t"] = (known.tables["t"][0], [Place((1,))] * 4)
        before = len(one.frames)
        client.push("t", np.arange(100), 1)
        assert len(one.frames) - before <= 4
        assert two.taken


def check_server_that_hangs() -> None:
    """Connections that take long are counted by their time, because the controller may know better."""
    with fakes([OK, CLOSE], after=OK) as (_, client, _):
        client.pull("t", [1])
        session, connect = client.session, client.session.environment.connect

        def hangs(*args):
            now, session.now = session.now(), lambda: now + 5.0
            raise ServerGoneError("has not greeted")

        with insisting(client) as insisted, pytest.MonkeyPatch.context() as patch:
            session.patience = 60.0
            patch.setattr(session.environment, "connect", hangs)
            fetch = session.fetch_route
            session.fetch_route = lambda: (patch.setattr(session.environment, "connect", connect), fetch())
            client.pull("t", [1])
        assert len(insisted) == 1


def check_table_that_was_restored() -> None:
    """While another server does not know the table any more: both parts go where it is now."""
    with fakes([OK, GONE], [OK, CLOSE]) as (known, client, fakes_):
        client.pull("t", np.arange(100))
        spec, places = known.tables["t"]
        fakes_[0].restore = lambda: known.tables.update(t=(dataclasses.replace(spec, id=2), places))
        assert client.pull("t", np.arange(100)).tolist() == list(range(0, 1000, 10))


def check_table_that_is_not_known() -> None:
    """The controller alone knows it, whatever else has failed."""
    with fakes([OK, CLOSE], after=OK) as (known, client, _):
        client.pull("t", [1])
        client.push_async("t", [1], 1)
        spec, places = known.tables["t"]
        known.tables["u"] = (dataclasses.replace(spec, name="u", id=2), places)
        time.sleep(0.2)  # until the connection has broken
        client.pull("u", [1])


def test_a_table_that_was_made_since_is_found_although_a_connection_broke():
    check_table_that_is_not_known()


def test_a_server_that_was_replaced_is_found_soon():
    check_server_that_was_replaced()


def test_connections_that_hang_are_not_made_eighteen_times():
    check_server_that_hangs()


def test_a_broken_connection_does_not_hide_that_a_table_was_restored():
    check_table_that_was_restored()


def test_a_connection_that_breaks_is_made_again_before_the_controller_is_asked():
    check_broken_connections()


def test_the_controller_is_asked_when_a_server_does_not_come_back():
    check_server_that_is_gone()


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("insists or has_tried or not route_changes.broke_off(requests)", "True", check_broken_connections),
        ("insists or has_tried or not route_changes.broke_off(requests)", "False", check_server_that_is_gone),
        ("insists or", "", check_table_that_is_not_known),
        ("has_tried or not", "has_tried and not", check_server_that_is_gone),
        ("elif self._setbacks:", "elif False:", check_server_that_was_replaced),
        (
            "route_changes.has_tried(self._setbacks, ",
            "route_changes.has_tried(self._setbacks, 0 * ",
            check_server_that_hangs,
        ),
        ("broke_off(requests)", "broke_off([r for r in requests if self._retried(r)])", check_table_that_was_restored),
    ],
)
def test_a_client_that_asks_the_controller_too_early_or_never_is_noticed(old, new, check):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_changes, "MAX_SETBACKS", LEASE_TRIES + 2)
        assert_noticed(ClientSession, "_refresh_route", old, new, check)


@contextlib.contextmanager
def hung():
    """The address of one that listens, and says nothing: a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()


@contextlib.contextmanager
def vanished():
    """An address at which nobody answers, as when the machine is gone: the listener's queue is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield listening.getsockname()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("gone", [hung, vanished])
def test_nobody_waits_for_a_server_that_was_replaced(gone):
    with (
        dask.config.set({"dps.timeouts.connect": "60 s"}),
        fakes([], []) as (known, client, (_, other)),
        gone() as where,
    ):
        known.addresses[0] = where
        client.session.patience = 60.0

        def replace():
            known.tables = {"t": (known.tables["t"][0], [Place((1,))] * 4)}
            known.epoch = 2

        def look_after(server, since):
            if known.epoch == 2:
                raise MovedError(f"server {server} was replaced")

        client.session._check_server = look_after
        timer = threading.Timer(0.2, replace)
        timer.start()
        client.push("t", np.arange(50), 1)
        timer.join()
        assert sum(len(keys) for _, keys, _ in other.frames) == 50


@pytest.mark.thorough
def test_a_server_that_does_not_greet_is_not_there():
    with dask.config.set({"dps.timeouts.connect": "200 ms"}), fakes([]) as (known, client, (fake,)), hung() as where:
        known.addresses[0] = where
        client.session.patience = 1.0
        with pytest.raises(RequestTimeoutError, match=r"found no server for 1 s .*has not greeted in time"):
            client.push("t", [1], 1)
        known.addresses[0] = fake.address
        client.push("t", [1], 1)
        assert len(fake.taken) == 1


def test_a_refusal_just_after_the_time_is_over_is_named_as_such():
    with fakes([], after=SLOW) as (_, client, (fake,)):
        client.session.patience = 0.5
        with pytest.raises(RequestTimeoutError, match=r"found no server for 0.5 s .*does not serve the shard"):
            client.push("t", [1], 1)
        assert len(fake.frames) == 2


def test_ctrl_c_ends_what_was_on_its_way_for_good():
    with fakes([OK, SILENT, SILENT]) as (_, client, (fake,)):
        client.push("t", [1], 1)
        earlier = client.push_async("t", [2], 1)
        client.session.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            client.push("t", [3], 1)
        client.session.interrupted = False
        for _ in range(3):
            client.push("t", [4], 1)
        assert [header.number for header, _, _ in fake.frames] == [0, 1, 2, 3, 4, 5], "none is sent twice"
        with pytest.raises(StoppedError, match="interrupted before it was acknowledged"):
            earlier.result()
        with contextlib.suppress(StoppedError):
            client.wait()
        client.wait()


def test_only_the_lost_part_fails():
    keys = np.arange(64)
    with fakes([], owners=[0, 0, -1, 0]) as (_, client, (fake,)):
        client.session.patience = 3.0
        lost = []
        for key in keys.tolist():
            try:
                assert client.pull("t", [key])[0] == 10 * key
            except DataLostError:
                lost.append(key)
        assert 0 < len(lost) < 64
        shown = ", ".join(map(str, lost[:5]))
        words = rf"table 't': the last copy of shards 2 to 2 is gone, and with it {len(lost)} keys \(.*\); start anew"
        with pytest.raises(DataLostError, match=words) as error:
            client.pull("t", keys)
        assert all(part in str(error.value) for part in (shown.split(", ")[0], "..."))
        before = 64 - len(lost) + 2
        wait_until(lambda: len(fake.frames) == before)  # nobody has waited for the second part of the last pull
        with pytest.raises(DataLostError, match=words):
            client.push("t", keys, 1)
        wait_until(lambda: len(fake.frames) == before + 2)
        sent = [k for _, keys, _ in fake.frames[before:] for k in keys]
        assert sorted(sent + lost) == keys.tolist(), "the others are pushed, once"
        client.push_async("t", keys, 1)
        with pytest.raises(DataLostError, match=words):
            client.wait()


def test_a_closed_client_says_so():
    with fakes([OK, SILENT]) as (_, client, (fake,)):
        client.push("t", [1], 1)
        client.push_async("t", [1], 1)
        wait_until(lambda: len(fake.frames) == 2)
        client.close()
        client.close()
        for use in (lambda: client.push("t", [1], 1), lambda: client.pull("t", [1])):
            with pytest.raises(ClosedError, match="was closed; make a new one"):
                use()
        client.wait()
        wait_until(lambda: not fake.endpoint.connections)


# ---- the tests themselves -------------------------------------------------------------------------------------------

WRONG = [
    (ClientSession, "_start", "request.done and request.error is None", "request.done",
     test_arrays_may_be_used_again_although_nothing_could_be_sent),
    (ClientSession, "_complete", "if not request.done or self._retried(request):", "if False:",
     test_ctrl_c_ends_what_was_on_its_way_for_good),
    (ClientSession, "recover", "self.sleep(", "float(", test_a_server_that_refuses_for_ever_is_asked_now_and_then),
    (ClientSession, "_retried", "and not isinstance(request.error, DataLostError)", "", test_only_the_lost_part_fails),
]  # fmt: skip


@pytest.mark.parametrize(("where", "name", "old", "new", "scenario"), WRONG)
def test_a_wrong_session_is_caught(where, name, old, new, scenario, monkeypatch):
    monkeypatch.setattr(where, name, mutant(getattr(where, name), old, new))
    monkeypatch.setattr("servers.PATIENCE", 1.0)
    with pytest.raises((AssertionError, DPSError, TypeError, pytest.fail.Exception)):
        scenario()


class Closing:
    """A channel that notes whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def failed_by(*errors: DPSError | None) -> list[Request]:
    """Requests that have failed so; None: it could not be sent, because its connection was closed meanwhile."""
    requests = [Request(Closing() if error is not None else None, None, 0) for error in errors]
    for request, error in zip(requests, errors, strict=True):
        request.error = error or ServerGoneError("broken pipe")
    return requests


def test_a_lease_that_is_over_closes_all_channels_of_what_has_failed() -> None:
    """The server has closed the connection of the request that it refused, and others were on their way over it."""
    mixed = failed_by(ServerGoneError("closed"), LeaseError("over"), None)
    assert refused_by_leases(mixed, always)
    assert [request.channel is None or request.channel.closed for request in mixed] == [True] * 3
    for others in (failed_by(), failed_by(ServerGoneError("gone"), MovedError("moved"), None)):
        assert not refused_by_leases(others, always)
        assert not any(request.channel.closed for request in others if request.channel is not None)


def always(request: Request) -> bool:
    return True


def test_a_table_that_a_server_does_not_know_is_asked_of_the_controller() -> None:
    """It was merged, perhaps, while another server had no lease."""
    mixed = failed_by(UnknownTableError("no table number 1"), LeaseError("over"))
    assert not refused_by_leases(mixed, lambda request: isinstance(request.error, LeaseError))
    assert [request.channel.closed for request in mixed] == [False, True]


class Answered:
    """A part of a certified pull of rows of a dense table, whose answer has no rows before its certificate."""

    keys = None

    def __init__(self, *edges: int, span: tuple[int, int]):
        self.shard_map, self.span = SimpleNamespace(edges=edges), span

    def fill(self, body: memoryview) -> int:
        return 0


def answer(part: Answered, certificate: dict[int, list]) -> Request:
    request = Request(None, None, 0)
    request.part, request.body = part, memoryview(encode_json(certificate))
    return request


def test_a_certificate_says_of_two_answers_what_both_have() -> None:
    """Rows 0 to 5 came before the shards were merged; those behind with the answers of the merged shard, of which that
    for row 6 came first. A pull that was cut into chunks has asked twice for rows 7 and 8."""
    before = answer(Answered(0, 3, 6, 9, span=(0, 6)), {0: [[0, [[1, 4, 0], [2, 7, 1]]]], 1: [[3, [[1, 4, 1]]]]})
    ends = [[0, [[1, 5, 0], [2, 7, 1]]], [3, [[1, 5, 0]]]]
    first = answer(Answered(0, 9, span=(6, 7)), {0: [*ends, [6, [[2, 8, 0]]], [7, [[2, 8, 0]]]]})
    later = answer(Answered(0, 9, span=(7, 9)), {0: [*ends, [6, [[2, 9, 0]]], [7, [[1, 6, 0], [2, 9, 0]]]]})
    again = answer(Answered(0, 9, span=(7, 9)), {0: [*ends, [6, [[2, 9, 1]]], [7, [[2, 9, 1], [3, 0, 0]]]]})
    for requests in itertools.permutations([before, first, later, again]):
        certificate = Certificate.read(list(requests))
        assert certificate.edges == (0, 3, 6, 7, 9)
        ops = [{1: (4, 0), 2: (7, 1)}, {1: (4, 1)}, {2: (8, 0)}, {2: (9, 0)}]
        assert certificate.shards == dict(enumerate(ops))


def check_pauses() -> None:
    """Servers that may answer again after some time are found after little more; and are not asked all the time."""
    pauses = [route_changes.pause_before_try(setbacks) for setbacks in range(1, MAX_SETBACKS + 1)]
    waited = list(itertools.accumulate(pauses))
    assert all(pause <= 0.003 + 0.35 * before for before, pause in zip([0.0, *waited], pauses, strict=False))
    assert pauses[-1] == route_changes.pause_before_try(10 * MAX_SETBACKS) == 0.1
    assert sum(before < 0.1 for before in waited) < 12
    assert 0.6 < waited[LEASE_TRIES - 1] < 0.8
    assert LEASE_TRIES < MAX_SETBACKS


def test_pauses_between_tries_grow_with_the_time_that_was_waited() -> None:
    check_pauses()


@pytest.mark.parametrize(
    ("old", "new"), [("RETRY_GROWTH**", "2.0**"), ("RETRY_GROWTH**", "1.0**"), (", RETRY_SEC", ", 9 * RETRY_SEC")]
)
def test_wrong_pauses_are_noticed(old: str, new: str) -> None:
    assert_noticed(route_changes, "pause_before_try", old, new, check_pauses)
