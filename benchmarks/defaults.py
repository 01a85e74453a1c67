"""Estimators as they come, beside their rivals as they come: no setting is given but the number of topics and the seed.

A first-time user gives none either. The data (`default_sets.py`) are such that no default was chosen on them. A row is
the mean over seeds, or one fit where nothing is random. ``--only LinearSVC`` measures some of them.

Rivals are scikit-learn; scikit-surprise and implicit for ratings; gensim, with skip-gram as dps has it, for words and
for walks through graphs; all where they are installed. Gibbs sampling also stands beside tomotopy, whose ten passes are
too few for any text, so that it gets the priors and the passes of dps. Factorization machines stand beside the linear
model of scikit-learn: pairs of features are worth their price only if they are not worse than none. Columns of "sgd"
also stand beside the means of users and items alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from distributed import Client
from sklearn import cluster, decomposition, linear_model, metrics, neighbors, svm

import dps
from benchmarks import default_sets
from benchmarks.common import Report, installed, parser
from benchmarks.default_sets import Table, one_hot, rated
from benchmarks.model_factors import Ratings, asked, ranked, rmse
from benchmarks.model_topics import perplexity, sampled_by_tomotopy
from benchmarks.model_words import HELD_OUT, HeldOut
from benchmarks.texts import Texts
from dps import models
from dps.models.topics.allocation import PASSES

SEEDS, TOPICS = 2, 20
MEAN_PENALTY = 3.0  # ratings
BEST = "<= 1.01 x", ">= 0.99 x"

Scores = dict[str, float]  # by what is measured; of "accuracy" and "recall" and such, more is better
Way = Callable[[int], Scores]  # by the seed


class Case(NamedTuple):
    """One estimator on one data set."""

    estimator: str
    data: str
    ours: Way
    rivals: dict[str, Way]
    random: bool = True


MORE = {"accuracy", "AUC", "recall@10", "NDCG@10", "same neighbours"}


# -- scores


def told(model: Any, table: Table) -> Scores:
    """How well a classifier does."""
    found = {"accuracy": float(model.score(table.X_test, table.y_test))}
    if hasattr(model, "predict_proba"):
        p = np.clip(model.predict_proba(table.X_test).astype(float), 1e-7, 1)
        known = np.isin(table.y_test, model.classes_)
        p = p[known] / p[known].sum(axis=1, keepdims=True)
        found["log-loss"] = float(metrics.log_loss(table.y_test[known], p, labels=model.classes_))
    return found


def missed(model: Any, table: Table) -> Scores:
    """The error of a regression."""
    return {"RMSE": float(np.sqrt(np.mean((model.predict(table.X_test) - table.y_test) ** 2)))}


def deviated(model: Any, table: Table) -> Scores:
    """The mean deviance of counts."""
    return {
        "deviance": float(metrics.mean_poisson_deviance(table.y_test, np.maximum(model.predict(table.X_test), 1e-9)))
    }


def apart(model: Any, table: Table) -> Scores:
    """The mean squared distance of rows that were held out from the nearest centers."""
    near = metrics.pairwise_distances_argmin_min(table.X_test, np.asarray(model.cluster_centers_))[1]
    return {"mean squared distance": float(np.mean(near**2))}


# -- estimators


def fitted(make: Callable[[], Any], table: Table, score: Callable[[Any, Table], Scores], with_y: bool = True) -> Way:
    """A way that fits what `make` makes, with the seed if it has one."""

    def way(seed: int) -> Scores:
        model = make()
        if "random_state" in model.get_params():
            model.set_params(random_state=seed)
        return score(model.fit(table.X, table.y) if with_y else model.fit(table.X), table)

    return way


def tables(client: Client, quick: bool) -> Iterable[Case]:
    """Estimators of tables, beside scikit-learn's of the same name."""
    regressions = "LinearRegression", "Ridge", "Lasso", "ElasticNet"
    for kinds, sets, score in (
        (("LogisticRegression", "LinearSVC"), default_sets.classes, told),
        (regressions, default_sets.numbers, missed),
        (("PoissonRegressor",), default_sets.counts, deviated),
    ):
        for table in sets(quick):
            for kind in kinds:
                theirs = getattr(svm if kind == "LinearSVC" else linear_model, kind)
                ours = fitted(lambda kind=kind: getattr(models, kind)(client=client), table, score)  # type: ignore[misc]
                yield Case(kind, table.name, ours, {"scikit-learn": fitted(theirs, table, score)}, random=False)


