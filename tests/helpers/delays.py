"""Delays put into a program on purpose, so that tests can see whether it is said where the time went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from unittest import mock

from dps.engine.server.tables import ServerTable
from dps.engine.wire import frames
from dps.engine.wire.connection import Connection


@contextlib.contextmanager
def slow_server(
    seconds: float, server: int | None = None, kinds: Collection[int] = (frames.PULL, frames.PUSH)
) -> Iterator[None]:
    """Servers of this process, or one of them, sleep in the handler of each pull and push, or one of these."""
    cut = ServerTable.cut

    def slow(self, header, body, primary=True):
        if primary and header.kind in kinds and server in (None, self.server):
            time.sleep(seconds)
        return cut(self, header, body, primary)

    in_general = mock.patch.object(Connection, "_answer_plain", return_value=0)
    with in_general, mock.patch.object(ServerTable, "cut", slow):
        yield
