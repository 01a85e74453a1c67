"""A plain Python process shares a table with Dask tasks.

All count words in the same table at the same time. The process is no part of the Dask cluster and has no Dask client:
a pickled `dps.Client` is all it gets. Every push is applied once, also where Dask runs a task again, so the counts are
exact at the end. (The plain process is not run again by anything: if it failed, a second one would count anew.)
"""

import pickle
import subprocess
import sys
from collections import Counter

import numpy as np
from dask.distributed import Client

import dps

WORDS = ["pull", "push", "tick", "table", "shard", "server", "trainer", "client"]


def text(number):
    return np.random.default_rng(number).choice(WORDS, size=1_000)


def count(client, numbers):
    for number in numbers:
        client.push("counts", dps.hash_strings(text(number)), 1)  # repeated keys of a push are summed
    return len(numbers)


def plain_process():
    """What the other process does: it reads its client from standard input."""
    with pickle.load(sys.stdin.buffer) as client:
        count(client, range(100, 150))


if __name__ == "__main__" and sys.argv[1:] == ["plain"]:
    plain_process()

elif __name__ == "__main__":
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as dask, dps.ParameterServer(dask) as ps:
        ps.table("counts", dtype="int64")  # keyed, zero at first; a push adds
        other = subprocess.Popen([sys.executable, __file__, "plain"], stdin=subprocess.PIPE)
        other.stdin.write(pickle.dumps(ps.client()))
        other.stdin.close()
        tasks = dask.map(count, [ps.client()] * 10, [range(n, n + 10) for n in range(0, 100, 10)])
        assert sum(dask.gather(tasks)) == 100
        assert other.wait(60) == 0
        counts = ps.client().pull("counts", dps.hash_strings(WORDS))

    expected = Counter(np.concatenate([text(number) for number in range(150)]).tolist())
    for word, number in zip(WORDS, counts, strict=True):
        print(f"{word:8}{number:7}")
    assert counts.tolist() == [expected[word] for word in WORDS]
    print(f"{counts.sum()} words counted: 100 texts by Dask tasks, 50 by a plain process")
