"""For tests of the client: real servers in this process, without Dask, and a client that needs no controller."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

import dps.server
from dps.client import Client, Ticket
from dps.server import Server
from dps.state.ops import TableSpec
from dps.transfers import TableRoute

SECRET = "ab" * 32
WORKER = SimpleNamespace(address="tcp://127.0.0.1:1", security=None, status=SimpleNamespace(name="running"))


class Servers:
    """Servers that share tables; use as a context manager."""

    def __init__(self, count: int):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dps.server, "get_worker", lambda: WORKER)
            self.servers = [Server("s", number, SECRET) for number in range(count)]
        self.addresses = [tuple(json.loads(server.address())) for server in self.servers]
        self.tables: dict[str, tuple[TableSpec, list[int]]] = {}
        self._last = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            server.close()

    def table(self, spec: TableSpec, owners: list[int] | None = None) -> TableSpec:
        """Make a table, in the place of an older one of that name; `owners` of the shards: evenly by default."""
        if spec.name in self.tables:
            self.drop(spec.name)
        self._last += 1
        spec = dataclasses.replace(spec, id=self._last)
        owners = owners or [shard * len(self.servers) // spec.shards for shard in range(spec.shards)]
        for number, server in enumerate(self.servers):
            server.create_table(spec.to_dict(), [shard for shard, owner in enumerate(owners) if owner == number])
        self.tables[spec.name] = spec, owners
        return spec

    def drop(self, name: str) -> None:
        spec, _ = self.tables.pop(name)
        for server in self.servers:
            server.drop_table(spec.id)

    def client(self) -> LocalClient:
        return LocalClient(self)

    def rows(self, name: str) -> int:
        """How many rows there are on all servers."""
        return sum(json.loads(server.status())["tables"][name]["rows"] for server in self.servers)

    def settle(self, keep: bool = True) -> None:
        for server in self.servers:
            server.settle(keep)


class LocalClient(Client):
    """A client that is told where everything is. It may have a clock, as a trainer has."""

    def __init__(self, servers: Servers):
        super().__init__(Ticket("s", ("203.0.113.1", 1), SECRET))
        self.known = servers

    def _refresh(self) -> None:
        if self._closed:
            self._controller()  # raises what a closed client raises
        self._servers = self.known.addresses
        self._tables = {name: TableRoute(spec, owners) for name, (spec, owners) in self.known.tables.items()}
