"""The section `profile`."""

from tasks.common.params import at_least, settings


@settings
class ProfileSettings:
    """The section `profile`."""

    num_samples: int = 8  # graded samples per training prompt

    def __post_init__(self) -> None:
        at_least(1, profile__num_samples=self.num_samples)
