"""The typed bodies of frames: each goes there and back, and one that is no such message is refused with its reason."""

from __future__ import annotations

import msgspec
import pytest
from oracles import mutant

from dps.engine.wire import frames, messages
from dps.engine.wire.messages import (
    AdaptRule,
    CaughtUp,
    CheckpointOptions,
    CheckpointSchedule,
    DescribedServer,
    DescribedTable,
    Description,
    FullServers,
    FunctionCall,
    InterruptedRun,
    Join,
    Joined,
    LeasableBatches,
    LeaseAnswer,
    LeaseRequest,
    Leave,
    Located,
    OriginAnswer,
    OriginRequest,
    PartAnswer,
    PartitionsAtHand,
    Peek,
    Placement,
    Reserve,
    Reserved,
    RestoreAnswer,
    RestoreRequest,
    Route,
    SavedRun,
    Serve,
    ServerFailed,
    ShardPlace,
    SteppedDown,
    Suspect,
    TimeSpent,
    TrainerStanding,
    decode,
    encode,
)
from dps.errors import ProtocolError

SPENT = TimeSpent(compute=1.0, pull=0.5, push=0.25, wait=0.0, serialise=0.125)
MESSAGES = [
    Serve(3, "10.0.0.7", 65535),
    CaughtUp("rows of ä", 0, 2, 17),
    SteppedDown("w", 41, 1 << 40),
    Suspect(1, [("w", 0), ("v", 7)], 'has "confirmed" nothing', 9),
    Suspect(0, [], "", 0),
    ServerFailed(3, "MemoryError: 9 bytes"),
    FullServers([0, 7]),
    ShardPlace([1, 0], None, [3, 4], False),
    Placement(
        7, {0: ("here", 1), 12: ("::1", 9)}, {3: [ShardPlace([0], 12, [1, 7], True), ShardPlace([], None, [], False)]}
    ),
    Located({"name": "w", "id": 3}, [0, -1]),
    Route(7, {0: ("here", 1)}, [Located({"name": "w"}, [0])], "restore it"),
    Join(1, 0, None),
    Join(1, 2, 3, "worker", 4),
    Join(1, 2, 3, "worker", 4, attempt=1, clock=17),
    Joined(clock=5, staleness=None, trainers=3, origin=9, attempt=0, incarnation=1),
    Joined(clock=5, staleness=2.0, trainers=3, origin=9, attempt=0, incarnation=1, portions=12),
    Joined(clock=5, staleness=2.0, trainers=3, origin=9, attempt=2, incarnation=1, warm_start=3, grace=600.0),
    Joined(clock=0, staleness=None, trainers=3, origin=9, attempt=0, incarnation=1, elastic=True),
    SPENT,
    Leave(SPENT),
    Leave(SPENT, "ValueError: x", {"clocks": 1}),
    Reserve(1, "job", 4),
    Reserved(8),
    Peek(1, 0),
    TrainerStanding(None, "expected", None),
    TrainerStanding(2, "joined", "it was closed"),
    OriginRequest(["key", 1], 2, 0),
    OriginAnswer(70000, 1),
    PartitionsAtHand([1, 2], []),
    LeaseRequest(epoch=0),
    LeaseRequest(1, [(0, 5)], {"epochs": 2, "shuffle": None}, 0.5, (3, 0.1), (4, 7), PartitionsAtHand([0], [1])),
    LeaseRequest(2, [], {}, peer="[::1]:77"),
    LeaseAnswer(),
    LeaseAnswer(portion=LeasableBatches(1, 0, 2, 4, 9), peer="10.0.0.7:4711"),
    LeaseAnswer(declare=True),
    LeaseAnswer(True, LeasableBatches(1, 0, 2, 4, 9), 0.5, ("x", True, False)),
]

# Messages that are no bodies of frames by themselves, and so are not encoded as these.
OF_FUNCTIONS = {FunctionCall, PartAnswer}  # see test_function_messages.py
OF_DRIVERS = {AdaptRule, CheckpointOptions, CheckpointSchedule, DescribedServer, DescribedTable, Description}
OF_DRIVERS |= {InterruptedRun, RestoreAnswer, RestoreRequest, SavedRun}  # see tests/controller/test_verbs_of_drivers.py


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_goes_there_and_back(message):
    body = encode(message)
    assert len(body) % 8 == 0, "a body is whole words"
    assert decode(type(message), memoryview(body)) == message


def test_each_message_is_among_those_that_go_there_and_back():
    values = vars(messages).values()
    known = {value for value in values if isinstance(value, type) and issubclass(value, msgspec.Struct)}
    assert {type(message) for message in MESSAGES} == known - OF_FUNCTIONS - OF_DRIVERS


