"""Requests that read something of one shard, such as a piece of a scan: sent again where the shard has moved.

Such a request changes nothing, so it may be sent as often as it takes, to whichever server has become the primary.
"""

from __future__ import annotations

from collections.abc import Callable

from dps.engine.client.session import BACK_OFF_SECONDS, RETRIED, ClientSession
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.errors import DataLostError, InputError, UnknownTableError

__all__ = ["ReshardedError", "answered", "keyed_spec", "sent_to_shard"]

Body = bytes | bytearray | memoryview


class ReshardedError(Exception):
    """The table is cut into other shards by now, as `spec` says: ask these."""

    def __init__(self, spec: TableSpec):
        super().__init__(f"table {spec.name!r} is cut into {spec.shards} shards now")
        self.spec = spec


def sent_to_shard(
    session: ClientSession, spec: TableSpec, shard: int, header: Callable[[], Header], body: bytes
) -> Request:
    """Ask the primary of a shard. The header is made when the route is known, because it has the route's epoch."""
    route = session.route(spec.name)
    if spec.id in route.ancestors:
        raise ReshardedError(route.spec)
    if route.spec.id != spec.id:
        raise UnknownTableError(f"table {spec.name!r} was replaced while its rows were read; begin again")
    server = next((server for server, first, end in route.runs if first <= shard < end), None)
    if server is None:
        raise InputError(f"table {spec.name!r} has {spec.shards} shards; there is no {shard}")
    if server < 0:
        raise DataLostError(f"table {spec.name!r}: the last copy of shard {shard} is gone; {session.remedy}")
    return session.channel(server).ask(header(), body)


def answered(
    session: ClientSession, sent: Request | None, send: Callable[[], Request], until: float | None = None
) -> tuple[Header, Body]:
    """The answer to a request; to another one, which `send` makes, where there is none or the shard has moved."""
    deadline, renewed = session.now() + session.patience if until is None else until, False
    while True:
        try:
            if sent is None:
                session.steady()
                sent = send()
            return sent.answer(deadline), sent.body
        except RETRIED as error:
            sent = None
            if isinstance(error, DataLostError) or session.now() > deadline:
                raise
            session.sleep(BACK_OFF_SECONDS[1])
            session.recover(deadline)
        except UnknownTableError:
            if renewed:
                raise
            sent, renewed = None, True
            session.forget_routes()


def keyed_spec(session: ClientSession, table: str) -> TableSpec:
    """The definition of a keyed table."""
    spec = session.route(table).spec
    if not spec.keyed:
        raise InputError(f"table {spec.name!r} is dense: its keys are the rows 0 to {(spec.rows or 0) - 1}")
    return spec
