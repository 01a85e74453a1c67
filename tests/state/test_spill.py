"""Rows that lie in a file: a shard with a file is, bit for bit, what one without is, whatever is done to both."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noticing import assert_noticed

import dps
from dps.engine.state import scan as scan_module
from dps.engine.state import shrinking
from dps.engine.state.disk_rows import DiskRows, Reader
from dps.engine.state.forgetting import Expiring
from dps.engine.state.life import life_of
from dps.engine.state.op_views import AgeOp, CloseOp, DeleteOp
from dps.engine.state.ops import ADD, ASSIGN, KEEP, NO_CLOCK, OLDER, PUSH, Op, TableSpec
from dps.engine.state.scan import BEGIN, scan
from dps.engine.state.shard import KeyedShard
from dps.engine.state.shrinking import Shrinking
from dps.engine.state.snapshot import Cut
from dps.engine.state.spill import Spill
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.errors import InputError, LimitError, SpillError

KEYS = 3000


def spec_with(max_bytes: int = 100_000, **asked) -> TableSpec:
    asked = {"dim": 2, "optimizer": dps.Adagrad(lr=0.1), "init": dps.Uniform(-0.1, 0.1, seed=3), **asked}
    return TableSpec("w", shards=1, life=life_of(None, max_bytes, "spill"), **asked)


FILES: list[DiskRows] = []


@pytest.fixture(autouse=True)
def files_are_closed(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(shrinking, "TURN_SLOTS", 1000)
    yield
    while FILES:
        FILES.pop().close()


def spilling(spec: TableSpec, segment_bytes: int = 512) -> KeyedShard:
    shard = KeyedShard(spec, 0)
    FILES.append(DiskRows(None, shard.width, spec.dtype, shard.index.salt, "rows of shard 0", segment_bytes))
    shard.spill = Spill(shard, FILES[-1])
    return shard


def push(shard: KeyedShard, keys: np.ndarray, value: float = 1.0, rule: int = PUSH, clock: int = NO_CLOCK) -> None:
    values = np.full((len(keys), shard.spec.dim), value, shard.spec.dtype)
    shard.apply(Op(rule, keys, 0, values, clock, 1))


def rows_of_cut(cut: Cut, max_bytes: int = 2000) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for keys, rows in cut.pieces(max_bytes):
        assert isinstance(keys, np.ndarray)
        for key, row in zip(keys.tolist(), rows, strict=True):
            assert key not in found, "a cut gives a row twice"
            found[key] = row.tobytes()
    assert len(found) == cut.rows
    return found


class Both:
    """A shard with a file and one that has all rows in memory, and what reads them while they change."""

    def __init__(self, spec: TableSpec, rng: np.random.Generator):
        self.spec, self.rng = spec, rng
        self.spills, self.plain = spilling(spec), KeyedShard(spec, 0)
        self.dump: Dump | None = None
        self.joining: Joining | None = None
        self.clock = self.latest = 0

    def apply(self, op: Op) -> None:
        if self.joining is not None:
            self.joining.apply(op)
        self.spills.apply(op)
        self.plain.apply(op)

    def keys(self, most: int = 300) -> np.ndarray:
        count = int(self.rng.integers(1, most))
        return self.rng.choice(KEYS, count, replace=False).astype(np.int64)

    def any_clock(self) -> int:
        """A clock of a trainer, of which some are ahead."""
        clock = self.clock + int(self.rng.integers(4))
        self.latest = max(self.latest, clock)
        return clock

    def push(self) -> None:
        keys = self.keys()
        rule = int(self.rng.choice([PUSH, PUSH, ADD, ASSIGN]))
        values = self.rng.random((len(keys), self.spec.dim)).astype(self.spec.dtype)
        clock = NO_CLOCK if rule != PUSH or self.rng.random() < 0.3 else self.any_clock()
        self.apply(Op(rule, keys, 0, values, clock, 2))

    def pull(self) -> None:
        keys = self.keys()
        found = [np.empty((len(keys), self.spec.dim), self.spec.dtype) for _ in range(2)]
        for shard, values in zip((self.spills, self.plain), found, strict=True):
            shard.pull(keys, values)
            assert (shard.is_there(keys) == self.plain.is_there(keys)).all()
        assert found[0].tobytes() == found[1].tobytes()

    def select(self) -> None:
        keys = self.keys()
        mine, plain = (shard.select(keys, 0, 0) for shard in (self.spills, self.plain))
        assert (mine.rows.tobytes(), mine.present.tolist()) == (plain.rows.tobytes(), plain.present.tolist())

    def delete(self) -> None:
        everything = self.rng.random() < 0.03
        keys = self.keys(60)[: 0 if everything else None]
        self.apply(DeleteOp(keys, 0, len(keys), self.any_clock(), 1, everything).op())

    def age(self) -> None:
        self.clock += 1
        self.apply(AgeOp(1000 * self.clock, self.clock, 3).op())
        if self.spec.aggregate:
            self.apply(CloseOp(self.clock, KEEP).op())

    def look(self) -> None:
        found: list[list[int]] = []
        for shard in (self.spills, self.plain):
            keys, rank = [], BEGIN
            while rank != BEGIN or not keys:
                piece = scan(shard, rank, 100, 900, 64)
                keys += piece.keys.tolist()
                rank = piece.rest
                if not keys and rank == BEGIN:
                    break
            assert len(keys) == len(set(keys))
            found.append(sorted(keys))
        assert found[0] == found[1]

    def begin_cut(self) -> None:
        if self.spills.cut is None:
            now = self.rng.random() < 0.5 and self.plain.sums is None
            clock = None if now else self.latest + 1
            for shard in (self.spills, self.plain):
                shard.begin_cut(clock)
            self.clock += 2
            for _ in range(int(self.rng.integers(5))):
                self.push()
                self.delete()

    def end_cut(self) -> None:
        mine, plain = self.spills.cut, self.plain.cut
        if mine is None or plain is None:
            return
        self.complete(mine, plain)
        pieces = mine.pieces(4000)
        for _ in range(int(self.rng.integers(4))):  # it is read while the shard changes
            if next(pieces, None) is None:
                break
            self.push()
        self.spills.end_cut()
        self.plain.end_cut()

    def complete(self, *cuts: Cut) -> None:
        if not cuts[0].is_complete:
            assert cuts[0].clock is not None
            self.apply(CloseOp(cuts[0].clock, OLDER).op())
            for cut in cuts:
                cut.complete()

    def read_cut(self) -> None:
        mine, plain = self.spills.cut, self.plain.cut
        if mine is None or plain is None or not (mine.is_complete or mine.clock is not None):
            return
        self.complete(mine, plain)
        wanted = rows_of_cut(plain)
        found: dict[int, bytes] = {}
        for keys, rows in mine.pieces(4000):
            assert isinstance(keys, np.ndarray)
            assert not found.keys() & set(keys.tolist()), "a cut gives a row twice"
            found |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
            self.push()
            self.delete()
        assert found == wanted
        assert mine.rows == len(wanted)
        self.spills.end_cut()
        self.plain.end_cut()

    def begin_dump(self) -> None:
        if self.dump is None and self.spills.cut is None:
            self.dump, self.joining = Dump(self.spills), Joining(self.spec, 0)
            self.joining.begin(*self.dump.head())

    def go_on(self) -> None:
        if self.dump is None or self.joining is None:
            return
        for _ in range(int(self.rng.integers(1, 4))):
            piece = self.dump.piece(4000)
            if piece is None:
                joined, self.dump, self.joining = self.joining.finish(), None, None
                difference = first_difference(joined, self.plain)
                assert difference is None, difference
                joined.close_file()
                return
            meta, arrays = piece
            self.joining.add(meta, [array.copy() for array in arrays])

    def settle(self) -> None:
        """End all that reads, and compare."""
        self.spills.end_cut()
        self.plain.end_cut()
        while self.dump is not None:
            self.go_on()
        assert len(self.spills) == len(self.plain)
        difference = first_difference(self.spills, self.plain)
        assert difference is None, difference
        for first in range(KEYS, KEYS + 6):
            room = self.spills.most_rows
            self.apply(Op(ADD, np.array([first]), 0, np.ones((1, self.spec.dim), np.float32), NO_CLOCK, 1))
        assert self.spills.resident <= room


STEPS = [Both.push] * 8 + [Both.pull] * 3 + [Both.delete, Both.age, Both.look, Both.select]
STEPS += [Both.begin_cut, Both.read_cut, Both.end_cut, Both.begin_dump] + [Both.go_on] * 3


def check_both(seed: int, steps: int = 120) -> None:
    """A shard with a file equals one without, after any steps; and so do cuts and copies of both."""
    rng = np.random.default_rng(seed)
    aggregate = [None, "sum", "mean"][seed % 3]
    optimizer = [dps.Adagrad(lr=0.1), dps.Add(), dps.Adam(lr=0.1)][seed // 3 % 3]
    both = Both(spec_with(aggregate=aggregate, optimizer=optimizer), rng)
    for _ in range(steps):
        STEPS[rng.integers(len(STEPS))](both)
    both.settle()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 20))
@example(1)
@example(5)
def test_a_shard_with_a_file_is_one_without(seed):
    check_both(seed)


# ---- The file


class Numbers:
    """Rows in a file beside a dict of the same."""

    def __init__(self, seed: int, segment_bytes: int):
        self.rng = np.random.default_rng(seed)
        self.disk = DiskRows(None, 3, "float32", 0, "rows", segment_bytes)
        FILES.append(self.disk)
        self.known: dict[int, bytes] = {}
        self.readers: list[tuple[Reader, dict[int, bytes], dict[int, bytes]]] = []

    def put(self) -> None:
        keys = np.unique(self.rng.integers(0, 300, self.rng.integers(1, 60)))
        keys = keys[self.disk.find(keys) < 0]
        rows = self.rng.random((len(keys), 3)).astype(np.float32)
        self.disk.put(keys, rows)
        self.known |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}

    def take(self) -> None:
        keys = self.rng.permutation(np.array(list(self.known), np.int64))[:25]
        places = self.disk.find(keys)
        for key, row in zip(keys.tolist(), self.disk.read(keys, places), strict=True):
            assert row.tobytes() == self.known.pop(key)
        self.disk.drop(keys, places)

    def begin(self) -> None:
        if len(self.readers) < 3:
            self.readers.append((Reader(self.disk, frozen=True), dict(self.known), {}))

    def read(self) -> None:
        if self.readers:
            reader, wanted, found = self.readers[0]
            piece = reader.piece(16)
            if piece is None:
                assert found == wanted
                reader.close()
                self.readers.pop(0)
            else:
                found |= {key: row.tobytes() for key, row in zip(piece[0].tolist(), piece[1], strict=True)}

    def clear(self) -> None:
        if self.rng.random() < 0.1:
            self.disk.clear()
            self.known.clear()


def check_file(seed: int) -> None:
    """What a file holds is what was put into it, while rows come and go, and readers see what there was."""
    numbers = Numbers(seed, 512 if seed % 2 else 4096)
    steps = [Numbers.put] * 3 + [Numbers.take] * 3 + [Numbers.begin, Numbers.clear] + [Numbers.read] * 4
    for _ in range(250):
        steps[numbers.rng.integers(len(steps))](numbers)
        assert len(numbers.disk) == len(numbers.known)
    while numbers.readers:
        numbers.read()
    entries = max(1, len(numbers.known)) * numbers.disk.entry
    assert numbers.disk.file_bytes <= 2.2 * entries + 4 * numbers.disk.segment * numbers.disk.entry + 60_000


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 20))
def test_a_file_holds_what_was_put_into_it(seed):
    check_file(seed)


def file_of(shard: KeyedShard) -> int:
    assert isinstance(shard.spill, Spill)
    number = shard.spill.disk._file
    assert number is not None
    return number


def filled(keys: int = 3000) -> KeyedShard:
    shard = spilling(spec_with())
    for part in np.array_split(np.arange(keys), 30):
        push(shard, part)
    assert shard.spilled > 500
    return shard


def spilled_keys(shard: KeyedShard, most: int = 3000) -> np.ndarray:
    assert shard.spill is not None
    keys = np.arange(most)
    return keys[shard.spill.holds(keys)]


def comes(shard: KeyedShard, key: int) -> bool:
    """Whether the row of a key can be read."""
    try:
        shard.spill.bring(np.array([key]), creates=True, strict=True)
    except SpillError as error:
        return "rows of shard 0" not in str(error) or "check the disk" not in str(error)
    return True


def grow(shard: KeyedShard, keys: int) -> None:
    """Push to so many new keys, as a primary does."""
    for part in np.array_split(np.arange(keys), keys // 100):
        shard.spill.bring(part, creates=True, strict=True)
        push(shard, part)


def test_a_file_that_is_cut_off_or_changed_is_an_error_for_its_rows_alone():
    shard = filled()
    keys, out = spilled_keys(shard), np.empty((1, 2), np.float32)
    whole = np.arange(3000)[~np.isin(np.arange(3000), keys)]
    size = os.fstat(file_of(shard)).st_size
    os.ftruncate(file_of(shard), size // 2)
    lost = 0
    for key in keys.tolist():
        before = shard.version, len(shard)
        if not comes(shard, key):
            assert (shard.version, len(shard)) == before
            lost += 1
    assert 0.2 * len(keys) < lost < len(keys)
    shard.pull(whole[:1], out)
    push(shard, whole[:50])
    changed = filled()
    key = spilled_keys(changed)[:1]
    place = int(changed.spill.disk.find(key)[0]) * changed.spill.disk.entry
    os.pwrite(file_of(changed), b"\x01", place + 20)
    with pytest.raises(SpillError, match="is not what was written"):
        changed.pull(key, out)


def test_a_full_disk_refuses_a_request_and_loses_nothing(monkeypatch, caplog):
    shard, plain = filled(), KeyedShard(spec_with(), 0)
    for part in np.array_split(np.arange(3000), 30):
        push(plain, part)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    new, before = np.arange(5000, 5400), (shard.version, len(shard), shard.resident)
    with pytest.raises(SpillError, match=r"No space left on device.*dps\.spill-directory"):
        shard.spill.bring(new, creates=True, strict=True)
    assert (shard.version, len(shard), shard.resident) == before
    push(shard, new)  # on a backup, which may not refuse what the primary has
    push(plain, new)
    assert "rows stay in memory beyond max_bytes" in caplog.text
    monkeypatch.undo()
    for _ in range(3):
        push(shard, new)
        push(plain, new)
    assert first_difference(shard, plain) is None


def test_memory_keeps_within_the_budget_and_rows_are_written_once():
    """A table of ten times its budget, keys by Zipf: bytes of memory, bytes written, bytes of a key."""
    shrinking.TURN_SLOTS = 1 << 15  # which the fixture puts back
    spec = spec_with(6_000_000, dim=128)
    shard = spilling(spec, 1 << 16)
    rng, largest, gone = np.random.default_rng(0), 0.0, 0
    for part in np.array_split(rng.permutation(50_000), 100):
        push(shard, part)
    for number in range(150):
        keys = np.unique(rng.zipf(1.2, 400) * 7919 % 50_000)
        went = shard.spilled
        push(shard, keys)
        gone += max(0, shard.spilled - went)
        if number > 20:
            largest = max(largest, shard.nbytes / spec.life.max_bytes)
    assert len(shard) == 50_000
    assert shard.spilled * shard.width * 4 > 7 * spec.life.max_bytes
    assert largest <= 1.02
    disk = shard.spill.disk
    assert disk.written <= 1.5 * (shard.spilled + shard.spill.brought)
    assert disk.nbytes <= 23 * len(disk)


def test_keys_that_take_the_budget_are_refused():
    shard = spilling(spec_with(20_000))
    with pytest.raises(LimitError, match="new keys are refused: delete rows"):
        grow(shard, 20_000)
    known = np.arange(50)
    shard.spill.bring(known, creates=True, strict=True)
    shard.apply(DeleteOp(np.arange(0, 5000), 0, 5000, 0, 1).op())


def test_rows_that_are_pulled_stay_in_memory():
    """Rows that are only pulled are used, too: they are read from the file once, while others come and go."""
    shard = spilling(spec_with(200_000))
    grow(shard, 6000)
    served, out = np.arange(100), np.empty((100, 2), np.float32)
    shard.pull(served, out)
    brought = shard.spill.brought
    for part in np.array_split(np.arange(6000, 12_000), 60):
        push(shard, part)
        shard.pull(served, out)
    assert shard.spill.brought - brought < 200


def test_rows_in_a_file_expire():
    """The hand finds in the file what it would find in memory: rows that were not pushed to for long."""
    spec = TableSpec("w", dim=2, shards=1, life=life_of(dps.ExpireUnused(100.0), 100_000, "spill"))
    shard = spilling(spec)
    for second in range(0, 200, 2):
        shard.apply(AgeOp(1000 * second, 0, 3).op())
        push(shard, np.arange(30 * second, 30 * second + 60))
    shard.apply(AgeOp(200_000, 0, 3).op())
    expiring, found = Expiring(spec.life.expire), []
    for _ in range(0, shard.spill.entries, 1024):
        found += expiring.spilled_piece(shard, 200_000, 1024).tolist()
    held = spilled_keys(shard, 6000)
    assert len(held) > 2000
    assert set(found) <= set(held.tolist())
    assert max(found) < 30 * 100 + 60  # none goes early
    assert set(held[held < 30 * 94].tolist()) <= set(found)
    shard.apply(DeleteOp(np.array(found), 0, len(found), 0, 1).op())
    assert len(shard) == 6000 - len(found)


def test_an_op_larger_than_memory_is_carried_out_in_parts():
    shard, plain = spilling(spec_with()), KeyedShard(spec_with(), 0)
    room = shard.most_rows
    keys = np.concatenate([np.arange(2500), np.arange(2500)])
    for each in (shard, plain):
        push(each, keys, 0.5)
    assert shard.resident <= room
    assert first_difference(shard, plain) is None


def test_what_a_file_cannot_do_says_why():
    with pytest.raises(InputError, match="do not go together"):
        life_of(dps.ExpireUnused("1 day", by="use"), "1 MB", "spill")
    with pytest.raises(InputError, match="name the keys"):
        filled().select(None, 0, 0)
    shard = spilling(spec_with())
    shard.spill.disk.directory = "/nowhere/at/all"
    with pytest.raises(SpillError, match=r"cannot be written.*No such file or directory"):
        grow(shard, 3000)


# ---- Wrong variants


def seeds(check, *numbers: int):
    def checks() -> None:
        for number in numbers:
            check(number)

    return checks


def churn() -> None:
    """Rows go and come all the time, so that what is left of segments is copied."""
    both = Both(spec_with(60_000), np.random.default_rng(0))
    for _ in range(80):
        both.push()
        both.pull()
    both.settle()


BOTH = seeds(check_both, *range(12))
FILE = seeds(check_file, *range(6))
WRONG = {
    "a row comes back without leaving the file": (Spill, "bring", "self.disk.drop(missing, places)", "pass", BOTH),
    "places are those before others went": (
        Spill, "bring", "places = self.disk.find(missing)  #", "places = places[places >= 0]  #", churn),
    "a row goes without its state": (
        Spill, "_let_go", "self.disk.put(keys, rows)", "self.disk.put(keys, rows * 1.01)", BOTH),
    "a row in the file is forgotten where it is pulled": (
        KeyedShard, "_pull", "index[self.spill.peek(keys, index, out)] = 0", "pass", BOTH),
    "a deletion leaves the row in the file": (KeyedShard, "_delete_spilled", "spill.forget(keys)", "pass", BOTH),
    "all go but those in the file": (KeyedShard, "_delete_spilled", "spill.clear()", "pass", BOTH),
    "a row that is deleted is not in an open cut": (
        KeyedShard, "_delete_spilled", "self.cut is not None and not self.cut.is_complete", "False", BOTH),
    "a row that comes is none of an open cut": (
        KeyedShard, "put_in_memory", "self.cut.existing = self.end", "pass", BOTH),
    "a cut ends with memory": (Cut, "pieces", "if self._spilled is not None:", "if False:", BOTH),
    "a cut sees what changes in the file": (Cut, "complete", "frozen=True", "frozen=False", BOTH),
    "rows go while a cut reads": (Spill, "_make_room", "if shard.pins:", "if False:", BOTH),
    "a dump is not pinned for its last rows": (Dump, "_spilled_piece", "if not left and self._pins:", "if not left:",
                                               BOTH),
    "a dump gives what the file had": (Reader, "renew", "self._disk.in_use & ~grown", "np.zeros_like(grown)", BOTH),
    "shrinking loses rows": (Shrinking, "_move", "shard.rows[to] = shard.rows[rows]", "pass", BOTH),
    "shrinking counts wrong": (Shrinking, "_cut", "shard.vacancies -= shard.end - end", "pass", BOTH),
    "rows are cut off that a key has": (
        Shrinking, "turn", "if shard.vacant[self._end : shard.end].all():", "if True:", BOTH),
    "a scan passes over the file": (scan_module, "_window", "or shard.spill is None", "or True", BOTH),
    "segments are used again while they are read": (DiskRows, "_retire", "if self._readers:", "if False:", FILE),
    "moved entries stay in use": (DiskRows, "_collect", "self._leave(places)", "pass", FILE),
    "a cleared file has its rows": (DiskRows, "clear", "bits[:], used[:] = 0, 0", "pass", FILE),
    "a row that was pulled goes": (Spill, "_cold", "keys[~pulled]", "keys", test_rows_that_are_pulled_stay_in_memory),
    "keys cost nothing": (Spill, "_count", "- self.nbytes", "",
                          test_memory_keeps_within_the_budget_and_rows_are_written_once),
    "memory is never given back": (Shrinking, "turn", "shard.end <= wanted", "True",
                                   test_memory_keeps_within_the_budget_and_rows_are_written_once),
    "check sums are not looked at": (DiskRows, "_read", "if wrong >= 0:", "if False:",
                                     test_a_file_that_is_cut_off_or_changed_is_an_error_for_its_rows_alone),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_files_is_caught(name) -> None:
    assert_noticed(*WRONG[name])
