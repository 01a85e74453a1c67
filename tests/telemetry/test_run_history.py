"""The history of a run on its way from the controller to a report: what is kept arrives, and nothing else is read."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from oracles import mutant
from snapshots import history as sample_history

from dps.engine.telemetry import run_history
from dps.engine.telemetry.history import COLUMNS, History
from dps.engine.telemetry.run_history import KeptReports, RunHistory, ServerCurves, TrainerReports
from dps.engine.telemetry.server_telemetry import CURVE_COLUMNS

NOTHING = RunHistory(
    *("dps", 3, 1.8e9, None, "running", None, None),
    metrics={},
    totals=None,
    stragglers=[],
    servers=[],
    events=[],
    trainers=[],
)


def decoded(data: bytes) -> RunHistory:
    return msgspec.msgpack.decode(data, type=RunHistory)


def sample() -> RunHistory:
    return msgspec.convert(sample_history(trainers=3), RunHistory)


def kept(reports: TrainerReports) -> KeptReports:
    """The arrays of which the controller would make these reports."""
    rows = np.stack([np.array(reports.rows[name]) for name in COLUMNS], axis=1)
    return KeptReports(reports.trainer, reports.where, np.array(reports.time), np.array(reports.clock), rows)


def check_it_arrives() -> None:
    whole = sample()
    assert len(whole.trainers) == 3
    assert all(len(reports.time) == 60 for reports in whole.trainers)
    sent = msgspec.structs.replace(whole, trainers=[])
    assert decoded(run_history.encode_history(sent, map(kept, whole.trainers))) == whole


def test_a_history_arrives_as_it_was():
    check_it_arrives()
    assert decoded(run_history.encode_history(NOTHING, [])) == NOTHING
    assert decoded(msgspec.msgpack.encode(sample())) == sample()


def test_a_staleness_stays_the_number_that_it_was():
    """Because reports write it."""
    for staleness, text in ((2, "2"), (2.5, "2.5"), (None, "None")):
        sent = msgspec.structs.replace(NOTHING, staleness=staleness)
        assert str(decoded(run_history.encode_history(sent, [])).staleness) == text


def test_reports_are_rounded_and_none_is_unknown():
    rows = np.full((2, len(COLUMNS)), 1 / 3)
    rows[1, 2] = math.nan
    reports = KeptReports(5, "here", np.array([1.00004, 2.00006]), np.array([3.0, 7.0]), rows).values()
    assert (reports.trainer, reports.where, reports.time, reports.clock) == (5, "here", [1.0, 2.0001], [3, 7])
    assert reports.rows == {name: [0.333333, 0.333333] for name in COLUMNS} | {COLUMNS[2]: [0.333333, 0.0]}
    assert all(type(clock) is int for clock in reports.clock)


def test_what_a_history_of_reports_has_kept_arrives():
    history, rng = History(trainers=2, capacity=8), np.random.default_rng(0)
    for n in range(100):  # so many that rows were added up
        history.report(n % 2, float(n), rng.uniform(0, 1, len(COLUMNS)).tolist(), n, {})
    trainers = [KeptReports(n, f"w{n}", *history.rows(n)) for n in range(2)]
    arrived = decoded(run_history.encode_history(NOTHING, trainers)).trainers
    for n, reports in enumerate(arrived):
        assert 4 <= len(reports.time) <= 8
        assert reports.time[-1] == reports.clock[-1] == 98 + n
        for i, name in enumerate(COLUMNS):
            assert sum(reports.rows[name]) == pytest.approx(history.totals()[n, i], abs=1e-4)


def test_the_curves_of_a_server_are_all_that_is_measured():
    assert ServerCurves.__struct_fields__ == ("number", *CURVE_COLUMNS)
    curves = ServerCurves(1, **{name: [float(n)] for n, name in enumerate(CURVE_COLUMNS)})
    assert [curves.column(name) for name in CURVE_COLUMNS] == [[float(n)] for n in range(len(CURVE_COLUMNS))]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("trainers", [{"trainer": 0}], r"missing required field `where` - at `\$.trainers\[0\]`"),
        ("state", "asleep", r"Invalid enum value 'asleep' - at `\$.state`"),
        ("began", None, r"Expected `float`, got .* - at `\$.began`"),
        ("events", [[1.0]], "Expected `array` of length 2, got 1"),
        ("totals", {"compute": "x"}, r"Expected `float`, got `str` - at `\$.totals.compute`"),
    ],
)
def test_what_is_no_history_is_not_read(field, value, why):
    with pytest.raises(msgspec.ValidationError, match=why):
        decoded(msgspec.msgpack.encode({**msgspec.to_builtins(NOTHING), field: value}))


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (run_history.encode_history, 'encoder.encode({**msgspec.structs.asdict(history), "trainers": encoded})',
         "encoder.encode(history)"),
        (KeptReports.values, "self.rows[:, i]", "self.rows[:, 0]"),
        (KeptReports.values, "self.clock.astype(int)", "(self.clock + 1).astype(int)"),
    ],
)  # fmt: skip
def test_a_wrong_encoder_is_noticed(function, old, new, monkeypatch):
    owner = KeptReports if function is KeptReports.values else run_history
    monkeypatch.setattr(owner, function.__name__, mutant(function, old, new))
    with pytest.raises(AssertionError):
        check_it_arrives()
