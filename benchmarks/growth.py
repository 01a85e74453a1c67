"""Memory and traffic of each model at 10 x the rows, with as many features as before and with 10 x as many.

Each fit has a cluster of its own: one server and two trainers, in processes. The workers make the data, so the driver
need not hold them. A peak is the most memory that a process had during the fit, less what it had before, and less than
nothing counts as nothing. Bytes are those that the trainers have received and sent. "Data" are the arrays of the
partitions: what grows with the rows beyond them is for the reader to ask about.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import dask
import dask.array
import dask.bag
import msgspec
import numpy as np
import scipy.sparse
from distributed import Client

import dps
import dps.graph
from benchmarks.common import Report, parser
from dps import models
from dps.engine.telemetry.run_history import RunHistory

PARTS = 8
TIMES = 10  # as many rows, and features
MIB = 1 << 20


Places = Callable[[], AbstractContextManager["Place"]]


class Size(NamedTuple):
    """How many rows a fit has, and how many features (or items, words, vertices)."""

    rows: int
    features: int


class Place(NamedTuple):
    """Where a fit is measured."""

    client: Client
    ps: dps.ParameterServer


class Measured(NamedTuple):
    """What a fit took: bytes."""

    driver: int
    trainers: int  # both together
    server: int
    traffic: int  # of the trainers


def clicks(seed: int, size: Size) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """A partition: 20 features of a row are 1, and one of two labels."""
    rng, rows = np.random.default_rng(seed), size.rows // PARTS
    columns = np.minimum(rng.zipf(1.3, (rows, 20)) * 7919, 2**40) % size.features
    starts = np.arange(rows + 1) * 20
    X = scipy.sparse.csr_matrix((np.ones(rows * 20, np.float32), columns.ravel(), starts), (rows, size.features))
    return X, rng.integers(0, 2, rows)


def ratings(seed: int, size: Size) -> np.ndarray:
    """A partition of users, items and values. The users are as many as the items."""
    rng, rows = np.random.default_rng(seed), size.rows // PARTS
    return np.column_stack([*rng.integers(0, size.features, (2, rows)), rng.integers(1, 6, rows)]).astype(np.float64)


def sentences(seed: int, size: Size) -> list[list[str]]:
    """A partition of sentences of 20 words; rows count words."""
    words = np.minimum(np.random.default_rng(seed).zipf(1.2, (size.rows // PARTS // 20, 20)), 2**40) % size.features
    return [[f"w{word}" for word in sentence] for sentence in words.tolist()]


def counts(seed: int, size: Size) -> np.ndarray:
    """A partition of documents as counts of words."""
    rng = np.random.default_rng(seed)
    return rng.poisson(50 / size.features, (size.rows // PARTS, size.features)).astype(np.float32)


def points(seed: int, size: Size) -> np.ndarray:
    """A partition of dense rows."""
    return np.random.default_rng(seed).normal(size=(size.rows // PARTS, size.features)).astype(np.float32)


def edges(seed: int, size: Size) -> np.ndarray:
    """A partition of a directed graph."""
    return np.random.default_rng(seed).integers(0, size.features, (size.rows // PARTS, 2))


def parts(make: Callable, size: Size) -> list:
    """The partitions, delayed."""
    return [dask.delayed(make, pure=True)(seed, size) for seed in range(PARTS)]


def array(make: Callable, size: Size) -> dask.array.Array:
    """The partitions as one Dask array."""
    sample = make(0, size)
    blocks = [dask.array.from_delayed(part, sample.shape, sample.dtype) for part in parts(make, size)]
    return dask.array.concatenate(blocks)


def supervised(model: Any) -> Callable:
    """A fit of a model of sparse rows and labels."""
    return lambda ps, size: model(ps).fit(parts(clicks, size))


def factors(method: str) -> Callable:
    """A fit of factors of users and items."""

    def fit(ps: dps.ParameterServer, size: Size) -> None:
        settings = {"factors": 16, "epochs": 2, "random_state": 0, "progress": False}
        models.MatrixFactorization(method, client=ps, **settings).fit(array(ratings, size))

    return fit


def topics(method: str) -> Callable:
    """A fit of topics."""

    def fit(ps: dps.ParameterServer, size: Size) -> None:
        settings = {"learning_method": method, "max_iter": 2, "random_state": 0, "progress": False}
        models.LatentDirichletAllocation(10, client=ps, **settings).fit(array(counts, size))

    return fit


def words(ps: dps.ParameterServer, size: Size) -> None:
    """A fit of vectors of words."""
    settings = {"vector_size": 32, "min_count": 1, "epochs": 1, "seed": 0, "progress": False}
    models.Word2Vec(client=ps, **settings).fit(dask.bag.from_delayed(parts(sentences, size)))


def clusters(batch_size: int | None) -> Callable:
    """A fit of 20 centers."""

    def fit(ps: dps.ParameterServer, size: Size) -> None:
        settings = {"max_iter": 3, "batch_size": batch_size, "init": "random", "n_init": 1, "random_state": 0}
        models.KMeans(n_clusters=20, client=ps, **settings).fit(array(points, size))

    return fit


def neighbours(ps: dps.ParameterServer, size: Size) -> None:
    """Rows stored on the servers, and the ten nearest ones to some of them."""
    with models.Similarity(n_neighbors=10, client=ps).fit(array(points, size)) as model:
        model.kneighbors(points(0, size)[:100])


def graph(algorithm: str, **settings: Any) -> Callable:
    """A run of a graph's algorithm, whose values stay on the servers."""

    def fit(ps: dps.ParameterServer, size: Size) -> None:
        getattr(dps.graph, algorithm)(ps, array(edges, size), **settings).close()

    return fit


