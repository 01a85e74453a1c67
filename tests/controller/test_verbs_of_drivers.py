"""What drivers ask of the controller: each message goes there and back, and one that is no such request is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from oracles import mutant

from dps.engine.controller import verbs
from dps.engine.controller.checkpoint_procedures import saved_run
from dps.engine.controller.run import Run
from dps.engine.controller.runs import Runs
from dps.engine.controller.verbs import SESSION_VERBS
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.snapshot import LastCheckpoint
from dps.engine.wire.messages import (
    AdaptRule,
    CheckpointOptions,
    CheckpointSchedule,
    DescribedServer,
    DescribedTable,
    Description,
    InterruptedRun,
    RestoreAnswer,
    RestoreRequest,
    SavedRun,
)
from dps.errors import CheckpointError, DPSError, InputError, RequestTimeoutError

RUN = SavedRun(2, None, 31, 7, True, [[7, 2], [9, 8]], [[0], [1, 2]])
SERVER = DescribedServer(3, "tcp://10.0.0.7:4000", True)
TABLE = DescribedTable(TableSpec("w", dim=3, copies=2).to_dict(), [(0, 1), ()], [None, 4])
OPTIONS = CheckpointOptions("s3://bucket/ä", 5, True, {"key": "k", "client_kwargs": {"retries": 3}})
MESSAGES = [
    AdaptRule(),
    AdaptRule(2, 3, 0.5, 1 << 40, 1, 1.0),
    CheckpointOptions("here"),
    OPTIONS,
    CheckpointSchedule(OPTIONS, seconds=600.0),
    CheckpointSchedule(OPTIONS, clocks=4),
    RestoreRequest("here"),
    RestoreRequest("here", "c-1", ["w", "v"], {"anon": True}),
    RestoreAnswer("c-1", None, ["w"], {}),
    RestoreAnswer("c-1", 31, [], {"c-2": "its manifest is damaged"}),
    RUN,
    SavedRun(1, 2.0, 0, 1),
    InterruptedRun(3, RUN),
    SERVER,
    TABLE,
    Description("dps", "ab", 1, None, ("10.0.0.1", 4001), 1, 0.0, [], {}, None),
    Description("dps", "ab", 2, AdaptRule(), ("::1", 1), 3, 600.0, [SERVER, SERVER], {"w": TABLE}, RUN),
    LastCheckpoint("c-1", "here", 31, 10, 80, None, 0.5, 1.8e9),
]

OF_DRIVERS = {AdaptRule, CheckpointOptions, CheckpointSchedule, DescribedServer, DescribedTable, Description}
OF_DRIVERS |= {
    InterruptedRun,
    RestoreAnswer,
    RestoreRequest,
    SavedRun,
}  # see tests/wire/test_bodies.py


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_goes_there_and_back(message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


def test_each_message_is_among_those_that_go_there_and_back():
    assert {type(message) for message in MESSAGES} == OF_DRIVERS | {LastCheckpoint}


def test_a_table_is_described_as_it_is():
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(TABLE), type=DescribedTable)
    assert TableSpec.from_dict(sent.spec) == TableSpec("w", dim=3, copies=2)


# A verb, the field that has the request, a wrong request, and what the refusal says
MALFORMED = [
    ("adapt", "rule", {"minimum": "1"}, r"AdaptRule: .* Expected `int`, got `str` - at `\$.minimum`"),
    ("adapt", "rule", {"maximum": 2.5}, r"Expected `int \| null`, got `float` - at `\$.maximum`"),
    ("adapt", "rule", {"busy": None}, r"Expected `float`, got `None` - at `\$.busy`"),
    ("adapt", "rule", None, "Expected `object`, got `None`"),
    ("checkpoint", "options", {"keep": 3}, "CheckpointOptions: .* missing required field `url`"),
    ("checkpoint", "options", {"url": "x", "keep": True}, r"Expected `int`, got `bool` - at `\$.keep`"),
    ("checkpoint", "options", {"url": "x", "storage_options": []}, r"Expected `object`, got `array` - at `\$.stor"),
    ("schedule_checkpoints", "schedule", {"url": "x"}, "CheckpointSchedule: .* missing required field `options`"),
    (
        *("schedule_checkpoints", "schedule", {"options": {"url": "x"}, "seconds": "1"}),
        r"Expected `float \| null`, got `str` - at `\$.seconds`",
    ),
    ("restore", "request", {"checkpoint": "c-1"}, "RestoreRequest: .* missing required field `url`"),
    ("restore", "request", {"url": "x", "tables": "w"}, r"Expected `array \| null`, got `str` - at `\$.tables`"),
    ("restore", "request", {"url": "x", "tables": [1]}, r"Expected `str`, got `int` - at `\$.tables\[0\]`"),
]


def ask(verb: str, field: str, request: object) -> None:
    """Ask a session whose parts must not be used, because the request is refused before."""
    checkpoints = SimpleNamespace(take=used, restore=used)
    session = SimpleNamespace(adapt=used, schedule_checkpoints=used, checkpoints=checkpoints, carry_out=used)
    asyncio.run(SESSION_VERBS[verb](session, **{field: request}))


def used(request: object) -> None:
    raise AssertionError(f"{request} was taken")


def check_all_refused() -> None:
    for verb, field, request, why in MALFORMED:
        check_refused(verb, field, request, why)


def check_refused(verb: str, field: str, request: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        ask(verb, field, msgspec.msgpack.encode(request))


@pytest.mark.parametrize(("verb", "field", "request_fields", "why"), MALFORMED)
def test_a_request_that_is_none_is_refused_before_anything_is_done(verb, field, request_fields, why):
    check_refused(verb, field, request_fields, why)


@pytest.mark.parametrize("request_bytes", [b"", b"\xc1", b"\x82\xa3url", b"\x91" * 100_000, '{"url": "x"}', 7])
@pytest.mark.parametrize(("verb", "field"), sorted({case[:2] for case in MALFORMED}))
def test_a_request_that_is_no_message_is_refused(verb, field, request_bytes):
    with pytest.raises(InputError, match="this request cannot be read"):
        ask(verb, field, request_bytes)


@pytest.mark.parametrize(
    ("old", "new"),
    [("type=kind)", "type=kind, strict=False)"), ("InputError(", "ValueError("), ("type=kind", "type=dict")],
)
def test_a_wrong_decoder_is_noticed(old, new, monkeypatch):
    monkeypatch.setattr(verbs, "decode", mutant(verbs.decode, old, new))
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)) as caught:
        check_all_refused()
    assert not isinstance(caught.value, DPSError)


# ---- the run in a checkpoint ----------------------------------------------------------------------------------------


def checkpoint_of(run: object) -> SimpleNamespace:
    return SimpleNamespace(metadata={"session": "s", "run": run})


def test_a_checkpoint_has_its_run_as_it_always_had():
    """The fields and their order in the manifest, which earlier and later versions read."""
    run = Run(1, 2, 3.0)
    run.partitions, run.origin = [[0], [1]], 7
    saved = run.saved(31)
    assert list(msgspec.to_builtins(saved).items()) == [
        ("trainers", 2),
        ("staleness", 3.0),
        ("clock", 31),
        ("origin", 7),
        ("reassign", False),
        ("origins", [[7, 2]]),
        ("partitions", [[0], [1]]),
        ("warm_start", 0),
        ("vacant", 0),
    ]
    assert saved_run(checkpoint_of(msgspec.to_builtins(saved))) == saved


def test_the_run_of_an_older_checkpoint_lacks_some_fields():
    older = {"trainers": 2, "staleness": None, "clock": 31, "origin": 7, "partitions": [[0], [1]]}
    assert saved_run(checkpoint_of(older)) == SavedRun(2, None, 31, 7, partitions=[[0], [1]])
    assert saved_run(checkpoint_of(None)) is None
    assert saved_run(SimpleNamespace(metadata={})) is None


@pytest.mark.parametrize("run", [{}, [], 7, {"trainers": 2, "staleness": 0, "clock": None, "origin": 1}])
def test_a_run_that_cannot_be_read_makes_a_checkpoint_one_that_cannot_be_restored(run):
    with pytest.raises(CheckpointError, match="what it says of its run cannot be read"):
        saved_run(checkpoint_of(run))


def test_a_run_that_cannot_begin_is_stopped():
    runs = Runs("s")

    async def in_endpoint(function, *args):
        return function(*args)

    async def settle(keep):
        assert keep is False
        raise RequestTimeoutError("3 shards of 'sums' have not dropped the sums")

    ends, checkpoints = SimpleNamespace(collecting=lambda: ["sums"]), SimpleNamespace(resumed=lambda: None)
    session = SimpleNamespace(runs=runs, in_endpoint=in_endpoint, settle=settle, ends=ends, checkpoints=checkpoints)
    session.journal = None
    with pytest.raises(RequestTimeoutError, match="3 shards"):
        asyncio.run(verbs.start_run(session, trainers=2, staleness=0))
    assert runs.failed() == 1
    assert "3 shards" in str(runs.known(1).stopped)
