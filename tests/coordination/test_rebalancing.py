"""Which shards move, or which table is split, by the load: what is decided, and what is not decided again and again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.coordination import rebalancing
from dps.engine.coordination.placement import EVEN, Place, place
from dps.engine.coordination.rebalancing import (
    LoadSample,
    ServerUse,
    ShardLoad,
    TableLoad,
    settled,
    weights_by,
)


class Cluster:
    """Servers and tables under a load that a test sets, and the decisions that are carried out there."""

    def __init__(self, servers=2, shards=8, copies=1, tables=("w",), budget=0.0):
        self.rule, self.now, self.decisions = rebalancing.RebalancingRule(), 0.0, []
        self.servers, self.copies, self.budget = range(servers), copies, budget
        self.places = {name: list(place(shards, self.servers, copies)) for name in tables}
        self.load = {name: [0.0] * shards for name in tables}  # of a core
        self.held = dict.fromkeys(tables, 0.0)  # bytes of a replica
        self.hottest, self.divisible, self.crowded = 0.0, True, 1.0
        self.noise = lambda: 1.0

    def sample(self):
        tables, busy = {}, dict.fromkeys(self.servers, 0.0)
        taken = dict.fromkeys(self.servers, 0.0)
        for name, places in self.places.items():
            shards = [ShardLoad(x * self.noise(), self.held[name], self.hottest) for x in self.load[name]]
            tables[name] = TableLoad(self.copies, list(places), shards, self.divisible)
            for p, shard in zip(places, shards, strict=True):
                busy[p.chain[0]] += shard.busy
                for n in p.chain:
                    taken[n] += shard.held
        return LoadSample(
            tables, {n: ServerUse(busy[n], busy[n] * self.crowded, taken[n], self.budget) for n in self.servers}
        )

    def look(self, times=1):
        """The decisions of so many looks, a second apart, each carried out at once."""
        before = len(self.decisions)
        for _ in range(times):
            self.now += 1.0
            self.take(self.rule.decide(self.sample(), self.now))
        return self.decisions[before:]

    def take(self, decision):
        if not decision.acts:
            return
        self.decisions.append(decision)
        if decision.table is not None:
            name, count = decision.table, len(self.places[decision.table])
            times = decision.shards // count
            self.places[name] = [p for p in self.places[name] for _ in range(times)]
            self.load[name] = [
                x * (self.hottest * (n == 0) + (1 - self.hottest) / times)
                for x in self.load[name]
                for n in range(times)
            ]
        tables = {name: (self.copies, places) for name, places in self.places.items()}
        self.places = settled(tables, self.servers, decision.weights)

    def ratio(self):
        busy = [use.busy for use in self.sample().servers.values()]
        return max(busy) / (sum(busy) / len(busy))

    def heads(self, name="w"):
        return [p.chain[0] for p in self.places[name]]


# ---- what is decided


def test_even_loads_move_nothing():
    cluster = Cluster(servers=3, shards=12)
    cluster.load["w"] = [0.2] * 12
    assert not cluster.look(500)


def test_an_idle_server_is_no_reason():
    cluster = Cluster()
    cluster.load["w"] = [0.2] + [0.0] * 7  # one server works 0.2 of a core, the other nothing
    assert not cluster.look(100)


def test_the_one_move_is_made_that_evens_the_load_out():
    cluster = Cluster()
    cluster.load["w"] = [0.6, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05, 0.05]
    (decision,) = cluster.look(100)
    assert decision.table is None
    assert cluster.heads() == [1, 0, 0, 0, 1, 1, 1, 1], "no load of 0.05 goes back, though that would gain a little"
    assert decision.moves == 1
    assert cluster.ratio() <= 1.25
    assert decision.before == pytest.approx({0: 1.2, 1: 0.2})
    assert max(decision.after.values()) == pytest.approx(max(use.busy for use in cluster.sample().servers.values()))


def test_moves_come_after_some_samples_and_splits_after_more():
    cluster = Cluster()
    cluster.load["w"] = [0.4, 0.4] + [0.0] * 6
    assert not cluster.look(rebalancing.MOVE_SAMPLES - 1)
    assert len(cluster.look()) == 1
    cluster = Cluster(shards=1)
    cluster.load["w"] = [0.8]
    assert not cluster.look(rebalancing.SPLIT_SAMPLES - 1)
    assert [(d.table, d.shards) for d in cluster.look()] == [("w", 2)]
    assert cluster.heads() == [0, 1]


def test_a_table_of_one_hot_shard_is_split_and_its_parts_move():
    cluster = Cluster(servers=3, shards=4)
    cluster.load["w"] = [0.9, 0.02, 0.02, 0.02]
    cluster.look(100)
    assert cluster.decisions[0].table == "w"
    assert cluster.ratio() <= 1.25 + 0.15
    assert len(cluster.decisions) == 1


def test_on_a_crowded_machine_the_share_of_what_could_be_had_counts():
    """A server that could have a third of a core, and uses nearly all of that, is as loaded as one with a core."""
    cluster = Cluster(shards=1)
    cluster.load["w"] = [0.2]
    assert not cluster.look(100)
    cluster.crowded = 3.0
    assert [d.table for d in cluster.look(20)] == ["w"]


def test_no_table_is_split_where_moves_are_enough():
    cluster = Cluster(shards=2)
    cluster.places["w"] = [Place((0,)), Place((0,))]
    cluster.load["w"] = [0.72, 0.48]
    decision = cluster.rule.propose(cluster.sample())
    assert (decision.table, decision.moves) == (None, 1)


def test_memory_that_nothing_evens_out_does_not_keep_work_where_it_is():
    cluster = Cluster(shards=1, tables=("a", "b", "c", "d"), budget=100.0)
    cluster.places = {name: [Place((n,))] for name, n in zip("abcd", (0, 0, 0, 1), strict=True)}
    cluster.held = {"a": 70.0, "b": 0.1, "c": 0.1, "d": 0.1}
    cluster.load = {"a": [0.0], "b": [0.3], "c": [0.3], "d": [0.05]}
    cluster.divisible = False
    (decision,) = cluster.look(100)
    assert cluster.heads("a") == [0]
    assert sorted(decision.after.values()) == pytest.approx([0.3, 0.35])


def test_an_imbalance_that_nothing_evens_out_is_looked_at_ever_more_rarely(monkeypatch):
    """Because to look for moves costs the controller's processor time."""
    proposals, propose = [], rebalancing._propose
    monkeypatch.setattr(rebalancing, "_propose", lambda *given: proposals.append(cluster.now) or propose(*given))
    cluster = Cluster(shards=1)
    cluster.load["w"], cluster.hottest = [0.8], 0.99
    assert not cluster.look(1000)
    assert len(proposals) < 12
    assert proposals[1] - proposals[0] < 4, "a split is considered as soon as it may be"
    cluster.load["w"], cluster.hottest = [0.8], 0.0
    cluster.rule.restart()
    assert cluster.look(1000)


