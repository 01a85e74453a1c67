"""Rights: which kinds of frames an endpoint takes from which role, and with which flags. Pure.

A peer has one of three roles, by the secret that it has proved: a stranger has proved none yet, a client knows the
session's secret, a server knows the servers' secret. The controller is no role here, because it never connects to a
server: its control operations (settle, retire, create a table) are calls of the server's actor over Dask, and PLACE
travels on the connection that the server has made. Trainers are clients, also of each other. The tables below are
complete: an endpoint handles no other frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from dps.engine.wire import frames
from dps.engine.wire.frames import (
    ANSWER,
    BORN,
    CERTIFICATE,
    CHANGED,
    CONTROL,
    LIST,
    MERGED,
    MORE,
    NARROW,
    RANGE,
    REPLAYED,
    RULE_ADD,
    RULE_ASSIGN,
    RULE_DELETE,
    RULE_ROWS,
    SHARED,
    Header,
)
from dps.engine.wire.protocols import RoleConnection
from dps.errors import ProtocolError

__all__ = [
    "CLIENT",
    "SERVER",
    "STRANGER",
    "TO_AGGREGATOR",
    "TO_ANY",
    "TO_CONTROLLER",
    "TO_LENDER",
    "TO_SERVER",
    "TO_TRAINER",
    "Handler",
    "Rights",
    "allowed",
    "guarded",
    "role_of",
]

STRANGER = "stranger"
CLIENT = "client"
SERVER = "server"

Handler = Callable[[RoleConnection, Header, memoryview], object]
# Rights of each role: for each kind of frame, the values that `Header.flags` may have.
Rights = Mapping[str, Mapping[int, frozenset[int]]]


def _combinations(*choices: tuple[int, ...]) -> frozenset[int]:
    """The sums of one choice of each group, in every combination."""
    return frozenset(sum(chosen) for chosen in itertools.product(*choices))


NO_FLAGS = frozenset({0})
PULLS = _combinations((0, RANGE, LIST), (0, CERTIFICATE), (0, NARROW)) | _combinations((0, RANGE), (0, BORN))
PULLS |= {CHANGED} | _combinations((SHARED,), (0, RANGE, LIST), (0, NARROW))
PUSHES = _combinations((0, RANGE), (0, RULE_ADD, RULE_ASSIGN), (0, ANSWER)) | {RULE_DELETE, RULE_DELETE | RANGE}
PACKED = _combinations((0, REPLAYED), (NARROW, LIST, NARROW | LIST, NARROW | RANGE), (0, ANSWER))
REPLAYS = _combinations((REPLAYED,), (0, RANGE), (0, RULE_ADD, RULE_ASSIGN), (0, ANSWER))
RUNS: tuple[int, ...] = (frames.JOIN, frames.TICK, frames.COLLECT, frames.LEAVE, frames.RESERVE, frames.PEEK)
RUNS += (frames.LEASE, frames.ORIGIN, frames.AWAIT)
OF_SERVERS: tuple[int, ...] = (frames.SERVE, frames.BEAT, frames.CAUGHT_UP, frames.STEPPED_DOWN)
OF_SERVERS += (frames.SUSPECT, frames.FAILED, frames.RECORDED)
# Flags of the ops without rows: the end of a clock's sums, and the retirement of origins.
CONTROLS = frozenset({CONTROL, CONTROL | RULE_ADD, CONTROL | RULE_ASSIGN})
# Flags of the effects of functions, and of users' optimizers.
EFFECTS = _combinations((RULE_ROWS,), (0, RANGE), (0, ANSWER, MORE))
# Flags of pushes to keys that are without a row yet, and of sums of pushes.
COUNTED = _combinations((MORE,), (0, RULE_ADD, RULE_ROWS), (0, ANSWER)) | {MORE | RANGE}

TO_ANY: Rights = {STRANGER: {frames.HELLO: NO_FLAGS}}
TO_SERVER: Rights = {
    CLIENT: {
        frames.PULL: PULLS,
        frames.PUSH: PUSHES | REPLAYS | PACKED | {MERGED, MERGED | RANGE},
        frames.CALL: _combinations((0, RANGE), (0, REPLAYED)),
        frames.COMMIT: NO_FLAGS,
        frames.ABORT: NO_FLAGS,
        frames.SCAN: frozenset({0, ANSWER}),
        frames.GONE: NO_FLAGS,
        frames.STATUS: NO_FLAGS,
        frames.SHARE: NO_FLAGS,
    },
    SERVER: {
        frames.REPLICATE: PUSHES | CONTROLS | EFFECTS | COUNTED,
        frames.DUMP: NO_FLAGS,
        frames.GRANT: NO_FLAGS,
        frames.VERSIONS: NO_FLAGS,
    },
}
TO_CONTROLLER: Rights = {
    CLIENT: dict.fromkeys((frames.ROUTE, *RUNS), NO_FLAGS),
    SERVER: {**dict.fromkeys(OF_SERVERS, NO_FLAGS), frames.BEAT: frozenset({0, CONTROL})},
}
TO_TRAINER: Rights = {CLIENT: {frames.RING: frozenset({0, CONTROL}), frames.RING_RESULT: NO_FLAGS}}
# Rights at the process of a machine that sends the sums of all, where clients are the trainers of other processes.
TO_AGGREGATOR: Rights = {CLIENT: {frames.SUM: NO_FLAGS}}
# Rights at a trainer that lends partitions, where clients are the trainers of its run, by the secret of that run.
TO_LENDER: Rights = {CLIENT: {frames.FETCH_PARTITION: NO_FLAGS}}


def role_of(session: str | None) -> str:
    """The role of a peer that has proved the secret of this name, see :func:`dps.engine.wire.handshake.of_servers`.

    >>> role_of(None), role_of("dps"), role_of("dps/servers")
    ('stranger', 'client', 'server')
    """
    if session is None:
        return STRANGER
    return SERVER if session.endswith("/servers") else CLIENT


def allowed(rights: Rights, role: str, kind: int, flags: int) -> bool:
    """Whether a peer of that role may send such a frame.

    >>> allowed(TO_SERVER, CLIENT, frames.PUSH, frames.RULE_ADD)
    True
    >>> allowed(TO_SERVER, CLIENT, frames.PUSH, frames.MERGED | frames.RULE_ADD)
    False
    """
    return flags in rights.get(role, {}).get(kind, ())


def guarded(rights: Rights, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
    """The handlers of an endpoint, each behind a check of the sender's rights.

    Raises ValueError where a handler has no right, or a right has no handler.
    """
    kinds = {kind for by_kind in rights.values() for kind in by_kind}
    if kinds != handlers.keys():
        raise ValueError(f"the table of rights names kinds {sorted(kinds)}, the handlers {sorted(handlers)}")
    return {kind: _guard(rights, kind, handler) for kind, handler in handlers.items()}


def _guard(rights: Rights, kind: int, handler: Handler) -> Handler:
    by_role = {role: by_kind[kind] for role, by_kind in rights.items() if kind in by_kind}

    def handle(connection: RoleConnection, header: Header, body: memoryview) -> object:
        role = role_of(connection.session)
        if header.flags not in by_role.get(role, ()):
            raise _refusal(by_role, role, header)
        return handler(connection, header, body)

    return handle


def _refusal(by_role: Mapping[str, frozenset[int]], role: str, header: Header) -> ProtocolError:
    if role in by_role:
        return ProtocolError(
            f"a frame of kind {header.kind} has flags {header.flags}: from a {role} it is taken with flags "
            f"{', '.join(map(str, sorted(by_role[role])))} only"
        )
    return ProtocolError(f"a frame of kind {header.kind} from a {role}: it is taken from a {' or '.join(by_role)} only")
