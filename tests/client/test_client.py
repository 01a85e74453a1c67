"""Clients and real servers, without Dask and in the clear: the contract of `client_contract.py`."""

from __future__ import annotations

import pytest
from client_contract import *  # noqa: F403  (its tests)
from servers import Servers


@pytest.fixture(scope="module")
def clusters():
    """One, two and three servers."""
    with Servers(1) as one, Servers(2) as two, Servers(3) as three:
        yield {1: one, 2: two, 3: three}
