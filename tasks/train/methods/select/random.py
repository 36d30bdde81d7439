"""`random`: some rollouts of each group, whatever their rewards: the control for `pods`."""

from dataclasses import dataclass

import numpy as np

from tasks.common.params import at_least
from tasks.train.rollouts import Bools, Ints, Rollouts, keep_in_groups
from tasks.train.slots import Select


@dataclass(frozen=True)
class Settings:
    """How many rollouts of a group are kept."""

    keep: int

    def __post_init__(self) -> None:
        at_least(1, train__select__keep=self.keep)


EXAMPLE = Settings(keep=2)


class Method(Select):
    def __init__(self, settings: Settings) -> None:
        self.keep = settings.keep

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """[B] whether a rollout is one of `keep` of its group, drawn at random."""

        def any_of(rows: Ints) -> Ints:
            return rng.permutation(len(rows))[: self.keep]

        return keep_in_groups(rollouts.group_B, self.keep, any_of)
