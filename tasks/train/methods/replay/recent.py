"""`recent`: train on stored and fresh groups (rollout replay of DOTS, arXiv 2506.05316).

For the last `capacity` prompts that were sampled with a mixed group, the latest such group is
stored. Once there are enough, `share` of every batch is drawn from them uniformly, and fewer
rollouts are sampled; a full buffer that contains less is drawn whole. The weights of the loss
correct for the older policy (`train.correction`), with its stored log-probabilities. The generation
of a replayed rollout was charged when it was fresh. Scores of composite rewards are not stored."""

import numpy as np

from tasks.common.params import at_least, settings, share
from tasks.train.data.columns import Ints
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts, make_rollouts, merge
from tasks.train.methods.replay.kept import cost_Q, drawn, state_of
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay


@settings
class Settings:
    share: float = 0.5  # share of a batch
    capacity: int = 512  # maximum number of stored groups

    def __post_init__(self) -> None:
        share(train__replay__share=self.share)
        at_least(1, train__replay__capacity=self.capacity)


class Method(Replay):
    def __init__(self, settings: Settings) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        self.settings, self.state = settings, state_of(make_rollouts(nothing, [], nothing))

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """Return the share of the batch, or less if the full buffer contains less; 0 before the
        buffer contains as much. Drawn groups stay in the buffer."""
        room, cost = int(self.settings.share * batch.size), cost_Q(self.state.rollouts, batch)
        stored, is_full = int(cost.sum()), len(cost) >= self.settings.capacity
        return min(room, stored) if stored >= room or is_full else 0

    def add(self, rollouts: Rollouts) -> None:
        """Store the mixed groups, the latest of each prompt."""
        graded = rollouts.where(~rollouts.is_error_B())
        num_groups = len(rollouts.prompt_rows_Q)
        mixed_Q = mixed_groups(graded.rewards_B, graded.group_B, num_groups)
        # of a prompt that the step visited twice, the later group
        latest_Q = np.zeros(num_groups, dtype=np.bool_)
        latest = {int(rollouts.prompt_rows_Q[q]): int(q) for q in np.flatnonzero(mixed_Q)}
        latest_Q[list(latest.values())] = True
        fresh, kept = graded.groups(np.flatnonzero(latest_Q)), self.state.rollouts
        old = ~np.isin(kept.prompt_rows_Q, fresh.prompt_rows_Q)
        joined = merge([kept.groups(np.flatnonzero(old)), fresh])
        self.state = state_of(joined.groups(self.kept(joined)))

    def kept(self, rollouts: Rollouts) -> Ints:
        """Return the groups that stay; in `rollouts` the step's groups follow the stored ones."""
        return np.arange(len(rollouts.prompt_rows_Q))[-self.settings.capacity :]

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        return drawn(self.state.rollouts, rng, room, batch)
