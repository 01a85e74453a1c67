"""Polling: how long a wait for an answer polls the socket before it sleeps.

To wake a sleeping core takes 40 to 80 us on virtual machines, which is longer than a server needs for a small request.
So a wait polls first. Polling helps only where answers come soon, and harms where another program wants the core. So
the time adapts: a wait that takes more than twice the limit halves it, until it is zero, and one that takes less
doubles it again, up to the limit. Between two polls the core is yielded, because the server may run on it.
"""

from libc.stdint cimport int64_t


cdef class Polling:
    """The polling of one caller, whose waits come one after another; see the module.

    Parameters
    ----------
    seconds : float
        The limit; 0 for no polling.

    Examples
    --------
    >>> polling = Polling(50e-6)
    >>> polling.now, polling.spent
    (5e-05, 0.0)
    """

    def __cinit__(self, double seconds):
        self.state.most = self.state.now = <int64_t> (seconds * 1e9 + 0.5)
        self.state.spent = 0

    @property
    def now(self) -> float:
        """For how many seconds the next wait polls."""
        return self.state.now * 1e-9

    @property
    def spent(self) -> float:
        """Seconds of processor time that all waits have polled for."""
        return self.state.spent * 1e-9

    def waited(self, seconds: float) -> None:
        """Adapt to a wait that has taken so long. The compiled ways do this by themselves."""
        dps_adapt(&self.state, <int64_t> (seconds * 1e9))
