"""The section `evaluate`."""

from tasks.common.params import ParamsError, at_least, settings


@settings
class Evaluate:
    """The section `evaluate`, for the stages `baseline` and `evaluate`."""

    num_samples: int = 8  # samples per test prompt, in addition to one greedy completion
    pass_at: list[int] = [1, 4, 8]  # values of k in pass@k
    num_bootstrap: int = 1000  # bootstrap resamples per interval

    def __post_init__(self) -> None:
        at_least(1, evaluate__num_samples=self.num_samples)
        at_least(1, evaluate__num_bootstrap=self.num_bootstrap)
        at_least(1, evaluate__pass_at=min(self.pass_at, default=1))
        if too_many := [k for k in self.pass_at if k > self.num_samples]:
            raise ParamsError(
                f"evaluate.pass_at has {too_many[0]}, and evaluate.num_samples is "
                f"{self.num_samples}: pass@k needs at least k samples"
            )
