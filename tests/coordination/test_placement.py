"""Where shards are, and the way from one placement to the next: nothing is lost on it, and it ends."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracles import mutant

from dps.engine.coordination import placement
from dps.engine.coordination.placement import Place, PlacementStep, StepKind, next_steps, place, without
from dps.errors import InputError

# ---- the beginning --------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 300),
    st.lists(st.integers(0, 1000), min_size=1, max_size=40, unique=True),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_first_placement_is_even_and_keeps_neighbours_together(shards, servers, copies, epoch):
    placed = place(shards, servers, copies, epoch)
    copies = min(copies, len(servers))
    assert len(placed) == shards
    for p in placed:
        assert len(set(p.chain)) == len(p.chain) == copies
        assert p == (p.chain, None, (epoch,) * copies, False)
    heads = [p.chain[0] for p in placed]
    counts = Counter(dict.fromkeys(servers, 0))
    counts.update(heads)
    assert set(counts) == set(servers)
    assert max(counts.values()) - min(counts.values()) <= 1
    changes = sum(a != b for a, b in pairwise(heads))
    assert changes == len(set(heads)) - 1, "a server's shards are neighbours"
    assert [s for s in servers if s in set(heads)] == list(dict.fromkeys(heads)), "in the order given"


@given(st.integers(1, 8), st.integers(2, 12), st.integers(2, 4))
def test_the_backups_of_a_server_are_spread(each, servers, copies):
    """Whichever server fails, many others take over its work."""
    placed = place(each * servers, range(servers), copies)
    for lost in range(servers):
        heirs = Counter(p.chain[1] for p in placed if p.chain[0] == lost)
        assert len(heirs) == min(each, servers - 1)
        assert max(heirs.values()) <= -(-each // (servers - 1))


def test_examples():
    assert [p.chain for p in place(4, [0, 1])] == [(0,), (0,), (1,), (1,)]
    assert [p.chain for p in place(1, [5, 3])] == [(5,)]
    assert [p.chain for p in place(5, [2, 0], 3)] == [(2, 0), (2, 0), (2, 0), (0, 2), (0, 2)]
    assert [p.chain for p in place(4, [0, 1, 2], 2)] == [(0, 1), (0, 2), (1, 2), (2, 0)]


@pytest.mark.parametrize(
    ("shards", "servers", "match"), [(0, [1], "shard"), (4, [], "no server"), (4, [1, 1], "twice")]
)
def test_what_cannot_be_placed(shards, servers, match):
    with pytest.raises(InputError, match=match):
        place(shards, servers)


# ---- failures -------------------------------------------------------------------------------------------------------

P = Place((0, 1, 2), 3, (5, 6, 7, 8))


@pytest.mark.parametrize(
    ("old", "lost", "silent", "doubted", "new"),
    [
        (P, {9}, {8}, (), P),
        (P, {0}, (), (), Place((1, 2), 3, (9, 7, 8))),
        (P, {1}, (), (), Place((0, 2), 3, (5, 9, 8))),
        (P, {2}, (), (), Place((0, 1), 3, (5, 6, 9))),
        (P, {3}, (), (), Place((0, 1, 2), None, (5, 6, 7))),
        (P, (), {0, 3}, (), Place((1, 2), None, (9, 7))),
        (P, (), {0, 1, 2}, (), P),  # they may come back
        (P, {0}, {1, 2}, (), Place((1, 2), 3, (9, 7, 8))),
        (P, {0, 1, 2}, (), (), Place(())),
        (Place((0,), None, (5,)), (), {0}, (), Place((0,), None, (5,))),
        (P._replace(stepping_down=True), {1}, (), (), Place((0, 2), 3, (5, 9, 8), True)),
        (P._replace(stepping_down=True), {0}, (), (), Place((1, 2), 3, (9, 7, 8), False)),
        (P, (), {0}, {1}, Place((1, 2), 3, (9, 7, 8))),  # the last is known to be alive
        (P, (), {0}, {1, 2}, P),  # those may be dead
        (P, {1}, {0}, {1, 2}, Place((0, 2), 3, (5, 9, 8))),
        (P, {1}, (), {0, 2}, Place((0, 2), 3, (5, 9, 8))),
    ],
)
def test_which_server_takes_over(old, lost, silent, doubted, new):
    placed = without(old, lost, silent, 9, doubted)
    assert placed == new
    assert (placed is old) == (new == old), "no new epoch for nothing"


# ---- step by step ---------------------------------------------------------------------------------------------------


class Placements(RuleBasedStateMachine):
    """Tables, servers, and rules that carry out the steps as the controller does."""

    module = placement
    weights, together = placement.EVEN, placement.NOWHERE

    @initialize(servers=st.integers(1, 5), tables=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=2))
    def begin(self, servers, tables):
        self.epoch, self.next = 1, servers
        self.up, self.leaving, self.silent, self.gone = set(range(servers)), set(), set(), set()
        self.doubtful = set()  # of those up: there is one of two signs that they are lost
        self.copies = {f"t{n}": copies for n, (_, copies) in enumerate(tables)}
        self.tables = {
            f"t{n}": list(place(shards, range(servers), copies, 1)) for n, (shards, copies) in enumerate(tables)
        }
        self.doing = {}  # (table, shard) -> the step for which its primary steps down

    # -- what happens to servers

    @precondition(lambda self: len(self.up) < 7)
    @rule()
    def a_server_comes(self):
        self.up.add(self.next)
        self.next += 1

    @precondition(lambda self: len(self.up - self.leaving) > 1)
    @rule(data=st.data())
    def a_server_is_to_leave(self, data):
        self.leaving.add(data.draw(st.sampled_from(sorted(self.up - self.leaving))))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def a_server_falls_silent(self, data):
        server = data.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(server)
        self.doubtful.discard(server)
        self.silent.add(server)
        self.bury()

    @precondition(lambda self: self.silent)
    @rule(data=st.data())
    def a_silent_one_is_back(self, data):
        server = data.draw(st.sampled_from(sorted(self.silent)))
        self.silent.discard(server)
        self.up.add(server)
        self.bury()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def a_server_is_in_doubt_or_not_any_more(self, data):
        self.doubtful ^= {data.draw(st.sampled_from(sorted(self.up)))}
        self.bury()

    @precondition(lambda self: self.up | self.silent)
    @rule(data=st.data())
    def a_server_is_lost(self, data):
        server = data.draw(st.sampled_from(sorted(self.up | self.silent)))
        for group in (self.up, self.leaving, self.silent, self.doubtful):
            group.discard(server)
        self.gone.add(server)
        self.bury()

    def bury(self):
        for name, shard, p in self.each():
            new = self.module.without(p, self.gone, self.silent, self.epoch + 1, self.doubtful)
            staying = [n for n in p.chain if n not in self.gone]
            assert [n for n in p.chain if n in new.chain] == list(new.chain), "in their order"
            assert set(new.chain) >= set(staying) - self.silent, "no server that is in step and well is put out"
            assert bool(new.chain) == bool(staying), "rows that a server has are not given up"
            known = [n for n in staying if n in self.up - self.doubtful]
            assert known or list(new.chain) == staying, (
                "a server that may have all of it stays, unless another one lives"
            )
            assert not known or set(new.chain) <= self.up, "no shard waits for a silent server where another lives"
            self.put(name, shard, new)
            self.epoch += 1

    # -- what the controller does

    @rule(moves=st.integers(1, 4), data=st.data())
    def a_look(self, moves, data):
        for step in self.steps(moves):
            self.take(step)

    @rule(data=st.data())
    def something_is_done(self, data):
        """A joiner has caught up, or a primary has stepped down."""
        waiting = [(name, shard) for name, shard, p in self.each() if self.can_go_on(p)]
        if waiting:
            self.go_on(*data.draw(st.sampled_from(waiting)))

    def can_go_on(self, p):
        if p.stepping_down:
            return p.chain[0] in self.up
        return p.joiner is not None and {p.chain[-1], p.joiner} <= self.up

    def steps(self, moves):
        tables = {name: (self.copies[name], places) for name, places in self.tables.items()}
        well = self.up - self.doubtful
        args = tables, well - self.leaving, well & self.leaving, moves
        steps = list(self.module.next_steps(*args, weights=self.weights, together=self.together))
        if self.weights == placement.EVEN:
            ones = {name: [1.0] * len(places) for name, places in self.tables.items()}
            again = self.module.next_steps(*args, weights=ones, together=self.together)
            assert list(again) == steps, "equal weights are as none"
        assert len({(step.table, step.shard) for step in steps}) == len(steps), "one for a shard"
        joiners = sum(p.joiner is not None for _, _, p in self.each()) + sum(
            step.kind == StepKind.JOIN for step in steps
        )
        assert joiners <= max(moves, sum(p.joiner is not None for _, _, p in self.each()))
        return steps

    def take(self, step):
        p = self.tables[step.table][step.shard]
        assert p.joiner is None
        assert not p.stepping_down
        if step.kind == StepKind.JOIN:
            assert step.server in self.up - self.leaving - self.doubtful
            assert step.server not in p.chain
            new = self.module.joined(p, step.server, self.epoch + 1)
            assert new.chain == p.chain
        else:
            assert step.server in p.chain
            assert step.server not in self.doubtful
            if step.kind == StepKind.DROP and step.server != p.chain[0]:
                chain = [n for n in p.chain if n != step.server]
                new = self.module.rechained(p, chain, None, self.epoch + 1)
                self.keeps_copies(step.table, p, new, self.enough(step.table))
            else:
                new = p._replace(stepping_down=True)
                self.doing[step.table, step.shard] = step
        self.put(step.table, step.shard, new)
        self.epoch += 1

    def go_on(self, name, shard):
        p = self.tables[name][shard]
        enough = self.enough(name)
        if p.stepping_down:
            step = self.doing.pop((name, shard))
            staying = self.up - self.doubtful - self.leaving
            new = self.module.handed_over(p, step, staying, self.copies[name], self.epoch + 1)
            assert not new.stepping_down
        else:
            new = self.module.appended(p, self.epoch + 1)
            assert new.chain == (*p.chain, p.joiner)
        self.keeps_copies(name, p, new, enough)
        self.put(name, shard, new)
        self.epoch += 1
        self.bury()

    def enough(self, name):
        """How many copies there are to be."""
        return min(self.copies[name], len(self.up - self.doubtful - self.leaving))

    def keeps_copies(self, name, old, new, enough):
        """No step takes a copy that is needed: only those beyond what is asked for, and of servers that leave.

        A server leaves when as many others as the table asks for have its copy, however few servers there are, because
        one of these may be dead and not yet missed.
        """
        well = self.up - self.doubtful
        if self.leaving & (set(old.chain) - set(new.chain)):
            assert sum(n in well - self.leaving for n in new.chain) >= self.copies[name]
        before, after = (sum(n in well for n in p.chain) for p in (old, new))
        assert after >= min(before, enough)

    # -- the rules

    def each(self):
        return [(name, shard, p) for name, places in self.tables.items() for shard, p in enumerate(places)]

    def put(self, name, shard, new):
        old = self.tables[name][shard]
        assert len(new.fences) == len(new.line)
        assert len(set(new.line)) == len(new.line), "a server twice"
        before = dict(zip(old.line, zip((None, *old.line), old.fences, strict=False), strict=True))
        for previous, server, fence in zip((None, *new.line), new.line, new.fences, strict=False):
            same = server in before and before[server][0] == previous
            assert fence == (before[server][1] if same else self.epoch + 1), "it rises where the one before has changed"
            assert server not in before or fence >= before[server][1]
        self.tables[name][shard] = new

    @invariant()
    def no_server_is_where_it_cannot_be(self):
        for _, _, p in self.each():
            assert not self.gone & set(p.line)
            assert p.joiner is None or p.chain
            assert not self.silent & set(p.chain) or set(p.chain) <= self.silent | self.doubtful, "a silent one alone"

    def teardown(self):
        """Left alone, it comes to rest, and everything is as it should be."""
        if not hasattr(self, "tables"):
            return
        self.doubtful.clear()
        for server in sorted(self.silent):
            self.silent.discard(server)
            self.up.add(server)
        self.bury()
        staying = self.up - self.leaving
        shards, seen = [p for _, _, p in self.each() if p.chain], 0
        limit = 8 * (1 + len(shards)) * (1 + len(self.up)) + 64
        while seen < limit:
            seen += 1
            steps = self.steps(moves=4)
            waiting = [(name, shard) for name, shard, p in self.each() if self.can_go_on(p)]
            if not steps and not waiting:
                break
            for step in steps:
                self.take(step)
            for name, shard in waiting:
                self.go_on(name, shard)
        assert seen < limit, "it goes on for ever"
        load, heads = Counter(dict.fromkeys(staying, 0)), Counter(dict.fromkeys(staying, 0))
        for name, _, p in self.each():
            assert p.joiner is None
            assert not p.stepping_down
            if p.chain and staying:
                assert sum(n in staying for n in p.chain) == min(self.copies[name], len(staying))
                assert set(p.chain) <= staying or len(staying) < self.copies[name]
        for name, shard, p in self.each():
            load.update({n: self.weight(name, shard) for n in p.chain if n in staying})
            heads.update({n: self.weight(name, shard) for n in p.chain[:1] if n in staying})
        if staying:
            self.is_even(load, heads)

    def weight(self, name, shard):
        return self.weights[name][shard] if name in self.weights else 1

    def is_even(self, load, heads):
        assert max(load.values()) - min(load.values()) <= 1
        for _, _, p in self.each():
            for backup in set(p.chain[1:]) & heads.keys():
                assert heads[p.chain[0]] - heads[backup] <= 1, "it could lead as well"


TestPlacements = Placements.TestCase


class WeightedPlacements(Placements):
    """The same with weights, which change: shards move to servers with less load, and only for a gain."""

    @rule(data=st.data())
    def weights_change(self, data):
        self.weights = {
            name: data.draw(st.lists(WEIGHT, min_size=len(places), max_size=len(places)))
            for name, places in self.tables.items()
            if data.draw(st.booleans())
        }

    def is_even(self, load, heads):
        """No copy is left whose move to the emptiest server would lower the larger load enough; so for primaries."""
        emptiest = min(load, key=lambda n: (load[n], n))
        for name, shard, p in self.each():
            weight = self.weight(name, shard)
            for server in p.chain if emptiest not in p.chain else ():
                gain = min(weight, load[server] - load[emptiest] - weight)
                assert gain < min(1, 0.1 * sum(load.values()) / len(load)), "a move would gain"
            for backup in set(p.chain[1:]) & heads.keys():  # the others are about to go
                gain = min(weight, heads[p.chain[0]] - heads[backup] - weight)
                assert gain < min(1, 0.1 * sum(heads.values()) / len(heads)), "another leader would gain"


class GatheredPlacements(Placements):
    """The same, while neighbouring shards of some tables are brought together; no other shard of these moves then."""

    @rule(times=st.sampled_from([1, 2, 2, 3, 6]), data=st.data())
    def some_are_gathered(self, times, data):
        """By one more, or all by none."""
        some = data.draw(st.sampled_from([None, *self.tables]))
        firsts = () if some is None else [n - n % times for n in range(len(self.tables[some]))]
        self.together = {} if some is None else {**self.together, some: firsts}

    def is_even(self, load, heads):
        for name, firsts in self.together.items():
            places = self.tables[name]
            for p, n in zip(places, firsts, strict=True):
                first = places[n].chain
                # A server that is in doubt may be dying, so nothing is done about it.
                waits = not p.chain or not first or any(server not in load for server in (*first, *p.chain))
                assert set(p.chain) == set(first) or waits, "they lie together"
        if not self.together:
            super().is_even(load, heads)


TestGatheredPlacements = GatheredPlacements.TestCase
WEIGHT = st.one_of(st.sampled_from([1, 4, 4, 16, 64, 64, 640]), st.integers(1, 640)).map(lambda w: w / 64)
TestWeightedPlacements = WeightedPlacements.TestCase


def chains_after(places, weights, servers, copies=1):
    """The chains once all steps are done, and how many copies joined."""
    joined = 0
    for epoch in range(2, 200):
        steps = list(placement.next_steps({"w": (copies, places)}, servers, [], 4, weights={"w": weights}))
        if not steps:
            return [p.chain for p in places], joined
        for step in steps:
            p = places[step.shard]
            if step.kind == StepKind.JOIN:
                joined += 1
                places[step.shard] = placement.appended(placement.joined(p, step.server, epoch), epoch)
            else:
                stepping = p._replace(stepping_down=True)
                places[step.shard] = placement.handed_over(stepping, step, servers, copies, epoch)
    raise AssertionError("it goes on for ever")


def alone(heads):
    return [Place((n,), None, (1,)) for n in heads]


def test_a_hot_shard_has_a_server_for_itself_and_no_other_move_is_made():
    """Five of six cold shards stay where they are: the one that is beside the hot shard goes."""
    weights = [4.0, 0.4, 0.4, 0.4, 0.4, 0.4]
    chains, joined = chains_after(alone([0, 0, 0, 1, 1, 1]), weights, [0, 1])
    assert chains == [(0,), (1,), (1,), (1,), (1,), (1,)]
    assert joined == 2
    assert chains_after(alone([0, 1, 1, 1, 1, 1]), weights, [0, 1]) == (chains, 0), "it rests"


def test_the_copy_that_gains_most_goes_and_what_gains_little_stays():
    chains, joined = chains_after(alone([0] * 5 + [1] * 3), [1.5, 1.25, 1.0, 0.125, 0.125, 1.0, 1.0, 1.0], [0, 1])
    assert joined == 0, "4.0 and 3.0: no move would gain more than an eighth"
    chains, joined = chains_after(alone([0] * 4 + [1]), [2.0, 1.0, 1.0, 0.5, 0.5], [0, 1])
    assert joined == 1
    assert chains[0] == (1,), "one move of 2.0 instead of two of 1.0"


def test_a_copy_goes_where_the_load_is_least_once_the_copies_before_are_there():
    """The heavy shard is on its way to server 1, so the light one goes to server 2."""
    tables = {"w": (2, [Place((0,), None, (1,)), Place((0,), None, (1,))]), "v": (1, [Place((2,), None, (1,))])}
    steps = placement.next_steps(tables, [0, 1, 2], [], 4, weights={"w": [10.0, 1.0], "v": [5.0]})
    joins = [(step.table, step.shard, step.server) for step in steps if step.kind == StepKind.JOIN]
    assert joins[:2] == [("w", 0, 1), ("w", 1, 2)]


def test_where_the_fullest_server_has_one_shard_the_next_one_gives():
    chains, joined = chains_after(alone([0, 1, 1, 1, 2]), [8.0, 1.0, 1.0, 1.0, 0.25], [0, 1, 2])
    assert chains == [(0,), (1,), (1,), (2,), (2,)]
    assert joined == 1


def test_heavy_primaries_are_spread_over_their_backups():
    places = [Place(chain, None, (1, 1)) for chain in ((0, 1), (0, 1), (1, 0), (1, 0))]
    chains, joined = chains_after(places, [2.0, 1.5, 0.25, 0.25], [0, 1], copies=2)
    assert joined == 0
    heads = Counter()
    for chain, weight in zip(chains, [2.0, 1.5, 0.25, 0.25], strict=True):
        heads[chain[0]] += weight
    assert max(heads.values()) <= 2.25


def test_many_shards_at_rest_need_no_step():
    """To look costs little where nothing is to do."""
    tables = {"w": (2, place(4096, range(8), 2))}
    assert list(placement.next_steps(tables, range(8), [], 4)) == []


def test_the_last_server_is_not_asked_to_step_down():
    assert list(next_steps({"w": (2, [Place((0,), None, (1,))])}, [], [0], moves=4)) == []


def test_a_backup_in_doubt_is_not_asked_to_lead():
    """Rare in random histories: no other step is due, and the server in doubt leads less than the others."""
    places = [Place((0, 2), None, (1, 1)), Place((0, 2), None, (1, 1)), Place((1, 2), None, (1, 1))]
    assert list(placement.next_steps({"w": (2, places)}, [0, 1], [], moves=4)) == []
    places = [Place((0, 2, 1), None, (1, 1, 1)), Place((0, 2, 1), None, (1, 1, 1)), Place((1, 2, 0), None, (1, 1, 1))]
    assert list(placement.next_steps({"w": (2, places)}, [0, 1], [], moves=4)) == []


def test_a_primary_goes_on_where_copies_were_lost_since_it_was_asked_to_go():
    old = Place((0, 1), None, (1, 1), stepping_down=True)
    placed = placement.handed_over(
        old, PlacementStep(StepKind.DROP, "w", 0, 0), servers=[0, 2], copies=2, epoch=9
    )  # 1 is in doubt
    assert placed == old._replace(stepping_down=False)


def test_a_server_that_leaves_keeps_its_copy_while_too_few_servers_stay():
    """Server 1 may be dead and not yet missed; then server 0 alone has the rows."""
    for chain in ((1, 0), (0, 1)):
        assert list(placement.next_steps({"w": (2, [Place(chain, None, (1, 1))])}, [1], [0], moves=4)) == []
        joining = list(placement.next_steps({"w": (2, [Place(chain, None, (1, 1))])}, [1, 2], [0], moves=4))
        assert joining == [PlacementStep(StepKind.JOIN, "w", 0, 2)]
    old = Place((0, 1), None, (1, 1), stepping_down=True)
    leaving = PlacementStep(StepKind.DROP, "w", 0, 0)
    assert placement.handed_over(old, leaving, [1], 2, 9) == old._replace(stepping_down=False)


def test_a_backup_that_is_to_leave_does_not_lead_and_keeps_its_copy():
    """It was to lead when it began to leave; another copy of the shard does not exist yet."""
    old = Place((0, 1), None, (1, 1), stepping_down=True)
    step = PlacementStep(StepKind.LEAD, "w", 0, 1)
    assert placement.handed_over(old, step, servers=[0], copies=2, epoch=9) == old._replace(stepping_down=False)


@pytest.mark.parametrize(
    ("first", "other", "unfit"), [((0,), (0, 2), []), ((0, 1), (1, 2), [0]), ((0, 1), (2, 1), [0, 2])]
)
def test_shards_that_come_together_lose_no_copy_that_is_needed(first, other, unfit):
    """The first shard has lost a copy, or a server that is to have the other one cannot take it now."""
    places = [Place(chain, None, (1,) * len(chain)) for chain in (first, other)]
    steps = placement.next_steps({"w": (2, places)}, [0, 1, 2], [], 4, unfit, together={"w": (0, 0)})
    assert [step for step in steps if step.shard == 1] == []


def test_a_server_in_doubt_keeps_its_copy_of_a_shard_that_is_brought_to_others():
    places = [Place(chain, None, (1,) * len(chain)) for chain in ((0, 2), (0, 1, 3, 2))]
    steps = placement.next_steps({"w": (2, places)}, [0, 1, 2], [], 4, together={"w": (0, 0)})
    assert list(steps) == [PlacementStep(StepKind.DROP, "w", 1, 1)]


def test_a_shard_moves_as_if_it_was_alone_where_the_first_one_is_lost():
    places = [Place(()), Place((1, 2), None, (1, 1)), *[Place((1,), None, (1,))] * 3]
    tables, together = {"w": (1, places)}, {"w": (0, 0, 2, 3, 4)}
    found = [placement.next_steps(tables, [1, 2], [], 4, together=each) for each in ({}, together)]
    steps = [[step for step in some if step.shard == 1] for some in found]
    assert steps[0] == steps[1] == [PlacementStep(StepKind.DROP, "w", 1, 1)]


def test_a_primary_that_rests_is_not_asked_to_hand_over():
    """Everything else goes on: copies are made and given up, and other shards are handed over."""
    chain, resting = (1, 1, 1), {("w", 0)}

    def steps(places, servers, leaving=(), resting=resting):
        return list(placement.next_steps({"w": (2, places)}, servers, leaving, 4, (), resting))

    leaving = [Place((0, 1, 2), None, chain), Place((0, 1, 2), None, chain)]
    assert steps(leaving, [1, 2], [0]) == [PlacementStep(StepKind.DROP, "w", 1, 0)]
    assert steps(leaving, [1, 2], [0], ()) == [
        PlacementStep(StepKind.DROP, "w", 0, 0),
        PlacementStep(StepKind.DROP, "w", 1, 0),
    ]
    assert steps([Place((0, 1), None, (1, 1))], [1, 2], [0]) == [PlacementStep(StepKind.JOIN, "w", 0, 2)]
    assert steps([Place((0, 1, 2), None, chain)], [0, 2], [1]) == [PlacementStep(StepKind.DROP, "w", 0, 1)]
    uneven = [Place((0, 1), None, (1, 1)) for _ in range(3)]
    assert steps(uneven, [0, 1], resting=()) == [PlacementStep(StepKind.LEAD, "w", 0, 1)]
    assert steps(uneven, [0, 1]) == [PlacementStep(StepKind.LEAD, "w", 1, 1)]
    assert steps(uneven, [0, 1], resting={("w", n) for n in range(3)}) == []
    assert steps([*uneven, Place((0, 1), None, (1, 1), True)], [0, 1], resting=()) == []


def test_shards_move_several_at_a_time_and_none_in_vain():
    """One more server gets its share: as many shards join as there may be at a time, and none joins in vain."""
    places, servers, moves, epoch = list(place(16, range(3), 2)), [0, 1, 2, 3], 4, 1
    joined, begun, handovers = 0, [], {}
    for _ in range(1000):
        epoch += 1
        steps = list(placement.next_steps({"w": (2, places)}, servers, [], moves))
        for kind, _, shard, server in steps:
            if kind == StepKind.JOIN:
                joined += 1
                begun.append(shard)
                places[shard] = placement.joined(places[shard], server, epoch)
            elif kind == StepKind.DROP and server != places[shard].chain[0]:
                chain = [n for n in places[shard].chain if n != server]
                places[shard] = placement.rechained(places[shard], chain, None, epoch)
            else:
                places[shard] = places[shard]._replace(stepping_down=True)
                handovers[shard] = PlacementStep(kind, "w", shard, server)
        under_way = sum(p.joiner is not None for p in places)
        assert under_way == min(moves, 8 - joined + under_way), "no server waits while a shard could move"
        if handovers:
            shard, step = handovers.popitem()
            places[shard] = placement.handed_over(places[shard], step, servers, 2, epoch)
        elif begun:
            shard = begun.pop(0)
            places[shard] = placement.appended(places[shard], epoch)
        elif not steps:
            break
    assert joined == 8
    alone = [Place((0,), None, (1,)) for _ in range(4)]
    steps = list(placement.next_steps({"w": (1, alone)}, [0, 1], [], moves=4))
    assert steps == [PlacementStep(StepKind.JOIN, "w", shard, 1) for shard in (3, 2)]
    alone[2:] = [placement.joined(p, 1, 2) for p in alone[2:]]
    assert list(placement.next_steps({"w": (1, alone)}, [0, 1], [], moves=4)) == []
    assert Counter(n for p in places for n in p.chain) == dict.fromkeys(servers, 8)


def test_each_table_is_spread_over_a_new_server():
    tables = {name: (1, [Place((0,), None, (1,)) for _ in range(shards)]) for name, shards in (("a", 4), ("b", 8))}
    steps = list(placement.next_steps(tables, [0, 1], [], moves=8))
    assert Counter(step.table for step in steps) == {"a": 2, "b": 4}
    assert all(step.kind == StepKind.JOIN and step.server == 1 for step in steps)


WRONG = [
    ("rechained", "== previous else epoch", "== previous or previous is None else epoch"),
    ("rechained", "else epoch)", "else epoch - 1)"),
    ("without", "n not in lost and n not in silent)\n", "n not in lost)\n"),
    (
        "without",
        "if all(n in doubted for n in chain):\n        chain = tuple(n for n in old.chain if n not in lost)",
        "if False:\n        pass",
    ),
    ("without", "all(n in doubted for n in chain)", "not chain"),
    ("without", "all(n in doubted for n in chain)", "any(n in doubted for n in chain)"),
    ("without", "old.joiner not in lost and", ""),
    ("joined", "server, epoch", "old.chain[-1], epoch"),
    ("appended", "old.line, None", "(old.line[-1], *old.chain), None"),
    ("next_steps", "if each.under_way or (", "if ("),
    ("next_steps", "[] if each.under_way or name in together else [each]", "[each]"),
    ("next_steps", "not moving and not spread", "not spread"),
    ("next_steps", "load[server] -= weight", "pass"),
    ("next_steps", "load[server] -= weight", "load[server] -= 1"),
    pytest.param("next_steps", "load[server] += weight", "load[server] += 1", marks=pytest.mark.thorough),  # minutes
    ("next_steps", "p._replace(chain=p.line)", "p"),
    ("next_steps", "free -= 1", "pass"),
    ("next_steps", "(name, number) in resting", "False"),
    ("next_steps", "kind == StepKind.DROP and server == p.chain[0] and (name", "(name"),
    ("_even_out_primaries", "() if (name, number) in resting else ", ""),
    ("handed_over", "if sum(n in servers for n in chain) <", "if not chain or 0 >"),
    ("handed_over", "if sum(n in servers for n in chain) <", "if -1 >"),
    ("handed_over", "(copies if leaves else max(1, min(copies, len(servers))))", "max(1, min(copies, len(servers)))"),
    pytest.param("handed_over", "step.kind == StepKind.DROP and step", "step", marks=pytest.mark.slow),
    ("handed_over", "step.server not in old.chain or step.server not in servers", "step.server not in old.chain"),
    ("handed_over", "chain.insert(0, step.server)", "chain.append(step.server)"),
    ("_mend", "n not in p.line", "n not in p.chain[1:]"),
    ("_mend", "len(staying) < wanted", "len(p.chain) < wanted"),
    ("_mend", "len(staying) > wanted", "False"),
    ("_mend", "len(staying) > wanted", "len(p.chain) > wanted"),
    ("_even_out_primaries", "if backup in heads else 0", ""),
    ("_mend", "if away and", "if len(away) > 1 and"),
    ("_mend", "len(staying) >= copies", "len(staying) >= wanted"),
    ("_gain", "gap - weight", "gap"),
    ("_gain", "gap - weight", "gap - weight - 1"),
    ("_gain", "min(weight, gap - weight)", "gap - weight"),
    ("_gain", "min(weight, gap - weight)", "(1 if gap > weight else 0)"),
    ("_least_gain", "min(1.0, ", "max(1.0, "),
    ("_least_gain", "LEAST_GAIN *", "0 *"),
    ("next_steps", "each.under_way or name in together", "each.under_way"),
    ("next_steps", "together[name][number]", "number"),
    ("_gather", "if not chain or any(n not in load for n in chain):", "if not chain:"),
    pytest.param(
        "_gather",
        "if not chain or any(n not in load for n in chain):",
        "if any(n not in load for n in chain):",
        marks=pytest.mark.thorough,
    ),
    ("_gather", "and n not in unfit", "or n in p.chain"),
    pytest.param("_gather", "n not in chain and n in load", "n not in chain", marks=pytest.mark.thorough),
    ("_gather", "if surplus and step is not None:", "if surplus:"),
    ("_gather", "if surplus and step is not None:", "if surplus and (step is not None or not missing):"),
    pytest.param("_gather", "step is not None and step[1] not in load", "False", marks=pytest.mark.thorough),
    ("_weight", "weights[table][shard] if table in weights else 1", "1"),
    ("_spread", "sources[: 1 if even else None]", "sources[:1]"),
    ("_spread", "emptiest not in each.place.chain", "True"),
    ("_spread", "load[fullest] -= each.weight", "load[fullest] -= 1"),
    ("_spread", "while free > 0 and", "while"),
    ("_spread", "load[emptiest] += each.weight", "pass"),
    ("_spread", "fine.remove(each)", "pass"),
    ("_spread", "held[each.table, fullest] - held[each.table, emptiest]", "0"),
    ("_spread", "held[each.table, emptiest] += 1", "held[each.table, fullest] += 1"),
    ("_even_out_primaries", "gain >= least", "gain >= 0"),
    ("_even_out_primaries", "gain >= least", "gap > 2"),
    ("_even_out_primaries", "+= _weight(weights, name, number)", "+= 1"),
    ("_even_out_primaries", "_gain(weight, gap)", "_gain(1, gap)"),
]


def hunt(machines):
    """Examples that a rule gets right by luck only if it is right."""
    test_shards_move_several_at_a_time_and_none_in_vain()
    test_each_table_is_spread_over_a_new_server()
    test_a_backup_in_doubt_is_not_asked_to_lead()
    test_a_primary_goes_on_where_copies_were_lost_since_it_was_asked_to_go()
    test_a_primary_that_rests_is_not_asked_to_hand_over()
    test_a_backup_that_is_to_leave_does_not_lead_and_keeps_its_copy()
    test_a_server_that_leaves_keeps_its_copy_while_too_few_servers_stay()
    test_a_hot_shard_has_a_server_for_itself_and_no_other_move_is_made()
    test_the_copy_that_gains_most_goes_and_what_gains_little_stays()
    test_a_copy_goes_where_the_load_is_least_once_the_copies_before_are_there()
    test_where_the_fullest_server_has_one_shard_the_next_one_gives()
    test_heavy_primaries_are_spread_over_their_backups()
    for case in (((0,), (0, 2), []), ((0, 1), (1, 2), [0])):
        test_shards_that_come_together_lose_no_copy_that_is_needed(*case)
    test_a_server_in_doubt_keeps_its_copy_of_a_shard_that_is_brought_to_others()
    test_a_shard_moves_as_if_it_was_alone_where_the_first_one_is_lost()
    for machine in machines:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=6_000, derandomize=True, database=None, phases=[Phase.generate], deadline=None
            ),
        )


@pytest.mark.parametrize(("name", "old", "new"), WRONG)
def test_a_wrong_placement_is_caught(name, old, new, monkeypatch):
    monkeypatch.setattr(placement, name, mutant(getattr(placement, name), old, new))
    gathers = name == "_gather" or ("together" in old and "[each]" not in new)
    with pytest.raises((AssertionError, TypeError, IndexError, ValueError, KeyError)):
        hunt([GatheredPlacements] if gathers else [Placements, WeightedPlacements])
