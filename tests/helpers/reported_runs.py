"""Runs whose trainers and servers report what a test says, and what the rules of diagnosis find in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dps.engine.telemetry.diagnosis import COLUMNS, Diagnosis, Finding, History, ServerReading


def row(**columns: float) -> list[float]:
    made = dict.fromkeys(COLUMNS, 0.0) | columns
    parts = sum(made[name] for name in ("compute", "pull", "wait", "push", "serialise"))
    return list((made | {"total": parts}).values())


class Run:
    """A run in which every trainer reports four times a second; `tell` says what of each clock."""

    def __init__(self, trainers: int = 4, servers: int = 2, clocks: float = 10, staleness: float = 0):
        self.history, self.now, self.clocks, self.staleness = History(trainers), 0.0, clocks, staleness
        self.diagnosis = Diagnosis(self.history)
        self.trainers, self.servers, self.coarse = trainers, servers, False
        self.clock = [0.0] * trainers
        self.findings: list[Finding] = []

    def go(self, seconds: float, *, states: Mapping[int, str] | None = None, **how: Any) -> list[Finding]:
        """`seconds` more. `how`: as in `second`."""
        for _ in range(round(seconds)):
            self.second(states or {}, **how)
        return self.findings

    def second(
        self,
        states: Mapping[int, str],
        reported: Mapping[int, Mapping[str, float]] | None = None,
        silent: Mapping[int, float] | None = None,
        servers: list[ServerReading] | None = None,
        at: Mapping[int, float] | None = None,
    ) -> None:
        """`reported`: of some trainers, what they do a clock (else 10 ms of computing, 2 of pulling, 1 of pushing);
        `silent`: of some, for how long they have been; `at`: of the servers, the seconds a clock."""
        silent = silent or {}
        for _ in range(4):
            self.now += 0.25
            for n in range(self.trainers):
                if n in silent or states.get(n) == "left":
                    continue
                usual = {"compute": 0.01, "pull": 0.002, "push": 0.001, "rows": 100, "keys_pulled": 500, "pulls": 1}
                per = usual | dict((reported or {}).get(n, {}))
                seconds = sum(per.get(name, 0) for name in ("compute", "pull", "wait", "push"))
                clocks = 0.25 / seconds
                self.clock[n] += clocks
                blocked = {m: (clocks, clocks * (at or {}).get(m, 0.0)) for m in range(self.servers)}
                scaled = {name: value * clocks for name, value in per.items()}
                reported_clocks = 0 if self.coarse else clocks
                self.history.report(n, self.now, row(clocks=reported_clocks, **scaled), int(self.clock[n]), blocked)
        for n, age in silent.items():
            self.history.ended[n] = self.now - age
        ages = [silent.get(n, 0.01) for n in range(self.trainers)]
        state = [states.get(n, "running") for n in range(self.trainers)]
        servers = servers if servers is not None else [healthy(n) for n in range(self.servers)]
        clocks_ = [int(clock) for clock in self.clock]
        self.findings = self.diagnosis.diagnose(self.now, clocks_, state, ages, servers, self.staleness)


def healthy(number: int) -> ServerReading:
    return ServerReading(number, 2e-4, 1e-3, 1e-3, True, 0.2)


def kinds(findings: list[Finding]) -> list[tuple[str, int | None, int | None]]:
    return [(f.kind, f.trainer, f.server) for f in findings]
