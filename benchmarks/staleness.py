"""How much staleness: the share of their time that trainers wait, and the loss, against the bound 0, 1, 2, 4, 8, 16.

Real trainers are threads of this process, and their steps are slept through, so that two cores are enough for them: at
every bound the same seeded random delays, on top of the real work of a small sparse logistic regression. Simulated ones
are steps of random lengths and the run's own `Clock`, in virtual time: messages take none. What is counted is the time
from a trainer's first step to its own last, so that waiting for the end of the others is no part of it.
"""

from __future__ import annotations

import dataclasses
import heapq
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.datasets import zipf_clicks
from dps.engine.coordination.clock import Clock
from dps.kernels import logistic

BOUNDS = (0, 1, 2, 4, 8, 16)
MEAN = 0.016  # seconds of a step, slept through
Draw = Callable[[np.random.Generator, int], np.ndarray]
DRAWS: dict[str, Draw] = {
    "exponential": lambda rng, steps: rng.exponential(MEAN, steps),
    "log-normal 0.3": lambda rng, steps: MEAN * rng.lognormal(-0.045, 0.3, steps),  # of the same mean
}
PUBLISHED = {0: 50.0, 16: 1.7}  # % of the time: Li et al., OSDI 2014, figure 13
RATE, BATCH, ROWS, FEATURES = 0.05, 50, 2000, 1 << 10  # rows of each trainer
POINTS = 40  # of a curve of the loss


def delays(draw: str, seed: int, trainers: int, steps: int, pinned: float = 1.0) -> np.ndarray:
    """Seconds of each step of each trainer; those of trainer 0 are longer by a factor, for good."""
    rng = np.random.default_rng([seed, trainers])
    found = DRAWS[draw](rng, trainers * steps).reshape(trainers, steps)
    found[0] *= pinned
    return found


# -- simulated trainers


def simulate(steps: np.ndarray, bound: int) -> float:
    """The share of their time that trainers wait whose steps take so long."""
    trainers, count = steps.shape
    clock = Clock(bound, trainers)
    for trainer in range(trainers):
        clock.join(trainer, 0, 0.0)
    ends = [(steps[trainer, 0], trainer) for trainer in range(trainers)]
    heapq.heapify(ends)
    done = [0] * trainers
    since = [0.0] * trainers
    waited = total = 0.0
    while ends:
        now, trainer = heapq.heappop(ends)
        done[trainer] += 1
        since[trainer] = now
        if done[trainer] == count:  # its end: it waits for no other trainer, and no other waits for it
            total += now
            freed = clock.leave(trainer, now)
        else:
            freed = clock.tick(trainer, done[trainer], now)
        for other in freed:
            waited += now - since[other]
            heapq.heappush(ends, (now + steps[other, done[other]], other))
    return waited / total


def simulated(draw: str, trainers: int, steps: int, seeds: int, pinned: float = 1.0) -> list[float]:
    """The share at each bound, in %; the mean over some seeds."""
    found = [
        [100 * simulate(delays(draw, seed, trainers, steps, pinned), bound) for bound in BOUNDS]
        for seed in range(seeds)
    ]
    return np.mean(found, axis=0).tolist()


# -- real ones


@dataclasses.dataclass
class Outcome:
    """One real run: % of the time spent waiting, its length, and weights on the way, each with when and how far."""

    idle: float
    seconds: float
    weights: list[tuple[float, float, np.ndarray]]  # seconds, steps of a trainer, weights


clocks: list[int] = []  # of the trainers of the run that goes on: they are threads of this process


def train(trainer: dps.Trainer, partitions: list, steps: np.ndarray) -> tuple[float, float, float, float]:
    """The training function. Returns when it began and ended, and the seconds of waiting and in all."""
    X, y = partitions[0]
    batches = [(*dps.localize(X[a : a + BATCH]), y[a : a + BATCH]) for a in range(0, len(y), BATCH)]
    trainer.pull("w", batches[0][0])
    trainer.barrier()
    waited, began = 0.0, time.perf_counter()
    for n, seconds in enumerate(steps[trainer.number]):
        keys, local, labels = batches[n % len(batches)]
        weights = trainer.pull("w", keys)
        _, gradient, _ = logistic(local.indptr, local.indices, local.data, weights, -1.5, labels, scale=1 / len(labels))
        time.sleep(seconds)
        trainer.push("w", keys, gradient)
        clocks[trainer.number] = n + 1
        if n + 1 < steps.shape[1]:
            trainer.wait()
            before = time.perf_counter()
            trainer.tick()
            waited += time.perf_counter() - before
    end = time.perf_counter()
    return began, end, waited, end - began


