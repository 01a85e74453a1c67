from dps.engine.core.requests.exchange import Stream
from dps.engine.core.requests.polling import Polling

DECLINED: int
DONE: int
OPEN: int

class PlainTicks:
    number: int
    received: bytes
    parties: int
    start: int
    def __init__(self, polling: Polling) -> None: ...
    def pass_clock(self, stream: Stream, clock: int, planned: int) -> int: ...
