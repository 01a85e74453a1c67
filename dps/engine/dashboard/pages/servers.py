"""Plots about servers: the state of each server, the load of shards and keys, the throughput, and the placement."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Unpack

import numpy as np
from bokeh.models import BasicTicker, ColorBar, ColumnDataSource, FixedTicker, LinearColorMapper, Range1d

from dps.engine.dashboard.markup import escape
from dps.engine.dashboard.pages.style import (
    INK,
    Drawn,
    Html,
    PlotLayout,
    heading,
    hover,
    html_table,
    new_figure,
    nice,
    number,
    plain,
    put,
    slim,
    ticks,
)
from dps.engine.dashboard.palette import BLUE, GREEN, ORANGE, SEQUENTIAL
from dps.engine.dashboard.text import (
    budget_text,
    busy_text,
    duration_text,
    hot_share_text,
    number_text,
    size_text,
    traffic_text,
    turnover_text,
)
from dps.engine.telemetry.hot_keys import HOTTEST
from dps.engine.telemetry.snapshot import ServerPhase, ServerStatus, Status, TableStatus, Throughput

__all__ = ["HotKeysPlot", "PlacementPlot", "ServersPlot", "ShardsPlot", "ThroughputPlot"]

MAX_SERVERS = 24
MAX_TABLES = 16
MAX_CELLS = 128
MAX_EVENTS = 16
MAX_KEYS = 8  # hot keys of a table
# Number of a table's shards up to which cells name their servers.
MAX_NAMED_SHARDS = 32
# Multiple of the median of all servers from which a p99 is marked.
SLOW_FACTOR = 3.0


class ServersPlot(Html):
    """One row for each server, with marks for high latencies and busy threads; of many servers the slowest."""

    every = 2
    name = "servers"
    asks = "Is a server slow, full, or behind with its copies?"
    shows = "▲ marks a p99 of more than three times the usual, and a server that is a bottleneck."

    def title(self, snapshot: Status | None) -> str:
        servers = snapshot.servers if snapshot else []
        if not servers:
            return "Servers: none"
        rows, memory = sum(server.rows for server in servers), sum(server.memory for server in servers)
        up = sum(server.alive for server in servers)
        held = f"{number_text(rows)} rows with copies, {size_text(memory)} of memory"
        return f"Servers: {up} of {len(servers)} up, {held}"

    def html(self, snapshot: Status | None) -> str:
        servers = snapshot.servers if snapshot else []
        top = heading(self, self.title(snapshot))
        if not servers:
            return top
        shown = servers
        if len(servers) > MAX_SERVERS:
            shown = sorted(servers, key=lambda server: (server.alive, -server.p99))[:MAX_SERVERS]
        largest = max(1.0, *(server.keys_rate for server in servers))
        usual = float(np.median([server.p99 for server in servers]))
        head = ["server", "state", "requests/s", "keys/s", "busy", "p50", "p99", "lag", "cores"]
        head += ["memory", "unconfirmed", "behind", "rows", "shards"]
        rows = [self._row(server, largest, usual) for server in shown]
        left = f"<p class='soft'>the {len(shown)} slowest of {len(servers)}</p>" if len(shown) < len(servers) else ""
        return top + html_table(head, rows, range(2, len(head))) + left

    @staticmethod
    def _row(server: ServerStatus, largest: float, usual: float) -> tuple[str, ...]:
        p99 = duration_text(server.p99)
        if usual and (server.p99) > SLOW_FACTOR * usual:
            p99 = f"<span class='bad'>▲ {p99}</span>"
        bar = f"<span class='bar' style='width: {60 * server.keys_rate / largest:.0f}px'></span>"
        return (
            f"<b>{server.number}</b> <span class='soft'>{escape(server.worker)}</span>",
            f"<span class='{'good' if server.state is ServerPhase.UP else 'bad'}'>{server.state}</span>",
            number_text(server.requests_rate),
            bar + number_text(server.keys_rate),
            busy_text(server.busy, "<span class='bad'>▲ {}</span>"),
            duration_text(server.p50),
            p99,
            duration_text(server.lag),
            f"{server.cpu:.2f}",
            budget_text(server, "<span class='bad'>▲ {}</span>"),
            f"{server.unconfirmed:,}",
            duration_text(server.behind),
            number_text(server.rows),
            f"{server.shards} + {server.copies}",
        )


class ShardsPlot(Drawn):
    """A heat map of tables and their shards by load; each cell names its server."""

    every = 2
    name = "shards"
    asks = "Is the load even?"
    shows = "A light cell among dark ones is a hot shard; the number in a cell is its server."

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.source = ColumnDataSource({})
        self.mapper = LinearColorMapper(palette=_ramp(SEQUENTIAL, 64), low=0, high=1)
        self.y = Range1d(-0.5, 0.5)
        self.figure = new_figure("shard", "", x_range=Range1d(-0.5, 0.5), y_range=self.y, **layout)
        self.root = self.below_heading(self.figure)
        self.ticker = self.figure.yaxis.ticker = FixedTicker(ticks=[])
        self.update(None)
        cells = self.figure.quad(
            source=self.source,
            **{side: side for side in ("left", "right", "bottom", "top")},
            fill_color={"field": "load", "transform": self.mapper},
            line_color="white",
            line_width=0.5,
        )
        options = {"text": "server", "source": self.source, "text_align": "center", "text_baseline": "middle"}
        for name, colour in (("on_dark", "white"), ("on_light", "black")):  # the colours that are legible on viridis
            self.figure.text("x", name, text_color=colour, text_font_size="11px", **options)
        tips = (
            ("table", "@table"),
            ("shard", "@shard"),
            ("load", "@load{0,0} keys/s"),
            ("against the mean", "@heat{0.0} x"),
        )
        self.figure.add_tools(hover([cells], *tips, ("server", "@owner"), ("held by servers", "@held")))
        bar = ColorBar(color_mapper=self.mapper, width=10, background_fill_alpha=0, formatter=ticks())
        bar.major_label_text_color = INK
        self.figure.add_layout(bar, "right")
        self.figure.grid.visible = False
        self.figure.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)

    def title(self, snapshot: Status | None) -> str:
        tables = snapshot.tables if snapshot else {}
        return _hottest(tables, _busiest(tables))

    def update(self, snapshot: Status | None) -> None:
        self.entitle(snapshot)
        tables = snapshot.tables if snapshot else {}
        shown = _busiest(tables)
        cells = [cell for row, name in enumerate(shown) for cell in _cells(row, name, tables[name])]
        columns = {field: [getattr(cell, field) for cell in cells] for field in Cell._fields}
        load = number(columns["load"])
        row = np.array(columns.pop("row"), np.float32)
        left, right = (np.array(columns.pop(side), np.float32) for side in ("left", "right"))
        high = nice(float(load.max()) if len(load) else 0.0)
        dark = load < 0.6 * high
        put(
            self.source,
            **columns | {"load": load, "heat": number(columns["heat"])},
            left=left - 0.5,
            right=right - 0.5,
            bottom=-row - 0.46,
            top=0.46 - row,
            x=(left + right) / 2 - 0.5,
            on_dark=np.where(dark, -row, np.float32(np.nan)),
            on_light=np.where(dark, np.float32(np.nan), -row),
        )
        self.mapper.high = high
        self.figure.x_range.end = float(right.max(initial=1.0)) - 0.5
        self.y.start, self.y.end = 0.5 - max(1, len(shown)), 0.5
        if self._shown != shown:
            self._shown = shown
            self.ticker.ticks = [-n for n in range(len(shown))]
            self.figure.yaxis.major_label_overrides = {-n: plain(name) for n, name in enumerate(shown)}

    _shown: list[str] | None = None


class Cell(NamedTuple):
    """A cell of the heat map, from shard `left` up to shard `right` of one table."""

    row: int
    table: str
    shard: int  # the busiest of them
    left: int
    right: int
    load: float  # keys per second
    heat: float  # the load over the mean of all shards
    owner: str  # the number of its server, or "none"
    server: str  # the same as a label, where there is room
    held: str  # the numbers of all servers that hold it


def _cells(row: int, name: str, table: TableStatus) -> Iterable[Cell]:
    """The cells of a table: one for each shard. In a table with more than MAX_CELLS shards, a cell stands for some
    neighbours, and shows the busiest of them."""
    load, count = table.load, len(table.load)
    mean = sum(load) / count if count else 0.0
    edges = np.linspace(0, count, min(count, MAX_CELLS) + 1).astype(int).tolist()
    for left, right in itertools.pairwise(edges):
        busy = max(range(left, right), key=load.__getitem__)
        chain = table.chains[busy]
        held, server = ", ".join(map(str, chain)), str(chain[0]) if chain else "none"
        label = ("-" if server == "none" else server) if count <= MAX_NAMED_SHARDS else ""
        heat = load[busy] / mean if mean else 0.0
        yield Cell(row, name, busy, left, right, load[busy], heat, server, label, held)


def _busiest(tables: Mapping[str, TableStatus]) -> list[str]:
    """The names of the tables with the most keys per second, in alphabetical order."""
    return sorted(sorted(tables, key=lambda name: (-tables[name].keys_rate, name))[:MAX_TABLES])


def _hottest(tables: Mapping[str, TableStatus], shown: list[str]) -> str:
    hottest = []
    for name in shown:
        load = tables[name].load
        if load and sum(load) > 0:
            busy = int(np.argmax(load))
            hottest.append((load[busy] * len(load) / sum(load), name, busy))
    if not hottest:
        return "Shards: nothing is pulled or pushed" if tables else "Shards: there is no table"
    heat, name, busy = max(hottest)
    left = f"; the {MAX_TABLES} busiest of {len(tables)} tables" if len(tables) > MAX_TABLES else ""
    return f"Shards by keys/s: the busiest is shard {busy} of {name!r}, {heat:.1f} times the mean{left}"


class HotKeysPlot(Html):
    """The hottest keys of each table, and the shares of the accesses that they have."""

    every = 2
    name = "hot-keys"
    asks = "Do a few keys get most of the accesses?"
    shows = "The shares of the 1, 8 and 64 hottest keys: large ones are a skewed load, which more shards do not spread."

    def title(self, snapshot: Status | None) -> str:
        tables = snapshot.tables.items() if snapshot else ()
        hottest = [(table.hot_keys[0].rate, name, table.hot_keys[0]) for name, table in tables if table.hot_keys]
        if not hottest:
            return "Hot keys: none"
        _, name, hot = max(hottest, key=lambda each: each[:2])
        return f"Hot keys: key {hot.key} of {name!r} has {hot_share_text(hot)} of the accesses to this table"

    def html(self, snapshot: Status | None) -> str:
        tables = snapshot.tables if snapshot else {}
        top = heading(self, self.title(snapshot))
        rows = [self._row(name, tables[name]) for name in _busiest(tables) if tables[name].hot_shares]
        if not rows:
            return top
        head = ["table", "keys/s", *(f"hottest {n}" if n > 1 else "hottest key" for n in HOTTEST), "keys: accesses/s"]
        return top + html_table(head, rows, range(1, 2 + len(HOTTEST)))

    @staticmethod
    def _row(name: str, table: TableStatus) -> tuple[str, ...]:
        keys = ", ".join(f"{hot.key}: {number_text(hot.rate)}" for hot in table.hot_keys[:MAX_KEYS])
        shares = map(hot_share_text, table.hot_shares)
        return f"<b>{escape(name)}</b>", number_text(table.keys_rate), *shares, keys or "no key is hot"


class ThroughputPlot(Drawn):
    """The recent work of all servers together: keys and requests per second, and the time of a request."""

    every = 2
    name = "throughput"
    asks = "How much goes through the servers, and how long does a request take?"
    shows = "A falling curve with a rising p99 is a server at its limit."

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.source = ColumnDataSource({})
        self.x = Range1d(-120, 0)
        sizing, height = layout.get("sizing_mode", "stretch_width"), layout.get("height") or 300
        options = {"sizing_mode": sizing, "height": max(100, height // 2), "x_range": self.x}
        keys = new_figure("seconds ago", "keys/s", y_range=Range1d(0, 1), **options)
        latency = new_figure("seconds ago", "ms for a request", y_range=Range1d(0, 1), **options)
        self.keys, self.latency = keys, latency
        self.root = self.below_heading(keys, latency)
        self.update(None)
        line = keys.line("x", "keys", source=self.source, color=BLUE, line_width=1.5)
        keys.varea("x", 0, "keys", source=self.source, fill_color=BLUE, fill_alpha=0.15)
        tips = (("keys", "@keys{0,0}/s"), ("requests", "@requests{0,0}/s"), ("bytes", "@bytes{0.0 b}/s"))
        keys.add_tools(hover([line], *tips, ("at", "@x{0.0} s"), mode="vline"))
        both = [
            latency.step("x", name, source=self.source, color=colour, line_dash=dash, line_width=1.5, legend_label=name)
            for name, colour, dash in (("p99", ORANGE, "solid"), ("p50", GREEN, "dashed"))
        ]
        tips = (("p50", "@p50{0.000} ms"), ("p99", "@p99{0.000} ms"), ("at", "@x{0.0} s"))
        latency.add_tools(hover(both[:1], *tips, mode="vline"))
        keys.yaxis.formatter = ticks()
        for fig in (keys, latency):
            fig.yaxis.ticker.desired_num_ticks = 4
        latency.add_layout(latency.legend[0], "above")
        slim(latency.legend, "top_right", "horizontal")

    def title(self, snapshot: Status | None) -> str:
        curves = snapshot.throughput if snapshot else Throughput()
        if not curves.time:
            return "Throughput: no server has reported yet"
        keys, requests, nbytes = (number_text(values[-1]) for values in (curves.keys, curves.requests, curves.bytes))
        within = duration_text(curves.p99[-1])
        return f"Throughput: {keys} keys/s, {requests} requests/s, {nbytes}B/s; 99 % of the requests within {within}"

    def update(self, snapshot: Status | None) -> None:
        self.entitle(snapshot)
        curves = snapshot.throughput if snapshot else Throughput()
        x = (np.array(curves.time, float) - (snapshot.time if snapshot else 0.0)).astype(np.float32)
        columns = {"requests": number(curves.requests), "keys": number(curves.keys), "bytes": number(curves.bytes)}
        columns |= {"p50": 1e3 * number(curves.p50), "p99": 1e3 * number(curves.p99)}
        put(self.source, x=x, **columns)
        for fig, name in ((self.keys, "keys"), (self.latency, "p99")):
            fig.y_range.end = nice(float(columns[name].max(initial=0.0)))
        self.x.start = min(-30.0, float(np.floor(x.min() / 10) * 10)) if len(x) else -30.0


class PlacementPlot(Html):
    """The shards of each server, shards that move, and the newest events."""

    every = 2
    name = "placement-and-events"
    asks = "What is where, and what has happened?"
    shows = "0→1: 0-7 says that server 0 answers for shards 0 to 7, and server 1 has copies of them."

    def title(self, snapshot: Status | None) -> str:
        if snapshot is None:
            return "Placement and events: none"
        moves, last = snapshot.moves, snapshot.checkpoints.last
        moving = f"{moves} shard{'s' * (moves != 1)} on the way" if moves else "nothing moves"
        saved = f", last checkpoint {last.name}" if last is not None else ""
        return f"Placement and events: placement {snapshot.epoch}, {moving}{saved}"

    def html(self, snapshot: Status | None) -> str:
        top = heading(self, self.title(snapshot))
        if snapshot is None:
            return top
        error = snapshot.checkpoints.error
        failed = f"<p class='bad'>checkpoint: {escape(error)}</p>" if error else ""
        names = sorted(snapshot.tables)
        rows = [
            (
                f"<b>{escape(name)}</b>",
                f"{number_text(table.rows)} x {table.dim} {escape(table.dtype)}",
                escape(table.optimizer),
                turnover_text(table.turnover) or "rows stay",
                traffic_text(table.traffic) or "nothing",
                chains(table.chains) + backups_text(table),
            )
            for name, table in ((name, snapshot.tables[name]) for name in names[:MAX_TABLES])
        ]
        left = f"<p class='soft'>and {len(names) - MAX_TABLES} more tables</p>" if len(names) > MAX_TABLES else ""
        events = [
            (f"<span class='soft'>{time.strftime('%H:%M:%S', time.localtime(when))}</span>", escape(event))
            for when, event in snapshot.events[: -MAX_EVENTS - 1 : -1]
        ]
        head = ("table", "rows", "optimizer", "rows come and go", "what has travelled", "servers: shards")
        return (
            f"{top}<div class='beside'><div>{failed}"
            + html_table(head, rows)
            + left
            + "</div><div>"
            + (html_table(("when", "events, the newest first"), events) if events else "<p class='soft'>no events</p>")
            + "</div></div>"
        )


def backups_text(table: TableStatus) -> str:
    """The share of a table's pulls that backups have answered, if they may."""
    return "" if table.backup_share is None else f" ({table.backup_share:.0%} of pulls by backups)"


