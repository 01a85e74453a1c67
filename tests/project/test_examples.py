"""The examples, run as a user would: each a program of its own, with real worker processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sparks
from miniyarn import standin

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = [
    "click_files",
    "dlrm",
    "estimator",
    "kill_a_server",
    "kill_the_scheduler",
    "knowledge_graph",
    "lbfgs_on_spark",
    "online_clicks",
    "online_learning",
    "page_rank",
    "rare_features",
    "recommender",
    "resume_run",
    "shared_table",
    "spark_pipeline",
    "topics",
    "torch_embedding",
    "train_loop",
    "update_function",
    "word_vectors",
    "yarn_submit",
]
LINES = 70
SECONDS = 300  # a limit for what hangs, on a busy machine

pytestmark = [pytest.mark.integration, pytest.mark.processes, pytest.mark.timeout(SECONDS + 30)]


@pytest.fixture
def run(tmp_path):
    """A function that runs an example in an empty folder and returns what it printed."""
    started = []

    def run(name: str, env: dict[str, str] | None = None, arguments: tuple[str, ...] = ()) -> str:
        process = subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{name} ended with {process.returncode}\n{output}\n{errors[-6000:]}"
        return output

    yield run
    for process in started:
        if process.poll() is None:  # out of time: its workers end with it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_all_are_short_and_in_the_gallery():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*NAMES, "demo"])  # which has tests of its own
    gallery = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"]({path.name})" in gallery, f"examples/README.md does not list {path.name}"
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES, name


def test_train_loop_agrees_with_the_serial_loop(run):
    (line,) = run("train_loop").splitlines()
    serial, trainers = numbers(line)
    assert serial == pytest.approx(trainers, abs=2e-5)
    assert serial < 0.35  # it has learned: all zeros give 0.693


def test_estimator_is_as_good_as_the_one_of_scikit_learn(run):
    theirs, ours = (numbers(line) for line in run("estimator").splitlines())
    assert ours[0] > theirs[0] - 0.01  # accuracy
    assert ours[1] < 1.02 * theirs[1]  # log-loss
    assert ours[1] < 0.6  # guessing the mean gives 0.69


def test_shared_table_counts_are_exact(run):
    *words, last = run("shared_table").splitlines()
    assert len(words) == 8
    assert sum(int(line.split()[1]) for line in words) == 150_000
    assert last.startswith("150000 words counted")


def test_update_function_is_not_misled_by_broken_thermometers(run):
    plain, clipped, warmest = run("update_function").splitlines()
    assert numbers(clipped)[0] < 0.2 * numbers(plain)[0]
    means = numbers(warmest)
    assert len(means) == 5
    assert means == sorted(means, reverse=True)


def test_topics_are_those_that_the_documents_are_made_of(run):
    theirs, *ours, clear, first, second, third, fourth = run("topics").splitlines()
    (alone,) = numbers(theirs)
    assert [line.split(":")[0] for line in ours] == ["batch", "online", "gibbs"]
    for line in ours:
        assert numbers(line)[0] < 1.06 * alone < 50
    assert int(clear.split()[-1]) > 1_800
    assert {word for line in (first, second, third, fourth) for word in line.split()[1:]}.isdisjoint({"common0"})


def test_recommender_finds_more_than_popularity(run):
    popular, ours, new = run("recommender").splitlines()
    assert numbers(ours)[0] > 3 * numbers(popular)[0]
    assert new.startswith("new viewer:")


def test_knowledge_graph_finds_facts_that_were_held_out(run):
    facts, *ranks = run("knowledge_graph").splitlines()
    ours, guess = map(numbers, ranks)  # MRR, hits@10
    assert int(re.findall(r"(\d+) of them", facts)[0]) > 500
    assert ours[0] > 0.4 > 10 * guess[0]
    assert ours[1] > 0.7 > 10 * guess[1]


def test_rare_features_gives_few_of_them_a_weight_and_loses_little(run):
    everything, admitted = run("rare_features").splitlines()
    rows, fewer = (int(re.findall(r"(\d+) weights", line)[0]) for line in (everything, admitted))
    assert rows > 100_000
    assert 500 < fewer < rows / 30
    loss, theirs = numbers(everything)[0], numbers(admitted)[0]
    assert loss < 0.5
    assert theirs < 1.01 * loss
    ages = [int(count) for count in re.findall(r"\d+", admitted.split("by age in days")[1])]
    assert len(ages) == 2  # what has not been seen for two days is gone
    assert sum(ages) == fewer


def test_torch_embedding_learns_what_users_like(run):
    pytest.importorskip("torch")
    ((loss, accuracy),) = map(numbers, run("torch_embedding").splitlines())
    assert loss < 0.35  # half of that of guessing, 0.693
    assert accuracy > 0.8


def test_dlrm_predicts_clicks(run):
    pytest.importorskip("torch")
    (line,) = run("dlrm").splitlines()
    right, guessing = numbers(line)
    assert int(line.split()[0]) > 5_000
    assert right > 0.75 > guessing + 0.15


@pytest.mark.spark
def test_lbfgs_on_spark_finds_the_minimum(run):
    pytest.importorskip("pyspark")
    sparks.prepare()
    *iterations, losses, last = run("lbfgs_on_spark").splitlines()
    falling = [numbers(line)[0] for line in iterations]
    assert len(falling) > 3
    assert falling == sorted(falling, reverse=True)
    ours, alone = numbers(losses)
    assert ours == pytest.approx(alone, abs=1e-8)
    slope, error = numbers(last)
    assert slope < 1e-4
    assert error < 0.2


def test_page_rank_is_that_of_a_plain_loop(run):
    near, *pages, last = run("page_rank").splitlines()
    assert 0.1 < numbers(near)[0] < 1
    ranks = [numbers(line)[0] for line in pages]
    assert len(ranks) == 5
    assert ranks == sorted(ranks, reverse=True)
    assert float(last.split()[-1]) < 1e-8


@pytest.mark.spark
def test_spark_pipeline_tells_clicks_apart(run):
    pytest.importorskip("pyspark")
    sparks.prepare()
    (line,) = run("spark_pipeline").splitlines()
    assert numbers(line)[0] > 0.7
    assert 200 < int(re.findall(r"(\d+) weights", line)[0]) <= 400


def test_click_files_are_better_than_a_guess(run):
    loss, area, sparse = run("click_files").splitlines()
    ours, guess = numbers(loss)
    assert ours < 0.9 * guess
    assert numbers(area)[0] > 0.7
    assert 0 < int(sparse.split()[0]) < 10_000


def test_kill_the_scheduler_loses_nothing(run):
    killed, *_, back, counts = run("kill_the_scheduler").splitlines()
    assert killed.startswith("the scheduler is killed after about 3")
    assert back == "the servers are back, and the trainers go on: [300, 300]"
    assert counts == f"counts: {[60] * 10}"


def test_kill_a_server_loses_nothing(run):
    killed, lost, moved, exact = run("kill_a_server").splitlines()
    number = killed.split()[1]
    assert f"server {number} was lost" in lost
    assert int(moved.split()[0]) >= 1
    assert exact.startswith("each of 10000 counts is 300")


def test_resume_run_gives_what_a_run_without_a_failure_gives(run):
    failed, resumed, exact = run("resume_run").splitlines()
    assert failed == "the run ended: the power is cut"
    assert int(re.findall(r"clock (\d+)", resumed)[0]) >= 51
    assert exact.startswith("all 50 sums are those of a run without a failure")


def test_online_learning_follows_the_change(run):
    (line,) = run("online_learning").splitlines()
    before, after = numbers(line)
    assert before > 0.7
    assert after > 0.6


def test_online_clicks_needs_a_fifth_of_the_memory_and_predicts_as_well(run):
    lines = run("online_clicks", arguments=("--compare",)).splitlines()
    bounded, unbounded = ([line for line in lines if f", {name}:" in line] for name in ("bounded", "unbounded"))
    (*mine, loss), (*theirs, other) = ([numbers(line) for line in each] for each in (bounded, unbounded))
    assert len(mine) == len(theirs) == 14
    assert loss[0] < 1.005 * other[0] < 0.6
    assert max(megabytes for _, megabytes in mine) <= 2 < theirs[-1][1] / 5
    rows, evicted, expired = (
        [int(re.findall(rf"(\d+) {what}", line)[0]) for line in bounded[:-1]] for what in ("rows", "evicted", "expired")
    )
    assert max(rows) < 55_000 < evicted[-1]
    assert expired[-1] > 0
    assert not any(re.search(r"[1-9]\d* (evicted|expired)", line) for line in unbounded)


def test_word_vectors_brings_words_of_one_kind_together(run):
    size, *near, fell = run("word_vectors").splitlines()
    assert int(size.split()[0]) > 100_000
    neighbours = {line.split(":")[0]: line for line in near}
    assert "columns" in neighbours["rows"]
    assert "maximum" in neighbours["minimum"]
    first, last = numbers(fell)
    assert last < 0.97 * first


@pytest.mark.yarn
@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")  # skein's
def test_yarn_submit_trains_in_containers(run, tmp_path):
    if missing := standin.needed():
        pytest.skip(missing)
    yarn = standin.MiniYarn(tmp_path / "yarn", ["", ""])
    try:
        containers, line = run("yarn_submit", yarn.env).splitlines()
        assert yarn.logs()
    except BaseException:
        print(yarn.log(), yarn.logs())
        raise
    finally:
        yarn.stop()
    assert re.match(
        r"application_\w+: dask.scheduler_0, dask.worker_0, dask.worker_1, dps.server_0, dps.server_1$", containers
    )
    assert numbers(line)[0] > 0.75
    assert int(line.split()[0]) == 5 * 20_000 // 200
