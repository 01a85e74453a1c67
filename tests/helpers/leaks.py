"""What a test left behind: threads, child processes, sockets and other open files.

:func:`snapshot` before, :func:`wait_for_leaks` after. A snapshot costs 0.2 ms as long as this process has no
children, so that it can be taken around every test. What Dask keeps for ever after its clusters are closed is named
here (found by experiment with distributed 2026.8.0: one offload thread, and the resource tracker of
multiprocessing). While a cluster of a wider fixture runs, its own threads, connections and processes come and go,
and do not count; nor do the links of its servers, which a server makes again when it gets no answer for two seconds
(on a busy machine), nor their processes for functions, which start with the first function of a user.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import socket
import sys
import threading
import time
import types
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

MARK = "DPS_TEST_RUN"  # environment variable that all descendants inherit, also those whose parent died
PATIENCE = 60.0  # a limit for what hangs: processes take long to end while the machine is busy with others

FOREVER_THREADS = re.compile("^Dask-Offload")
FOREVER_PROCESSES = re.compile(r"resource_tracker|multiprocessing.forkserver|/builder\.py")
LIVE_THREADS = re.compile("Dask-|^IO loop|^AsyncProcess |^QueueFeederThread|^Profile|^TCP-Executor|^asyncio_|^bokeh-")
FUNCTION_THREADS = re.compile("^dps-functions-.*-process$")
FUNCTION_PROCESSES = re.compile(r"/function_boot\.py ")
HOLDERS = 8  # how far up the references to a socket are followed


@dataclass(frozen=True)
class Snapshot:
    """Everything this process holds that can leak."""

    threads: frozenset[threading.Thread]
    files: Counter[str]  # what each open descriptor leads to, e.g. "socket:[4711]"
    children: frozenset[psutil.Process]


def snapshot() -> Snapshot:
    return Snapshot(frozenset(threading.enumerate()), _files(), _children())


def wait_for_leaks(before: Snapshot, *, patience: float = PATIENCE, orphans: bool = False) -> list[str]:
    """What is there now and was not `before`, one line each, once nothing more goes away or `patience` is over."""
    deadline = time.monotonic() + patience
    pause = 0.001
    while leaks := _leaks(before, orphans):
        if time.monotonic() >= deadline:
            break
        forget_closed_workers()
        gc.collect()
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return [line + _holders(line.removeprefix("descriptor ")) for line in leaks]


def forget_closed_workers() -> None:
    """Clear the caches by which Dask keeps each worker and scheduler of this process for ever.

    They are keyed by methods of these, and by the schedulers that have a dashboard. A worker that was closed before it
    had released a task, and the work stealing of a scheduler, would keep the arguments of tasks and their connections.
    """
    for module, name in (("distributed.core", "_expects_comm"), ("distributed.utils", "has_keyword")):
        cached = getattr(sys.modules.get(module), name, None)
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    memoized = getattr(sys.modules.get("distributed.dashboard.scheduler"), "template_variables", None)
    for cell in getattr(memoized, "__closure__", None) or ():
        if isinstance(cell.cell_contents, dict):
            cell.cell_contents.clear()


def _leaks(before: Snapshot, orphans: bool) -> list[str]:
    now = snapshot()
    threads = now.threads - before.threads
    files = now.files - before.files
    children = set(now.children - before.children)
    if orphans:
        children |= {p for p in _orphans() if p not in before.children}
    if not (threads or files or children):
        return []
    dask = _Dask()
    return [
        *(f"thread {t.name!r}{' (daemon)' * t.daemon}" for t in threads if not dask.owns_thread(t)),
        *(f"process {p.pid}: {_command(p)[:200]}" for p in children if not dask.owns_process(p)),
        *dask.foreign_files(files),
    ]


class _Dask:
    """What belongs to Dask: for ever, or to the clusters and clients that are alive at this moment."""

    def __init__(self) -> None:
        clusters = _instances("distributed.deploy.spec", "SpecCluster")
        clients = [c for c in _instances("distributed.client", "Client") if c.status == "running"]
        self.live = bool(clients) or any(c.status.name == "running" for c in clusters)
        self.pids = {getattr(worker, "pid", None) for c in clusters for worker in c.workers.values()}
        self.ports: set[int | None] = set()
        addresses = [c.scheduler.address for c in clients if c.scheduler]
        for known in [c._scheduler_identity for c in clients] + [c.scheduler_info for c in clusters]:
            addresses.append(known.get("address"))
            addresses += [a for w, info in known.get("workers", {}).items() for a in (w, info.get("nanny"))]
        for scheduler in _instances("distributed.scheduler", "Scheduler"):
            addresses += [a for w in scheduler.workers.values() for a in (w.address, w.nanny)]
            self.ports |= {port for w in scheduler.workers.values() for port in w.services.values()}
            self.ports |= {getattr(server, "port", None) for server in scheduler.services.values()}
        self.ports |= {urlsplit(a).port for a in addresses if a}
        self.ports -= {None}

    def owns_thread(self, thread: threading.Thread) -> bool:
        if FOREVER_THREADS.search(thread.name):
            return True
        pool = getattr(sys.modules.get("dask.threaded"), "default_pool", None)  # of scheduler="threads"
        if thread in getattr(pool, "_threads", ()):
            return True
        if thread.name.startswith("dps"):
            return self.live and bool(FUNCTION_THREADS.search(thread.name))
        return self.live and bool(LIVE_THREADS.search(thread.name))

    def owns_process(self, process: psutil.Process) -> bool:
        command = _command(process)
        if process.pid in self.pids or FOREVER_PROCESSES.search(command):
            return True
        return self.live and bool(FUNCTION_PROCESSES.search(command))

    def foreign_files(self, files: Counter[str]) -> list[str]:
        loky = sys.modules.get("joblib.externals.loky.backend.resource_tracker")  # a resource tracker of its own
        builder = getattr(sys.modules.get("compiled"), "BUILDER", None)  # which compiles wrong variants
        helpers = (
            multiprocessing.resource_tracker._resource_tracker._fd,
            multiprocessing.forkserver._forkserver._forkserver_alive_fd,
            loky._resource_tracker._fd if loky is not None else None,
            *(builder.descriptors() if builder is not None else ()),
        )
        files = files - Counter(_target(fd) for fd in helpers if fd is not None)
        connections = {_target(c.fd): c for c in psutil.Process().net_connections("inet")} if files else {}
        ours = self.ports | _ports_of_links() if connections else self.ports
        paths = []
        for name in files.elements():
            known = connections.get(name)
            ends = {a.port for a in (known.laddr, known.raddr) if a} if known else set()
            if known is None:  # files, pipes, event loops: clusters make and drop them at will
                if not self.live:
                    paths.append(f"descriptor {name}")
            elif not self.live or not ends & ours:
                paths.append(f"socket {known.laddr} -> {known.raddr or ''} {known.status}")
        return paths


def _holders(name: str) -> str:
    """What a Unix socket belongs to, such as an event loop that was not closed: the types of what refers to it.

    Of a frame its function is named: the frame of a function that has ended belongs to a traceback.
    """
    every = gc.get_objects()
    held: list = [each for each in every if issubclass(type(each), socket.socket) and _target(each.fileno()) == name]
    chain: list[str] = []
    seen = {id(every), id(chain), *map(id, held), *map(id, _running())}
    for _ in range(HOLDERS):
        seen |= {id(held), id(seen)}
        held = [each for each in gc.get_referrers(*held) if id(each) not in seen]
        seen.update(map(id, held))
        chain.append("/".join(sorted({_kind(each) for each in held})))
        if not held:
            break
    return f" of {' of '.join(filter(None, chain))}" if any(chain) else ""


def _kind(each: object) -> str:
    if isinstance(each, types.FrameType):
        return f"frame {each.f_code.co_qualname}"
    return getattr(each, "__qualname__", type(each).__qualname__) if callable(each) else type(each).__qualname__


def _running() -> list[types.FrameType]:
    """The frames of what runs just now, which refer to everything."""
    frames = []
    for frame in sys._current_frames().values():
        current: types.FrameType | None = frame
        while current is not None:
            frames.append(current)
            current = current.f_back
    return frames


def _ports_of_links() -> set[int]:
    """Our ends of the connections that endpoints of this process made; an endpoint left behind shows by its thread."""
    transports = [link._transport for link in gc.get_objects() if type(link).__name__ == "Link"]
    names = [t.get_extra_info("sockname") for t in transports if t is not None and not t.is_closing()]
    return {name[1] for name in names if name}


def _instances(module: str, name: str) -> list:
    return list(getattr(getattr(sys.modules.get(module), name, None), "_instances", ()))


def _files() -> Counter[str]:
    try:
        return Counter(filter(None, map(_target, os.listdir("/proc/self/fd"))))
    except FileNotFoundError:  # not Linux
        return Counter()


def _target(fd: str | int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor that listed the directory, closed by now
        return None


def _children() -> frozenset[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    return frozenset(p for p in _descendants() if _runs(p))


def _descendants() -> list[psutil.Process]:
    """All below this process; without a look at each process of the machine where Linux lists children."""
    me = os.getpid()
    if not os.path.exists(f"/proc/{me}/task/{me}/children"):  # not Linux, or without these lists
        return psutil.Process().children(recursive=True)
    pids = _listed(me)
    while pids != (again := _listed(me)):  # a list may lack a process when another one ends while it is read
        pids = again
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def _listed(parent: int | str) -> list[str]:
    pids: list[str] = []
    for thread in _tasks(parent):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"{thread}/children") as children:
            pids += children.read().split()
    return pids + [below for pid in pids for below in _listed(pid)]


def _tasks(pid: int | str) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:  # it has ended
        return []


def _orphans() -> set[psutil.Process]:
    """Processes that this test run started, also those that have another parent now."""
    mine = os.environ.get(MARK)
    me = os.getpid()
    return {
        p for p in psutil.process_iter(["environ"])
        if mine and p.pid != me and (p.info["environ"] or {}).get(MARK) == mine and _runs(p)
    }  # fmt: skip


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""
