"""Hot keys, from the requests of a server to the status: the lists of all servers, against exact counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_server import LoneServer
from servers import wait_until

import dps
from dps.engine.core.shards.heat import SpaceSaving
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.hot_keys import hot_keys
from dps.engine.telemetry.reports import MAX_HOT_KEYS, HotCounts, ServerReport
from dps.engine.telemetry.server_meter import SAMPLES_PER_SECOND, ServerMeter, TableMeter
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, encode_header
from dps.errors import ProtocolError

ROUNDED = 2e-6  # shares have six digits


def told(sketch: SpaceSaving) -> HotCounts:
    return HotCounts(accesses=sketch.total, keys=sketch.hottest(MAX_HOT_KEYS), more=sketch.rest(MAX_HOT_KEYS, 64))


def of_servers(seed: int, servers: int, keys: int, exponent: float) -> tuple[list[tuple[HotCounts, float]], Counter]:
    """What servers report of skewed accesses, each of other keys; and the true accesses per second of each key."""
    rng = np.random.default_rng(seed)
    parts, true = [], Counter[int]()
    for server in range(servers):
        ranks = np.arange(1, keys + 1.0) ** -exponent
        drawn = server + servers * rng.choice(keys, 3_000, p=ranks / ranks.sum())
        sketch = SpaceSaving()
        for key in drawn.tolist():
            sketch.add(key)
        rate = float(rng.choice([100.0, 3_000.0, 50_000.0]))
        parts.append((told(sketch), rate))
        true.update({key: rate * count / len(drawn) for key, count in Counter(drawn.tolist()).items()})
    return parts, true


Merge = Callable[[Any], tuple[list, list]]


def check_merge(merge: Merge, seed: int, servers: int, keys: int, exponent: float) -> None:
    parts, true = of_servers(seed, servers, keys, exponent)
    hottest, shares = merge(parts)
    total = sum(true.values())
    ranked = sorted(true.values(), reverse=True)
    assert len(hottest) <= MAX_HOT_KEYS
    assert [hot.rate for hot in hottest] == sorted((hot.rate for hot in hottest), reverse=True)
    for hot in hottest:
        assert hot.share - ROUNDED <= true[hot.key] / total <= hot.share + hot.error + ROUNDED
        assert hot.rate == pytest.approx(hot.share * total, abs=0.1)
    sure = {key for key, rate in true.items() if rate / total > 3 / 128 + hottest_error(parts, total)}
    assert sure <= {hot.key for hot in hottest}
    assert [hot.keys for hot in shares] == [1, 8, 64]
    for hot in shares[: 3 if servers == 1 else 2]:
        assert hot.share - ROUNDED <= sum(ranked[: hot.keys]) / total <= hot.share + hot.error + ROUNDED


def hottest_error(parts: list[tuple[HotCounts, float]], total: float) -> float:
    """The largest share that may have been counted for another key on any server."""
    return 2 * max(rate for _, rate in parts) / 128 / total


ANY_CASE = (
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.sampled_from([3, 60, 5_000]),
    st.sampled_from([0.0, 1.05, 1.5]),
)


@given(*ANY_CASE)
@settings(max_examples=40, deadline=None)
def test_the_lists_of_all_servers_are_one(seed: int, servers: int, keys: int, exponent: float) -> None:
    check_merge(hot_keys, seed, servers, keys, exponent)


def drops_a_server(parts: list[tuple[HotCounts, float]]) -> Any:
    return hot_keys(parts[:1])


def knows_no_rates(parts: list[tuple[HotCounts, float]]) -> Any:
    return hot_keys([(hot, hot["accesses"]) for hot, _ in parts])


def keeps_no_errors(parts: list[tuple[HotCounts, float]]) -> Any:
    return hot_keys([({**hot, "keys": [(key, count, 0.0) for key, count, _ in hot["keys"]]}, r) for hot, r in parts])


def forgets_the_rest(parts: list[tuple[HotCounts, float]]) -> Any:
    return hot_keys([({**hot, "more": (0.0, 0.0, 0.0)}, rate) for hot, rate in parts])


@pytest.mark.parametrize("wrong", [drops_a_server, knows_no_rates, keeps_no_errors, forgets_the_rest])
def test_a_wrong_merge_is_caught(wrong: Merge) -> None:
    def check() -> None:
        for seed in range(20):
            check_merge(wrong, seed, 1 + seed % 3, 5_000, 1.05)

    with pytest.raises(AssertionError):
        check()


def test_a_key_whose_shard_has_moved_is_one_key() -> None:
    one, other = SpaceSaving(), SpaceSaving()
    for sketch, weights in ((one, {5: 30.0, 6: 70.0}), (other, {5: 10.0})):
        for key, weight in weights.items():
            sketch.add(key, weight)
    hottest, shares = hot_keys([(told(one), 100.0), (told(other), 100.0)])
    assert [(hot.key, hot.rate, hot.share) for hot in hottest] == [(5, 130.0, 0.65), (6, 70.0, 0.35)]
    assert [hot.share for hot in shares] == [0.65, 1.0, 1.0]
    assert hot_keys([(told(one), 0.0)]) == hot_keys([]) == ([], []), "nothing is accessed now"


def test_where_all_keys_are_accessed_alike_none_is_hot() -> None:
    parts, _ = of_servers(0, 2, 100_000, 0.0)
    hottest, shares = hot_keys(parts)
    assert hottest == []
    assert shares[0].share < 0.01 < shares[1].share + shares[1].error


# -- reports


def meter_of(keys: np.ndarray) -> TableMeter:
    meter = TableMeter(1, 4)
    meter.count_keys(0, keys, 0, len(keys))
    return meter


def test_a_report_has_few_bytes_for_hot_keys() -> None:
    meter = meter_of(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 9_000, np.int64))
    assert len(frames.encode_json(meter.report()["hot"])) < 800  # type: ignore[index]


def report(**hot: object) -> bytes:
    about = TableMeter(1, 4).report()
    assert about is not None
    meter = ServerMeter(lambda: 0.0)
    return ServerReport.encode(
        {**meter.report({}, (0, 0, 0.0), 0, False), "tables": {1: {**about, "hot": {**about["hot"], **hot}}}}  # type: ignore[dict-item]
    )


def test_what_a_server_may_say_of_hot_keys_is_bounded() -> None:
    lowest, highest = -(1 << 63), (1 << 63) - 1
    kept = [[lowest, 1.5, 0], [highest, 1, 0.5]]
    decoded = ServerReport.decode(report(accesses=9.0, keys=kept, more=[1, 2, 3]))["tables"][1]["hot"]
    assert decoded == {"accesses": 9.0, "keys": [tuple(each) for each in kept], "more": (1, 2, 3)}
    for wrong in (
        {"keys": [[n, 1, 0] for n in range(MAX_HOT_KEYS + 1)]},
        {"keys": [[highest + 1, 1, 0]]},
        {"keys": [[1, -1, 0]]},
        {"keys": [[1, 1]]},
        {"accesses": -1},
        {"more": [1e30, 0, 0]},
    ):
        with pytest.raises(ProtocolError, match="hot"):
            ServerReport.decode(report(**wrong))


def test_the_samples_of_a_server_are_divided_among_its_tables() -> None:
    specs = [TableSpec(name, id=n, rows=1 << 20, shards=1) for n, name in enumerate("abc", 1)]
    server, now = LoneServer(specs, plain=True), [0.0]
    meters = ServerMeter(lambda: now[0])
    tables = server.role.tables
    for _ in range(3):
        for number in (1, 2):  # nothing is asked of the third
            header = Header(frames.PULL, frames.RANGE, table=number, shards=1, count=100_000)
            assert server.take(encode_header(header))
        meters.report(tables, (0, 0, 0.0), 0, anew=False)
        now[0] += 0.5
    assert tables[1].meter.heat.stride == tables[2].meter.heat.stride == 100_000 / (SAMPLES_PER_SECOND / 2 * 0.5)
    assert tables[3].meter.heat.stride == 1


# -- all of the way


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=[pytest.mark.processes, pytest.mark.thorough])])
def test_a_hot_key_shows_up_in_the_status(processes: bool) -> None:
    options: dict[str, Any] = {} if processes else {"processes": False}
    rng = np.random.default_rng(0)
    with (
        dps.LocalCluster(servers=2, trainers=1, dashboard_address=None, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
        ps.client() as user,
    ):
        ps.table("words", dim=2, shards=8)
        ps.table("rows", rows=1_000, shards=4)
        ps.table("idle")
        until, share = time.monotonic() + 100, 13 / 32

        def seen() -> Any:
            """A third of the accesses to words go to key -17, and half of those to rows to the first ten."""
            assert time.monotonic() < until
            for _ in range(20):
                keys = np.unique(rng.integers(0, 1 << 40, 40))[:16]
                user.push("words", np.append(keys, -17), np.ones((17, 2)))
                user.pull("words", keys[:3])
                for _ in range(12):
                    user.pull("words", [-17])
                user.pull("rows", slice(0, 10))
                user.pull("rows", rng.choice(np.arange(10, 1_000), 10, replace=False))
            tables = ps.status().tables
            settled = tables["words"].hot_keys and len(tables["rows"].hot_keys) >= 10
            return tables if settled and are_near(tables) else None

        def are_near(tables: Any) -> bool:
            """What is reported comes from samples, so it is near the shares once there are enough of these."""
            shares = tables["words"].hot_keys[0].share, tables["rows"].hot_shares[1].share
            return shares == pytest.approx((share, 0.4), abs=0.1)

        tables = wait_until(seen)
        words, rows, idle = tables["words"], tables["rows"], tables["idle"]
        assert words.hot_keys[0].key == -17
        assert words.hot_keys[0].rate == pytest.approx(share * words.keys_rate, rel=0.4)
        assert words.hot_shares[0].share == words.hot_keys[0].share
        assert set(range(10)) == {hot.key for hot in rows.hot_keys[:10]}
        assert (idle.hot_keys, idle.hot_shares) == ([], [])
