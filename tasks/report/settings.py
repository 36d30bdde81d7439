"""The section `report` of the parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportSettings:
    """From where on a profile is called stale, and the number of bootstrap draws of an interval."""

    stale_above: float
    num_bootstrap: int
