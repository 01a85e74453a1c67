"""A function that a test defines, on servers that are processes of their own."""

from __future__ import annotations

import pytest

import dps
from dps.errors import DPSError, FunctionError


@dps.function(changes=True)
def times(rows, by):
    rows.values *= by
    return len(rows)


times.merge(sum)


@dps.function
def divides_by_zero(rows):
    return 1 / 0


class OnlyHere:
    """Something that no other process can open."""

    def __reduce__(self):
        return (__import__, ("a_module_that_is_not_there",))


def test_functions_on_servers_in_processes() -> None:
    here = OnlyHere()
    with dps.LocalCluster(servers=2, trainers=1, processes=True) as cluster, dps.ParameterServer(cluster) as ps:
        w = ps.table("w", rows=100)
        w[:] = 3.0
        assert ps.call(times, "w", by=2.0) == 100
        assert ps.call(times, w, keys=[5, 5], by=2.0) == 1
        assert w.pull([0, 5, 99]).tolist() == [6, 12, 6]
        with pytest.raises(FunctionError, match="ZeroDivisionError"):
            ps.call(divides_by_zero, "w")
        with pytest.raises(DPSError, match="cannot be opened on the servers"):
            ps.register(dps.function(lambda rows: here))
        assert ps.client().call(times, "w", by=1.0) == 100
