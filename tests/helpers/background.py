"""A function that runs in a thread while the test goes on."""

from __future__ import annotations

import threading


def in_thread(function, *args, **kwargs):
    """Start it; returns a function that waits for the end and gives the result, or raises."""
    box = {}

    def run():
        try:
            box["result"] = function(*args, **kwargs)
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive(), "hangs"
        if "error" in box:
            raise box["error"]
        return box["result"]

    return join
