"""The statistics of pass rates: intervals, unbiased pass@k, and how likely a group is to carry a
gradient."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

MANY = 100_000  # rows of counts, of which there are few different ones
Floats = npt.NDArray[np.float64]


def wilson_interval(
    successes: npt.ArrayLike, trials: npt.ArrayLike, confidence: float = 0.95
) -> tuple[Floats, Floats]:
    """Wilson's score interval for a binomial share, elementwise; (nan, nan) where there was no
    trial."""
    n = np.asarray(trials, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.asarray(successes, dtype=np.float64) / n
        z = stats.norm.ppf(0.5 + confidence / 2)
        scale = 1.0 + z**2 / n
        middle = (share + z**2 / (2 * n)) / scale
        half = z / scale * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0)


def pass_at_k(correct: npt.ArrayLike, trials: npt.ArrayLike, k: int) -> Floats:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) for each prompt (Chen et al., arXiv
    2107.03374).

    nan where a prompt has fewer than k trials.
    """
    c, n = np.asarray(correct, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        log_failing = log_binomial(n - c, k) - log_binomial(n, k)
    return np.where(n >= k, np.where(n - c >= k, 1.0 - np.exp(log_failing), 1.0), np.nan)


def log_binomial(n: Floats, k: int) -> Floats:
    """log C(n, k), which does not overflow."""
    return np.asarray(special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1))


