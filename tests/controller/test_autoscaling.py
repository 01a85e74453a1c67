"""The number of servers follows the load: the rule, its shell in the controller, and a real cluster."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client
from failover_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from noticing import assert_noticed
from rich.console import Console
from servers import PATIENCE, wait_until

import dps
from dps.engine.controller.actors import ServerActors
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.executor import Executor
from dps.engine.controller.session import Session
from dps.engine.coordination.autoscaling import (
    GROW_SAMPLES,
    MEMORY_FRACTION,
    SHRINK_FRACTION,
    AutoscalingRule,
    ServerLoad,
)
from dps.engine.coordination.placement import rechained
from dps.engine.wire.messages import AdaptRule
from dps.errors import InputError

# -- the rule


def life(rule, servers, loads, workers=1 << 30):
    """The numbers of servers, look by look, of a parameter server that bears these loads."""
    numbers = [servers]
    for load in loads:
        verdict = rule.decide(load._replace(servers=servers, spare=max(0, workers - servers)))
        servers = verdict.servers
        numbers.append(servers)
    return numbers


def changes(numbers):
    return [b - a for a, b in itertools.pairwise(numbers) if a != b]


LOADS = st.builds(
    ServerLoad,
    servers=st.just(0),
    busy=st.floats(0, 5),
    held=st.floats(0, 12),
    limit=st.sampled_from([1.0, 2.5, math.inf]),
    copies=st.integers(1, 3),
    pieces=st.sampled_from([4, 16, 1 << 30]),
)
RULES = st.builds(
    lambda minimum, more, wait_count, busy: AutoscalingRule(minimum, minimum + more, wait_count, busy),
    *(st.integers(1, 4), st.sampled_from([2, 5, 20, math.inf]), st.integers(1, 12), st.floats(0.1, 1)),
)
LONG = 12 * 22  # looks, after which no rule above has anything left to do


@pytest.mark.parametrize(
    ("load", "numbers"),
    [
        (ServerLoad(1), [1] * 9),
        (ServerLoad(1, busy=0.7), [1] * 9),
        (ServerLoad(1, busy=0.71), [1, 1, 1, 2, 2, 2, 2, 2, 2]),
        (ServerLoad(1, busy=1.5), [1, 1, 1, 2, 2, 2, 3, 3, 3]),
        (ServerLoad(1, held=0.6, limit=1), [1] * 9),
        (ServerLoad(1, held=1.3, limit=1), [1, 2, 3, 3, 3, 3, 3, 3, 3]),  # at once
        (ServerLoad(1, busy=9, pieces=2), [1, 1, 1, 2, 2, 2, 2, 2, 2]),  # a third one would have nothing to hold
        (ServerLoad(1, copies=3), [1, 2, 3, 3, 3, 3, 3, 3, 3]),
        (ServerLoad(3), [3, 3, 3, 3, 2, 2, 2, 2, 1]),
        (ServerLoad(3, copies=2), [3, 3, 3, 3, 2, 2, 2, 2, 2]),
        (ServerLoad(3, busy=0.36), [3, 3, 3, 3, 2, 2, 2, 2, 2]),
        (ServerLoad(3, busy=0.71), [3] * 9),
        (ServerLoad(3, held=0.31, limit=1), [3, 3, 3, 3, 2, 2, 2, 2, 2]),
        (ServerLoad(3, held=9.0), [3, 3, 3, 3, 2, 2, 2, 2, 1]),  # no limit is known
        (ServerLoad(9), [9, 8, 7, 6, 6, 6, 6, 5, 5]),  # too many for the maximum: at once
        (ServerLoad(8, held=4.0, limit=1), [8, 7, 7, 7, 7, 7, 7, 7, 7]),  # but no rows are given up for it
    ],
)
def test_what_loads_ask_for(load, numbers):
    assert life(AutoscalingRule(1, 6, wait_count=4), load.servers, [load] * 8) == numbers


def test_the_least_is_there_at_once():
    assert life(AutoscalingRule(4, 6), 1, [ServerLoad(0)] * 2) == [1, 4, 4]
    assert life(AutoscalingRule(4, 6), 1, [ServerLoad(0)] * 2, workers=3) == [1, 3, 3]


@given(RULES, LOADS, st.integers(1, 12), st.integers(1, 30))
def test_under_a_constant_load_it_goes_one_way_and_stays(rule, load, servers, workers):
    numbers = life(rule, servers, [load] * LONG, max(workers, servers))
    steps, last = changes(numbers), numbers[-1]
    assert len({step > 0 for step in steps}) <= 1
    assert len(steps) <= abs(last - servers)
    assert len(set(numbers[-100:])) == 1
    least, rows = max(rule.minimum, load.copies), min(load.held / (MEMORY_FRACTION * load.limit), load.pieces)
    most = max(servers, min(rule.maximum, workers))
    assert last >= min(least, most)
    assert last >= min(rows, most) - 1e-6, "rows fit, where there are workers"
    assert last <= max(rule.maximum, least, math.ceil(rows)), "no more than wanted, unless rows need them"
    assert last <= max(servers, workers)
    work = min(load.busy / rule.busy, load.pieces)
    assert last >= min(work, most, max(rule.maximum, least)) - 1e-6 or rule.maximum < servers
    if last > max(least, 1) and not steps:
        assert last - 1 <= max(work, rows) / SHRINK_FRACTION or last == min(servers, load.pieces) or last >= most


@given(RULES, LOADS, st.integers(1, 12), st.floats(0, 3), st.floats(0, 6))
def test_more_load_never_has_fewer_servers(rule, load, servers, busy, held):
    other = AutoscalingRule(rule.minimum, rule.maximum, rule.wait_count, rule.busy)
    heavier = load._replace(busy=load.busy + busy, held=load.held + held)
    assert life(rule, servers, [load] * LONG)[-1] <= life(other, servers, [heavier] * LONG)[-1]


@settings(max_examples=40)
@given(RULES, LOADS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_load_that_trembles_does_not_make_it_flap(rule, load, servers, random):
    def trembling():
        part = 0.75 + random.random() / 2
        return load._replace(busy=load.busy * part, held=load.held * part)

    numbers = life(rule, servers, [trembling() for _ in range(200)])
    turns = {step > 0 for step in changes(numbers[100:])}
    assert len(turns) <= 1, "it may climb with a peak that had not come before, not up and down"
    assert len(changes(numbers)) <= 40


@given(RULES, st.lists(st.tuples(LOADS, st.integers(1, 40)), max_size=12), st.integers(1, 12))
def test_no_life_has_a_step_that_is_taken_back_at_once(rule, phases, servers):
    for load, looks in phases:
        numbers = life(rule, servers, [load] * looks)
        assert all(step == -1 or step > 0 for step in changes(numbers))
        for before, after in itertools.pairwise(numbers):
            if after < before:  # what is left bears that very load, now and for ever
                calm = AutoscalingRule(rule.minimum, rule.maximum, rule.wait_count, rule.busy)
                assert max(life(calm, after, [load] * (GROW_SAMPLES + 1))) <= after
        servers = numbers[-1]


def life_on_a_cluster(rule, servers, loads):
    """The numbers of servers and of their workers, look by look, where a cluster starts and ends the workers."""
    workers, numbers = servers, [(servers, servers)]
    for load in loads:
        spare = workers - servers
        verdict = rule.decide(load._replace(servers=servers, spare=spare, unused=spare))
        assert verdict.servers <= workers, "a server starts on a worker that is there"
        servers, workers = verdict.servers, verdict.workers
        assert servers <= workers, "no worker ends that has a server"
        numbers.append((servers, workers))
    return numbers


@given(RULES, LOADS, st.integers(1, 12))
def test_workers_come_as_servers_need_them_and_go_when_none_does(rule, load, servers):
    other = AutoscalingRule(rule.minimum, rule.maximum, rule.wait_count, rule.busy)
    numbers = life_on_a_cluster(rule, servers, [load] * 2 * LONG)
    assert numbers[-1] == (life(other, servers, [load] * LONG)[-1],) * 2, "as if there were workers without end"
    for (_, fewer), (count, workers) in itertools.pairwise(numbers):
        assert workers <= max(fewer, count + 1, rule.minimum, load.copies), "one more, unless the least is not there"
    assert len({step > 0 for step in changes([workers for _, workers in numbers])}) <= 1, "under this load"


def test_a_free_worker_stays_for_a_while():
    rule = AutoscalingRule(1, 4, wait_count=3)
    busy, idle = ServerLoad(1, busy=1.0), ServerLoad(1)
    numbers = life_on_a_cluster(rule, 1, [busy] * 6 + [idle] * 9)
    assert numbers[3:8] == [(1, 2), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert numbers[9:] == [(1, 2), (1, 2), (1, 2), (1, 1), (1, 1), (1, 1), (1, 1)]
    hasty = AutoscalingRule(1, 4, wait_count=1)
    load = ServerLoad(1, busy=1.0, spare=1, unused=1)
    assert [hasty.decide(load).workers for _ in range(GROW_SAMPLES)] == [2] * GROW_SAMPLES
    assert hasty.decide(ServerLoad(1, spare=2, unused=1)).workers == 2, "another parameter server uses one"
    assert life_on_a_cluster(AutoscalingRule(3, 4), 1, [idle] * 3) == [(1, 1), (1, 3), (3, 3), (3, 3)]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("decide", "load.unused if self._unused_samples >= self.wait_count else 0", "0"),
        ("decide", "if self._unused_samples >= self.wait_count", "if True"),
        ("decide", "(load.unused if", "(load.spare if"),
        ("decide", "if load.unused and not grows", "if load.unused"),
        ("decide", "self._more_samples > 0 and now < self.maximum", "self._more_samples > 0"),
        ("_shortage", "if no_worker and lasts:", "if False:"),
        ("_shortage", "if no_worker and lasts:", "if no_worker:"),
        ("_change", "load.servers + load.spare", "load.servers"),
    ],
)
def test_wrong_variants_of_workers(name, old, new):
    checks = [
        test_workers_come_as_servers_need_them_and_go_when_none_does,
        test_a_free_worker_stays_for_a_while,
    ]
    assert_noticed(AutoscalingRule, name, old, new, *checks)


def test_trainers_that_take_what_they_get():
    demand = 2.0  # servers' worth of work; as many as there are are at work all the time
    rule, servers = AutoscalingRule(1, 8), 1
    for _ in range(100):
        servers = rule.decide(ServerLoad(servers, busy=min(demand, servers))).servers
    assert servers == 3


def test_a_moment_does_not_count():
    rule, calm, busy = AutoscalingRule(1, 4, wait_count=3), ServerLoad(2, busy=1.0), ServerLoad(2, busy=1.9)
    assert life(rule, 2, [busy, busy, calm] * 5) == [2] * 16
    assert life(rule, 2, [ServerLoad(2), ServerLoad(2), calm] * 5) == [2] * 16
    for load in (busy, ServerLoad(2)):
        for _ in range(9):
            assert rule.decide(load).servers == 2
            rule.restart()  # something has moved


def test_what_cannot_be_had_is_said_once():
    rule, full = AutoscalingRule(1, 4), ServerLoad(2, held=1.3, limit=1, spare=0)
    said = [rule.decide(full) for _ in range(5)]
    assert [verdict.announce for verdict in said] == [True, False, False, False, False]
    assert "3 are needed, and no worker is free for another" in said[-1].why
    assert rule.decide(full._replace(spare=1)).servers == 3
    assert "4 is the maximum" in rule.decide(ServerLoad(4, held=9, limit=1)).why
    assert [rule.decide(ServerLoad(4, held=9, limit=1)).announce for _ in range(3)] == [False] * 3
    rule.decide(ServerLoad(4))  # it was over
    assert rule.decide(ServerLoad(4, held=9, limit=1)).announce
    rule.decide(ServerLoad(4))
    busy = [rule.decide(ServerLoad(4, busy=4)) for _ in range(5)]
    assert not any(verdict.announce for verdict in busy), "to be busy at the maximum is what a maximum is for"
    assert "6 are needed, and 4 is the maximum" in busy[-1].why


def test_the_reason_is_told():
    assert AutoscalingRule().decide(ServerLoad(1, busy=0.25, held=1 << 20, limit=1 << 20)).why == (
        "rows need more: a server is 25% busy, has 1 MiB of rows, and may have 1 MiB"
    )
    rule = AutoscalingRule()
    assert [rule.decide(ServerLoad(2, busy=2)).why[:17] for _ in range(3)][-1] == "they are too busy"
    assert AutoscalingRule(wait_count=1).decide(ServerLoad(2)).why.startswith("fewer do: a server is 0% busy")
    assert "without a known limit" in AutoscalingRule().decide(ServerLoad(1)).why


@pytest.mark.parametrize("wish", [{"minimum": 0}, {"minimum": 3, "maximum": 2}, {"wait_count": 0}, {"busy": 0}])
def test_wishes_that_cannot_be(wish):
    with pytest.raises(InputError, match=next(iter(wish))):
        AutoscalingRule(**wish)


# -- the shell, without sockets


class Shell:
    """A session's autoscaling beside a fleet whose servers do what they are asked."""

    adapt, end_adapting = Session.adapt, Session.end_adapting

    def __init__(self, servers=2, copies=1, tables=1, **table):
        self.world, self.asked, self.workers = World(servers), [], {}
        for _ in range(tables):
            self.world.table(**table)
        self.world.settle(1.0)
        self.settled, self.checkpointing, self.free = True, False, ["tcp://w9"]
        self.told = dict.fromkeys(self.world.membership.servers, (0.0, 100.0))
        self.seen = []

        async def scale(servers):
            self.asked.append(servers)

        async def in_endpoint(function, *args):
            return function(*args)

        membership = self.world.membership
        self.actors = SimpleNamespace(
            scale=scale, spares=lambda: self.free, unused=lambda: len(self.free), settled=True,
            servers=lambda: list(membership.servers.values()),
            up=lambda: list(membership.servers.values()), wanted=servers, scheduler=self,
        )  # fmt: skip
        self.monitor = SimpleNamespace(now=lambda: self.world.time, loads=self.loads)
        limit, busy = lambda: ServerActors.memory_limit(self.actors), lambda: self.checkpointing
        self.autoscaling = AutoscalingProcedures(membership, self.monitor, self.actors, limit, busy, copies)
        self.rule = self.autoscaling.rule = AutoscalingRule(1, 4, wait_count=2)
        self.carry_out, self._adapting = Executor(in_endpoint).run, None

    def loads(self, since):
        self.seen.append(since)
        return self.told

    def look(self, times=1):
        """What was asked for in so many looks."""
        before = len(self.asked)
        for _ in range(times):
            asyncio.run(self.carry_out(self.autoscaling.tick(self.rule)))
        return self.asked[before:]

    def limit(self, nbytes):
        """Dask's limit of each worker."""
        for server in self.actors.servers():
            self.workers[server.worker] = SimpleNamespace(memory_limit=nbytes)


