"""Optimizers of the user on servers: a push counts on all shards of its request or on none, on all copies."""

from __future__ import annotations

import numpy as np
import pytest
import test_chains
import test_service
from lone_server import LoneServer
from oracles import mutant
from test_service import keyed, ranged, with_versions
from user_optimizers import Averaged, Oracle, Picky, SignSGD

import dps
from dps.errors import FunctionError, NameInUseError
from dps.server.requests import ServerRole
from dps.state.ops import TableSpec
from dps.state.transfer import digest
from dps.testing import Faults, Simulation
from dps.wire import frames
from dps.wire.frames import decode_error, decode_header

KEYED = TableSpec("keyed", dim=2, shards=4, optimizer=Picky(0.5), id=1)
DENSE = TableSpec("dense", rows=40, dim=2, shards=4, optimizer=Picky(0.5), id=2)


def request(spec: TableSpec, kind: int, gradients: np.ndarray, **fields) -> bytes:
    if spec.keyed:
        return keyed(spec, kind, np.arange(len(gradients)), gradients, **fields)
    return ranged(spec, kind, 0, len(gradients), gradients, **fields)


def state_of(server: LoneServer, spec: TableSpec) -> list[str]:
    replicas = server.role.tables[spec.id].replicas
    return [digest(replicas[number].shard) for number in range(spec.shards)]


def answer(data: bytes) -> Exception | None:
    """The error in an answer, None where there is none."""
    header = decode_header(data, 0, 1 << 40)
    return decode_error(data[frames.HEADER_SIZE :]) if header.kind == frames.ERROR else None


@pytest.mark.parametrize("spec", [KEYED, DENSE], ids=["keyed", "dense"])
@pytest.mark.parametrize("backup", [False, True])
def test_a_push_counts_on_all_shards_or_on_none(spec, backup) -> None:
    server = LoneServer([spec], plain=True, backup=backup)
    good = np.ones((40, 2), np.float32)
    versions = np.ones(4, np.int64)
    frame = request(spec, frames.PUSH, good, trainer=1, number=1, epoch=1)
    bad = good.copy()
    bad[39] = 13  # of dense rows, that is the last shard
    wrong = request(spec, frames.PUSH, bad, trainer=1, number=1, epoch=1)
    if backup:
        frame, wrong = (_forwarded(each, versions) for each in (frame, wrong))
    before = state_of(server, spec)
    error = answer(server.take(wrong))
    assert isinstance(error, FunctionError)
    assert "Picky.update failed: ArithmeticError: thirteen" in str(error)
    assert state_of(server, spec) == before
    assert answer(server.take(frame)) is None, "the server goes on"
    after = state_of(server, spec)
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert answer(server.take(frame)) is None, "a repeat"
    assert state_of(server, spec) == after


def _forwarded(frame: bytes, versions: np.ndarray) -> bytes:
    header = decode_header(frame, 0, 1 << 40)
    frame = frames.encode_header(header._replace(kind=frames.REPLICATE)) + frame[frames.HEADER_SIZE :]
    return with_versions(frame, versions)


VARIANTS = [
    ("_take_push", "shard.prepared(part.op(op, values))", "part.op(op, values)", False),
    ("_take_op", "replica.shard.prepared(part.op(op, values))", "part.op(op, values)", True),
]


@pytest.mark.parametrize(("name", "old", "new", "backup"), VARIANTS)
def test_a_push_applied_half_is_noticed(monkeypatch, name, old, new, backup) -> None:
    monkeypatch.setattr(ServerRole, name, mutant(getattr(ServerRole, name), old, new))
    for spec in (KEYED, DENSE):
        with pytest.raises(AssertionError):
            test_a_push_counts_on_all_shards_or_on_none(spec, backup)


def test_pulls_are_answered_in_the_compiled_step() -> None:
    server = LoneServer([KEYED], plain=True)
    server.take(request(KEYED, frames.PUSH, np.ones((5, 2), np.float32)))
    assert (server.answered, server.declined) == (0, 1)
    assert answer(server.take(keyed(KEYED, frames.PULL, np.arange(5)))) is None
    assert (server.answered, server.declined) == (1, 1)


