"""The controller's side of servers, frame by frame: who is up, who takes over, what moves; on a clock of its own."""

from __future__ import annotations

import json

import pytest
from failover_world import Line, World
from oracles import mutant

from dps import config
from dps.engine.controller.failover import TICK_SECONDS, UNFIT_SECONDS, Membership
from dps.engine.controller.handovers import BACK_OFF_FACTOR, Handovers
from dps.engine.controller.runs import Runs
from dps.engine.coordination.placement import next_steps
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.monitor import Monitor
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import FullServers, decode
from dps.errors import InputError, ProtocolError, ServerGoneError, TooFewWorkersError

SILENCE, STEP_DOWN = config.seconds("silence"), config.seconds("step-down")


def route(world: World) -> dict:
    return json.loads(world.membership.announcements.route)


# ---- coming and going -----------------------------------------------------------------------------------------------


def test_a_server_reports_and_is_told_the_placement():
    world = World(2)
    world.table()
    spec = world.membership.specs["w"]
    for line in world.lines.values():
        assert line.placement == {
            "epoch": world.membership.epoch,
            "servers": {"0": ["127.0.0.1", 9000], "1": ["127.0.0.1", 9001]},
            "tables": {"1": [[list(p.chain), None, list(p.fences), False] for p in world.places()]},
        }
    assert route(world) == {
        "epoch": world.membership.epoch,
        "servers": {"0": ["127.0.0.1", 9000], "1": ["127.0.0.1", 9001]},
        "tables": [{"spec": spec, "owners": [0, 0, 1, 1], "ancestors": [], "chains": []}],
        "remedy": world.membership.remedy,
    }
    assert [p.chain for p in world.places()] == [(0, 1), (0, 1), (1, 0), (1, 0)]


def test_every_change_is_told_to_all_with_a_new_epoch():
    world = World(3)
    for change in (
        world.table,
        lambda: world.membership.remove_worker("tcp://w2") or world.cut(2),
        world.start,
        lambda: world.membership.drop_table("w"),
    ):
        before = world.membership.epoch
        change()
        assert world.membership.epoch > before
        for number, server in world.membership.servers.items():
            assert world.lines[number].placement["epoch"] == world.membership.epoch
            assert server.connection is world.lines[number]
        assert route(world)["epoch"] == world.membership.epoch


def test_numbers_are_never_used_again():
    world = World(2)
    world.membership.remove_server(1)
    assert world.start() == 2
    world.membership.remove_server(2)
    assert world.start() == 3


def test_a_stranger_is_no_server():
    world = World(1)
    world.table(copies=1)
    stranger = Line()
    with pytest.raises(ProtocolError, match="no such server is expected"):
        world.tell(0, frames.SERVE, stranger, server=7, host="h", port=1)
    for about in ({"host": "h"}, {"server": None}, {"server": 0, "host": "h", "port": "any"}):
        with pytest.raises(ProtocolError, match="a Serve that cannot be read"):
            world.tell(0, frames.SERVE, stranger, **about)
    told = {"table": "w", "shard": 0, "server": 0, "epoch": 99, "shards": [["w", 0]], "why": "envy"}
    for kind in (frames.BEAT, frames.CAUGHT_UP, frames.STEPPED_DOWN, frames.SUSPECT):
        with pytest.raises(ProtocolError, match="over a connection on which no server has announced itself"):
            world.tell(0, kind, stranger, **told)
    assert world.chains() == [(0,)] * 4
    assert not stranger.sent


def test_a_server_that_comes_again_replaces_its_old_connection():
    world = World(2)
    world.table()
    old = world.lines[0]
    before = world.chains()
    world.serve(0)
    assert old.closed
    assert old.party is None
    world.membership.disconnected(old)  # the end of the old one is noticed late
    assert world.membership.servers[0].up
    world.wait(SILENCE + 1)
    assert world.chains() == before


