"""Function procedures: how a function of a user is brought to all servers. Pure.

A function is on all servers that are ready, or its registration fails. A server that could not be called misses the
call: it is not ready any more until it has made up for it (`ServerProcedures.maintain`). Later servers get all
functions before their tables. A function stays as long as the parameter server, because a repeated task may call it
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import CallServers, Lock, Procedure, ServerCall, holding
from dps.engine.controller.server_record import ServerRecord
from dps.errors import InputError, LimitError, ServerGoneError

__all__ = ["FunctionProcedures"]

# Number of functions that one parameter server has.
MAX_FUNCTIONS = 1024
# Size of the code of all functions together.
MAX_CODE_BYTES = 64 << 20


class FunctionProcedures:
    """How functions are brought to the servers of one parameter server.

    `tables_change` is held meanwhile, so that no server becomes ready without the function.
    """

    def __init__(self, membership: Membership, up: Callable[[], list[ServerRecord]], tables_change: Lock):
        self.membership = membership
        self._up = up
        self._tables_change = tables_change

    def add(self, identity: str, code: bytes) -> Procedure[None]:
        """Bring a function to all servers, once. `identity` is the hash of `code`."""
        return holding([self._tables_change], self._add(identity, code))

    def _add(self, identity: str, code: bytes) -> Procedure[None]:
        functions = self.membership.functions
        if identity in functions:
            return
        if hashlib.sha256(code).hexdigest() != identity:
            raise InputError(f"the function's code has {len(code)} bytes, which are not those of its hash {identity}")
        nbytes = len(code) + sum(map(len, functions.values()))
        if len(functions) >= MAX_FUNCTIONS or nbytes > MAX_CODE_BYTES:
            raise LimitError(
                f"parameter server {self.membership.session!r} has {len(functions)} functions, and with this one "
                f"{nbytes} bytes of code; it takes {MAX_FUNCTIONS} and {MAX_CODE_BYTES}. Pass data as arguments of the "
                f"call instead of putting it into the function, and define a function once, not in a loop"
            )
        ready = [server for server in self._up() if server.ready]
        calls = [ServerCall(server.number, "add_function", (identity, code)) for server in ready]
        answers = yield CallServers(tuple(calls))
        refused = [
            each for each in answers if isinstance(each, BaseException) and not isinstance(each, ServerGoneError)
        ]
        if refused:
            raise refused[0]
        for server, answer in zip(ready, answers, strict=True):
            if isinstance(answer, BaseException):
                server.ready = False
                server.missed.append(("add_function", (identity, code)))
        for server in self.membership.servers.values():
            if server not in ready and (server.ready or server.missed):
                server.ready = False
                server.missed.append(("add_function", (identity, code)))
        functions[identity] = code
