"""Schedules in which requests name their keys by the numbers of lists: every op counts once, on the rows it named."""

from __future__ import annotations

import pytest
from fault_schedules import problem_of
from split_schedules import check_lists
from verdicts import problems

from dps.engine.client.session import ClientSession
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.server import tables
from dps.engine.simulation import endpoint
from dps.engine.wire import frames

SCHEDULES = 150


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_every_op_counts_once_whatever_its_keys_are_called(part: int) -> None:
    assert not problems(check_lists, SCHEDULES, part, parts=4)


@pytest.mark.parametrize("seed", [1943, 4061, 4418])
def test_schedules_that_have_shown_an_error(seed: int) -> None:
    """A table that was merged while a lease was over; a shard that stays while others are merged, of which one copy
    kept no answers; a certificate of a merged shard, of which rows were older."""
    check_lists(seed)


def test_many_requests_name_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [0, 0]
    unpacking = tables.unpacking

    def counted(table_of, handler):
        handle = unpacking(table_of, handler)

        def count(connection, header, body):
            named[0] += bool(header.flags & frames.LIST)
            named[1] += bool(header.flags & frames.LIST and header.start >= 0)
            handle(connection, header, body)

        return count

    monkeypatch.setattr("dps.engine.server.requests.unpacking", counted)
    monkeypatch.setattr(endpoint.SimConnection, "_answer_plain", lambda *_: False, raising=False)
    for seed in range(6):
        check_lists(seed)
    assert named[0] > 40
    assert named[1] > named[0] / 5, named


def assert_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = next((seed for seed in range(60) if problem_of(seed, check_lists)[1] is not None), None)
    assert seed is not None, "no schedule shows the error"
    monkeypatch.undo()
    assert problem_of(seed, check_lists) == (seed, None), "it is wrong anyway"


def test_lists_that_outlive_their_connection_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a list of one client would be used for another one."""
    shared = KeyLists()
    begin = endpoint.SimConnection.__init__

    def begin_with(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.key_lists = shared

    monkeypatch.setattr(endpoint.SimConnection, "__init__", begin_with)
    assert_seen(monkeypatch)


def test_ticks_that_pass_pushes_of_their_own_trainer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick goes over a connection of its own, so nothing but the wait for acknowledgements holds it back."""
    monkeypatch.setattr(ClientSession, "wait", lambda self: None)
    assert_seen(monkeypatch)


def test_lists_that_a_refused_request_does_not_count_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacking(table_of, handler):
        def handle(connection, header, body):
            table = table_of(header)
            if header.flags & frames.LIST:
                header, body = table.unpacked(header, body, tables._listed(header, body, connection.key_lists))
            handler(connection, header, body)

        return handle

    monkeypatch.setattr("dps.engine.server.requests.unpacking", unpacking)
    assert_seen(monkeypatch)
