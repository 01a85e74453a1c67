"""Factors that lie on servers, while a trainer kills a server's process and dies itself."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import contextlib
import functools
import os
import signal

import numpy as np
from distributed import Client

import dps
from dps.models.factors import matrix_factorization
from dps.models.factors.als import ImplicitALS
from dps.models.factors.bpr import BPR
from dps.models.factors.ratings import HomeRatings, checked
from dps.models.factors.sgd import BiasedSGD
from dps.models.factors.steps import TableNames

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
METHODS = {
    "sgd": BiasedSGD(0.05, 0.02, 2, 50, 3, 0),
    "als": ImplicitALS(1.0, 0.1, 3, "exact", 3),
    "bpr": BPR(0.05, 0.02, 2, 50, 3, 0),
}
USERS, ITEMS, CLOCK = 30, 20, 3


class KillingTrainer:
    """Passes calls on to a trainer. At one clock its first attempt kills a server, changes rows, and dies."""

    def __init__(self, trainer, pid):
        self.trainer, self.pid = trainer, pid

    def __getattr__(self, name):
        call = getattr(self.trainer, name)
        if name in ("push", "assign") and self.trainer.attempt == 0 and self.trainer.clock == CLOCK:
            return functools.partial(self._once, call)
        return call

    def _once(self, call, *arguments):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        call(*arguments)
        raise OSError("lost")


def train(trainer, partitions, pid, *arguments):
    return matrix_factorization.train(KillingTrainer(trainer, pid) if pid else trainer, partitions, *arguments)


@pytest.mark.thorough
def test_the_factors_are_those_of_undisturbed_servers():
    rng = np.random.default_rng(0)
    where = np.flatnonzero(rng.random(USERS * ITEMS) < 0.5)
    ratings = HomeRatings(checked((where // ITEMS, where % ITEMS, rng.integers(1, 6, len(where)))))
    with dps.LocalCluster(servers=4, trainers=1, dashboard_address=None) as cluster, Client(cluster) as client:
        for name, method in METHODS.items():
            made = []
            for kills in (False, True):
                with dps.ParameterServer(client, servers=2, copies=2, name=f"{name}-{kills}") as ps:
                    tables = TableNames("users", "items", method.biases)
                    for number, table in enumerate(tables.names):
                        ps.table(table, 5, init=dps.Normal(0.1, seed=number))
                    address = ps.status().servers[0].worker
                    pid = client.run(os.getpid, workers=[address])[address] if kills else None
                    with method.data(ratings, ps) as data:
                        ps.run(train, data, args=(pid, method, tables, None, 0), retries=2)
                    made.append([ps.client().pull(table, np.arange(ITEMS)) for table in tables.names])
                    if kills:
                        alive = [server.worker for server in ps.status().servers if server.alive]
                        assert address not in alive, f"{name}: the server was killed"
            np.testing.assert_array_equal(*made, err_msg=name)