def test_a_large_table_is_split_only_if_a_user_asks():
    cluster = Cluster(shards=1)
    cluster.load["w"], cluster.held["w"] = [0.8], rebalancing.MOST_SPLIT_BYTES
    assert [d.table for d in cluster.look(20)] == ["w"]
    cluster = Cluster(shards=1)
    cluster.load["w"], cluster.held["w"] = [0.8], rebalancing.MOST_SPLIT_BYTES + 1
    assert not cluster.look(100)
    assert cluster.rule.propose(cluster.sample()).table == "w"


def sample_of(loads, hot=(), edges=(0, 1024, 2048, 3072, 4096)):
    """Four shards on two servers, of which shard 2 has hot keys."""
    places = [Place((server,)) for server in (0, 0, 1, 1)]
    hottest = max((share for _, share in hot), default=0.0)
    shards = [ShardLoad(x, 10.0, hottest * (n == 2), hot if n == 2 else ()) for n, x in enumerate(loads)]
    busy = [sum(loads[:2]), sum(loads[2:])]
    servers = {n: ServerUse(busy[n], busy[n], 20.0, 0.0) for n in range(2)}
    return LoadSample({"w": TableLoad(1, places, shards, True, edges)}, servers)


def test_a_hot_shard_is_divided_alone_where_its_parts_have_equal_loads():
    decide = rebalancing.RebalancingRule().propose
    decision = decide(sample_of([0.05, 0.05, 0.8, 0.05]))
    assert (decision.table, decision.shards, decision.edges) == ("w", 5, (0, 1024, 2048, 2560, 3072, 4096))
    assert sorted(decision.after.values()) == pytest.approx([0.45, 0.5])
    decision = decide(sample_of([0.05, 0.05, 0.8, 0.05], [(2100, 0.3), (2200, 0.1)]))
    assert decision.edges == (0, 1024, 2048, 2219, 3072, 4096), "0.3, 0.1, and 171 of 1,024 places of the other 0.6"
    assert sorted(decision.after.values()) == pytest.approx([0.45, 0.5], abs=0.01)


