"""A step's batch, from where it is sampled to what its update came to."""

from dataclasses import dataclass

from tasks.train.learner.update import UpdateStats
from tasks.train.loop.collect import Cost
from tasks.train.rollouts import GroupRequest, Rollouts


@dataclass(frozen=True)
class Start:
    """Where a batch is sampled: its step, the version of the policy, and how much replay will add
    to it."""

    step: int
    version: int
    replayed: int


@dataclass(frozen=True)
class Batch:
    """A step's fresh rollouts, the first request they answer, and how much of the batch was left to
    replay; what sampling and judging them took, and the share of the run that is done with it."""

    request: GroupRequest
    fresh: Rollouts
    replayed: int
    costs: list[Cost]
    judged_flops: float
    seconds: float
    progress: float


@dataclass(frozen=True)
class Update:
    """What a step's updates came to: sums over them, the norm of each gradient before clipping, the
    last factor of the learning rate, and whether one was not finite."""

    stats: UpdateStats
    norms: list[float]
    rate_factor: float
    nonfinite: bool
