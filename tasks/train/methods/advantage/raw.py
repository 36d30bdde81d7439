"""`raw`: the reward itself, without a baseline.

`wrong: 0` trains only on rewarded rollouts; with `loss: clip` this is RAFT++ (arXiv 2504.11343).
With `wrong: -1` a reward of 0 becomes -1; together with `select: mixed` this is Reinforce-Rej of
the same paper."""

from typing import Literal

from tasks.common.params import settings
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


@settings
class Settings:
    wrong: Literal[0, -1] = 0  # the advantage at reward 0; at reward 1 it is 1


EXAMPLE = Settings(wrong=-1)


class Method(Advantage):
    settings: Settings
    needs_group = False

    def __call__(self, rollouts: Rollouts) -> Floats:
        wrong = float(self.settings.wrong)
        return wrong + (1.0 - wrong) * rollouts.rewards_B