def test_who_speaks_of_a_shard_that_there_is_not_is_refused():
    world = World(2)
    world.table()
    epoch = world.membership.epoch
    for kind in (frames.CAUGHT_UP, frames.STEPPED_DOWN):
        with pytest.raises(ProtocolError, match="a shard that does not exist: 4 of table 'w'"):
            world.tell(0, kind, table="w", shard=4, server=1, epoch=epoch)
        for about in ({"table": "w", "shard": -1}, {"table": "w", "shard": "x"}, {"shard": 1}, {"table": ["w"]}):
            with pytest.raises(ProtocolError, match="that cannot be read"):
                world.tell(0, kind, server=1, epoch=epoch, **about)


def test_a_suspicion_of_a_shard_that_there_is_not_changes_nothing():
    """Not even of the shards before it in the same message, because the servers would not be told of that."""
    world = World(2)
    world.table()
    before, epoch = world.chains(), world.membership.epoch
    for shards in ([["w", 0], ["w", 4]], [["w", 0], ["w", -1]], [["w", 0], "w"], [["w", 0, 1]]):
        with pytest.raises(ProtocolError):
            world.tell(1, frames.SUSPECT, server=1, shards=shards, why="none here", epoch=epoch)
        assert (world.chains(), world.membership.epoch) == (before, epoch)
    world.tell(1, frames.SUSPECT, server=1, shards=[["w", 0], ["w", 0]], why="none here", epoch=epoch)  # said twice
    (event,) = [text for _, text in world.membership.events if "out of step" in text]
    assert "with shard 0 of table 'w'" in event
    assert world.chains()[1:] == before[1:]


# ---- beats, silence, loss -------------------------------------------------------------------------------------------


def test_a_beat_is_answered():
    world = World(1)
    world.tell(0, frames.BEAT, request=77)
    assert world.lines[0].sent[-1] == (Header(frames.OK, request=77), b"")


def test_the_answer_to_a_beat_says_which_servers_have_used_up_their_memory():
    world = World(3)
    report = {"cpu": 0, "busy": 0, "polled": 0, "starved": 0, "memory": 0, "lag": 0, "connections": 0}
    report |= {"unconfirmed": [0, 0, 0], "tables": {}}

    def beat(server, *budget):
        world.tell(server, frames.BEAT, request=77, **report, **({"budget": budget} if budget else {}))
        header, answer = world.lines[server].sent[-1]
        assert header.kind == frames.OK
        return decode(FullServers, answer).servers if answer else []

    assert beat(0) == beat(1, 94, 100) == []
    assert beat(1, 96, 100) == [1]
    assert beat(0) == beat(2, 1, 100) == [1]
    assert beat(1, 50, 100) == beat(0) == []


def test_the_lease_ends_before_the_patience():
    assert config.seconds("lease") + 2 * TICK_SECONDS < SILENCE


def test_a_silent_server_is_replaced_where_there_are_copies_and_waited_for_where_not():
    world = World(3)
    world.table("w", copies=2, shards=6)
    world.table("v", copies=1, shards=3)
    world.asleep.add(0)
    world.wait(SILENCE - 4 * TICK_SECONDS)
    assert world.chains()[0][0] == 0, "not yet"
    world.wait(6 * TICK_SECONDS + HEARTBEAT_SECONDS)
    assert all(0 not in chain for chain in world.chains())
    assert world.chains("v") == [(0,), (1,), (2,)], "nobody else has these rows"
    assert not world.membership.servers[0].up
    assert 0 in world.membership.servers
    world.asleep.clear()
    epoch = world.membership.epoch
    world.wait(2 * HEARTBEAT_SECONDS)
    assert world.membership.servers[0].up
    assert world.membership.epoch > epoch
    assert world.lines[0].placement["tables"]["1"] == [
        [list(p.chain), p.joiner, list(p.fences), p.stepping_down] for p in world.places()
    ]
    world.settle()
    assert all(len(chain) == 2 for chain in world.chains())
    assert any(0 in chain for chain in world.chains()), "it is used again"


