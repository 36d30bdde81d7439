"""The statistics of pass rates: intervals, unbiased pass@k, and the probability that a group has a
gradient."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import scipy

POINT = 0.01  # a percentage point of accuracy
CONFIDENCE = 0.95  # of every interval
DRAWN = 1 << 22  # values of a bootstrap in memory at once: 32 MB, and as much for their places
POWER = 0.8  # probability that a difference of the stated size is found significant
MANY = 100_000  # with more rows of counts than this, equal rows are computed only once
Floats = npt.NDArray[np.float64]


def score_prompts(rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return a row per prompt: `correct` of `trials` non-greedy samples, and whether the `greedy`
    sample is correct (1 or 0; null if there is none). An `error` is Winnow's own failure, so
    these samples are ignored. Every other outcome except `correct` is a failure of the policy."""
    valid = pl.col("outcome") != "error"
    greedy = pl.col("greedy")
    return rollouts.group_by("prompt_id", maintain_order=True).agg(
        (valid & ~greedy & (pl.col("outcome") == "correct")).sum().cast(pl.Int64).alias("correct"),
        (valid & ~greedy).sum().cast(pl.Int64).alias("trials"),
        (pl.col("outcome") == "correct")
        .cast(pl.Float64)
        .filter(greedy & valid)
        .first()
        .alias("greedy"),
    )


