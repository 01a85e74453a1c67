"""The data plane over TLS: the tests of the plain data plane; and peers without a certificate are refused."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import ssl
import time
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import servers as servers_module
from client_contract import *  # noqa: F403  (the tests of a client, on the servers of this module)
from distributed.security import Security
from peers import EAT, Kit, Raw, feed, framed, impostor
from servers import Servers

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import HEADER_SIZE
from dps.errors import AccessDeniedError, DPSError, ServerGoneError

pytestmark = [pytest.mark.tls, pytest.mark.thorough]  # test_chaos.py has a cluster with TLS in `make test`
globals().pop("test_a_client_travels_as_its_ticket")  # two objects of Security are never equal
PATIENCE = 1.0  # seconds, of `dps.timeouts.connect`
IN_TIME = 30.0  # busy as the machine may be; not the 60 s of `dps.timeouts.request`


@pytest.fixture(scope="module")
def security():
    return Security.temporary()


@contextlib.contextmanager
def encrypted(security: Security):
    """Servers and their clients speak TLS."""
    listen = security.get_listen_args("worker")["ssl_context"]
    connect = security.get_connection_args("worker")["ssl_context"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers_module, "Endpoint", functools.partial(Endpoint, tls=listen, connecting=connect))
        patch.setattr(servers_module, "Ticket", functools.partial(servers_module.Ticket, security=security))
        yield


@pytest.fixture(scope="module")
def clusters(security):
    """One, two and three servers."""
    with encrypted(security), Servers(1) as one, Servers(2) as two, Servers(3) as three:
        yield {1: one, 2: two, 3: three}


def test_that_these_were_tests_of_tls(clusters) -> None:
    servers = clusters[1]
    servers.table(TableSpec("secret", rows=4, dtype="int64"))
    secret, seen = 0x1122334455667788, bytearray()
    send = ssl.SSLSocket.send
    with pytest.MonkeyPatch.context() as patch, servers.client() as client:
        patch.setattr(ssl.SSLSocket, "send", lambda sock, data: seen.extend(data) or send(sock, data))
        client.push("secret", [1], [secret])
        assert client.pull("secret").tolist() == [0, secret, 0, 0]
    assert secret.to_bytes(8, "little") in seen, "not by way of TLS"


# ---- refused peers --------------------------------------------------------------------------------------------------


@pytest.fixture
def contexts(security):
    """(listening, connecting) of one authority."""
    return security.get_listen_args("worker")["ssl_context"], security.get_connection_args("client")["ssl_context"]


@pytest.fixture
def patience(caplog):
    caplog.set_level(logging.CRITICAL)
    with dask.config.set({"dps.timeouts.connect": f"{PATIENCE} s"}):
        yield


@contextlib.contextmanager
def refused(words: str, error: type[DPSError] = ServerGoneError):
    """It is, with these words and in time."""
    began = time.monotonic()
    with pytest.raises(error, match=words):
        yield
    assert time.monotonic() - began < IN_TIME


def healthy(kit: Kit, tls) -> bool:
    with kit.channels(1, tls) as (channel,):
        return feed(channel, np.ones(100_000, np.int64))["sum"] == 100_000


def test_a_plain_client_is_refused(contexts, patience) -> None:
    listen, connect = contexts
    with Kit(listen) as kit:
        with refused("the peer has not greeted in time|the peer closed", DPSError):
            kit.channel()
        with Raw(kit.address) as raw:  # one that does not wait for a greeting
            raw.send(framed(EAT, bytes(8)) * 100)
            answer = raw.take(1 << 12)
            assert b"DP" not in answer[:2]
            assert len(answer) < 100, "at most TLS's own alert"
        assert healthy(kit, connect)


def test_a_client_of_another_authority_is_refused(contexts, patience) -> None:
    listen, connect = contexts
    stranger = Security.temporary().get_connection_args("client")["ssl_context"]
    with Kit(listen) as kit:
        with refused("the peer at .*CERTIFICATE_VERIFY_FAILED.*certificates of the same authority", AccessDeniedError):
            kit.channel(stranger)
        assert healthy(kit, connect)


def test_a_client_that_trusts_anybody_is_still_refused(contexts, patience) -> None:
    """It is the endpoint that asks for a certificate of its own authority, and tells why it is not content."""
    listen, connect = contexts
    other = Security.temporary().get_connection_args("client")["ssl_context"]
    other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with Kit(listen) as kit:
        for context, words in (other, "unknown ca"), (bare, "certificate required"):
            for version in ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2:
                context.maximum_version = version
                words = "handshake failure" if (context, version) == (bare, ssl.TLSVersion.TLSv1_2) else words
                with refused(f"the peer at .*alert {words}.*certificates of the same authority", AccessDeniedError):
                    kit.channel(context)
        assert not kit.endpoint.connections
        assert healthy(kit, connect)


def test_a_tls_client_and_a_plain_endpoint(contexts, patience) -> None:
    _, connect = contexts
    with Kit() as kit:
        with refused("the peer at 127.0.0.1:[0-9]+ and we cannot speak TLS", AccessDeniedError):
            kit.channel(connect)
        assert healthy(kit, None)


def test_an_endpoint_that_does_not_shake_hands(contexts, patience) -> None:
    """It takes the connection and says nothing: the client gives up in time."""
    _, connect = contexts
    with impostor(lambda raw: raw.take(1 << 20)) as address, refused("the peer cannot be reached.*timed out"):
        Kit.channel(SimpleNamespace(address=address), connect)


def test_silent_handshakes_do_not_keep_others_out(contexts, patience) -> None:
    listen, connect = contexts
    with Kit(listen) as kit, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(Raw(kit.address)) for _ in range(50)]
        half = [stack.enter_context(Raw(kit.address)) for _ in range(50)]
        for raw in half:
            raw.send(b"\x16\x03\x01\x02\x00\x01")
        began = time.monotonic()
        assert healthy(kit, connect)
        for raw in (*silent, *half):
            assert len(raw.take(HEADER_SIZE)) < HEADER_SIZE
        assert time.monotonic() - began < IN_TIME


@pytest.mark.thorough
def test_servers_refuse_a_client_without_tls_and_one_of_another_authority(security, patience) -> None:
    """The same by way of the client that users have."""
    with encrypted(security), Servers(1) as servers:
        servers.table(TableSpec("t", rows=4))
        with servers.client() as client:
            client.push("t", [1], [1.0])
        for other in (None, Security.temporary()):
            with dask.config.set({"dps.timeouts.request": "1 s"}), servers.client() as client:  # so long it tries again
                client.session.ticket = dps.Ticket("s", client.ticket.controller, servers_module.SECRET, other)
                with refused("server 0", DPSError):
                    client.pull("t")
        with servers.client() as client:
            assert client.pull("t").tolist() == [0, 1, 0, 0]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("trusting", "words"), [(False, "CERTIFICATE_VERIFY_FAILED"), (True, "alert unknown ca")])
def test_a_certificate_that_does_not_verify_is_not_tried_again(security, trusting, words) -> None:
    """Neither theirs nor ours."""
    context = Security.temporary().get_connection_args("client")["ssl_context"]
    if trusting:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stranger = SimpleNamespace(get_connection_args=lambda role: {"ssl_context": context})
    with encrypted(security), Servers(1) as servers:
        servers.table(TableSpec("t", rows=4))
        with dask.config.set({"dps.timeouts.request": "60 s"}), servers.client() as client:
            client.session.ticket = dps.Ticket("s", client.ticket.controller, servers_module.SECRET, stranger)
            with pytest.raises(AccessDeniedError, match=rf"server 0 .* at .*{words}"):
                client.pull("t")


def test_why_a_handshake_failed_is_told_once_and_then_it_has(contexts, patience) -> None:
    """A peer that ignores the refusal and stays is disconnected, as a peer without a handshake is."""
    listen, connect = contexts
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with Kit(listen) as kit:
        for more in b"more", b"":
            with contextlib.closing(bare.wrap_socket(socket.create_connection(kit.address, 10))) as sock:
                plain = socket.socket(fileno=sock.detach())
                with contextlib.closing(plain):
                    plain.settimeout(IN_TIME)
                    plain.sendall(more)
                    while plain.recv(1 << 12):
                        pass
        assert healthy(kit, connect)


def test_a_handshake_that_breaks_off_may_be_tried_again(contexts, patience) -> None:
    """As when a server is restarted just then."""
    _, connect = contexts
    with impostor(lambda raw: None) as address, refused("the peer cannot be reached"):
        Kit.channel(SimpleNamespace(address=address), connect)


def test_a_record_cut_short_ends_one_connection_only(contexts, patience) -> None:
    """Noise in the middle of an encrypted connection: TLS notices, the endpoint closes it, others go on."""
    listen, connect = contexts
    with Kit(listen) as kit, Raw(kit.address, connect) as raw:
        raw.introduce().send(framed(EAT, bytes(8)))
        assert raw.frame() is not None
        plain = socket.socket(fileno=raw.sock.detach())
        with contextlib.closing(plain):
            plain.settimeout(10)
            plain.sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
            while plain.recv(1 << 12):
                pass
        assert healthy(kit, connect)


@dps.function(changes=True)
def turned(rows, by):
    rows.values[:] = rows.values[:, ::-1] * by
    return rows.values.sum(axis=0)


@pytest.mark.leaks_ok("the servers of this module keep the threads in which functions run")
@pytest.mark.parametrize("keyed", [False, True])
def test_functions_and_deletions_over_encrypted_connections(clusters, keyed) -> None:
    """Prepared on all servers and committed; results, effects and copies of several frames of TLS."""
    servers, count = clusters[3], 6000
    for endpoint, role in servers.alive():
        endpoint.call(role.functions.add, turned.id, turned.code)
    shards = 4 if keyed else 6
    servers.table(TableSpec("t", rows=None if keyed else count, dim=16, dtype="float64", shards=shards, copies=2))
    values = np.random.default_rng(0).integers(0, 9, (count, 16)).astype(float)
    with servers.client() as client:
        client.push("t", range(count), values)
        parts = client.call(turned, "t", by=2.0)
        np.testing.assert_array_equal(np.sum(parts, axis=0), 2 * values[:, ::-1].sum(axis=0))
        np.testing.assert_array_equal(client.pull("t", range(count)), 2 * values[:, ::-1])
        client.call(turned, "t", [1, 4000], by=0.5)
        client.delete("t", range(10, 20))
        expected = 2 * values[:, ::-1]
        expected[[1, 4000]], expected[10:20] = values[[1, 4000]], 0
        np.testing.assert_array_equal(client.pull("t", range(count)), expected)
    assert not servers.differences()
