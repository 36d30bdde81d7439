"""The statistics of pass rates: intervals, unbiased pass@k, and how likely a group is to carry a
gradient."""

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

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
    equal, that of `equal_interval`.

    Of values by seed and prompt [S, P], seeds are resampled, then prompts. All seeds share the
    prompts, and so every drawn seed gets the same drawn prompts (the pigeonhole bootstrap, Owen,
    Annals of Applied Statistics 1, 2007): other prompts for each would count P prompts as S P.
    Means of S resampled seeds vary (S - 1) / S as much as they should, so deviations from the mean
    over the seeds are scaled up by that (Rao and Wu, JASA 83, 1988)."""
    values_SP = np.atleast_2d(np.asarray(values, dtype=np.float64))
    num_seeds, num_prompts = values_SP.shape
    if len(np.unique(values_SP.round(12))) == 1:  # equal but for rounding
        return equal_interval(float(values_SP[0, 0]), num_prompts, bounds, confidence)
    middle_P = values_SP.mean(axis=0)
    scale = np.sqrt(num_seeds / max(num_seeds - 1, 1))
    scaled_SP = middle_P + scale * (values_SP - middle_P)
    means = []
    for _ in range(num_bootstrap):
        seeds = rng.integers(0, num_seeds, num_seeds)
        prompts = rng.integers(0, num_prompts, num_prompts)
        means.append(scaled_SP[seeds].mean(axis=0)[prompts].mean())
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def equal_interval(
    value: float, num: int, bounds: tuple[float, float], confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a mean of which `num` equal values were seen: a bootstrap would say that it is
    exact. The share of other values may be up to Wilson's upper end for 0 of `num`, and these may
    lie anywhere within `bounds`. At a bound of shares this is Wilson's interval itself."""
    others = float(wilson_interval(0, num, confidence)[1])
    return value - others * (value - bounds[0]), value + others * (bounds[1] - value)


def fit_beta(correct: npt.ArrayLike, trials: npt.ArrayLike) -> tuple[float, float]:
    """Beta(a, b) that makes the observed counts most likely: how true pass rates spread over these
    prompts."""
    c, n = np.asarray(correct, dtype=np.float64), np.asarray(trials, dtype=np.float64)

    def negative_log_likelihood(log_parameters: Floats) -> float:
        a, b = np.exp(log_parameters)
        return -float(np.sum(special.betaln(c + a, n - c + b) - special.betaln(a, b)))

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
    c, n = np.asarray(correct, dtype=np.float64), np.asarray(trials, dtype=np.float64)
    size = np.asarray(group_size, dtype=np.float64)
    a, b = prior[0] + c, prior[1] + n - c
    all_right = np.exp(special.betaln(a + size, b) - special.betaln(a, b))
    all_wrong = np.exp(special.betaln(a, b + size) - special.betaln(a, b))
    return np.asarray(1.0 - all_right - all_wrong, dtype=np.float64)
