"""`decoupled`: the parts of a composite reward are standardised within the group, then summed
(per-reward normalisation, as in LightningRL's code).

A part that varies little, such as a format that is nearly always right, counts as much as a part
that varies a lot; in a plain sum it would hardly count. `weights` names the parts and their
weights. With `batch` the sum is divided by its standard deviation over the step, so that its size
does not depend on the number of parts (GDPO, arXiv 2601.05242; population deviation). If a rollout
lacks a part, or its verifier is not a composite, its reward is used instead. Replayed rollouts have
no parts."""

import json

import numpy as np

from tasks.common.params import ParamsError, settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage import grpo
from tasks.train.slots import Advantage


@settings
class Settings:
    weights: dict[str, float]  # weight of each verifier of a composite
    batch: bool = False  # divide the sum by its standard deviation over the step

    def __post_init__(self) -> None:
        if not self.weights:
            raise ParamsError(
                "train.advantage.weights is empty: name the verifiers of the composite, each with "
                "its weight"
            )


EXAMPLE = Settings({"math": 0.9, "tags": 0.1})


class Method(Advantage):
    settings: Settings
    unshaped = True

    def __call__(self, rollouts: Rollouts) -> Floats:
        total_B, weights = np.zeros(len(rollouts.group_B)), self.settings.weights
        scores = [json.loads(parts) for parts in rollouts.table["scores"]]
        for name, weight in weights.items():
            pairs = zip(scores, rollouts.rewards_B, strict=True)
            part_B = np.array([parts.get(name, reward) for parts, reward in pairs])
            total_B += weight * grpo.advantage(part_B, rollouts.group_B)
        if not self.settings.batch:
            return total_B
        # parts that cancel leave rounding errors, which would become advantages of size 1
        least = ROUNDING * sum(map(abs, weights.values()))
        return grpo.in_deviations(np.where(np.abs(total_B) > least, total_B, 0.0))
