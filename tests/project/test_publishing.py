"""What publishes dps: a tool, or its schema, reads each file that is for it, and each says what setup.cfg says."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import oldest
import pytest
import yaml
from test_oldest import ON_CONDA, makefile

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = re.findall(r"Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.M)
SCHEMAS = {  # of check-jsonschema -> files
    "github-workflows": [str(file.relative_to(ROOT)) for file in WORKFLOWS],
    "github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"],
    "github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "dependabot": [".github/dependabot.yml"],
    "readthedocs": [".readthedocs.yaml"],
    "citation-file-format": ["CITATION.cff"],
}
# What sp-repo-review would have otherwise, and why it is so.
NOT_SO = {
    "PP006": "the packages for developers are the extra `dev` of setup.cfg, which keeps all settings that may be there",
    "PP301": "pytest's settings are in setup.cfg",
    "MY100": "mypy's settings are in setup.cfg",
    "PC140": "mypy needs the packages of `make install`: `make types` runs it, also in the workflow of the tests",
    "PC160": "the vocabulary of the pages has rules of its own, tests/project/test_words.py",
    "PC170": "`make docs` reads the two pages in rST, and fails where one is wrong",
    "PC180": "no formatter: the pages are programs, and the tests of docs run their blocks",
}


def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def tool(name: str) -> Path:
    """A program of the extra `dev`, beside Python."""
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        pytest.skip(f"needs {name}: pip install 'dps[dev]'")
    return program


def conda(names: list[str]) -> dict[str, str]:
    """The packages of these extras in conda-forge's names -> their lower bounds."""
    return {ON_CONDA.get(name, name): least for name, least in oldest.bounds(names).items()}


def metadata(name: str) -> str:
    return SETUP["metadata"][name]


# ---- the workflows of GitHub ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_has_the_form_that_its_reader_asks_for(schema):
    done = run(tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout


def test_every_workflow_and_form_is_checked():
    listed = {ROOT / name for names in SCHEMAS.values() for name in names}
    assert {file for file in (ROOT / ".github").rglob("*") if file.is_file()} <= listed


def test_the_linter_of_workflows_finds_nothing():
    done = run(tool("zizmor"), "--offline", "--no-progress", ".github")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new", "audit"),
    [
        (" # v7.0.1", "", None),  # a name of a release is for readers
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "unpinned-uses"),
        ("persist-credentials: false", "fetch-depth: 1", "artipacked"),
        ("contents: read", "contents: write", "excessive-permissions"),
        ("run: make lint", "run: make ${{ github.head_ref }}", "template-injection"),
    ],
)
def test_what_the_linter_of_workflows_finds(tmp_path, old, new, audit):
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert old in text
    (tmp_path / "tests.yml").write_text(text.replace(old, new))
    done = run(tool("zizmor"), "--offline", "--no-progress", tmp_path / "tests.yml")
    assert (done.returncode == 0) == (audit is None), done.stdout
    assert audit is None or audit in done.stdout


