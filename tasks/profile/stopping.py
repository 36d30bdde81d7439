"""A profile that stops early (`profile.stop`): prompts are sampled in stages, and a prompt leaves
when the rule has decided it. A sample's seed depends only on its index, so a profile without the
rule extends the stopped one.

- `mixed`: stop once a success and a failure were seen.
- `posterior`: stop when one bucket of the strategy `sgpo` has the probability `confidence`. It is
  the beta-binomial probability that the final number of successes falls into the bucket. The prior
  is fitted to the counts of all prompts after each stage, and of one more prompt with a success and
  a failure, so that equal counts of a few prompts do not look certain. Stopping does not bias this
  likelihood.

Under stopping, k / n is biased: with the true rate 0.1, `mixed` with the stages 2, 4, 8 has the
mean 0.169. The estimate of Girshick, Mosteller and Savage (Annals of Mathematical Statistics 17,
1946) is unbiased: the share of a success as the first outcome, among all orderings of outcomes
that reach (k, n) without stopping earlier. It is noisy for one prompt, so it serves for means over
prompts; buckets and the forecasts of mixed groups follow from k and n."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import comb

import numpy as np
import numpy.typing as npt
import scipy

from tasks.common.statistics import fit_beta
from tasks.profile.settings import ProfileSettings, Stop

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rule = Callable[[int, int], bool]
UNSOLVED, TRIVIAL = 0, -1  # buckets beside the group sizes


class Stopping:
    """The stages of a profile of P prompts. `rules` are those of the stages that have ended: each
    returns whether a prompt with `correct` of `graded` samples stops there."""

    def __init__(self, settings: ProfileSettings, num_prompts: int) -> None:
        self.settings = settings
        self.rules: list[Rule] = []
        self.is_open_P = np.ones(num_prompts, dtype=np.bool_)

    @property
    def samples(self) -> range:
        """The indices of the samples in the current stage."""
        ends = [0, *self.settings.stages]
        return range(*ends[len(self.rules) : len(self.rules) + 2])

    def end_stage(self, correct_P: Ints, graded_P: Ints) -> bool:
        """Close the prompts that are decided by these counts, and begin the next stage. Return
        whether any prompt is open."""
        stop, num_sampled = self.settings.stop, self.samples.stop
        if stop is None or num_sampled == self.settings.num_samples:
            return False
        num_left = self.settings.num_samples - num_sampled
        rule = cache(
            is_mixed
            if stop.rule == "mixed"
            else likely_bucket(stop, num_left, fit_beta([*correct_P, 1], [*graded_P, 2]))
        )
        counts = zip(correct_P.tolist(), graded_P.tolist(), strict=True)
        self.is_open_P &= ~np.fromiter((rule(*each) for each in counts), np.bool_, len(correct_P))
        self.rules.append(rule)
        return bool(self.is_open_P.any())

    def unbiased(self, counts: Iterable[tuple[int, tuple[int, ...]]]) -> list[float]:
        """Return the unbiased pass rate of each prompt, NaN without a graded sample. Its counts are
        its correct samples, and its graded samples after each stage up to its last one."""
        share = cache(lambda correct, ends: first_success_share(correct, ends, self.rules))
        return [share(*each) for each in counts]


def is_mixed(correct: int, graded: int) -> bool:
    """Return whether both a success and a failure were seen."""
    return 0 < correct < graded


def likely_bucket(stop: Stop, num_left: int, prior: tuple[float, float]) -> Rule:
    """Return the rule that stops when a bucket has the probability `stop.confidence`, if a prompt
    would get `num_left` more samples."""

    def rule(correct: int, graded: int) -> bool:
        shares = bucket_probabilities(stop, correct, graded, num_left, prior)
        return graded > 0 and max(shares.values()) >= stop.confidence

    return rule


def bucket_probabilities(
    stop: Stop, correct: int, graded: int, num_left: int, prior: tuple[float, float]
) -> dict[int, float]:
    """Return the probability of each bucket after `num_left` more samples, given `correct` of
    `graded` and a Beta prior (a, b) of pass rates."""
    more = np.arange(num_left + 1)
    shares = scipy.stats.betabinom.pmf(
        more, num_left, prior[0] + correct, prior[1] + graded - correct
    )
    found: dict[int, float] = {}
    for number, share in zip(more.tolist(), shares.tolist(), strict=True):
        bucket = bucket_of(stop, correct + number, graded + num_left)
        found[bucket] = found.get(bucket, 0.0) + share
    return found


def bucket_of(stop: Stop, correct: int, graded: int) -> int:
    """Return the decision of the strategy `sgpo`: UNSOLVED, TRIVIAL or the group size."""
    if correct == 0:
        return UNSOLVED
    if correct / graded > stop.trivial_above:
        return TRIVIAL
    sizes = sorted(stop.buckets)
    return max((size for size in sizes if size * correct <= graded), default=sizes[0])


def first_success_share(correct: int, ends: tuple[int, ...], rules: Sequence[Rule]) -> float:
    """Return the unbiased estimate of a prompt that left after the stage `len(ends)`, with `ends`
    graded samples after each stage: the share of orderings that begin with a success."""
    reached = {0: (1, 0)}  # by successes: the orderings so far, and those with a success first
    before = 0
    for number, end in enumerate(ends):
        stopped = rules[number - 1] if number else never
        paths = {k: v for k, v in reached.items() if not stopped(k, before)}
        reached = {}
        for successes, (every, first) in paths.items():
            for more in range(end - before + 1):
                ways = comb(end - before, more)
                begun = comb(end - before - 1, more - 1) if more and not before else first * ways
                known = reached.get(successes + more, (0, 0))
                reached[successes + more] = known[0] + every * ways, known[1] + begun
        before = end
    every, first = reached[correct]
    return first / every if before else float("nan")


def never(correct: int, graded: int) -> bool:
    return False
