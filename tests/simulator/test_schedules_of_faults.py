"""Random schedules: servers crash, stop, are cut off and replaced, trainers are run again, and every op counts once."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from compiled import put_variant
from expected_contents import ExpectedContents, ExpectedTable
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses
from verdicts import assert_caught, problems

from dps.engine.client.session import ClientSession
from dps.engine.controller.runs import Runs
from dps.engine.coordination.liveness import Liveness
from dps.engine.server.dumps import Dumps
from dps.engine.server.heartbeat import Heartbeat
from dps.engine.server.replicas import FeedsOfJoiner, JoinerFeed
from dps.engine.server.replication import Relay
from dps.engine.server.requests import ServerRole
from dps.engine.state.ops import TableSpec
from dps.engine.state.transfer import Joining
from dps.engine.training.participant import Participant
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Placement, ShardPlace
from dps.errors import InputError, ServerGoneError, StoppedError
from dps.testing import Faults, Simulation

SCHEDULES = 200


# ---- right


@pytest.mark.quick(2)
@pytest.mark.parametrize("part", range(4))
def test_every_op_counts_once_whatever_happens(part):
    assert not problems(check_schedule, SCHEDULES, part, parts=4)


def test_the_schedules_hold_all_that_can_go_wrong():
    schedules = [FaultSchedule.draw(seed) for seed in range(1000)]
    kinds = {kind for schedule in schedules for _, kind in schedule.faults.plan}
    assert kinds == {"breaks", "partitions", "cuts", "half_cuts", "stops", "crashes", "twins", "moves"}
    assert {schedule.copies for schedule in schedules} == {1, 2, 3}
    assert {schedule.staleness for schedule in schedules} == {0, 1, 2, float("inf")}
    assert len({dataclasses.replace(schedule, seed=0) for schedule in schedules}) == 1000


SCRIPT = """
import logging, sys
sys.path[:0] = ["tests/simulator"]
from fault_schedules import check_schedule
logging.disable()
print(*(check_schedule(seed) for seed in range(20, 26)))
"""


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_trace_in_every_process():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "DASK_DPS__SCHEDULER__GRACE": "0 s"}  # as here
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.split()

    here = [check_schedule(seed) for seed in range(20, 26)]
    assert run("1") == run("2") == here
    assert len(set(here)) == 6


def thousand(seed):
    """A run of a thousand trainers with faults; what they and the table hold in the end."""

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=5):
            if trainer.number % 10 == 0:
                trainer.push("sum", [trainer.number % 7], 1)
        return trainer.clock

    faults = Faults(slow=0.05, slowness=3.0, plan=((0.05, "crashes"), (0.1, "breaks"), (0.12, "crashes")), restart=0.1)
    with Simulation(seed, servers=3, trainers=1000, copies=2, compute=0.05, faults=faults) as sim:
        sim.table("sum", dtype="int64")
        assert sim.run(work, range(1000), staleness=2) == [5] * 1000
        sim.rest()
        assert sim.client().pull("sum", range(7)).sum() == 500
        return sim.digest()


def test_a_thousand_trainers_with_faults():
    thousand(1)


@pytest.mark.slow
def test_a_thousand_trainers_do_the_same_again():
    assert thousand(1) == thousand(1) != thousand(2)


def test_a_dump_that_comes_after_its_transfer_was_given_up_leaves_no_copy():
    """Server 2 was cut off from server 1, which was to bring it a shard: by the time it heard of that, another had."""

    def work(sim, schedule, losses):
        draw = random.Random(f"work {schedule.seed}")
        specs = []
        for name in ("a", "b")[: draw.choice((1, 1, 2))]:
            rows, shards = draw.choice(((None, 1), (None, 2), (None, 4), (9, 1), (9, 3)))
            aggregate = "sum" if schedule.staleness == 0 and draw.random() < 0.4 else None
            made = {"rows": rows, "dtype": "int64", "aggregate": aggregate, "shards": shards}
            specs.append(sim.table(name, schedule.trainers, **made))
        expected = ExpectedContents(draw, specs, schedule.trainers, schedule.clocks, schedule.staleness)
        skipping = draw.random() < 0.5
        sim.run(expected.train, range(schedule.trainers), staleness=schedule.staleness, args=(skipping,))
        sim.rest()
        expected.close(sim.client())

    check_schedule(809536, work)


def test_an_old_primary_sends_no_op_of_a_shard_under_the_epoch_that_takes_the_shard_away():
    """Server 0 was cut off, and loses shards 0 and 1 by one placement while ops on both are unconfirmed.

    The ops of shard 1 were sent again under the new epoch, when shard 0 was given up. Server 1, by then the primary of
    both, found no fault with that epoch, and took an op of a retired origin.
    """
    check_schedule(78778)


def test_a_failure_shows_its_schedule_and_trace():
    def wrong(sim, schedule, losses):
        sim.table("t")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as told:
        check_schedule(5, wrong)
    (note,) = told.value.__notes__
    assert "FaultSchedule(seed=5" in note
    assert "--trace 5" in note
    assert any("SERVE" in line for line in told.value.trace)


# ---- single troubles


def marking(trainer, partitions, clocks=6):
    for _ in trainer.iterate([np.zeros(1)], epochs=clocks):
        trainer.push("w", np.arange(20), 1)
        assert trainer.pull("w", [3])[0] > trainer.clock
    return trainer.clock


def chains(sim):
    return [p.chain for p in sim._controller.membership.places["w"]]


def test_a_server_that_crashes_is_replaced():
    with Simulation(3, servers=3, trainers=2, copies=2, compute=0.3, faults=Faults(restart=0.2)) as sim:
        sim.table("w", dtype="int64")
        sim.crash("server-0", at=0.5)
        assert sim.run(marking, range(2)) == [6, 6]
        sim.rest()
        assert {n for chain in chains(sim) for n in chain} == {1, 2, 3}
        assert sim.client().pull("w", np.arange(20)).tolist() == [12] * 20
        sim.crash("server-1", silent=True)
        sim.sleep(5.0)
        sim.rest()
        assert sim.client().pull("w", np.arange(20)).tolist() == [12] * 20


def test_servers_come_and_go_during_a_run():
    with Simulation(4, servers=2, trainers=2, copies=2, compute=0.5) as sim:
        sim.table("w", dtype="int64")

        def change(sim):
            sim.scale(4)
            sim.retire("server-0")

        sim._at(0.2, lambda: change(sim))
        sim._at(2.0, lambda: sim.scale(2))
        assert sim.run(marking, range(2), kwargs={"clocks": 12}) == [12, 12]
        sim.sleep(3.0)
        sim.rest()
        there = {n for chain in chains(sim) for n in chain}
        assert len(there) == 2
        assert 0 not in there
        assert sim.parties["server-0"].dead
        assert sim.client().pull("w", np.arange(20)).tolist() == [24] * 20
        with pytest.raises(InputError, match="1 servers would be left"):
            sim.scale(1)


def test_a_backup_that_was_cut_off_takes_over_from_a_primary_that_died_meanwhile():
    faults = Faults(restart=1.0, keep_alive=4.0)
    with Simulation(5, servers=2, trainers=2, copies=2, compute=0.3, faults=faults) as sim:
        sim.table("w", dtype="int64", shards=1)
        assert chains(sim) == [(0, 1)]
        others = ["controller", "server-0", "trainer-0", "trainer-1", "driver"]
        sim.part(["server-1"], others, seconds=4.0, at=0.5)
        sim.crash("server-0", at=2.0, silent=True)  # the controller has noticed neither fault yet
        assert sim.run(marking, range(2), kwargs={"clocks": 8}) == [8, 8]
        sim.rest()
        assert sim.client().pull("w", np.arange(20)).tolist() == [16] * 20


def test_a_server_that_is_back_after_it_was_replaced_is_not_one_too_many():
    with Simulation(6, servers=2, trainers=2, copies=2, compute=0.5) as sim:
        sim.table("w", dtype="int64")
        sim._controller.workers.add()
        sim.stop("server-0", seconds=5.0, at=0.5)
        assert sim.run(marking, range(2), kwargs={"clocks": 16}) == [16, 16]
        sim.sleep(3.0)
        sim.rest()
        assert sorted(sim._controller.membership.servers) == [1, 2]
        assert sim.parties["server-0"].dead
        assert sim.client().pull("w", np.arange(20)).tolist() == [32] * 20


def test_a_trainer_that_is_run_twice_counts_once():
    attempts = []

    def work(trainer, partitions):
        attempts.append((trainer.number, trainer.attempt))
        return marking(trainer, partitions)

    with Simulation(5, servers=2, trainers=2, copies=2, compute=0.1, faults=Faults(plan=((0.25, "twins"),))) as sim:
        sim.table("w", dtype="int64")
        assert sim.run(work, range(2)) == [6, 6]
        assert max(attempt for _, attempt in attempts) == 1
        assert len(attempts) == 3
        assert sim.client().pull("w", np.arange(20)).tolist() == [12] * 20


def test_a_server_that_nothing_befell_is_not_given_up():
    with Simulation(6, servers=2, trainers=1, copies=2) as sim:
        sim.table("w", dtype="int64")
        sim.stop("controller", seconds=10.0)
        sim.sleep(15.0)
        sim.rest()
        sim._controller.membership.note("server 1 on server-1 is silent")
        with pytest.raises(AssertionError, match="no fault had hit it"):
            sim.rest()


def test_copies_that_differ_are_found():
    with Simulation(7, servers=2, trainers=1, copies=2) as sim:
        spec = sim.table("w", dtype="int64", shards=1)
        sim.client().push("w", [1], 1)
        sim.rest()
        backup = sim._controller.servers[chains(sim)[0][1]].role.tables[spec.id]
        backup.replicas[0].shard.rows[0, 0] += 1
        with pytest.raises(AssertionError, match="shard 0 of 'w' on servers"):
            sim.rest()


def test_the_expected_contents_show_lost_repeated_and_early_ops():
    table = ExpectedTable(TableSpec("t", rows=3, dim=2, dtype="int64", shards=1), 2)
    table.touched[1] = [0b010101, 0]
    table.issued = [0b010101, 0]
    table.seqs = [[(0, 0), (0, 1), (1, 0)], []]

    def check(value, least=0, exact=False):
        table.check("a pull", np.array([1]), np.array([[value, 0]]), [least, 0], [least, 0] if exact else None)

    for fine, least in ((0, 0), (0b1, 0b1), (0b101, 0b1), (0b10101, 0)):
        check(fine, least)
    for wrong in (0b10, 0b100, 0b10001, 0b1000101, 0b11):
        with pytest.raises(AssertionError, match="op"):
            check(wrong)
    with pytest.raises(AssertionError, match=r"op \(0, 1\) .* of author 0 is missing"):
        check(0b1, least=0b101)
    with pytest.raises(AssertionError, match=r"op \(1, 0\) .* should not be"):
        check(0b10101, least=0b101, exact=True)
    table.touched[2] = [0b10001, 0]
    table.whole(np.array([1, 2]), np.array([[0b10101, 0], [0b10001, 0]]))
    with pytest.raises(AssertionError, match=r"key 2 of 't' lacks ops of author 0 that its shard has: 10000"):
        table.whole(np.array([1, 2]), np.array([[0b10101, 0], [0b1, 0]]))


def push_answered(op, server, losses, table=1, shards=(0, 2)):
    """A client with origin 7 has heard from that server that its op is done."""
    part = SimpleNamespace(pushes=True, table=table, op=(7, *op), shards=shards)
    losses.answered(Request(None, None, 0, part=part), server)


def test_memory_may_lose_only_ops_that_an_ended_primary_has_acknowledged():
    losses = Losses()
    losses.tables.add(1)
    for op, server in {(0, 0): "one", (0, 1): "one", (1, 0): "one", (1, 1): "two"}.items():
        push_answered(op, server, losses)
    push_answered((0, 0), "one", losses, table=2)
    assert not losses.excused(1, 0, 7)
    losses.ended(1, 0, "one")
    assert losses.excused(1, 0, 7) == {(0, 0), (0, 1), (1, 0)}
    assert not any((losses.excused(1, 1, 7), losses.excused(1, 0, 8), losses.excused(2, 0, 7)))
    every = {(0, 0), (0, 1), (1, 0), (1, 1)}

    def check(missing, of=every):
        losses.check(1, 0, 7, of - missing, missing)

    for fine in (set(), {(1, 0)}, {(0, 1), (1, 0)}, {(0, 0), (0, 1), (1, 0)}):
        check(fine)
    for wrong in ({(0, 0)}, {(0, 1)}, {(0, 0), (1, 0)}):
        with pytest.raises(AssertionError, match="which one acknowledged"):
            check(wrong)
    check({(0, 1)}, of=every - {(1, 0)})  # which does not touch the shard
    push_answered((0, 1), "two", losses)  # it was sent again: whether it was copied says nothing of the others
    check({(1, 0)})
    check({(0, 1), (1, 0)})
    losses.leads(1, 0, "one")
    check({(0, 0)})


def test_memory_loses_what_its_primary_could_not_pass_on_before_it_died():
    losses = Losses()
    with Simulation(12, servers=2, trainers=1, copies=2, observers=[losses]) as sim:
        kept, lost = (sim.table(name, dtype="int64", shards=1, ack=name) for name in ("copies", "memory"))
        client = sim.client()
        for table in ("copies", "memory"):
            client.push(table, [1], 1)
        sim.rest()
        sim.part(["server-0"], ["server-1"], seconds=5.0)
        sim.sleep(0.1)
        (before,) = [p.chain for p in sim._controller.membership.places["memory"]]
        assert before == (0, 1)
        client.push("memory", [1], 1)
        sim.crash("server-0")
        sim.sleep(0.1)
        assert client.pull("memory", [1]).tolist() == [1]
        assert client.pull("copies", [1]).tolist() == [1]
        assert losses.excused(lost.id, 0, client.origin) == {(-1, 1), (-1, 2)}
        assert not losses.excused(kept.id, 0, client.origin)


def test_a_primary_that_is_cut_off_acknowledges_nothing_from_memory_when_another_leads():
    losses = Losses()
    with Simulation(13, servers=2, trainers=1, copies=2, observers=[losses]) as sim:
        spec = sim.table("memory", dtype="int64", shards=1, ack="memory")
        client = sim.client()
        client.push("memory", [1], 1)
        sim.rest()
        sim.part(["server-0"], ["server-1", "controller"], seconds=20.0)
        sim.sleep(4.0)
        assert [p.chain for p in sim._controller.membership.places["memory"]] == [(1,)]
        assert client.session._tables["memory"].runs == [(0, 0, 1)], "it knows of nothing"
        client.push("memory", [1], 1)
        assert client.pull("memory", [1]).tolist() == [2]
        assert losses.excused(spec.id, 0, client.origin) == {(-1, 0)}
        sim.sleep(20.0)
        sim.rest()
        assert client.pull("memory", [1]).tolist() == [2]


def test_a_client_that_dies_leaves_what_was_acknowledged_and_no_more_than_it_sent():
    with Simulation(11, servers=2, trainers=1, copies=2) as sim:
        sim.table("w", dtype="int64", shards=1)
        acknowledged = []

        def call(client):
            for n in range(1000):
                client.push("w", [1, 2], 1)
                acknowledged.append(n)

        sim.crash("client-0", at=0.05)
        assert sim.gather([sim.submit(call), sim.submit(lambda client: client.pull("w", [3]).tolist())]) == [None, [0]]
        assert 0 < len(acknowledged) < 1000
        first, second = sim.client().pull("w", [1, 2]).tolist()
        assert len(acknowledged) <= first <= len(acknowledged) + 1
        assert first == second
        with pytest.raises(KeyError, match="mine"):
            sim.gather([sim.submit(lambda client: {}["mine"])])


# ---- what it has found once


def test_an_error_after_an_answer_that_came_late_is_told():
    def late(connection, header, body):
        answer = frames.encode_header(Header(frames.OK, request=header.request))
        endpoint.later(0.01, connection.write, answer)

    def fail(connection, header, body):
        raise InputError("mine")

    endpoint = Endpoint("late", "127.0.0.1", {64: late, 65: fail})
    try:
        endpoint.secrets["s"] = "00" * 32
        address = endpoint.host, endpoint.port
        channel = Channel(address, "s", "00" * 32, "the server", ServerGoneError)
        assert channel.ask(Header(64)).result(time.monotonic() + 10).done
        with pytest.raises(InputError, match="mine"):
            channel.ask(Header(65)).result(time.monotonic() + 10)
        channel.close()
    finally:
        endpoint.stop()


class Line:
    """A trainer's connection, as the controller sees it."""

    party = None

    def reply(self, header, body):
        self.told = frames.decode_json(body)


