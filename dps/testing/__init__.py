"""A cluster in one thread, on virtual time, with faults on demand: for tests of training functions, and of dps itself.

================= ============================================================================================
simulation.py     Simulation: the public face
schedules.py      check_schedule: a cluster, faults and a workload from one number, and all that must hold
books.py          which ops there are, and so what must be in the tables
losses.py         what may be missing of tables with ack="memory"
__main__.py       many schedules
faults.py         Faults: what goes wrong, as named numbers; Mischief sees to it
roles.py          the controller and the servers
trainers.py       Crew: what runs the trainers, and runs them again
channel.py        what clients and trainers see of the network
endpoint.py       what roles see of it
network.py        connections: order, delay, breaks, partitions
world.py          time, parties, tasks
================= ============================================================================================
"""

from __future__ import annotations

from dps.testing.faults import Faults
from dps.testing.schedules import Schedule, check_schedule
from dps.testing.simulation import Simulation
from dps.testing.world import StuckError

__all__ = ["Faults", "Schedule", "Simulation", "StuckError", "check_schedule"]