SHARD = {"table": "w", "shard": 0, "epoch": 1}
# A message's kind, a wrong body, and what the refusal says
MALFORMED = [
    (Serve, {"host": "h", "port": 1}, "a Serve that cannot be read: .* missing required field `server`"),
    (Serve, {"server": None, "host": "h", "port": 1}, r"Expected `int`, got `null` - at `\$.server`"),
    (Serve, {"server": 0, "host": 7, "port": 1}, r"Expected `str`, got `int` - at `\$.host`"),
    (Serve, {"server": 0, "host": "h", "port": "1"}, r"Expected `int`, got `str` - at `\$.port`"),
    (Serve, {"server": 0, "host": "h", "port": 65536}, r"Expected `int` <= 65535 - at `\$.port`"),
    (Serve, {"server": 0, "host": "h", "port": -1}, r"Expected `int` >= 0 - at `\$.port`"),
    (Serve, [0, "h", 1], "Expected `object`, got `array`"),
    (Serve, None, "Expected `object`, got `null`"),
    (CaughtUp, SHARD, "a CaughtUp that cannot be read: .* missing required field `server`"),
    (CaughtUp, {**SHARD, "server": 1.5}, r"Expected `int`, got `float` - at `\$.server`"),
    (CaughtUp, {**SHARD, "server": 1, "table": ["w"]}, r"Expected `str`, got `array` - at `\$.table`"),
    (SteppedDown, {"table": "w", "shard": 0}, "a SteppedDown that cannot be read: .* missing required field `epoch`"),
    (SteppedDown, {**SHARD, "shard": -1}, r"Expected `int` >= 0 - at `\$.shard`"),
    (SteppedDown, {**SHARD, "shard": True}, r"Expected `int`, got `bool` - at `\$.shard`"),
    (Suspect, {"server": 1, "why": "x", "epoch": 0}, "a Suspect that cannot be read: .* required field `shards`"),
    (Suspect, {"server": 1, "shards": [["w", -1]], "why": "x", "epoch": 0}, r"at `\$.shards\[0\]\[1\]`"),
    (Suspect, {"server": 1, "shards": [["w"]], "why": "x", "epoch": 0}, "Expected `array` of length 2, got 1"),
    (Suspect, {"server": 1, "shards": {}, "why": "x", "epoch": 0}, r"Expected `array`, got `object` - at `\$.shards`"),
    (Suspect, {"server": 1, "shards": [], "why": {}, "epoch": 0}, r"Expected `str`, got `object` - at `\$.why`"),
    (
        Placement,
        {"epoch": 1, "servers": {"x": ["h", 1]}, "tables": {}},
        r"Expected `int`, got `str` - at `key` in `\$.servers`",
    ),
    (
        Placement,
        {"epoch": 1, "servers": {}, "tables": {"3": [[[0], None, [1]]]}},
        "Expected `array` of at least length 4",
    ),
    (Route, {"epoch": 1, "servers": {}, "tables": [{"spec": {}}], "remedy": ""}, "missing required field `owners`"),
    (Join, {"run": 1, "trainer": 0}, "a Join that cannot be read: .* missing required field `incarnation`"),
]


def check_refused(kind, body, why):
    with pytest.raises(ProtocolError, match=why):
        messages.decode(kind, frames.encode_json(body))


def check_all_refused():
    for case in MALFORMED:
        check_refused(*case)


@pytest.mark.parametrize(("kind", "body", "why"), MALFORMED)
def test_a_body_that_is_no_such_message_is_refused_with_its_reason(kind, body, why):
    check_refused(kind, body, why)


@pytest.mark.parametrize("body", [b"", b"{      ", b"\xff" * 8, b"[" * 100_000])
@pytest.mark.parametrize("kind", [Serve, CaughtUp, SteppedDown, Suspect])
def test_a_body_that_is_no_json_is_refused(kind, body):
    with pytest.raises(ProtocolError, match="no JSON"):
        decode(kind, body)


def test_a_refusal_shows_no_more_than_the_beginning_of_a_large_body():
    with pytest.raises(ProtocolError) as refused:
        decode(Serve, frames.encode_json({"server": "x" * 100_000}))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("old", "new"),
    [("str_keys=True", "str_keys=True, strict=False"), ("{error}", "wrong")],
)
def test_a_wrong_decoder_is_noticed(old, new, monkeypatch):
    monkeypatch.setattr(messages, "decode", mutant(messages.decode, old, new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_all_refused()
