"""What a wheel has to do where it was installed: ``python release/smoke.py``, without a checkout on the path.

It imports every compiled module, and starts servers in this process which push, pull, call functions, train and compute
with a vector. Where scikit-learn is installed, it also fits a model.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sysconfig
from pathlib import Path

import dask.array as da
import numpy as np

import dps
import dps.engine.core
import dps.kernels.loops

KEYS = np.array([7, -3, 7, 2**40])


@dps.function(changes=True)
def double(rows):
    rows.values *= 2


def train(trainer, partitions):
    for X, y in trainer.iterate(partitions, epochs=20, batch_size=100):
        w = trainer.pull("w", np.arange(3))
        trainer.push("w", np.arange(3), X.T @ (X @ w - y) / len(y))


def check_modules() -> int:
    """How many compiled modules were imported. Each of them has to come from the installed wheel."""
    names = [module.name for module in pkgutil.walk_packages(dps.engine.core.__path__, "dps.engine.core.")]
    names += [module.name for module in pkgutil.walk_packages(dps.kernels.loops.__path__, "dps.kernels.loops.")]
    for name in names:
        file = importlib.import_module(name).__file__
        assert Path(file).is_relative_to(sysconfig.get_path("platlib")), f"{file} is not part of an installed wheel"
    assert len(names) > 30, names
    return len(names)


def check_tables(ps) -> None:
    counts = ps.table("counts", dim=2, dtype="int64")
    counts.push(KEYS, np.ones((4, 2), np.int64))
    assert counts.pull([-3, 7, 2**40, 5]).tolist() == [[1, 1], [2, 2], [1, 1], [0, 0]]
    ps.call(double, counts)
    assert counts.pull([7]).tolist() == [[4, 4]]
    assert float(np.linalg.norm(dps.arrays.on(ps).asarray(np.array([3.0, 0.0, 4.0])))) == 5


def check_training(ps) -> None:
    X = da.random.default_rng(0).normal(size=(2000, 3), chunks=(500, 3))
    w = ps.table("w", rows=3, optimizer=dps.SGD(0.1))
    ps.run(train, (X, X @ np.array([1.0, -2.0, 3.0])), staleness=1)
    assert np.allclose(w.pull(), [1, -2, 3], atol=0.01)


def check_model(cluster) -> None:
    from dps.models import LogisticRegression

    X = np.random.default_rng(0).normal(size=(2000, 5))
    y = X[:, 0] > X[:, 1]
    score = LogisticRegression(client=cluster).fit(X, y).score(X, y)
    assert score > 0.95, score


def main() -> None:
    done = [f"{check_modules()} compiled modules"]
    with dps.LocalCluster(servers=2, trainers=2, processes=False) as cluster:
        with dps.ParameterServer(cluster, servers=2, copies=2) as ps:
            check_tables(ps)
            check_training(ps)
            done += ["tables", "training"]
        if importlib.util.find_spec("sklearn"):
            check_model(cluster)
            done.append("a model")
    print(f"dps {dps.__version__}: {', '.join(done)}")


if __name__ == "__main__":
    main()
