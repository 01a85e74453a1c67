"""Origin: under which name a client's ops reach the servers, and the place of the next op; so each op counts once."""

from __future__ import annotations

import dataclasses

from dps.engine.core.requests.call import LAST_NUMBER
from dps.engine.state.ops import NO_CLOCK
from dps.errors import InputError

__all__ = ["Origin"]


@dataclasses.dataclass(slots=True)
class Origin:
    """What makes ops: a client, a trainer, a portion of leased work, or a Dask task.

    A session has one of its own, and acts as another for a while where its ops are to count as another's: two attempts
    at a portion or at a task make the same ops under the same origin, so the servers apply them once.

    Parameters
    ----------
    id : int
        The number by which servers know it; the controller gives it out. 0: not known yet.
    attempt : int
        Which attempt at its work this is: servers refuse ops of an earlier attempt than the latest that they have seen.
    clock : int
        Iterations completed; -1 for a client without a clock.
    number : int
        Of the next op, within the clock.
    parties : int
        How many trainers push in each clock: where a table aggregates, the servers wait for so many.
    """

    id: int = 0
    attempt: int = 0
    clock: int = NO_CLOCK
    number: int = 0
    parties: int = 1

    def check_numbers(self, count: int) -> None:
        """Raise InputError where so many more ops of this clock do not get numbers of their own."""
        if self.number + count > LAST_NUMBER:
            raise InputError(f"more than {LAST_NUMBER} pushes by one client without a tick: make a new client")