def test_of_copies_that_were_all_silent_the_first_that_is_back_takes_over():
    world = World(2)
    world.table(shards=1)
    assert world.chains() == [(0, 1)]
    world.asleep |= {0, 1}
    world.wait(SILENCE + 1)
    assert world.chains() == [(0, 1)]
    world.asleep.discard(1)
    world.wait(2 * HEARTBEAT_SECONDS)
    assert world.chains() == [(1,)]
    assert route(world)["tables"][0]["owners"] == [1]


def test_a_silent_copy_is_not_put_out_on_the_word_of_one_who_may_have_died_since():
    world = World(2)
    world.table(shards=1)
    world.asleep.add(1)
    world.wait(SILENCE - 0.5)
    world.asleep.add(0)  # its machine vanishes: nobody is told
    world.wait(1.0)
    assert world.membership.servers[1].silent
    assert world.chains() == [(0, 1)]
    assert world.lines[0].placement["tables"]["1"][0][0] == [0, 1], "it was not told to go on alone"
    world.asleep.discard(1)
    world.wait(2 * HEARTBEAT_SECONDS)
    assert world.chains() == [(0, 1)], "the other one is not known to be dead"
    world.wait(SILENCE)
    assert world.chains() == [(1,)], "it has all that was acknowledged"
    world.membership.remove_worker("tcp://w0")
    assert world.chains() == [(1,)]


def test_who_lost_its_connection_is_believed_again_when_it_has_beaten():
    world = World(3)
    world.table(shards=1, copies=3)
    world.asleep.add(0)
    world.wait(SILENCE - 0.5)
    world.cut(1)
    world.cut(2)
    world.wait(0.5 + 2 * TICK_SECONDS)
    assert world.membership.servers[0].silent
    assert world.chains() == [(0, 1, 2)]
    world.serve(2)
    assert world.chains() == [(0, 1, 2)]
    world.wait(HEARTBEAT_SECONDS)
    assert world.chains() == [(1, 2)]


@pytest.mark.parametrize("first", ["the worker", "the connection"])
def test_lost_takes_both_signs(first):
    world = World(2)
    world.table(shards=2)
    before = world.chains()
    steps = [lambda: world.membership.remove_worker("tcp://w0"), lambda: world.cut(0)]
    for step in steps if first == "the worker" else steps[::-1]:
        assert world.chains() == before
        assert 0 in world.membership.servers
        step()
    assert world.chains() == [(1,), (1,)]
    assert 0 not in world.membership.servers
    assert route(world)["tables"][0]["owners"] == [1, 1]
    assert "0" not in route(world)["servers"]


def test_a_worker_that_is_gone_and_silent_is_lost():
    """Its connection is open: the machine vanished."""
    world = World(2)
    world.table(shards=2)
    world.membership.remove_worker("tcp://w0")
    world.asleep.add(0)
    world.wait(SILENCE + 1)
    assert world.chains() == [(1,), (1,)]
    assert 0 not in world.membership.servers
    assert world.lines[0].closed


def test_a_connection_that_breaks_and_comes_again_costs_nothing():
    world = World(2)
    world.table(shards=2)
    before = world.places()
    world.cut(0)
    world.wait(1.0)
    world.serve(0)
    world.wait(SILENCE + 1)
    assert world.places() == before


def test_the_last_copy_is_gone():
    world = World(2)
    world.table(shards=2, copies=1)
    world.membership.remove_worker("tcp://w1")
    world.cut(1)
    assert world.chains() == [(0,), ()]
    assert route(world)["tables"][0]["owners"] == [0, -1]
    assert route(world)["remedy"] == world.membership.remedy == "there is no checkpoint to restore it from"
    assert world.membership.lost() == {(1, 1)}
    assert any("the last copy of shard 1 of table 'w' is gone" in text for _, text in world.membership.events)
    world.membership.remedy = "restore it"
    world.start()
    world.settle(1.0)
    assert world.chains()[1] == (), "nobody makes new rows of nothing"
    assert route(world)["remedy"] == "restore it"


def test_a_controller_that_slept_condemns_nobody():
    world = World(3)
    world.table()
    before = world.places()
    world.wait(1.0)
    world.time += 60
    world.membership.tick()
    world.wait(1.0)
    assert world.places() == before
    assert all(server.up for server in world.membership.servers.values())


