"""The profile's samples, with tokens from the rollout store, for recipes with a slot (such as
`replay`) or a warm start that trains on them. Other recipes do not load this module."""

import polars as pl

from tasks.common.artifacts import PROMPTS, ROLLOUTS, SAMPLES
from tasks.common.files import ArtifactError
from tasks.common.stage import Stage
from tasks.models.policy import read_policy
from tasks.store.fixed_policy import SamplerSettings, read_tokens


def samples_of(run: Stage, plan: pl.DataFrame) -> pl.DataFrame:
    """Return the SAMPLES of the plan's prompts, in the order of their first visits. Raise
    ArtifactError if samples are missing from the store."""
    layout, settings = run.layout, run.sections(SamplerSettings)
    visited = plan.select("prompt_id").unique(keep="first", maintain_order=True)
    prompts = PROMPTS.read(layout.prompts("train")).join(visited, on="prompt_id", how="semi")
    path = layout.profile / "rollouts.parquet"
    columns = ["prompt_id", "sample_index", "outcome", "reward", "finish_reason"]
    graded = ROLLOUTS.read_columns(path, columns)
    rows = visited.join(graded, on="prompt_id", how="inner", maintain_order="left_right")
    num_samples = int(rows["sample_index"].max() or 0) + 1  # type: ignore[arg-type]
    tokens = read_tokens(prompts, read_policy(layout), num_samples, settings, layout)
    samples = rows.join(tokens, on=["prompt_id", "sample_index"], how="left", maintain_order="left")
    if missing := samples["token_ids"].null_count():
        raise ArtifactError(
            f"the rollout store lacks {missing} of the profile's {len(samples)} samples that this "
            "recipe trains on: run `python -m tasks.profile`, which samples only what is missing"
        )
    return SAMPLES.check(samples.select(list(SAMPLES.columns)), "the profile's samples")
