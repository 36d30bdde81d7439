"""Whether profiling pays: the saving of a plan made from the profile over a plan that visits every
prompt equally, for the same information about the gradient.

If the noise of a rollout's score (the gradient of its log-probability) dominates, a group of G
rollouts of a prompt with pass rate p adds information in proportion to (G - 1) p (1 - p). Each plan
has a ratio of information to cost. The cost includes the profile, which a uniform plan does not
need. The saving is the quotient of the two ratios: above 1 the profile pays for itself. It pays if
many groups would have equal rewards, and so no gradient, and if many passes share its cost.

This is a model: the pass rates are the profiled ones, which drift as the policy learns, and a run
realises only part of a saving in information. Savings by slots of the loop are not included."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.allocate.visits import Compared, by_prompt
from tasks.common.statistics import mixed_probability

Floats = npt.NDArray[np.float64]

ACCOUNTS = ("rollouts", "charged", "charged_mixed")
NUM_DRAWS = 200
MAX_PROMPTS = 20_000  # sampled at most for the interval, which is then scaled to all prompts


def judge(compared: Compared) -> dict[str, Any]:
    """Return, by account: `saving`, its 95 % interval (`low`, `high`) over prompts and pass rates,
    and `passes_to_pay`, the number of passes from which profiling pays (None if it never does)."""
    profile, prior, passes = compared.profile, compared.prior, compared.uniform.times
    plans = compared.plan, compared.uniform, compared.samples
    saving = savings([visits.counted for visits in plans], expected(prior))
    rng = np.random.default_rng(0)
    kept = np.arange(len(profile), dtype=np.uint32)
    if len(profile) > MAX_PROMPTS:
        kept = np.sort(rng.choice(kept, MAX_PROMPTS, replace=False))
    visits, some = [by_prompt(each, profile, kept) for each in plans], profile[kept]
    drawn = [savings(visits, draw(some, prior, rng)) for _ in range(NUM_DRAWS)]
    center, shrunk = savings(visits, expected(prior)), np.sqrt(len(kept) / len(profile))
    judgement = {}
    for account, (value, to_pay) in saving.items():
        relative = [each[account][0] / center[account][0] - 1.0 for each in drawn]
        low, high = value * (1.0 + shrunk * np.quantile(relative, (0.025, 0.975)))
        judgement[account] = {
            "saving": value,
            "low": float(low),
            "high": float(high),
            "passes_to_pay": None if to_pay is None else ceil(to_pay * passes),
        }
    return judgement


def expected(prior: tuple[float, float]) -> Any:
    """Return a function that maps a table of visits to three arrays [rows]: the expected p (1 - p),
    the probability of a mixed group, and a weight of 1."""

    def of(visits: pl.DataFrame) -> tuple[Floats, Floats, Floats]:
        correct, graded, size = (
            visits[name].to_numpy().astype(np.float64)
            for name in ("correct", "graded", "group_size")
        )
        a, b = prior[0] + correct, prior[1] + graded - correct
        spread = a * b / ((a + b) * (a + b + 1.0))
        return spread, mixed_probability(correct, graded, size, prior), np.ones(len(visits))

    return of


def draw(profile: pl.DataFrame, prior: tuple[float, float], rng: np.random.Generator) -> Any:
    """Draw rates and prompts. Return a function of `by_prompt` tables for them (see `expected`)."""
    correct = profile["correct"].to_numpy()
    graded = (profile["num_samples"] - profile["error"]).to_numpy()
    rates = rng.beta(prior[0] + correct, prior[1] + graded - correct)
    weights = rng.multinomial(len(profile), np.full(len(profile), 1.0 / len(profile)))

    def of(visits: pl.DataFrame) -> tuple[Floats, Floats, Floats]:
        rows, size = visits["prompt"].to_numpy(), visits["group_size"].to_numpy()
        p = rates[rows]
        return p * (1.0 - p), 1.0 - p**size - (1.0 - p) ** size, weights[rows].astype(np.float64)

    return of


def savings(compared: Sequence[pl.DataFrame], known: Any) -> dict[str, tuple[float, float | None]]:
    """Return, by account, the saving of the first plan over the second, and after how many runs the
    first has repaid the profile (None: never). The third plan describes the profile's samples."""
    mine, theirs, samples = compared
    information, cost = totals(mine, known)
    uniform_information, uniform_cost = totals(theirs, known)
    _, _, weights = known(samples)
    rollouts = samples["group_size"].to_numpy() * samples["visits"].to_numpy() * weights
    profiled = {
        "rollouts": float(rollouts.sum()),
        **dict.fromkeys(ACCOUNTS[1:], float((rollouts * samples["tokens"].to_numpy()).sum())),
    }
    by_account: dict[str, tuple[float, float | None]] = {}
    for account in ACCOUNTS:
        worth = uniform_cost[account] / max(uniform_information, 1e-300) * information
        left = worth - cost[account]  # the saving of one run of the plan, without the profile
        to_pay = profiled[account] / left if left > 0 else None
        by_account[account] = worth / (cost[account] + profiled[account]), to_pay
    return by_account


def totals(visits: pl.DataFrame, known: Any) -> tuple[float, Mapping[str, float]]:
    """Return the information of all visits, and their cost by account: in rollouts, or in tokens of
    a forward pass (an update counts as three). `known` is from `expected` or `draw`."""
    spread, mixed, weights = known(visits)
    rollouts = visits["group_size"].to_numpy() * visits["visits"].to_numpy() * weights
    size, tokens = visits["group_size"].to_numpy(), rollouts * visits["tokens"].to_numpy()
    # no dot product: each of the many draws would wait for the BLAS threads
    information = float((rollouts * (size - 1) / size * spread).sum())
    return information, {
        "rollouts": float(rollouts.sum()),
        "charged": 4.0 * float(tokens.sum()),
        "charged_mixed": float((tokens * (1.0 + 3.0 * mixed)).sum()),
    }


def judgement_words(judgement: Mapping[str, Any]) -> str:
    """Return the judgement as a sentence, for the account `charged_mixed`."""
    found = judgement["charged_mixed"]
    words = (
        "for the same information about the gradient, groups of the largest size for every prompt "
        f"cost {found['saving']:.2f} times as much (95 % interval {found['low']:.2f} to "
        f"{found['high']:.2f}), if groups without a gradient are not updated"
    )
    if found["low"] > 1:
        return f"profiling is expected to pay: {words}"
    if found["passes_to_pay"] is None:
        return f"profiling is not expected to pay, however many passes: {words}"
    verdict = "does not pay in this plan" if found["high"] < 1 else "is not sure to pay"
    return f"profiling {verdict}, and is expected to from pass {found['passes_to_pay']} on: {words}"