def clusters(client: Client, quick: bool) -> Iterable[Case]:
    """k-means."""
    for table in (*default_sets.classes(quick)[:2], *default_sets.numbers(quick)[2:]):
        ours = fitted(lambda: models.KMeans(client=client), table, apart, with_y=False)
        yield Case("KMeans", table.name, ours, {"scikit-learn": fitted(cluster.KMeans, table, apart, with_y=False)})


def machines(client: Client, quick: bool) -> Iterable[Case]:
    """Factorization machines, beside a linear model of scikit-learn's."""
    for table in default_sets.pairs(quick):
        ours = fitted(lambda: models.FactorizationMachine(client=client), table, told)
        rivals = {"LogisticRegression of scikit-learn": fitted(linear_model.LogisticRegression, table, told)}
        yield Case("FactorizationMachine", table.name, ours, rivals)
    for table in (*default_sets.numbers(quick)[:2], *map(rated, default_sets.ratings(quick)[:2])):
        ours = fitted(lambda: models.FactorizationMachineRegressor(client=client), table, missed)
        rivals = {"Ridge of scikit-learn": fitted(linear_model.Ridge, table, missed)}
        yield Case("FactorizationMachineRegressor", table.name, ours, rivals)


def ratings(client: Client, quick: bool) -> Iterable[Case]:
    """Matrix factorization: RMSE of ratings, and what is recommended."""
    for name, both in default_sets.ratings(quick):
        rivals: dict[str, Way] = {"means of users and items": lambda seed, both=both: means(both)}  # type: ignore[misc]
        if installed("scikit-surprise"):
            rivals["scikit-surprise"] = lambda seed, both=both: by_surprise(both, seed)  # type: ignore[misc]
        ours = lambda seed, both=both: by_factors("sgd", both, seed, client)  # noqa: E731
        yield Case('MatrixFactorization("sgd")', name, ours, rivals)  # type: ignore[arg-type]
        for method in ("als", "bpr"):
            rivals = {}
            if installed("implicit"):
                rivals["implicit"] = lambda seed, both=both, method=method: by_implicit(method, both, seed)  # type: ignore[misc]
            ours = lambda seed, both=both, method=method: by_factors(method, both, seed, client)  # noqa: E731
            yield Case(f'MatrixFactorization("{method}")', name, ours, rivals)  # type: ignore[arg-type]


def by_factors(method: str, both: Ratings, seed: int, client: Client) -> Scores:
    """By dps."""
    model = models.MatrixFactorization(method, client=client, random_state=seed).fit(both.matrix())
    if method == "sgd":
        return {"RMSE": rmse(model.predict(*both.held_out[:2]), both.held_out)[0]}
    users = known_users(both)
    return dict(zip(("recall@10", "NDCG@10"), ranked(model.recommend(users, 10)[0], users, both.held_out), strict=True))


def known_users(both: Ratings) -> np.ndarray:
    """Users who are recommended to, of whom there are ratings to learn from."""
    users = asked(both.held_out)
    return users[np.isin(users, both.learnt[0])]


def means(both: Ratings) -> Scores:
    """By a number for each user and each item, which are drawn to 0 as if by `MEAN_PENALTY` more ratings."""
    X, X_test = (one_hot(each[:2], both.shape) for each in (both.learnt, both.held_out))
    model = linear_model.Ridge(alpha=MEAN_PENALTY, solver="lsqr").fit(X, both.learnt[2])
    return {"RMSE": rmse(model.predict(X_test), both.held_out)[0]}


def by_surprise(both: Ratings, seed: int) -> Scores:
    """By scikit-surprise's SVD."""
    import pandas as pd
    import surprise

    frame = pd.DataFrame(dict(zip("uir", both.learnt, strict=True)))
    data = surprise.Dataset.load_from_df(frame, surprise.Reader(rating_scale=(0.5, 5))).build_full_trainset()
    model = surprise.SVD(random_state=seed).fit(data)
    pairs = zip(*both.held_out[:2], strict=True)
    return {"RMSE": rmse(np.array([model.predict(u, i).est for u, i in pairs]), both.held_out)[0]}