def vertices(ps: dps.ParameterServer, size: Size) -> None:
    """A fit of vectors of vertices."""
    walks = {"walk_length": 10, "num_walks": 2}
    settings = {"vector_size": 16, "epochs": 1, "seed": 0, "progress": False}
    models.Node2Vec(client=ps, **walks, **settings).fit(array(edges, size))


def count(trainer: dps.Trainer, partitions: Any) -> None:
    """Count how often each feature occurs with each label."""
    for X, y in trainer.iterate(partitions, batch_size=500):
        trainer.push("counts", X.indices, np.eye(2, dtype=np.int64)[np.repeat(y, np.diff(X.indptr))])


def counted(ps: dps.ParameterServer, size: Size) -> None:
    """Counts by feature and label, of which a naive Bayes classifier is made."""
    ps.table("counts", dim=2, dtype="int64")
    ps.run(count, parts(clicks, size), progress=False)
    ps.drop_table("counts")


def train_bags(trainer: dps.Trainer, partitions: Any) -> None:
    """A logistic regression on the mean of 16 numbers for each feature, in torch."""
    import torch

    torch.set_num_threads(1)
    bags, tower = dps.torch.EmbeddingBag(trainer, "bags", 16), torch.nn.Linear(16, 1)
    dense = dps.torch.DenseParameters(trainer, "tower", tower)
    wanted = lambda batch: {"bags": batch[0]}  # noqa: E731
    for (_, y), rows in trainer.iterate(partitions, 2, 500, pull=wanted):
        dense.pull()
        labels = torch.from_numpy(y.astype(np.float32))
        logits = tower(bags(rows["bags"]))[:, 0]
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        dps.torch.push_gradients(bags, dense)


def bags(ps: dps.ParameterServer, size: Size) -> None:
    """Training of a module of torch whose rows and parameters lie on the servers."""
    import torch

    ps.table("bags", dim=16, init=dps.Normal(0.1), optimizer=dps.Adagrad(0.1))
    dps.torch.dense_table(ps, "tower", torch.nn.Linear(16, 1), optimizer=dps.Adagrad(0.1))
    ps.run(train_bags, parts(clicks, size), staleness=1, progress=False)
    for table in ("bags", "tower"):
        ps.drop_table(table)


class Case(NamedTuple):
    """A model, the data that it is fitted on, and how many."""

    fit: Callable
    data: Callable
    size: Size


def by_gradients(solver: str) -> Callable:
    """A logistic regression by a stochastic solver."""
    return lambda ps: models.LogisticRegression(client=ps, solver=solver, epochs=2, progress=False)


def by_lbfgs(ps: dps.ParameterServer) -> Any:
    return models.LogisticRegression(client=ps, solver="lbfgs", l2=0.01, epochs=5, progress=False)


def machine(ps: dps.ParameterServer) -> Any:
    return models.FactorizationMachine(factors=8, client=ps, epochs=2, progress=False)


def aware(ps: dps.ParameterServer, size: Size) -> None:
    """A fit of a machine in which each feature has 4 numbers for each of 4 fields."""
    fields = np.arange(size.features) % 4
    model = models.FactorizationMachine(factors=4, fields=fields, client=ps, epochs=2, progress=False)
    model.fit(parts(clicks, size))