@pytest.fixture
def shell():
    return Shell()


def test_it_sees_decides_and_tells(shell):
    assert shell.look() == []
    shell.limit(130)
    assert shell.look() == [3]
    (event,) = [text for _, text in shell.world.membership.events if text.startswith("adapt")]
    assert event.startswith("adapt: 2 -> 3 servers, rows need more: a server is 0% busy, has 9.537e-05 MiB of rows")
    shell.told = dict.fromkeys(shell.told, (1.0, 0.0))
    assert shell.look(GROW_SAMPLES) == [3]
    shell.told = dict.fromkeys(shell.told, (0.0, 0.0))
    assert shell.look(9) == []  # the table has two copies


def test_one_server_goes_where_that_is_enough():
    shell = Shell(3)
    shell.told = dict.fromkeys(shell.told, (0.1, 0.0))
    assert shell.look(2) == [2]


@pytest.mark.parametrize(
    "what", ["joiner", "due", "step", "leaving", "silent", "cut off", "new", "unready", "crew", "quiet"]
)
def test_it_waits_for_what_is_unfinished(shell, what):
    world, membership = shell.world, shell.world.membership
    assert shell.look() == []
    if what == "joiner":
        world.start()
        world.wait(0.2)
        assert any(p.joiner is not None for p in world.places())
    elif what == "due":  # nobody has begun to bring back the second copy
        world.places()[0] = rechained(world.places()[0], (0,), None, membership.epoch)
    elif what == "step":
        world.places()[0] = world.places()[0]._replace(stepping_down=True)
    elif what == "leaving":
        membership.servers[1].leaving = True
    elif what == "silent":
        world.asleep.add(1)
        world.wait(10)
    elif what == "cut off":
        world.cut(1)
    elif what == "new":
        membership.add_server("tcp://w7", "key-{}")
    elif what == "unready":
        membership.servers[1].ready = False
    elif what == "crew":
        shell.actors.settled = False
    else:
        del shell.told[1]
    shell.limit(130)
    shell.told |= dict.fromkeys(membership.servers, (0.0, 200.0)) if what != "quiet" else {}
    shell.monitor.loads = lambda since: {} if since == world.time else shell.told  # a report each second
    for _ in range(5):
        world.time += 1
        assert shell.look() == []
        assert "on their way" in shell.autoscaling.why


