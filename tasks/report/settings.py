"""The section `report`."""

from tasks.common.params import settings


@settings
class ReportSettings:
    """The section `report`."""

    stale_above: float = 0.15  # last pass: how far training success may be from the profile
    num_bootstrap: int = 1000  # draws of an interval