def by_implicit(method: str, both: Ratings, seed: int) -> Scores:
    """By the package implicit, whose ALS takes confidences: 1 + r, as that of dps makes them."""
    from implicit.als import AlternatingLeastSquares
    from implicit.bpr import BayesianPersonalizedRanking

    X = both.matrix()
    if method == "als":
        X.data += 1
    model = (AlternatingLeastSquares if method == "als" else BayesianPersonalizedRanking)(random_state=seed)
    model.fit(X, show_progress=False)
    users = known_users(both)
    found = model.recommend(users, X[users], N=10)[0]
    return dict(zip(("recall@10", "NDCG@10"), ranked(found, users, both.held_out), strict=True))


def topics(client: Client, quick: bool) -> Iterable[Case]:
    """Topic models: the perplexity of documents that were held out. Gibbs sampling stands beside the batch method."""
    for texts in default_sets.texts(quick):

        def ours(method: str, texts: Any = texts) -> Way:
            def way(seed: int) -> Scores:
                how = {"learning_method": method, "random_state": seed, "client": client}
                model = models.LatentDirichletAllocation(TOPICS, **how)  # type: ignore[arg-type]
                return {"perplexity": perplexity(model.fit(texts.train).components_, texts.held_out)}

            return way

        def theirs(method: str, texts: Any = texts) -> Way:
            def way(seed: int) -> Scores:
                model = decomposition.LatentDirichletAllocation(TOPICS, learning_method=method, random_state=seed)
                return {"perplexity": perplexity(model.fit(texts.train).components_, texts.held_out)}

            return way

        for method in ("batch", "online", "gibbs"):
            rival = "batch" if method == "gibbs" else method
            name = f'LatentDirichletAllocation("{method}")'
            rivals = {f"scikit-learn, {rival}": theirs(rival)}
            if method == "gibbs" and installed("tomotopy"):
                rivals["tomotopy, the same passes"] = lambda seed, texts=texts: by_tomotopy(texts, seed)  # type: ignore[misc]
            yield Case(name, texts.name, ours(method), rivals)


def by_tomotopy(texts: Texts, seed: int) -> Scores:
    """By tomotopy's Gibbs sampling, with one worker."""
    found = sampled_by_tomotopy(texts.train, seed, topics=TOPICS, passes=PASSES["gibbs"], workers=1)
    return {"perplexity": perplexity(found, texts.held_out)}


def words(client: Client, quick: bool) -> Iterable[Case]:
    """Vectors of words: the loss of pairs in sentences that were held out."""
    for name, text in default_sets.sentences(quick):
        train = [sentence for n, sentence in enumerate(text) if n % HELD_OUT]
        judge = HeldOut(text[::HELD_OUT], train)

        def ours(seed: int, train: Any = train, judge: HeldOut = judge) -> Scores:
            with dps.ParameterServer(client, name=f"words-{seed}") as ps:
                model = models.Word2Vec(client=ps, seed=seed).fit(train)
                contexts, inside = sorted(ps.tables())  # contexts-..., words-...
                loss = judge.loss((ps.client().pull(inside), ps.client().pull(contexts)))
                model.forget()
            return {"loss of a pair": loss}

        def theirs(seed: int, train: Any = train, judge: HeldOut = judge) -> Scores:
            from gensim.models import Word2Vec

            model = Word2Vec(train, sg=1, seed=seed, workers=1)
            places = [model.wv.key_to_index[word] for word in judge.words]
            return {"loss of a pair": judge.loss((model.wv.vectors[places], model.syn1neg[places]))}

        yield Case("Word2Vec", name, ours, {"gensim": theirs} if installed("gensim") else {})


