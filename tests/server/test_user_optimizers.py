"""Optimizers of the user on servers: a push counts on all shards of its request or on none, on all copies."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import dask
import function_gates
import numpy as np
import pytest
import test_chains
import test_service
from lone_server import LoneServer
from oracles import mutant
from servers import Servers
from test_service import keyed, ranged
from user_optimizers import Averaged, Oracle, Picky, SignSGD

import dps
from dps.engine.server import changes
from dps.engine.server.requests import ServerRole
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import Shard
from dps.engine.state.transfer import digest
from dps.engine.wire import frames
from dps.engine.wire.frames import decode_error, decode_header
from dps.errors import DPSError, FunctionError, LimitError, NameInUseError
from dps.testing import Faults, Simulation

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
def test_a_push_counts_on_all_shards_or_on_none(spec) -> None:
    server = LoneServer([spec], plain=True)
    good = np.ones((40, 2), np.float32)
    frame = request(spec, frames.PUSH, good, trainer=1, number=1, epoch=1)
    bad = good.copy()
    bad[39] = 13  # of dense rows, that is the last shard
    wrong = request(spec, frames.PUSH, bad, trainer=1, number=1, epoch=1)
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


def test_a_push_applied_half_is_noticed(monkeypatch) -> None:
    wrong = mutant(ServerRole._take_push, "shard.prepared(part.op(op, values))", "part.op(op, values)")
    monkeypatch.setattr(ServerRole, "_take_push", wrong)
    for spec in (KEYED, DENSE):
        with pytest.raises(AssertionError):
            test_a_push_counts_on_all_shards_or_on_none(spec)


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


# ---- copies of rows that no two machines would make alike


class Moody(dps.Optimizer):
    """Makes something else at each call, on each machine; counts the calls in `function_gates.kept`."""

    def init(self, dim):
        return 1

    def update(self, values, state, gradients, clock):
        import function_gates

        if (gradients == 13).any():
            raise ArithmeticError("thirteen")
        function_gates.kept.append(len(values))
        values += gradients * np.random.default_rng().random(values.shape)
        state += np.random.default_rng().random(state.shape)


COMMON = {"dim": 2, "shards": 2, "dtype": "float64", "optimizer": Moody()}
TABLES = {
    "keyed": TableSpec("w", copies=2, init=dps.Normal(1.0, seed=1), **COMMON),
    "dense": TableSpec("w", rows=40, copies=3, **COMMON),
    "sums": TableSpec("w", copies=3, aggregate="sum", **COMMON),
    "means": TableSpec("w", rows=40, copies=2, aggregate="mean", **COMMON),
}


@pytest.fixture
def servers():
    function_gates.reset()
    with Servers(3) as made:
        yield made


def train(client: dps.Client, spec: TableSpec, clocks: range) -> None:
    """Pushes of all kinds at these clocks, and some without one."""
    for clock in clocks:
        client.session.own.clock, client.session.own.number = clock, 0
        client.push("w", [1, 2, 3, 39], np.full((4, 2), clock + 1.0))
        if spec.aggregate is None:
            assert client.push_pull("w", [2, 30], np.ones((2, 2))).shape == (2, 2)
        if not spec.keyed:
            client.push_async("w", slice(5, 38), np.ones((33, 2)))
        client.add("w", [1, 8], np.ones((2, 2)))
        client.pull("w", [1])
    client.wait()


@pytest.mark.parametrize("kind", TABLES)
def test_copies_have_the_rows_that_the_primary_has_made(servers, kind) -> None:
    spec = servers.table(TABLES[kind], owners=[0, 1])
    with servers.client() as client:
        train(client, spec, range(3))
        servers.settle()
        assert servers.differences() == []
        calls = len(function_gates.kept)
        servers.join("w", 0, 3 - 1 if spec.copies == 2 else servers.start())
        train(client, spec, range(3, 5))
        assert servers.differences() == []
        assert len(function_gates.kept) > calls
        before = client.pull("w", np.arange(40))
        servers.kill(0)
        np.testing.assert_array_equal(client.pull("w", np.arange(40)), before)
        train(client, spec, range(5, 7))
        servers.settle()
        assert servers.differences() == []


def test_only_the_primary_runs_code_of_the_user(servers) -> None:
    servers.table(TABLES["dense"], owners=[0, 1])
    with servers.client() as client:
        for _ in range(5):
            client.push("w", [1, 39], np.ones((2, 2)))
    servers.quiet()
    assert function_gates.kept == [1] * 10, "one for each shard of each push, with three copies"


def test_while_a_joiner_is_fed_it_gets_the_rows_of_pushes(servers) -> None:
    servers.table(dataclasses.replace(TABLES["keyed"], copies=1), owners=[0, 0])
    feeder = servers.servers[0].relay
    feeder.piece, feeder.rate = 1000, 4e5  # bytes, and bytes a second: so that many pushes come between
    with servers.client() as client:
        client.push("w", np.arange(3000), np.ones((3000, 2)))
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(servers.join, "w", 0, 1)
            rng = np.random.default_rng(0)
            while not joining.done():
                keys = rng.choice(4000, 20, replace=False)
                client.push_async("w", keys, np.ones((20, 2)))
                client.delete("w", keys[:2])
            joining.result()
    assert servers.differences() == []


@pytest.mark.parametrize("rows", [None, 40])
def test_sums_that_the_optimizer_refuses_are_lost_on_all_copies(servers, rows) -> None:
    servers.table(TableSpec("w", rows=rows, copies=2, aggregate="sum", **COMMON), owners=[0, 0])
    with servers.client() as client:
        client.session.own.clock = 0
        client.push("w", [1, 2], np.full((2, 2), 13.0))
        before = client.pull("w", [1, 2])
        client.session.own.clock, client.session.own.number = 1, 0
        np.testing.assert_array_equal(client.pull("w", [1, 2]), before)
        assert servers.differences() == []
        for _ in range(2):
            with pytest.raises(FunctionError, match="the pushes of clock 0 are lost"):
                client.push("w", [1, 2], np.ones((2, 2)))
            servers.kill(0) if not servers.servers[0].stopped else None


@pytest.mark.parametrize("aggregate", [None, "sum"])
def test_more_rows_than_a_frame_takes_are_refused_before_they_count(aggregate) -> None:
    with dask.config.set({"dps.limits.frame": 1 << 16}), Servers(2) as servers:
        servers.table(TableSpec("w", copies=2, aggregate=aggregate, **COMMON | {"shards": 1}))
        with servers.client() as client:
            client.session.own.clock = 0
            client.push("w", np.arange(500), np.ones((500, 2)))
            before = client.pull("w", np.arange(3000))
            with pytest.raises(LimitError, match=r"rows, \d+ bytes, and its copies take 65536 at once.*more shards"):
                client.push("w", np.arange(1000, 3000), np.ones((2000, 2)))
            np.testing.assert_array_equal(client.pull("w", np.arange(3000)), before)
            client.session.own.number += 1
            client.push("w", [7], np.ones((1, 2)))
        servers.settle()
        assert servers.differences() == []


WRONG = {
    "backups step themselves": (changes, "rows_after", "if op.after is not None", "if False"),
    "sums are stepped by each copy": (Shard, "close", "if step is None or step.after is None", "if True"),
    "pushes close clocks on each copy": (
        ServerRole,
        "_take_push",
        "self.close_before(part.replica, header.clock)",
        "pass",
    ),
    "closed sums stay on the copies": (Shard, "carry_out", "op.rule == ROWS and SteppedOp.matches(op)", "False"),
    "a failure stays with the primary": (Shard, "close", "CloseOp(op.clock, FAILED).op()", "CloseOp(op.clock, 2).op()"),
}


@pytest.mark.parametrize("name", WRONG)
def test_copies_that_differ_are_noticed(monkeypatch, name) -> None:
    owner, method, old, new = WRONG[name]
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))

    def notices(check, *args) -> bool:
        function_gates.reset()
        try:
            with Servers(3) as servers:
                check(servers, *args)
        except (AssertionError, DPSError, pytest.fail.Exception):
            return True
        return False

    monkeypatch.setattr("servers.PATIENCE", 2.0)
    checks = [(test_copies_have_the_rows_that_the_primary_has_made, kind) for kind in TABLES]
    assert any(
        notices(*check) for check in [(test_sums_that_the_optimizer_refuses_are_lost_on_all_copies, None), *checks]
    )


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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("aggregate", [None, "sum"])
def test_with_faults_copies_are_equal_whatever_the_optimizer_makes(seed, aggregate) -> None:
    """At rest the simulation compares all copies."""

    def train(trainer, partitions):
        for _ in trainer.iterate(partitions):
            trainer.push("w", [1, 7, trainer.clock], np.ones((3, 1)))
            if aggregate is None:
                trainer.push_pull("w", [7], [1.0])

    faults = Faults(crashes=0.5, moves=0.5, breaks=1.0, repeats=0.2)
    with Simulation(seed, servers=3, trainers=2, copies=2, faults=faults, compute=0.05) as sim:
        sim.table("w", dtype="float64", optimizer=Moody(), aggregate=aggregate)
        sim.run(train, [*range(40)])
        sim.rest()


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
        with pytest.raises(
            FunctionError, match="optimizer Stranger cannot be opened here: ImportError: not on a server"
        ):
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
