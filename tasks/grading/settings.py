"""The section `verify`."""

from typing import Any

from tasks.common.params import above_zero, at_least, settings, share


@settings
class Verify:
    """The section `verify`: the limits of the processes that grade. A stage stops when the share of
    the outcomes `timeout` and `error` is above `max_failure_rate`."""

    processes: int = 2  # number of processes that grade in parallel
    seconds: float = 5.0  # limit on the CPU time of grading one answer
    memory_gb: float = 4.0  # limit on the address space of a process, in units of 2^30 bytes
    max_failure_rate: float = 0.05  # maximum share of the outcomes `timeout` and `error`
    verifiers: dict[str, dict[str, Any]] = {}  # with settings: name -> {method: file, setting: ...}
    clock_factor: float = 20.0  # limit on wall time, pauses excluded, as a multiple of `seconds`

    def __post_init__(self) -> None:
        at_least(1, verify__processes=self.processes)
        above_zero(verify__seconds=self.seconds, verify__memory_gb=self.memory_gb)
        above_zero(verify__clock_factor=self.clock_factor)
        share(verify__max_failure_rate=self.max_failure_rate)