def test_a_shard_of_which_one_key_has_most_is_not_divided():
    assert not rebalancing.RebalancingRule().propose(sample_of([0.0, 0.0, 0.8, 0.0], [(2100, 0.95)])).acts


def test_a_hot_key_whose_place_is_not_known_may_lie_in_any_part():
    sample = sample_of([0.0, 0.0, 0.8, 0.0])
    table = sample.tables["w"]
    shards = [*table.shards[:2], table.shards[2]._replace(hottest=0.9), table.shards[3]]
    assert rebalancing.RebalancingRule().propose(sample).acts
    sample = sample._replace(tables={"w": table._replace(shards=shards)})
    assert not rebalancing.RebalancingRule().propose(sample).acts


def test_the_edges_of_the_other_shards_stay():
    edges = (0, 100, 2048, 3000, 4096)
    decision = rebalancing.RebalancingRule().propose(sample_of([0.05, 0.05, 0.8, 0.05], edges=edges))
    assert decision.edges == (0, 100, 2048, 2524, 3000, 4096)


@pytest.mark.parametrize(
    "change", [{"divisible": False}, {"hottest": 1.0}, {"hottest": 0.9}], ids=["refused", "one key", "mostly one key"]
)
def test_a_split_that_could_not_help_is_not_made(change):
    cluster = Cluster(shards=1)
    cluster.load["w"] = [0.8]
    vars(cluster).update(change)
    assert not cluster.look(100)


def test_only_a_shard_that_stays_hot_is_split():
    """The load goes from one shard of one server to the next: each is hot, none for long."""
    cluster = Cluster(shards=8)
    for turn in range(60):
        cluster.load["w"] = [0.8 * (n == turn % 4) for n in range(8)]
        cluster.look(4)
    assert not any(decision.table for decision in cluster.decisions)


def test_a_table_is_not_split_without_end():
    cluster = Cluster(shards=16)
    for _ in range(20):
        shards = len(cluster.places["w"])
        cluster.load["w"] = [0.9 * (n == 0) for n in range(shards)]
        cluster.look(100)
        assert len(cluster.places["w"]) <= rebalancing.SHARDS_PER_SERVER * 2
    assert len(cluster.places["w"]) > 16


def test_primaries_go_over_to_backups_without_a_copy():
    cluster = Cluster(copies=2)
    cluster.load["w"] = [0.4, 0.4] + [0.0] * 6
    before = [set(p.chain) for p in cluster.places["w"]]
    assert len(cluster.look(50)) == 1
    assert [set(p.chain) for p in cluster.places["w"]] == before
    assert cluster.ratio() <= 1.25


def test_servers_that_fill_unevenly_get_equal_bytes():
    cluster = Cluster(shards=1, tables=("a", "b", "c", "d"), budget=100.0)
    cluster.places = {name: [Place((n,))] for name, n in zip("abcd", (0, 0, 1, 1), strict=True)}
    cluster.held = {"a": 40.0, "b": 30.0, "c": 5.0, "d": 5.0}
    for turn in range(100):
        cluster.load = {name: [0.1 * ((n + turn) % 2)] for name, n in zip("abcd", (0, 0, 1, 1), strict=True)}
        cluster.look()
    (decision,) = cluster.decisions
    assert decision.table is None
    assert sorted(decision.after.values()) == [40.0, 40.0]
    cluster.held = dict.fromkeys("abcd", 1.0)
    cluster.now += 10_000
    assert not cluster.look(50), "there is room"


def test_work_does_not_fill_a_server_so_that_memory_would_take_it_back():
    cluster = Cluster(shards=1, tables=("a", "b", "c"), budget=100.0)
    cluster.places = {"a": [Place((0,))], "b": [Place((0,))], "c": [Place((1,))]}
    cluster.held = {"a": 10.0, "b": 40.0, "c": 45.0}
    cluster.load = {"a": [0.3], "b": [0.5], "c": [0.0]}
    cluster.divisible = False
    assert len(cluster.look(300)) == 1
    assert cluster.heads("a") == [1]
    cluster = Cluster(shards=1, tables=("a", "b", "c"), budget=100.0)
    cluster.places = {"a": [Place((0,))], "b": [Place((0,))], "c": [Place((1,))]}
    cluster.held = {"a": 30.0, "b": 30.0, "c": 55.0}
    cluster.load = {"a": [0.3], "b": [0.5], "c": [0.0]}
    cluster.divisible = False
    assert not cluster.look(300)


