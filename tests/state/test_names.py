"""Names: one rule, at every public entrance and for what comes over the network."""

from __future__ import annotations

import logging
import re

import msgspec
import pytest
from distributed import Client
from peers import Raw, framed

import dps
from dps.engine.checkpoints.store import Store
from dps.engine.controller.runs import Runs
from dps.engine.daskapi.refusals import value
from dps.engine.state.names import RULES, check_name, shown
from dps.engine.telemetry.reports import TrainerReport
from dps.engine.telemetry.trainer_meter import TrainerMeter
from dps.engine.wire import frames
from dps.engine.wire.frames import encode_json
from dps.errors import InputError, ProtocolError

WRONG = {
    "half of a surrogate pair": ("a\ud800", r"'\ud800' (U+D800)"),
    "a line break": ("a\nb", r"'\n' (U+000A)"),
    "NUL": ("\0", r"'\x00' (U+0000)"),
    "a tab": ("a\t", r"'\t' (U+0009)"),
    "an escape": ("\x1b[2J", r"'\x1b' (U+001B)"),
    "from right to left": ("a\u202eb", r"'\u202e' (U+202E)"),
    "no width": ("a\u200bb", r"'\u200b' (U+200B)"),
    "a separator of lines": ("a\u2028b", r"'\u2028' (U+2028)"),
}
PLAIN = [kind for kind, rule in RULES.items() if rule.plain]


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("case", WRONG)
def test_a_character_that_cannot_be_shown_is_named(kind: str, case: str) -> None:
    name, words = WRONG[case]
    with pytest.raises(InputError) as caught:
        check_name(kind, name)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"a {kind}'s name is {RULES[kind]}; ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", RULES)
def test_length_and_type(kind: str) -> None:
    most = RULES[kind].max_length
    assert check_name(kind, "x" * most) == "x" * most
    for name in ("", "x" * (most + 1)):
        with pytest.raises(InputError, match=f"has {len(name)}$"):
            check_name(kind, name)
    for name in (None, 7, b"w", ["w"]):
        with pytest.raises(InputError, match="not "):
            check_name(kind, name)


@pytest.mark.parametrize("name", ["Müller's weights", "権重", "a/b", "x y", "😀"])
def test_what_can_be_shown_is_a_name_where_no_plain_one_is_needed(name: str) -> None:
    for kind in RULES:
        if kind in PLAIN:
            with pytest.raises(InputError, match=r"digits, dots, dashes or underscores; .* has '"):
                check_name(kind, name)
        else:
            assert check_name(kind, name) == name


def test_free_text_is_shown_without_what_cannot_be() -> None:
    assert shown("a\ud800\n\0" + "x" * 9, 6) == "a?\n?xx"


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", [".", "..", "..."])
def test_dots_alone_are_no_name_of_a_directory(kind: str, name: str) -> None:
    with pytest.raises(InputError, match=rf"a {kind}'s name is 1 to 64 letters .*; '{re.escape(name)}' has dots only"):
        check_name(kind, name)
    assert check_name(kind, name + "a") == name + "a"


def test_restore_refuses_the_folder_above(ps) -> None:
    for attempt in (
        lambda: ps.restore("memory://names", ".."),
        lambda: dps.export_checkpoint("memory://names", "w", checkpoint=".."),
    ):
        with pytest.raises(InputError, match=r"a checkpoint's name .* '\.\.' has dots only"):
            attempt()


# ---- every public entrance ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


@pytest.mark.parametrize("case", WRONG)
def test_every_entrance_refuses_it(ps, case: str) -> None:
    name, words = WRONG[case]
    for attempt in (
        lambda: ps.table(name),
        lambda: ps.drop_table(name),
        lambda: dps.TableSpec(name),
        lambda: dps.ParameterServer(ps.dask_client, name=name),
        lambda: dps.ParameterServer.attach(ps.dask_client, name),
        lambda: ps.restore("memory://names", name),
        lambda: dps.export_checkpoint("memory://names", "w", checkpoint=name),
        lambda: Store("memory://names").whole(name),
        lambda: TrainerMeter(0.0).log(name, 1),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        assert words in str(caught.value)
    assert list(ps.tables()) == []


@pytest.mark.parametrize("name", ["a\ud800", "a\nb"])
def test_a_run_refuses_it_for_a_trainer(ps, name: str) -> None:
    with ps.open_run(trainers=1) as run:
        with pytest.raises(InputError, match="a trainer's name is"):
            run.reserve(name=name)
        with pytest.raises(InputError, match="a trainer's name is"), run.trainer(name):
            pass
        assert run.reserve(name="mine") == 0


def test_the_controller_refuses_what_is_sent_past_the_entrances(ps) -> None:
    with pytest.raises(InputError, match="a table's name is"):
        ps.connection.call("add_table", spec=msgspec.msgpack.encode({**dps.TableSpec("w").to_dict(), "name": "a\nb"}))
    fields = {"servers": 1, "copies": 1, "timeout": 1}
    answer = ps.dask_client.sync(ps.dask_client.scheduler.dps_call, verb="open", name="dps/servers", fields=fields)
    with pytest.raises(InputError, match="a parameter server's name is"):
        value(answer)
    assert list(ps.tables()) == []


def test_an_endpoint_refuses_them_over_the_wire(ps, caplog) -> None:
    """The metric of a report, and the name under which trainers are reserved."""
    caplog.set_level(logging.CRITICAL)
    with pytest.raises(ProtocolError, match=r"a metric's name is 1 to 64 printable characters; .* \(U\+D800\)"):
        TrainerReport.read({"r": 1, "t": [0] * 9, "n": [0] * 8, "m": {"\ud800": [1, 1, 1]}})
    with ps.open_run(trainers=1) as run, Raw(ps.ticket.controller) as raw:
        request_body = encode_json({"run": run.number, "name": "a\ud800", "count": 1})
        raw.send(raw.hello(ps.ticket.secret, ps.name) + framed(frames.RESERVE, request_body))
        assert raw.frame()[0].kind == frames.WELCOME
        _, body = raw.frame()
        assert "a trainer's name is 1 to 200 printable characters" in str(frames.decode_error(body))


def test_where_a_trainer_is_can_be_shown() -> None:
    runs, answers = Runs("s"), []

    class Peer:
        party = None

        def reply(self, header, body):
            answers.append(body)

    run = runs.start(1, 0)
    body = encode_json({"run": run, "trainer": 0, "incarnation": 0, "where": "host\ud800\0"})
    runs.join(Peer(), frames.Header(frames.JOIN), memoryview(body))
    assert answers
    assert runs.known(run).places() == {0: "host??"}
