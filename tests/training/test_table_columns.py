"""Tables with columns= on servers: every call against tables of one column each, in clients, trainers, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import COLUMNS

import dps
from dps.errors import InputError, InputTypeError, NameInUseError, NotFiniteError, UnknownColumnError

ROLES = {
    "w": dps.Column(1, optimizer=dps.FTRL(0.1, l1=0.1)),
    "v": dps.Column(8, init=dps.Normal(0.05), optimizer=dps.Adagrad(0.05, l2=1e-4, initial_accumulator=0.1)),
}


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=3, trainers=2, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2, copies=2) as ps,
    ):
        yield ps


class Twin:
    """A table with columns, and a table for each of its columns."""

    def __init__(self, ps: dps.ParameterServer, name: str, columns: dict[str, dps.Column], **options):
        self.table = ps.table(name, columns=columns, **options)
        self.parts = {
            column: ps.table(f"{name} {column}", c.dim, init=c.init, optimizer=c.optimizer, **options)
            for column, c in columns.items()
        }
        self.columns = columns

    def gradients(self, rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {
            name: rng.normal(size=shape if c.dim == 1 else (*shape, c.dim)).astype("float32")
            for name, c in self.columns.items()
        }

    def compare(self, keys, rows: np.ndarray | None = None) -> None:
        split = self.table.columns.split(self.table.pull(keys) if rows is None else rows)
        for name, part in self.parts.items():
            np.testing.assert_array_equal(split[name], part.pull(keys))


def test_any_way_to_push(ps) -> None:
    twin, rng = Twin(ps, "ways", ROLES), np.random.default_rng(1)
    several = Twin(ps, "several", ROLES)
    verbs = ["push", "push_async", "push_pull", "push_pull_async"]
    for n in range(16):
        keys = rng.integers(0, 50, (3, 5)) if n % 3 else rng.integers(0, 50, 20).tolist()
        given = twin.gradients(rng, np.shape(keys))
        made = getattr(twin.table, verbs[n % 4])(keys, given)
        for name, part in twin.parts.items():
            part.push(keys, given[name])
        made = made.result() if hasattr(made, "result") else made
        if made is not None:
            twin.compare(keys, made)
        ps.client().push({several.table: (keys, given), **{several.parts[c]: (keys, given[c]) for c in given}})
    for each in (twin, several):
        each.compare(np.arange(-3, 60))
        assert len(each.table) == len(each.parts["v"]) <= 50
    twin.table.delete(np.arange(10))
    for part in twin.parts.values():
        part.delete(np.arange(10))
    twin.compare(np.arange(60))


def test_whole_rows_and_numbers_for_all(ps) -> None:
    """An array of whole rows, a number for all keys, other dtypes, and a dense table by slices."""
    twin = Twin(ps, "dense", {"a": dps.Column(2, optimizer=dps.Adam(0.1)), "b": dps.Column()}, rows=30)
    rows = np.random.default_rng(2).normal(size=(30, 3))
    twin.table.push(None, rows.astype("float32"))
    twin.table.push(slice(4, 9), {"b": 2, "a": np.float64(0.5)})
    twin.table.push([1, 2], {"a": [[1, 2], [3, 4]], "b": np.array([1.0, -1.0])})
    twin.table.add(slice(0, 2), {"a": 1.0, "b": [1.0, 2.0]})
    for name, where in (("a", slice(0, 2)), ("b", 2)):
        part = twin.parts[name]
        part.push(None, rows[:, where].astype("float32"))
        part.push(slice(4, 9), 0.5 if name == "a" else 2.0)
        part.push([1, 2], [[1, 2], [3, 4]] if name == "a" else [1.0, -1.0])
        part.add(slice(0, 2), 1.0 if name == "a" else [1.0, 2.0])
    twin.compare(None)
    twin.table[3] = {"a": [7.0, 8.0], "b": 9.0}
    assert twin.table[3].tolist() == [7, 8, 9]
    assert ps.client().columns("dense") == twin.table.columns == {"a": slice(0, 2), "b": slice(2, 3)}


def test_trainers(ps) -> None:
    """Schedules, a mean, n_fetch and n_push, increments; the same on tables apart."""
    columns = {"u": dps.Column(2, dps.Normal(1.0), dps.Adam(dps.Exponential(0.1, factor=0.5))), "n": dps.Column()}
    mean = Twin(ps, "mean", columns, aggregate="mean")
    gathered, merged = Twin(ps, "gathered", columns), Twin(ps, "merged", columns)

    def train(trainer, parts):
        assert list(trainer.columns("mean")) == ["u", "n"]
        for n in range(3):
            rng = np.random.default_rng([n, trainer.number])
            keys = rng.permutation(20)[:10]
            given = {"u": rng.integers(-8, 8, (10, 2)) / 8, "n": rng.integers(-8, 8, 10) / 8}
            trainer.push("mean", keys, given)
            trainer.increment("merged", keys, given)
            for name, values in given.items():
                trainer.push(f"mean {name}", keys, values)
                trainer.increment(f"merged {name}", keys, values)
            trainer.tick()
        for batch in trainer.iterate([np.arange(8)], batch_size=2, n_fetch=2, n_push=2) if trainer.number == 0 else ():
            rows = trainer.columns("gathered").split(trainer.pull("gathered", batch))
            trainer.push("gathered", batch, {"u": rows["u"], "n": rows["n"] + 1})
            for name in columns:
                values = trainer.pull(f"gathered {name}", batch)
                trainer.push(f"gathered {name}", batch, values if name == "u" else values + 1)
        return trainer.number

    ps.run(train, list(range(2)), trainers=2)
    for twin in (mean, gathered, merged):
        twin.compare(np.arange(20))
    assert mean.table.pull(range(20)).any(axis=0).all()


def test_checkpoints_moves_and_lost_servers(ps, tmp_path) -> None:
    twin, rng = Twin(ps, "kept", COLUMNS), np.random.default_rng(3)
    keys = np.arange(100)

    def push() -> None:
        given = twin.gradients(rng, keys.shape)
        twin.table.push(keys, given)
        for name, part in twin.parts.items():
            part.push(keys, given[name])

    push()
    before = twin.table.pull(keys)
    ps.checkpoint(str(tmp_path))
    ps.scale(3)  # shards move, with their state
    push()
    twin.compare(keys)
    ps.scale(2)
    push()
    twin.compare(np.arange(-5, 120))
    exported = ps.export("kept")
    np.testing.assert_array_equal(np.asarray(exported[1])[np.argsort(exported[0])], twin.table.pull(keys))
    ps.restore(str(tmp_path), tables=["kept", *(f"kept {name}" for name in COLUMNS)])
    spec = twin.table.spec
    twin.table, twin.parts = ps.tables()["kept"], {name: ps.tables()[f"kept {name}"] for name in COLUMNS}
    np.testing.assert_array_equal(twin.table.pull(keys), before)
    restored = twin.table.spec
    assert (restored.columns, restored.optimizer, restored.init) == (spec.columns, spec.optimizer, spec.init)
    push()  # the state has come along
    twin.compare(np.arange(-5, 120))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dim": 9}, InputError, r"table 'bad': columns= says dim for each column, so leave it out"),
        ({"optimizer": dps.SGD(0.1), "init": dps.Zeros()}, InputError, "columns= says optimizer, init for each column"),
        ({"columns": {}}, InputError, "one or more"),
        ({"columns": {"a b": dps.Column()}}, InputError, "is an identifier"),
        ({"columns": {"v": 8}}, InputTypeError, r"column 'v' is a dps\.Column"),
        (
            {"dtype": "int64"},
            InputError,
            r"w=FTRL, v=Adagrad\) works on float32, .*, not int64",
        ),
    ],
)
def test_tables_that_cannot_be(ps, options, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        ps.table("bad", **{"columns": ROLES, **options})


def test_what_a_push_refuses(ps) -> None:
    table, plain = ps.table("strict", columns=ROLES), ps.table("plain")
    assert ps.table("strict", columns=ROLES, exist_ok=True).spec == table.spec
    with pytest.raises(NameInUseError, match=r"differs: optimizer is ColumnOptimizers.* init is ColumnInitializers"):
        ps.table("strict", columns=dict(reversed(ROLES.items())), exist_ok=True)
    good = {"w": np.zeros(2, "float32"), "v": np.zeros((2, 8), "float32")}
    for given, error, words in [
        ({"v": good["v"]}, InputError, "table 'strict': no values for column w: a push has those of all columns"),
        ({**good, "x": 1.0}, UnknownColumnError, "table 'strict' has no column 'x'; it has w, v"),
        ({**good, "v": np.zeros((2, 7))}, InputError, r"'strict', column 'v': 2 keys of dim 8 take .* not \(2, 7\)"),
        ({**good, "w": np.zeros(3)}, InputError, r"column 'w': 2 keys of dim 1 take .* not \(3,\)"),
        ({**good, "w": np.array(["a", "b"])}, InputError, "column 'w' holds float32; values of <U1 would lose numbers"),
        ({**good, "w": np.array([0, np.nan])}, NotFiniteError, "column 'w' refuses NaN and infinity; row 1"),
    ]:
        for keys in (np.arange(2), [0, 1]):  # the plain way, and the general one
            with pytest.raises(error, match=words):
                table.push(keys, given)
    with pytest.raises(InputError, match=r"ColumnOptimizers\(w=FTRL, v=Adagrad\) derives the values from its state"):
        table.assign([1], {"w": 1.0, "v": 1.0})
    for keys in (np.arange(2), [0, 1]):
        with pytest.raises(InputTypeError, match="table 'plain' was made without columns=: its values are an array"):
            plain.push(keys, {"w": 1.0})
    with pytest.raises(UnknownColumnError):
        plain.columns["w"]
    assert len(table) == len(plain) == 0
