"""Programs travel as hashes once servers know their plans; a server that has forgotten one gets it again."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.arrays.server_store import run_program
from dps.engine.client import functions
from dps.engine.client.functions import FunctionCaller
from dps.engine.wire import values
from dps.engine.wire.remembered import Memory, Remembered
from dps.errors import FunctionError, UnknownFunctionError


@pytest.fixture(params=[1, 2], ids=["1 server", "2 servers"])
def ps(request):
    count = request.param
    with (
        dps.LocalCluster(servers=count, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=count, copies=count) as ps,
    ):
        yield ps


def sent_by(ps) -> int:
    return sum(traffic.sent for traffic in ps.client().session.meter.servers.values())


def forget(monkeypatch) -> None:
    """What a server does that has taken over, or that other programs have made forget."""
    monkeypatch.setattr(values, "MEMORY", Memory())


def test_a_plan_travels_once(ps) -> None:
    a, b = dps.arrays.on(ps).asarray(np.arange(10.0)), dps.arrays.on(ps).asarray(np.ones(10))
    lengths = []
    for factor in (2.0, 3.0, 4.0):
        before = sent_by(ps)
        a += factor * b * b / (b + 1)
        lengths.append(sent_by(ps) - before)
    assert lengths[0] > lengths[1] + 40 * dps.arrays.on(ps).space.store.shards
    assert lengths[1] == lengths[2]
    np.testing.assert_array_equal(a.to_numpy(), np.arange(10) + 4.5)


def check_forgotten(ps, monkeypatch) -> None:
    """Each change counts once, under one number, also where it was refused at first."""
    a, origin = dps.arrays.on(ps).zeros(10), ps.client().session.acting
    numbers = []
    for n in range(4):
        if n % 2:
            forget(monkeypatch)
        before = origin.number
        a += 1.0
        numbers.append(origin.number - before)
        assert a.to_numpy().tolist() == [n + 1.0] * 10
        forget(monkeypatch)
        assert a.sum() == 10 * (n + 1)
    assert numbers == [1] * 4


def test_a_server_that_has_forgotten_gets_it_again(ps, monkeypatch) -> None:
    check_forgotten(ps, monkeypatch)


MUTANTS = [
    ("_carry_out", "if not running.shortened:", "if True:"),
    (
        "_carry_out",
        "running.message, running.shortened = msgspec.structs.replace(running.message, arguments=whole), False",
        "raise",
    ),
    ("_begin", "type(each) is Remembered and each.key in self._known", "False"),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_wrong_variants_are_noticed(ps, name, old, new, monkeypatch) -> None:
    monkeypatch.setattr(FunctionCaller, name, mutant(getattr(FunctionCaller, name), old, new))
    with pytest.raises((AssertionError, UnknownFunctionError)):
        check_forgotten(ps, monkeypatch)


def test_what_a_client_expects_has_a_limit(ps, monkeypatch) -> None:
    monkeypatch.setattr(functions, "MAX_KNOWN", 3)
    a = dps.arrays.on(ps).asarray(np.ones(4))
    for _ in range(2):
        for power in range(2, 8):
            assert sum([a] * power).sum() == 4 * power


def test_a_plan_that_cannot_be_read_changes_nothing_and_holds_nothing(ps) -> None:
    a = dps.arrays.on(ps).asarray(np.ones(4))
    pool, client = a.node.block.pool, ps.client()
    for plan in (Remembered(b"\xc1"), Remembered(b"\x90"), b"no plan"):
        with pytest.raises(FunctionError, match="no row was changed"):
            client.call(run_program, pool.table, layout=list(pool.layout), plan=plan, operands=[[0], [0], []])
        a += 1  # a shard that were still held would let this wait for ever
    assert a.to_numpy().tolist() == [4.0] * 4