def test_a_user_is_answered_at_once():
    cluster = Cluster()
    cluster.load["w"] = [0.02, 0.02, 0.02, 0.02] + [0.0] * 4
    cluster.take(cluster.rule.propose(cluster.sample()))
    assert cluster.ratio() <= 1.25
    cluster.take(cluster.rule.propose(cluster.sample()))
    assert len(cluster.decisions) == 1
    assert not cluster.rule.propose(Cluster().sample()).acts, "no load"
    assert not cluster.rule.propose(LoadSample({}, {0: ServerUse(0.9, 0.9)})).acts, "one server"
    assert not cluster.rule.propose(LoadSample({}, {})).acts


# ---- weights


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=9), min_size=1, max_size=3))
def test_weights_are_shares_with_mean_one_and_exact(loads):
    weights = weights_by({str(n): of_table for n, of_table in enumerate(loads)})
    flat = [w for of_table in weights.values() for w in of_table]
    assert all(w > 0 and (64 * w).is_integer() for w in flat)
    if flat:
        assert abs(sum(flat) - len(flat)) <= len(flat) / 64
        for of_table, given_loads in zip(weights.values(), loads, strict=True):
            order = sorted(range(len(given_loads)), key=given_loads.__getitem__)
            assert [of_table[n] for n in order] == sorted(of_table)


@given(st.floats(0.001, 100), st.integers(1, 9), st.integers(1, 3))
def test_equal_loads_have_no_weights(load, shards, tables):
    assert weights_by({str(n): [load] * shards for n in range(tables)}) == EVEN


# ---- what is not decided again and again

TICKS = 4000


def trembling(seed):
    """Loads that are even in the mean."""
    cluster, draw = Cluster(servers=2 + seed % 3, shards=12), random.Random(f"trembling {seed}")
    cluster.load["w"] = [0.1] * 12
    cluster.noise = lambda: draw.choice((0.5, 1.0, 1.5)) * draw.uniform(0.8, 1.2)
    cluster.look(TICKS)
    return cluster


def wandering(seed):
    """Hot spots that come, stay for a while and go, with noise: the worst case for a rule that follows the load."""
    cluster, draw = Cluster(servers=2 + seed % 3, shards=12), random.Random(f"wandering {seed}")
    cluster.noise = lambda: draw.uniform(0.7, 1.3)
    while cluster.now < TICKS:
        shards = len(cluster.places["w"])
        cluster.load["w"] = [draw.choice((0.01, 0.01, 0.05, 0.3, 0.6)) for _ in range(shards)]
        cluster.look(draw.choice((5, 20, 100)))
    return cluster


