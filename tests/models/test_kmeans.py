"""KMeans beside programs in numpy and scikit-learn: centers, beginnings, retries, data of each kind, wrong data."""

from __future__ import annotations

import itertools
import pickle
import threading
import warnings

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask.distributed import Client
from oracles import mutant
from sklearn import cluster
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps.engine.training.trainer import Trainer
from dps.errors import InputError, InputTypeError
from dps.models import KMeans
from dps.models.clusters import kmeans_training, seeding
from dps.models.clusters.centers import nearest
from dps.models.clusters.clustering import Beginning, begun_at, trained
from dps.models.clusters.seeding import SeedPlan, Seeds, seeds_of
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece, Survey


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps
        assert not ps.tables(), "fits leave no tables"


K = 6
X, _ = make_blobs(600, 5, centers=K, cluster_std=2.0, random_state=3)
X = X.astype(np.float32)
INIT = X[:K].astype(float)
WEIGHTS = np.random.default_rng(1).integers(0, 4, 600).astype(float)
GIVEN = {"n_clusters": K, "init": INIT}


def squared(rows, centers):
    return ((rows[:, None, :].astype(float) - centers[None]) ** 2).sum(axis=2)


def rows_in_order(seed, count, number=0):
    """The rows of the one partition of a trainer, in the order in which `piece_of` shuffles them."""
    return np.random.default_rng((seed, number)).permutation(count)


def seed_of(random_state):
    return int(np.random.RandomState(random_state).randint(2**31, size=1)[0])


# -- beside numpy and scikit-learn


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix, pd.DataFrame], ids=["dense", "csr", "frame"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_lloyd_beside_scikit_learn(ps, form, weights):
    theirs = cluster.KMeans(K, init=INIT, n_init=1, tol=0, algorithm="lloyd").fit(X.astype(float), None, weights)
    data = form(X)
    if form is pd.DataFrame:
        data.columns = list("abcde")
    ours = KMeans(client=ps, tol=0, **GIVEN).fit(data, None, weights)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-5)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-6)
    assert abs(ours.n_iter_ - theirs.n_iter_) <= 1
    np.testing.assert_allclose(ours.counts_, np.bincount(theirs.labels_, weights, K))
    np.testing.assert_allclose(ours.transform(data), theirs.transform(X.astype(float)), atol=1e-4)
    assert ours.score(data, None, weights) == pytest.approx(-ours.inertia_)


def far_starts():
    """Beginnings of which two are so far away that no row is nearest to them."""
    starts = INIT.copy()
    starts[[1, 4]] = [[1e4], [-1e4]]
    return starts


@pytest.mark.parametrize("passes", [1, 2, 300])
def test_clusters_without_rows_go_to_the_farthest_rows(ps, passes):
    assert moves_as_scikit_learn(ps, passes)


def moves_as_scikit_learn(ps, passes) -> bool:
    settings = {"n_clusters": K, "init": far_starts(), "tol": 0, "max_iter": passes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs = cluster.KMeans(n_init=1, algorithm="lloyd", **settings).fit(X.astype(float))
        ours = KMeans(client=ps, **settings).fit(X)
    return np.allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-5)


def minibatch_in_numpy(parts, starts, size, seed, passes):
    """Sculley's algorithm 1, with a batch of each trainer in each step."""
    sums, counts = np.zeros_like(starts), np.zeros(len(starts))
    batches = [[rows[first : first + size] for first in range(0, len(rows), size)] for rows in parts]
    for done in range(passes):
        orders = [np.random.default_rng((seed, n, done)).permutation(len(each)) for n, each in enumerate(batches)]
        for step in range(max(map(len, batches))):
            centers = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], starts)
            for order, each in zip(orders, batches, strict=True):
                if step < len(each):
                    batch = each[order[step]]
                    labels = squared(batch, centers).argmin(axis=1)
                    np.add.at(sums, labels, batch)
                    np.add.at(counts, labels, 1)
    return sums / counts[:, None], counts


