"""The sections `allocate` and `gates`."""

from tasks.common.params import at_least, settings, share


@settings
class AllocateSettings:
    """The section `allocate`, common to all recipes. Each recipe has its own strategy."""

    passes: int = 4  # passes over the curriculum
    seed: int = 0  # combined with the run's seed: every run has its own subset and order

    def __post_init__(self) -> None:
        at_least(1, allocate__passes=self.passes)
        at_least(0, allocate__seed=self.seed)


@settings
class Gates:
    """The section `gates`: conditions that the profile must meet before training."""

    min_solved_rate: float = 0.001  # minimum share of correct samples; 0: no check
    max_truncated_rate: float = 0.95  # maximum share cut at sampling.max_tokens; 1: no check

    def __post_init__(self) -> None:
        share(gates__min_solved_rate=self.min_solved_rate)
        share(gates__max_truncated_rate=self.max_truncated_rate)