def constant(seed):
    """Any loads that stay, with noise: soon nothing is left to do."""
    cluster, draw = Cluster(servers=2 + seed % 4, shards=draw_shards(seed)), random.Random(f"constant {seed}")
    cluster.load["w"] = [draw.choice((0.0, 0.02, 0.1, 0.5, 1.0)) for _ in cluster.places["w"]]
    cluster.noise = lambda: draw.uniform(0.8, 1.2)
    cluster.look(TICKS // 2)
    return cluster


def draw_shards(seed):
    return random.Random(f"shards {seed}").choice((1, 2, 8, 16))


MOST_DECISIONS = 14  # in so many seconds: pauses of 10, 20, ..., 600 s


def check_trembling(seed):
    assert not trembling(seed).decisions


def check_wandering(seed):
    cluster = wandering(seed)
    assert 1 <= len(cluster.decisions) <= MOST_DECISIONS
    assert len(cluster.places["w"]) <= 32 * len(cluster.servers)


def check_constant(seed):
    cluster = constant(seed)
    assert len(cluster.decisions) <= 4
    assert all(max(d.after.values()) < max(d.before.values()) for d in cluster.decisions)
    late = [d for d in cluster.decisions[1:] if d.table is None]
    assert len(late) <= 2
    if sum(cluster.load["w"]) / len(cluster.servers) > 0.3:
        assert cluster.ratio() <= 1.6, (seed, cluster.decisions)


HALVES = [pytest.param(0, id="first half"), pytest.param(1, id="second half", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("half", HALVES)
def test_a_load_that_trembles_moves_nothing(half):
    for seed in range(6 * half, 6 * half + 6):
        check_trembling(seed)


@pytest.mark.parametrize("half", HALVES)
def test_a_load_that_wanders_is_not_run_after(half):
    for seed in range(3 * half, 3 * half + 3):
        check_wandering(seed)


@pytest.mark.parametrize("half", HALVES)
def test_a_load_that_stays_is_evened_out_and_then_left_alone(half):
    for seed in range(12 * half, 12 * half + 12):
        check_constant(seed)


# ---- wrong

WRONG = [
    ("_out_of_balance", "_ratio(busy) > IMBALANCE", "_ratio(busy) > 1.02"),
    ("_out_of_balance", "max(use.used for use in sample.servers.values()) > least * LEAST_BUSY", "True"),
    ("_hot_shards", "shard.busy * use.used / max(use.busy, 1e-9)", "shard.busy"),
    ("_out_of_balance", "max(fills) > LEAST_FILL", "max(fills) > 0"),
    ("_out_of_balance", "[_Measure(memory=True)] * by_memory", "[_Measure(memory=False)] * by_memory"),
    ("RebalancingRule.decide", "self._lasting < MOVE_SAMPLES", "False"),
    ("RebalancingRule.decide", "(measure, busiest) != self._imbalance", "False"),
    ("RebalancingRule.decide", "measure.of_use(sample.servers[n])", "sample.servers[n].busy"),
    ("RebalancingRule.decide", "times >= SPLIT_SAMPLES", "times >= 1"),
    ("RebalancingRule.decide", "self._hot[shard] + 1", "SPLIT_SAMPLES"),
    ("RebalancingRule.decide", "if now < self._rests_until:", "if False:"),
    ("RebalancingRule.decide", "doubled = min(2 * self._pause, MAX_PAUSE_SECONDS)", "doubled = PAUSE_SECONDS"),
    ("_propose_by", "if not before[fullest] - max(best.after.values()) > LEAST_PROMISE * mean:", "if False:"),
    ("_propose_by", "if not measure.memory and _fills_unevenly(larger, best):", "if False:"),
    ("_propose_by", "best = decision._replace", "decision._replace"),
    ("_propose_by", "most <= IMBALANCE * mean or", "False or"),
    ("_splits", "sample.tables[name].divisible", "True"),
    ("_splits", "if len(split.of) <= limit", "if True"),
    ("_split_table", "shard.hottest * (n == 0) + ", ""),
    ("_split_shard", "part_loads(edges, load.hot)", "part_loads(edges, ())"),
    ("_split_shard", "0.0 if load.hot else load.hottest", "0.0"),
    ("_split_shard", "*[1.0] * len(before), *some", "*some, *[1.0] * len(before)"),
    ("_split_shard", "sorted({*table.edges, *edges})", "edges"),
    ("_splits", "if table.edges else", "if False else"),
    ("_splits", "_split_shard(name, table, shard, times)", "_split_shard(name, table, 0, times)"),
    ("_fills_unevenly", "taken=use.taken + then[n] - now[n]", "taken=use.taken"),
    ("_moves", "weights = weights_by(loads)", "weights = EVEN"),
    ("_weight", "(1 - LEAST_WEIGHT) * load", "load"),
    ("settled", "StepKind.LEAD: (server, *others)", "StepKind.LEAD: (*others, server)"),
]


def hunt():
    for name, check in list(globals().items()):
        if name.startswith("test_") and getattr(check, "__code__", None) and check.__code__.co_argcount == 0:
            check()
    for change in ({"divisible": False}, {"hottest": 1.0}, {"hottest": 0.9}):
        test_a_split_that_could_not_help_is_not_made(change)
    test_weights_are_shares_with_mean_one_and_exact()
    for seed in range(24):  # the long checks in turn, because one seed of one of them shows most errors
        for check, seeds in ((check_trembling, 12), (check_wandering, 6), (check_constant, 24)):
            if seed < seeds:
                check(seed)


@pytest.mark.parametrize(("name", "old", "new"), WRONG)
def test_a_wrong_rule_is_caught(name, old, new, monkeypatch):
    owner = rebalancing.RebalancingRule if "." in name else rebalancing
    method = name.rpartition(".")[2]
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))
    with pytest.raises((AssertionError, ValueError, IndexError, ZeroDivisionError)):
        hunt()
