"""Large pulls from a server of the same process, which writes rows where the caller wants them, and never too late."""

from __future__ import annotations

import _thread
import gc
import inspect
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Servers

import dps
from dps.engine.client.client import Client
from dps.engine.state.ops import TableSpec
from dps.engine.wire import loans as module
from dps.engine.wire import shared_memory
from dps.engine.wire.loans import Loans

MB = 1 << 20


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        if shared_memory.offered() is None:
            pytest.skip("the system has no memory that could be offered")
        yield servers


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The answers that were written in lent memory, by their bytes."""
    sizes: list[int] = []
    ended = Loans.ended

    def counted(loans: Loans, number: int) -> bool:
        found = ended(loans, number)
        sizes.extend([number] * found)
        return found

    monkeypatch.setattr(Loans, "ended", counted)
    return sizes


def settled(client: Client, rows: int) -> Client:
    """The client, once it knows where the rows are and the server takes what it lends."""
    client.pull("a", np.linspace(0, rows - 1, 100).astype(np.int64))
    for _ in range(2):
        client.pull("a", slice(0, rows))
    return client


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec("a", rows=70_000, dim=16, init=dps.Uniform(-1.0, 1.0)),
        TableSpec("a", rows=300_001, dim=3, shards=1, init=dps.Uniform(-1.0, 1.0)),  # of no whole words
        TableSpec("a", rows=700_000, dim=1, dtype="float64", shards=3, init=dps.Uniform(-1.0, 1.0)),
    ],
    ids=lambda spec: f"{spec.dtype}-{spec.rows}-{spec.dim}",
)
def test_rows_are_those_of_small_pulls(spec: TableSpec, servers: Servers, written: list[int]) -> None:
    servers.table(spec)
    rows = spec.rows or 0
    with servers.client() as client, servers.client() as other:
        expected = np.concatenate([other.pull("a", slice(n, min(n + 10_000, rows))) for n in range(0, rows, 10_000)])
        settled(client, rows)
        written.clear()
        np.testing.assert_array_equal(client.pull("a", slice(0, rows)), expected)
        assert bool(written) == (rows * spec.dim % 2 == 0), "all but answers that are no whole words"
        order = np.random.default_rng(0).permutation(rows)
        np.testing.assert_array_equal(client.pull("a", order), expected[order])
        out = np.full(expected.shape, np.nan, expected.dtype)
        client.pull("a", slice(0, rows), out=out)
        np.testing.assert_array_equal(out, expected)


def test_nothing_is_kept_of_what_was_lent(servers: Servers, written: list[int]) -> None:
    servers.table(TableSpec("a", rows=70_000, dim=16), [0] * 4)
    with settled(servers.client(), 70_000) as client:
        out = np.empty((70_000, 16), np.float32)
        client.pull("a", slice(0, None), out=out)
        assert written
        client.pull("a", slice(0, 10))
        gone = weakref.ref(out)
        del out
        gc.collect()
        assert gone() is None


class SlowWriter:
    """A server that has taken a loan waits before it writes, for as long as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken: object = Loans.taken):
        self.inside, self.goes_on = threading.Event(), threading.Event()

        class Slow:
            def __init__(slow, loans: Loans, number: int, nbytes: int):
                slow.block = taken(loans, number, nbytes)  # type: ignore[operator]

            def __enter__(slow) -> object:
                memory = slow.block.__enter__()
                if memory is not None:
                    self.inside.set()
                    assert self.goes_on.wait(60)
                return memory

            def __exit__(slow, *error: object) -> object:
                return slow.block.__exit__(*error)

        monkeypatch.setattr(Loans, "taken", lambda loans, number, nbytes: Slow(loans, number, nbytes))