def bootstrap_interval(
    values: npt.ArrayLike,
    num_bootstrap: int,
    rng: np.random.Generator,
    confidence: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` within `bounds`, a value a prompt [P]: prompts
    are resampled, because the samples of one prompt are not independent. Where all values are
    equal, that of `equal_interval`."""
    values_P = np.asarray(values, dtype=np.float64)
    num_prompts = len(values_P)
    if len(np.unique(values_P.round(12))) == 1:  # equal but for rounding
        return equal_interval(float(values_P[0]), num_prompts, bounds, confidence)
    means = []
    for _ in range(num_bootstrap):
        means.append(values_P[rng.integers(0, num_prompts, num_prompts)].mean())
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def crossed_interval(
    values_SP: npt.ArrayLike, bounds: tuple[float, float], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of the mean of values by seed and prompt [S, P], S and P at least 2, within
    `bounds`: seeds and prompts are both drawn, and every seed answers the same prompts.

    The variance of the mean is that of the seeds' means over S plus that of the prompts' means over
    P, less what both count of the noise of single answers (two-way random effects; Searle, Casella
    and McCulloch, Variance Components, 1992), with Satterthwaite's degrees of freedom. Where the
    seeds' means are equal it is that of the prompts' means alone, or if prompts differ no more than
    noise, that of the noise. A bootstrap of two or three seeds is far too narrow where seeds
    differ, and of noise alone too wide (Owen, Annals of Applied Statistics 1, 2007)."""
    values = np.asarray(values_SP, dtype=np.float64)
    num_seeds, num_prompts = values.shape
    mean, seeds_S, prompts_P = values.mean(), values.mean(axis=1), values.mean(axis=0)
    if len(np.unique(values.round(12))) == 1:
        return equal_interval(float(mean), num_prompts, bounds, confidence)
    rest = values - seeds_S[:, None] - prompts_P[None, :] + mean
    freedom = np.array([num_seeds - 1, num_prompts - 1, (num_seeds - 1) * (num_prompts - 1)])
    terms = np.array(
        [
            seeds_S.var(ddof=1) / num_seeds,
            prompts_P.var(ddof=1) / num_prompts,
            -float((rest**2).sum()) / freedom[2] / values.size,
        ]
    )
    is_noise = terms[1] + terms[2] < 0  # prompts that differ no more than noise
    if len(np.unique(seeds_S.round(12))) == 1:  # their variance is 0, and has no noise either
        terms = np.abs(terms) * (np.arange(3) == (2 if is_noise else 1))
    elif is_noise:
        terms[1:] = 0.0
    variance = terms.sum()
    width = stats.t.ppf(0.5 + confidence / 2, variance**2 / (terms**2 / freedom).sum())
    half = float(width * np.sqrt(variance))
    return max(float(mean) - half, bounds[0]), min(float(mean) + half, bounds[1])


def equal_interval(
    value: float, num: int, bounds: tuple[float, float], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a mean of which `num` equal values were seen: a bootstrap would say that it is
    exact. The share of other values may be up to Wilson's upper end for 0 of `num`, and these may
    lie anywhere within `bounds`. At a bound of shares this is Wilson's interval itself."""
    others = float(wilson_interval(0, num, confidence)[1])
    return value - others * (value - bounds[0]), value + others * (bounds[1] - value)


def fit_beta(
    correct: npt.ArrayLike, trials: npt.ArrayLike, prompts: npt.ArrayLike = 1.0
) -> tuple[float, float]:
    """Beta(a, b) that makes the observed counts most likely: how true pass rates spread over these
    prompts, or over so many `prompts` with each pair of counts. Of many prompts, those with equal
    counts are one term of the sum."""
    counts: tuple[npt.NDArray[Any], ...] = (np.asarray(correct), np.asarray(trials))
    weights = np.broadcast_to(np.asarray(prompts, dtype=np.float64), counts[0].shape)
    if len(weights) > MANY:
        counts, place = distinct(*counts)
        weights = np.bincount(place, weights).astype(np.float64)
    c, n = (values.astype(np.float64) for values in counts)

    def negative_log_likelihood(log_parameters: Floats) -> float:
        a, b = np.exp(log_parameters)
        terms = special.betaln(c + a, n - c + b) - special.betaln(a, b)
        return -float(np.sum(weights * terms))

    found = optimize.minimize(
        negative_log_likelihood, np.zeros(2), method="L-BFGS-B", bounds=[(-5.0, 5.0)] * 2
    )
    a, b = np.exp(found.x)
    return float(a), float(b)


def mixed_probability(
    correct: npt.ArrayLike,
    trials: npt.ArrayLike,
    group_size: npt.ArrayLike,
    prior: tuple[float, float],
) -> Floats:
    """P(a group has a success and a failure), expected over each prompt's posterior Beta(a + c, b +
    n - c).

    The plug-in 1 - p^G - (1-p)^G is 0 for a prompt seen 0 of 8 times, and too high for prompts that
    were chosen because their estimate came out near one half; the posterior under the prior of all
    prompts is neither."""
    counts = np.broadcast_arrays(correct, trials, group_size)
    if counts[0].size > MANY:
        (some_correct, some_trials, some_sizes), place = distinct(*counts)
        found = mixed_probability(some_correct, some_trials, some_sizes, prior)
        return np.asarray(found[place], dtype=np.float64)
    c, n, size = (values.astype(np.float64) for values in counts)
    a, b = prior[0] + c, prior[1] + n - c
    all_right = np.exp(special.betaln(a + size, b) - special.betaln(a, b))
    all_wrong = np.exp(special.betaln(a, b + size) - special.betaln(a, b))
    return np.asarray(1.0 - all_right - all_wrong, dtype=np.float64)


def distinct(*counts: npt.NDArray[Any]) -> tuple[tuple[npt.NDArray[Any], ...], npt.NDArray[Any]]:
    """Return the different rows of some columns of small counts, and the place of each row among
    them."""
    shape = tuple(int(values.max()) + 1 for values in counts)
    numbers = np.ravel_multi_index(tuple(values.astype(np.int64) for values in counts), shape)
    if math.prod(shape) > len(numbers):
        found, place = np.unique(numbers, return_inverse=True)
    else:  # a table of what occurs, which needs no sorting
        occurs = np.bincount(numbers, minlength=math.prod(shape)) > 0
        found, place = np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[numbers]
    return np.unravel_index(found, shape), place
