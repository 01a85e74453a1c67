"""`dask ps`: each command, for people and for programs; how it fails. On a cluster of this process."""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask.distributed import Client, Security
from shell import DASK, RUNNER
from sklearn.datasets import dump_svmlight_file
from sklearn.metrics import log_loss, roc_auc_score

import dps
from dps.engine.cli import ps as group
from dps.engine.cli.common import TextTable, _rich, plain, show
from dps.errors import InputError
from dps.models import LogisticRegression, read_files

ADDRESS = "DASK_SCHEDULER_ADDRESS"


@pytest.fixture(scope="module")
def cluster():
    options = {"processes": False, "protocol": "tcp", "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def run(cluster):
    """`dask ps ARGS`: its result, which has to be a success unless told otherwise."""

    def run(*args, status=0, scheduler=cluster.scheduler_address):
        where = ["--scheduler", scheduler] if scheduler else []
        result = RUNNER.invoke(group, [*map(str, args), *where])
        assert result.exit_code == status, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client, servers=2, copies=2) as ps:
        ps.table("counts", dtype="int64")
        ps.table("w", 2, rows=6, optimizer=dps.SGD(0.5), copies=1)
        ps.client().push("counts", [7, 8, 9], [1, 2, 3])
        yield ps


def test_status(run, ps):
    about = json.loads(run("status", "--json").stdout)
    assert about["name"] == "dps"
    assert [server["state"] for server in about["servers"]] == ["up", "up"]
    lines = run("status").stdout.splitlines()
    assert lines[0].endswith("2 of 2 servers, 2 tables, 9 rows, 0 runs going on")
    assert lines[1].split() == ["server", "worker", "state", "rows", "memory", "requests", "clients", "load"]
    assert [line.split()[:3] for line in lines[2:4]] == [
        [str(server["number"]), server["worker"], "up"] for server in about["servers"]
    ]
    assert sum(int(line.split()[3]) for line in lines[2:4]) == 9


