"""`nat`: train on a random prefix of every completion, instead of all of it (NAT's random prefix
cutting, arXiv 2603.06619; rule from summaries, plus a chance of no cut).

A completion of T tokens stays whole with probability `whole`, and is otherwise cut after a token
that is uniform among the T. The advantage of token t is divided by the probability that it stays,
whole + (1 - whole) (T - t + 1) / T: the expected gradient is unchanged for a loss that treats each
token separately; other losses are refused. No weight exceeds 1 / `whole`. The cut does not depend
on the reward. Tokens after the cut are neither computed in the update nor charged for it. Left out:
masking tokens independently, which saves no compute."""

import numpy as np

from tasks.common.params import settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    whole: float = 0.5  # probability that a completion is not cut

    def __post_init__(self) -> None:
        share(train__shape__whole=self.whole)


class Method(Shape):
    settings: Settings
    skips_zeros = True
    cuts_rows = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        length_B, owner_N = rollouts.completion_tokens_B(), rollouts.owner_N()
        part = 1.0 - self.settings.whole
        # numbers from `whole` to 1 give the lengths of cut completions
        share_B = (1.0 - rng.random(len(length_B))) / max(part, 1e-300)
        cut_B = np.ceil(np.minimum(share_B, 1.0) * length_B)
        place_N = np.arange(len(owner_N)) - (np.cumsum(length_B) - length_B)[owner_N]
        stays_N = self.settings.whole + part * (length_B[owner_N] - place_N) / length_B[owner_N]
        return np.where(place_N < cut_B[owner_N], advantages_N / stays_N, 0.0)
