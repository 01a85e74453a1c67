"""Pushes that a process sums: which shards take a sum, and four trainers whose pushes travel as one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import wait_until

import dps
from dps.engine.client import merged_pushes
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.life import RowLife
from dps.engine.state.ops import TableSpec
from dps.errors import InputError
from dps.testing import Simulation

OPS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.integers(0, 4)), max_size=12)
STAMPS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, unique_by=lambda s: s[0]
)


@given(OPS, STAMPS)
def test_a_sum_is_taken_if_all_of_its_pushes_are_new(ops, stamps):
    ledger, last = Ledger(), {}
    for origin, clock, number in ops:
        if (clock, number) > last.get(origin, (-1, -1)):
            last[origin] = clock, number
            ledger.note(origin, 0, clock, number)
    rows = np.array([(origin, 0, first, first + more) for origin, first, more in stamps], np.int64)
    new = [last.get(origin, (-1, -1)) < (1, first) for origin, first, _ in stamps]
    old = [last.get(origin, (-1, -1)) >= (1, first + more) for origin, first, more in stamps]
    assert ledger.merges(1, rows) is (True if all(new) else False if all(old) else None)
    if all(new):
        ledger.note(*rows[0, [0, 1]].tolist(), 1, int(rows[0, 3]), rows)
        assert ledger.merges(1, rows) is False


def test_a_sum_is_refused_by_fences():
    ledger = Ledger()
    ledger.note(7, 1, 3, 1)
    ledger.retire(8, 1)
    assert ledger.merges(4, np.array([[7, 0, 0, 0]])) is None
    assert ledger.merges(4, np.array([[9, 0, 0, 0], [8, 0, 0, 0]])) is None
    assert ledger.merges(4, np.array([[7, 1, 0, 0], [9, 0, 0, 0]])) is True


@pytest.mark.parametrize(
    "asked",
    [
        {"optimizer": dps.Momentum(0.1)},
        {"optimizer": dps.SGD(0.1, l2=0.1)},
        {"optimizer": dps.Assign()},
        {"dtype": "float16"},
        {"wire": dps.Wire(push="float16", merge=True)},
        {"wire": dps.Wire(lists=True, merge=True)},
        {"wire": dps.Wire(keep=0.5, merge=True)},
        {"wire": dps.Wire(pull="float16", measured=True, merge=True)},
        {"life": RowLife(admit=dps.AdmitByCount(2))},
    ],
    ids=repr,
)
def test_tables_whose_pushes_have_no_sum_are_refused(asked):
    with pytest.raises(InputError, match="merge=True"):
        TableSpec("w", **{"wire": dps.Wire(merge=True), **asked})


# ---- Four trainers of a process, beside a dict


class Counts:
    """What a table of counts must hold: for each key, the sum of what was pushed in each clock."""

    def __init__(self) -> None:
        self.clocks: list[dict[int, int]] = []

    def push(self, clock: int, keys: list[int], value: int) -> None:
        while len(self.clocks) <= clock:
            self.clocks.append({})
        for key in keys:
            self.clocks[clock][key] = self.clocks[clock].get(key, 0) + value

    def of(self, keys: list[int], clocks: slice) -> np.ndarray:
        return np.array([sum(clock.get(key, 0) for clock in self.clocks[clocks]) for key in keys], np.int64)


ROWS = 6
KEY_LISTS = st.lists(st.integers(0, ROWS - 1), max_size=5)
ACTS = st.one_of(
    st.tuples(st.sampled_from(["push", "push_async", "add"]), KEY_LISTS, st.integers(1, 9)),
    st.tuples(st.sampled_from(["push all", "flush", "pull", "push_pull"]), st.just(list(range(ROWS))), st.just(1)),
)
PROGRAMS = st.lists(
    st.lists(st.lists(ACTS, max_size=3), min_size=3, max_size=3), min_size=1, max_size=3
)  # clock, trainer
TABLES = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([None, ROWS]),
        "shards": st.sampled_from([1, 4]),
        "aggregate": st.sampled_from([None, "sum"]),
        "dtype": st.sampled_from(["int64", "float32"]),
        "cache": st.sampled_from([None, dps.Cache("1 kB")]),
    }
)


def carry_out(trainer, parts, program, asked, counts):
    """Go through the program of a trainer; each row that it reads has what was promised."""
    everything, aggregates = list(range(ROWS)), asked["aggregate"] is not None
    for clock, acts in enumerate(program):
        own = Counts()
        for verb, keys, value in acts[trainer.number]:
            if verb == "flush":
                trainer.flush()
            elif verb == "pull":
                seen = trainer.pull("w", everything)
                least = counts.of(everything, slice(clock))
                most = least if aggregates else counts.of(everything, slice(None))
                assert (seen >= least + (0 if aggregates else own.of(everything, slice(None)))).all()
                assert (seen <= most).all()
            elif verb not in ("add", "push_pull") or not aggregates:  # which change rows before the clock has ended
                counts.push(clock, keys, value)
                named = None if verb == "push all" and asked["rows"] is not None else keys
                getattr(trainer, verb.removesuffix(" all"))("w", named, np.full(len(keys), value))
                own.push(0, keys, value)
        trainer.tick()


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, TABLES)
def test_three_trainers_of_a_process_beside_a_dict(program, asked):
    counts = Counts()
    with Simulation(0, servers=2, trainers=3, copies=2, compute=0.01) as sim:
        sim.table("w", wire=dps.Wire(merge=True), **asked)
        sim.run(carry_out, [None] * 3, staleness=0, args=(program, asked, counts), threads=3)
        sim.rest()
        rows = list(range(ROWS))
        assert sim.client().pull("w", rows).tolist() == counts.of(rows, slice(None)).tolist()


# ---- The bytes that leave


CLOCKS, DIM, SHARDS, TRAINERS = 4, 3, 4, 4
STAMP_BYTES = 32


def push_neighbours(trainer, parts):
    trainer.push("w", [0], np.ones((1, DIM)))
    trainer.barrier()  # sends it: from now on each trainer is known to the others
    trainer.tick()
    for _ in range(CLOCKS):
        trainer.push("w", np.arange(400) + 100 * trainer.number, np.full((400, DIM), 1 + trainer.number))
        trainer.tick()


@pytest.mark.parametrize("rows", [None, 700])
@pytest.mark.parametrize("aggregate", [None, "sum"])
def test_the_bytes_of_a_process_are_those_of_the_union(monkeypatch, rows, aggregate):
    monkeypatch.setattr(merged_pushes, "STRAGGLER_SECONDS", 30.0)  # because the machine may be busy
    with (
        dps.LocalCluster(servers=1, trainers=TRAINERS, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        ps.table("w", rows=rows, dim=DIM, shards=SHARDS, wire=dps.Wire(merge=True), aggregate=aggregate)
        ps.run(push_neighbours, range(TRAINERS), staleness=0, progress=False)
        expected = np.zeros((700, DIM))
        expected[0] = TRAINERS
        for number in range(TRAINERS):
            expected[100 * number : 100 * number + 400] += CLOCKS * (1 + number)
        alone_keys, alone_values = TRAINERS * (8 * SHARDS + 8), TRAINERS * (4 * DIM + 4)  # of whole words
        union = 0 if rows is not None else 8 * (SHARDS + 700)  # neighbours of a dense table need no keys
        sums = 4 * DIM * 700 + STAMP_BYTES * TRAINERS
        wait_until(lambda: ps.status().tables["w"].traffic.headers == 64 * (TRAINERS + CLOCKS))
        traffic = ps.status().tables["w"].traffic
        assert traffic.keys == alone_keys + CLOCKS * union
        assert traffic.pushed == alone_values + CLOCKS * sums
        np.testing.assert_array_equal(ps.client().pull("w", np.arange(700)), expected)
