"""Terms: the table, the kind of frame and the limits that all pulls, or all pushes, of a client to a table share."""

from libc.stdint cimport int64_t

from dps.engine.core.requests.form cimport Form
from dps.engine.core.requests.frame cimport CHANGED, RULE_DELETE

cdef enum:
    LARGEST = 0x7FFFFFFF  # number of keys


cdef class Terms:
    """The form, limits and flags that all calls of one kind to a table share; `call.pyx` makes a call by them.

    Parameters
    ----------
    form : Form
    epoch : int
        Of the route.
    most : int
        Bytes of a request's keys and rows; a larger call is cut into chunks.
    kind, flags : int
        Of the frames.
    pushes : bool
        Rows are changed. Their values are sent, unless they are deleted. A pull sends something with each key if its
        flags say CHANGED.
    answered : bool
        Rows come back.
    merges : bool
        The rows of a repeated key are summed before they are sent.
    keys : int, optional
        Of a request, at most, as `most` bounds its bytes.
    narrow : bool, optional
        Rows travel as the form's codecs say, and not as they are; and a list of keys that a server knows is named by
        its number, where the form says so.
    """

    def __cinit__(
        self,
        Form form not None,
        int64_t epoch,
        int64_t most,
        int kind,
        int flags,
        bint pushes,
        bint answered,
        bint merges,
        int64_t keys=LARGEST,
        bint narrow=False,
    ):
        self.form, self.epoch, self.most, self.kind, self.flags = form, epoch, most, kind, flags
        self.keys = max(1, keys)
        self.pushes, self.answered, self.merges = pushes, answered, merges
        self.carries = flags & RULE_DELETE != RULE_DELETE if pushes else flags & CHANGED
        self.narrow = narrow
