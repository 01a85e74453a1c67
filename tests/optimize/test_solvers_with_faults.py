"""A solver whose vectors lie on servers that are lost meanwhile: the iterates are those of undisturbed servers."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import random

import numpy as np
from test_vectors_with_faults import FAULTS, hit, vectors

from dps import optimize
from dps.testing import Simulation

SIZE = 30


def quartic(x):
    """A convex function, in operations that numpy arrays and vectors on servers have."""
    shift = x - 1.0
    return float(np.sum(shift**4) + np.sum(shift * shift)), 4.0 * shift**3 + 2.0 * shift


def iterates(solver: str, seed: int | None) -> list[np.ndarray]:
    """What a solver goes through; with a seed, servers are lost meanwhile."""
    points = []
    with Simulation(seed or 0, servers=3, trainers=1, copies=2, faults=FAULTS) as sim:
        x0 = vectors(sim).asarray(np.linspace(-2.0, 3.0, SIZE))
        if seed is not None:
            hit(sim, random.Random(f"solver {seed}"), 0.3)
        settings = {"tol": 0.0, "max_iter": 8, "callback": lambda result: points.append(result.x.to_numpy())}
        getattr(optimize, solver)(quartic, x0, **settings)
        sim.rest()
    return points


@pytest.mark.quick(3)
@pytest.mark.parametrize("solver", ["lbfgs", "conjugate_gradient", "fista"])
@pytest.mark.parametrize("seeds", [range(4), range(4, 12)], ids=str)
def test_the_iterates_do_not_tell_that_servers_were_lost(solver, seeds) -> None:
    undisturbed = iterates(solver, None)
    assert len(undisturbed) >= 5
    for seed in seeds:
        np.testing.assert_array_equal(iterates(solver, seed), undisturbed, f"seed {seed}")
