"""What a run is told, and never changes."""

from dataclasses import dataclass

from tasks.engines.settings import Sampling
from tasks.models.policy import Policy
from tasks.train.learner.ranks import Ranks
from tasks.train.settings import TrainSettings


@dataclass(frozen=True)
class RunContext:
    """The initial policy, the settings, this process among its ranks, and the seed."""

    policy: Policy
    settings: TrainSettings
    sampling: Sampling
    ranks: Ranks
    seed: int
