"""The typed views of ops: each number stands in its field of the op, and comes back from there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.server.tables import control_header, control_op, keys_header, op_of, rows_header
from dps.engine.state import op_views
from dps.engine.state.op_views import AgeOp, CloseOp, DeleteOp, RetireOp, SteppedOp
from dps.engine.state.ops import AGE, CLOSE, DELETE, DROP, EVICTED, EXPIRED, FAILED, KEEP, OLDER, RETIRE, ROWS, Op
from dps.engine.wire.headers import AgeRows, CloseSums, RetireOrigins

KEYS, AFTER = np.array([5, 9], np.int64), np.ones((2, 3), np.float32)
FIELDS = [  # an example of each view, and the fields of its op that are written down once more
    (CloseOp(7, KEEP), {"rule": CLOSE, "keys": None, "start": 1, "clock": 7, "parties": 1, "rows": -1}),
    (CloseOp(-1, FAILED), {"rule": CLOSE, "keys": None, "start": 3, "clock": -1, "parties": 1, "rows": -1}),
    (RetireOp(9, 3), {"rule": RETIRE, "keys": None, "start": 9, "clock": 0, "parties": 3, "rows": -1}),
    (AgeOp(1 << 40, 7, 3), {"rule": AGE, "keys": None, "start": 1 << 40, "clock": 7, "parties": 3, "rows": -1}),
    (DeleteOp(KEYS, 0, 2, 4, 2), {"rule": DELETE, "keys": KEYS, "start": 0, "clock": 4, "parties": 2, "rows": -1}),
    (DeleteOp(None, 6, 2, 4, 2), {"rule": DELETE, "keys": None, "start": 6, "clock": 4, "parties": 2, "rows": -1}),
    (DeleteOp(KEYS, 0, 2, 4, 2, every=True), {"rule": DELETE, "keys": KEYS, "clock": 4, "parties": 2, "rows": 1}),
    (DeleteOp(KEYS, 0, 2, 4, 1, why=EXPIRED), {"rule": DELETE, "keys": KEYS, "clock": 4, "parties": 1, "rows": -3}),
    (SteppedOp(KEYS, 0, AFTER, 4, 2), {"rule": ROWS, "keys": KEYS, "start": 0, "clock": 4, "parties": 2, "rows": 2}),
]


def check_fields() -> None:
    for view, fields in FIELDS:
        op = view.op()
        for name, value in fields.items():
            assert getattr(op, name) is value or getattr(op, name) == value, (view, name)
        assert type(view).of(op) == view, view
        assert (op.origin, op.attempt, op.number, op.answer) == (0, 0, 0, False)
        assert op.after is op.deleted is op.result is None
        assert len(op.values) == (0 if op.rule in (CLOSE, RETIRE, AGE) else 2)


def test_each_number_stands_in_its_field() -> None:
    check_fields()


def test_every_view_is_tried() -> None:
    assert {getattr(op_views, name) for name in op_views.__all__} == {type(view) for view, _ in FIELDS}


clocks, origins = st.integers(-1, 2**62), st.integers(1, 2**16 - 1)


@given(st.one_of(st.builds(CloseOp, clocks, st.sampled_from([OLDER, KEEP, DROP, FAILED])),
                 st.builds(AgeOp, st.integers(0, 2**62), clocks, st.integers(0, 2**16 - 1)),
                 st.builds(RetireOp, st.integers(1, 2**31), origins)))  # fmt: skip
def test_ops_without_rows_travel_as_their_frames_say(view: CloseOp | RetireOp | AgeOp) -> None:
    header = control_header(1, 4, view.op())
    kinds = {CloseOp: CloseSums, RetireOp: RetireOrigins, AgeOp: AgeRows}
    sent = kinds[type(view)](1, 4, *view)
    assert header == sent.header()
    assert type(view).of(control_op(header)) == view


def test_only_rows_that_end_a_clock_are_taken_for_these() -> None:
    stepped = SteppedOp(KEYS, 0, AFTER, 4, 2).op()
    of_function = Op(ROWS, KEYS, 0, AFTER, 4, 2)
    assert [SteppedOp.matches(op) for op in (stepped, of_function)] == [True, False]
    for op in (stepped, of_function):  # and as their backups read them
        assert SteppedOp.matches(op_of(rows_header(1, 0, op))) == SteppedOp.matches(op)
    assert not any(SteppedOp.matches(view.op()) for view, _ in FIELDS if not isinstance(view, SteppedOp))


@pytest.mark.parametrize("why", [EVICTED, EXPIRED])
def test_backups_read_why_rows_go(why: int) -> None:
    sent = DeleteOp(KEYS, 0, 2, 4, 1, why=why).op()
    assert op_of(keys_header(1, 0, sent))._replace(keys=sent.keys, values=sent.values) == sent


WRONG = [
    (CloseOp, "op", "self.action", "0"),
    (RetireOp, "of", "op.parties", "1"),
    (DeleteOp, "op", "if self.every", "if not self.every"),
    (DeleteOp, "op", "self.why", "NOT_SAID"),
    (SteppedOp, "op", ", rows=CLOSING", ""),
]


@pytest.mark.parametrize(("view", "method", "old", "new"), WRONG)
def test_a_number_in_another_field_is_noticed(monkeypatch, view, method, old, new) -> None:
    wrong = mutant(getattr(view, method), old, new)
    monkeypatch.setattr(view, method, classmethod(wrong) if method == "of" else wrong)
    with pytest.raises(AssertionError):
        check_fields()