def as_in_numpy(ps, places=(0, 600)) -> bool:
    """Whether mini-batches of one trainer, or of one for each part, give the same centers as in numpy."""
    parts = [X[a:b] for a, b in itertools.pairwise(places)]
    settings = {"batch_size": 70, "max_iter": 3, "tol": 0, "reassignment_ratio": 0.0, "random_state": 5}
    ours = KMeans(client=ps, **GIVEN, **settings).fit(list(map(dask.delayed, parts)))
    seed = seed_of(5)
    rows = [part[rows_in_order(seed, len(part), n)].astype(float) for n, part in enumerate(parts)]
    centers, counts = minibatch_in_numpy(rows, INIT, 70, seed, 3)
    same = np.allclose(ours.cluster_centers_, centers, rtol=1e-9) and np.array_equal(ours.counts_, counts)
    return same and ours.n_iter_ == 3


@pytest.mark.parametrize("places", [(0, 600), (0, 400, 600)], ids=["one trainer", "two"])
def test_minibatches_beside_numpy(ps, places):
    assert as_in_numpy(ps, places)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("learn", "present = np.flatnonzero(sums[:, -1])", "present = np.flatnonzero(sums[:, -1])[1:]"),
        ("learn", "trainer.push(", "trainer.assign("),
        ("minibatch", "plan.seed, place, done", "plan.seed, place, 0"),
        ("note_moves", "trainer.pull(plan.before)[:, -1].sum()", "0.0"),
    ],
)
def test_wrong_minibatches_are_noticed(ps, monkeypatch, name, old, new):
    monkeypatch.setattr(kmeans_training, name, mutant(getattr(kmeans_training, name), old, new))
    if name == "minibatch":
        monkeypatch.setattr("dps.models.clusters.clustering.minibatch", kmeans_training.minibatch)
    assert not as_in_numpy(ps)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sums[owner] -= moved", "pass"),
        ("trainer.assign(plan.sums, slice(None), np.zeros_like(sums))", "pass"),
        ("rows[full, :-1] = sums[full]", "rows[:, :-1] += sums"),
    ],
)
def test_wrong_moves_are_noticed(ps, monkeypatch, old, new):
    monkeypatch.setattr(kmeans_training, "move", mutant(kmeans_training.move, old, new))
    assert not all(moves_as_scikit_learn(ps, passes) for passes in (1, 2))


@pytest.mark.quick(2)
@pytest.mark.parametrize("settings", [{}, {"batch_size": 60, "staleness": 2}, {"batch_size": 60}], ids=str)
def test_as_good_as_scikit_learn(ps, settings):
    """The mean inertia over five seeds, of overlapping clusters."""
    data, _ = make_blobs(1000, 4, centers=8, cluster_std=3.0, random_state=1)
    seeds = range(5)
    theirs = np.mean([cluster.KMeans(8, n_init=1, random_state=seed).fit(data).inertia_ for seed in seeds])
    ours = np.mean(
        [KMeans(client=ps, n_clusters=8, random_state=seed, **settings).fit(data).inertia_ for seed in seeds]
    )
    assert ours < theirs * (1.05 if settings else 1.03)


def test_neglected_centers_get_rows(ps):
    """Without it, the two centers that are far away keep no row, and the inertia is much larger."""
    settings = {"n_clusters": K, "init": far_starts(), "batch_size": 50, "random_state": 0, "max_iter": 20}
    model = KMeans(client=ps, **settings).fit(X)
    assert (model.counts_ > 0).all()
    best = cluster.KMeans(K, n_init=5, random_state=0).fit(X).inertia_
    assert model.inertia_ < 1.5 * best


def test_random_beginnings_are_repeatable_and_the_best_of_several(ps):
    settings = {"n_clusters": K, "client": ps, "init": "random", "max_iter": 2}
    one, again, many = (KMeans(random_state=0, n_init=n, **settings).fit(X) for n in (1, 1, 5))
    np.testing.assert_allclose(one.cluster_centers_, again.cluster_centers_, rtol=1e-9)
    assert many.inertia_ <= one.inertia_ * (1 + 1e-9)


