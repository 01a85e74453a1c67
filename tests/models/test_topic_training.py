"""The trainers of topic models in a simulated cluster: what is learnt does not tell that anything was lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse
from oracles import mutant

from dps.models.topics import gibbs
from dps.models.topics.dirichlet import Inference
from dps.models.topics.gibbs import ASSIGNMENT_COLUMNS, learn_by_sampling
from dps.models.topics.plan import TopicPlan, TwoTables
from dps.models.topics.variational import learn_in_batches, learn_online
from dps.testing import Faults, Simulation

TOPICS, WORDS = 3, 20
rng = np.random.default_rng(0)
X = rng.poisson(0.7, size=(40, WORDS))
X[3] = 0
TOKENS = int(X.sum())
PARTS = [scipy.sparse.csr_matrix(X[a : a + 8], dtype=np.float32) for a in range(0, 40, 8)]
START = rng.gamma(100, 0.01, (WORDS, TOPICS))
FAULTS = Faults(crashes=0.6, moves=0.3, breaks=0.5, repeats=0.2, restart=0.5)


def plan_of(**settings) -> TopicPlan:
    values = {
        "tables": ("a", "b"), "totals": "totals", "history": "history", "topics": TOPICS, "words": WORDS, "eta": 0.1,
        "inference": Inference(0.2, 200, 1e-8), "passes": 4, "batch_size": 4, "decay": 0.7, "offset": 10.0, "first": 1,
        "total": None, "evaluate_every": 0, "perp_tol": 0.0, "seed": 5, "assignments": ("even", "odd"),
    }  # fmt: skip
    return TopicPlan(**(values | settings))


def learnt(function, seed=0, trainers=2, faults=None, plan=None, aggregate=None):
    """(what a run has left in its tables, both of them; what the trainers returned)."""
    plan = plan or plan_of()
    whole = "int64" if function is learn_by_sampling else None
    with Simulation(seed, servers=3, trainers=trainers, copies=2, faults=faults, compute=0.05) as sim:
        for name in plan.tables:
            sim.table(name, TOPICS, rows=WORDS, dtype=whole or "float32", aggregate=aggregate)
        sim.table(plan.totals, TOPICS, rows=2, dtype=whole or "float64", aggregate=aggregate)
        for name in plan.assignments:
            sim.table(name, ASSIGNMENT_COLUMNS, dtype="int64")
        sim.table(plan.history, rows=plan.passes, dtype="float64")
        client = sim.client()
        if not whole:
            client.assign(plan.tables[0], slice(0, WORDS), START - plan.eta)
            client.assign(plan.totals, [0], (START - plan.eta).sum(axis=0)[None])
        results = sim.run(function, PARTS, args=(plan,), staleness=0 if function is learn_online else math.inf)
        sim.rest()
        client = sim.client()  # whose connections no fault has broken
        tables = {name: client.pull(name).reshape(-1, TOPICS) for name in (*plan.tables, plan.totals)}
    assert all(each == results[0] for each in results)
    return tables, results[0]


# -- with faults


@pytest.mark.parametrize("seed", range(8))
def test_counts_do_not_tell_that_servers_and_trainers_were_lost(seed):
    expected, result = learnt(learn_by_sampling)
    name, row = plan_of().tables[result.table], result.table
    np.testing.assert_array_equal(expected[name].sum(axis=1), X.sum(axis=0))
    trainers = 1 + seed % 3
    got, _ = learnt(learn_by_sampling, seed, trainers, FAULTS)
    np.testing.assert_array_equal(got[name], expected[name])
    np.testing.assert_array_equal(got["totals"][row], expected["totals"][row])
    assert got["totals"][row].sum() == got[name].sum() == TOKENS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("function", "aggregate"), [(learn_in_batches, None), (learn_online, "sum")])
def test_topics_do_not_tell_that_servers_and_trainers_were_lost(function, aggregate, seed):
    expected, result = learnt(function, aggregate=aggregate)
    got, again = learnt(function, seed, 2, FAULTS, aggregate=aggregate)
    assert again == result
    name = plan_of().tables[result.table]
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["totals"][result.table], got[name].sum(axis=0), rtol=1e-5)


@pytest.mark.quick(6)
@pytest.mark.parametrize("function", [learn_in_batches, learn_online, learn_by_sampling])
@pytest.mark.parametrize("seed", range(4))
def test_trainers_that_are_run_again_end_together(function, seed):
    """The perplexities decide when training ends, and an attempt that was not there for the first ones knows them."""
    plan = plan_of(evaluate_every=1, perp_tol=0.05, passes=30)
    aggregate = "sum" if function is learn_online else None
    _, expected = learnt(function, plan=plan, aggregate=aggregate)
    assert 2 <= expected.passes < 30
    trainers = 3 if function is learn_by_sampling else 2
    _, got = learnt(function, seed, trainers, FAULTS, plan, aggregate)
    assert got.passes == expected.passes
    np.testing.assert_allclose(got.perplexities, expected.perplexities, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_counts_add_up_at_each_moment(seed, monkeypatch):
    """What trainers read in a pass are counts of all tokens, whatever goes wrong."""
    seen = []

    def pull(self, words, true=TwoTables.pull):
        rows, totals = true(self, words)
        seen.append((words, rows, totals))
        return rows, totals

    monkeypatch.setattr(TwoTables, "pull", pull)
    learnt(learn_by_sampling, seed, 2, FAULTS)
    assert len(seen) > 20
    for words, rows, totals in seen:
        np.testing.assert_array_equal(rows.sum(axis=1), X.sum(axis=0)[words])
        assert totals.sum() == TOKENS
        assert rows.min() >= 0


WRONG = [
    (gibbs.Assignments.get, "number % 2", "1 - number % 2"),  # the topics of another pass
    (gibbs.Assignments.put, "number % 2", "0"),  # topics that the same step of a trainer run again would read
]


@pytest.mark.parametrize(("method", "old", "new"), WRONG)
def test_wrong_variants_of_the_assignments(monkeypatch, method, old, new):
    expected, result = learnt(learn_by_sampling)
    monkeypatch.setattr(gibbs.Assignments, method.__name__, mutant(method, old, new))
    name = plan_of().tables[result.table]
    assert any((learnt(learn_by_sampling, seed, 2, FAULTS)[0][name] != expected[name]).any() for seed in range(8))
