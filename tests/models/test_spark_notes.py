"""Surveys and plans that travel as plain values."""

from __future__ import annotations

import dataclasses
from datetime import date

import numpy as np
import pytest

import dps
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import InputTypeError, ProtocolError
from dps.models.clusters.seeding import SeedPlan
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Survey, summary
from dps.models.inputs.notes import KINDS, from_plain, to_plain
from dps.models.linear.logistic_training import Plan
from dps.models.stopping import Ending

TEXTS = np.array(["click", "no"], object)
LAYOUT = Layout(1 << 10, 10, ("site", "hour"))
SETTINGS = ("c", "i", TEXTS, np.array([1, 2], np.float32), 3, 4, Ending(0.1, 2, 0.25), 100, None, True, False)


def sent(thing):
    """What arrives of a survey or plan at the other end."""
    return from_plain(decode_values(encode_values(to_plain(thing), "a note")))


def same(a, b) -> bool:
    """Equal values of equal types, arrays and their dtypes included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, tuple) else a == b


@pytest.mark.parametrize(
    "thing",
    [
        7,
        Survey(np.array([0, 1]), np.array([3.0, 4.0]), Layout(2, 0), True, 7),
        Survey(TEXTS, np.array([3.0, 4.0]), LAYOUT, False, 7),
        Survey(np.array([True, False]), np.array([3.0, 4.0]), LAYOUT, False, 7),
        Survey(np.array([], "datetime64[D]"), np.array([]), LAYOUT, False, 0),
        Plan(*SETTINGS, None),
        Plan(*SETTINGS, dps.FTRL(0.1, l1=1.0)),
        SeedPlan(3, 5, "k-means++", 7, "candidates"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_sent_arrives(thing):
    assert same(sent(thing), thing)


def test_every_kind_is_sent_by_the_test_above():
    assert set(KINDS.values()) == {Survey, Layout, Plan, SeedPlan, Ending, dps.FTRL}


def test_surveys_that_arrived_are_put_together_like_others():
    surveys = [
        Survey(TEXTS, np.array([3.0, 4.0]), LAYOUT, False, 7),
        Survey(TEXTS[:1], np.array([2.0]), LAYOUT, True, 2),
    ]
    assert same(summary([sent(each) for each in surveys]), summary(surveys))


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "Survey"},
        {"kind": "Layout", "features": 1, "bits": 0, "columns": None, "fields": 0, "more": 1},
        {"kind": "os.system", "command": "true"},
        {"kind": ["Layout"]},
        {"features": 1},
        [[[[[[[[[[1]]]]]]]]]],
    ],
)
def test_other_values_are_refused(plain):
    with pytest.raises(ProtocolError):
        from_plain(plain)


def test_labels_that_are_no_plain_values_are_refused():
    survey = Survey(np.array([date(2026, 1, 1)], object), np.array([1.0]), LAYOUT, False, 1)
    with pytest.raises(InputTypeError, match="date does not travel"):
        sent(survey)
