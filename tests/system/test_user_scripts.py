"""A class of a user's script on real servers: processes that cannot import the script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from servers import PATIENCE

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
import types

import numpy as np

import dps
from dps.errors import FunctionError

if __name__ == "__main__":  # so that no worker process has the class, although it imports the script

    class Averaged(dps.Optimizer):
        lr: float = 0.5

        def init(self, dim):
            return dim + 1

        def update(self, values, state, gradients, clock):
            if (gradients == 13).any():
                raise ArithmeticError("thirteen is out of the question")
            state[:, :-1] += gradients
            state[:, -1] += 1
            values -= self.lr * state[:, :-1] / state[:, -1:]

    class NeedsModule(Averaged):
        def update(self, values, state, gradients, clock):
            values -= only_here.rate

    only_here = sys.modules["only_here"] = types.ModuleType("only_here")

    def oracle(pushes):
        values, state = np.zeros((50, 2), np.float32), np.zeros((50, 3), np.float32)
        for keys, gradients in pushes:
            some, beside = values[keys], state[keys]
            Averaged(0.25).update(some, beside, gradients, 0)
            values[keys], state[keys] = some, beside
        return values

    def train(trainer, partitions, pushes):
        for _ in trainer.iterate(range(len(pushes))):
            keys, gradients = pushes[trainer.clock]
            trainer.push({"keyed": (keys, gradients), "dense": (keys, gradients)})

    rng = np.random.default_rng(0)
    pushes = [(np.sort(rng.permutation(50)[:20]), rng.normal(size=(20, 2)).astype(np.float32)) for _ in range(12)]
    everything = np.arange(50)
    folder = sys.argv[1]
    with dps.LocalCluster(servers=2, trainers=1, dashboard_address=None) as cluster:
        with dps.ParameterServer(cluster, servers=2, copies=2) as ps:
            for name, rows in (("keyed", None), ("dense", 50)):
                ps.table(name, 2, rows=rows, optimizer=Averaged(0.25))
            print(ps.tables()["keyed"])
            ps.run(train, [0], args=(pushes[:6],))
            client = ps.client()
            for name in ("keyed", "dense"):
                assert (client.pull(name, everything) == oracle(pushes[:6])).all(), name
                bad = np.full((50, 2), 13.0)
                try:
                    client.push(name, everything, bad)
                except FunctionError as error:
                    assert "Averaged.update failed: ArithmeticError: thirteen is" in str(error), error
                else:
                    raise AssertionError("the push has been applied")
                assert (client.pull(name, everything) == oracle(pushes[:6])).all(), name
            try:
                ps.table("none", optimizer=NeedsModule())
            except FunctionError as error:
                assert "optimizer NeedsModule cannot be opened here: ModuleNotFoundError" in str(error), error
            assert "none" not in ps.tables()
            ps.checkpoint(folder)
    del Averaged.update  # the checkpoint has the class
    Averaged.update = dps.Optimizer.update
    with dps.LocalCluster(servers=2, trainers=1, dashboard_address=None) as cluster:
        with dps.ParameterServer(cluster, servers=1) as ps:
            ps.restore(folder)
            client = ps.client()
            for keys, gradients in pushes[6:]:
                client.push({"keyed": (keys, gradients), "dense": (keys, gradients)})
            rows = {name: client.pull(name, everything) for name in ("keyed", "dense")}
    values, state = np.zeros((50, 2), np.float32), np.zeros((50, 3), np.float32)
    for keys, gradients in pushes:
        state[keys, :-1] += gradients
        state[keys, -1] += 1
        values[keys] -= np.float32(0.25) * state[keys, :-1] / state[keys, -1:]
    assert (rows["keyed"] == values).all()
    assert (rows["dense"] == values).all()
    print("done")
"""


@pytest.mark.thorough
def test_a_class_of_a_script_steps_on_servers_and_after_a_restore(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        cwd=tmp_path,
        env=where,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "any key, dim 2, float32, Averaged" in done.stdout
    assert done.stdout.endswith("done\n")
