"""How the controller keeps the number of servers, step by step."""

from __future__ import annotations

from types import SimpleNamespace

from oracles import mutant

from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import Ask, Sleep
from dps.engine.controller.server_procedures import ServerProcedures


class NoLock:
    """A lock that is held by another procedure, which only keeps surplus servers from being looked for."""

    def locked(self) -> bool:
        return True

    def release(self) -> None:
        pass


def started() -> list[str]:
    """The workers on which servers are started, where two servers are silent and come back during the first start."""
    membership = Membership(SimpleNamespace(now=lambda: 0.0), "ps")
    for worker in ("a", "b"):
        number = membership.add_server(worker, "server-{}")
        server = membership.servers[number]
        server.ready = server.silent = True
    workers = SimpleNamespace(candidates=lambda: (["c", "d"], True), check_versions=None)
    procedures = ServerProcedures(membership, workers, NoLock(), NoLock(), "server-{}", lambda: 0.0, object)
    procedures.wanted, found = 2, []

    def start_server(worker: str, timeout: float):
        found.append(worker)
        for server in membership.servers.values():
            server.silent = False
        yield Sleep(0.0)

    procedures.start_server = start_server
    maintenance = procedures.maintain()
    instruction, looks = next(maintenance), 0
    while looks < 3:
        assert isinstance(instruction, Sleep | Ask)
        looks += isinstance(instruction, Sleep)
        instruction = maintenance.send(None)
    maintenance.close()
    return found


def test_no_server_is_started_in_the_place_of_one_that_is_back(monkeypatch) -> None:
    assert started() == ["c"]
    wrong = mutant(ServerProcedures.maintain, "if self._missing() > 0:", "if True:")
    monkeypatch.setattr(ServerProcedures, "maintain", wrong)
    assert started() == ["c", "d"]