def test_a_join_out_of_a_connection_that_broke_does_not_take_the_place_of_a_newer_one():
    runs = Runs("s")
    number = runs.start(1, 0)
    first, second, again = Line(), Line(), Line()

    def join(line, incarnation, joins):
        joining = {"run": number, "trainer": 0, "incarnation": incarnation, "joins": joins}
        runs.join(line, Header(frames.JOIN, request=1), frames.encode_json(joining))

    join(second, 0, joins=2)
    with pytest.raises(StoppedError, match="joined again"):
        join(first, 0, joins=1)
    assert runs.runs[number].records[0].connection is second
    join(again, 1, joins=1)
    assert again.told["attempt"] == 1


def pair(sim, **options):
    """A table of one shard on two servers: its spec, and the primary's role and the backup's."""
    spec = sim.table("t", dtype="int64", shards=1, **options)
    sim.rest()
    ((first, second),) = [p.chain for p in sim._controller.membership.places["t"]]
    return spec, sim._controller.servers[first].role, sim._controller.servers[second].role


def test_a_primary_that_is_about_to_hand_over_makes_no_ops():
    with Simulation(8, servers=2, copies=2) as sim:
        spec, primary, _ = pair(sim, aggregate="sum")
        copy = primary.tables[spec.id].replicas[0]
        before = copy.shard.version
        copy.stepping_down = True  # and it may have said so: the next primary goes on from here
        assert not primary.settle(True, [])[0]
        assert copy.shard.version == before
        copy.stepping_down = False
        assert [each[:2] for each in primary.settle(True, [])[0]] == [(spec.id, 0)]


