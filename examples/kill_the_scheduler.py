"""The scheduler is killed in the middle of a run, another one is started at its address, and the run goes on.

The servers outlive their scheduler (`dps.scheduler.grace`), and know how far each trainer was. Trainers are tasks of
Dask and end with their scheduler; `ps.resume_run` begins them again where they were. Each push counts once.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from dask.distributed import Client

import dps

DASK, GRACE = Path(sys.executable).with_name("dask"), {"DASK_DPS__SCHEDULER__GRACE": "10 m"}
BATCHES, started = 300, []


def train(trainer, parts):
    for batch in trainer.iterate(parts, batch_size=1):
        trainer.push("counts", batch % 10, 1)
        time.sleep(0.02)
    return trainer.clock


def dask(*words):
    started.append(subprocess.Popen([DASK, *words], env=os.environ | GRACE, stderr=subprocess.DEVNULL))


def workers(address, *words):
    for _ in range(2):
        dask("worker", address, "--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", *words)


def begin(ps):  # in a thread, because it waits for the run
    try:
        ps.run(train, np.arange(2 * BATCHES), staleness=1, progress=False)
    except dps.DPSError as error:
        print("the first driver ends with a", type(error).__name__)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address, scheduler = f"tcp://127.0.0.1:{port}", ["scheduler", "--port", str(port), "--no-dashboard"]
    try:
        dask(*scheduler)
        workers(address, "--resources", "dps=1")  # for servers
        workers(address)  # for trainers
        ps = dps.ParameterServer(Client(address, timeout=60), servers=2)
        counts = ps.table("counts", rows=10, dtype="int64", copies=2)
        threading.Thread(target=begin, args=(ps,), daemon=True).start()
        while (done := counts.pull().sum()) < BATCHES:
            time.sleep(0.1)
        started[0].kill()
        started[0].wait()
        print(f"the scheduler is killed after about {done} of {2 * BATCHES} pushes")
        dask(*scheduler)
        workers(address)  # because those of the trainers end with their scheduler
        again = dps.ParameterServer.attach(Client(address, timeout=60))
        print("the servers are back, and the trainers go on:", again.resume_run(train, np.arange(2 * BATCHES)))
        print("counts:", again.client().pull("counts").tolist())
    finally:
        for process in started:
            process.kill()
