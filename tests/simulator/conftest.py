"""For every test of the simulator."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Keep the logs of many crashing servers out of the output."""
    caplog.set_level(logging.CRITICAL, "dps")
