"""Unix sockets beside TCP: when they are used, and when a peer has to do without."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import dask
import pytest
from peers import SECRET, Kit, feed, pattern
from servers import wait_until

from dps.engine.wire import connection, sockets
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.link import Link
from dps.engine.wire.sockets import connected_locally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names of sockets that are no files are Linux's")
LISTEN = """
import os, socket, sys
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + sys.argv[1])
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def family(channel) -> int:
    return channel._socket._sock.family


def is_served(channel) -> bool:
    return feed(channel, pattern(100_000, 1)) == {
        "bytes": 800_000,
        "sum": int(pattern(100_000, 1).sum()),
        "aligned": True,
    }


def test_peers_on_one_machine_use_unix_sockets() -> None:
    with Kit() as kit, kit.channels() as (channel,):
        assert family(channel) == socket.AF_UNIX
        assert is_served(channel)
        (connection,) = kit.endpoint.connections
        assert connection.peer == "a process of this machine"


def test_links_use_them_too() -> None:
    up: list[Link] = []
    with Kit() as kit:
        other = Endpoint("other", "127.0.0.1", {})
        try:
            connect = (kit.address, "test", SECRET, up.append, lambda *_: None, lambda _: None)
            kit.endpoint.secrets["test"] = SECRET
            link = other.call(other.connect, *connect)
            while not up:
                assert not link._ended
            assert up[0]._transport.get_extra_info("socket").family == socket.AF_UNIX
        finally:
            other.stop()


def test_a_setting_turns_them_off() -> None:
    with dask.config.set({"dps.unix-sockets": False}), Kit() as kit, kit.channels() as (channel,):
        assert family(channel) == socket.AF_INET
        assert is_served(channel)
    with Kit() as kit, dask.config.set({"dps.unix-sockets": False}), kit.channels() as (channel,):
        assert family(channel) == socket.AF_INET  # each side has its own say


def test_the_name_ends_with_its_endpoint() -> None:
    with Kit() as kit:
        address = kit.address
        sock = connected_locally(address)
        assert sock is not None
        sock.close()
        assert connected_locally(("127.0.0.2", address[1])) is None
    assert connected_locally(address) is None


@contextlib.contextmanager
def taken(monkeypatch, user: str = ""):
    """The name beside every address is one that another process listens at, as another user if one is given."""
    name = f"dps-test-{os.getpid()}"
    monkeypatch.setattr(sockets, "_local_name", lambda address: "\0" + name)
    command = [sys.executable, "-c", LISTEN, name, *([user] if user else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield
        process.communicate()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may run a program as another user"
)
def test_a_name_that_another_user_took_is_not_used(monkeypatch) -> None:
    with taken(monkeypatch, user="65534"), Kit() as kit:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sockets._local_name(kit.address))  # somebody does listen there
        sock.close()
        assert connected_locally(kit.address) is None
        with kit.channels() as (channel,):
            assert family(channel) == socket.AF_INET
            assert is_served(channel)


def test_an_endpoint_does_without_a_name_that_is_taken(monkeypatch) -> None:
    with taken(monkeypatch), Kit() as kit:
        monkeypatch.setattr(sockets, "_local_name", lambda address: None)
        with kit.channels() as (channel,):
            assert is_served(channel)


def test_a_line_that_is_full_is_not_waited_for(monkeypatch) -> None:
    name = f"\0dps-full-{os.getpid()}"
    monkeypatch.setattr(sockets, "_local_name", lambda address: name)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(name)
        listener.listen(0)
        waiting = [connected_locally(("", 0)) for _ in range(3)]
        for sock in filter(None, waiting):
            stack.enter_context(sock)
        assert waiting[-1] is None


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare makes a namespace")
def test_a_container_with_a_network_of_its_own_does_not_find_it() -> None:
    find = (
        "import sys; from dps.engine.wire.sockets import connected_locally;"
        "print(connected_locally(('127.0.0.1', int(sys.argv[1]))) is None)"
    )
    with Kit() as kit:
        command = [sys.executable, "-c", find, str(kit.address[1])]
        assert subprocess.check_output(command, text=True) == "False\n"
        apart = subprocess.run(["unshare", "--net", *command], capture_output=True, text=True)
        if "Operation not permitted" in apart.stderr:
            pytest.skip("this user may not make a namespace")
        assert apart.stdout == "True\n", apart.stderr


def test_an_end_that_is_widened_sends_a_megabyte_before_it_waits():
    """Unless the system's limit for sockets is lower."""
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        sockets.widen(one)
        one.setblocking(False)
        assert one.send(bytes(1 << 22)) >= min(1 << 20, most)


def test_both_ends_are_widened(monkeypatch):
    widened = []
    for room in (sockets, connection):
        monkeypatch.setattr(room, "widen", widened.append)
    with Kit() as kit, contextlib.closing(connected_locally(kit.address)) as sock:
        wait_until(lambda: len(widened) == 2)
        assert [each is sock for each in widened].count(True) == 1, "the other one is of the endpoint"
