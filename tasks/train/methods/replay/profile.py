"""`profile`: begin with the profile's own rollouts beside fresh ones.

They were sampled from the policy that training starts from, and are paid for. The mixed groups of
the first `capacity` prompts of the plan that have one are used once each, in the plan's order, as
`share` of every batch until they are used up; so much less is sampled. The weights of the loss
correct for the updates since (`train.correction`). Where the engine did not keep log-probabilities
(`store.logprobs`), the trainer computes them before the first step, and is charged for it."""

import logging

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.flat_rollouts import FlatRollouts
from tasks.train.profile import Profile
from tasks.train.rollouts import Floats, Rollouts
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay

logger = logging.getLogger(__name__)

reads_profile = True


@settings
class Settings:
    share: float = 0.5  # of a batch
    capacity: int = 1024  # groups, at most

    def __post_init__(self) -> None:
        share(train__replay__share=self.share)
        at_least(1, train__replay__capacity=self.capacity)


EXAMPLE = Settings(share=0.5, capacity=8)


class Method(Replay):
    def __init__(self, settings: Settings, profile: Profile) -> None:
        self.settings = settings
        prompt_rows = profile.mixed_prompts()[: settings.capacity]
        if not len(prompt_rows):
            logger.warning(
                "the profile has no group with both outcomes among the plan's prompts: nothing is "
                "replayed, and profiling is charged all the same"
            )
        self.state = FlatRollouts.of(profile.rollouts(prompt_rows))

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """The groups that fit the share of the batch, at least one while there are any, after those
        that are promised."""
        room, cost = int(self.settings.share * batch.size), self.state.cost_G(batch)
        cost = cost[np.searchsorted(np.cumsum(cost), promised, side="right") :]
        num = max(int(np.searchsorted(np.cumsum(cost), room, side="right")), 1)
        return int(cost[:num].sum())

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """The next groups, of so much as `room` said."""
        num = int(np.searchsorted(np.cumsum(self.state.cost_G(batch)), room, side="right"))
        if num == 0:
            return None
        groups = np.arange(len(self.state.sizes_G))
        drawn: FlatRollouts = self.state.take(groups[:num])
        self.state = self.state.take(groups[num:])
        return drawn.rollouts()

    def unscored(self) -> Rollouts | None:
        """All, where a log-probability is missing."""
        return self.state.rollouts() if np.isnan(self.state.logprobs_N).any() else None

    def score(self, logprobs_N: Floats) -> None:
        """Fill what is missing; what an engine kept stays."""
        kept_N = self.state.logprobs_N
        self.state.logprobs_N = np.where(np.isnan(kept_N), logprobs_N, kept_N)