def vertices(client: Client, quick: bool) -> Iterable[Case]:
    """Vectors of vertices: edges that were held out against pairs that are none, by the cosine."""
    for name, edges in default_sets.graphs(quick):
        rng = np.random.default_rng(0)
        held = rng.random(len(edges)) < 0.2
        train, size = edges[~held], int(edges.max()) + 1
        strange = rng.integers(0, size, (int(held.sum()), 2))
        pairs = np.concatenate([edges[held], strange])
        truth = np.repeat([1, 0], len(strange))

        def judged(wv: Any, pairs: Any = pairs, truth: Any = truth) -> Scores:
            there = np.array([a in wv and b in wv for a, b in pairs.tolist()])
            near = [float(wv.similarity(a, b)) for a, b in pairs[there].tolist()]
            return {"AUC": float(metrics.roc_auc_score(truth[there], near))}

        def ours(seed: int, train: Any = train, judged: Any = judged) -> Scores:
            return judged(models.Node2Vec(client=client, seed=seed).fit(train).wv)

        def theirs(seed: int, train: Any = train, judged: Any = judged) -> Scores:
            from gensim.models import Word2Vec

            text = walks(train, seed)
            return judged(Word2Vec(text, vector_size=128, window=10, sg=1, min_count=0, seed=seed, workers=1).wv)

        yield Case("Node2Vec", name, ours, {"gensim, the same walks": theirs} if installed("gensim") else {})


def walks(edges: np.ndarray, seed: int) -> list[list[int]]:
    """The walks of Node2Vec's defaults: ten of 80 vertices from each, any edge as likely as another."""
    rng, size = np.random.default_rng(seed), int(edges.max()) + 1
    both = np.concatenate([edges, edges[:, ::-1]])
    links = scipy.sparse.csr_matrix((np.ones(len(both)), both.T), (size, size))
    at = np.tile(np.flatnonzero(np.diff(links.indptr)), 10)
    steps = [at]
    for _ in range(79):
        degrees = np.diff(links.indptr)[at]
        at = links.indices[links.indptr[at] + (rng.random(len(at)) * degrees).astype(int)].astype(np.int64)
        steps.append(at)
    return np.stack(steps, axis=1).tolist()


def neighbours(client: Client, quick: bool) -> Iterable[Case]:
    """The most similar rows: how many of scikit-learn's are found."""
    for table in default_sets.classes(quick)[:3]:

        def exact(table: Table = table) -> np.ndarray:
            model = neighbors.NearestNeighbors(n_neighbors=10, metric="cosine").fit(table.X)
            return model.kneighbors(table.X_test[:300], return_distance=False)

        def ours(seed: int, table: Table = table, exact: Any = exact) -> Scores:
            with models.Similarity(client=client) as model:
                _, found = model.fit(table.X).kneighbors(table.X_test[:300])
            return {"same neighbours": float(np.mean([np.isin(a, b) for a, b in zip(found, exact(), strict=True)]))}

        yield Case(
            "Similarity", table.name, ours, {"scikit-learn": lambda seed: {"same neighbours": 1.0}}, random=False
        )


FAMILIES: dict[str, Callable[[Client, bool], Iterable[Case]]] = {
    "tables": tables,
    "clusters": clusters,
    "machines": machines,
    "ratings": ratings,
    "topics": topics,
    "words": words,
    "vertices": vertices,
    "neighbours": neighbours,
}


def compare(report: Report, case: Case, seeds: int) -> None:
    """The rows of one case."""
    turns = range(1, 1 + (seeds if case.random else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a rival has not converged by its default is no news
        ours, *others = ([way(seed) for seed in turns] for way in (case.ours, *case.rivals.values()))
    for kind in ours[0]:
        value = float(np.mean([found[kind] for found in ours]))
        name = f"{case.estimator}, {case.data}: {kind}"
        if not others:
            report.add(name, value, "")
        for rival, made in zip(case.rivals, others, strict=True):
            if kind in made[0]:
                theirs = float(np.mean([found[kind] for found in made]))
                report.add(name, value, "", rival, theirs, BEST[kind in MORE])


def measure(report: Report, quick: bool, families: Iterable[str], only: str = "") -> None:
    """The rows of some families, of estimators whose names contain `only`."""
    options = {"servers": 1, "trainers": 2, "processes": False, "dashboard_address": None}
    with dps.LocalCluster(**options) as local, Client(local) as client:
        for family in families:
            for case in FAMILIES[family](client, quick):
                if only in case.estimator:
                    compare(report, case, 1 if quick else SEEDS)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="only these")
    options.add_argument("--only", default="", metavar="NAME", help="estimators whose names contain this")
    args = options.parse_args(argv)
    with Report("defaults", args.json) as report:
        measure(report, args.quick, args.families, args.only)


if __name__ == "__main__":
    main()