MINE = [
    TableSpec("keyed", dim=2, shards=4, optimizer=Averaged(0.1), init=dps.Normal(1.0, seed=3), finite=True, id=1),
    TableSpec("sums", rows=50, dim=2, shards=2, optimizer=Averaged(0.1), aggregate="mean", id=2),
    TableSpec("copies", rows=50, dim=2, shards=2, optimizer=SignSGD(0.1), copies=2, id=3),
    TableSpec("dps's own", dim=2, shards=2, optimizer=dps.SGD(0.1), id=4),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN in tables that take it
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_leave_replicas_equal(monkeypatch, seed) -> None:
    for module in (test_service, test_chains):
        monkeypatch.setattr(module, "SPECS", MINE)
    test_service.play(seed)
    test_service.follow(seed)
    test_chains.play(seed)


# ---- parameter servers with faults


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [None, 40])
def test_with_faults_the_rows_are_those_of_one_process(seed, rows) -> None:
    """One trainer, two copies, servers that come and go: every push counts once."""
    oracle = Oracle(TableSpec("w", rows, 3, "float64", optimizer=Averaged(0.25)), Averaged(0.25))

    def pushes():
        rng = np.random.default_rng(seed)
        for _ in range(30):
            keys = rng.integers(0, 40, 12)
            yield keys, rng.integers(-4, 5, (12, 3)) / 4

    def train(trainer, partitions):
        for _ in trainer.iterate(partitions):
            trainer.push("w", *next(left))

    left = pushes()
    with Simulation(seed, servers=3, trainers=1, copies=2, faults=Faults(crashes=0.5, moves=0.5, repeats=0.2)) as sim:
        sim.table("w", 3, rows=rows, dtype="float64", optimizer=Averaged(0.25))
        sim.run(train, [*range(30)])
        got = sim.client().pull("w", np.arange(40))
    for clock, (keys, gradients) in enumerate(pushes()):
        oracle.push(keys, gradients, clock)
    np.testing.assert_array_equal(got, oracle.values(np.arange(40)))


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_pushes_of_a_clock_are_one_step(aggregate) -> None:
    def train(trainer, partitions):
        for n in trainer.iterate(partitions):
            trainer.push("w", [0, n], np.full((2, 1), float(n)))

    with Simulation(3, servers=2, trainers=2, copies=2) as sim:
        sim.table("w", optimizer=SignSGD(1.0), aggregate=aggregate, dtype="float64")
        sim.run(train, [1, 2, 3, 4])
        steps = sim.client().pull("w", np.arange(5))
    # At clock 0 the rate is 1, at clock 1 it is 1/2. Each key but 0 is pushed once.
    assert steps[0] == -1.5
    assert sorted(steps[1:].tolist()) == [-1.0, -1.0, -0.5, -0.5]


def test_an_exception_reaches_the_trainer_and_its_run_ends() -> None:
    def train(trainer, partitions):
        for n in trainer.iterate(partitions):
            trainer.push("w", [1], [float(n)])

    with Simulation(1, servers=2, trainers=1, copies=2) as sim:
        sim.table("w", optimizer=Picky(1.0))
        with pytest.raises(FunctionError, match=r"shard \d of table 'w': Picky.update failed: ArithmeticError"):
            sim.run(train, [1, 13, 2])
        assert sim.client().pull("w", [1]).tolist() == [0.0], "1, less the rate"
        sim.run(train, [5])


def test_a_class_that_servers_cannot_open_makes_no_table() -> None:
    class Stranger(SignSGD):
        def __reduce__(self):
            return open_here, ()

    with Simulation(1, servers=2) as sim:
        with pytest.raises(FunctionError, match="cannot open optimizer Stranger: ImportError: not on a server"):
            sim.table("w", optimizer=Stranger())
        sim.table("w", optimizer=SignSGD())
        assert sim.table("w", optimizer=SignSGD(), exist_ok=True).optimizer.kind == "SignSGD"
        with pytest.raises(NameInUseError, match=r"optimizer is SignSGD\(lr=0.1\), not SignSGD\(lr=0.2\)"):
            sim.table("w", optimizer=SignSGD(0.2), exist_ok=True)
        with pytest.raises(NameInUseError, match=r"the code of optimizer SignSGD\(lr=0.1\) is another"):
            sim.table("w", optimizer=_of_other_code(), exist_ok=True)


def open_here() -> None:
    raise ImportError("not on a server")


def _of_other_code() -> dps.Optimizer:
    class SignSGD(dps.Optimizer):
        lr: float = 0.1

        def update(self, values, state, gradients, clock):
            values -= gradients

    return SignSGD()