def test_a_placement_that_comes_late_does_not_take_a_newer_dump_away():
    with Simulation(9, servers=2, copies=2) as sim:
        spec, primary, backup = pair(sim)
        copies, epoch = backup.tables[spec.id].replicas, backup.epoch
        copies[0].fence = epoch + 2  # as of a dump in that epoch, which overtook the placements on their way

        def placement(epoch):
            return Placement(epoch, {}, {spec.id: [ShardPlace([primary.number], None, [1], False)]})

        backup.adopt(placement(epoch + 1))
        assert 0 in copies
        backup.adopt(placement(epoch + 2))
        assert 0 not in copies


def test_a_call_by_a_route_that_was_renewed_is_made_by_the_new_one():
    with Simulation(10, servers=2, copies=2) as sim:
        spec, _, _ = pair(sim)
        client = sim.client()
        client.push(spec.name, [1], 1)
        client.session._servers, client.session._channels = {}, {}
        client.push(spec.name, [1], 1)
        assert client.pull(spec.name, [1]).tolist() == [2]


# ---- wrong

WRONG = {
    "there are no fences": [(ServerRole, "_check_fence", "header.epoch < replica.fence", "False")],
    "acknowledged before it is copied": [(ServerRole, "_take_push", "table.waits", "False")],
    "a backup's ledger learns nothing": [
        (
            ServerRole,
            "_take_op",
            "part.op(op, values)",
            "part.op(op if header.flags & frames.CONTROL else op._replace(origin=0), values)",
        )
    ],
    "a backup forgets the origin of ops without a clock": [
        (
            ServerRole,
            "_take_op",
            "part.op(op, values)",
            "part.op(op._replace(origin=op.origin * (op.clock >= 0)), values)",
        )
    ],
    "a primary hands over before its backups have the ops acknowledged from memory": [
        (Relay, "_report_stepped_down", "replica.drained", "True")
    ],
    "a dump leaves out the ledger": [
        (Joining, "add", "Ledger.from_arrays(dict(zip(names, arrays[-len(names) :], strict=True)))", "Ledger()")
    ],
    "pulls need no lease": [(Heartbeat, "holds_lease", "now <= self.lease_until", "True")],
    "failed requests are sent again in any order": [
        (ClientSession, "_resend", "pending for pending, _ in failed", "pending for pending, _ in reversed(failed)")
    ],
    "ops are not counted anew at each clock": [
        (Participant, "move", "own.number, self._collectives = clock, 0, 0", "self._collectives = clock, 0")
    ],
    "a new chain is not told what is unconfirmed": [
        (Relay, "rechain", "self.ops.send(successor, forward)", "forward.confirm()")
    ],
    "ops leave before the placement is adopted for their shard": [
        (
            Relay,
            "_withdraw",
            "successor.replace(kept)",
            "successor.replace(kept); [self.ops.write(s, n) for s, n in self._rewritten if n in s.unconfirmed]",
        )
    ],
    "a joiner is promoted when its dump begins": [
        (
            JoinerFeed,
            "begin",
            "self._send(BEGIN, *self._dump.head())",
            "self._send(BEGIN, *self._dump.head()); self.report_caught_up()",
        )
    ],
    "a joiner is promoted when it has a piece of its dump": [
        (JoinerFeed, "confirmed", "content == END and self", "self")
    ],
    "no answer waits for a joiner that has all of its dump": [
        (JoinerFeed, "send_piece", "self.replica.learning = False", "pass")
    ],
    "a joiner's ledger misses the ops behind the last piece of its dump": [
        (Dumps, "take", "replica.so_far = replica.shard.so_far", "pass")
    ],
    "a dump goes on over a new connection where the old one broke": [
        (FeedsOfJoiner, "begin_anew", "if not feed.done:", "if False:")
    ],
    "a controller that was stopped gives up all servers": [
        (Liveness, "silent", "self._heartbeats if late else ()", "()")
    ],
    "the lease is not waited for": [(Liveness, "silent", "> self.patience", "> self.patience / 4")],
}
SEEN = {  # where to look first: other schedules show it, too, but not all
    "there are no fences": [25],
    "acknowledged before it is copied": [6, 24, 25],
    "a backup's ledger learns nothing": [4, 6, 9],
    "a backup forgets the origin of ops without a clock": [9, 20, 21],
    "a primary hands over before its backups have the ops acknowledged from memory": [684],
    "a dump leaves out the ledger": [6, 7, 9],
    "pulls need no lease": [3903],
    "failed requests are sent again in any order": [4, 17, 24],
    "ops are not counted anew at each clock": [13, 14, 24],
    "a new chain is not told what is unconfirmed": [497],
    "ops leave before the placement is adopted for their shard": [78778],
    "a joiner is promoted when its dump begins": [0, 4, 6],
    "a joiner is promoted when it has a piece of its dump": [0, 4, 6],
    "no answer waits for a joiner that has all of its dump": [1153],
    "a joiner's ledger misses the ops behind the last piece of its dump": [26],
    "a dump goes on over a new connection where the old one broke": [0, 4, 6],
    "a controller that was stopped gives up all servers": [62, 409],
    "the lease is not waited for": [141],
}
RARE = {  # seen once in some thousand schedules
    "new requests are sent before failed ones": [
        (ClientSession, "steady", "if self._unreached or any", "if False and any"),
        (ClientSession, "channel", "if channel is None:", "if channel is None or channel.closed:"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_schedule, [*SEEN[name], *range(1500)])


WRONG_STEP = {  # of the compiled step, and where to look first
    "it knows no repeats": (
        *("not shard.ledger.is_next(head.trainer, head.attempt, head.clock, head.number)", "False"),
        [1, 3, 5],
    ),
    "it notes no ops": (
        *("shard.ledger.record(head.trainer, head.attempt, head.clock, head.number)", "pass"),
        [1, 3, 5],
    ),
    "it answers for other servers' shards": ("not replica.takes_requests()", "False", [34]),
    "it passes no ops on": ("self.forwards = True", "pass", [21, 24, 25]),
    "it sums nothing": (
        *("if is_summed(table.aggregated, op):\n            sum_rows", "if False:\n            sum_rows"),
        [2, 4, 7],
    ),
    "it does not pass on what memory has acknowledged": (
        *("        if self._parts.forwards:\n", "        if self._parts.forwards and table.waits:\n"),
        [12, 21, 37],
    ),
    "it acknowledges from memory without a lease": (
        *("not (pushed and table.waits) and not self._holds_lease()", "not pushed and not self._holds_lease()"),
        [11826],
    ),
    "it acknowledges what no backup has": (
        *("if self.left == 0 or self.error is not None:", "if True:"),
        [6, 24, 25],
    ),
    "it takes a confirmation for that of the newest op": (
        *("request = head.request\n", "request = next(reversed(successor.unconfirmed), 0)\n"),
        [6, 24, 25],
    ),
    "a joiner misses the ops during its dump": (
        "if replica.successor is not None:",
        "if replica.successor is not None and (replica.feed is None or replica.feed.done):",
        [4, 21, 26],
    ),
    "a repeat is acknowledged before what it repeats": ("not tail.done", "False", [2735, 201232]),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [next(iter(WRONG_STEP)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*WRONG_STEP][1:])]
)
def test_what_is_wrong_in_the_compiled_step_is_caught(monkeypatch, name):
    old, new, seeds = WRONG_STEP[name]
    put_variant(monkeypatch, ("service", "request", "forwards", "answers"), old, new)
    assert_caught(monkeypatch, [], check_schedule, [*seeds, *range(1500)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RARE)
def test_what_is_rarely_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, RARE[name], check_schedule, [10534, *range(10_000)])
