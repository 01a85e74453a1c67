"""What the monitor reads of the controller's runs and membership, and what it asks of them.

The classes of `dps/engine/controller` satisfy these contracts, which mypy checks. Telemetry imports no party.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from dps.engine.telemetry.run_telemetry import RunTelemetry
from dps.engine.telemetry.snapshot import ServerPhase, TrainerPhase

__all__ = [
    "MonitoredClock",
    "MonitoredMembership",
    "MonitoredPlace",
    "MonitoredPortions",
    "MonitoredRequest",
    "MonitoredRun",
    "MonitoredRuns",
    "MonitoredServer",
    "MonitoredTrainer",
]


class MonitoredClock(Protocol):
    @property
    def minimum(self) -> int: ...
    def clock_of(self, trainer: int, /) -> int: ...
    def ages(self, now: float, /) -> list[float]: ...


class MonitoredRequest(Protocol):
    @property
    def since(self) -> float: ...


class MonitoredPortions(Protocol):
    def describe(self) -> dict[str, int]: ...


class MonitoredTrainer(Protocol):
    @property
    def where(self) -> str: ...
    @property
    def planned(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def seconds(self) -> dict[str, float] | None: ...


class MonitoredRun(Protocol):
    """What the monitor reads of a run, and the two things that it sets there: `finish` and `telemetry`."""

    number: int
    trainers: int
    staleness: float
    reassign: bool | str
    elastic: bool
    began: float
    ended: bool
    finish: float | None
    telemetry: RunTelemetry | None

    @property
    def stopped(self) -> Exception | None: ...
    @property
    def clock(self) -> MonitoredClock: ...
    @property
    def work_leases(self) -> MonitoredPortions | None: ...
    @property
    def ticking(self) -> Mapping[int, MonitoredRequest]: ...
    @property
    def meeting(self) -> Mapping[int, MonitoredRequest]: ...
    @property
    def seated(self) -> int: ...
    @property
    def over(self) -> bool: ...
    @property
    def active(self) -> bool: ...
    def record(self, trainer: int, /) -> MonitoredTrainer: ...
    def phase(self, trainer: int, /) -> TrainerPhase: ...
    def left(self) -> list[int]: ...
    def places(self) -> dict[int, str]: ...
    def stop_telemetry(self) -> None: ...


class MonitoredRuns(Protocol):
    """All runs as the monitor sees them: it reads their state, and sets what is automatic, staleness and `reassign`."""

    session: str

    @property
    def runs(self) -> Mapping[int, MonitoredRun]: ...
    def known(self, number: int, /) -> MonitoredRun: ...
    def going(self, number: int = 0, /) -> Sequence[MonitoredRun]: ...
    def set_staleness(self, staleness: float, number: int = 0, by: str = "", /) -> list[int]: ...
    def set_reassign(self, reassign: bool | str, number: int = 0, why: str = "", /) -> None: ...


class MonitoredServer(Protocol):
    number: int
    worker: str
    key: str
    address: tuple[str, int] | None

    @property
    def up(self) -> bool: ...
    @property
    def phase(self) -> ServerPhase: ...


class MonitoredPlace(Protocol):
    @property
    def chain(self) -> tuple[int, ...]: ...
    @property
    def joiner(self) -> int | None: ...


class MonitoredMembership(Protocol):
    """What the monitor reads of the membership, and how it notes events there."""

    epoch: int
    failures: int

    @property
    def servers(self) -> Mapping[int, MonitoredServer]: ...
    @property
    def specs(self) -> Mapping[str, dict[str, Any]]: ...
    @property
    def places(self) -> Mapping[str, Sequence[MonitoredPlace]]: ...
    @property
    def events(self) -> Iterable[tuple[float, str]]: ...
    def news(self) -> list[tuple[float, str]]: ...
    def note(self, text: str, *, stands: Callable[[], bool]) -> None: ...
    def mention(self, text: str, /) -> None: ...