# ---- more servers, fewer, others ------------------------------------------------------------------------------------


def test_more_copies_than_servers_are_refused():
    world = World(2)
    words = r"table 'w': 3 copies need as many servers, and 2 are up; .*ps.scale\(servers=3\)"
    with pytest.raises(TooFewWorkersError, match=words):
        world.table(copies=3)
    world.start()
    world.membership.servers[2].ready = False
    with pytest.raises(TooFewWorkersError, match=words):
        world.table(copies=3)
    world.membership.servers[2].ready = True
    world.table(copies=3)
    assert all(len(chain) == 3 for chain in world.chains())


def test_a_server_lost_while_a_table_is_made_has_none_of_it():
    world = World(2)
    spec = TableSpec("w", shards=2, copies=2, id=1).to_dict()
    places = world.membership.add_table(spec)
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    world.membership.publish_tables([(spec, places)])
    assert world.chains() == [(1,), (1,)]


def test_a_table_whose_only_server_was_lost_meanwhile_is_not_made():
    world = World(2)
    made = []
    for number, name in enumerate(("v", "w"), 1):
        spec = TableSpec(name, shards=2, copies=1, id=number).to_dict()
        made.append((spec, world.membership.add_table(spec)))
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    with pytest.raises(ServerGoneError, match="'v' was not made: servers 0 were lost"):
        world.membership.publish_tables(made)
    assert not world.membership.specs


def test_a_lost_copy_is_made_anew_and_the_work_is_shared():
    world = World(3)
    world.table(shards=6)
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    world.settle(1.0)
    assert all(set(chain) == {1, 2} for chain in world.chains())
    world.start()
    world.settle(1.0)
    load = [sum(n in chain for chain in world.chains()) for n in (1, 2, 3)]
    assert load == [4, 4, 4]
    heads = [sum(chain[0] == n for chain in world.chains()) for n in (1, 2, 3)]
    assert max(heads) - min(heads) <= 1


def test_a_server_is_emptied():
    world = World(3)
    world.table(shards=6)
    assert not world.membership.empty(0)
    world.membership.retire([0])
    world.settle(1.0)
    assert world.membership.empty(0)
    assert all(set(chain) == {1, 2} for chain in world.chains())
    assert world.membership.servers[0].phase == "leaving"
    with pytest.raises(InputError, match="1 servers would be left, and there are tables with 2 copies"):
        world.membership.retire([1])
    with pytest.raises(InputError, match=r"has no server 9: \[0, 1, 2\]"):
        world.membership.retire([9])


def test_a_server_too_many_goes_when_all_copies_are_there():
    world = World(3)
    world.table(shards=6)
    world.asleep.add(0)
    world.wait(SILENCE + 1)
    number = world.start()
    world.asleep.clear()
    world.wait(2 * HEARTBEAT_SECONDS)
    world.membership.trim(3)
    assert not any(server.leaving for server in world.membership.servers.values()), "it may help to make the copies"
    for _ in range(3):
        world.settle()
        world.membership.trim(3)
    leaving = [n for n, server in world.membership.servers.items() if server.leaving]
    assert len(leaving) == 1
    world.settle(1.0)
    assert world.membership.empty(leaving[0])
    assert all(len(chain) == 2 for chain in world.chains())
    assert number in world.membership.servers
    assert any(
        text == f"server {leaving[0]} is to go: there are 4 servers, and 3 are wanted"
        for _, text in world.membership.events
    )


def test_nobody_goes_whom_the_copies_need():
    world = World(3)
    world.table(shards=3, copies=3)
    world.membership.trim(2)
    assert not any(server.leaving for server in world.membership.servers.values())


