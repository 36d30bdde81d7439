"""`composite`: several verifiers with weights, as in `weights: {math: 0.9, tags: 0.1}`; the reward
is the weighted sum of their scores.

Weights are above 0 and sum to 1, so that rewards stay in [0, 1]. The outcome and the answer come
from the first verifier: it alone decides which rollouts count as solved in pass rates and
accuracies; the others only shape the reward. Every score is kept. If one verifier ends in `error`
or `timeout`, so does the composite, because a part of the reward is missing."""

import math
from collections.abc import Mapping
from typing import Any

from tasks.common.params import ParamsError
from tasks.grading.verdict import Verdict


def uses(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the weighted verifiers. Raise ParamsError for invalid weights."""
    weights = settings.get("weights")
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(isinstance(w, int | float) for w in weights.values())
    ):
        raise ParamsError(
            f"the `weights` of a composite are {weights!r}: set a number for each verifier"
        )
    if min(weights.values()) <= 0 or not math.isclose(sum(weights.values()), 1.0):
        raise ParamsError(
            f"the `weights` of a composite are {weights}: set each above 0, so that they sum to 1"
        )
    return list(weights)


def verify(
    completion: str,
    answer: str,
    prompt: str = "",
    *,
    weights: dict[str, float],
    verifiers: dict[str, Any],
) -> Verdict:
    """Return the first verifier's outcome, every verifier's score, and their weighted sum."""
    verdicts = {name: verifiers[name].verify(completion, answer, prompt) for name in weights}
    for name, verdict in verdicts.items():
        if verdict.outcome in ("error", "timeout"):
            return Verdict(verdict.outcome, f"{name}: {verdict.answer}")
    first = next(iter(verdicts.values()))
    scores = tuple((name, verdict.score) for name, verdict in verdicts.items())
    reward = math.fsum(weights[name] * score for name, score in scores)
    return Verdict(first.outcome, first.answer, reward, scores)