def test_what_was_told_before_all_came_to_rest_does_not_count(shell):
    shell.look()
    came = shell.world.time
    shell.world.wait(3)
    shell.look()
    assert shell.seen == [came, came]
    shell.world.table("another")
    shell.look()
    assert shell.seen[-1] == shell.world.time > came


def test_a_checkpoint_is_waited_for_and_forgets_nothing(shell):
    shell.told = dict.fromkeys(shell.told, (1.0, 0.0))
    assert shell.look(GROW_SAMPLES - 1) == []
    shell.checkpointing = True
    assert shell.look(5) == []
    shell.checkpointing = False
    shell.world.membership.set_remedy("restore that one")  # a new epoch, and nothing has moved
    assert shell.look() == [3]


def test_copies_of_tables_to_come_are_kept():
    shell = Shell(3, copies=2, tables=0)
    shell.told = dict.fromkeys(shell.told, (0.0, 0.0))
    assert shell.look(9) == [2] * 4, "fewer are asked for until they are there"
    shell = Shell(2, copies=2, tables=0)
    shell.told = dict.fromkeys(shell.told, (0.0, 0.0))
    assert shell.look(9) == []


def test_more_that_were_wanted_than_could_be_had_do_not_come_later(shell):
    shell.actors.wanted, shell.free = 6, []
    assert shell.look() == [2], "6 are more than the maximum"
    shell.actors.wanted = 4
    assert shell.look() == []