def test_a_joiner_counts_when_its_feeder_says_so_of_this_epoch():
    world = World(2)
    world.table(shards=1)
    world.membership.remove_worker("tcp://w1")
    world.cut(1)
    number = world.start()
    world.wait(TICK_SECONDS)
    (p,) = world.places()
    assert (p.chain, p.joiner) == ((0,), number)
    about = {"table": "w", "shard": 0}
    world.tell(number, frames.CAUGHT_UP, server=number, epoch=world.membership.epoch, **about)  # it says so itself
    world.tell(0, frames.CAUGHT_UP, server=7, epoch=world.membership.epoch, **about)  # of another
    world.tell(0, frames.CAUGHT_UP, server=number, epoch=p.fences[-1] - 1, **about)  # of an earlier placement
    with pytest.raises(ProtocolError, match="missing required field `epoch`"):
        world.tell(0, frames.CAUGHT_UP, server=number, **about)
    world.tell(
        0, frames.CAUGHT_UP, server=number, epoch=world.membership.epoch, table="v", shard=0
    )  # of a dropped table
    assert world.places() == [p]
    world.tell(0, frames.CAUGHT_UP, server=number, epoch=p.fences[-1], **about)
    assert world.chains() == [(0, number)]
    assert world.places()[0].fences == p.fences, "its predecessor has not changed"
    epoch = world.membership.epoch
    world.tell(0, frames.CAUGHT_UP, server=number, epoch=epoch, **about)  # said twice
    assert world.membership.epoch == epoch


def test_the_next_shard_moves_at_once_when_one_has_moved():
    """No step waits for the controller's next look."""
    world = World(2)
    world.table(shards=8, copies=1)
    number = world.start()
    world.wait(TICK_SECONDS)
    assert [p.joiner for p in world.places()].count(number) == 2
    for shard, p in enumerate(world.places()):
        if p.joiner is not None:
            feeder, epoch = p.chain[-1], world.membership.epoch
            world.tell(feeder, frames.CAUGHT_UP, server=number, table="w", shard=shard, epoch=epoch)
            assert world.places()[shard].stepping_down, "the old server is to give up the shard"
            epoch = world.membership.epoch
            world.tell(feeder, frames.STEPPED_DOWN, table="w", shard=shard, epoch=epoch)
            assert world.chains()[shard] == (number,)
    assert sorted(world.chains()) == [(0,)] * 3 + [(1,)] * 3 + [(number,)] * 2


def handing_over(shards: int = 2):
    """A world in which server 0 is the primary of all shards and is asked to hand one over to server 1."""
    world = World(2)
    world.table(shards=shards)
    world.membership.remove_worker("tcp://w1")
    world.cut(1)
    number = world.start()
    for _ in range(20):
        world.wait(TICK_SECONDS)
        for shard, p in enumerate(world.places()):
            if p.joiner is not None:
                world.tell(0, frames.CAUGHT_UP, server=number, table="w", shard=shard, epoch=world.membership.epoch)
            if p.stepping_down:
                assert p.chain == (0, number)
                return world, shard, number
    raise AssertionError("nobody is asked to step down")


def test_a_primary_that_steps_down_is_followed_by_the_one_chosen():
    world, shard, number = handing_over()
    since, about = world.membership.epoch, {"table": "w", "shard": shard}
    assert world.lines[0].placement["tables"]["1"][shard][3] is True
    before = world.places()[shard]
    world.tell(number, frames.STEPPED_DOWN, epoch=since, **about)  # not the primary
    world.tell(0, frames.STEPPED_DOWN, epoch=since - 1, **about)  # of an earlier placement
    world.tell(0, frames.STEPPED_DOWN, epoch=since, table="w", shard=1 - shard)  # another shard
    with pytest.raises(ProtocolError, match="missing required field `epoch`"):
        world.tell(0, frames.STEPPED_DOWN, **about)
    assert world.places()[shard] == before
    world.tell(0, frames.STEPPED_DOWN, epoch=since, **about)
    after = world.places()[shard]
    assert (after.chain, after.stepping_down) == ((number, 0), False)
    assert after.fences == (since + 1, since + 1)
    epoch = world.membership.epoch
    world.tell(0, frames.STEPPED_DOWN, epoch=epoch, **about)  # said twice
    assert world.membership.epoch == epoch


