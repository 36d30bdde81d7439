"""The section `profile`."""

from typing import Literal

from tasks.common.params import ParamsError, above_zero, at_least, settings, share


@settings
class Stop:
    """`profile.stop`: the rule by which prompts get fewer samples than `profile.num_samples` (see
    `tasks/profile/stopping.py`)."""

    rule: Literal["mixed", "posterior"]  # a success and a failure seen, or a bucket is likely
    stages: list[int] | None = None  # samples after which a prompt may stop; null: the rule's own
    confidence: float = 0.9  # of `posterior`: probability of a bucket at which a prompt stops
    trivial_above: float = 0.75  # of `posterior`: its buckets are those of the strategy sgpo
    buckets: list[int] = [2, 4, 8]  # of `posterior`: group sizes

    def __post_init__(self) -> None:
        above_zero(profile__stop__confidence=self.confidence)
        share(
            profile__stop__confidence=self.confidence,
            profile__stop__trivial_above=self.trivial_above,
        )
        if not self.buckets or min(self.buckets) < 1 or len({*self.buckets}) < len(self.buckets):
            raise ParamsError(
                f"profile.stop.buckets is {self.buckets}; it must list distinct group sizes of at "
                "least 1"
            )


@settings
class ProfileSettings:
    """The section `profile`."""

    num_samples: int = 8  # graded samples per training prompt, at most if `stop` is set
    stop: Stop | None = None  # null: every prompt gets num_samples

    def __post_init__(self) -> None:
        at_least(1, profile__num_samples=self.num_samples)
        stages = self.stages
        if stages != sorted({*stages}) or stages[0] < 1 or stages[-1] > self.num_samples:
            raise ParamsError(
                f"profile.stop.stages is {stages[:-1]}; it must list increasing numbers of samples "
                f"from 1 to {self.num_samples - 1}, below profile.num_samples"
            )

    @property
    def stages(self) -> list[int]:
        """The numbers of samples after which prompts may stop; the last is `num_samples`. By
        default the rule `mixed` doubles the samples, and `posterior` adds two at a time."""
        stages: list[int] = []
        if self.stop is not None and self.stop.stages is not None:
            stages = self.stop.stages
        elif self.stop is not None and self.stop.rule == "mixed":
            stages = [2**power for power in range(1, (self.num_samples - 1).bit_length())]
        elif self.stop is not None:
            stages = [*range(2, self.num_samples, 2)]
        return [*stages, self.num_samples]
