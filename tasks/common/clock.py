"""Time limits that a pause does not use up: a stopped process group, a frozen container, a machine
that was suspended."""

import time

MAX_STEP = 1.0  # seconds that count between two looks
BEAT_SECONDS = 0.25  # between two signs of life of a process, or two looks at a clock


class RunningClock:
    """The seconds for which this process has run. Of the time between two looks no more than
    MAX_STEP counts, so a pause counts as next to nothing; look more often than that."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looked = time.monotonic()

    def look(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self.seconds += min(now - self.looked, MAX_STEP)
        self.looked = now
        return self.seconds