def wilson_interval(successes: npt.ArrayLike, trials: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return Wilson's 95 % score interval for a binomial proportion, (low, high), elementwise; nan
    without trials."""
    n = np.asarray(trials, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.asarray(successes, dtype=np.float64) / n
        z = scipy.special.ndtri(0.5 + CONFIDENCE / 2)
        scale = 1.0 + z**2 / n
        middle = (share + z**2 / (2 * n)) / scale
        half = z / scale * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0)


def pass_at_k(correct: npt.ArrayLike, trials: npt.ArrayLike, k: int) -> Floats:
    """Return the unbiased estimate 1 - C(n-c, k) / C(n, k) for each prompt (Chen et al., arXiv
    2107.03374), nan for a prompt with fewer than k trials."""
    c, n = np.asarray(correct, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        log_failing = log_binomial(n - c, k) - log_binomial(n, k)
    return np.where(n >= k, np.where(n - c >= k, 1.0 - np.exp(log_failing), 1.0), np.nan)


def log_binomial(n: Floats, k: int) -> Floats:
    """Return log C(n, k) without overflow."""
    return np.asarray(
        scipy.special.gammaln(n + 1)
        - scipy.special.gammaln(k + 1)
        - scipy.special.gammaln(n - k + 1)
    )


def bootstrap_interval(
    values: npt.ArrayLike,
    num_bootstrap: int,
    rng: np.random.Generator,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of `values` [P], one per prompt,
    all within `bounds`. Prompts are resampled, since samples of one prompt are not independent.
    If all values are equal, return `equal_interval`."""
    values_P = np.asarray(values, dtype=np.float64)
    num_prompts = len(values_P)
    if is_equal(values_P):
        return equal_interval(float(values_P[0]), num_prompts, bounds)
    step = max(1, DRAWN // num_prompts)
    means = [
        values_P[rng.integers(0, num_prompts, (min(step, num_bootstrap - at), num_prompts))].mean(1)
        for at in range(0, num_bootstrap, step)
    ]
    low, high = np.quantile(np.concatenate(means), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Noise:
    """The means [N] of N measures, each with a value per seed and prompt, and the variances of
    these means: over seeds [N], over prompts [N, N], both with the noise of answers, and this noise
    alone [N]. Every measure has its own seeds; all have the same prompts."""

    means: Floats
    seeds: Floats
    prompts: Floats
    answers: Floats
    num_seeds: int
    num_prompts: int


def noise_of(values_NSP: npt.ArrayLike) -> Noise:
    """Return the noise of N measures with S >= 2 seeds and P >= 2 prompts."""
    values = np.asarray(values_NSP, dtype=np.float64)
    _, num_seeds, num_prompts = values.shape
    prompts_NP, seeds_NS = values.mean(axis=1), values.mean(axis=2)
    means = seeds_NS.mean(axis=1)
    rest = values - seeds_NS[:, :, None] - prompts_NP[:, None] + means[:, None, None]
    answers = (rest**2).sum(axis=(1, 2)) / ((num_seeds - 1) * (num_prompts - 1))
    return Noise(
        means,
        seeds_NS.round(12).var(axis=1, ddof=1) / num_seeds,  # 0 if equal up to rounding
        np.atleast_2d(np.cov(prompts_NP)) / num_prompts,
        answers / (num_seeds * num_prompts),
        num_seeds,
        num_prompts,
    )


def variance_of(noise: Noise, weights_GN: Floats) -> tuple[Floats, Floats]:
    """Return the variances [G] of weighted sums of the means, and their degrees of freedom.

    The variance is that of seeds plus that of prompts minus the noise of single answers, which both
    include (two-way random effects; Searle, Casella and McCulloch, Variance Components, 1992), with
    Satterthwaite's degrees of freedom. If prompts differ no more than noise, it is only the seeds'
    term; if the seeds' means are equal, only the prompts' term, or only the noise."""
    seeds_GN, answers = weights_GN**2 * noise.seeds, weights_GN**2 @ noise.answers
    seeds, prompts = seeds_GN.sum(axis=1), ((weights_GN @ noise.prompts) * weights_GN).sum(axis=1)
    is_noise = prompts < answers
    prompts = np.where(is_noise, 0.0, prompts)
    answers = answers * (is_noise.astype(np.float64) - (seeds > 0))
    freedom = noise.num_seeds - 1, noise.num_prompts - 1
    squares = (seeds_GN**2).sum(axis=1) / freedom[0] + prompts**2 / freedom[1]
    squares += answers**2 / (freedom[0] * freedom[1])
    variance = seeds + prompts + answers
    unbounded = np.full_like(squares, np.inf)
    return variance, np.divide(variance**2, squares, out=unbounded, where=squares > 0)


def crossed_interval(values_SP: npt.ArrayLike, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the 95 % interval, clipped to `bounds`, of the mean of `values_SP` [S, P], one value
    per seed and prompt; S, P >= 2. Seeds and prompts are both random; all seeds share the prompts
    (see `variance_of`). A bootstrap interval over two or three seeds is far too narrow if seeds
    differ, else too wide (Owen, Annals of Applied Statistics 1, 2007)."""
    values = np.asarray(values_SP, dtype=np.float64)
    mean = float(values.mean())
    if is_equal(values):
        return equal_interval(mean, values.shape[1], bounds)
    variance, freedom = variance_of(noise_of(values[None]), np.ones((1, 1)))
    half = float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, freedom[0]) * np.sqrt(variance[0]))
    return max(mean - half, bounds[0]), min(mean + half, bounds[1])


def with_power(half: float, noise: Noise | None = None) -> float:
    """Return the true difference that is found significant with the probability POWER, if `half` is
    the half width of its interval, with the degrees of freedom of `noise` (None: of a normal)."""
    freedom = np.inf if noise is None else variance_of(noise, np.ones((1, 1)))[1][0]
    power, level = scipy.stats.t.ppf([POWER, 0.5 + CONFIDENCE / 2], freedom)
    return float(half * (1 + power / level))


def times_for_a_point(noise: Noise) -> float:
    """Return by which factor both seeds and prompts must grow for a half width of one percentage
    point of the mean of one measure. Then the degrees of freedom are at least S - 1 of more seeds,
    and the noise of answers falls with the factor's square."""
    answers = float(noise.answers[0])
    rest = max(float(noise.seeds[0]) - answers, 0) + max(float(noise.prompts[0, 0]) - answers, 0)

    def missing(times: float) -> float:
        width = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, times * noise.num_seeds - 1)
        return float(width * np.sqrt(rest / times + answers / times**2)) - POINT

    return float(scipy.optimize.brentq(missing, 1.0, 1e9)) if missing(1.0) > 0 else 1.0


def equal_interval(value: float, num: int, bounds: tuple[float, float]) -> tuple[float, float]:
    """Return the interval of a mean if all `num` observed values equal `value`; a bootstrap would
    have zero width. It allows for a share of other values within `bounds` in the population, up to
    Wilson's upper limit for 0 of `num`. For 0 or 1 in [0, 1] this is Wilson's interval."""
    others = float(wilson_interval(0, num)[1])
    return value - others * (value - bounds[0]), value + others * (bounds[1] - value)


def is_equal(values: Floats) -> bool:
    """Return whether all values are equal up to rounding."""
    return len(np.unique(values.round(12))) == 1


def equal_times(num: int) -> float:
    """Return by which factor `num` equal differences must grow for a half width of one percentage
    point: that of `equal_interval` in [-1, 1] is z^2 / (n + z^2), not a square root."""
    others = float(wilson_interval(0, num)[1])
    return others / (1 - others) * (1 - POINT) / POINT


def half_width(
    num_prompts: int, num_samples: int, counts: tuple[npt.ArrayLike, npt.ArrayLike] | None = None
) -> float:
    """Return the expected half width of the 95 % interval of the difference between two policies on
    the same prompts, if both have the same pass rate p on each. The mean of n samples of a prompt
    has the variance p (1 - p) / n, and the difference of two such means twice that. The mean of
    p (1 - p) is estimated without bias from `counts` (correct, trials) if any prompt has two or
    more trials; else it is 1/4, its maximum. The interval is wider if the policies differ."""
    spread = 0.25
    if counts is not None:
        c, n = (np.asarray(values, dtype=np.float64) for values in counts)
        if (n > 1).any():
            spread = float((c * (n - c) / (n * (n - 1)))[n > 1].mean())
    return float(scipy.special.ndtri(0.975) * np.sqrt(2.0 * spread / (num_samples * num_prompts)))


def fit_beta(
    correct: npt.ArrayLike, trials: npt.ArrayLike, prompts: npt.ArrayLike = 1.0
) -> tuple[float, float]:
    """Return (a, b) of the Beta distribution of true pass rates under which the observed counts are
    most likely. `prompts` is the number of prompts with each pair (correct, trials). If there are
    more than MANY pairs, equal ones are merged first, which saves time."""
    counts: tuple[npt.NDArray[Any], ...] = (np.asarray(correct), np.asarray(trials))
    weights = np.broadcast_to(np.asarray(prompts, dtype=np.float64), counts[0].shape)
    if len(weights) > MANY:
        counts, place = distinct(*counts)
        weights = np.bincount(place, weights).astype(np.float64)
    c, n = (values.astype(np.float64) for values in counts)

    def negative_log_likelihood(log_parameters: Floats) -> float:
        a, b = np.exp(log_parameters)
        terms = scipy.special.betaln(c + a, n - c + b) - scipy.special.betaln(a, b)
        return -float(np.sum(weights * terms))

    minimum = scipy.optimize.minimize(
        negative_log_likelihood, np.zeros(2), method="L-BFGS-B", bounds=[(-5.0, 5.0)] * 2
    )
    a, b = np.exp(minimum.x)
    return float(a), float(b)


def mixed_probability(
    correct: npt.ArrayLike,
    trials: npt.ArrayLike,
    group_size: npt.ArrayLike,
    prior: tuple[float, float],
) -> Floats:
    """Return for each prompt P(a group of size G has both a success and a failure), in expectation
    over its posterior Beta(a + c, b + n - c), for c correct of n trials and the prior (a, b).

    The plug-in 1 - p^G - (1-p)^G is 0 for a prompt with 0 of 8 successes, and too high for prompts
    chosen because their estimate is near one half; the posterior under the prior of all prompts
    avoids both errors."""
    counts = np.broadcast_arrays(correct, trials, group_size)
    if counts[0].size > MANY:
        (some_correct, some_trials, some_sizes), place = distinct(*counts)
        rates = mixed_probability(some_correct, some_trials, some_sizes, prior)
        return np.asarray(rates[place], dtype=np.float64)
    c, n, size = (values.astype(np.float64) for values in counts)
    a, b = prior[0] + c, prior[1] + n - c
    all_right = np.exp(scipy.special.betaln(a + size, b) - scipy.special.betaln(a, b))
    all_wrong = np.exp(scipy.special.betaln(a, b + size) - scipy.special.betaln(a, b))
    return np.asarray(1.0 - all_right - all_wrong, dtype=np.float64)


def distinct(*counts: npt.NDArray[Any]) -> tuple[tuple[npt.NDArray[Any], ...], npt.NDArray[Any]]:
    """Return the distinct rows of a table whose columns are `counts` (small whole numbers), and for
    each row its index among the distinct ones."""
    shape = tuple(int(values.max()) + 1 for values in counts)
    numbers = np.ravel_multi_index(tuple(values.astype(np.int64) for values in counts), shape)
    found, place = np.unique(numbers, return_inverse=True)
    return np.unravel_index(found, shape), place
