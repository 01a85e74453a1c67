"""Modules of torch on the servers, beside the same models in torch alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import dask  # noqa: E402
import safetensors.torch  # noqa: E402
import scipy.sparse  # noqa: E402
from dask.distributed import Client  # noqa: E402
from oracles import mutant  # noqa: E402
from torch.nn import functional  # noqa: E402

import dps  # noqa: E402
from dps.engine.training.pulled_rows import pull_rows  # noqa: E402
from dps.errors import InputError, InputTypeError, NotFiniteError, UnknownTableError  # noqa: E402
from dps.testing import Faults, Simulation  # noqa: E402
from dps.torch import dense as dense_module  # noqa: E402
from dps.torch import gradients as gradients_module  # noqa: E402

USERS, ITEMS, DIM, BATCH, EPOCHS = 30, 20, 4, 16, 4
rng = np.random.default_rng(0)
DATA = {
    "user": rng.integers(0, USERS, 200) * 1_000_003 - 7,  # any int64 is a key
    "items": rng.integers(0, ITEMS, (200, 3)),
    "label": rng.integers(0, 2, 200).astype(np.float32),
}
OPTIMIZERS = {
    "sgd": (dps.SGD(0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "adagrad": (dps.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adagrad, begun": (
        dps.Adagrad(0.1, eps=1e-6, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, initial_accumulator_value=0.1),
    ),
}


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    cluster = dps.LocalCluster(servers=2, trainers=2, **options)
    with cluster, Client(cluster) as client, dps.ParameterServer(client, servers=2, copies=2) as ps:
        yield ps


@pytest.fixture
def tables(ps):
    """A function that makes the tables of the model, and the model; the tables go with the test."""

    def make(optimizer, **options):
        ps.table("user", dim=DIM, init=dps.Normal(0.5, seed=1), optimizer=optimizer, **options)
        ps.table("items", dim=DIM, init=dps.Normal(0.5, seed=2), optimizer=optimizer, **options)
        return dps.torch.dense_table(ps, "dense", tower(), optimizer=optimizer, **options)

    yield make
    for table in ps.tables():
        ps.drop_table(table)


def tower(seed=3):
    """The dense part of the model; each trainer makes it alike, without the generator that threads share."""
    module = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(0.5 * torch.randn(each.shape, generator=drawn))
    return module


def loss_of(user, items, module, label):
    logits = module(torch.cat([user, items], 1))[:, 0]
    return functional.binary_cross_entropy_with_logits(logits, torch.as_tensor(label))


def train(trainer, partitions, mode="mean", pulled=False):
    users = dps.torch.Embedding(trainer, "user", DIM)
    items = dps.torch.EmbeddingBag(trainer, "items", DIM, mode=mode)
    module = tower(seed=99)  # what the table has counts
    dense = dps.torch.DenseParameters(trainer, "dense", module)
    losses = []
    for batch in trainer.iterate(partitions, epochs=EPOCHS, batch_size=BATCH, shuffle=5):
        dense.pull()
        ids = {name: batch[name] for name in ("user", "items")}
        rows = pull_rows(trainer.client, ids) if pulled else ids
        loss = loss_of(users(rows["user"]), items(rows["items"]), module, batch["label"])
        loss.backward()
        dps.torch.push_gradients(users, items, dense)
        losses.append(loss.item())
    return losses


def train_ahead(trainer, partitions, ahead=1, together=False):
    """The rows of the next batch are pulled while torch computes; the parameters `together` with them, or alone."""
    users = dps.torch.Embedding(trainer, "user", DIM)
    items = dps.torch.EmbeddingBag(trainer, "items", DIM, mode="mean")
    module = tower(seed=99)
    dense = dps.torch.DenseParameters(trainer, "dense", module)
    losses = []

    def wanted(batch):
        return {"user": batch["user"], "items": batch["items"]} | ({"dense": None} if together else {})

    options = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": 5}
    for batch, rows in trainer.iterate(partitions, pull=wanted, ahead=ahead, **options):
        dense.pull(rows.get("dense"))
        loss = loss_of(users(rows["user"]), items(rows["items"]), module, batch["label"])
        loss.backward()
        dps.torch.push_gradients(users, items, dense)
        losses.append(loss.item())
    return losses


class Alone:
    """The same model in torch alone."""

    def __init__(self, ps, make_optimizer, mode="mean", sparse=False):
        self.keys = np.unique(DATA["user"])
        first = {"user": ps.client().pull("user", self.keys), "items": ps.client().pull("items", np.arange(ITEMS))}
        self.users = torch.nn.Embedding.from_pretrained(torch.from_numpy(first["user"]), freeze=False, sparse=sparse)
        weight = torch.from_numpy(first["items"])
        self.items = torch.nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode=mode, sparse=sparse)
        self.module = tower()
        parts = [self.users, self.items, self.module]
        self.optimizers = [make_optimizer(part.parameters()) for part in parts]  # Adagrad takes all sparse, or none

    def loss(self, user, items, label):
        ids = torch.from_numpy(np.searchsorted(self.keys, user))
        return loss_of(self.users(ids), self.items(torch.from_numpy(items)), self.module, label)

    def step(self, **batch):
        for each in self.optimizers:
            each.zero_grad()
        loss = self.loss(**batch)
        loss.backward()
        for each in self.optimizers:
            each.step()
        return loss.item()

    def fit(self):
        count = -(-len(DATA["label"]) // BATCH)
        order = [n for epoch in range(EPOCHS) for n in np.random.default_rng((5, epoch)).permutation(count)]
        return [self.step(**{name: each[n * BATCH : (n + 1) * BATCH] for name, each in DATA.items()}) for n in order]


CASES = [("sgd", "mean", False), ("sgd", "sum", True), ("adagrad", "mean", True), ("adagrad, begun", "sum", False)]


@pytest.mark.parametrize(("name", "mode", "sparse"), CASES)
def test_one_trainer_has_the_losses_and_parameters_of_torch(ps, tables, name, mode, sparse):
    tables(OPTIMIZERS[name][0])
    losses_of_torch(ps, name, mode, sparse)


def losses_of_torch(ps, name, mode, sparse):
    alone = Alone(ps, OPTIMIZERS[name][1], mode, sparse)
    (losses,) = ps.run(train, [dask.delayed(DATA)], args=(mode,), trainers=1)
    np.testing.assert_allclose(losses, alone.fit(), atol=1e-5)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.02
    pulled = ps.client().pull({"user": alone.keys, "items": np.arange(ITEMS), "dense": None})
    np.testing.assert_allclose(pulled["user"], alone.users.weight.detach(), atol=2e-5)
    np.testing.assert_allclose(pulled["items"], alone.items.weight.detach(), atol=2e-5)
    module = [each.detach().numpy().reshape(-1) for each in alone.module.parameters()]
    np.testing.assert_allclose(pulled["dense"], np.concatenate(module), atol=2e-5)


def test_rows_that_are_pulled_already_are_taken(ps, tables):
    tables(dps.SGD(0.3))
    (losses,) = ps.run(train, [dask.delayed(DATA)], args=("mean", True), trainers=1)
    for name in ps.tables():
        ps.drop_table(name)
    tables(dps.SGD(0.3))
    assert ps.run(train, [dask.delayed(DATA)], args=("mean",), trainers=1) == [losses]


@pytest.mark.parametrize(("staleness", "ahead", "together"), [(0, 1, False), (2, 1, True), (2, 0, True), (2, 3, True)])
def test_rows_that_are_pulled_ahead_contain_the_pushes_of_the_trainer(ps, tables, staleness, ahead, together):
    tables(dps.Adagrad(0.1))
    alone = Alone(ps, OPTIMIZERS["adagrad"][1])
    (losses,) = ps.run(train_ahead, [dask.delayed(DATA)], args=(ahead, together), trainers=1, staleness=staleness)
    np.testing.assert_allclose(losses, alone.fit(), atol=1e-5)


def push_and_look(trainer, partitions):
    """What a trainer sees of its own push, at once and after the end of the iteration."""
    w = dps.torch.Embedding(trainer, "w", 1)
    seen = []
    for _ in range(5):
        w([7]).sum().backward()
        w.push()
        seen.append(w([7]).item())
        trainer.tick()
        seen.append(trainer.pull("w", [7]).item())
    return seen


def test_a_trainer_sees_its_push_without_waiting_for_the_answer(ps, tables, monkeypatch):
    ps.table("w", optimizer=dps.SGD(1.0))
    monkeypatch.setattr(dps.Trainer, "push", None)  # because it waits
    (seen,) = ps.run(push_and_look, [dask.delayed(0)], trainers=1)
    assert seen == [-1.0, -1.0, -2.0, -2.0, -3.0, -3.0, -4.0, -4.0, -5.0, -5.0]


def two_forward_passes(ps):
    """One step of Adagrad, for which two steps would not be the same."""
    ps.table("w", dim=2, init=dps.Normal(1.0, seed=4), optimizer=dps.Adagrad(0.1))
    w = dps.torch.Embedding(ps.client(), "w", 2)
    weight = torch.nn.Parameter(w(np.arange(6)).detach())
    ((w([0, 1, 2, 2]) * w([2, 3, 0, 1])).sum() + w([5]).sum() * 0).backward()
    ((weight[[0, 1, 2, 2]] * weight[[2, 3, 0, 1]]).sum() + weight[[5]].sum() * 0).backward()
    torch.optim.Adagrad([weight], lr=0.1).step()
    w.push()
    np.testing.assert_allclose(w(np.arange(6)).detach(), weight.detach(), atol=1e-6)


def test_two_forward_passes_are_one_step(ps, tables):
    two_forward_passes(ps)


WRONG = {  # each with what finds it
    "keys of one batch only": (
        (gradients_module.UnpushedGradients, "summed"),
        ("gather_sum(np.concatenate(keys), np.concatenate(gradients))", "(keys[0], gradients[0])"),
        lambda ps: two_forward_passes(ps),
    ),
    "spent rows are taken again": (
        (gradients_module.UnpushedGradients, "spend"),
        ("lookup.pushed, lookup.gradient = True, None\n    self._lookups = []", "lookup.pushed = True"),
        lambda ps: losses_of_torch(ps, "sgd", "mean", False),
    ),
    "the parameters are not loaded": (
        (dense_module.DenseParameters, "pull"),
        ("each.copy_(", "id("),
        lambda ps: losses_of_torch(ps, "sgd", "mean", False),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_found(ps, tables, name, monkeypatch):
    (owner, method), (old, new), finds = WRONG[name]
    tables(dps.SGD(0.3))
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))
    with pytest.raises(AssertionError):
        finds(ps)


def test_gradients_of_several_backward_passes_add_up(ps, tables):
    ps.table("w", dim=1, optimizer=dps.SGD(1.0))
    w = dps.torch.Embedding(ps.client(), "w", 1)
    out = w(torch.tensor([4, 4, 9]))
    out[:2].sum().backward(retain_graph=True)
    out[2:].sum().backward(retain_graph=True)
    w([4]).sum().backward()
    w.push()
    assert ps.client().pull("w", [4, 9]).tolist() == [-3, -1]
    with pytest.raises(InputError, match=r"backward has come a second time to rows of table 'w'"):
        out.sum().backward()
    with pytest.raises(InputError, match=r"no gradient of table 'w' to push: call loss.backward\(\) first"):
        w.push()
    assert ps.client().pull("w", [4, 9]).tolist() == [-3, -1]


def test_two_modules_of_one_table_are_one_step(ps, tables):
    ps.table("w", dim=2, init=dps.Constant(1.0), optimizer=dps.Adagrad(0.5))
    one, other = dps.torch.Embedding(ps.client(), "w", 2), dps.torch.EmbeddingBag(ps.client(), "w", 2)
    (one([3, 4]).sum() + 2 * other([[3, 5]]).sum()).backward()
    dps.torch.push_gradients(one, other, one)
    np.testing.assert_allclose(ps.client().pull("w", [3, 4, 5]), 0.5)  # the first step of Adagrad is lr
    assert ps.client().pull("w", [6]).tolist() == [[1, 1]]


def test_a_failed_push_keeps_the_gradients(ps, tables):
    ps.table("w", dim=1, init=dps.Constant(1.0), optimizer=dps.SGD(1.0))
    w = dps.torch.Embedding(ps.client(), "w", 1)
    (w([3]) * float("inf")).sum().backward()
    for _ in range(2):
        with pytest.raises(NotFiniteError, match="'w'"):
            w.push()


def test_no_gradient_is_noted_where_none_is_wanted(ps, tables):
    ps.table("w", dim=1, optimizer=dps.SGD(1.0))
    w = dps.torch.Embedding(ps.client(), "w", 1)
    with torch.no_grad():
        assert not w([1, 2]).requires_grad
    w([1]).sum()  # without a backward
    w([2]).sum().backward()
    w.push()
    assert ps.client().pull("w", [1, 2]).tolist() == [0, -1]
    assert list(w.parameters()) == []
    assert repr(w) == "Embedding(table='w', dim=1)"


def test_bags_are_those_of_torch(ps, tables):
    ps.table("w", dim=3, init=dps.Normal(1.0), optimizer=dps.SGD(1.0))
    weight = torch.from_numpy(ps.client().pull("w", np.arange(10)))
    ids, offsets = torch.tensor([1, 2, 2, 9, 4]), torch.tensor([0, 3, 3])
    for mode in ("sum", "mean"):
        bag = dps.torch.EmbeddingBag(ps.client(), "w", 3, mode=mode)
        torch.testing.assert_close(bag(ids, offsets), functional.embedding_bag(ids, weight, offsets, mode=mode))
    weights, bag = torch.rand(5), dps.torch.EmbeddingBag(ps.client(), "w", 3)
    expected = functional.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=weights)
    torch.testing.assert_close(bag(ids, offsets, weights), expected)
    X = scipy.sparse.random_array((6, 10), density=0.3, format="csr", dtype=np.float64, rng=rng)
    torch.testing.assert_close(bag(X), torch.from_numpy((X @ weight.numpy()).astype(np.float32)))
    bag(X).sum().backward()
    bag.push()
    np.testing.assert_allclose(
        ps.client().pull("w", np.arange(10)), weight.numpy() - X.toarray().sum(0)[:, None], rtol=1e-5, atol=1e-5
    )


def test_tables_of_float64_and_dense_ones(ps, tables):
    ps.table("w", rows=5, dim=2, dtype="float64", optimizer=dps.SGD(0.5))
    w = dps.torch.Embedding(ps.client(), "w", 2)
    out = w(torch.zeros((0,), dtype=torch.int64))
    assert out.shape == (0, 2)
    assert out.dtype == torch.float64
    (w(np.array([[4, 0]], np.int32)).sum() + out.sum()).backward()
    w.push()
    assert ps.client().pull("w").tolist() == [[-0.5] * 2, [0, 0], [0, 0], [0, 0], [-0.5] * 2]
    assert w([]).shape == (0, 2)


@pytest.mark.parametrize("wire", [None, "auto", dps.Wire("float16", lists=True)])
def test_the_table_of_a_module_travels_as_it_is_unless_a_wire_is_given(ps, tables, wire):
    table = tables(dps.SGD(0.1)) if wire is None else tables(dps.SGD(0.1), wire=wire)
    named = {
        None: dps.Wire(local=False, lists=True),
        "auto": dps.Wire("bfloat16", "bfloat16", False, True, measured=True),
    }
    assert table.spec.wire == named.get(wire, wire)


def test_a_narrow_wire_of_a_module_of_float64_is_refused(ps, tables):
    with pytest.raises(InputError, match="this table has float64: leave out pull= and push=, or pass wire='lists'"):
        dps.torch.dense_table(ps, "dense", tower().double(), optimizer=dps.SGD(0.5), wire=dps.Wire("bfloat16"))
    assert not ps.tables()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tables_of_16_bits_are_trained_in_float32(ps, tables, tmp_path, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    ps.table("h", rows=5, dim=2, dtype=dtype, optimizer=dps.SGD(0.1))
    dense = dps.torch.dense_table(ps, "dense", tower(), optimizer=dps.SGD(0.5), dtype=dtype)
    h, module = dps.torch.Embedding(ps.client(), "h", 2), tower(99)
    out = h([4, 0])
    assert out.dtype == torch.float32
    out.sum().backward()
    h.push()
    rounded = torch.tensor(-0.1).to(getattr(torch, dtype)).float()
    assert h([4, 1]).detach().tolist() == [[rounded] * 2, [0, 0]]
    held = dps.torch.DenseParameters(ps.client(), "dense", module)
    held.pull()
    for mine, theirs in zip(module.parameters(), tower().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.to(getattr(torch, dtype)).float(), rtol=0, atol=0)
    before = ps.client().pull("dense").tobytes()
    dps.torch.save(tmp_path / "halves.safetensors", h, held)
    dense.assign(None, np.zeros(len(dense)))
    dps.torch.load(tmp_path / "halves.safetensors", h, held)
    assert ps.client().pull("dense").tobytes() == before
    assert h([4]).detach().tolist() == [[rounded] * 2]


# Several trainers


def test_two_trainers_of_averaging_tables_take_the_steps_of_the_joint_batches(ps, tables):
    tables(dps.SGD(0.3), aggregate="mean")
    alone = Alone(ps, OPTIMIZERS["sgd"][1])
    halves = [{name: each[n:192:2] for name, each in DATA.items()} for n in (0, 1)]
    losses = ps.run(train, [dask.delayed(half) for half in halves], trainers=2, staleness=0)
    count = 192 // (2 * BATCH)
    order = [n for epoch in range(EPOCHS) for n in np.random.default_rng((5, epoch)).permutation(count)]
    expected = [
        alone.step(**{name: each[n * 2 * BATCH : (n + 1) * 2 * BATCH] for name, each in DATA.items()}) for n in order
    ]
    np.testing.assert_allclose(np.mean(losses, axis=0), expected, atol=1e-5)


X = rng.normal(size=(40, 6)).astype(np.float32)
Y = (X @ rng.normal(size=6) + 0.1 * rng.normal(size=40)).astype(np.float32)


def network(seed, width=8):
    module = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(0.3 * torch.randn(each.shape, generator=drawn))
    return module


def data_parallel(trainer, partitions, sizes, width=8, dies=None):
    """Batches of sizes that differ between the trainers; the second one has no batch in the last step."""
    module = network(trainer.number, width)
    dps.torch.broadcast_parameters(module, trainer)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    ((x, y),) = partitions
    size = sizes[trainer.partition_numbers[0]]
    for step in range(6):
        if dies == (trainer.number, step) and trainer.attempt == 0:
            raise OSError("lost")
        n = slice(step * size, (step + 1) * size)
        optimizer.zero_grad()
        if len(y[n]):
            functional.mse_loss(module(torch.from_numpy(x[n]))[:, 0], torch.from_numpy(y[n])).backward()
        dps.torch.allreduce_gradients(module, trainer, weight=len(y[n]))
        optimizer.step()
        trainer.tick()
    return [each.detach().numpy() for each in module.parameters()]


def in_one_process(sizes, width=8):
    module = network(0, width)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(6):
        first = np.arange(25)[step * sizes[0] : (step + 1) * sizes[0]]
        n = np.append(first, np.arange(25, 40)[step * sizes[1] : (step + 1) * sizes[1]])
        optimizer.zero_grad()
        functional.mse_loss(module(torch.from_numpy(X[n]))[:, 0], torch.from_numpy(Y[n])).backward()
        optimizer.step()
    return [each.detach().numpy() for each in module.parameters()]


@pytest.mark.parametrize("width", [8, 20_000], ids=["small", "ring"])
def test_averaged_gradients_are_those_of_the_joint_batch(ps, width):
    parts = [dask.delayed((X[:25], Y[:25])), dask.delayed((X[25:], Y[25:]))]
    one, other = ps.run(data_parallel, parts, args=((4, 3), width), trainers=2)
    for mine, theirs, alone in zip(one, other, in_one_process((4, 3), width), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, alone, atol=3e-5)  # the order of sums depends on the threads of torch


def test_a_trainer_that_is_run_again_takes_the_same_averages(ps):
    parts = [dask.delayed((X[:25], Y[:25])), dask.delayed((X[25:], Y[25:]))]
    one, other = ps.run(data_parallel, parts, args=((4, 3), 8, (1, 3)), trainers=2, retries=1)
    for mine, theirs, alone in zip(one, other, in_one_process((4, 3)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(mine, alone, atol=1e-5)


def test_averages_without_weights_and_without_gradients(ps):
    def average(trainer, partitions):
        module = torch.nn.Linear(1, 1, dtype=torch.float64)
        if trainer.number:
            module.weight.grad = torch.full_like(module.weight, 3.0)
        dps.torch.allreduce_gradients(module, trainer)
        with pytest.raises(InputError, match="weights are 0 on all trainers"):
            dps.torch.allreduce_gradients(module, trainer, weight=0)
        for wrong in (-1, float("nan")):
            with pytest.raises(InputError, match="weight is a finite number, 0 or more"):
                dps.torch.allreduce_gradients(module, trainer, weight=wrong)
        with pytest.raises(InputError, match="broadcast from trainer 2: the run has trainers 0 to 1"):
            dps.torch.broadcast_parameters(module, trainer, 2)
        return module.weight.grad.item(), module.bias.grad.item()

    assert ps.run(average, np.zeros(2), trainers=2) == [(1.5, 0.0)] * 2


# Failures


def one_epoch(trainer, partitions, dies):
    """As `train`, without a module of torch whose first values matter."""
    w = dps.torch.Embedding(trainer, "w", 2)
    line = torch.nn.Linear(2, 1)
    dense = dps.torch.DenseParameters(trainer, "line", line)
    for batch in trainer.iterate(partitions, epochs=3):
        dense.pull()
        (line(w(batch)).square().sum() + w(batch).sum()).backward()
        dps.torch.push_gradients(w, dense)
        if dies and trainer.clock == dies and trainer.attempt == 0:
            raise OSError("lost after its push")


@pytest.mark.parametrize("dies", [1, 4, 5])
def test_a_trainer_that_is_run_again_makes_the_same_tables(ps, tables, dies):
    made = []
    for when in (None, dies):
        ps.table("w", dim=2, init=dps.Normal(0.5, seed=1), optimizer=dps.Adagrad(0.2))
        line = torch.nn.Linear(2, 1)
        with torch.no_grad():
            line.weight[:], line.bias[:] = 0.5, 0.1
        dps.torch.dense_table(ps, "line", line, optimizer=dps.SGD(0.05))
        batches = [dask.delayed([np.array([n, n + 1, 1]) for n in range(3)])]
        ps.run(one_epoch, batches, args=(when,), trainers=1, retries=1)
        made.append(ps.client().pull({"w": np.arange(5), "line": None}))
        for table in ("w", "line"):
            ps.drop_table(table)
    for name in made[0]:
        np.testing.assert_array_equal(made[0][name], made[1][name])


@pytest.mark.parametrize("seed", range(4))
def test_gradients_count_once_when_trainers_and_servers_are_lost(seed):
    """Gradients of ones: each row is minus the number of times that it was looked up."""

    def count(trainer, partitions):
        w = dps.torch.Embedding(trainer, "w", 1)
        for batch in trainer.iterate(partitions, epochs=2):
            w(batch).sum().backward()
            w.push()

    batches = [np.random.default_rng((seed, n)).integers(0, 8, 6) for n in range(10)]
    faults = Faults(crashes=1.0, repeats=0.2, twins=0.2, restart=0.2)
    with Simulation(seed, servers=2, trainers=2, copies=2, faults=faults, compute=0.1) as sim:
        sim.table("w", optimizer=dps.SGD(1.0))
        for n in range(2):
            sim.crash(f"trainer-{n}", at=0.2 + 0.11 * (seed + n))
        sim.run(count, batches, staleness=1)
        expected = -2 * np.bincount(np.concatenate(batches), minlength=8)
        assert sim.client().pull("w", np.arange(8)).tolist() == expected.tolist()


# Files


def test_what_is_saved_is_loaded(ps, tables, tmp_path):
    tables(dps.Adagrad(0.1))
    ps.table("wide", optimizer=dps.SGD(0.1))
    ps.table("slots", rows=4, dim=2, optimizer=dps.SGD(0.1))
    ps.run(train, [dask.delayed(DATA)], trainers=1)
    ps.client().push({"wide": ([5, -3], [1.0, 2.0]), "slots": ([1], [[1.0, 2.0]])})
    client, module = ps.client(), tower(99)

    def modules():
        bags = [dps.torch.EmbeddingBag(client, name, dim) for name, dim in (("items", DIM), ("wide", 1), ("slots", 2))]
        return dps.torch.Embedding(client, "user", DIM), *bags, dps.torch.DenseParameters(client, "dense", module)

    keys = {"user": np.unique(DATA["user"]), "items": np.arange(ITEMS), "wide": [5, -3], "slots": None, "dense": None}
    before, path = client.pull(keys), tmp_path / "model.safetensors"
    dps.torch.save(path, *modules())

    file = safetensors.torch.load_file(path)
    dps.torch.DenseParameters(client, "dense", module).pull()
    for name, each in module.named_parameters():
        torch.testing.assert_close(file[f"dense.{name}"], each.detach(), rtol=0, atol=0)
    assert file["user.keys"].tolist() == keys["user"].tolist()
    assert file["wide.keys"].tolist() == [-3, 5]
    served = torch.nn.EmbeddingBag.from_pretrained(file["items.values"])
    np.testing.assert_array_equal(served.weight.numpy(), before["items"])

    for name in ps.tables():
        ps.drop_table(name)
    tables(dps.SGD(1.0))
    ps.table("wide", optimizer=dps.SGD(0.1))
    ps.table("slots", rows=4, dim=2, optimizer=dps.SGD(0.1))
    dps.torch.load(path, *modules())
    after = client.pull(keys)
    for name in keys:
        np.testing.assert_array_equal(after[name], before[name])


def test_files_that_do_not_fit(ps, tables, tmp_path):
    tables(dps.SGD(0.1))
    client, path = ps.client(), tmp_path / "items.safetensors"
    items = dps.torch.Embedding(client, "items", DIM)
    dps.torch.save(path, items)  # a table without rows
    dps.torch.load(path, items)
    with pytest.raises(InputError, match=r"no tensor 'user.keys'; it has items.keys, items.values"):
        dps.torch.load(path, dps.torch.Embedding(client, "user", DIM))
    with pytest.raises(InputError, match=r"no tensor 'dense.0.weight'"):
        dps.torch.load(path, items, dps.torch.DenseParameters(client, "dense", tower()))
    ps.drop_table("items")
    ps.table("items", dim=2, optimizer=dps.SGD(0.1))
    with pytest.raises(InputError, match=r"'items.values' is of the shape \(0, 4\), and \(0, 2\) is wanted"):
        dps.torch.load(path, dps.torch.Embedding(client, "items", 2))
    safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"of the format None, not 'dps.torch 1'"):
        dps.torch.load(tmp_path / "other.safetensors", items)
    (tmp_path / "text").write_text("no tensors at all")
    with pytest.raises(InputError, match=r"no file that dps.torch.save has written, or it is damaged"):
        dps.torch.load(tmp_path / "text", items)
    with pytest.raises(InputTypeError, match=r"take modules of torch and DenseParameters, not str"):
        dps.torch.save(path, "items")
    with pytest.raises(InputError, match=r"the module ReLU has no embedding of dps and no state"):
        dps.torch.save(path, torch.nn.ReLU())
    with pytest.raises(InputError, match=r"two of the modules have a tensor '0.bias'"):
        dps.torch.save(path, tower(), tower())


class Recommender(torch.nn.Module):
    """A module of a user: two embeddings on the servers, and layers in the trainer, of which one is tied."""

    def __init__(self, client, seed):
        super().__init__()
        self.user, self.items = (dps.torch.Embedding(client, name, DIM) for name in ("user", "items"))
        torch.manual_seed(seed)
        self.tower = torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.BatchNorm1d(DIM))
        self.again = self.tower[0]


def test_a_module_with_embeddings_in_it(ps, tables, tmp_path):
    tables(dps.SGD(1.0))
    ps.client().push({"user": ([5, -3], np.ones((2, DIM))), "items": ([2], np.ones((1, DIM)))})
    client, path = ps.client(), tmp_path / "model.safetensors"
    before, module = client.pull({"user": [5, -3], "items": [2]}), Recommender(client, 1)
    module.tower[1].running_mean += 3.0
    dps.torch.save(path, module, module.user)
    file = safetensors.torch.load_file(path)
    assert file.keys() >= {"user.keys", "user.values", "items.keys", "items.values", "tower.1.running_mean"}
    assert file["user.keys"].tolist() == [-3, 5]

    ps.client().push({"user": ([5, -3], np.ones((2, DIM))), "items": ([2], np.ones((1, DIM)))})
    other = Recommender(client, 2)
    assert not torch.equal(other.tower[0].weight, module.tower[0].weight)
    dps.torch.load(path, other)
    for name, values in client.pull({"user": [5, -3], "items": [2]}).items():
        np.testing.assert_array_equal(values, before[name])
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)

    third = Recommender(client, 3)
    third.tower.append(torch.nn.Linear(DIM, 1))
    ps.client().push("items", [2], np.ones((1, DIM)))
    rows, weight = client.pull("items", [2]), third.tower[0].weight.detach().clone()
    with pytest.raises(InputError, match=r"no tensor 'tower.2.weight'"):
        dps.torch.load(path, third)
    np.testing.assert_array_equal(client.pull("items", [2]), rows)
    assert torch.equal(third.tower[0].weight, weight)


# Partitions as tensors


def test_batches_of_partitions_are_tensors():
    parts = [{"x": np.arange(5, dtype=">f4"), "y": ["a"] * 5}, {"x": np.arange(5, 8, dtype=">f4"), "y": ["b"] * 3}]
    dataset = dps.torch.PartitionDataset(parts, batch_size=2, shuffle=3)
    assert len(dataset) == 5
    first, second = (
        [batch["x"].tolist() for batch in torch.utils.data.DataLoader(dataset, batch_size=None)] for _ in "ab"
    )
    assert sorted(first) == sorted(second) == [[0, 1], [2, 3], [4], [5, 6], [7]]
    assert first != second
    again = dps.torch.PartitionDataset(parts, batch_size=2, shuffle=3)
    assert [batch["x"].tolist() for batch in again] == first
    assert [batch["y"] for batch in dps.torch.PartitionDataset(parts)] == [["a"] * 5, ["b"] * 3]


def test_tensors_of_arrays_that_may_not_be_written_to_are_copies():
    x = np.arange(3.0)
    x.flags.writeable = False
    (batch,) = dps.torch.PartitionDataset([x])
    batch += 1
    assert x.tolist() == [0, 1, 2]


# What is refused


@pytest.mark.parametrize("ids", [[0.5, 1.0], torch.tensor([1.0]), np.array(["a"]), torch.tensor([True])])
def test_ids_are_integers(ps, tables, ids):
    ps.table("w", optimizer=dps.SGD(0.1))
    with pytest.raises(InputTypeError, match=r"table 'w' is looked up by integer ids, not by"):
        dps.torch.Embedding(ps.client(), "w", 1)(ids)


def test_tables_that_do_not_fit(ps, tables):
    client = ps.client()
    ps.table("w", dim=3, optimizer=dps.SGD(0.1))
    ps.table("sums", dim=3)
    ps.table("last", dim=3, optimizer=dps.Assign())
    ps.table("whole", dim=3, dtype="int64")
    with pytest.raises(UnknownTableError, match="nowhere"):
        dps.torch.Embedding(client, "nowhere", 3)
    with pytest.raises(InputError, match=r"table 'w' has rows of 3 numbers, and the embedding was asked for dim=4"):
        dps.torch.Embedding(client, "w", 4)
    with pytest.raises(
        InputError, match=r"'sums' has the optimizer dps.Add\(\), so a pushed gradient would be added to"
    ):
        dps.torch.Embedding(client, "sums", 3)
    with pytest.raises(InputError, match=r"'last' has the optimizer dps.Assign\(\), so .* in the place of the rows"):
        dps.torch.EmbeddingBag(client, "last", 3)
    with pytest.raises(InputError, match=r"'whole' is of int64, and torch trains fractions"):
        dps.torch.Embedding(client, "whole", 3)
    with pytest.raises(InputTypeError, match=r"through a dps.Trainer or dps.Client, not Linear"):
        dps.torch.Embedding(torch.nn.Linear(1, 1), "w", 3)
    with pytest.raises(InputError, match=r"mode is 'sum' or 'mean', not 'max'"):
        dps.torch.EmbeddingBag(client, "w", 3, mode="max")
    ps.table("user", dim=2, optimizer=dps.SGD(0.1))
    with pytest.raises(InputError, match=r"rows of 3 numbers, and these pulled rows have 2: they are of another table"):
        dps.torch.Embedding(client, "w", 3)(pull_rows(client, {"user": [1]})["user"])


def test_ids_that_do_not_fit(ps, tables):
    ps.table("w", dim=3, optimizer=dps.SGD(0.1))
    w, bag = dps.torch.Embedding(ps.client(), "w", 3), dps.torch.EmbeddingBag(ps.client(), "w", 3, mode="mean")
    X = scipy.sparse.csr_array(np.eye(3))
    with pytest.raises(InputTypeError, match=r"takes ids, not a sparse matrix: dps.torch.EmbeddingBag sums"):
        w(X)
    with pytest.raises(InputError, match=r"a sparse matrix has bags and weights of its own"):
        bag(X)
    with pytest.raises(InputError, match=r"these have 1 axes, no offsets"):
        bag([1, 2])
    with pytest.raises(InputError, match=r"these have 2 axes, and there are offsets"):
        bag([[1, 2]], [0])


def test_modules_that_do_not_fit(ps, tables):
    tables(dps.SGD(0.1))
    client = ps.client()
    with pytest.raises(InputError, match=r"81 rows of 1, and the module Linear has 2 parameters"):
        dps.torch.DenseParameters(client, "dense", torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"'user' is a keyed table, and the module Linear"):
        dps.torch.DenseParameters(client, "user", torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"the module Tanh has no parameters that want a gradient"):
        dps.torch.DenseParameters(client, "dense", torch.nn.Tanh())
    with pytest.raises(InputTypeError, match=r"those of a torch.nn.Module, not ndarray"):
        dps.torch.dense_table(ps, "other", np.zeros(3), optimizer=dps.SGD(0.1))
    module = tower()
    dense = dps.torch.DenseParameters(client, "dense", module)
    assert repr(dense) == "<dps.torch.DenseParameters: 81 in table 'dense'>"
    for rows in (slice(0, 80), np.arange(81)):  # these are in the order of their hashes
        with pytest.raises(InputError, match=r"'dense' has 81 parameters, and these are <PulledRows: 8[01] keys"):
            dense.pull(pull_rows(client, {"dense": rows})["dense"])
    with pytest.raises(InputError, match=r"no gradient of table 'dense' to push: call loss.backward\(\) first"):
        dense.push()
    twin = dps.torch.DenseParameters(client, "dense", tower())
    for each in (dense, twin):
        for parameter in each.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InputError, match=r"'dense' is that of two DenseParameters"):
        dps.torch.push_gradients(dense, twin)
    with pytest.raises(InputTypeError, match=r"takes the modules whose gradients"):
        dps.torch.push_gradients()


def test_a_parameter_without_a_gradient_is_not_stepped(ps, tables):
    pair = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    dps.torch.dense_table(ps, "pair", pair, optimizer=dps.Momentum(0.1))
    dense = dps.torch.DenseParameters(ps.client(), "pair", pair)
    theirs = torch.optim.SGD([each.clone().detach().requires_grad_() for each in pair.parameters()], 0.1, momentum=0.9)
    for used in (1, 0, 0):
        dense.pull()
        pair[used](torch.ones(3, 2)).square().sum().backward()
        for ours, parameter in zip(pair.parameters(), theirs.param_groups[0]["params"], strict=True):
            parameter.grad = None if ours.grad is None else ours.grad.clone()
        theirs.step()
        dense.push()
    dense.pull()
    for ours, parameter in zip(pair.parameters(), theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(ours.detach(), parameter.detach(), rtol=0, atol=1e-6)
