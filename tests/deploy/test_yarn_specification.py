"""The specification of an application on YARN: a pure function. No YARN here, but skein, and bash for the scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile

import dask
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

skein = pytest.importorskip("skein")

from dps.engine.deploy.yarn_specification import read_specification  # noqa: E402
from dps.errors import InputError, InputTypeError  # noqa: E402
from dps.yarn import specification  # noqa: E402

ENVIRONMENT = "venv:///opt/dps"
words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
printable = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=40)
names = st.from_regex(r"[A-Za-z_][A-Za-z_0-9.-]{0,15}", fullmatch=True)
envs = st.dictionaries(names, printable, max_size=3)
counts = st.integers(0, 10_000)
sizes = st.one_of(st.integers(1, 512).map("{} GiB".format), st.integers(2**20, 2**40))
environments = st.builds(
    "{}{}".format,
    st.sampled_from(["venv:///", "conda:///", "python:///", "hdfs:///", "/"]),
    st.from_regex(r"[A-Za-z_ ][A-Za-z_0-9 /-]{0,20}\.tar\.gz", fullmatch=True),
)
options = st.fixed_dictionaries(
    {"environment": environments},
    optional={
        **dict.fromkeys(["n_workers", "n_servers", "worker_gpus"], counts),
        **dict.fromkeys(["worker_vcores", "server_vcores", "scheduler_vcores"], st.integers(1, 100)),
        **dict.fromkeys(["worker_memory", "server_memory", "scheduler_memory"], sizes),
        **dict.fromkeys(["worker_restarts", "server_restarts"], st.integers(-1, 100)),
        **dict.fromkeys(["worker_env", "server_env"], envs),
        **dict.fromkeys(["worker_label", "server_label", "node_label", "queue", "user", "name"], words),
        "worker_options": st.dictionaries(names, st.one_of(st.booleans(), counts, printable), max_size=3),
        "tags": st.lists(words, max_size=3),
        "files": st.dictionaries(names.filter(lambda n: n != "environment"), words.map("/tmp/{}".format), max_size=2),
        "file_systems": st.lists(words, max_size=2),
        "deploy_mode": st.sampled_from(["remote", "local"]),
        "security": st.booleans(),
    },
)


@settings(max_examples=40)
@given(options=options)
def test_specifications_survive_yaml(options):
    spec = specification(**options)
    assert skein.ApplicationSpec.from_yaml(spec.to_yaml()) == spec
    assert skein.ApplicationSpec.from_json(spec.to_json()) == spec
    assert specification(**options) == spec


@given(options=options)
def test_what_is_wished_for_is_asked_for(options):
    spec = specification(**options)
    services = {"dask.worker": "worker", "dps.server": "server", "dask.scheduler": "scheduler"}
    if options.get("deploy_mode") == "local":
        del services["dask.scheduler"]
    assert spec.services.keys() == services.keys()
    for name, kind in services.items():
        service = spec.services[name]
        assert service.resources.vcores == options.get(f"{kind}_vcores", 1)
        assert service.env.items() >= options.get(f"{kind}_env", {}).items()
        assert service.node_label == options.get(f"{kind}_label", "")
        assert service.files.keys() >= options.get("files", {}).keys()
        if kind != "scheduler":
            assert service.max_restarts == options.get(f"{kind}_restarts", -1)
            assert service.instances == options.get(f"n_{kind}s", {"worker": 0, "server": 1}[kind])
            assert service.depends == {"dask.scheduler"} & services.keys()
        assert subprocess.run(["bash", "-n"], input=service.script, text=True, check=False).returncode == 0
    encrypted = spec.services.get("dask.scheduler") and "--tls" in spec.services["dask.scheduler"].script
    assert encrypted in (None, options.get("security", True))
    for name in ("name", "queue", "user", "node_label", "file_systems"):
        assert getattr(spec, name) == options.get(name, dask.config.get(f"dps.yarn.{name.replace('_', '-')}"))


@pytest.mark.parametrize(("memory", "mebibytes"), [("4 GiB", 4096), ("1 GB", 954), (2**20, 1), (2**20 + 1, 2)])
def test_memory_is_rounded_up_to_mebibytes(memory, mebibytes):
    assert specification(ENVIRONMENT, server_memory=memory).services["dps.server"].resources.memory == mebibytes


def test_defaults_come_from_the_configuration():
    settings = {
        "dps.yarn.environment": "python:///opt/python",
        "dps.yarn.worker.count": 7,
        "dps.yarn.server.label": "big",
        "dps.yarn.deploy-mode": "local",
    }
    with dask.config.set(settings):
        spec = specification(n_servers=3)
    assert spec.services.keys() == {"dask.worker", "dps.server"}
    assert spec.services["dask.worker"].instances == 7
    assert (spec.services["dps.server"].instances, spec.services["dps.server"].node_label) == (3, "big")
    assert spec.services["dps.server"].script == "exec /opt/python -m dps.engine.deploy.yarn_services server"


def test_a_whole_specification_in_the_configuration(tmp_path):
    whole = specification(ENVIRONMENT, n_workers=5, name="whole")
    whole.to_file(str(tmp_path / "spec.yaml"))
    for value in (whole.to_dict(), str(tmp_path / "spec.yaml")):
        with dask.config.set({"dps.yarn.specification": value}):
            assert specification() == whole
            assert specification(ENVIRONMENT, name="other").name == "other"  # told something: as without it


def test_reading_specifications(tmp_path):
    spec = specification(ENVIRONMENT)
    spec.to_file(str(tmp_path / "spec.yaml"))
    assert read_specification(str(tmp_path / "spec.yaml")) == read_specification(spec.to_dict()) == spec
    with pytest.raises(InputTypeError, match="ApplicationSpec"):
        read_specification(5)
    service = skein.Service(skein.Resources("1 GiB", 1), "true")
    with pytest.raises(InputError, match=r"neither .*dps.server.* but other"):
        read_specification(skein.ApplicationSpec({"other": service}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": None}, "need a Python environment"),
        ({"n_workers": -1}, "n_workers is at least 0, not -1"),
        ({"worker_restarts": -2}, "worker_restarts is at least -1, not -2"),
        ({"server_vcores": 0}, "server_vcores is at least 1, not 0"),
        ({"n_servers": 1.5}, "n_servers is a whole number, not 1.5"),
        ({"worker_memory": 4}, "worker_memory is 4: less than 1 MiB. Was 4 MiB"),
        ({"deploy_mode": "cluster"}, "'remote' or 'local', not 'cluster'"),
        ({"security": "yes"}, "security is True or False"),
        ({"environment": "env.tar.gz", "files": {"environment": "/tmp/x"}}, "files has 'environment'"),
    ],
)
def test_errors_name_the_thing(options, message):
    with pytest.raises((InputError, InputTypeError), match=message):
        specification(**{"environment": ENVIRONMENT, **options})


# The scripts, run by bash as a container does


def run(spec, folder, **env) -> str:
    script = spec.services["dps.server"].script.replace("dps.engine.deploy.yarn_services", "this")
    environment = {"PATH": os.environ["PATH"], **env}
    return subprocess.check_output(["bash", "-c", script], cwd=folder, env=environment, text=True)


def fake(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_python(tmp_path):
    (tmp_path / "this.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    assert run(specification(f"python://{sys.executable}"), tmp_path) == f"{sys.executable} ['server']\n"


def test_virtual_environment(tmp_path):
    fake(tmp_path / "my env/bin/activate", f"export PATH='{tmp_path}/my env/bin':$PATH HELLO=world")
    fake(tmp_path / "my env/bin/python", '#!/bin/bash\necho "$HELLO $@"')
    assert run(specification(f"venv://{tmp_path}/my env"), tmp_path) == "world -m this server\n"


def test_conda_environment(tmp_path):
    fake(tmp_path / "bin/conda", '#!/bin/bash\n[ "$*" = "shell.bash hook" ] && echo "conda() { echo conda \\$@; }"')
    fake(tmp_path / "bin/python", '#!/bin/bash\necho "$@"')
    printed = run(specification("conda:///opt/env"), tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert printed == "conda activate /opt/env\n-m this server\n"


def test_archive(tmp_path):
    fake(tmp_path / "packed/bin/activate", "export HELLO=world")
    fake(tmp_path / "packed/bin/python", '#!/bin/bash\necho "$HELLO $@"')
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "packed", ".")
    spec = specification(str(tmp_path / "env.tar.gz"))
    for service in spec.services.values():
        assert service.files["environment"].type == "ARCHIVE"
        assert service.files["environment"].source == f"file://{tmp_path}/env.tar.gz"
    (tmp_path / "environment").mkdir()
    with tarfile.open(tmp_path / "env.tar.gz") as archive:
        archive.extractall(tmp_path / "environment", filter="data")
    command = ["bash", "-c", spec.services["dps.server"].script]
    printed = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert printed == "world -m dps.engine.deploy.yarn_services server\n"
