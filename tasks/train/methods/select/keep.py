"""What the selectors share that keep so many rollouts of every group."""

from tasks.common.params import at_least, settings


@settings
class Settings:
    """How many rollouts of a group are kept; a smaller group is kept whole."""

    keep: int  # rollouts of a group; a smaller group is kept whole

    def __post_init__(self) -> None:
        at_least(1, train__select__keep=self.keep)


EXAMPLE = Settings(keep=2)