def test_a_primary_that_cannot_hand_over_goes_on_and_is_asked_again_after_a_back_off():
    world, shard, number = handing_over()
    since, asked = world.membership.epoch, world.time
    while world.time < asked + STEP_DOWN - 2 * TICK_SECONDS:
        world.wait(TICK_SECONDS)
        assert world.places()[shard].stepping_down
    world.wait(3 * TICK_SECONDS)
    assert not world.places()[shard].stepping_down
    assert world.membership.epoch > since
    assert any(
        f"server 0 could not hand over shard {shard} of table 'w'" in text for _, text in world.membership.events
    )
    world.tell(0, frames.STEPPED_DOWN, table="w", shard=shard, epoch=since)  # an answer to the first time
    assert world.chains()[shard] == (0, number)
    again = world.time + BACK_OFF_FACTOR * STEP_DOWN
    while world.time < again - 4 * TICK_SECONDS:
        world.wait(TICK_SECONDS)
        assert world.lines[0].placement["tables"]["1"][shard][3] is False, "the primary serves"
    world.wait(4 * TICK_SECONDS)
    assert world.lines[0].placement["tables"]["1"][shard][3] is True, "the primary is asked again"
    world.tell(0, frames.STEPPED_DOWN, table="w", shard=shard, epoch=since)
    assert world.chains()[shard] == (0, number)
    world.tell(0, frames.STEPPED_DOWN, table="w", shard=shard, epoch=world.membership.epoch)
    assert world.chains()[shard] == (number, 0)


def leaving_in_vain():
    """A world in which server 0 leaves and could not hand over its only shard to server 1; server 2 has joined."""
    world = World(3)
    world.table(shards=1)
    assert world.chains() == [(0, 1)]
    world.membership.retire([0])
    world.wait(TICK_SECONDS)
    world.tell(1, frames.CAUGHT_UP, table="w", shard=0, server=2, epoch=world.membership.epoch)
    world.wait(2 * TICK_SECONDS)
    assert world.places()[0].stepping_down
    world.wait(STEP_DOWN + 2 * TICK_SECONDS)
    assert world.places()[0][::3] == ((0, 1, 2), False)
    return world


def test_a_server_that_leaves_and_cannot_hand_over_serves_and_is_asked_again_after_a_back_off():
    world = leaving_in_vain()
    epoch = world.membership.epoch
    world.wait(BACK_OFF_FACTOR * STEP_DOWN - 10 * TICK_SECONDS)
    assert world.membership.epoch == epoch
    world.settle(10 * TICK_SECONDS)
    assert world.chains() == [(1, 2)]
    assert world.membership.empty(0)


def test_the_back_off_of_a_primary_does_not_hold_for_its_successor():
    world = leaving_in_vain()
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    assert world.chains() == [(1, 2)]
    assert world.start() == 3
    world.membership.retire([1])
    world.wait(TICK_SECONDS)
    world.tell(2, frames.CAUGHT_UP, table="w", shard=0, server=3, epoch=world.membership.epoch)
    world.wait(2 * TICK_SECONDS)
    assert world.places()[0][::3] == ((1, 2, 3), True)


def test_what_is_late_where_another_leads_by_now_is_no_failure():
    world, _, number = handing_over()
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    world.wait(STEP_DOWN + 1)
    assert world.chains() == [(number,), (number,)]
    assert not any("could not hand over" in text for _, text in world.membership.events)


def test_a_primary_that_dies_while_it_steps_down():
    world, _, number = handing_over()
    world.membership.remove_worker("tcp://w0")
    world.cut(0)
    assert world.chains() == [(number,), (number,)]
    assert not any(p.stepping_down for p in world.places())
    world.wait(STEP_DOWN + 1)
    assert world.chains() == [(number,), (number,)]


def test_the_chosen_one_dies_while_the_primary_steps_down():
    world, shard, number = handing_over()
    world.membership.remove_worker("tcp://w2")
    world.cut(number)
    assert world.chains() == [(0,), (0,)]
    world.tell(0, frames.STEPPED_DOWN, table="w", shard=shard, epoch=world.membership.epoch)
    assert world.chains() == [(0,), (0,)]
    assert not any(p.stepping_down for p in world.places())


