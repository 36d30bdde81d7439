"""`kl_cov`: no clip; the few tokens that lower the entropy most are held near the old policy
(KL-Cov, arXiv 2505.22617).

A token's covariance is (A - mean A) (log p - mean log p); the means are over the update's tokens,
and p is from the policy before the batch's first update. For the `share` of tokens with the largest
covariances, `penalty` times |log-ratio| is added to the loss, as in the authors' code. Rollouts of
advantage 0 are left out. A log-ratio of at most 1e-4, which may be rounding, has no penalty: its
sign would depend on the packing and the number of ranks (in bfloat16 it still may: rounding is
larger). So in the first update of a batch the penalty has no gradient, and several updates are
required."""

import numpy as np

from tasks.common.params import ParamsError, at_least, settings
from tasks.train.data.columns import Bools
from tasks.train.data.rollouts import Rollouts
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss

LEAST = 1.0e-4  # log-ratio above which a token has moved; float32 rounds by less


@settings
class Settings:
    share: float = 2.0e-4  # share of tokens with the penalty, at least one token
    penalty: float = 1.0  # factor of |log-ratio|
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        at_least(0, train__loss__penalty=self.penalty)
        if not 0.0 < self.share <= 1.0:
            raise ParamsError(f"train.loss.share is {self.share}; it is above 0 and at most 1")


class Method(Loss):
    settings: Settings
    needs_several = True

    def gains(self, tokens: Tokens) -> Gains:
        assert tokens.marked_N is not None
        log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
        is_moved_N = tokens.marked_N & (log_ratio_N.detach().abs() > LEAST)
        penalty_N = self.settings.penalty * log_ratio_N.abs() * is_moved_N
        gain_N = (log_ratio_N.exp() * tokens.advantages_N - penalty_N) * tokens.weights_N
        return gain_N, tokens.marked_N

    def marks(self, rollouts: Rollouts) -> Bools:
        assert rollouts.old_logprobs_N is not None
        learned_B = rollouts.kept_B & rollouts.has_advantage_B()
        places = np.flatnonzero(learned_B[rollouts.owner_N()] & rollouts.trained_N())
        parts = (rollouts.advantages_N[places], rollouts.old_logprobs_N[places])
        gains, logs = (values - values.mean() if len(places) else values for values in parts)
        num = max(int(self.settings.share * len(places)), 1)
        marked_N = np.zeros(len(rollouts.owner_N()), dtype=np.bool_)
        marked_N[places[np.argsort(-gains * logs, kind="stable")[:num]]] = True
        return marked_N