CASES = {
    "LogisticRegression, adagrad": Case(supervised(by_gradients("adagrad")), clicks, Size(40_000, 20_000)),
    "LogisticRegression, ftrl": Case(supervised(by_gradients("ftrl")), clicks, Size(40_000, 20_000)),
    "LogisticRegression, lbfgs": Case(supervised(by_lbfgs), clicks, Size(40_000, 20_000)),
    "FactorizationMachine": Case(supervised(machine), clicks, Size(20_000, 20_000)),
    "FactorizationMachine, field-aware": Case(aware, clicks, Size(20_000, 20_000)),
    "MatrixFactorization, sgd": Case(factors("sgd"), ratings, Size(100_000, 2_000)),
    "MatrixFactorization, als": Case(factors("als"), ratings, Size(100_000, 2_000)),
    "MatrixFactorization, bpr": Case(factors("bpr"), ratings, Size(50_000, 2_000)),
    "Word2Vec": Case(words, sentences, Size(50_000, 5_000)),
    "Node2Vec": Case(vertices, edges, Size(40_000, 4_000)),
    "LatentDirichletAllocation, batch": Case(topics("batch"), counts, Size(800, 500)),
    "LatentDirichletAllocation, online": Case(topics("online"), counts, Size(800, 500)),
    "LatentDirichletAllocation, gibbs": Case(topics("gibbs"), counts, Size(800, 500)),
    "KMeans, Lloyd": Case(clusters(None), points, Size(40_000, 20)),
    "KMeans, mini-batches": Case(clusters(1000), points, Size(40_000, 20)),
    "Similarity": Case(neighbours, points, Size(40_000, 20)),
    "page_rank": Case(graph("page_rank", tol=1e-3), edges, Size(100_000, 10_000)),
    "connected_components": Case(graph("connected_components"), edges, Size(100_000, 10_000)),
    "label_propagation": Case(graph("label_propagation", max_iter=3), edges, Size(100_000, 10_000)),
    "k_core": Case(graph("k_core"), edges, Size(40_000, 10_000)),
    "torch, EmbeddingBag": Case(bags, clicks, Size(40_000, 20_000)),
    "counts for naive Bayes": Case(counted, clicks, Size(40_000, 20_000)),
}


def begin_peak() -> int:
    """Forget the peak of this process; its memory now, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, those in memory now; VmHWM, the most."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def traffic(ps: dps.ParameterServer) -> int:
    """Bytes that trainers of all runs have received and sent."""
    total = 0.0
    for run in ps.status().runs:
        history = msgspec.msgpack.decode(ps.connection.call("history", run=run.run), type=RunHistory)
        total += sum(sum(each.rows[name]) for each in history.trainers for name in ("bytes_in", "bytes_out"))
    return int(total)


@contextlib.contextmanager
def new_cluster() -> Iterator[Place]:
    """One server and two trainers, in processes."""
    with (
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield Place(client, ps)


def measured(place: Place, fit: Callable, size: Size) -> Measured:
    """What one fit takes."""
    client, ps = place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few iterations to converge
        fit(ps, Size(PARTS * 40, 40))  # imports, connections and compiled code are no growth
        before, ours = client.run(begin_peak), begin_peak()
        bytes_before = traffic(ps)
        fit(ps, size)
    peaks, ours = client.run(memory, "VmHWM"), memory("VmHWM") - ours
    grown = {worker: max(0, peaks[worker] - before[worker]) for worker in peaks}
    server = sum(grown.pop(server.worker) for server in ps.status().servers)
    return Measured(max(0, ours), sum(grown.values()), server, traffic(ps) - bytes_before)


def bytes_of(make: Callable, size: Size) -> int:
    """Of all partitions, about."""
    part = make(0, size)
    if isinstance(part, tuple):
        return PARTS * (part[0].data.nbytes + part[0].indices.nbytes + part[0].indptr.nbytes + part[1].nbytes)
    if isinstance(part, list):
        return PARTS * sum(sum(map(sys.getsizeof, sentence)) + sys.getsizeof(sentence) for sentence in part)
    return PARTS * int(part.nbytes)


def show(report: Report, name: str, case: Case, quick: bool, places: Places) -> None:
    """The rows of one model, each of whose fits has a place of its own."""
    rows, features = case.size if not quick else Size(max(case.size.rows // 20, 40 * PARTS), case.size.features // 10)
    sizes = {"n": Size(rows, features), "10 n": Size(TIMES * rows, features)}
    sizes["10 n, 10 x the features"] = Size(TIMES * rows, TIMES * features)
    if case.data is counts:  # its data are dense, so they would be 100 x as many
        del sizes["10 n, 10 x the features"]
    found = {}
    for label, size in sizes.items():
        with places() as place:
            found[label] = measured(place, case.fit, size)
    data = {label: bytes_of(case.data, size) for label, size in sizes.items()}
    for label in list(sizes)[1:]:
        report.add(f"{name}: {label}: data", data[label] / MIB, "MiB", "n", data["n"] / MIB)
        for part in Measured._fields:
            value, base = getattr(found[label], part) / MIB, getattr(found["n"], part) / MIB
            report.add(f"{name}: {label}: {part}", value, "MiB", "n", base)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--only", metavar="TEXT", help="only models with this text in their name")
    args = options.parse_args(argv)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        sys.exit("growth needs Linux: it reads peaks of memory from /proc")
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(Report("memory and traffic of each model at 10 x the rows", args.json))
        places: Places = new_cluster
        if args.quick:  # one cluster for all: the figures mean nothing then
            place = stack.enter_context(new_cluster())
            places = functools.partial(contextlib.nullcontext, place)
        for name, case in CASES.items():
            if args.only is None or args.only.lower() in name.lower():
                show(report, name, case, args.quick, places)


if __name__ == "__main__":
    from benchmarks.growth import main as run  # so that workers find our functions by name

    run()
