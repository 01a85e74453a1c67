"""Trainers as a run's controller sees them: connections and the frames that come by them."""

from __future__ import annotations

import msgspec
import numpy as np

import dps
from dps.engine.telemetry.monitor import run_status
from dps.engine.telemetry.snapshot import PARTS, RunStatus
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, decode_header


class Connection:
    """What `Runs` needs of one."""

    def __init__(self):
        self.party = None
        self.transport = self
        self.answers = {}  # request -> header and body, or an error

    def write(self, head):
        header = decode_header(head, 0, 1 << 20)
        self.answers[header.request] = header, b""

    def reply(self, header, body=b""):
        self.answers[header.request] = header, bytes(body)

    def reply_error(self, header, error):
        self.answers[header.request] = error


def state_of(runs, number: int) -> RunStatus:
    """A run, as drivers see it; its times are left out."""
    run = runs.known(number)
    status = run_status(run, runs.now(), run.began, brief=True)
    trainers = [msgspec.structs.replace(trainer, age=None) for trainer in status.trainers]
    return msgspec.structs.replace(status, trainers=trainers)


class Peer:
    """A connection and its far end: sends frames, and sees what is answered."""

    def __init__(self, runs):
        self.runs, self.connection, self.requests = runs, Connection(), 0

    def send(self, verb, header, body=b""):
        self.requests += 1
        header = header._replace(request=self.requests, body=len(body))
        try:
            getattr(self.runs, verb)(self.connection, header, memoryview(body))
        except dps.DPSError as error:
            self.connection.reply_error(header, error)
        return self.requests

    def answer(self, request):
        """None while there is none."""
        frames_sent = self.connection.answers.get(request)
        if isinstance(frames_sent, Exception):
            raise frames_sent
        return frames_sent

    def join(self, run, trainer, incarnation):
        joining = {"run": run, "trainer": trainer, "incarnation": incarnation, "where": "here"}
        return frames.decode_json(self.answer(self.send("join", Header(frames.JOIN), frames.encode_json(joining)))[1])

    def tick(self, clock):
        return self.send("tick", Header(frames.TICK, clock=clock))

    def collect(self, clock, call, value):
        reduction = frames.encode_json({"op": "sum", "dtype": "<i8", "shape": [1]})
        header = Header(frames.COLLECT, clock=clock, number=call, count=len(reduction))
        return self.send("collect", header, reduction + np.int64(value).tobytes())

    def leave(self, failed=None):
        report = {"failed": failed, "seconds": dict.fromkeys(PARTS, 0.0)}
        return self.send("leave", Header(frames.LEAVE), frames.encode_json(report))

    def end(self):
        self.runs.disconnected(self.connection)