def chains(held: list[list[int]], limit: int = 8) -> str:
    """The shards of each chain of servers, for at most `limit` chains.

    Examples
    --------
    >>> chains([[0, 1], [0, 1], [1, 0], [0, 1], []])
    '0→1: 0-1, 3; 1→0: 2; <span class="bad">no server: 4</span>'
    """
    shards_of: dict[tuple[int, ...], list[int]] = {}
    for shard, chain in enumerate(held):
        shards_of.setdefault(tuple(chain), []).append(shard)
    parts = []
    for servers, shards in list(shards_of.items())[:limit]:
        part = f"{'→'.join(map(str, servers)) or 'no server'}: {_ranges(shards)}"
        parts.append(part if servers else f'<span class="bad">{part}</span>')
    return "; ".join(parts) + (f"; and {len(shards_of) - limit} more" if len(shards_of) > limit else "")


def _ranges(shards: list[int], limit: int = 6) -> str:
    cuts = [n for n in range(1, len(shards)) if shards[n] != shards[n - 1] + 1]
    parts = [shards[a:b] for a, b in zip([0, *cuts], [*cuts, len(shards)], strict=True)]
    ranges = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return ", ".join(ranges[:limit]) + (", ..." if len(ranges) > limit else "")


def _ramp(colours: tuple[str, ...], count: int) -> list[str]:
    stops = np.array([[int(c[n : n + 2], 16) for n in (1, 3, 5)] for c in colours])
    at = np.linspace(0, len(colours) - 1, count)
    ramp = np.array([np.interp(at, np.arange(len(colours)), stops[:, n]) for n in range(3)]).round().astype(int).T
    return ["#" + "".join(f"{x:02x}" for x in row) for row in ramp]
