"""`profile`: at first, train on the profile's rollouts along with fresh ones.

The profile's rollouts are from the initial policy, and are already charged. Of the plan's prompts
with a mixed group, the first `capacity` are used, once each and in the plan's order. Until none is
left, they make up `share` of every batch, and fewer rollouts are sampled. The weights of the loss
correct for the updates since (`train.correction`). If the engine did not store log-probabilities
(`store.logprobs`), the trainer computes them before the first step; this is charged as scoring."""

import logging

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.data.columns import nested
from tasks.train.data.profile import Profile
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.replay.kept import State, cost_Q, state_of
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay, Score

logger = logging.getLogger(__name__)

reads_profile = True
reads_groups = True


@settings
class Settings:
    share: float = 0.5  # share of a batch
    capacity: int = 1024  # maximum number of stored groups

    def __post_init__(self) -> None:
        share(train__replay__share=self.share)
        at_least(1, train__replay__capacity=self.capacity)


class Method(Replay):
    def __init__(self, settings: Settings, profile: Profile) -> None:
        self.settings = settings
        prompt_rows = profile.mixed_prompts()[: settings.capacity]
        if not len(prompt_rows):
            logger.warning(
                "the profile has no group with both outcomes among the plan's prompts: nothing is "
                "replayed, and profiling is charged all the same"
            )
        self.state = state_of(profile.rollouts(prompt_rows))

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """Return the size, in the batch's unit, of the groups that fit in the batch's share, after
        skipping the `promised` ones; at least one group while any are left, none with share 0."""
        room, cost = int(self.settings.share * batch.size), cost_Q(self.state.rollouts, batch)
        cost = cost[np.searchsorted(np.cumsum(cost), promised, side="right") :]
        least = int(self.settings.share > 0.0)
        num = max(int(np.searchsorted(np.cumsum(cost), room, side="right")), least)
        return int(cost[:num].sum())

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """Remove and return the next groups, up to `room` in the batch's unit."""
        kept: Rollouts = self.state.rollouts
        cost = cost_Q(kept, batch)
        num = int(np.searchsorted(np.cumsum(cost), room, side="right"))
        if num == 0:
            return None
        drawn, left = np.split(np.arange(len(cost)), [num])
        self.state = state_of(kept.groups(left))
        return kept.groups(drawn)

    def prepare(self, score: Score) -> None:
        """Fill in missing log-probabilities; leave the engine's as they are."""
        kept: Rollouts = self.state.rollouts
        is_missing_N = np.isnan(kept.logprobs_N)
        if is_missing_N.any():
            logger.info("scoring %d rollouts of the profile", len(kept.group_B))
            found_N = np.where(is_missing_N, score(kept).logprobs_N, kept.logprobs_N)
            found = nested(found_N, kept.completion_tokens_B())
            self.state = State(kept.with_columns(logprobs=found).table)
