"""Schedules: their formulas, their shape, their dicts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.engine.core.portable import logarithm, power, sine
from dps.engine.state.schedules import (
    Cosine,
    Exponential,
    Fixed,
    InverseSqrt,
    InverseTime,
    Schedule,
    StalenessAware,
    Step,
    Warmup,
    as_schedule,
    schedule_from_dict,
)
from dps.errors import InputError, InputTypeError

FALLING = {
    Fixed(0.3): lambda c: 0.3,
    InverseTime(0.5, decay=0.1): lambda c: 0.5 / (1 + 0.1 * c),
    InverseSqrt(0.5, decay=2): lambda c: 0.5 / math.sqrt(1 + 2 * c),
    Exponential(0.5, factor=0.99): lambda c: 0.5 * 0.99**c,
    Step(0.5, every=7, factor=0.3): lambda c: 0.5 * 0.3 ** (c // 7),
    Cosine(0.5, clocks=100, floor=0.1): lambda c: 0.1 + 0.4 * (1 + math.cos(math.pi * min(c, 100) / 100)) / 2,
}
LAGGING = [StalenessAware(0.5), StalenessAware(Warmup(Cosine(0.5, clocks=10), clocks=5))]
ALL = [*FALLING, Warmup(0.5, clocks=5), Warmup(Cosine(0.5, clocks=10), clocks=5), *LAGGING]


@pytest.mark.parametrize("schedule", FALLING, ids=repr)
@given(clock=st.integers(0, 10_000))
def test_formulas(schedule: Schedule, clock: int) -> None:
    assert math.isclose(schedule(clock), FALLING[schedule](clock), rel_tol=1e-11)


@pytest.mark.parametrize("schedule", FALLING, ids=repr)
@given(clock=st.integers(0, 2**62), later=st.integers(0, 2**62))
def test_rates_fall_and_stay_finite(schedule: Schedule, clock: int, later: int) -> None:
    assert 0 <= schedule(clock + later) <= schedule(clock) <= schedule(0)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_clocks_before_the_first_count_as_zero(schedule: Schedule) -> None:
    assert schedule(-1) == schedule(-(2**63)) == schedule(0) > 0


def test_warmup_climbs_in_equal_steps_to_where_its_schedule_begins() -> None:
    cosine = Cosine(0.8, clocks=10)
    rates = [Warmup(cosine, clocks=4)(clock) for clock in range(15)]
    np.testing.assert_allclose(rates[:5], [0.16, 0.32, 0.48, 0.64, 0.8], rtol=1e-12)
    assert rates[4:] == [cosine(clock) for clock in range(11)]


@given(clock=st.integers(-1, 20), lag=st.integers(0, 2**62))
def test_a_rate_is_divided_by_the_lag(clock: int, lag: int) -> None:
    for aware in LAGGING:
        rate = aware.schedule(clock)
        assert aware(clock) == aware(clock, 0) == aware(clock, 1) == rate, "the same bits"
        assert aware(clock, lag) == rate / max(1, lag)
        assert aware.schedule(clock, lag) == rate, "no other schedule asks for it"


def test_cosine_ends_exactly_at_its_floor() -> None:
    assert Cosine(1.0, clocks=3, floor=0.25)(3) == Cosine(1.0, clocks=3, floor=0.25)(10**9) == 0.25


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_dicts_survive_json(schedule: Schedule) -> None:
    assert schedule_from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_as_schedule() -> None:
    assert as_schedule(1) == as_schedule(np.float32(1)) == Fixed(1.0)
    assert as_schedule(Fixed(2)) == as_schedule({"name": "Fixed", "lr": 2}) == Fixed(2.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fixed(0), "lr is 0 but must be a finite number above 0"),
        (lambda: Fixed(math.inf), "lr is inf"),
        (lambda: Fixed(math.nan), "lr is nan"),
        (lambda: InverseTime(1, decay=-1), "decay is -1 but must be a finite number at least 0"),
        (lambda: Exponential(1, factor=1.1), "factor is 1.1 but must be a finite number above 0 and at most 1"),
        (lambda: Step(1, every=0), "every is 0 but must be a whole number at least 1"),
        (lambda: Step(1, every=1.5), "every is 1.5"),
        (lambda: Cosine(0.1, clocks=5, floor=0.2), "floor is 0.2 but must be at most lr"),
        (lambda: Warmup(-1.0, clocks=5), "lr is -1.0"),
        (lambda: StalenessAware(0), "lr is 0"),
        (
            lambda: Warmup(StalenessAware(0.1), clocks=5),
            r"Warmup: schedule is StalenessAware.* goes around other sched",
        ),
        (lambda: StalenessAware(StalenessAware(0.1)), "StalenessAware: schedule is StalenessAware"),
        (lambda: schedule_from_dict({"name": "Sine"}), "no schedule called 'Sine'; dps knows Cosine, Exponential"),
        (lambda: schedule_from_dict({}), "no schedule called None"),
        (lambda: schedule_from_dict({"name": "Fixed"}), "Fixed takes lr; unknown: .*, missing: .'lr'"),
        (lambda: schedule_from_dict({"name": "Fixed", "lr": 1, "x": 2}), "unknown: .'x'"),
    ],
)
def test_wrong_values_are_named(make, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize("value", ["fast", None, True, [0.1]])
def test_wrong_kinds_are_named(value: object) -> None:
    with pytest.raises(InputTypeError, match="lr is"):
        Fixed(value)
    with pytest.raises(InputTypeError, match="must be a number above 0 or a schedule"):
        as_schedule(value)


@given(x=st.floats(-math.pi / 2, math.pi / 2))
def test_sine(x: float) -> None:
    assert math.isclose(sine(x), math.sin(x), rel_tol=1e-15)


@given(x=st.floats(2.0**-60, 2.0**60))
def test_logarithm(x: float) -> None:
    assert math.isclose(logarithm(x), math.log(x), rel_tol=1e-15)


@given(base=st.floats(0, 1), exponent=st.integers(0, 100))
def test_power(base: float, exponent: int) -> None:
    assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-13, abs_tol=1e-300)
