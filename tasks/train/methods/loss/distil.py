"""`distil`: on-policy distillation of a teacher, `train.reference.source` (Lu et al., Thinking
Machines, 2025; GKD, arXiv 2306.13649, with the reverse KL divergence and all samples on-policy).

The advantage of a token is the teacher's log-probability minus the policy's, without gradient: in
expectation the update descends the KL divergence of the policy from the teacher at each position.
It is multiplied by the ratio to the old policy, unclipped. As in public code, tokens whose
probability has fallen by over `max_fall` since they were sampled are masked, and `penalty` times
the squared log-ratio of policy and sampler is added to the loss of every token. `reward_weight`
times the estimator's advantage is added; 0 ignores the verifier. Left out: the exact KL divergence
over the vocabulary, and the influence of a token on later positions."""

from tasks.common.params import above_zero, at_least, settings
from tasks.train.data.tokens import Gains, Normalize, Tokens
from tasks.train.settings import Entropy
from tasks.train.slots import Loss


@settings
class Settings:
    reward_weight: float = 0.0  # weight of the estimator's advantage
    max_fall: float = 0.2  # maximum fall of a token's probability from the sampler's
    penalty: float = 1.0e-3  # factor of the squared log-ratio of policy and sampler
    normalize: Normalize = "token"  # how the step's tokens are averaged
    entropy: Entropy = Entropy()  # a bonus for the policy's entropy

    def __post_init__(self) -> None:
        at_least(0, train__loss__reward_weight=self.reward_weight)
        at_least(0, train__loss__penalty=self.penalty)
        above_zero(train__loss__max_fall=self.max_fall)


class Method(Loss):
    settings: Settings
    reads_reference = True
    needs_teacher = True

    def gains(self, tokens: Tokens) -> Gains:
        assert tokens.reference_logprobs_N is not None
        assert tokens.sampler_logprobs_N is not None
        policy_N = tokens.logprobs_N.detach()
        advantages_N = tokens.reference_logprobs_N - policy_N
        advantages_N = advantages_N + self.settings.reward_weight * tokens.advantages_N
        has_fallen_N = policy_N.exp() - tokens.sampler_logprobs_N.exp() < -self.settings.max_fall
        ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp()
        gain_N = (ratio_N * advantages_N * tokens.weights_N).masked_fill(has_fallen_N, 0.0)
        moved_N = tokens.logprobs_N - tokens.sampler_logprobs_N
        return gain_N - self.settings.penalty * moved_N**2, has_fallen_N
