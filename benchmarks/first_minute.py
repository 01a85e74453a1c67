"""The first minute with dps: what an import costs, when a server is ready, and how long a first prediction takes.

Every figure is taken in processes of their own, one after another. Imports take turns with those of distributed, which
every user of dps has loaded anyway. The prediction is that of a logistic regression on a new cluster: its first fit is
compared with the second one on the same cluster. With `--environment`, dps is also installed into a new virtual
environment, from the sources, and the prediction is made there.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import ROOT, Report, parser

ROUNDS = 7
MB = 1 << 20

IMPORT = """
import json, resource, sys, time
began = time.perf_counter()
__import__(sys.argv[1])
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""

PREDICT = """
import json, os, sys, time
began = time.time()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if __name__ == "__main__":
    import numpy as np
    import dps
    import dps.models
    from dask.distributed import Client
    rng = np.random.default_rng(0)
    X = rng.normal(size=(10_000, 20))
    y = (X[:, 0] > 0).astype(int)
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        client.wait_for_workers(3)
        before = time.time()
        with dps.ParameterServer(client, servers=1) as ps:
            found = {"ready": time.time() - before}
            (server,) = [each.worker for each in ps.status().servers]
            found |= {"server": client.run(resident)[server]}
            found |= {"worker": min(client.run(resident).values())}
            for fit in ("first", "second"):
                before = time.time()
                model = dps.models.LogisticRegression(client=client, epochs=2).fit(X, y)
                model.predict(X[:10])
                found[fit] = time.time() - before
                if fit == "first":
                    found["prediction"] = time.time() - began
    print(json.dumps(found))
"""


def run(python: str | Path, code: str, *args: str) -> list[float] | dict[str, float]:
    """What a program prints last, as JSON; in a folder of its own, so that it imports what is installed."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(code)
        done = subprocess.run([python, program, *args], capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads(done.stdout.splitlines()[-1])


def imports(report: Report, python: str | Path, rounds: int) -> None:
    """Seconds and resident bytes of `import dps`, beside `import distributed`."""
    found: dict[str, list[list[float]]] = {"distributed": [], "dps": []}
    for turn in range(rounds + 1):  # the first one brings the files into the cache
        for name, rows in found.items():
            measured = run(python, IMPORT, name)
            if turn:
                rows.append(measured)
    seconds, nbytes = (
        {name: statistics.median(row[n] for row in rows) for name, rows in found.items()} for n in (0, 1)
    )
    beyond = seconds["dps"] - seconds["distributed"]
    report.duration("import dps", seconds["dps"], "import distributed", seconds["distributed"])
    report.add("import dps beyond that of distributed", beyond, "s", reach="<= 0.3 s")
    more = (nbytes["dps"] - nbytes["distributed"]) / MB
    report.add("memory of import dps", nbytes["dps"] / MB, "MB", "import distributed", nbytes["distributed"] / MB)
    report.add("memory of import dps beyond that of distributed", more, "MB", reach="<= 15 MB")


def predictions(report: Report, python: str | Path, rounds: int) -> None:
    """A cluster, a server, and two fits, in a new process for each round."""
    found = [run(python, PREDICT) for _ in range(rounds)]
    median = {name: statistics.median(each[name] for each in found) for name in found[0]}
    report.duration("interpreter to first prediction (cluster, server, fit)", median["prediction"])
    report.duration("server ready after its worker", median["ready"], reach="<= 500 ms")
    report.duration("first fit and prediction", median["first"], "the second", median["second"])
    report.add("resident memory of a server's worker", median["server"] / MB, "MB")
    report.add("resident memory of the smallest worker", median["worker"] / MB, "MB")


def environment(report: Report) -> None:
    """From an empty folder to the first prediction: installation from the sources, compilation included."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        subprocess.run([python, "-m", "pip", "-q", "install", f"{ROOT}[models]"], check=True)
        installed = time.monotonic() - began
        nbytes = sum(
            path.stat().st_size for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()
        )
        run(python, PREDICT)
        report.duration("new environment: pip install dps[models] from the sources", installed)
        report.add("new environment: on disk", nbytes / MB, "MB")
        report.duration("new environment: empty folder to first prediction", time.monotonic() - began)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--environment", action="store_true", help="also install dps into a new virtual environment")
    args = options.parse_args(argv)
    rounds = 1 if args.quick else ROUNDS
    with Report("the first minute", args.json) as report:
        imports(report, sys.executable, rounds)
        predictions(report, sys.executable, min(rounds, 5))
        if args.environment:
            environment(report)


if __name__ == "__main__":
    main()
