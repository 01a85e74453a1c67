"""The status of one table, from the reports of its servers and from what they have answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dps.engine.telemetry.hot_keys import hot_keys
from dps.engine.telemetry.monitored import MonitoredPlace
from dps.engine.telemetry.reports import HotCounts
from dps.engine.telemetry.server_telemetry import ServerRates, ServerTelemetry, together
from dps.engine.telemetry.snapshot import HeldRows, TableStatus, TableTraffic, Turnover

__all__ = ["table_status"]


def table_status(
    spec: Mapping[str, Any],
    optimizer: str,
    places: Sequence[MonitoredPlace],
    readings: Iterable[tuple[ServerTelemetry, HeldRows | None]],
) -> TableStatus:
    """The status of a table; of each server its reports, and what it has answered, which is newer."""
    number, load = spec["id"], [0.0] * spec["shards"]
    rows = nbytes = 0.0
    parts: list[ServerRates] = []
    turnovers: list[Turnover] = []
    hot: list[tuple[HotCounts, float]] = []
    traffic = [0.0] * 4
    pulls = as_backup = 0.0
    for watch, held in readings:
        counts = watch.tables().get(number)
        if held is not None:
            rows, nbytes = rows + held.rows, nbytes + held.bytes
            turnovers += [held.turnover] if held.turnover is not None else []
        elif counts is not None:
            rows, nbytes = rows + counts["rows"], nbytes + counts["bytes"]
            if "turnover" in counts:
                full, *numbers = counts["turnover"]
                turnovers.append(Turnover(full, *map(int, numbers)))
        if counts is None:
            continue
        parts.append(watch.rates([number]))
        traffic = [total + more for total, more in zip(traffic, counts.get("traffic", [0.0] * 4), strict=True)]
        pulls, as_backup = pulls + counts["pull"][0], as_backup + counts.get("as_backup", 0.0)
        hot.append((counts["hot"], parts[-1].keys))
        for shard, keys in watch.loads(number).items():
            if shard < len(load):
                load[shard] += keys
    rates = together(parts)
    hottest, shares = hot_keys(hot)
    return TableStatus(
        name=spec["name"],
        id=number,
        keys=spec["rows"],
        dim=spec["dim"],
        dtype=spec["dtype"],
        optimizer=optimizer,
        copies=spec["copies"],
        chains=[list(place.chain) for place in places],
        joiners=[place.joiner for place in places],
        rows=int(rows),
        bytes=int(nbytes),
        requests_rate=round(rates.requests, 2),
        keys_rate=round(rates.keys, 2),
        bytes_rate=round(rates.bytes, 2),
        p50=rates.p50,
        p99=rates.p99,
        load=[round(keys, 1) for keys in load],
        hot_keys=hottest,
        hot_shares=shares,
        turnover=Turnover.together(turnovers),
        staleness=spec.get("staleness"),
        traffic=TableTraffic(*map(int, traffic)),
        backup_share=round(as_backup / max(pulls, 1.0), 4) if spec.get("reads") == "copies" else None,
    )