def test_each_action_is_pinned_by_a_commit_with_the_name_of_its_release():
    used = [line for file in WORKFLOWS for line in file.read_text().splitlines() if " uses: " in line]
    assert len(used) > 10
    assert [line for line in used if not re.search(r" uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []
    pins = {tuple(line.split(" uses: ")[1].split("@")) for line in used}
    assert len({action for action, _ in pins}) == len(pins), "an action has one commit in all workflows"


def test_workflows_call_targets_that_there_are():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = {
        name for file in WORKFLOWS for name in re.findall(r"run: (?:\.ci/again )?make ([a-z-]+)", file.read_text())
    }
    assert {"install", "lint", "types", "test", "test-rest", "test-portable", "test-oldest", "docs"} <= called
    assert called <= targets


def test_workflows_and_wheels_name_the_pythons_of_setup_cfg():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    others = jobs["python"]["strategy"]["matrix"]["python"]
    (whole,) = {
        step["with"]["python-version"] for step in jobs["all"]["steps"] if "setup-python" in step.get("uses", "")
    }
    assert [whole, *others] == PYTHONS == ["3.11", *makefile("PYTHONS")]


def test_the_nightly_workflow_takes_what_is_released_next():
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert set(re.search(r'--pre --extra-index-url "\$NIGHTLY" (.*)', text)[1].split()) >= {"numpy", "scikit-learn"}
    assert {"git+https://github.com/dask/dask", "git+https://github.com/dask/distributed"} <= set(text.split())
    assert re.search(r"^  schedule:\n    - cron:", text, re.M)


def test_a_release_is_uploaded_by_trusted_publishing():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    publish = jobs["publish"]
    assert (publish["environment"], publish["permissions"]) == ("pypi", {"id-token": "write"})
    assert set(publish["needs"]) == jobs.keys() - {"publish"}
    assert "secrets." not in "".join(file.read_text() for file in WORKFLOWS)


# ---- wheels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "machines"),
    [
        ("linux", {"manylinux_x86_64", "manylinux_aarch64", "musllinux_x86_64", "musllinux_aarch64"}),
        ("macos", {"macosx_x86_64", "macosx_arm64"}),
    ],
)
def test_cibuildwheel_builds_for_each_python_and_machine(platform, machines):
    pytest.importorskip("cibuildwheel")
    done = run(sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"cp{python.replace('.', '')}-{m}" for python in PYTHONS for m in machines}


def test_the_settings_of_cibuildwheel_have_its_form():
    jsonschema, package = pytest.importorskip("jsonschema"), pytest.importorskip("cibuildwheel")
    schema = json.loads((Path(package.__file__).parent / "resources" / "cibuildwheel.schema.json").read_text())
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    jsonschema.validate(settings, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(settings | {"test-comand": ""}, schema)
    assert (ROOT / settings["test-command"].partition("{project}/")[2]).exists()
    assert set(settings["test-extras"]) <= set(SETUP["options.extras_require"])


@pytest.mark.integration
def test_the_smoke_test_of_wheels_refuses_a_checkout():
    """What it tries has to be the wheel that was installed, and nothing that lies around."""
    done = run(sys.executable, "release/smoke.py")
    assert done.returncode == 1
    assert "is not part of an installed wheel" in done.stderr


# ---- pages, hooks, citation, conda ----------------------------------------------------------------------------------


def test_read_the_docs_builds_the_pages_as_make_does():
    settings = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert (ROOT / settings["sphinx"]["configuration"]).exists()
    assert settings["sphinx"]["fail_on_warning"] is True
    assert settings["build"]["tools"]["python"] in PYTHONS
    assert set(settings["python"]["install"][0]["extra_requirements"]) <= set(SETUP["options.extras_require"])


def test_hooks_before_commits_have_the_ruff_of_setup_cfg():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in repos}
    assert f"ruff=={revisions['ruff-pre-commit'].removeprefix('v')}" in SETUP["options.extras_require"]["dev"].split()
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", revision) for revision in revisions.values())


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (metadata("version"), metadata("license"))
    assert citation["authors"] == [{"name": metadata("author")}]
    assert citation["title"] == f"dps: {metadata('description')[0].lower()}{metadata('description')[1:]}"
    assert citation["keywords"] == metadata("keywords").split(", ")


def recipe() -> dict:
    return yaml.safe_load((ROOT / "release" / "recipe.yaml").read_text())


def test_the_recipe_for_conda_asks_for_what_setup_cfg_asks():
    made = recipe()
    needs = made["requirements"]
    assert (made["context"]["name"], made["context"]["version"]) == ("dps", metadata("version"))
    assert (made["about"]["license"], made["about"]["summary"]) == (metadata("license"), metadata("description"))
    stated = dict(need.split(" >=") for need in needs["run"])
    assert f">={stated.pop('python')}" == SETUP["options"]["python_requires"]
    assert stated == conda([])
    constraints = dict(need.split(" >=") for need in needs["run_constraints"])
    assert constraints.items() <= conda(["complete", "spark", "yarn"]).items()
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {need.replace(">=", " >=") for need in built} <= set(needs["host"])


@pytest.mark.parametrize("platform", ["linux-64", "osx-arm64"])
def test_rattler_build_renders_the_recipe(platform):
    rattler = pytest.importorskip("rattler_build")
    there = rattler.PlatformConfig(target_platform=platform, build_platform=platform)
    variants = {"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "python": ["3.12.*"]}
    stage = rattler.Stage0Recipe.from_file(str(ROOT / "release" / "recipe.yaml"))
    rendered = stage.render(rattler.VariantConfig(variants), rattler.RenderConfig(platform=there))
    assert len(rendered) == 1
    with pytest.raises(rattler.RecipeParseError):
        rattler.Stage0Recipe.from_dict(recipe() | {"requirments": {}})


def test_the_environment_of_pixi_names_all_that_dps_works_with():
    made = tomllib.loads((ROOT / "pixi.toml").read_text())
    packages = made["dependencies"]
    users = conda(["complete", "spark", "yarn"])
    assert {name: packages.get(name) for name in users} == {name: f">={least}" for name, least in users.items()}
    asked = {"dask", "distributed", "numpy", "sparse", "pandas", "pyspark", "jupyterlab", "dask-labextension", "skein"}
    assert asked <= packages.keys()
    for name in ("sparse", "ipykernel", "cython", "setuptools"):
        assert packages[name] == f">={oldest.bounds(['test'])[name]}"
    last = PYTHONS[-1].split(".")
    assert packages["python"] == f"{SETUP['options']['python_requires']},<{last[0]}.{int(last[1]) + 1}"


# ---- all of it ------------------------------------------------------------------------------------------------------


def test_what_the_guide_of_scientific_python_finds_is_explained():
    done = run(tool("repo-review"), ROOT, "--format", "json")
    checks = json.loads(done.stdout)["checks"]
    assert len(checks) > 40
    assert {name: NOT_SO.get(name) for name, check in checks.items() if check["result"] is False} == NOT_SO


def test_pages_on_security_and_conduct_lead_somewhere():
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
            page, _, heading = target.partition("#")
            if "://" not in target:
                headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.M)
                assert not heading or heading in {text.lower().replace(" ", "-") for text in headings}
