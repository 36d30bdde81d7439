"""The section `report`."""

from tasks.common.params import at_least, settings


@settings
class ReportSettings:
    """The section `report`."""

    stale_above: float = 0.15  # limit on the last pass's gap from the profile, beyond chance
    num_bootstrap: int = 1000  # resamples for each interval

    def __post_init__(self) -> None:
        at_least(1, report__num_bootstrap=self.num_bootstrap)
