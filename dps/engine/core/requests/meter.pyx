"""What a client counts of its calls, whichever way they go: see :mod:`dps.engine.telemetry.trainer_meter`."""

from libc.stdint cimport int64_t


cdef class CallMeter:
    """Counts calls and keys, and where a client's time went.

    Parameters
    ----------
    now : float
        The present time; all later times are by the same clock.

    Attributes
    ----------
    mark : float
        Until when time has been counted.
    held : float
        Seconds since `mark` in which preparing was held up.

    Examples
    --------
    >>> meter = CallMeter(10.0)
    >>> meter.begin(10.5)
    >>> meter.counted(True, 20)
    >>> meter.prepared("pull", 10.75)
    >>> meter.lap("pull", 11.75)
    >>> meter.seconds
    {'pull': 1.0, 'push': 0.0, 'wait': 0.0, 'serialise': 0.25}
    """

    def __cinit__(self, double now, *args, **kwargs):
        self.mark, self.held = now, 0.0
        self._pull = self._push = self._wait = self._serialise = 0.0
        self.pulls = self.pushes = self.keys_pulled = self.keys_pushed = 0

    @property
    def seconds(self) -> dict:
        """Where the time went, by part."""
        return {"pull": self._pull, "push": self._push, "wait": self._wait, "serialise": self._serialise}

    cdef double *_part(self, verb) except NULL:
        if verb == "pull":
            return &self._pull
        if verb == "push":
            return &self._push
        if verb == "wait":
            return &self._wait
        raise ValueError(f"no time is counted as {verb!r}")

    def begin(self, double now) -> None:
        """Measure from here on; the time before belongs to the caller's own work."""
        self.mark, self.held = now, 0.0

    def prepared(self, verb, double now) -> None:
        """Count the time since `mark` as preparation of a call, except the time that was held up."""
        self._part(verb)[0] += self.held
        self._serialise += now - self.mark - self.held
        self.mark, self.held = now, 0.0

    def lap(self, verb, double now) -> None:
        """Count the time since `mark` as blocked."""
        self._part(verb)[0] += now - self.mark
        self.mark = now

    def counted(self, bint pull, int64_t keys) -> None:
        """Count a call that begins."""
        if pull:
            self.pulls += 1
            self.keys_pulled += keys
        else:
            self.pushes += 1
            self.keys_pushed += keys

    cdef void count_exchange(self, bint pull, int64_t keys, double began, double now, double waited) noexcept:
        """Count a whole call, and its time, of which the caller was blocked for `waited` seconds."""
        if pull:
            self.pulls += 1
            self.keys_pulled += keys
            self._pull += waited
        else:
            self.pushes += 1
            self.keys_pushed += keys
            self._push += waited
        self._serialise += now - began - waited
        self.mark, self.held = now, 0.0
