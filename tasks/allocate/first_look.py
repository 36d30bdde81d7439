"""From how many passes on a profile is expected to pay, judged by a few prompts before the profile
is paid for.

Sampling a rollout counts as 2 FLOPs per parameter and token, and training on it as 6. In `charged`
all rollouts are trained on, each with its prompt. In `executed` and in seconds only those of mixed
groups are, and a group computes its prompt once: small groups save less there than they save
rollouts. A pass of the plan is compared with a pass of groups of the plan's largest size for every
prompt, in two ways: per pass, as the paper of sGPO (arXiv 2606.08854) does, so that most of a
saving is fewer rollouts; and per rollout of a mixed group, which alone have a gradient. Lengths and
probabilities of mixed groups are those of each prompt's counts, and do not change while the policy
learns."""

from dataclasses import dataclass, fields

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
    """The tokens of a pass's rollouts, and of those in mixed groups; and the tokens that are
    computed for them, with one prompt a group. Per prompt [P], or sums for several sets of prompts
    [D]."""

    rollouts: Floats
    mixed: Floats
    computed: Floats
    computed_mixed: Floats

    def summed(self, weights_DP: Floats) -> "Pass":
        return Pass(*(weights_DP @ getattr(self, field.name) for field in fields(self)))

    def cost(self, account: str, update_ratio: float) -> Floats:
        """Return the FLOPs per parameter; `update_ratio` is the FLOPs per second of sampling over
        those of updates, for seconds."""
        if account == "charged":
            return 8.0 * self.rollouts
        ratio = update_ratio if account == "seconds" else 1.0
        return 2.0 * self.computed + 6.0 * ratio * self.computed_mixed

    def sampling(self, account: str) -> Floats:
        """Return the FLOPs per parameter to sample, without updates."""
        return 2.0 * (self.rollouts if account == "charged" else self.computed)


def passes_to_pay(
    account: str, profile: Pass, plan: Pass, uniform: Pass, update_ratio: float = 1.0
) -> tuple[Floats, Floats]:
    """Return from how many passes on the plan with its `profile` (the pass that samples it) costs
    less than the uniform plan: per pass, and per rollout of a mixed group; infinity for never."""
    mine, theirs = (each.cost(account, update_ratio) for each in (plan, uniform))
    share = np.divide(
        plan.mixed, uniform.mixed, out=np.zeros(plan.mixed.shape), where=uniform.mixed > 0
    )
    savings, profiled = (theirs - mine, theirs * share - mine), profile.sampling(account)
    per_pass, per_mixed = (
        np.divide(profiled, saving, out=np.full(saving.shape, np.inf), where=saving > 0)
        for saving in savings
    )
    return per_pass, per_mixed


def pass_of(visits: Visits, compared: Compared, passes: int) -> Pass:
    """Return a mean pass of visits that are `passes` passes, by prompt."""
    num = len(compared.profile)
    found = by_prompt(visits, compared.profile, np.arange(num, dtype=np.uint32))
    correct, graded, size, whole, prompt, times = (
        found[name].to_numpy()
        for name in ("correct", "graded", "group_size", "tokens", "prompt_tokens", "visits")
    )
    mixed = mixed_probability(correct, graded, size, compared.prior)
    rollouts = times * size * whole / passes
    computed = times * (prompt + size * (whole - prompt)) / passes
    parts = rollouts, rollouts * mixed, computed, computed * mixed
    sums = (np.bincount(found["prompt"].to_numpy(), each, num) for each in parts)
    return Pass(*(np.asarray(part, dtype=np.float64) for part in sums))


def look_at(
    compared: Compared, population: int, update_ratio: float | None
) -> dict[str, tuple[Estimate, Estimate]]:
    """Return by account, for a profile of a random part of `population` prompts, the number of
    passes from which the whole profile pays, per pass and per rollout of a mixed group; without
    `update_ratio` not for seconds."""
    num, passes = len(compared.profile), compared.uniform.times
    visits = (compared.samples, 1), (compared.plan, passes), (compared.uniform, passes)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(num, np.full(num, 1.0 / num), NUM_DRAWS)
    # the first row is the estimate itself
    weights_DP = 1.0 + np.vstack([np.zeros(num), (drawn - 1.0) * finite(num, population)])
    # the profile is sampled once, not in every pass
    profile, plan, uniform = (pass_of(v, compared, n).summed(weights_DP) for v, n in visits)
    found = {}
    for account in ("charged", "executed", "seconds")[: 2 if update_ratio is None else 3]:
        per_pass, per_mixed = passes_to_pay(account, profile, plan, uniform, update_ratio or 1.0)
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
