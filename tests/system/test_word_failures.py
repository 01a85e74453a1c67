"""Words on real servers that are killed while trainers give them ids."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from kills import pids_of
from servers import wait_until

import dps


def is_whole(ps: dps.ParameterServer, without: int) -> bool:
    """Whether each shard has two copies again, none of them on that server."""
    return all(len(chain) == 2 and without not in chain for chain in ps.status().tables["words"].chains)


@pytest.mark.processes
def test_no_word_gets_two_ids_and_each_is_counted_once_while_servers_and_a_trainer_are_killed() -> None:
    with (
        dps.LocalCluster(servers=3, trainers=3) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        words, clocks, trainers = ps.vocabulary("words", counts=True), 60, 2

        def text(turn: int) -> list[str]:
            return [f"w{n}" for n in range(40 * turn, 40 * turn + 60)]

        def train(trainer, parts):
            seen, found = trainer.vocabulary("words"), {}
            for turn in range(clocks):
                found |= dict(zip(text(turn), seen.count(text(turn)).tolist(), strict=True))
                time.sleep(0.02)
                trainer.tick()
            return found

        def kill(turn: int, number: int) -> None:
            wait_until(lambda: any(run.minimum >= turn for run in ps.status().runs))
            servers, others = pids_of(ps)
            os.kill((servers if number < 0 else others)[0], signal.SIGKILL)

        def harm() -> None:
            kill(5, 0)  # a trainer
            victim = next(server.number for server in ps.status().servers if server.alive)
            kill(15, -1)
            wait_until(lambda: is_whole(ps, without=victim))

        thread = threading.Thread(target=harm)
        thread.start()
        found = ps.run(train, np.arange(trainers), staleness=1, retries=2)
        thread.join()
        expected = {word for turn in range(clocks) for word in text(turn)}
        ids = words.ids(sorted(expected), assign=False)
        assert (ids >= 0).all()
        assert len(set(ids.tolist())) == len(ids) == len(words)
        assert found == [dict(found[0])] * trainers
        assert found[0] == dict(zip(sorted(expected), ids.tolist(), strict=True))
        assert words.words(ids) == sorted(expected)
        assert int(words.counts(ids).sum()) == trainers * clocks * 60