def test_a_primary_that_leaves_goes_on_where_its_successor_is_lost_meanwhile():
    world = World(4)
    world.table(shards=1)
    world.membership.retire([0])
    world.wait(TICK_SECONDS)
    joiner = world.places()[0].joiner
    world.tell(1, frames.CAUGHT_UP, table="w", shard=0, server=joiner, epoch=world.membership.epoch)
    world.wait(TICK_SECONDS)
    (p,) = world.places()
    assert (p.chain, p.stepping_down) == ((0, 1, joiner), True)
    since = world.membership.epoch
    world.membership.remove_worker(f"tcp://w{joiner}")
    world.cut(joiner)
    world.tell(0, frames.STEPPED_DOWN, table="w", shard=0, epoch=since)
    (p,) = world.places()
    assert (p.chain, p.stepping_down) == ((0, 1), False), "two copies, as asked for"
    world.settle()
    assert world.chains() == [(1, 5 - joiner)]


def test_a_leaving_server_that_is_the_last_goes_on():
    world = World(2)
    world.table(shards=1, copies=1)
    world.membership.retire([0])
    world.asleep.add(1)
    world.wait(SILENCE + 1)
    epoch = world.membership.epoch
    world.wait(1.0)
    assert world.membership.epoch == epoch, "it is not asked again and again to step down"
    assert not world.places()[0].stepping_down


def test_a_table_dropped_while_a_primary_steps_down():
    world, _, _ = handing_over(shards=4)
    world.membership.drop_table("w")
    world.table("w", shards=1)
    chains = world.chains()
    world.wait(STEP_DOWN + 1)
    assert world.chains() == chains


# ---- who is out of step ---------------------------------------------------------------------------------------------


def test_a_successor_that_takes_no_ops_is_taken_out():
    world = World(3)
    world.table(shards=1, copies=3)
    assert world.chains() == [(0, 1, 2)]
    since, about = world.membership.epoch, {"server": 1, "shards": [["w", 0]], "why": "has confirmed nothing for 3 s"}
    world.tell(2, frames.SUSPECT, epoch=since, **about)  # whose affair it is not
    world.tell(0, frames.SUSPECT, epoch=world.places()[0].fences[1] - 1, **about)  # of an earlier placement
    assert world.chains() == [(0, 1, 2)]
    world.tell(0, frames.SUSPECT, epoch=since, **about)
    assert world.chains() == [(0, 2)]
    assert any(
        "server 1 is out of step with shard 0 of table 'w': has confirmed" in t for _, t in world.membership.events
    )
    world.tell(0, frames.SUSPECT, epoch=since, **about)  # said twice
    assert world.chains() == [(0, 2)]
    world.wait(UNFIT_SECONDS - 3 * TICK_SECONDS)
    assert world.places()[0].line == (0, 2), "it is not asked again at once"
    world.settle(2 * UNFIT_SECONDS)
    assert world.chains()[0][:2] == (0, 2)
    assert set(world.chains()[0]) == {0, 1, 2}


def test_a_joiner_that_takes_no_dump_is_taken_out():
    world = World(2)
    world.table(shards=1)
    world.membership.remove_worker("tcp://w1")
    world.cut(1)
    number = world.start()
    world.wait(TICK_SECONDS)
    assert world.places()[0].joiner == number
    world.tell(0, frames.SUSPECT, server=number, shards=[["w", 0]], why="no", epoch=world.membership.epoch)
    assert (world.places()[0].chain, world.places()[0].joiner) == ((0,), None)


def test_a_server_may_say_of_itself_that_it_lacks_a_copy():
    world = World(2)
    world.table(shards=2)
    world.tell(1, frames.SUSPECT, server=1, shards=[["w", 0], ["w", 1]], why="none here", epoch=world.membership.epoch)
    assert world.chains() == [(0,), (0,)]
    world.tell(0, frames.SUSPECT, server=0, shards=[["w", 0]], why="none here", epoch=world.membership.epoch)
    assert world.chains()[0] == ()
    world.settle(1.0)
    assert world.places()[0].line == (), "what is lost holds up nobody"
    assert len(world.chains()[1]) == 2


