"""From how many passes on a profile is expected to pay, judged by a few prompts before the profile
is paid for.

Sampling a rollout counts as 2 forward passes per parameter and token, and training on it as 6. In
`charged` all rollouts are trained on, in `executed` and in seconds only those of mixed groups. A
pass of the plan is compared with a pass of groups of the plan's largest size for every prompt, in
two ways: per pass, as the paper of sGPO (arXiv 2606.08854) does, so that most of a saving is fewer
rollouts; and per rollout of a mixed group, which alone have a gradient. Lengths and probabilities
of mixed groups are those of each prompt's counts, and do not change while the policy learns."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.allocate.visits import Compared, Visits, by_prompt
from tasks.common.statistics import mixed_probability, wilson_interval

Floats = npt.NDArray[np.float64]
Estimate = tuple[float, float, float]  # a value and its 95 % interval over prompts
NUM_DRAWS = 2000
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Pass:
    """The rollouts of a pass, and those of them in mixed groups: per prompt [P], weighted by its
    tokens, or their sums for several sets of prompts [D]."""

    rollouts: Floats
    mixed: Floats

    def summed(self, weights_DP: Floats) -> "Pass":
        return Pass(weights_DP @ self.rollouts, weights_DP @ self.mixed)

    def cost(self, account: str, update_ratio: float) -> Floats:
        """Return the cost in forward passes; `update_ratio` is the FLOPs per second of sampling
        over those of updates, for seconds."""
        if account == "charged":
            return 8.0 * self.rollouts
        ratio = update_ratio if account == "seconds" else 1.0
        return 2.0 * self.rollouts + 6.0 * ratio * self.mixed


def passes_to_pay(
    account: str, profiled: Floats, plan: Pass, uniform: Pass, update_ratio: float = 1.0
) -> tuple[Floats, Floats]:
    """Return from how many passes on the plan with its profile costs less than the uniform plan:
    per pass, and per rollout of a mixed group; infinity for never. `profiled` are the samples of
    the profile, weighted by their tokens."""
    mine, theirs = (each.cost(account, update_ratio) for each in (plan, uniform))
    share = np.divide(
        plan.mixed, uniform.mixed, out=np.zeros(plan.mixed.shape), where=uniform.mixed > 0
    )
    savings = theirs - mine, theirs * share - mine
    per_pass, per_mixed = (
        np.divide(2.0 * profiled, saving, out=np.full(saving.shape, np.inf), where=saving > 0)
        for saving in savings
    )
    return per_pass, per_mixed


def pass_of(visits: Visits, compared: Compared) -> Pass:
    """Return a mean pass of the visits, by prompt."""
    num = len(compared.profile)
    found = by_prompt(visits, compared.profile, np.arange(num, dtype=np.uint32))
    correct, graded, size, tokens, times = (
        found[name].to_numpy() for name in ("correct", "graded", "group_size", "tokens", "visits")
    )
    mixed = mixed_probability(correct, graded, size, compared.prior)
    rollouts = times * size * tokens / compared.uniform.times
    prompts = found["prompt"].to_numpy()
    parts = (np.bincount(prompts, each, num) for each in (rollouts, rollouts * mixed))
    return Pass(*(np.asarray(part, dtype=np.float64) for part in parts))


def look_at(
    compared: Compared, population: int, update_ratio: float | None
) -> dict[str, tuple[Estimate, Estimate]]:
    """Return by account, for a profile of a random part of `population` prompts, the number of
    passes from which the whole profile pays, per pass and per rollout of a mixed group; without
    `update_ratio` not for seconds."""
    num = len(compared.profile)
    plan, uniform, samples = (
        pass_of(each, compared) for each in (compared.plan, compared.uniform, compared.samples)
    )
    profiled = samples.rollouts * compared.uniform.times  # sampled once, not in every pass
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(num, np.full(num, 1.0 / num), NUM_DRAWS)
    # the first row is the estimate itself
    weights_DP = 1.0 + np.vstack([np.zeros(num), (drawn - 1.0) * finite(num, population)])
    sums = weights_DP @ profiled, plan.summed(weights_DP), uniform.summed(weights_DP)
    found = {}
    for account in ("charged", "executed", "seconds")[: 2 if update_ratio is None else 3]:
        per_pass, per_mixed = passes_to_pay(account, *sums, update_ratio or 1.0)
        found[account] = estimate(per_pass), estimate(per_mixed)
    return found


def estimate(values: Floats) -> Estimate:
    """Return the first value with the interval of the others; values may be infinite."""
    low, high = np.quantile(values[1:], INTERVAL, method="nearest")
    return float(values[0]), float(low), float(high)


def finite(num: int, population: int) -> float:
    """Return the factor of a deviation of the mean of `num` out of `population` prompts, all
    different, relative to independent ones."""
    return float(np.sqrt((population - num) / max(population - 1, 1)))


def share_of(count: int, num: int, population: int) -> Estimate:
    """Return a share of the population, for `count` of `num` prompts."""
    share = count / num
    low, high = (float(bound) for bound in wilson_interval(count, num))
    factor = finite(num, population)
    return share, share + (low - share) * factor, share + (high - share) * factor
