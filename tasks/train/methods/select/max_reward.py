"""`max_reward`: the best rollouts of each group: a control for `pods` that is known to do badly
(arXiv 2504.13818)."""

import numpy as np

from tasks.train.methods.subset import keep_in_groups
from tasks.train.rollouts import Bools, Floats, Ints


def select(rewards_B: Floats, group_B: Ints, rng: np.random.Generator, *, keep: int) -> Bools:
    """[B] whether a rollout is one of the `keep` of its group with the largest rewards, of equal
    ones the first."""
    return keep_in_groups(
        group_B, keep, lambda rows: np.argsort(-rewards_B[rows], kind="stable")[:keep]
    )
