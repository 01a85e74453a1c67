"""The skein specification of what YARN runs: a function of its arguments and of Dask's configuration."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any

import dask
from dask.utils import parse_bytes

from dps.errors import InputError, InputTypeError

try:
    import skein
except ModuleNotFoundError as error:  # skein is missing; or distutils, which setuptools has and Python has no more
    raise ModuleNotFoundError(f"YARN needs skein, and {error}: pip install 'dps[yarn]'", name=error.name) from error

__all__ = ["SCHEDULER", "SERVER", "WORKER", "read_specification", "skein", "specification"]

SCHEDULER = "dask.scheduler"
WORKER = "dask.worker"
SERVER = "dps.server"
MIB = 2**20


def specification(
    environment: str | None = None,
    n_workers: int | None = None,
    n_servers: int | None = None,
    *,
    worker_vcores: int | None = None,
    worker_memory: str | int | None = None,
    worker_restarts: int | None = None,
    worker_env: dict[str, str] | None = None,
    worker_class: str | None = None,
    worker_options: dict[str, object] | None = None,
    worker_gpus: int | None = None,
    worker_label: str | None = None,
    server_vcores: int | None = None,
    server_memory: str | int | None = None,
    server_restarts: int | None = None,
    server_env: dict[str, str] | None = None,
    server_label: str | None = None,
    scheduler_vcores: int | None = None,
    scheduler_memory: str | int | None = None,
    deploy_mode: str | None = None,
    name: str | None = None,
    queue: str | None = None,
    tags: list[str] | None = None,
    user: str | None = None,
    node_label: str | None = None,
    files: dict[str, str] | None = None,
    file_systems: list[str] | None = None,
    security: bool | None = None,
) -> skein.ApplicationSpec:
    """What :class:`dps.YarnCluster` asks YARN for: a scheduler, workers for trainers, workers for servers.

    Parameters that are left out come from Dask's configuration, under ``dps.yarn``. The result is an object of skein:
    change it, write it to a file (``to_file``), and start it with :meth:`dps.YarnCluster.from_specification` or
    ``skein application submit``.

    Parameters
    ----------
    environment : str
        The Python environment of all containers: an archive made with conda-pack or venv-pack (a local path, or a URL
        such as ``hdfs:///envs/dps.tar.gz``); or an environment that every node has, as ``venv:///path``,
        ``conda:///path`` or ``python:///path/to/python``.
    n_workers, n_servers : int
        Number of workers for trainers and other tasks, and number of workers for servers.
    worker_vcores, server_vcores, scheduler_vcores : int
        Virtual cores of each container. A worker runs as many tasks at once as it has vcores.
    worker_memory, server_memory, scheduler_memory : str
        Memory of each container, such as ``"4 GiB"``; rounded up to whole MiB.
    worker_restarts, server_restarts : int
        Number of containers that YARN may lose and replace in total before the application fails; -1: any number.
    worker_env, server_env : dict
        Environment variables.
    worker_class : str
        The import path of the class of workers, ``"distributed.Nanny"`` by default.
    worker_options : dict
        More arguments for that class: values that JSON can express.
    worker_gpus : int
        GPUs of each worker's container (Hadoop 3.1 or newer).
    worker_label, server_label, node_label : str
        Labels of the nodes on which workers, servers, or all containers run.
    deploy_mode : {"remote", "local"}
        Whether the scheduler has a container too, or runs in the process that makes the cluster.
    name, queue, user : str
        The application's name, its queue, and the user that YARN runs it as; by default the current user.
    tags : list of str
        The application's tags.
    files : dict
        More files for all containers: name in the container -> path or URL. Archives are unpacked.
    file_systems : list of str
        On a cluster with Kerberos: the file systems, besides the default one, that need delegation tokens.
    security : bool
        Encrypt everything, with a certificate made for this application.

    Returns
    -------
    skein.ApplicationSpec

    Raises
    ------
    InputError, InputTypeError
        There is no environment, or a value is not possible.

    Examples
    --------
    >>> from dps.yarn import specification
    >>> spec = specification("venv:///opt/dps", n_workers=4, n_servers=2, server_memory="16 GiB", server_label="big")
    >>> server = spec.services["dps.server"]
    >>> server.instances, server.resources.memory, server.node_label
    (2, 16384, 'big')
    >>> print(server.script)
    source /opt/dps/bin/activate
    exec python -m dps.engine.deploy.yarn_services server
    """
    given = locals()
    whole = dask.config.get("dps.yarn.specification")
    if whole and all(value is None for value in given.values()):
        return read_specification(whole)
    settings = {name: _default(name) if value is None else value for name, value in given.items()}
    _check(settings)
    options = dict(settings["worker_options"])
    command = ["worker", "--class", settings["worker_class"], *(["--options", json.dumps(options)] if options else [])]
    services = {WORKER: _service(settings, "worker", command), SERVER: _service(settings, "server", ["server"])}
    if settings["deploy_mode"] == "remote":
        tls = ["--tls"] if settings["security"] else []
        services = {SCHEDULER: _service(settings, "scheduler", ["scheduler", *tls]), **services}
        for service in (WORKER, SERVER):
            services[service].depends = {SCHEDULER}
        master = skein.Master()
    else:  # an application without containers ends, so its master runs a program that ends with the scheduler
        watch = _service({**settings, "scheduler_vcores": 1, "scheduler_memory": "1 GiB"}, "scheduler", ["watch"])
        master = skein.Master(watch.resources, watch.script, watch.files, watch.env)
    return skein.ApplicationSpec(
        services=services,
        master=master,
        tags=set(settings["tags"]),
        **{name: settings[name] for name in ("name", "queue", "user", "node_label", "file_systems")},
    )


def read_specification(spec: skein.ApplicationSpec | dict | str) -> skein.ApplicationSpec:
    """A specification from a specification, a dict, or the path of a YAML or JSON file.

    Examples
    --------
    >>> spec = specification("venv:///opt/dps")
    >>> read_specification(spec.to_dict()) == spec
    True
    """
    if isinstance(spec, str):
        spec = skein.ApplicationSpec.from_file(spec)
    elif isinstance(spec, dict):
        spec = skein.ApplicationSpec.from_dict(spec)
    elif not isinstance(spec, skein.ApplicationSpec):
        raise InputTypeError(f"a specification is a skein.ApplicationSpec, a dict or the path of a file, not {spec!r}")
    if WORKER not in spec.services and SERVER not in spec.services:
        raise InputError(
            f"the specification has neither a service {WORKER!r} nor {SERVER!r}, but {', '.join(spec.services) or None}"
        )
    return spec


def _default(parameter: str) -> Any:
    """The value of a parameter in Dask's configuration: for n_workers, that of dps.yarn.worker.count, and so on."""
    if parameter.startswith("n_"):
        key = f"{parameter[2:-1]}.count"
    else:
        key = re.sub("^(worker|server|scheduler)_", r"\1.", parameter).replace("_", "-")
    return dask.config.get(f"dps.yarn.{key}")


def _service(settings: dict[str, Any], kind: str, command: list[str]) -> skein.Service:
    """The service of the scheduler, of workers or of servers: its containers and the command that they run."""
    files, setup, python = _environment(settings["environment"])
    clash = files.keys() & settings["files"].keys()
    if clash:
        raise InputError(f"files has {clash.pop()!r}: under that name containers have their Python environment")
    run = shlex.join([*python, "-m", "dps.engine.deploy.yarn_services", *command])
    env = {name: str(value) for name, value in settings.get(f"{kind}_env", {}).items()}
    return skein.Service(
        instances=settings.get(f"n_{kind}s", 1),
        resources=skein.Resources(
            memory=_mebibytes(f"{kind}_memory", settings[f"{kind}_memory"]),
            vcores=settings[f"{kind}_vcores"],
            gpus=settings.get(f"{kind}_gpus", 0),
        ),
        max_restarts=settings.get(f"{kind}_restarts", 0),  # none for the scheduler: its loss ends all
        node_label=settings.get(f"{kind}_label", ""),
        files={**files, **settings["files"]},
        env=env,
        script="\n".join([*setup, f"exec {run}"]),
    )


def _environment(where: str | None) -> tuple[dict[str, str], list[str], list[str]]:
    """For a Python environment: files for the containers, commands that activate it, and the command of its Python."""
    if not where or not isinstance(where, str):
        raise InputError(
            f"environment is {where!r}, and containers need a Python environment: the archive of one (conda-pack, "
            f"venv-pack), or one on every node: venv:///path, conda:///path, python:///path/to/python. Give it as "
            f"environment=, or as dps.yarn.environment in Dask's configuration"
        )
    kind, _, path = where.rpartition("://")
    if kind == "venv":
        return {}, [f"source {shlex.quote(path)}/bin/activate"], ["python"]
    if kind == "conda":
        return {}, ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(path)}"], ["python"]
    if kind == "python":
        return {}, [], [path]
    return {"environment": where}, ["source environment/bin/activate"], ["environment/bin/python"]


def _mebibytes(name: str, memory: str | int) -> int:
    nbytes = parse_bytes(memory)
    if nbytes < MIB:
        raise InputError(f"{name} is {memory!r}: less than 1 MiB. Was {memory} MiB, or GiB, meant?")
    return math.ceil(nbytes / MIB)


def _check(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        least = -1 if name.endswith("_restarts") else 1 if name.endswith("_vcores") else 0
        if re.fullmatch(r"n_\w+|\w+_(vcores|restarts|gpus)", name):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputTypeError(f"{name} is a whole number, not {value!r}")
            if value < least:
                raise InputError(f"{name} is at least {least}, not {value}")
    if settings["deploy_mode"] not in ("remote", "local"):
        raise InputError(f"deploy_mode is 'remote' or 'local', not {settings['deploy_mode']!r}")
    if not isinstance(settings["security"], bool):
        raise InputTypeError(f"security is True or False, not {settings['security']!r}")
