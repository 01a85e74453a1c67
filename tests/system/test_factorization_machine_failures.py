"""A factorization machine while a server's process is killed and a trainer dies: the model of undisturbed servers."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import contextlib
import os
import signal

import numpy as np
import scipy.sparse
from distributed import Client

import dps
from dps.models.factors import machine_training
from dps.models.factors.field_aware import Fields
from dps.models.factors.machine_training import MachinePlan
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
FEATURES, K, CLOCK = 30, 3, 3


class KillingTrainer:
    """Passes calls on to a trainer. At one clock its first attempt kills a server, pushes, and dies."""

    def __init__(self, trainer, pid):
        self.trainer, self.pid = trainer, pid

    def __getattr__(self, name):
        if name == "push" and self.trainer.attempt == 0 and self.trainer.clock == CLOCK:
            return self._once
        return getattr(self.trainer, name)

    def _once(self, pushes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.trainer.push(pushes)
        raise OSError("lost")


def train(trainer, pieces, pid, plan):
    return machine_training.train(KillingTrainer(trainer, pid) if pid else trainer, pieces, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [None, Fields(5)], ids=["plain", "field-aware"])
def test_the_model_is_that_of_undisturbed_servers(fields):
    rng = np.random.default_rng(0)
    X = scipy.sparse.random(400, FEATURES, density=0.2, format="csr", random_state=0, dtype=np.float32)
    piece = Piece(X, rng.integers(0, 2, 400), Layout(FEATURES, 0))
    plan = MachinePlan(
        "machine", "intercept", np.array([0, 1]), 0.0, 1.0, FEATURES, 2, None, 50, True, 3, True, True, False,
        fields=fields,
    )  # fmt: skip
    columns = {
        "w": dps.Column(1, optimizer=dps.FTRL()),
        "v": dps.Column(K * (fields.count if fields else 1), init=dps.Normal(0.1, seed=3), optimizer=dps.Adagrad(0.1)),
    }
    made = []
    with dps.LocalCluster(servers=4, trainers=1, dashboard_address=None) as cluster, Client(cluster) as client:
        pieces = client.scatter([piece], hash=False)
        for kills in (False, True):
            with dps.ParameterServer(client, servers=2, copies=2, name=f"machine-{kills}") as ps:
                ps.table("machine", columns=columns)
                ps.table("intercept", rows=1, optimizer=dps.FTRL())
                address = ps.status().servers[0].worker
                pid = client.run(os.getpid, workers=[address])[address] if kills else None
                ps.run(train, pieces, args=(pid, plan), retries=2)
                made.append((ps.client().pull("machine", np.arange(FEATURES)), ps.client().pull("intercept")))
                if kills:
                    alive = [server.worker for server in ps.status().servers if server.alive]
                    assert address not in alive, "the server was killed"
    for undisturbed, disturbed in zip(*made, strict=True):
        np.testing.assert_array_equal(disturbed, undisturbed)