# -- beginnings


def candidates_in_numpy(rows, seed, clusters, rounds):
    """k-means|| with one trainer: the candidates and how many rows are nearest to each."""
    rng = np.random.default_rng((seed, 0))
    chosen = [rows[[int(rng.exponential(size=len(rows)).argmin())]]]
    for _ in range(rounds):
        distances = squared(rows, np.concatenate(chosen)).min(axis=1)
        draws = rng.random(len(rows)) < 2 * clusters * distances / distances.sum()
        chosen.append(rows[draws])
    candidates = np.concatenate(chosen)
    return candidates, np.bincount(squared(rows, candidates).argmin(axis=1), minlength=len(candidates))


def drawn(ps, pieces, init):
    ps.table("candidates", X.shape[1])
    try:
        plan = SeedPlan(K, X.shape[1], init, 7, "candidates")
        seeds = [Seeds(*each) for each in ps.run(seeds_of, pieces, args=(plan,))]
        counts = sum(each.nearest_weights for each in seeds)
        return seeds, ps.client().pull("candidates", np.arange(len(counts))), counts
    finally:
        ps.drop_table("candidates")


def piece(rows, weights=None):
    return Piece(rows, np.zeros(rows.shape[0]), Layout(rows.shape[1], 0), weights)


def beginnings_are_as_in_numpy(ps, client) -> bool:
    seeds, candidates, counts = drawn(ps, client.scatter([piece(X)], hash=False), "k-means++")
    expected, expected_counts = candidates_in_numpy(X, 7, K, seeding.ROUNDS)
    if candidates.shape != expected.shape:
        return False
    np.testing.assert_allclose(seeds[0].sums, X.sum(axis=0, dtype=float), rtol=1e-6)
    np.testing.assert_allclose(seeds[0].squares, (X.astype(float) ** 2).sum(axis=0), rtol=1e-5)
    return np.array_equal(candidates, expected) and np.array_equal(counts, expected_counts)


