"""Time limits that exclude pauses: a stopped process group, a frozen container, a suspended
machine."""

import time

MAX_STEP = 1.0  # seconds counted between two readings


class RunningClock:
    """The running time of this process in seconds. Between two readings at most MAX_STEP seconds
    count, so a pause adds almost nothing; read the clock more often than every MAX_STEP."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looked = time.monotonic()

    def read(self, *, counts: bool = True) -> float:
        """Return the seconds so far. Without `counts`, exclude the time since the last reading."""
        now = time.monotonic()
        self.seconds += min(now - self.looked, MAX_STEP) if counts else 0.0
        self.looked = now
        return self.seconds
