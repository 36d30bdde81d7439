"""What a profile must show before anything is trained on it: a policy that never succeeds learns
nothing, and one whose completions are cut off is not measured."""

import polars as pl

from tasks.allocate.settings import Gates
from tasks.common.params import ParamsError


def check_gates(gates: Gates, profile: pl.DataFrame, max_tokens: int) -> None:
    """Raise ParamsError, with what to change, where a profile does not pass."""
    samples, errors, solved = profile.select(
        pl.col("num_samples").sum(), pl.col("error").sum(), pl.col("correct").sum()
    ).row(0)
    cut_off = profile.select((pl.col("truncated_rate") * pl.col("num_samples")).sum()).item()
    solved_rate, cut_off_rate = solved / max(samples - errors, 1), cut_off / max(samples, 1)
    observed = (
        f"of {samples} samples {solved} are correct ({solved_rate:.1%}), and {cut_off_rate:.1%} "
        f"are cut off at sampling.max_tokens {max_tokens}"
    )
    advice = (
        "raise sampling.max_tokens, or make the policy write less"
        if cut_off_rate > max(gates.max_truncated_rate, 0.5)
        else "use easier prompts or a stronger policy, and look at the answers that were extracted "
        "(data/profile/rollouts.parquet): the verifier may not find them"
    )
    if solved_rate < gates.min_solved_rate:
        broken = f"gates.min_solved_rate {gates.min_solved_rate:g} is not reached; to train "
        way_out = "lower it"
    elif cut_off_rate > gates.max_truncated_rate:
        broken = f"gates.max_truncated_rate {gates.max_truncated_rate:g} is passed; to train "
        way_out = "raise it"
    else:
        return
    raise ParamsError(
        f"the profile stops the run before training: {observed}. What to change: {advice}. "
        f"({broken}all the same, {way_out}.)"
    )