def test_candidates_beside_numpy(ps, client):
    assert beginnings_are_as_in_numpy(ps, client)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weights * distances / potential", "weights / len(weights)"),
        ("distances[part][nearer] = found.distances[nearer]", "pass"),
        ("owners[part][nearer] = found.labels[nearer] + first", "owners[part][nearer] = found.labels[nearer]"),
        ("nearer = found.distances < distances[part]", "nearer = found.distances > -1"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_draws_are_noticed(ps, client, monkeypatch, old, new):
    monkeypatch.setattr(seeding, "k_means_parallel", mutant(seeding.k_means_parallel, old, new))
    assert not beginnings_are_as_in_numpy(ps, client)


def test_candidates_of_several_trainers_are_rows(ps, client):
    parts = [piece(X[:10]), piece(X[10:10]), piece(scipy.sparse.csr_matrix(X[10:]))]
    seeds, candidates, counts = drawn(ps, client.scatter(parts, hash=False), "k-means++")
    assert counts.sum() == 600
    assert len(candidates) >= K
    assert {tuple(row) for row in candidates} <= {tuple(row) for row in X}
    assert len(np.unique(candidates, axis=0)) == len(candidates), "no row is drawn twice"
    np.testing.assert_array_equal(counts, np.bincount(nearest(X, candidates).labels, minlength=len(candidates)))
    seeds, _, _ = drawn(ps, client.scatter(parts, hash=False), "random")
    assert sum(len(each.rows) for each in seeds) >= K


def test_rows_without_weight_are_not_drawn(ps, client):
    weights = (np.arange(600) < 20).astype(np.float32)
    _, candidates, counts = drawn(ps, client.scatter([piece(X, weights)], hash=False), "k-means++")
    assert {tuple(row) for row in candidates} <= {tuple(row) for row in X[:20]}
    assert counts.sum() == 20


# -- trainers that die


class Dying:
    """A trainer whose process ends after so many calls, before it sees the answer of the last one."""

    def __init__(self, trainer, calls):
        self._trainer, self._calls = trainer, calls

    def __getattr__(self, name):
        value = getattr(self._trainer, name)
        if name not in ("pull", "add", "push", "assign", "allreduce", "allgather", "broadcast", "barrier"):
            return value

        def call(*args, **kwargs):
            answer = value(*args, **kwargs)
            self._calls -= 1
            if not self._calls:
                raise InterruptedError
            return answer

        return call


SURVEY = Survey(np.zeros(0), np.zeros(0), Layout(5, 0), True, 600)


class Rehearsal:
    """Pieces whose run has two trainers in threads; one of them ends after some calls and is run again."""

    def __init__(self, ps, parts, who, calls):
        self.ps, self.parts, self.who, self.calls, self.died = ps, parts, who, calls, False

    def train(self, plan, function, **how):
        return self.run(plan(lambda: [SURVEY]), function, **how)

    def run(self, plan, function, *, staleness, progress):
        results = [None, None]

        def work(run, number):
            name = f"trainer {number}"
            for attempt in range(2):
                trainer = Trainer.join(run.ticket, run.number, run.reserve(name=name), attempt)
                mine = Dying(trainer, self.calls if number == self.who and not attempt else -1)
                try:
                    results[trainer.number] = function(mine, self.parts[trainer.number], plan)
                    trainer.leave()
                    return
                except InterruptedError:
                    self.died = True
                finally:
                    trainer.close()

        with self.ps.open_run(trainers=2, staleness=staleness) as run:
            first = run.reserve(name="trainer 0")
            assert first == 0
            threads = [threading.Thread(target=work, args=(run, number)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [None, 100], ids=["lloyd", "minibatches"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_trainer_that_dies_and_runs_again(ps, who, size):
    """After each of the calls of its first passes. The rows are whole numbers: sums are the same in any order."""
    whole = np.round(X)
    parts: list[list[Piece]] = [[piece(whole[::2])], [piece(whole[1::2])]]
    begun = Beginning(np.round(far_starts()), SURVEY, 1.0)
    model = KMeans(n_clusters=K, tol=0.0, batch_size=size)

    def result(calls):
        rehearsal = Rehearsal(ps, parts, who, calls)
        return rehearsal, trained(ps, rehearsal, model._plan(begun, 3, 4), begun, 0, False)

    _, expected = result(-1)
    for calls in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 17, 21):
        rehearsal, made = result(calls)
        assert rehearsal.died or calls > 14
        np.testing.assert_array_equal(made.centers, expected.centers, err_msg=f"after {calls} calls")
        assert made.inertia == pytest.approx(expected.inertia)
        assert made.passes == expected.passes


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [0, 1])
def test_a_trainer_that_dies_while_it_draws_candidates(ps, monkeypatch, number):
    """After each of its calls. The candidates and their weights are those of trainers that did not die."""
    whole = np.round(X)
    parts: list[list[Piece]] = [[piece(whole[::2])], [piece(whole[1::2])]]
    seen = []
    monkeypatch.setattr(
        "dps.models.clusters.clustering.reduced", lambda rows, weights, k, seed: seen.append((rows, weights))
    )

    def candidates(calls):
        rehearsal = Rehearsal(ps, parts, number, calls)
        begun_at(ps, rehearsal, K, "k-means++", 7)
        return rehearsal, *seen.pop()

    _, rows, weights = candidates(-1)
    assert weights.sum() == 600
    for calls in itertools.count(1):
        rehearsal, found, found_weights = candidates(calls)
        np.testing.assert_array_equal(found, rows, err_msg=f"after {calls} calls")
        np.testing.assert_array_equal(found_weights, weights, err_msg=f"after {calls} calls")
        if not rehearsal.died:
            break
    assert calls > 5 * seeding.ROUNDS, "five calls in each round"


# -- data


@pytest.mark.thorough
def test_data_of_dask(ps):
    expected = KMeans(client=ps, tol=0, **GIVEN).fit(X)
    lazy = da.from_array(X, chunks=(250, 3))
    unknown = lazy[lazy[:, 0] > -1e9]
    frame = dd.from_pandas(pd.DataFrame(X, columns=list("abcde")), npartitions=3)
    sparse = lazy.rechunk((250, 5)).map_blocks(scipy.sparse.csr_matrix)
    parts = [dask.delayed(X[:400]), dask.delayed((scipy.sparse.csr_matrix(X[400:]), None))]
    for data in (lazy, unknown, frame, sparse, parts, lazy.rechunk((250, 5)).persist()):
        model = KMeans(client=ps, tol=0, **GIVEN).fit(data)
        np.testing.assert_allclose(model.cluster_centers_, expected.cluster_centers_, atol=1e-9)
        if data is parts:
            assert not hasattr(model, "labels_")
            continue
        assert dask.is_dask_collection(model.labels_)
        np.testing.assert_array_equal(model.labels_.compute(), expected.labels_)
    np.testing.assert_allclose(model.transform(lazy).compute(), expected.transform(X))
    assert model.score(lazy) == pytest.approx(-expected.inertia_)
    weights = da.from_array(WEIGHTS, chunks=250)
    weighted = KMeans(client=ps, tol=0, **GIVEN).fit(X, None, WEIGHTS)
    for data, heavy in ((lazy, weights), (lazy, WEIGHTS), (unknown, WEIGHTS), (X, weights)):
        model = KMeans(client=ps, tol=0, **GIVEN).fit(data, None, heavy)
        np.testing.assert_allclose(model.cluster_centers_, weighted.cluster_centers_, atol=1e-9)
    named = KMeans(client=ps, tol=0, **GIVEN).fit(
        frame.assign(w=dd.from_dask_array(da.from_array(WEIGHTS, 200))), None, "w"
    )
    np.testing.assert_allclose(named.cluster_centers_, weighted.cluster_centers_, atol=1e-9)
    single = KMeans(client=ps, n_clusters=1).fit(lazy)
    np.testing.assert_allclose(single.transform(lazy).compute(), single.transform(X))
    assert list(named.feature_names_in_) == list("abcde")


def test_columns_of_frames_may_be_in_any_order(ps):
    frame = pd.DataFrame(X, columns=list("abcde"))
    model = KMeans(client=ps, **GIVEN).fit(frame)
    np.testing.assert_array_equal(model.predict(frame[list("edcba")]), model.labels_)
    with pytest.raises(InputError, match="differ in"):
        model.predict(frame.rename(columns={"a": "x"}))
    with pytest.raises(InputTypeError, match="no numbers"):
        KMeans(client=ps, **GIVEN).fit(frame.assign(a="word"))


def test_partial_fit_goes_on(ps):
    model = KMeans(client=ps, n_clusters=K, random_state=0, batch_size=100)
    for part in np.array_split(X, 3):
        model.partial_fit(part)
    assert model.n_iter_ == 3
    assert model.counts_.sum() == 600
    best = cluster.KMeans(K, n_init=5, random_state=0).fit(X).inertia_
    assert -model.score(X) < 1.3 * best
    before = model.cluster_centers_
    model.partial_fit(X[:1])
    moved = np.flatnonzero((before != model.cluster_centers_).any(axis=1))
    near = model.labels_[0]
    assert abs(np.delete(before - model.cluster_centers_, near, axis=0)).max() < 1e-9
    count = model.counts_[near] - 1
    np.testing.assert_allclose(model.cluster_centers_[near], (before[near] * count + X[0]) / (count + 1))
    assert near in moved
    sizes = KMeans(client=ps, **GIVEN).fit(X)
    assert sizes.partial_fit(X).counts_.sum() == 1200


def test_a_fitted_model_needs_no_cluster(ps):
    model = KMeans(client=ps, **GIVEN).fit(X)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.labels_)
    assert clone(model).client is ps
    assert list(model.get_feature_names_out()) == [f"kmeans{n}" for n in range(K)]
    np.testing.assert_array_equal(KMeans(client=ps, **GIVEN).fit_predict(X), model.labels_)
    with pytest.raises(NotFittedError, match="this KMeans"):
        clone(model).predict(X)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"init": "random", "n_init": 1}], ids=str)
