"""`recent`: train on stored groups beside fresh ones (rollout replay of DOTS, arXiv 2506.05316).

Of the `capacity` prompts that were sampled last with a mixed group, the latest group each is kept.
Once there are enough, `share` of every batch is groups drawn from them uniformly, and so much less
is sampled. The weights of the loss correct for the policy that sampled them (`train.correction`):
they hold its log-probabilities. What a replayed rollout cost to generate was charged when it was
fresh. Scores of composite rewards are not kept."""

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.flat_rollouts import FlatRollouts
from tasks.train.rollouts import Rollouts, mixed_groups
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay


@settings
class Settings:
    share: float = 0.5  # of a batch
    capacity: int = 512  # groups, or rollouts of them

    def __post_init__(self) -> None:
        share(train__replay__share=self.share)
        at_least(1, train__replay__capacity=self.capacity)


EXAMPLE = Settings(share=0.5, capacity=8)


class Method(Replay):
    def __init__(self, settings: Settings) -> None:
        self.settings, self.state = settings, FlatRollouts.empty()

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """The share of the batch, where the buffer holds as much; else nothing. What is drawn stays
        in the buffer."""
        room = int(self.settings.share * batch.size)
        return room if self.state.cost_G(batch).sum() >= room else 0

    def add(self, rollouts: Rollouts) -> None:
        """Keep the mixed groups, the latest of each prompt."""
        graded = rollouts.where(~rollouts.is_error_B())
        num_groups = len(rollouts.prompt_rows_Q)
        mixed_Q = mixed_groups(graded.rewards_B, graded.group_B, num_groups)
        # of a prompt that the step visited twice, the later group
        latest_Q = np.zeros(num_groups, dtype=np.bool_)
        latest = {int(rollouts.prompt_rows_Q[q]): int(q) for q in np.flatnonzero(mixed_Q)}
        latest_Q[list(latest.values())] = True
        fresh = FlatRollouts.of(graded.where(latest_Q[graded.group_B]))
        old = ~np.isin(self.state.prompt_rows_G, fresh.prompt_rows_G)
        joined = self.state.take(np.flatnonzero(old)).join(fresh)
        first = max(len(joined.sizes_G) - self.settings.capacity, 0)
        self.state = joined.take(np.arange(first, len(joined.sizes_G)))

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        """Groups drawn uniformly, at most as much as `room`, at least one."""
        if room == 0:
            return None
        order = rng.permutation(len(self.state.sizes_G))
        cost = self.state.cost_G(batch)[order]
        num = max(int(np.searchsorted(np.cumsum(cost), room, side="right")), 1)
        drawn: FlatRollouts = self.state.take(np.sort(order[:num]))
        return drawn.rollouts()
