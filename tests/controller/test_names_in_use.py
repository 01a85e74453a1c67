"""A name whose servers have outlived their scheduler is not given to another parameter server, nor are they closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import dask
import pytest
from distributed import Client
from noticing import assert_noticed

import dps
from dps.engine.controller.plugin import Controller, Sessions
from dps.errors import ClosedError, NameInUseError


@contextlib.contextmanager
def started(name: str) -> Iterator[tuple[dps.ParameterServer, Sessions]]:
    """A parameter server, and all those of its scheduler."""
    with (
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, name=name) as ps,
    ):
        yield ps, cluster.scheduler.plugins[Controller.name].sessions


def check_waiting() -> None:
    """Too few servers of a name are back, so it is in use; other names are free."""
    with started("other") as (ps, sessions), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions.takeovers, "expects", lambda name: name == "w")
        with (
            dask.config.set({"dps.timeouts.start": "0.1 s"}),
            pytest.raises(NameInUseError, match=r"have outlived their scheduler, .*dask ps takeover --force"),
        ):
            dps.ParameterServer(ps.dask_client, name="w")
        assert list(sessions) == ["other"]
        ps.table("t")


def check_given_up() -> None:
    """A driver gives up a start, by Ctrl-C, while servers of that name are taken over: these stay."""
    with started("w") as (ps, sessions):
        sessions["w"].term += 1  # as if another controller had been there before
        ps.connection.call("close_session", taken_over=False)
        ps.table("t")
        sessions["w"].term -= 1
        ps.connection.call("close_session", taken_over=False)
        with pytest.raises(ClosedError):
            ps.table("t")


def test_a_name_whose_servers_wait_is_in_use() -> None:
    check_waiting()


def test_a_driver_that_gives_up_closes_only_what_it_has_started() -> None:
    check_given_up()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        ("open", "if self.takeovers.expects(name):", "if False:", check_waiting),
        ("close_session", "taken_over or session.term == FIRST_TERM", "True", check_given_up),
        ("close_session", "taken_over or session.term == FIRST_TERM", "taken_over", check_given_up),
    ],
)
def test_wrong_variants_of_names(name, old, new, check) -> None:
    assert_noticed(Sessions, name, old, new, check)