def test_rows_that_are_all_alike(ps, settings):
    for rows in (np.ones((10, 3)), scipy.sparse.csr_matrix(np.ones((10, 3)))):
        with pytest.warns(ConvergenceWarning, match=r"distinct clusters \(1\) found smaller than n_clusters \(3\)"):
            model = KMeans(client=ps, n_clusters=3, max_iter=5, **settings).fit(rows)
        np.testing.assert_allclose(model.cluster_centers_, 1.0)
        assert model.inertia_ == pytest.approx(0, abs=1e-9)


def test_whole_numbers_in_sparse_matrices(ps):
    counts = scipy.sparse.random(200, 30, 0.2, "csr", random_state=0, data_rvs=lambda n: np.arange(n) % 5 + 1)
    counts = counts.astype(np.int64)
    start = counts[:4].toarray().astype(float)
    ours = KMeans(client=ps, n_clusters=4, init=start, tol=0).fit(counts)
    theirs = cluster.KMeans(4, init=start, n_init=1, tol=0).fit(counts.toarray().astype(float))
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, atol=1e-6)


REFUSED = [
    (InputError, "n_samples=3 should be >= n_clusters=6", {}, X[:3]),
    (InputError, "0 rows", {}, X[:0]),
    (InputError, "NaN", {}, np.where(X > 5, np.nan, X)),
    (InputError, "n_clusters is a whole number", {"n_clusters": 0}, X),
    (InputError, "n_init is a whole number", {"n_init": 0}, X),
    (InputError, "batch_size is a whole number", {"batch_size": 0}, X),
    (InputError, "max_iter is a whole number", {"max_iter": 1.5}, X),
    (InputError, "tol is a finite number", {"tol": -1.0}, X),
    (InputError, "reassignment_ratio is a finite number", {"reassignment_ratio": np.nan}, X),
    (InputError, "init is 'k-means", {"init": "best"}, X),
    (InputError, r"init has shape \(2, 5\)", {"init": X[:2]}, X),
    (InputError, "init has 3", {"init": INIT[:, :3]}, X),
    (InputError, "init has values that are NaN", {"init": INIT * np.nan}, X),
    (InputTypeError, "init is a matrix of numbers", {"init": [["a"] * 5] * K}, X),
    (InputTypeError, "sample_weight goes with X", {"weights": WEIGHTS}, [dask.delayed(X)]),
    (InputError, "zero in every row", {"weights": WEIGHTS * 0}, X),
    (InputError, "a partition is a matrix", {}, [dask.delayed(X[0])]),
    (InputError, "0 rows", {}, da.from_array(X, chunks=(250, 5))[:0]),
]


@pytest.mark.parametrize(("error", "words", "settings", "data"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_is_refused(ps, error, words, settings, data):
    settings = dict(settings)
    weights = settings.pop("weights", None)
    with pytest.raises(error, match=words):
        KMeans(client=ps, **{"n_clusters": K, **settings}).fit(data, None, weights)


def test_another_width_is_refused(ps):
    model = KMeans(client=ps, **GIVEN).fit(X)
    for rows in (X[:, :3], scipy.sparse.csr_matrix(X[:, :3])):
        with pytest.raises(InputError, match="X has 3 features, but KMeans is expecting 5 features"):
            model.predict(rows)
        with pytest.raises(InputError, match="expecting 5 features"):
            model.partial_fit(rows)


# -- scikit-learn's own checks


@pytest.mark.thorough
@parametrize_with_checks([KMeans(max_iter=20)])
def test_checks_of_scikit_learn(ps, estimator, check):
    estimator.set_params(client=ps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)