def test_status_dates_what_happened_and_leaves_out_what_has_ended(run, ps, cluster):
    session = cluster.scheduler.plugins["dps-controller"].sessions["dps"]

    def note():
        session.membership.note("run 9: trainer 0 is slow (permanent)", stands=lambda: 9 in session.runs.runs)
        session.membership.note("server 7 is to go", stands=session.membership._is_member(7))
        session.membership.note("server 0 is to go", stands=session.membership._is_member(0))

    session.membership.endpoint.call(note)
    text = run("status").stdout
    (line,) = [line for line in text.splitlines() if line.endswith("server 0 is to go")]
    when = dt.datetime.strptime(line.split("  ")[0], "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=dt.UTC)
    assert abs(time.time() - when.timestamp()) < 300
    assert "run 9" not in text
    assert "server 7" not in text
    about = json.loads(run("status", "--json").stdout)
    assert [what for _, what in about["events"]][-3:-1] == ["run 9: trainer 0 is slow (permanent)", "server 7 is to go"]
    assert [what for _, what in about["news"]][-1] == "server 0 is to go"


def test_tables(run, ps):
    counts, w = json.loads(run("tables", "--json").stdout)
    assert (counts["name"], counts["keys"], counts["copies"], counts["rows"]) == ("counts", None, 2, 3)
    assert (w["keys"], w["dim"], w["dtype"], w["copies"], w["optimizer"]) == (6, 2, "float32", 1, repr(dps.SGD(0.5)))
    lines = run("tables").stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("hottest key")
    assert lines[1].startswith("counts  any key")


def test_clocks(run, ps):
    assert run("clocks").stdout == "no run yet\n"

    def train(trainer, partitions):
        for _ in trainer.iterate(partitions, epochs=3):
            pass

    data = ps.dask_client.scatter([np.arange(2), np.arange(2)])
    ps.run(train, data, staleness=1)
    (described,) = json.loads(run("clocks", "--json").stdout)
    assert [trainer["clock"] for trainer in described["trainers"]] == [3, 3]
    lines = [line.split() for line in run("clocks").stdout.splitlines()]
    assert lines[1:] == [["1", "0", "3", "3", "1", "left"], ["1", "1", "3", "3", "1", "left"]]


def test_split(run, ps):
    before = ps.status().tables["counts"].shards
    assert run("split", "counts").stdout == f"table counts: {2 * before} shards\n"
    assert json.loads(run("split", "counts", "--shards", 4 * before, "--json").stdout)["shards"] == 4 * before
    assert ps.client().pull("counts", [7, 8, 9]).tolist() == [1, 2, 3]
    assert "a power of two, 1 to 4096, not 3" in run("split", "counts", "--shards", 3, status=1).stderr
    assert run("merge", "counts").stdout == f"table counts: {2 * before} shards\n"
    assert json.loads(run("merge", "counts", "--shards", before, "--json").stdout)["shards"] == before
    assert "a power of two, 1 to 4096, not 3" in run("merge", "counts", "--shards", 3, "--timeout", 9, status=1).stderr


def test_rebalance(run, ps):
    assert run("rebalance").stdout.splitlines()[-1].startswith("in balance")
    assert json.loads(run("rebalance", "--timeout", 9, "--json").stdout)["moves"] == []


def test_checkpoint_and_restore(run, ps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = json.loads(run("checkpoint", "saved", "--json").stdout)
    assert done["rows"] == 9
    assert (tmp_path / "saved" / done["name"]).exists()  # relative to us, not to the servers
    ps.client().push("counts", [7], 100)
    assert run("restore", "saved", "--table", "counts").stdout == f"checkpoint {done['name']}: restored counts\n"
    assert ps.client().pull("counts", [7, 8, 9]).tolist() == [1, 2, 3]
    assert "from now on" in run("checkpoint", tmp_path / "saved", "--every", "1 h").stdout
    assert "no more" in run("checkpoint", "--stop").stdout
    again = run("checkpoint", tmp_path / "saved", "--incremental").stdout
    assert "9 rows" in again or "0 rows" in again
    failed = run("restore", tmp_path / "nowhere", status=1)
    assert failed.stdout == ""
    assert failed.stderr.startswith("Error: ")
    assert failed.stderr.count("\n") == 1
    run("checkpoint", status=2)
    run("checkpoint", "saved", "--stop", status=2)


def test_export(run, ps, tmp_path):
    ps.checkpoint(str(tmp_path / "saved"))
    ps.client().push("counts", [7], 100)
    run("export", "counts", tmp_path / "counts.npz")
    found = np.load(tmp_path / "counts.npz")
    assert dict(zip(found["keys"].tolist(), found["values"][:, 0].tolist(), strict=True)) == {7: 101, 8: 2, 9: 3}
    run("export", "counts", tmp_path / "old.parquet", "--from", tmp_path / "saved", scheduler=None)
    old = pd.read_parquet(tmp_path / "old.parquet").set_index("key")["value"]
    assert old.to_dict() == {7: 1, 8: 2, 9: 3}
    run("export", "w", tmp_path / "w.csv")
    assert pd.read_csv(tmp_path / "w.csv", index_col="key").shape == (6, 2)
    assert ".parquet, .npz, .csv" in run("export", "w", "w.xlsx", status=2).stderr
    assert "no table 'v'" in run("export", "v", "v.csv", status=1).stderr
    run("export", "w", "w.csv", "--checkpoint", "x", status=2)


def test_start_scale_and_close(run, client):
    assert run("start", "--name", "two", "--servers", 1).stdout.startswith("parameter server 'two' is up\nserver")
    assert json.loads(run("status", "--name", "two", "--json").stdout)["wanted"] == 1
    assert "exists in this cluster" in run("start", "--name", "two", status=1).stderr
    assert run("scale", 2, "--name", "two").stdout.startswith("2 servers wanted")
    assert json.loads(run("status", "--name", "two", "--json").stdout)["wanted"] == 2
    assert run("adapt", "--name", "two", "--minimum", 2, "--maximum", 2).stdout.startswith("adapt: 2 to 2, now ")
    about = json.loads(run("adapt", "--name", "two", "--memory", "1 GiB", "--interval", "9 s", "--json").stdout)
    assert (about["minimum"], about["maximum"], about["memory"], about["interval"]) == (1, None, 1 << 30, 9)
    assert "adapt: 1 or more, now " in run("status", "--name", "two").stdout
    run("adapt", "--name", "two", "--busy", 2, status=2)
    assert "from 3 to 2 servers" in run("adapt", "--minimum", 3, "--maximum", 2, "--name", "two", status=1).stderr
    run("scale", 2, "--name", "two")
    assert json.loads(run("status", "--name", "two", "--json").stdout)["adapt"] is None
    with dps.ParameterServer.attach(client, "two") as two:
        assert two.name == "two"
    assert run("close", "--name", "two", "--json").stdout == '{\n  "closed": "two"\n}\n'
    assert "there are: none" in run("status", "--name", "two", status=1).stderr
    run("scale", 0, status=2)
    assert "needs 3 workers" in run("start", "--servers", 3, "--timeout", 0.1, status=1).stderr


@pytest.mark.thorough
def test_scale_waits_and_says_what_came_of_it(run, client):
    run("start", "--name", "two", "--servers", 1)
    assert run("scale", 2, "--name", "two").stdout == "2 servers wanted, 2 up\n"
    few = run("scale", 7, "--name", "two", "--timeout", 0.5, status=1).stderr
    assert "7 servers wanted, and after 0.5 s (--timeout) 2 are up and 0 leaving; it goes on towards 7: start" in few
    assert run("scale", 1, "--name", "two").stdout == "1 server wanted, 1 up\n"
    assert len(json.loads(run("status", "--name", "two", "--json").stdout)["servers"]) == 1
    run("close", "--name", "two")


@pytest.mark.thorough
def test_retire_waits_until_the_server_is_gone(run, client):
    def servers():
        return {each["number"] for each in json.loads(run("status", "--name", "two", "--json").stdout)["servers"]}

    run("start", "--name", "two", "--servers", 2)
    assert "has no server 77: [" in run("retire", 77, "--name", "two", status=1).stderr
    number = min(servers())
    assert run("retire", number, "--name", "two").stdout == f"server {number} is empty and closed\n"
    assert number not in servers()
    run("close", "--name", "two")


def test_a_wait_for_workers_is_announced(client, caplog):
    with pytest.raises(dps.errors.TooFewWorkersError):
        dps.ParameterServer(client, servers=5, timeout=0.1)
    words = r"waiting up to 0.1 s \(dps.timeouts.start\) for 3 more workers with the resource dps; 2 are there: tcp://"
    assert re.search(words, caplog.text)
    assert f"dask worker {client.scheduler.address} --resources dps=1" in caplog.text
    caplog.clear()
    with dps.ParameterServer(client, servers=2):
        assert "waiting" not in caplog.text


def test_a_scheduler_that_is_not_there_is_not_waited_for(run, monkeypatch, tmp_path):
    """The connection is refused at once, so Dask's client, which would try again for 10 s, is not even made."""
    monkeypatch.setattr("dps.engine.cli.common.Client", None)
    with socket.socket() as bound:  # nothing listens there
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        file = tmp_path / "scheduler.json"
        file.write_text(json.dumps({"address": address}))
        for where in ({"scheduler": address}, {"scheduler": None}):
            args = ["--scheduler-file", file] if where["scheduler"] is None else []
            assert "no scheduler answers at" in run("status", *args, status=1, **where).stderr


def test_an_attached_handle_knows_the_copies(ps, client):
    with dps.ParameterServer.attach(client) as other:
        assert other.copies == 2
        assert other.table("more").spec.copies == 2


def test_which_cluster(run, ps, cluster, tmp_path, monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    assert "set DASK_SCHEDULER_ADDRESS" in run("status", scheduler=None, status=2).stderr
    file = tmp_path / "scheduler.json"
    gone = run("status", "--scheduler-file", file, scheduler=None, status=1)
    assert "there is no scheduler file" in gone.stderr
    file.write_text(json.dumps({"address": cluster.scheduler_address}))
    run("status", "--scheduler-file", file, scheduler=None)
    with dps.config.dask.config.set({"scheduler-address": cluster.scheduler_address}):
        run("status", scheduler=None)
    answer = dask("ps", "status", "--scheduler", "tcp://127.0.0.1:1", DASK_DPS__TIMEOUTS__CONNECT="0.2 s")
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: no scheduler answers at tcp://127.0.0.1:1")
    assert answer.stderr.count("\n") == 1
    assert "start one with `dask scheduler`" in answer.stderr


def dask(*args: str, **env: str) -> subprocess.CompletedProcess:
    """The program itself."""
    env = os.environ | env
    return subprocess.run([DASK, *args], env=env, capture_output=True, text=True, timeout=60, check=False)


def rows(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"city": rng.choice(["Oslo", "Rome"], n), "shop": rng.integers(0, 4, n), "age": rng.random(n)})
    z = 3.0 * (frame["city"] == "Rome") - 2.0 * (frame["shop"] == 3) - frame["age"]
    return frame.assign(bought=(rng.random(n) < 1 / (1 + np.exp(-z))).astype("int64"))


def write(kind: str, path, frame: pd.DataFrame) -> None:
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        X = np.column_stack([frame["city"] == "Rome", *(frame["shop"] == n for n in range(4)), frame["age"]])
        dump_svmlight_file(scipy.sparse.csr_matrix(X.astype(float)), frame["bought"], str(path), zero_based=False)


@pytest.mark.parametrize("kind", ["csv", "parquet", "svm"])
def test_train(run, kind, tmp_path):
    for n in range(3):
        write(kind, tmp_path / f"part-{n}.{kind}", rows(400, n))
    write(kind, tmp_path / f"test.{kind}", rows(300, 9))
    wide = ["--features", 6] if kind == "svm" else ["--label", "bought", "--categorical", "shop"]
    model, tests = tmp_path / "model.safetensors", tmp_path / f"test.{kind}"
    args = ("train", tmp_path / f"part-*.{kind}", *wide, "--epochs", 20, "--output", model, "--test", tests)
    about = json.loads(run(*args, "--json").stdout)
    assert about["test"]["rows"] == 300
    assert len(about["loss_curve"]) == 20
    assert about["loss_curve"][-1] < about["loss_curve"][0]

    loaded = LogisticRegression.load(str(model))
    options = {"n_features": 6} if kind == "svm" else {"label": "bought", "categorical": ["shop"]}
    (part,) = read_files(str(tests), **options)
    X, y = part.compute(scheduler="sync")
    p = loaded.predict_proba(X)[:, 1]
    assert loaded.epochs == 20
    assert about["test"]["log-loss"] == pytest.approx(log_loss(y, p))
    assert about["test"]["AUC"] == pytest.approx(roc_auc_score(y, p))
    assert about["test"]["AUC"] > 0.75
    if kind == "csv":
        lines = run(*args).stdout.splitlines()
        assert lines[0].startswith("epoch 1: training loss 0.")
        assert lines[-2].startswith("3 partitions")
        assert lines[-1].startswith("on 300 test rows: log-loss 0.")
        with pytest.raises(InputError, match="other columns"):
            loaded.predict(X.rename(columns={"age": "years"}))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("solver", "penalty"), [("lbfgs", "--l2"), ("owlqn", "--l1")])
def test_train_by_a_batch_solver(run, client, solver, penalty, tmp_path):
    """The model is that of the estimator with the same settings."""
    data, model = tmp_path / "a.csv", tmp_path / "m.safetensors"
    write("csv", data, rows(400, 0))
    how = ("--solver", solver, penalty, 0.01, "--tol", 1e-5, "--hash-bits", 8)
    answer = run("train", data, "--label", "bought", *how, "--output", model)
    settings = {"solver": solver, penalty.strip("-"): 0.01, "tol": 1e-5, "hash_bits": 8}
    expected = LogisticRegression(client=client, **settings).fit(read_files(str(data), label="bought"))
    loaded = LogisticRegression.load(str(model))
    np.testing.assert_allclose(loaded.coef_, expected.coef_, atol=1e-5)
    assert loaded.coef_.any()
    line = f"iteration {expected.n_iter_}: training loss {expected.loss_curve_[-1]:.4f}"
    assert answer.stdout.splitlines()[0] == line
    run("train", data, "--label", "bought", *how, "--max-iter", 2, "--output", model)
    assert LogisticRegression.load(str(model)).n_iter_ == 2


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["*.svm", "--features", "3"], "no file matches"),
        (["a.csv"], "Give the label"),
        (["a.csv", "--label", "z"], "no column 'z'; there are x, y"),
        (["a.csv", "--label", "x", "--columns", "x,y"], "'x' is among the columns"),
        (["b.csv", "--label", "x"], "cannot read .*b.csv"),
        (["a.svm"], "number of features"),
        (["a.svm", "a.csv"], "of one kind at a time"),
        (["a.xlsx"], "say which kind"),
    ],
)
def test_train_on_what_cannot_be(run, args, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    result = run("train", *args, "--output", "m.safetensors", status=1)
    assert pd.Series([result.stderr]).str.contains(told).all(), result.stderr
    assert not (tmp_path / "m.safetensors").exists()


def test_train_looks_first_whether_it_can_save(run, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    args = ("train", tmp_path / "a.csv", "--label", "y", "--output")
    assert "make it first" in run(*args, tmp_path / "nowhere" / "m.safetensors", status=1).stderr
    monkeypatch.setitem(sys.modules, "safetensors", None)  # not installed
    assert "pip install 'dps[checkpoint]'" in run(*args, tmp_path / "m.safetensors", status=1).stderr


def test_train_without_a_cluster(run, tmp_path, monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setattr(dps, "LocalCluster", functools.partial(dps.LocalCluster, processes=False))
    write("csv", tmp_path / "a.csv", rows(200, 0))
    run("train", tmp_path / "a.csv", "--label", "bought", "--output", tmp_path / "m.safetensors", scheduler=None)
    assert LogisticRegression.load(str(tmp_path / "m.safetensors")).classes_.tolist() == [0, 1]


def test_train_on_a_parameter_server_that_there_is(run, ps, tmp_path):
    write("csv", tmp_path / "a.csv", rows(200, 0).assign(bought=["yes", "no"] * 100))
    model = tmp_path / "m.safetensors"
    run("train", tmp_path / "a.csv", "--label", "bought", "--staleness", "inf", "--output", model, "--name", "dps")
    assert [name.partition("-")[0] for name in ps.tables()] == ["counts", "w", "coef", "intercept"]
    loaded = LogisticRegression.load(str(model), epochs=7)
    assert loaded.classes_.tolist() == ["no", "yes"]
    assert loaded.epochs == 7
    assert loaded.coef_.any()


def test_a_saved_model_that_is_none(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(InputError, match="no model that was saved"):
        LogisticRegression.load(str(path))
    import safetensors.numpy

    safetensors.numpy.save_file({"w": np.zeros(3)}, path)
    with pytest.raises(InputError, match=r"not 'dps\.LogisticRegression/1'"):
        LogisticRegression.load(str(path))


@pytest.mark.tls
def test_tls(tmp_path):
    security = Security.temporary()
    files = {}
    for option, text in {
        "tls-ca-file": security.tls_ca_file,
        "tls-cert": security.tls_client_cert,
        "tls-key": security.tls_client_key,
    }.items():
        files[f"--{option}"] = tmp_path / f"{option}.pem"
        files[f"--{option}"].write_text(text)
    options = [str(part) for pair in files.items() for part in pair]
    with dps.LocalCluster(1, 1, processes=False, security=security, dashboard_address=None) as cluster:
        where = ["--scheduler", cluster.scheduler_address]
        assert RUNNER.invoke(group, ["start", *where, *options]).exit_code == 0
        result = RUNNER.invoke(group, ["status", "--json", *where, *options])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["scheduler"].startswith("tls://")
        assert RUNNER.invoke(group, ["close", *where, *options]).exit_code == 0


# How it looks

TABLE = TextTable(["server", "state [x]"], [[0, "up"], [12345, None]])


def test_plain_tables():
    assert plain(TABLE) == "server  state [x]\n     0  up\n12,345  -"
    assert plain(TextTable(["empty"], [])) == "empty"


def test_rich_tables_for_people(capsys, monkeypatch):
    assert _rich(TABLE)
    out = capsys.readouterr().out
    assert "state [x]" in out
    assert "12,345" in out
    assert "─" in out
    monkeypatch.setitem(sys.modules, "rich", None)  # not installed
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show([TABLE, "line"])
    assert capsys.readouterr().out == plain(TABLE) + "\nline\n"


def test_completion():
    answer = dask(_DASK_COMPLETE="bash_complete", COMP_WORDS="dask ps st", COMP_CWORD="2")
    assert answer.stdout.split() == ["plain,start", "plain,status"]


def test_every_command_has_the_same_options():
    for name, command in group.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--scheduler", "--scheduler-file", "--name", "--tls-ca-file", "--json"} <= options, name
        assert len(command.get_short_help_str(60)) > 10
    known = {"status", "tables", "clocks", "checkpoint", "restore", "scale", "retire", "adapt", "export", "train"}
    assert known <= set(group.commands)