def test_who_says_another_number_has_the_last_word(shell):
    async def main():
        note, shell.world.membership.note = (
            shell.world.membership.note,
            lambda *about: (shell.end_adapting(), note(*about)),
        )
        await shell.carry_out(shell.autoscaling.tick(shell.rule))

    shell.limit(130)
    asyncio.run(main())
    assert shell.asked == []


def test_no_worker_is_free(shell, caplog):
    shell.limit(130)
    shell.free = []
    assert shell.look(5) == []
    (said,) = [record.getMessage() for record in caplog.records if "adapt" in record.getMessage()]
    assert "no worker is free for another: start one, dask worker ... --resources dps=1" in said
    shell.free = ["tcp://w9"]
    assert shell.look() == [3]


def test_it_goes_on_after_an_error_that_is_said_once(shell, caplog):
    async def main():
        shell.actors.spares = lambda: 1 / 0
        shell.adapt(AdaptRule(minimum=1, maximum=4, interval=0.001))
        until = asyncio.get_running_loop().time() + PATIENCE
        while "ZeroDivisionError" not in shell.autoscaling.status(2).why:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        shell.actors.spares = lambda: ["tcp://w9"]
        shell.adapt(AdaptRule(interval=0.001, memory=130))
        while not shell.asked:
            assert asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.001)
        about = shell.autoscaling.status(2)
        shell.end_adapting()
        assert shell.autoscaling.status(2) is None
        return about

    about = asyncio.run(main())
    assert (about.minimum, about.maximum, about.memory, about.interval) == (1, None, 130, 0.001)
    assert len([record for record in caplog.records if "stays" in record.getMessage()]) == 1


