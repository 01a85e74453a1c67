"""Tables with ``wire=``: what trainers pull and push, what servers hold, and how many bytes that takes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from servers import wait_until

import dps
from dps.engine.client import requests
from dps.engine.core.codec import CODECS, bytes_of_row, decode, encode
from dps.engine.state.ops import TableSpec
from dps.engine.wire.sockets import is_own_address
from dps.errors import InputError, InputTypeError

DIM, KEYS = 16, 1000
WIRES = [None, dps.Wire("bfloat16", "float16"), dps.Wire("int8"), dps.Wire(None, "bfloat16", lists=True), "auto"]


def rounded(rows: np.ndarray, name: str | None) -> np.ndarray:
    """Rows as they arrive, if they travel so."""
    if name is None:
        return rows
    sent, out = np.empty(len(rows) * bytes_of_row(CODECS[name], rows.shape[1], 0), np.uint8), np.empty_like(rows)
    encode(CODECS[name], rows, sent)
    decode(CODECS[name], sent, out)
    return out


def drawn(seed: int, count: int = KEYS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def some_keys() -> np.ndarray:
    return np.random.default_rng(3).permutation(KEYS)


def every_way(trainer, parts):
    """Pulls and pushes of one trainer, in all ways; what it got, in order."""
    keys, got = some_keys(), {}
    got["pull"] = trainer.pull("w", keys), trainer.pull("d"), trainer.pull("d", slice(3, 9))
    got["several"] = trainer.pull({"w": keys, "d": None})["w"]
    got["async"] = trainer.pull_async("w", keys).result()
    got["ahead"] = [
        rows["w"].values[rows["w"].codes] for _, rows in trainer.iterate([0], pull=lambda batch: {"w": keys}, ahead=1)
    ]
    trainer.push("w", keys, drawn(1))
    trainer.push("d", slice(None), drawn(1))
    trainer.add("w", keys, drawn(2))
    got["push_pull"] = trainer.push_pull("w", keys, drawn(4))
    return got


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=1, processes=False) as started:
        yield started


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "wire",
    [None, dps.Wire("bfloat16", "float16"), dps.Wire("int8"), dps.Wire(None, "bfloat16", lists=True), "auto"],
    ids=repr,
)
def test_what_is_pulled_and_pushed(cluster, wire, copies: int) -> None:
    pull, push = (wire.pull, wire.push) if isinstance(wire, dps.Wire) else (None, None)  # "auto": all is on one machine
    keys, start = some_keys(), drawn(0)
    with dps.ParameterServer(cluster, servers=2, copies=copies) as ps:
        ps.table("w", dim=DIM, wire=wire)
        ps.table("d", dim=DIM, rows=KEYS, wire=wire)
        client = ps.client()
        client.push("w", keys, start)
        client.push("d", slice(None), start)
        ((got),) = ps.run(every_way, [0], trainers=1, progress=False)
        arrived = rounded(start, pull)
        for rows, expected in zip(got["pull"], (arrived, arrived, arrived[3:9]), strict=True):
            np.testing.assert_array_equal(rows, expected)
        for rows in (got["several"], got["async"], *got["ahead"]):
            np.testing.assert_array_equal(rows, arrived)
        now = start + rounded(drawn(1), push) + drawn(2) + rounded(drawn(4), push)
        np.testing.assert_array_equal(got["push_pull"], now)
        np.testing.assert_array_equal(client.pull("w", keys), now)
        np.testing.assert_array_equal(client.pull("d"), start + rounded(drawn(1), push))
        assert ps.tables()["w"].spec.wire == dps.Wire() if wire is None else ps.tables()["w"].spec.wire.asks
        check_traffic(ps, pull, push, isinstance(wire, dps.Wire) and wire.lists)


def push_often(trainer, parts, calls):
    keys, first = some_keys(), None
    for _ in range(calls):
        trainer.push("w", keys, drawn(1))
        first = trainer.pull("w", keys) if first is None else first
    return first


def test_pushes_of_int8_are_right_on_the_whole(cluster) -> None:
    keys, values, calls = some_keys(), drawn(1), 200
    step = (values.max(1, keepdims=True) - values.min(1, keepdims=True)) / 255 * 1.02 + 1e-3
    with dps.ParameterServer(cluster, servers=2) as ps:
        ps.table("w", dim=DIM, wire=dps.Wire(push="int8"))
        (first,) = ps.run(push_often, [0], trainers=1, args=(calls,), progress=False)
        error, mean = first - values, ps.client().pull("w", keys) / calls - values
    assert (np.abs(error) <= step).all()
    assert np.abs(error).max() > 0.4 * step.min()
    assert (np.abs(mean) <= 0.25 * step).all(), "of an error that is the same each time"


def check_traffic(ps: dps.ParameterServer, pull: str | None, push: str | None, lists: bool) -> None:
    """Of the table "w", to the byte."""
    narrow_pull, narrow_push = (bytes_of_row(CODECS[name], DIM, 4 * DIM) for name in (pull, push))
    pulled = KEYS * (4 * narrow_pull + 4 * DIM + 4 * DIM)  # four of the trainer, its push_pull, one of the client
    pushed = KEYS * (4 * DIM + narrow_push + 4 * DIM + narrow_push)
    wait_until(lambda: ps.status().tables["w"].traffic.pulled >= pulled)
    traffic = wait_until(lambda: (t := ps.status().tables["w"].traffic).pushed >= pushed and t)
    assert traffic.pushed == pushed
    assert 0 <= traffic.pulled - pulled < 8 * 64  # rows of int8 end within a word, once in each answer
    plain, packed = (3, 2) if lists else (9, 0)  # of calls: those of the client, add; one of the trainer's, and `ahead`
    nbytes = (8 * plain + 2 * packed) * KEYS  # because keys below 1,000 differ by less than 2^16
    assert nbytes <= traffic.keys <= nbytes + 128 * (plain + packed)  # and the counts of the shards, and of blocks
    assert traffic.headers % 64 == 0
    assert traffic.sent == traffic.keys + pushed + traffic.headers


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: dps.Wire(pull="float8"), InputError, "pull is 'float8' but must be None or one of 'float16'"),
        (lambda: dps.Wire("float16", local="yes"), InputTypeError, "local is 'yes'"),
        (lambda: TableSpec("w", dtype="float64", wire=dps.Wire("float16")), InputError, "this table has float64"),
        (lambda: TableSpec("w", wire="auto"), InputTypeError, "wire is a dps.Wire"),
        (lambda: TableSpec("w", dim=4, wire=dps.Wire("int8")), InputError, "int8 saves nothing of a row of 4"),
    ],
)
def test_what_a_table_cannot_have_is_refused(make, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_definition_travels_with_its_wire() -> None:
    spec = TableSpec("w", dim=5, wire=dps.Wire("int8", "float16", local=False))
    assert TableSpec.from_dict(spec.to_dict()) == spec
    assert "wire" not in TableSpec("w").to_dict()


def choose(trainer, parts, batches):
    """Pulls and pushes until the trainer has chosen, and some more; what it has chosen, and the last rows."""
    keys, rows = some_keys(), np.zeros(0)
    for _ in trainer.iterate(range(batches)):
        rows = trainer.pull("w", keys)
        trainer.push_async("w", keys, np.ones((KEYS, DIM), np.float32))
        trainer.push("w", keys[::2], np.ones((KEYS // 2, DIM), np.float32))
    trial = trainer.client.session.settled["w"].trial
    return None if trial is None else trial.choice.chosen, rows


def chosen_with(cluster, wire, batches=400):
    with dps.ParameterServer(cluster, servers=2) as ps:
        ps.table("w", dim=DIM, wire=wire)
        ((chosen, rows),) = ps.run(choose, [0], trainers=1, args=(batches,), progress=False)
        return chosen, rows, ps.client().pull("w", some_keys()), [text for _, text in ps.status().events]


def test_a_trainer_chooses_how_rows_travel_and_tells_it(cluster) -> None:
    wire = dps.Wire("bfloat16", "bfloat16", lists=True, measured=True)
    chosen, rows, after, events = chosen_with(cluster, wire)
    [told] = [text for text in events if text.startswith("run 1: rows of table 'w' travel ")]
    assert wire.candidates[chosen].label in told.partition("because")[0]
    pattern = "; ".join(rf"{way.label} [0-9.]+ bytes a row and [0-9.e-]+ ms a call" for way in wire.candidates)
    assert re.search(f"because trainer 0 has measured: {pattern}$", told)
    expected = np.full((KEYS, DIM), 400.0)
    expected[::2] += 400
    np.testing.assert_array_equal(after, expected)  # whichever way each push took: no call was lost or counted twice
    assert np.abs(rows - (expected - expected / 400)).max() <= 4, "of bfloat16, beyond 512"


def test_within_one_machine_nothing_is_measured(cluster, monkeypatch) -> None:
    chosen, *_, events = chosen_with(cluster, "auto", 30)
    assert chosen is None
    assert not [text for text in events if "travel" in text]
    monkeypatch.setattr(requests, "is_own_address", lambda host: False)
    chosen, *_ = chosen_with(cluster, "auto")
    assert chosen is not None, "between machines"


def test_what_a_trainer_chooses_from() -> None:
    assert [way.label for way in dps.Wire("int8", None, lists=True, measured=True).candidates] == [
        "as they are",
        "as they are with lists",
        "as they are to servers and as int8 from them with lists",
    ]
    assert len(dps.Wire(lists=True, measured=True).candidates) == 2
    assert dps.Wire("int8").candidates == (dps.Wire("int8"),)


def test_own_addresses() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("localhost"), "a name"
    assert not is_own_address("203.0.113.7")
    assert not is_own_address("no host of this name.invalid")
