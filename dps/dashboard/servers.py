"""Plots about servers: how each does, which shard is busy, how much goes through, what is where."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from bokeh.models import BasicTicker, ColorBar, ColumnDataSource, FixedTicker, LinearColorMapper, Range1d
from dask.utils import format_bytes

from dps.dashboard.look import (
    BOTH,
    Drawn,
    Html,
    heading,
    hover,
    html_table,
    new_figure,
    nice,
    number,
    plain,
    put,
    slim,
    text,
    ticks,
)
from dps.dashboard.palette import BLUE, GREEN, ORANGE, SEQUENTIAL
from dps.dashboard.words import queue_text, short, span

__all__ = ["Placement", "Servers", "Shards", "Throughput"]

MOST_SERVERS, MOST_TABLES, MOST_CELLS, MOST_EVENTS = 24, 16, 128, 16
NAMED = 32  # shards up to which the owner stands in the cell
SLOW = 3.0  # times the median of the others: a latency that stands out


class Servers(Html):
    """Each server, and what stands out; of many the slowest."""

    every = 2
    name = "servers"
    asks = "Is a server slow, full, or behind with its copies?"
    shows = "▲ marks a p99 of more than three times the usual, and the queue of a bottleneck."

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        servers = snapshot["servers"] if snapshot else []
        if not servers:
            return "Servers: none"
        rows, memory = (sum(server[name] for server in servers) for name in ("rows", "memory"))
        up = sum(server["alive"] for server in servers)
        return f"Servers: {up} of {len(servers)} up, {short(rows)} rows with copies, {format_bytes(memory)} of memory"

    def html(self, snapshot: Mapping[str, Any] | None) -> str:
        servers = snapshot["servers"] if snapshot else []
        top = heading(self, self.title(snapshot))
        if not servers:
            return top
        shown = servers
        if len(servers) > MOST_SERVERS:
            shown = sorted(servers, key=lambda s: (s["alive"], -(s["p99"] or 0.0)))[:MOST_SERVERS]
        most = max(1.0, *(server["keys_rate"] for server in servers))
        usual = float(np.median([server["p99"] or 0.0 for server in servers]))
        head = ["server", "state", "requests/s", "keys/s", "busy", "queue", "wait", "p50", "p99", "lag", "cores"]
        head += ["memory", "unconfirmed", "behind", "rows", "shards"]
        rows = [self._row(server, most, usual) for server in shown]
        left = f"<p class='soft'>the {len(shown)} slowest of {len(servers)}</p>" if len(shown) < len(servers) else ""
        return top + html_table(head, rows, range(2, len(head))) + left

    @staticmethod
    def _row(server: Mapping[str, Any], most: float, usual: float) -> tuple[str, ...]:
        state = "dead" if not server["alive"] else "leaving" if server["leaving"] else "up"
        p99 = span(server["p99"])
        if usual and (server["p99"] or 0.0) > SLOW * usual:
            p99 = f"<span class='bad'>▲ {p99}</span>"
        bar = f"<span class='bar' style='width: {60 * server['keys_rate'] / most:.0f}px'></span>"
        return (
            f"<b>{server['number']}</b> <span class='soft'>{text(server['worker'])}</span>",
            f"<span class='{'good' if state == 'up' else 'bad'}'>{state}</span>",
            short(server["requests_rate"]),
            bar + short(server["keys_rate"]),
            f"{server['busy']:.0%}",
            queue_text(server, "<span class='bad'>▲ {}</span>"),
            span(server["wait"]),
            span(server["p50"]),
            p99,
            span(server["lag"]),
            f"{server['cpu']:.2f}",
            format_bytes(server["memory"]),
            f"{server['unconfirmed']:,}",
            span(server["behind"]),
            short(server["rows"]),
            f"{server['shards']} + {server['copies']}",
        )


class Shards(Drawn):
    """A heat map of tables and their shards by load; each cell names its server."""

    every = 2
    name = "shards"
    asks = "Is the load even?"
    shows = "A light cell among dark ones is a hot shard; the number in a cell is its server."

    def __init__(self, **layout: Any) -> None:
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
        words = {"text": "server", "source": self.source, "text_align": "center", "text_baseline": "middle"}
        for name, colour in (("on_dark", "white"), ("on_light", "black")):  # what is read on viridis
            self.figure.text("x", name, text_color=colour, text_font_size="11px", **words)
        told = (
            ("table", "@table"),
            ("shard", "@shard"),
            ("load", "@load{0,0} keys/s"),
            ("against the mean", "@heat{0.0} x"),
        )
        self.figure.add_tools(hover([cells], *told, ("server", "@owner"), ("held by servers", "@held")))
        bar = ColorBar(color_mapper=self.mapper, width=10, background_fill_alpha=0, formatter=ticks())
        bar.major_label_text_color = BOTH
        self.figure.add_layout(bar, "right")
        self.figure.grid.visible = False
        self.figure.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        tables = snapshot["tables"] if snapshot else {}
        return _hottest(tables, _busiest(tables))

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        self.entitle(snapshot)
        tables = snapshot["tables"] if snapshot else {}
        shown = _busiest(tables)
        cells = [cell for row, name in enumerate(shown) for cell in _cells(row, name, tables[name])]
        columns = {name: list(values) for name, values in zip(CELL, zip(*cells, strict=True), strict=False)} or {
            name: [] for name in CELL
        }
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


CELL = ("row", "table", "shard", "left", "right", "load", "heat", "owner", "server", "held")


def _cells(row: int, name: str, table: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    """The cells of a table: one for each shard, or, where they are too many, for a few neighbours with the busiest."""
    load, count = table["load"], len(table["load"])
    mean = sum(load) / count if count else 0.0
    edges = np.linspace(0, count, min(count, MOST_CELLS) + 1).astype(int).tolist()
    for left, right in itertools.pairwise(edges):
        busy = max(range(left, right), key=load.__getitem__)
        owner, held = table["owner"][busy], ", ".join(map(str, table["held"][busy]))
        said = "none" if owner is None or owner < 0 else str(owner)
        word = ("-" if said == "none" else said) if count <= NAMED else ""
        yield row, name, busy, left, right, load[busy], load[busy] / mean if mean else 0.0, said, word, held


def _busiest(tables: Mapping[str, Any]) -> list[str]:
    """Names of the tables to show, in their order."""
    return sorted(sorted(tables, key=lambda name: (-tables[name]["keys_rate"], name))[:MOST_TABLES])


def _hottest(tables: Mapping[str, Any], shown: list[str]) -> str:
    found = []
    for name in shown:
        load = tables[name]["load"]
        if load and sum(load) > 0:
            busy = int(np.argmax(load))
            found.append((load[busy] * len(load) / sum(load), name, busy))
    if not found:
        return "Shards: nothing is pulled or pushed" if tables else "Shards: there is no table"
    heat, name, busy = max(found)
    left = f"; the {MOST_TABLES} busiest of {len(tables)} tables" if len(tables) > MOST_TABLES else ""
    return f"Shards by keys/s: the busiest is shard {busy} of {name!r}, {heat:.1f} times the mean{left}"


class Throughput(Drawn):
    """What all servers do, lately: requests, keys, and how long a request takes."""

    every = 2
    name = "throughput"
    asks = "How much goes through the servers, and how long does a request take?"
    shows = "A falling curve with a rising p99 is a server at its limit."

    def __init__(self, **layout: Any) -> None:
        self.source = ColumnDataSource({})
        self.x = Range1d(-120, 0)
        sizing, height = layout.get("sizing_mode", "stretch_width"), layout.get("height") or 300
        about = {"sizing_mode": sizing, "height": max(100, height // 2), "x_range": self.x}
        keys = new_figure("seconds ago", "keys/s", y_range=Range1d(0, 1), **about)
        late = new_figure("seconds ago", "ms for a request", y_range=Range1d(0, 1), **about)
        self.keys, self.late = keys, late
        self.root = self.below_heading(keys, late)
        self.update(None)
        line = keys.line("x", "keys", source=self.source, color=BLUE, line_width=1.5)
        keys.varea("x", 0, "keys", source=self.source, fill_color=BLUE, fill_alpha=0.15)
        told = (("keys", "@keys{0,0}/s"), ("requests", "@requests{0,0}/s"), ("bytes", "@bytes{0.0 b}/s"))
        keys.add_tools(hover([line], *told, ("at", "@x{0.0} s"), mode="vline"))
        both = [
            late.step("x", name, source=self.source, color=colour, line_dash=dash, line_width=1.5, legend_label=name)
            for name, colour, dash in (("p99", ORANGE, "solid"), ("p50", GREEN, "dashed"))
        ]
        told = (("p50", "@p50{0.000} ms"), ("p99", "@p99{0.000} ms"), ("at", "@x{0.0} s"))
        late.add_tools(hover(both[:1], *told, mode="vline"))
        keys.yaxis.formatter = ticks()
        for fig in (keys, late):
            fig.yaxis.ticker.desired_num_ticks = 4
        late.add_layout(late.legend[0], "above")
        slim(late.legend, "top_right", "horizontal")

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        curves = snapshot["throughput"] if snapshot else {}
        if not curves.get("time"):
            return "Throughput: no server has reported yet"
        last = {name: short(values[-1]) for name, values in curves.items()}
        said = f"Throughput: {last['keys']} keys/s, {last['requests']} requests/s, {last['bytes']}B/s"
        return f"{said}; 99 % of the requests within {span(curves['p99'][-1])}"

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        self.entitle(snapshot)
        curves = snapshot["throughput"] if snapshot else {}
        x = (np.array(curves.get("time", []), float) - (snapshot["time"] if snapshot else 0.0)).astype(np.float32)
        columns = {name: number(curves.get(name, [])) for name in ("requests", "keys", "bytes")}
        columns |= {name: 1e3 * number(curves.get(name, [])) for name in ("p50", "p99")}
        put(self.source, x=x, **columns)
        for fig, name in ((self.keys, "keys"), (self.late, "p99")):
            fig.y_range.end = nice(float(columns[name].max(initial=0.0)))
        self.x.start = min(-30.0, float(np.floor(x.min() / 10) * 10)) if len(x) else -30.0


class Placement(Html):
    """Which server holds what, what moves, and what has happened lately."""

    every = 2
    name = "placement-and-events"
    asks = "What is where, and what has happened?"
    shows = "0→1: 0-7 says that server 0 answers for shards 0 to 7, and server 1 has copies of them."

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        if snapshot is None:
            return "Placement and events: none"
        moves, last = snapshot["moves"], snapshot["checkpoints"].get("last")
        moving = f"{moves} shard{'s' * (moves != 1)} on the way" if moves else "nothing moves"
        saved = f", last checkpoint {last.get('name', '')}" if isinstance(last, dict) else ""
        return f"Placement and events: placement {snapshot['epoch']}, {moving}{saved}"

    def html(self, snapshot: Mapping[str, Any] | None) -> str:
        top = heading(self, self.title(snapshot))
        if snapshot is None:
            return top
        error = snapshot["checkpoints"].get("error")
        failed = f"<p class='bad'>checkpoint: {text(error)}</p>" if error else ""
        names = sorted(snapshot["tables"])
        rows = [
            (
                f"<b>{text(name)}</b>",
                f"{short(table['rows'])} x {table['dim']} {text(table['dtype'])}",
                text(table["optimizer"]),
                chains(table["held"]),
            )
            for name, table in ((name, snapshot["tables"][name]) for name in names[:MOST_TABLES])
        ]
        left = f"<p class='soft'>and {len(names) - MOST_TABLES} more tables</p>" if len(names) > MOST_TABLES else ""
        events = [
            (f"<span class='soft'>{time.strftime('%H:%M:%S', time.localtime(when))}</span>", text(said))
            for when, said in snapshot["events"][: -MOST_EVENTS - 1 : -1]
        ]
        head = ("table", "rows", "optimizer", "servers: shards (the first server answers, the others are copies)")
        return (
            f"{top}<div class='beside'><div>{failed}"
            + html_table(head, rows)
            + left
            + "</div><div>"
            + (html_table(("when", "events, the newest first"), events) if events else "<p class='soft'>no events</p>")
            + "</div></div>"
        )


def chains(held: list[list[int]], most: int = 8) -> str:
    """Shards by the servers that hold them, in a few words.

    Examples
    --------
    >>> chains([[0, 1], [0, 1], [1, 0], [0, 1], []])
    '0→1: 0-1, 3; 1→0: 2; <span class="bad">nobody: 4</span>'
    """
    of: dict[tuple[int, ...], list[int]] = {}
    for shard, chain in enumerate(held):
        of.setdefault(tuple(chain), []).append(shard)
    said = []
    for servers, shards in list(of.items())[:most]:
        words = f"{'→'.join(map(str, servers)) or 'nobody'}: {_ranges(shards)}"
        said.append(words if servers else f'<span class="bad">{words}</span>')
    return "; ".join(said) + (f"; and {len(of) - most} more" if len(of) > most else "")


def _ranges(shards: list[int], most: int = 6) -> str:
    cuts = [n for n in range(1, len(shards)) if shards[n] != shards[n - 1] + 1]
    parts = [shards[a:b] for a, b in zip([0, *cuts], [*cuts, len(shards)], strict=True)]
    words = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def _ramp(colours: tuple[str, ...], count: int) -> list[str]:
    """So many colours, evenly between those given."""
    stops = np.array([[int(c[n : n + 2], 16) for n in (1, 3, 5)] for c in colours])
    at = np.linspace(0, len(colours) - 1, count)
    made = np.array([np.interp(at, np.arange(len(colours)), stops[:, n]) for n in range(3)]).round().astype(int).T
    return ["#" + "".join(f"{x:02x}" for x in row) for row in made]
