"""What late gradients cost, and what corrections of them give: least squares on virtual time, in numpy alone.

Four trainers; one iteration in ten takes ten times as long, and the bound is a staleness of 12. A correction changes
the step of a gradient that was made from old rows:

* *StalenessAware*: the rate is divided by the lag, as `dps.StalenessAware` does;
* *delay compensation*: the gradient gets ``strength * g * g * (w - w_pulled)`` more (Zheng et al., "Asynchronous
  Stochastic Gradient Descent with Delay Compensation", ICML 2017, Equation 10). A push has to bring `w_pulled`, so it
  has twice the bytes;
* *adaptive revision* of Adagrad: the squares that a rate falls with count the gradients that came meanwhile, and
  earlier steps are revised (McMahan and Streeter, "Delay-Tolerant Algorithms for Asynchronous Distributed Online
  Learning", NIPS 2014, Algorithm 1). A pull has to give the sum of gradients as well, and a push to bring it back.

The medians of the final losses of 20 seeds, and in how many of these a correction was better than none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.common import Report, parser

SEEDS, QUICK_SEEDS = 20, 4
COLUMNS, CLOCKS, TRAINERS, STALENESS = 8, 60, 4, 12
SLOW_SHARE, SLOW_TIMES = 0.1, 10
NOISE = 0.01
DIVERGED = 1e9


class Late(NamedTuple):
    """A gradient as it arrives."""

    gradient: np.ndarray
    lag: int
    since: np.ndarray  # by how much the weights have changed since they were pulled
    others: np.ndarray  # sum of the gradients that came meanwhile


class Weights:
    """Weights with the state of any of the optimizers."""

    def __init__(self) -> None:
        self.w, self.gradients = np.zeros(COLUMNS), np.zeros(COLUMNS)
        self.squares, self.largest = np.full(COLUMNS, 1e-10), np.full(COLUMNS, 1e-10)


Step = Callable[[Weights, Late, float], None]


def sgd(at: Weights, late: Late, rate: float) -> None:
    at.w -= rate * late.gradient


def sgd_aware(at: Weights, late: Late, rate: float) -> None:
    sgd(at, late, rate / max(1, late.lag))


def compensated(strength: float) -> Step:
    def step(at: Weights, late: Late, rate: float) -> None:
        at.w -= rate * (late.gradient + strength * late.gradient**2 * late.since)

    return step


def adagrad(at: Weights, late: Late, rate: float) -> None:
    at.squares += late.gradient**2
    at.w -= rate * late.gradient / np.sqrt(at.squares)


def adagrad_aware(at: Weights, late: Late, rate: float) -> None:
    adagrad(at, late, rate / max(1, late.lag))


def adaptive_revision(at: Weights, late: Late, rate: float) -> None:
    before = rate / np.sqrt(at.largest)
    at.squares += late.gradient**2 + 2 * late.gradient * late.others
    at.largest = np.maximum(at.largest, at.squares)
    after = rate / np.sqrt(at.largest)
    at.w += (before - after) * late.others - after * late.gradient


FAMILIES: dict[str, tuple[tuple[float, ...], dict[str, Step]]] = {
    "SGD": (
        (0.3, 0.6, 1.2),
        {
            "plain": sgd,
            "StalenessAware": sgd_aware,
            "delay compensation, 0.1": compensated(0.1),
            "delay compensation, 0.5": compensated(0.5),
            "delay compensation, 2": compensated(2.0),
        },
    ),
    "Adagrad": (
        (0.1, 0.5, 2.0),
        {"plain": adagrad, "StalenessAware": adagrad_aware, "adaptive revision": adaptive_revision},
    ),
}


def loss_after(step: Step, rate: float, seed: int) -> float:
    """The loss after one run. The same seed has the same gradients' noise and the same slow iterations."""
    random = np.random.default_rng(seed)
    truth, scales = random.normal(size=COLUMNS), np.linspace(0.3, 1.0, COLUMNS)
    at, clocks, waiting, now = Weights(), [0] * TRAINERS, set(range(TRAINERS)), 0.0
    busy: list[tuple[float, int, np.ndarray, np.ndarray]] = []
    while waiting or busy:
        for trainer in sorted(n for n in waiting if clocks[n] <= min(clocks) + STALENESS):
            waiting.discard(trainer)
            seconds = random.uniform(0.9, 1.1) * (SLOW_TIMES if random.random() < SLOW_SHARE else 1)
            heapq.heappush(busy, (now + seconds, trainer, at.w.copy(), at.gradients.copy()))
        now, trainer, pulled, summed = heapq.heappop(busy)
        gradient = scales * (pulled - truth) + NOISE * random.normal(size=COLUMNS)
        step(at, Late(gradient, max(clocks) - clocks[trainer], at.w - pulled, at.gradients - summed), rate)
        at.gradients += gradient
        clocks[trainer] += 1
        if clocks[trainer] < CLOCKS:
            waiting.add(trainer)
    return float(0.5 * np.sum(scales * (at.w - truth) ** 2))


def middle(losses: np.ndarray) -> float:
    """The median, where a run that diverged counts as the largest loss."""
    return float(np.median(np.minimum(np.nan_to_num(losses, nan=DIVERGED), DIVERGED)))


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    seeds = range(QUICK_SEEDS if args.quick else SEEDS)
    with Report("late gradients", args.json) as report, np.errstate(all="ignore"):
        for family, (rates, steps) in FAMILIES.items():
            for rate in rates:
                plain = np.array([loss_after(steps["plain"], rate, seed) for seed in seeds])
                for name, step in steps.items():
                    losses = np.array([loss_after(step, rate, seed) for seed in seeds])
                    case = f"{family}, rate {rate}, {name}: better in {np.sum(losses < plain)} of {len(seeds)}"
                    report.add(case, middle(losses), "loss", "plain", middle(plain))


if __name__ == "__main__":
    main()