def test_what_is_said_of_a_dropped_table_is_not_heard():
    world = World(2)
    world.table("w", shards=1)
    world.table("v", shards=1)
    world.membership.drop_table("w")
    world.tell(0, frames.SUSPECT, server=1, shards=[["w", 0], ["v", 0]], why="x", epoch=world.membership.epoch)
    assert world.chains("v") == [(0,)]


def test_what_happened_is_told():
    world = World(2)
    world.table(shards=1)
    status = Monitor(Runs("dps"), world.membership, lambda: 0.0).snapshot()
    assert status.epoch == world.membership.epoch
    assert [s.number for s in status.servers] == [0, 1]
    server = status.servers[0]
    assert (server.key, server.worker, server.address) == ("key-0", "tcp://w0", ("127.0.0.1", 9000))
    assert server.state == "up"
    assert status.tables["w"].chains == [[0, 1]]
    for _ in range(1000):
        world.membership.note("again")
    assert len(world.membership.events) <= 256


def test_a_look_at_a_fleet_that_is_settled_does_not_go_through_its_shards(monkeypatch):
    world = World(servers=3)
    world.table()
    world.settle()
    asked = []
    monkeypatch.setattr(
        "dps.engine.controller.failover.next_steps", lambda *args: asked.append(args) or next_steps(*args)
    )
    world.wait(20 * TICK_SECONDS)
    assert not asked
    world.membership.retire([0])
    world.settle()
    assert asked
    assert world.membership.empty(0)


# ---- the tests themselves -------------------------------------------------------------------------------------------

ASKED_AGAIN = test_a_primary_that_cannot_hand_over_goes_on_and_is_asked_again_after_a_back_off
WRONG = {
    "a step-down that timed out leaves its mark": (
        *(Handovers, "end_late"),
        "p._replace(stepping_down=False)",
        "p",
        ASKED_AGAIN,
    ),
    "it is asked again at once": (Handovers, "end_late", "self._backing_off[name, shard] = ", "_ = ", ASKED_AGAIN),
    "who leaves is asked again at once": (
        *(Handovers, "end_late", "self._backing_off[name, shard] = ", "_ = "),
        test_a_server_that_leaves_and_cannot_hand_over_serves_and_is_asked_again_after_a_back_off,
    ),
    "it is never asked again": (Handovers, "backing_off", "now < until", "True", ASKED_AGAIN),
    "the next shard waits for the next look": (
        *(Membership, "caught_up", "self._begin_steps(self.endpoint.now())", "pass"),
        test_the_next_shard_moves_at_once_when_one_has_moved,
    ),
    "the end of a back-off is not noticed": (
        *(Membership, "_begin_steps"),
        "unfit, backing_off, together)\n",
        "unfit, together)\n",
        ASKED_AGAIN,
    ),
    "a step-down never times out": (Handovers, "end_late", "if now > until", "if False", ASKED_AGAIN),
    "a late answer counts": (Handovers, "stepped_down", "epoch < since", "False", ASKED_AGAIN),
    "a suspicion counts up to where it is wrong": (
        *(
            Membership,
            "suspect",
            "for (name, shard), p in {each: self._place(*each) for each in message.shards}.items():",
        ),
        "for name, shard in message.shards:\n        p = self._place(name, shard)",
        test_a_suspicion_of_a_shard_that_there_is_not_changes_nothing,
    ),
    "the back-off holds for whoever leads": (
        *(Handovers, "backing_off", "self._owner.places[name][shard].chain[:1] == (primary,)", "True"),
        test_the_back_off_of_a_primary_does_not_hold_for_its_successor,
    ),
    "a primary that is gone is said to have failed": (
        *(Handovers, "end_late", "not p.stepping_down", "False"),
        test_what_is_late_where_another_leads_by_now_is_no_failure,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fleet_is_caught(name, monkeypatch):
    kind, method, old, new, scenario = WRONG[name]
    monkeypatch.setattr(kind, method, mutant(getattr(kind, method), old, new))
    with pytest.raises(AssertionError):
        scenario()
