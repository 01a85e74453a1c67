"""A client whose server is slow while its controller stands still (SIGSTOP) waits for the server only."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from noticing import assert_noticed
from servers import SECRET, Servers, held, wait_until

from dps.engine.client.client import Client, Ticket
from dps.engine.client.route_changes import RouteQuestion
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.headers import RouteAnswer
from dps.engine.wire.messages import Located, Route, encode

KEYS = np.arange(100)


class StillController:
    """It answers the first question for the route, and the others when it goes on."""

    def __init__(self, servers):
        self.servers, self.stands_still, self.asked, self.waiting = servers, False, 0, []
        self.endpoint = Endpoint("controller", "127.0.0.1", {frames.ROUTE: self.answer})
        self.endpoint.call(self.endpoint.secrets.__setitem__, "s", SECRET)
        self.ticket = Ticket("s", (self.endpoint.host, self.endpoint.port), SECRET)

    def answer(self, connection, header, body):
        self.asked += 1
        if self.stands_still:
            self.waiting.append((connection, header))
        else:
            tables = self.servers.tables.values()
            located = [Located(spec.to_dict(), [place.chain[0] for place in places]) for spec, places in tables]
            route = Route(self.servers.epoch, dict(self.servers.addresses), located, "")
            connection.reply(RouteAnswer(7).header(header.request), encode(route))

    def go_on(self):
        self.stands_still = False
        for connection, header in self.waiting:
            self.answer(connection, header, b"")


@contextlib.contextmanager
def world():
    with Servers(2) as servers:
        servers.table(TableSpec("t", dtype="int64", copies=2, shards=4))
        controller = StillController(servers)
        try:
            with Client(controller.ticket) as client:
                client.push("t", KEYS, 1)
                yield servers, controller, client
        finally:
            controller.endpoint.stop()


def wait_for_slow_servers():
    """Two pushes to a server that stands still for a while, longer than clients take before they ask about it."""
    with world() as (servers, controller, client):
        client.session.patience = 8.0
        controller.stands_still = True
        for pushes in (2, 3):
            with ThreadPoolExecutor(1) as pool:
                with held(servers, 0):
                    pushing = pool.submit(client.push, "t", KEYS, 1)
                    wait_until(lambda: controller.asked > 1 or pushing.done())  # noqa: B023
                    time.sleep(1.5)
                pushing.result(5.0)
            assert (client.pull("t", KEYS) == pushes).all()
        assert controller.asked == 2, "a question without an answer is asked once"
        controller.endpoint.call(controller.go_on)
        assert (client.pull("t", KEYS) == 3).all()


def test_a_client_waits_for_its_server_only():
    wait_for_slow_servers()


def wait_beside_one_that_does_not_greet():
    """The controller's connection is lost, and what listens at its address now accepts none."""
    with world() as (servers, controller, client):
        controller.endpoint.stop()
        with socket.create_server(controller.ticket.controller), ThreadPoolExecutor(1) as pool:
            with held(servers, 0):
                pushing = pool.submit(client.push, "t", KEYS, 1)
                time.sleep(1.5)
            pushing.result(5.0)
            assert (client.pull("t", KEYS) == 2).all()


@pytest.mark.thorough
def test_a_client_does_not_wait_for_a_greeting():
    wait_beside_one_that_does_not_greet()


def notice_a_replacement():
    """The controller goes on after some time, and then says that the server was replaced."""
    with world() as (servers, controller, client):
        controller.stands_still = True
        with ThreadPoolExecutor(1) as pool, held(servers, 0):
            pushing = pool.submit(client.push, "t", KEYS, 1)
            wait_until(lambda: controller.asked > 1)
            time.sleep(0.7)  # so that the question is open when the client asks again
            servers.deaf.add(0)
            servers.without(0)
            controller.endpoint.call(controller.go_on)
            pushing.result(10.0)
            assert (client.pull("t", KEYS) == 2).all()


def test_a_late_answer_is_heard():
    notice_a_replacement()


@pytest.mark.thorough
def test_one_that_waits_for_a_greeting_is_noticed():
    assert_noticed(
        RouteQuestion, "ask", "controller(DOUBT_SECONDS)", "controller(60.0)", wait_beside_one_that_does_not_greet
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("until += DOUBT_SECONDS", "until += 9.0", wait_for_slow_servers),
        ("question is None or question.channel.closed", "True", wait_for_slow_servers),
        ("question.channel.poll()", "pass", notice_a_replacement),
        ("return answer if", "return None if", notice_a_replacement),
    ],
    ids=["it waits for the controller", "it asks again and again", "it does not look", "it does not hear"],
)
def test_a_client_that_asks_wrongly_is_noticed(old, new, check):
    assert_noticed(RouteQuestion, "ask", old, new, check)
