"""A shard that is divided is, part by part, bit for bit what shards of the larger table are after the same ops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.state import precopy
from dps.engine.state.beside import MadeBeside
from dps.engine.state.deletion import DeleteOp
from dps.engine.state.life import RowLife
from dps.engine.state.op_views import CloseOp, RetireOp
from dps.engine.state.ops import ADD, ASSIGN, NO_CLOCK, OLDER, PUSH, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.precopy import Assembly, PreCopy
from dps.engine.state.resharding import Division, Renumbered
from dps.engine.state.shard import make_shard
from dps.engine.state.spill import attach_file
from dps.engine.state.table_edges import equal_edges, halved_edges, joined_edges, merged, resharded
from dps.engine.state.transfer import first_difference
from dps.errors import InputError, MovedError

KEYS = np.array([*range(-6, 30), 1 << 40, -(1 << 62), (1 << 63) - 1])
ROWS = 23
SPECS = {
    "keyed": TableSpec("w", shards=2, dim=2, dtype="float64", optimizer=dps.Adagrad(0.1)),
    "keyed sums": TableSpec("w", shards=1, dtype="int64", aggregate="sum"),
    "dense": TableSpec("w", rows=ROWS, shards=3, dim=2, optimizer=dps.Adam(0.1)),
    "dense mean": TableSpec("w", rows=ROWS, shards=1, aggregate="mean"),
    "blocks": TableSpec("w", shards=2, dtype="int64", partition=dps.BlockPartition(2)),
    "ranges": TableSpec("w", shards=2, dtype="int64", partition=dps.RangePartition([-3, 2, 9, 20])),
    "waiting": TableSpec("w", shards=1, life=RowLife(admit=dps.AdmitByCount(3))),
    "expiring": TableSpec("w", shards=2, life=RowLife(expire=(dps.ExpireUnused("1 day"),))),
}


@st.composite
def programs(draw):
    """Ops on the rows of a table: pushes, values, deletions and ends of origins, at clocks that ascend."""
    clock, ops = 0, []
    for number in range(draw(st.integers(1, 12))):
        clock += draw(st.integers(0, 1))
        keys = draw(st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=12, unique=True))
        kind = draw(st.sampled_from(("push", "push", "push", "add", "assign", "delete", "retire")))
        ops.append((kind, clock, number, draw(st.integers(1, 3)), np.array(keys), draw(st.integers(1, 9))))
    return ops


def of_shard(spec: TableSpec, number: int, keys: np.ndarray) -> np.ndarray:
    grouping = group(np.ascontiguousarray(keys), spec.shard_map)
    return np.sort(grouping.keys[grouping.starts[number] : grouping.starts[number + 1]])


def apply(spec: TableSpec, shard, number: int, step) -> None:
    """What the step of a program is on one shard."""
    kind, clock, seq, origin, places, amount = step
    if kind == "retire":
        shard.apply(RetireOp(origin, 1).op())
        return
    keys = KEYS[places] if spec.keyed else np.unique(places % ROWS)
    mine = of_shard(spec, number, keys)
    if kind == "delete":
        if spec.keyed and spec.aggregate is None and len(mine):
            shard.apply(DeleteOp(mine, 0, len(mine), NO_CLOCK, 1).op())
        return
    values = ((mine % 7 + amount)[:, None] * np.ones(spec.dim)).astype(spec.dtype)
    rule = {"add": ADD, "assign": ASSIGN}.get(kind, PUSH)
    weight = amount if spec.aggregate == "mean" and kind == "push" else -1
    if not len(mine) and weight < 0:
        return
    stamp = (10 * origin + seq, 0, seq)  # an origin of its own, so that a retired one makes no op
    op = Op(rule, mine, 0, values, clock, 2, *stamp, False, weight)
    if shard.admission is not None:
        op = shard.prepared(op)
    shard.apply(op)


def divided(spec: TableSpec, edges, number: int, program, max_bytes: int, ahead: int = 0):
    """A shard after a program, as parts; and the shards of the larger table after it.

    Rows are divided, a piece after each step, while the last `ahead` steps of the program change them.
    """
    larger = resharded(spec, edges, number=9)
    old, division = make_shard(spec, number), None
    mine = larger.shard_map.within(*spec.shard_map.edges[number : number + 2])
    expected = {n: make_shard(larger, n) for n in mine}
    for at, step in enumerate(program):
        if at == len(program) - ahead:
            division = Division(old, larger)
        before = old.version
        apply(spec, old, number, step)
        for n, shard in expected.items():
            if spec.aggregate is not None and step[0] != "retire" and old.version > before:
                shard.apply(CloseOp(step[1], OLDER).op())  # because the whole shard has closed its sums
            shard.version = before  # which rows note
            apply(larger, shard, n, step)
        if division is not None:
            division.step(max_bytes)
    division = division or Division(old, larger)
    while division.step(max_bytes):
        pass
    parts = division.finish()
    division.close()
    assert old.dirty is None
    assert old.pins == 0
    return old, parts, expected


def alike(part, shard, old) -> str | None:
    """The first difference of a part from what it should be. Its version is that of the whole; its ledger, too."""
    shard.version, shard.clock, shard.ledger = old.version, old.clock, old.ledger
    for each in (part, shard):
        if each.sums is not None and not each.sums.count and each.sums.rows < 0:
            each.sums = None  # no row of the shard has a sum, and the shard has not heard of the clock
        if each.admission is not None:
            each.admission.admitted = each.admission.dropped = 0
    return first_difference(part, shard)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=25, deadline=None)
@given(
    program=programs(),
    max_bytes=st.sampled_from([1, 64, 1 << 20]),
    times=st.sampled_from([1, 2, 4]),
    more=st.sets(st.integers(1, ROWS - 1), min_size=1, max_size=3),
    ahead=st.integers(0, 12),
)
def test_parts_are_what_shards_of_the_larger_table_are(name, program, max_bytes, times, more, ahead):
    """All shards cut into equally many, or some cut anywhere, which those of tables that count keys cannot be."""
    spec, slots = SPECS[name], 1 if SPECS[name].rows else 4096 // ROWS
    edges = equal_edges(spec, spec.shards * times) if times > 1 or name == "waiting" else spec.shard_map.edges
    if name != "waiting":
        edges = sorted({*edges, *(each * slots for each in more)})
    elif times == 1:
        edges = equal_edges(spec, 2)
    for number in range(spec.shards):
        old, parts, expected = divided(spec, edges, number, program, max_bytes, ahead)
        assert list(parts) == list(expected)
        for n, part in parts.items():
            if name == "waiting":  # counts go to all parts, because a shard knows no keys of them
                part.admission = expected[n].admission = None
            assert alike(part, expected[n], old) is None


def test_a_key_that_waits_for_its_row_is_counted_on_in_its_part():
    spec = SPECS["waiting"]
    old, parts, _ = divided(spec, equal_edges(spec, 4), 0, [("push", 0, n, n, np.arange(30), 1) for n in (0, 1)], 64)
    assert len(old) == sum(map(len, parts.values())) == 0
    for n, part in parts.items():
        apply(part.spec, part, n, ("push", 1, 2, 2, np.arange(30), 5))
        assert sorted(part.keys().tolist()) == of_shard(part.spec, n, KEYS[:30]).tolist(), "the third push"


def test_the_parts_have_equal_shares_of_the_keys_that_may_wait():
    old, parts, _ = divided(
        SPECS["waiting"], equal_edges(SPECS["waiting"], 4), 0, [("push", 0, 1, 1, np.arange(30), 1)], 64
    )
    limits = {int(part.admission.to_arrays()[0][0]) for part in parts.values()}
    assert limits == {int(old.admission.to_arrays()[0][0]) // 4}


def test_rows_in_a_file_are_divided_too(tmp_path):
    spec = TableSpec("w", shards=1, dim=16, life=RowLife(max_bytes=1 << 20, evict="spill"))
    old = make_shard(spec, 0)
    attach_file(old, str(tmp_path))
    keys = np.arange(40_000)
    for first in range(0, len(keys), 4000):
        some = keys[first : first + 4000]
        op = Op(ADD, some, 0, np.repeat(some[:, None], 16, 1).astype(np.float32), 0, 1)
        old.make_room(op, len(some))
        old.apply(op)
        old.spill.turn() if hasattr(old.spill, "turn") else None
    assert old.spilled > 0
    division = Division(old, resharded(spec, halved_edges(spec), 9), str(tmp_path))
    while division.step(1 << 16):
        pass
    found = {}
    for part in division.finish().values():
        mine = of_shard(part.spec, part.number, keys)
        rows = np.empty((len(mine), 16), np.float32)
        part.pull(mine, rows)
        found |= dict(zip(mine.tolist(), rows[:, 3].tolist(), strict=True))
        part.close_file()
    division.close()
    old.close_file()
    assert found == {key: float(key) for key in keys.tolist()}


def test_the_ledger_goes_to_all_parts_without_kept_answers():
    spec = dataclasses.replace(SPECS["keyed"], shards=1)
    old, parts, _ = divided(spec, equal_edges(spec, 2), 0, [("push", 3, 1, 2, np.arange(9), 1)], 64)
    for part in parts.values():
        assert part.ledger.certificate().tolist() == old.ledger.certificate().tolist() == [[21, 3, 1]]
        assert part.ledger.to_arrays()["answers"].size == 0


@pytest.mark.parametrize(
    ("spec", "shards", "text"),
    [
        (SPECS["keyed"], 2, "has 2 shards: it is split into 2, 4, 8, ... times as many, not 2"),
        (SPECS["keyed"], 1, "not 1"),
        (SPECS["keyed"], 6, "it can have a power of two, 1 to 4096, not 6"),
        (SPECS["keyed"], "4", "shards is a whole number, not '4'"),
        (SPECS["dense"], 7, "not 7"),
        (SPECS["dense"], 24, "has 3 shards: it can have 1 to 23, not 24"),
        (dataclasses.replace(SPECS["dense"], fixed_shards=True), 6, "keeps its 3 shards"),
        (SPECS["keyed"], 1 << 13, "8192"),
        (TableSpec("w", life=RowLife(admit=dps.AdmitByCount(3, approximate=True)), shards=1), 2, "approximately"),
        (TableSpec("w", life=RowLife(expire=(dps.ExpireUnused(9),), remember=9), shards=1), 2, "remembers the keys"),
        (TableSpec("w", shards=4, edges=(0, 1, 2, 3, 4096)), 8, "not equal, and each is divided into whole shards"),
    ],
)
def test_a_split_that_cannot_be_is_refused(spec, shards, text):
    with pytest.raises(InputError, match=text):
        resharded(spec, equal_edges(spec, shards), number=9)


@pytest.mark.parametrize(
    ("spec", "shard", "text"),
    [
        (SPECS["keyed"], 2, "has shards 0 to 1; there is no 2"),
        (SPECS["keyed"], -1, "there is no -1"),
        (SPECS["keyed"], True, "there is no True"),
        (TableSpec("w", rows=4, shards=4), 0, "shard 0 is one row, and cannot be divided"),
        (TableSpec("w", shards=4096), 7, "shard 7 is one slot, of the 4096 in which keys lie"),
        (SPECS["waiting"], 0, None),
        (TableSpec("w", shards=2, life=RowLife(max_bytes=1 << 20)), 0, "max_bytes=1048576, of which each shard has an"),
        (
            dataclasses.replace(SPECS["waiting"], shards=2),
            0,
            "has admit=AdmitByCount, of which each shard",
        ),
        (dataclasses.replace(SPECS["dense"], fixed_shards=True), 1, "keeps its 3 shards"),
    ],
)
def test_a_shard_that_cannot_be_divided_alone_is_refused(spec, shard, text):
    if text is None:  # the halves of the only shard are equal
        assert resharded(spec, halved_edges(spec, shard), number=9).shards == 2
        return
    with pytest.raises(InputError, match=text):
        resharded(spec, halved_edges(spec, shard), number=9)


def test_a_table_whose_shards_are_equal_has_no_edges_in_its_definition():
    spec = TableSpec("w", shards=2)
    one = resharded(spec, halved_edges(spec, 0), number=9)
    assert one.to_dict()["edges"] == (0, 1024, 2048, 4096)
    assert TableSpec.from_dict(one.to_dict()) == one
    assert "edges" not in resharded(one, halved_edges(one, 2), number=10).to_dict()
    assert "edges" not in merged(one, joined_edges(one, 0), number=10).to_dict()


WRONG = {
    "parts have all rows": ("_divided", "mine = slice(", "mine = slice(0 * "),
    "the ledger is lost": (
        "finish",
        "self._ledger_of(number)",
        "type(self.shard.ledger)()",
    ),
    "rows change places": ("_divided", "else grouping.order[mine]", "else grouping.order[mine][::-1]"),
    "sums stay behind": ("_sums", "yield [array[which] for array in arrays]", "yield [array[:0] for array in arrays]"),
    "the clock begins anew": ("finish", "dict(meta)", "dict(meta) | {'clock': 0}"),
}


@pytest.mark.parametrize("variant", WRONG)
def test_wrong_divisions_are_noticed(variant, monkeypatch):
    method, old, new = WRONG[variant]
    wrong = mutant(getattr(Division, method), old, new)
    monkeypatch.setattr(Division, method, wrong)
    program = [("push", 1, n, n % 3 + 1, np.arange(n, n + 20), n + 1) for n in range(6)]
    assert any(differences(program)), "no table shows the error"


def differences(program, ahead: int = 0) -> list[object]:
    seen: list[object] = []
    for name in ("keyed", "keyed sums", "dense", "dense mean"):
        try:
            whole, parts, expected = divided(SPECS[name], halved_edges(SPECS[name]), 0, program, 64, ahead)
            last = {n: part.ledger.certificate().tolist() for n, part in parts.items()}
            seen += [alike(part, expected[n], whole) for n, part in parts.items()]
            seen += [name for each in last.values() if each != whole.ledger.certificate().tolist()]
            seen += [name for part in parts.values() if part.clock != whole.clock]
        except Exception as error:
            seen.append(error)
    return seen


# ---- a shard that stays as it is, while another one is divided


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.shards > 1])
@settings(max_examples=25, deadline=None)
@given(program=programs(), then=programs())
def test_a_shard_that_gets_another_number_is_as_one_whose_rows_were_copied(name, program, then):
    spec = SPECS[name]
    larger = resharded(spec, halved_edges(spec, 0), number=9)
    olds = [make_shard(spec, 1) for _ in range(2)]
    for step in program:
        for old in olds:
            apply(spec, old, 1, step)
    olds[0].track_changes()
    kept, copying = Renumbered(olds[0], larger), Division(olds[1], larger)
    assert not kept.step(1)
    while copying.step(64):
        pass
    (number, made), (_, expected) = *kept.finish().items(), *copying.finish().items()
    kept.close()
    copying.close()
    assert (number, made.number, made.spec) == (2, 2, larger)
    assert made.rows is olds[0].rows
    assert made.changed is None
    for step in then:
        for shard in (made, expected):
            apply(larger, shard, 2, (step[0], step[1], step[2] + 20, *step[3:]))
    assert first_difference(made, expected) is None


def test_a_shard_whose_rows_are_read_keeps_its_number_for_now():
    spec = SPECS["keyed"]
    old, larger = make_shard(spec, 1), resharded(spec, halved_edges(spec, 0), number=9)
    old.pin()
    with pytest.raises(MovedError, match="shard 1 of table 'w' are being read"):
        Renumbered(old, larger).finish()
    apply(spec, old, 1, ("push", 1, 1, 1, np.arange(30), 1))
    apply(spec, old, 1, ("delete", 1, 2, 1, np.arange(9), 1))
    kept = of_shard(spec, 1, KEYS[9:30]).tolist()
    with pytest.raises(MovedError, match="are being read"):
        Renumbered(old, larger).finish()
    assert old.vacancies > 0
    old.unpin()
    made = Renumbered(old, larger).finish()[2]
    old.tidy()
    assert sorted(made.keys().tolist()) == kept
    assert made.deleted is not old.deleted


# ---- rows that change while they are read

CHANGING = [
    *[("push", 1, n, n % 3 + 1, np.arange(n, n + 20), n + 1) for n in range(3)],
    ("delete", 1, 3, 1, np.arange(9), 1),
    ("push", 1, 4, 1, np.arange(5, 30), 3),
    ("push", 2, 5, 2, np.arange(12), 3),
    ("delete", 2, 6, 1, np.arange(14, 19), 1),
    ("push", 2, 7, 1, np.arange(30, len(KEYS)), 1),
]
WRONG_READERS = {
    "a piece clears all flags": (PreCopy, "_taken", "shard.dirty[which] = 0", "shard.dirty[:] = 0"),
    "rows are read once": (PreCopy, "_taken", "shard.dirty[which] = 0", "shard.dirty = shard.dirty * 0"),
    "rows that are new are left out": (
        PreCopy,
        "is_current",
        "self._flags(0, self.shard.end)",
        "self._flags(0, len(self._keys) or self.shard.end)",
    ),
    "deleted rows stay": (Assembly, "put", "vacate(shard, keys[vacant])", "pass"),
    "rows may get other numbers": (PreCopy, "__init__", "shard.pin()", "shard.pins = 0"),
}


def test_rows_that_change_while_they_are_read_are_read_again():
    assert not any(any(differences(CHANGING, ahead)) for ahead in range(8))


@pytest.mark.parametrize("variant", WRONG_READERS)
def test_wrong_readers_are_noticed(variant, monkeypatch):
    kind, method, old, new = WRONG_READERS[variant]
    found = vars(kind)[method]
    if isinstance(found, property):
        monkeypatch.setattr(kind, method, property(mutant(found.fget, old, new)))
    else:
        monkeypatch.setattr(kind, method, mutant(found, old, new))
    assert any(any(differences(CHANGING, ahead)) for ahead in range(1, 7))


def test_an_op_that_is_carried_out_beside_the_shard_leaves_its_flags():
    spec, keys = SPECS["keyed"], np.arange(200)
    spec = dataclasses.replace(spec, shards=1)
    shard, other = make_shard(spec, 0), make_shard(spec, 0)
    for each in (shard, other):
        each.apply(Op(ADD, keys, 0, np.ones((200, 2)), 0, 1))
    division = Division(shard, resharded(spec, halved_edges(spec), number=9))
    while division.step(1 << 20):
        pass
    op = Op(PUSH, keys[:50], 0, np.ones((50, 2)), 1, 1)
    made = MadeBeside(shard, op)
    made.carry_out()
    shard.made_beside = made
    shard.apply(op)
    other.apply(op)
    made.end(shard)
    assert not division.readers.is_current
    while division.step(1 << 20):
        pass
    for number, part in division.finish().items():
        mine = of_shard(part.spec, number, keys)
        found, expected = np.empty((len(mine), 2)), np.empty((len(mine), 2))
        part.pull(mine, found)
        other.pull(mine, expected)
        assert found.tolist() == expected.tolist()
    division.close()


def test_a_large_shard_has_its_keys_listed_by_another_thread(monkeypatch):
    monkeypatch.setattr(precopy, "MIN_LISTED_ROWS", 8)
    shard = make_shard(TableSpec("w", shards=1), 0)
    shard.apply(Op(ADD, np.arange(10), 0, np.ones((10, 1), np.float32), 0, 1))
    reader = PreCopy(shard)
    listing = reader.listing()
    shard.apply(Op(ADD, np.arange(10, 13), 0, np.ones((3, 1), np.float32), 0, 1))
    listing()
    assert reader.listing() is None, "once in a round"
    assert reader.piece(1 << 20).keys.tolist() == list(range(10))
    assert reader.piece(1 << 20) is None
    assert not reader.is_current
    reader.listing()()
    assert reader.piece(1 << 20).keys.tolist() == [10, 11, 12]
    assert reader.is_current
    reader.close()


def test_a_reader_is_near_when_few_rows_are_left_or_when_rounds_do_not_help(monkeypatch):
    monkeypatch.setattr(precopy, "FEW_ROWS", 3)
    shard = make_shard(TableSpec("w", rows=100, shards=1), 0)
    push = lambda count: shard.apply(Op(ADD, None, 0, np.ones((count, 1), np.float32), 0, 1))  # noqa: E731
    reader, near = PreCopy(shard), []
    while reader.piece(200) is not None:
        push(60)
        near.append(reader.is_nearly_current)
    assert not any(near), "the first round reads all rows"
    assert not reader.is_nearly_current, "60 rows are to be read again"
    for changed in (20, 2):
        while reader.piece(1 << 20) is not None:
            pass
        push(changed)
        near.append(reader.is_nearly_current)
    assert near[-2:] == [False, True]
    while not reader.is_nearly_current:
        push(100)
        reader.piece(1 << 20)
    reader.close()
