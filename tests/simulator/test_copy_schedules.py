"""Random schedules in which backups answer pulls: every pull shows what a pull from the primary would have to show."""

from __future__ import annotations

import random
from typing import Any

import dask
import pytest
from fault_schedules import LONG_TIMEOUTS
from split_schedules import at, chains, check_copies
from verdicts import assert_caught, problems

from dps.engine.client.copy_reads import CopyReads
from dps.engine.server.backup_pulls import BackupPulls
from dps.testing import Faults, Simulation

SCHEDULES = 240


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_every_pull_shows_what_it_has_to_whoever_answers(part: int) -> None:
    assert not problems(check_copies, SCHEDULES, part, parts=8)


def test_backups_answer_and_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"_respond_to": 0, "_give_up": 0}
    for name in counts:
        method = getattr(BackupPulls, name)

        def counted(self, *args, name=name, method=method):
            counts[name] += 1
            return method(self, *args)

        monkeypatch.setattr(BackupPulls, name, counted)
    for seed in range(60):
        check_copies(seed)
    assert counts["_respond_to"] > 100, counts
    assert counts["_give_up"] > 2, counts


# ---- readers and a writer that count, while servers are parted from each other and from the controller


def check_counts(seed: int) -> str:
    """One client counts in a row; others read it. Each pull shows all that was acknowledged before it was sent."""
    draw = random.Random(f"counts {seed}")
    servers = draw.choice((3, 3, 4))
    faults = Faults(latency=draw.choice(((1e-4, 1e-4), (1e-3, 1e-2))), restart=0.3, keep_alive=3.0)
    acknowledged, done = [0], []

    def count(client: Any) -> None:
        for number in range(1, 120):
            if draw.random() < 0.2:
                pending = client.push_async("w", [1], 1)
                assert client.pull("w", [1])[0] >= number, "a pull misses a push of its own client"
                pending.result()
            else:
                client.push("w", [1], 1)
            acknowledged[0] = number
            client.session.sleep(0.1 * draw.random())
        done.append(True)

    def read(client: Any, seed: int) -> None:
        pauses = random.Random(f"pauses {seed}")
        while not done:
            least = acknowledged[0]
            shown = client.pull("w", [1])[0]
            assert shown >= least, f"a pull shows {shown}, and {least} pushes were acknowledged before it was sent"
            client.session.sleep(0.05 * pauses.random())

    with (
        dask.config.set(LONG_TIMEOUTS),
        Simulation(seed, servers, trainers=1, copies=3, faults=faults, timeout=900.0) as sim,
    ):
        sim.table("w", dtype="int64", shards=1, reads="copies")
        ((first, second, third),) = chains(sim)
        names = [f"server-{n}" for n in (first, second, third)]
        tasks = [sim.submit(count), *(sim.submit(read, reader) for reader in range(4))]
        when = 0.3
        for _ in range(draw.choice((1, 2, 2, 3))):
            here = draw.sample([*names, "controller"], draw.choice((1, 1, 2)))
            there = [name for name in (*names, "controller") if name not in here]
            there = draw.sample(there, draw.randint(1, len(there)))
            seconds = draw.choice((0.3, 3.0, 5.0))
            kind = draw.choice(("part", "part", "part", "stop", "crash", "split"))
            if kind == "part":
                sim.part(here, there, seconds, at=when, one_way=draw.random() < 0.3)
            elif kind == "stop":
                sim.stop(here[0], seconds, at=when)
            elif kind == "crash" and servers == 4 and here[0] != "controller":
                sim.crash(here[0], at=when, silent=draw.random() < 0.5)
            elif kind == "split":
                at(sim, when, lambda: sim.split("w"))
            when += draw.choice((0.1, 2.6, 4.0)) * draw.random()
        sim.gather(tasks)
        sim.rest()
        assert sim.client().pull("w", [1]).tolist() == [119]
        return sim.digest()


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_every_pull_shows_what_was_acknowledged_before_it(part: int) -> None:
    assert not problems(check_counts, 80, part, parts=4)


# ---- wrong

WRONG = {
    "a backup asks nobody": (
        (BackupPulls, "_take", "leaders.add(replica.place.chain[0])", "pull.versions[replica.number] = 0"),
        *(check_counts, 3),
    ),
    "a primary without a lease tells its version": (
        (BackupPulls, "tell", "table.reads_copies and self._holds_lease()", "True"),
        *(check_counts, 15),
    ),
    "a server answers for shards of which it was the primary": (
        (BackupPulls, "_check_own_shards", "not (held and self._holds_lease())", "False"),
        *(check_counts, 25),
    ),
    "pushes that are on their way do not count": (
        (CopyReads, "may_answer", "not any(is_on_its_way", "True or any(is_on_its_way"),
        *(check_copies, 141),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patch, check, seed = WRONG[name]
    assert_caught(monkeypatch, [patch], check, [seed, *range(200)])
