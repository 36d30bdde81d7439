"""A profile without a success: its outcomes in numbers, and what to change."""

from collections.abc import Mapping

# what to change, by the most frequent outcome
REMEDIES = {
    "truncated": "raise sampling.max_tokens, which most completions reach",
    "unparsed": "change the prompt or the verifier, which finds no answer in most completions",
}


def without_success(outcomes: Mapping[str, int]) -> str:
    """Return that a profile has no correct sample, and what to change, given its number of samples
    by outcome; an empty string if it has one, or no samples."""
    ranked = sorted((name for name in outcomes if outcomes[name]), key=lambda one: -outcomes[one])
    if not ranked or "correct" in ranked:
        return ""
    counts = ", ".join(f"{outcomes[name]:,} {name}" for name in ranked)
    remedy = REMEDIES.get(ranked[0], "choose easier prompts or a better policy")
    return (
        f"Recipes are not ranked, because no sample of the profile is correct: of "
        f"{sum(outcomes.values()):,} samples {counts}. To change that, {remedy}."
    )
