"""Which copy a client asks for rows, when it asks the primaries, and when it gives a copy up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from noticing import assert_noticed
from servers import Servers

from dps.engine.client.copy_reads import PAUSE_SECONDS, CopyReads
from dps.engine.client.requests import TableRoute, chosen_copy
from dps.engine.client.route_changes import was_replaced
from dps.engine.client.session import ClientSession
from dps.engine.state.ops import TableSpec
from dps.engine.wire.messages import Located, Route

SPEC = TableSpec("w", dtype="int64", shards=4, copies=2, reads="copies", id=7)
CHAINS = [[0, 1], [1, 2], [2, 0], [2, 0]]


def route_for(reader: int, chains: list[list[int]] = CHAINS) -> TableRoute:
    return TableRoute(SPEC, [chain[0] for chain in chains], chains=chains, reader=reader)


# ---- the choice


@pytest.mark.parametrize("chain", [[3], [0, 1], [4, 2, 9]])
def test_clients_with_neighbouring_numbers_choose_each_copy_equally_often(chain: list[int]) -> None:
    counts = Counter(chosen_copy(chain, reader) for reader in range(100, 100 + 12))
    assert counts == dict.fromkeys(chain, 12 // len(chain))
    assert all(chosen_copy(chain, n) == chosen_copy(chain[::-1], n) for n in range(6)), "whichever leads"


def test_a_route_has_runs_for_pulls_and_others_for_pushes() -> None:
    assert route_for(0).read_runs == [(0, 0, 1), (1, 1, 2), (0, 2, 4)]
    assert route_for(1).read_runs == [(1, 0, 1), (2, 1, 4)]
    assert route_for(0).runs == [(0, 0, 1), (1, 1, 2), (2, 2, 4)]
    same = route_for(0, [[0, 1]] * 4)
    assert not same.reads_copies
    assert same.read_form is same.form
    lost = route_for(1, [[0, 1]] * 3 + [[-1]])
    assert lost.read_runs[-1] == (-1, 3, 4), "which is an error of the call, and not of the route"
    assert not TableRoute(SPEC, [0, 1, 2, 2]).reads_copies


def check_replaced() -> None:
    """A copy is given up when it has left the chain of a shard of which it was asked, or the table was split."""

    def known(chains: list[list[int]], table: int = 7, ancestors: tuple[int, ...] = ()) -> Route:
        located = Located({"id": table}, [chain[0] for chain in chains], [*ancestors], chains)
        return Route(2, {}, [located], "")

    def is_replaced(server: int, by: Route, chains: list[list[int]] = CHAINS) -> bool:
        return was_replaced(server, 1, {7: route_for(1, chains)}, by)

    assert not any(is_replaced(server, known(CHAINS)) for server in range(4))
    without_2 = known([[0, 1], [1], [0], [0]])
    assert [is_replaced(server, without_2) for server in (0, 1, 2)] == [False, False, True]
    joined = known([[0, 1], [1, 2], [2, 1], [2, 0]])
    assert not is_replaced(2, joined), "it has what it was asked for, also if others have come and gone"
    assert not is_replaced(0, joined), "no pull goes there"
    backup_only = [[0, 3]] * 4  # server 3 leads no shard
    assert not is_replaced(3, known(backup_only), backup_only)
    assert is_replaced(3, known([[0, 3], [0], [0, 3], [0, 3]]), backup_only)
    assert is_replaced(3, known([[0, 3]] * 8, table=9, ancestors=(7,)), backup_only)


def test_a_copy_that_has_left_is_given_up() -> None:
    check_replaced()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("server not in chain", "False"),
        ("copy == server", "True"),
        ("chains[first:end] or [()]", "chains[first:end]"),
        ("chains[first:end] or", "chains or"),
    ],
)
def test_a_wrong_rule_for_copies_is_noticed(old: str, new: str) -> None:
    assert_noticed(TableRoute, "has_left", old, new, check_replaced)


# ---- when primaries are asked


def push(table: int = 7, done: bool = False, error: object = None, pushes: bool = True) -> Any:
    part = SimpleNamespace(table=table, pushes=pushes)
    return SimpleNamespace(
        part=part, call_part=part, done=done, error=error, channel=SimpleNamespace(poll=lambda: None)
    )


NAMED = {SPEC.id: SPEC, 5: dataclasses.replace(SPEC, id=5), 8: dataclasses.replace(SPEC, id=8, name="other")}


def check_may_answer() -> None:
    """Primaries are asked while a push to the table is not acknowledged, and for a while after a pull has failed."""
    now = [10.0]
    copies, route = CopyReads(lambda: now[0]), route_for(1)

    def may(*requests: Any, of: TableRoute = route) -> bool:
        calls: Any = [SimpleNamespace(requests=[request]) for request in requests]
        return copies.may_answer(of, calls, NAMED, lambda request: request.error is not None)

    assert may()
    assert not may(of=TableRoute(SPEC, [0, 1, 2, 2]))
    assert may(push(table=8), push(pushes=False), push(done=True))
    assert not may(push(table=8), push())
    assert not may(push(done=True, error="it is sent again"))
    assert not may(push(table=5)), "it has another number since it was split, or restored"
    copies.failed([push(error="a push")])
    assert may()
    copies.failed([push(), push(pushes=False)])
    assert not may()
    assert not copies.asked
    now[0] += PAUSE_SECONDS
    assert may()
    assert copies.asked


def test_when_copies_may_answer() -> None:
    check_may_answer()


# ---- the plain way


def test_pulls_of_copies_go_the_plain_way_also_without_a_connection_to_the_primary(monkeypatch) -> None:
    keys = np.arange(32)
    with Servers(3) as servers:
        servers.table(TableSpec("w", dtype="int64", shards=1, copies=3, reads="copies"), owners=[0])
        with servers.client() as writer:
            writer.push("w", keys, keys)
        readers = [servers.client() for _ in range(3)]
        for reader in readers:
            reader.pull("w", keys)  # makes the connection
        with monkeypatch.context() as patch:
            patch.setattr(ClientSession, "send", lambda *_: pytest.fail("a pull went another way"))
            for reader in readers:
                assert reader.pull("w", keys).tolist() == keys.tolist()
                assert reader.pull({"w": keys})["w"].tolist() == keys.tolist()
        chosen = {reader.session._tables["w"].read_runs[0][0] for reader in readers}
        assert chosen == {0, 1, 2}
        assert all(len(reader.session._channels) == 1 for reader in readers)
        servers.cut()  # all connections; the next pulls make them anew
        for reader in readers:
            reader.push("w", keys, 0)
            for _ in range(3):
                assert reader.pull("w", keys).tolist() == keys.tolist()
            reader.close()
