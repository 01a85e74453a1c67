"""Polling: how long a wait for a message polls the socket before it sleeps.

To wake a sleeping core takes 40 to 80 us on virtual machines, which is longer than a small request needs.
So a wait polls first. Polling helps only where messages come soon, and harms where another program wants the core. So
the time adapts: a wait that takes more than twice the limit halves it, until it is zero, and one that takes less
doubles it again, up to the limit. Between two polls the core is yielded, because the peer may run on it.
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
        self.state.spent = self.state.away = 0
        self.state.rest = 0
        self._asleep = 0

    @property
    def now(self) -> float:
        """For how many seconds the next wait polls."""
        return self.state.now * 1e-9

    @property
    def spent(self) -> float:
        """Seconds of processor time that all waits have polled for."""
        return self.state.spent * 1e-9

    @property
    def away(self) -> float:
        """Seconds in which :meth:`watch` polled while other threads had its core."""
        return self.state.away * 1e-9

    def waited(self, seconds: float) -> None:
        """Adapt to a wait that has taken so long. The compiled ways do this by themselves."""
        dps_adapt(&self.state, <int64_t> (seconds * 1e9))

    def watch(self, int fd) -> bool:
        """Poll a set of files before its owner sleeps on them: whether one is ready.

        Parameters
        ----------
        fd : int
            An epoll instance. The owner calls this each time it has done all its work; the wait that this begins ends
            with the next call.
        """
        cdef int64_t now = dps_now()
        cdef bint found
        if self._asleep:
            dps_adapt(&self.state, now - self._asleep)
            self._asleep = 0
        if self.state.now == 0:
            self._asleep = now
            return False
        with nogil:
            found = dps_watch(fd, &self.state)
        if found:
            dps_adapt(&self.state, dps_now() - now)
        else:
            self._asleep = now
        return found
