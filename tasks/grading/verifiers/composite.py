"""`composite`: several verifiers, `weights: {math: 0.9, tags: 0.1}`; the reward is the weighted sum
of their marks.

Weights are above 0 and sum to 1, so that rewards stay in [0, 1]. The outcome and the answer are
those of the first verifier named: what counts as solved, in pass rates and in accuracies, is its
affair, and the others shape the reward. Every mark is kept. One that ends in `error` makes the
whole an `error`: a reward with a part missing is none."""

import math
from collections.abc import Mapping
from typing import Any

from tasks.common.params import ParamsError
from tasks.grading.verdict import Verdict


def uses(settings: Mapping[str, Any]) -> list[str]:
    """The verifiers that are weighed."""
    weights = settings.get("weights")
    if (
        not isinstance(weights, dict)
        or not weights
        or not all(isinstance(w, int | float) for w in weights.values())
    ):
        raise ParamsError(
            f"a composite needs `weights`, a number for each verifier; it has {weights!r}"
        )
    if min(weights.values()) <= 0 or not math.isclose(sum(weights.values()), 1.0):
        raise ParamsError(
            f"the weights of a composite must be above 0 and sum to 1; they are {weights}"
        )
    return list(weights)


def verify(
    completion: str, answer: str, *, weights: dict[str, float], verifiers: dict[str, Any]
) -> Verdict:
    """The first verifier's outcome, every verifier's mark, and their weighted sum."""
    verdicts = {name: verifiers[name].verify(completion, answer) for name in weights}
    for name, verdict in verdicts.items():
        if verdict.outcome in ("error", "timeout"):
            return Verdict(verdict.outcome, f"{name}: {verdict.answer}")
    first = next(iter(verdicts.values()))
    marks = tuple((name, verdict.score) for name, verdict in verdicts.items())
    return Verdict(
        first.outcome, first.answer, math.fsum(weights[name] * mark for name, mark in marks), marks
    )
