"""Facts about a family, and the saving of an oracle that knows its pass rates, in a variance model.

If the noise of a rollout's score dominates, a rollout of a prompt with pass rate p has information
p (1 - p) with the baseline p; (G - 1) / G times that in a group of G; and p (1 - p) (1 - m) if only
rollouts with the rarer outcome (share m) are trained on. An oracle samples the quarter of the
prompts with the most information per cost, and uses the cheaper kind of update. Its saving is its
information per cost, relative to groups of eight for every prompt. It is an estimate, not a bound:
a policy also learns, prompts generalise to others, and published runs have saved more."""

from typing import Any

import numpy as np
import polars as pl

from tasks.common.statistics import Floats, fit_beta

GROUP_SIZE = 8
BEST_SHARE = 0.25
UPDATE_COST = 3.0  # relative to generating a rollout, in FLOPs
NUM_DRAWS = 50  # draws of every prompt's pass rate from its posterior


def family_facts(profile: pl.DataFrame) -> dict[str, Any]:
    """Return statistics of a PROFILE table, and the saving of the oracle by account."""
    rates, num = profile["pass_rate"].drop_nulls(), profile["num_samples"]
    return {
        "prompts": len(profile),
        "num_samples": int(num.max()),  # type: ignore[arg-type]
        "pass_rate": float(profile["pass_rate_unbiased"].mean()),  # type: ignore[arg-type]
        "never": float((rates == 0.0).mean()),  # type: ignore[arg-type]
        "always": float((rates == 1.0).mean()),  # type: ignore[arg-type]
        "prompt_tokens": float(profile["prompt_tokens"].mean()),  # type: ignore[arg-type]
        "completion_tokens": float((profile["completion_tokens"] / num).mean()),  # type: ignore[arg-type]
        "oracle": oracle_saving(true_rates(profile)),
    }


def true_rates(profile: pl.DataFrame) -> Floats:
    """Return draws [NUM_DRAWS * prompts] of the true pass rates from every prompt's posterior.
    Rates from a few samples are spread too widely, so selecting the best rates selects for luck."""
    correct = profile["correct"].to_numpy()
    graded = (profile["num_samples"] - profile["error"]).to_numpy()
    a, b = fit_beta(correct, graded)
    rng = np.random.default_rng(0)
    shape = (NUM_DRAWS, len(profile))
    return np.asarray(rng.beta(a + correct, b + graded - correct, shape).ravel())


def oracle_saving(rates: Floats) -> dict[str, float]:
    """Return, by account, the oracle's saving of compute for equal information, as a factor."""
    spread, rarer = rates * (1.0 - rates), np.minimum(rates, 1.0 - rates)
    is_one_sided = (1.0 - rarer) / (1.0 + UPDATE_COST * rarer) > 1.0 / (1.0 + UPDATE_COST)
    information = spread * np.where(is_one_sided, 1.0 - rarer, 1.0)
    cost = 1.0 + UPDATE_COST * np.where(is_one_sided, rarer, 1.0)
    best = np.argsort(-information / cost)[: max(int(len(rates) * BEST_SHARE), 1)]
    oracle = information[best].sum() / cost[best].sum()
    mixed = 1.0 - rates**GROUP_SIZE - (1.0 - rates) ** GROUP_SIZE
    grouped = spread.mean() * (GROUP_SIZE - 1) / GROUP_SIZE
    return {
        "charged": float(oracle * (1.0 + UPDATE_COST) / grouped),
        "charged_mixed": float(oracle * (1.0 + UPDATE_COST * mixed.mean()) / grouped),
    }