def real(ps: dps.ParameterServer, data: list, steps: np.ndarray, bound: int) -> Outcome:
    """Train a fresh table, and look at it on the way."""
    clocks[:] = [0] * len(steps)
    ps.table("w", rows=FEATURES, optimizer=dps.Adagrad(RATE, initial_accumulator=1e-6))
    looks: list[tuple[float, float, np.ndarray]] = []
    over = threading.Event()

    def look() -> None:
        with ps.client() as client:
            while not over.wait(0.05):
                looks.append((time.perf_counter(), statistics.mean(clocks), client.pull("w").copy()))
            looks.append((time.perf_counter(), statistics.mean(clocks), client.pull("w").copy()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        results = ps.run(train, data[: len(steps)], staleness=bound, args=(steps,), progress=False)
    finally:
        over.set()
        looking.join()
        ps.drop_table("w")
    begins, ends, waits, totals = zip(*results, strict=True)
    began, end = min(begins), max(ends)
    weights = [(min(when, end) - began, done, w) for when, done, w in looks if done]
    return Outcome(100 * sum(waits) / sum(totals), end - began, weights)


@dataclasses.dataclass
class Curve:
    """The held-out loss of one run, on the way."""

    seconds: np.ndarray
    epochs: np.ndarray
    loss: np.ndarray

    @classmethod
    def of(cls, outcome: Outcome, X: Any, y: np.ndarray) -> Curve:
        seconds, steps, weights = zip(*outcome.weights, strict=True)
        z = X @ np.array(weights).T - 1.5  # the true intercept: only weights are learned
        loss = np.mean(np.logaddexp(0, z) - y[:, None] * z, axis=0)
        return cls(np.array(seconds), np.array(steps) * BATCH / ROWS, loss)

    def at(self, axis: str, where: np.ndarray) -> np.ndarray:
        return np.interp(where, getattr(self, axis), self.loss)


def middle(curves: list[Curve], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(where, median, least, greatest) of the loss of some runs, for as long as all of them lasted."""
    first = max(getattr(curve, axis)[0] for curve in curves)
    last = min(getattr(curve, axis)[-1] for curve in curves)
    where = np.linspace(first, last, POINTS)
    losses = np.array([curve.at(axis, where) for curve in curves])
    return where, np.median(losses, axis=0), losses.min(axis=0), losses.max(axis=0)


# -- all of it

Shares = dict[str, list[float]]  # of each case: % of the time, at each bound


@dataclasses.dataclass(frozen=True)
class Case:
    """Real trainers, and which steps they make: so that simulated ones can make the same."""

    name: str
    draw: str
    trainers: int
    seeds: int
    pinned: float = 1.0

    def plan(self, seed: int, steps: int) -> np.ndarray:
        return delays(self.draw, seed, self.trainers, steps, self.pinned)


FOUR = Case("4 real trainers", "exponential", 4, 5)
CASES = (FOUR, Case("2 real trainers", "exponential", 2, 1))
CASES += (Case("4 real trainers, one 2 x slow", "log-normal 0.3", 4, 1, pinned=2.0),)


def measure_real(quick: bool) -> tuple[Shares, Shares, dict[int, list[Curve]]]:
    """Real trainers, and what simulated ones do in the same steps; the loss of the first case."""
    shares: Shares = {}
    beside: Shares = {}
    curves: dict[int, list[Curve]] = {bound: [] for bound in BOUNDS}
    steps = 30 if quick else 160
    with (
        dps.LocalCluster(servers=1, trainers=4, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        data = list(parts(client))
        X, y = zipf_clicks(4000, FEATURES, start=4 * ROWS)
        real(ps, data, FOUR.plan(0, 10), 0)  # compiles
        for case in CASES:
            plans = [case.plan(seed, steps) for seed in range(1 if quick else case.seeds)]
            found = [[real(ps, data, plan, bound) for bound in BOUNDS] for plan in plans]
            shares[case.name] = np.median([[outcome.idle for outcome in runs] for runs in found], axis=0).tolist()
            same = [[100 * simulate(plan, bound) for bound in BOUNDS] for plan in plans]
            beside[case.name] = np.median(same, axis=0).tolist()
            for runs in found if case is FOUR else ():
                for bound, outcome in zip(BOUNDS, runs, strict=True):
                    curves[bound].append(Curve.of(outcome, X, y))
    return shares, beside, curves


def parts(client: Client) -> Iterator[Any]:
    """The rows of each trainer, where it is."""
    workers = [w for w, info in client.scheduler_info(n_workers=-1)["workers"].items() if "trainer" in info["name"]]
    for n, worker in enumerate(workers):
        yield client.submit(part, n * ROWS, workers=[worker], pure=False)


def part(start: int) -> tuple[Any, np.ndarray]:
    X, y = zipf_clicks(ROWS, FEATURES, start=start)
    return X, y.astype(np.float32)


def measure_simulated(quick: bool) -> Shares:
    """Simulated trainers, many of them."""
    seeds, steps = (1, 100) if quick else (3, 400)
    shares = {f"{n} simulated, {draw}": simulated(draw, n, steps, seeds) for draw in DRAWS for n in (8, 32, 128)}
    return shares | {"32 simulated, one 2 x slow": simulated("log-normal 0.3", 32, steps, seeds, pinned=2.0)}


def rows(report: Report, shares: Shares, beside: Shares, curves: dict[int, list[Curve]]) -> None:
    """What was found, as rows."""
    for case, found in shares.items():
        for bound, share in zip(BOUNDS, found, strict=True):
            known = PUBLISHED.get(bound) if "slow" not in case else None
            against, value = (None, None) if known is None else ("published (OSDI 2014)", known)
            if case in beside:
                against, value = "simulated, the same steps", beside[case][BOUNDS.index(bound)]
            report.add(f"idle, {case}, staleness {bound}", share, "%", against, value)
    moment = min(curve.seconds[-1] for found in curves.values() for curve in found)
    epochs = min(curve.epochs[-1] for found in curves.values() for curve in found)
    for bound, found in curves.items():
        for axis, where, unit in (("seconds", moment, "s"), ("epochs", epochs, "epochs")):
            losses = [float(curve.at(axis, np.array([where]))[0]) for curve in found]
            case = f"loss after {where:.2f} {unit}, staleness {bound} ({min(losses):.4f} to {max(losses):.4f})"
            report.add(case, statistics.median(losses), "")
        lasted = statistics.median(curve.seconds[-1] for curve in found)
        report.add(f"seconds of the run, staleness {bound}", lasted, "s")


# -- the figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")  # told apart by the colour-blind
MARKERS = "os^Dv*"


def draw_figure(path: str, shares: Shares, curves: dict[int, list[Curve]]) -> None:
    """Idle share against the bound; loss against time and against epochs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "dps"}
    figure, (idle, seconds, epochs) = plt.subplots(1, 3, figsize=(12, 4), facecolor="white", layout="constrained")
    shown = ("2 real trainers", "4 real trainers", "8 simulated, exponential", "128 simulated, exponential")
    shown += ("128 simulated, log-normal 0.3", "32 simulated, one 2 x slow")
    for case, colour, marker in zip(shown, COLOURS, MARKERS, strict=True):
        style = "--" if "slow" in case else "-" if "real" in case else ":"
        idle.plot(range(len(BOUNDS)), shares[case], style, color=colour, marker=marker, markersize=4, label=case)
    at = [BOUNDS.index(bound) for bound in PUBLISHED]
    idle.plot(at, list(PUBLISHED.values()), "x", color="0.4", markersize=8, label="published (OSDI 2014)")
    idle.set_xticks(range(len(BOUNDS)), [str(bound) for bound in BOUNDS])
    idle.set(xlabel="staleness", ylabel="share of the time spent waiting, %", ylim=(0, 90))
    idle.legend(fontsize=7, frameon=False, ncols=1)
    for axis, name in ((seconds, "seconds"), (epochs, "epochs")):
        for bound, colour, style in zip((0, 2, 16), COLOURS, ("-", "--", "-."), strict=False):
            where, loss, least, most = middle(curves[bound], name)
            axis.plot(where, loss, style, color=colour, label=f"staleness {bound}")
            axis.fill_between(where, least, most, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel=name, ylabel="held-out loss")
        axis.legend(fontsize=8, frameon=False)
    for axis in (idle, seconds, epochs):
        axis.grid(color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--figure", metavar="FILE", help="draw it there too, as SVG (needs matplotlib)")
    args = options.parse_args(argv)
    with Report("idle share and loss against staleness", args.json) as report:
        shares, beside, curves = measure_real(args.quick)
        shares |= measure_simulated(args.quick)
        rows(report, shares, beside, curves)
        if args.figure:
            draw_figure(args.figure, shares, curves)
            report.note(f"drawn: {args.figure}, {Path(args.figure).stat().st_size:,} bytes")


if __name__ == "__main__":
    from benchmarks.staleness import main as run  # so that trainers, threads of this process, share our `clocks`

    run()
