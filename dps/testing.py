"""A cluster in one thread, on virtual time, with faults on demand: for tests of training functions."""

from dps.engine.simulation.faults import Faults
from dps.engine.simulation.simulation import Simulation
from dps.engine.simulation.world import StuckError

__all__ = ["Faults", "Simulation", "StuckError"]