# -- on a cluster


def printed(status):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status)
    return console.export_text()


@pytest.mark.thorough
def test_wishes_of_users_and_how_it_ends():
    options = {"processes": False, "dashboard_address": None}
    with (
        dps.LocalCluster(servers=2, trainers=1, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        for wish in ({"minimum": 0}, {"minimum": 2.5}, {"maximum": 0}, {"interval": 0}, {"memory": 0}, {"busy": 2}):
            with pytest.raises(InputError, match=next(iter(wish))):
                ps.adapt(**wish)
        with pytest.raises(InputError, match=r"AdaptRule: .* cannot be read: .*got `str` - at `\$.wait_count`"):
            ps.adapt(wait_count="many")
        assert ps.status().adapt is None
        ps.adapt(minimum=2, maximum=3, interval="50 ms")
        assert ps.table("w").spec.shards == 16  # room for three
        wait_until(lambda: ps.servers() == 2)
        events = [event["event"] for _, event in client.get_events("dps")]
        assert any(text.startswith("adapt: 1 -> 2 servers, there are to be more") for text in events)
        ps.detach()
        with dps.ParameterServer.attach(client) as ps:  # whoever asked for it may be gone
            about = ps.status().adapt
            assert (about.minimum, about.maximum, about.servers) == (2, 3, 2)
            assert about.text.startswith("adapt: 2 to 3, now 2: ")
            assert "adapt: 2 to 3, now 2: " in ps.status()._repr_html_()
            assert "adapt: 2 to 3, now 2: " in printed(ps.status())
            ps.table("two", copies=2)
            with pytest.raises(InputError, match="2 copies"):
                ps.scale(1)
            assert ps.status().adapt.maximum == 3, "what is refused changes nothing"
            ps.drop_table("two")
            ps.scale(1)
            assert json.loads(json.dumps(ps.status().to_dict()))["adapt"] is None
            wait_until(lambda: ps.servers() == 1)
            ps.close()


def train(trainer, partitions):
    """Count until told to stop."""
    rng, total = np.random.default_rng(trainer.number), np.zeros(100, np.int64)
    while not trainer.pull("stop", [0])[0]:
        keys = rng.integers(0, 100, 500)
        trainer.push("counts", keys, 1)
        np.add.at(total, keys, 1)
        trainer.tick()
        time.sleep(0.01)  # servers are to be at rest but for their rows
    return total


@pytest.mark.thorough
@pytest.mark.processes
def test_servers_come_and_go_with_the_rows_while_training_stays_exact():
    with (
        dps.LocalCluster(servers=1, trainers=1, threads_per_trainer=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.adapt(1, 2, interval="100 ms", wait_count=3, busy=1, memory="8 MiB", cluster=cluster)
        ps.table("stop", rows=1, dtype="int64")
        ps.table("counts", dtype="int64", shards=4)
        results = []
        data = client.scatter([0, 1])
        running = threading.Thread(target=lambda: results.extend(ps.run(train, data, staleness=4)))
        running.start()
        ps.table("filler", 64, rows=20_000, shards=4)
        ps.client().push("filler", np.arange(20_000), np.ones((20_000, 64), np.float32))  # 5 MiB: more than 60 %
        wait_until(lambda: ps.servers() == 2)
        wait_until(lambda: ps.status().adapt.why.startswith("a server is"))  # all has moved
        chains = ps.status().tables["counts"].chains
        assert {chain[0] for chain in chains} == {0, 1}
        ps.drop_table("filler")
        wait_until(lambda: len(ps.status().servers) == 1)
        wait_until(lambda: sorted(cluster.workers) == ["server-0", "trainer-0"])
        ps.client().push("stop", [0], [1])
        running.join()
        counts = ps.client().pull("counts", np.arange(100))
        assert np.array_equal(counts, np.sum(results, axis=0))
        said = [text for _, text in ps.status().events if text.startswith("adapt")]
        assert "no worker is free for another" in said.pop(0), "before the cluster has started one"
        assert [text.split(", ")[0] for text in said] == ["adapt: 1 -> 2 servers", "adapt: 2 -> 1 servers"]
        assert "rows need more" in said[0]
        assert "fewer do" in said[1]
