"""Functions are brought to servers that come and go; at the end, each server has all functions that are registered."""

from __future__ import annotations

import collections
import hashlib

import pytest
from oracles import mutant
from test_tables_on_servers import ROUNDS, Cluster, NoLock

from dps.engine.controller import function_procedures
from dps.engine.controller.function_procedures import FunctionProcedures
from dps.errors import DPSError, InputError, LimitError, ServerGoneError


class Functions(Cluster):
    """Servers as sets of functions."""

    def __init__(self, seed: int, servers: int = 2):
        super().__init__(seed, servers)
        self.has: dict[int, set[str]] = {number: set() for number in self.tables}
        self.refuses: set[int] = set()
        self.functions = FunctionProcedures(self.membership, self.up, NoLock())

    def call(self, number: int, method: str, args: tuple) -> object:
        if method != "add_function":
            return super().call(number, method, args)
        lost = 0.0 if self.steady else 0.15
        if not self.membership.servers[number].up or self.random.random() < lost:
            return ServerGoneError("the call was lost")
        if number in self.refuses:
            return DPSError("No module named 'mine'")
        self.has[number].add(args[0])
        return ServerGoneError("the answer was lost") if self.random.random() < lost else None

    def add(self, code: bytes) -> str:
        identity = hashlib.sha256(code).hexdigest()
        self.run(self.functions.add(identity, code))
        return identity


def play(seed: int) -> None:
    cluster = Functions(seed)
    for n in range(6):
        cluster.add(b"%d" % (n % 4))
        for number, server in cluster.membership.servers.items():
            assert not server.ready or cluster.has[number] >= set(cluster.membership.functions)
        cluster.shake()
    cluster.steady = True
    cluster.reach(1.0)
    for _ in range(ROUNDS):
        cluster.run(cluster.maintenance.maintain())
    assert len(cluster.membership.functions) == 4
    for number, server in cluster.membership.servers.items():
        assert server.ready
        assert cluster.has[number] == set(cluster.membership.functions)


@pytest.mark.parametrize("seed", range(30))
def test_at_the_end_all_servers_have_all_functions(seed) -> None:
    play(seed)


def test_a_server_that_misses_a_function_and_stays_ready_is_caught(monkeypatch) -> None:
    wrong = mutant(FunctionProcedures._add, "server.ready = False", "pass")
    monkeypatch.setattr(FunctionProcedures, "_add", wrong)
    with pytest.raises(AssertionError):
        collections.deque(map(play, range(30)), maxlen=0)


def test_what_a_server_cannot_open_is_known_nowhere() -> None:
    cluster = Functions(1)
    cluster.steady = True
    cluster.refuses = {1}
    with pytest.raises(DPSError, match="No module named 'mine'"):
        cluster.add(b"code")
    assert not cluster.membership.functions
    assert all(server.ready for server in cluster.membership.servers.values())


def test_limits(monkeypatch) -> None:
    cluster = Functions(1)
    cluster.steady = True
    with pytest.raises(InputError, match="not those of its hash"):
        cluster.run(cluster.functions.add("0" * 64, b"code"))
    monkeypatch.setattr(function_procedures, "MAX_FUNCTIONS", 2)
    cluster.add(b"1")
    cluster.add(b"2")
    cluster.add(b"2")
    with pytest.raises(LimitError, match="define a function once, not in a loop"):
        cluster.add(b"3")
    monkeypatch.setattr(function_procedures, "MAX_FUNCTIONS", 9)
    monkeypatch.setattr(function_procedures, "MAX_CODE_BYTES", 5)
    with pytest.raises(LimitError, match="Pass data as arguments"):
        cluster.add(b"four")
