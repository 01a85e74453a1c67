"""The controller's failover on a clock of its own, with servers that say what a test wants."""

from __future__ import annotations

from types import SimpleNamespace

from dps.engine.controller.failover import TICK_SECONDS, Membership
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, decode_json, encode_json


class Line:
    """A server's connection to the controller: what was said to it, and whether it was closed."""

    def __init__(self):
        self.sent, self.party, self.closed = [], None, False
        self.transport = SimpleNamespace(close=self._close)

    def _close(self):
        self.closed = True

    def reply(self, header, body=b""):
        self.sent.append((header, body))

    send_newest = reply

    @property
    def placement(self):
        """The last one it was told."""
        return next(decode_json(body) for header, body in reversed(self.sent) if header.kind == frames.PLACE)


class World:
    """A membership, its servers' connections, and the virtual time."""

    def __init__(self, servers: int = 3):
        self.time = 100.0
        self.membership = Membership(SimpleNamespace(now=lambda: self.time), "s")
        self.lines: dict[int, Line] = {}
        self.asleep: set[int] = set()
        for _ in range(servers):
            self.start()

    def start(self) -> int:
        number = self.membership.add_server(f"tcp://w{len(self.lines)}", "key-{}")
        self.serve(number)
        self.membership.servers[number].ready = True
        return number

    def serve(self, number: int) -> Line:
        self.lines[number] = line = Line()
        self.tell(number, frames.SERVE, server=number, host="127.0.0.1", port=9000 + number)
        return line

    def tell(self, number: int, kind: int, line: Line | None = None, request: int = 0, **content) -> None:
        """A frame from that server."""
        body = memoryview(encode_json(content)) if content else memoryview(b"")
        self.membership.handlers[kind](line or self.lines[number], Header(kind, request=request), body)

    def wait(self, seconds: float) -> None:
        """Time passes; those awake beat, the controller looks."""
        until, beat = self.time + seconds, self.time
        while self.time < until:
            self.time += TICK_SECONDS
            if self.time >= beat:
                beat += HEARTBEAT_SECONDS
                for number, server in list(self.membership.servers.items()):
                    if number not in self.asleep and server.connection is self.lines[number]:
                        self.tell(number, frames.BEAT, request=1)
            self.membership.tick()

    def table(self, name: str = "w", **options) -> dict:
        options = {"rows": 60, "shards": 4, "copies": 2, **options}
        spec = TableSpec(name, **options, id=len(self.membership.specs) + 1).to_dict()
        self.membership.publish_tables([(spec, self.membership.add_table(spec))])
        return spec

    def cut(self, number: int) -> None:
        """Its connection breaks."""
        line = self.lines[number]
        self.membership.disconnected(line)

    def places(self, name: str = "w"):
        return self.membership.places[name]

    def chains(self, name: str = "w"):
        return [p.chain for p in self.places(name)]

    def settle(self, seconds: float = 0.0) -> None:
        """Servers do what they are asked for, until nothing changes."""
        self.wait(seconds)
        for _ in range(200):
            before = self.membership.epoch
            self.wait(TICK_SECONDS)
            for name, places in self.membership.places.items():
                for shard, p in enumerate(places):
                    content = {"table": name, "shard": shard, "epoch": self.membership.epoch}
                    if p.joiner is not None and p.chain[-1] not in self.asleep and p.joiner not in self.asleep:
                        self.tell(p.chain[-1], frames.CAUGHT_UP, server=p.joiner, **content)
                    elif p.stepping_down and p.chain[0] not in self.asleep:
                        self.tell(p.chain[0], frames.STEPPED_DOWN, **content)
            if self.membership.epoch == before:
                return
        raise AssertionError("it does not come to rest")