def pull_and_give_up(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> str:
    """Interrupt a pull while the server is about to write, and use its memory otherwise: what becomes of that."""
    servers.table(TableSpec("a", rows=70_000, dim=16, init=dps.Uniform(1.0, 2.0)), [0] * 4)
    with settled(servers.client(), 70_000) as client:
        slow = SlowWriter(monkeypatch)

        def interrupt() -> None:
            assert slow.inside.wait(60)
            _thread.interrupt_main()
            time.sleep(1.0)  # in which a client that did not wait for the server would go on
            slow.goes_on.set()

        thread = threading.Thread(target=interrupt)
        thread.start()
        out = np.zeros((70_000, 16), np.float32)
        with pytest.raises(KeyboardInterrupt):
            client.pull("a", slice(0, None), out=out)
        out[:] = -1.0
        thread.join()
        for endpoint in servers.endpoints:
            endpoint.call(int)  # the server has written
        return "kept" if (out == -1.0).all() else "overwritten"


def test_a_server_does_not_write_after_the_client_has_given_up(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pull_and_give_up(servers, monkeypatch) == "kept"


# ---- The rules of loans, beside a dumb model

ACTS = st.lists(
    st.tuples(st.sampled_from(["lend", "take", "end", "close"]), st.integers(1, 3), st.sampled_from([8, 16])),
    max_size=30,
)


def follow(loans_type: type[Loans], acts: list[tuple[str, int, int]]) -> None:
    """Do what a client and its server may do, and check what the memory holds each time."""
    loans = loans_type(1)
    lent: dict[int, np.ndarray] = {}
    written: set[int] = set()
    closed = False
    for verb, number, nbytes in acts:
        if verb == "lend":
            memory = np.zeros(nbytes, np.uint8)
            loans.lend(number, memory, memory)
            if not closed:
                lent[number] = memory
        elif verb == "take":
            with loans.taken(number, nbytes) as memory:
                fits = number in lent and lent[number].nbytes == nbytes
                assert (memory is not None) == fits
                if memory is not None:
                    memory[:] = 7
            taken = lent.pop(number, None)
            if fits and taken is not None:
                assert (taken == 7).all()
                written.add(number)
        elif verb == "end":
            assert loans.ended(number) == (number in written)
            lent.pop(number, None)
            written.discard(number)
        else:
            loans.close()
            closed, _ = True, lent.clear()
        assert all((each == 0).all() for each in lent.values())


@settings(max_examples=200, deadline=None)
@given(ACTS)
def test_loans_follow_their_rules(acts: list[tuple[str, int, int]]) -> None:
    follow(Loans, acts)


def variant(name: str, old: str, new: str) -> type[Loans]:
    """A class of loans that does something wrong."""
    source = textwrap.dedent(inspect.getsource(module))
    assert source.count(old) == 1
    scope: dict[str, object] = {"__name__": name}
    exec(compile(source.replace(old, new), name, "exec"), scope)
    return scope["Loans"]  # type: ignore[return-value]


WRONG = {
    "another length": ("memory is None or memory.nbytes != nbytes", "memory is None"),
    "a loan that goes on after its answer": ("        self._open.pop(number, None)\n", ""),
    "loans that outlive the connection": (
        "        self._open.clear()\n        with self._writing:\n            self._open.clear()\n",
        "        with self._writing:\n            pass\n",
    ),
    "an answer that counts twice": ("            self._written.discard(number)\n", ""),
    "loans of a closed connection": ("        if self._closed:\n            self.close()\n", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loans_are_caught(name: str) -> None:
    wrong = variant(name, *WRONG[name])

    @settings(max_examples=2000, deadline=None, database=None, derandomize=True)
    @given(ACTS)
    def check(acts: list[tuple[str, int, int]]) -> None:
        follow(wrong, acts)

    with pytest.raises((AssertionError, ExceptionGroup)):
        check()


def test_an_end_that_waits_for_no_writer_is_caught(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(loans: Loans) -> None:
        loans._closed = True
        loans._open.clear()

    monkeypatch.setattr(Loans, "close", close)
    assert pull_and_give_up(servers, monkeypatch) == "overwritten"


def test_a_cluster_of_one_process_lends(written: list[int]) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None))
        ps = stack.enter_context(dps.ParameterServer(cluster))
        ps.table("w", rows=40_000, dim=16, init=dps.Uniform(-1.0, 1.0))
        ps.table("narrow", rows=80_000, dim=16, wire=dps.Wire("bfloat16"), init=dps.Uniform(-1.0, 1.0))

        def pull(trainer: dps.Trainer, parts: object) -> list[np.ndarray]:
            return [[trainer.pull(table) for _ in range(4)][-1] for table in ("w", "narrow")]

        ((rows, narrow),) = ps.run(pull, [0], progress=False)
        assert written
        np.testing.assert_array_equal(rows, ps.client().pull("w", np.arange(40_000)))
        np.testing.assert_allclose(narrow, ps.client().pull("narrow", np.arange(80_000)), rtol=2**-8)
