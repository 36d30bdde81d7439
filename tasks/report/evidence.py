"""The inputs of the report: the files of the profile, of the baseline, and of every recipe and seed
of the experiment.

Only a few columns of the rollouts are read. Test rollouts and training tokens are counted per
prompt as they are read, so no text is in memory. Nothing else is computed here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.accounting.success import without_success
from tasks.common.artifacts import (
    CURVE,
    DECISIONS,
    OUTCOMES,
    PLAN,
    PROFILE,
    PROMPTS,
    ROLLOUTS,
    STEPS,
    TRAIN_ROLLOUTS,
    Layout,
)
from tasks.common.checksums import read_checked
from tasks.common.params import Budget, Experiment
from tasks.common.statistics import score_prompts
from tasks.models.provenance import metrics_of, settings_of
from tasks.report.curves import AXES, COMPARED

Json = Mapping[str, Any]
# the columns to read from the rollouts on test, and from the training rollouts
ANSWERS = ("prompt_id", "greedy", "outcome")
TRAINED = ("step", "group", "prompt_id", "outcome", "advantage")


@dataclass(frozen=True)
class Trained:
    """The plan and the training run of a recipe with one seed, and the metrics of its policy on the
    test prompts: overall, and for each prompt (`scores`, from `score_prompts`). `tokens` counts the
    tokens sampled for each training prompt, by whether the rollout's advantage is zero (`dead`)."""

    recipe: str
    seed: int
    settings: Json
    visits: pl.DataFrame
    decisions: pl.DataFrame
    forecast: Json
    steps: pl.DataFrame
    rollouts: pl.DataFrame
    curve: pl.DataFrame
    flops: Json
    metrics: Json
    scores: pl.DataFrame
    tokens: pl.DataFrame

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.seed}"

    @property
    def reads_profile(self) -> bool:
        return bool(self.forecast["reads_profile"])


@dataclass(frozen=True)
class Evidence:
    """All inputs of the report, in the order of `experiment`."""

    policy: Json
    profile: pl.DataFrame
    profiled: Json  # the profile by source of prompts
    profile_flops: Json
    baseline: Json
    baseline_scores: pl.DataFrame
    trained: list[Trained]
    budget: Budget | None
    sources: list[str]  # of the test prompts
    missing: list[str]  # cells of the experiment that have not ended

    @property
    def unranked(self) -> str:
        """Why recipes are not ranked: cells are missing, or the profile and the runs have no
        success. Empty if recipes are ranked."""
        if self.missing:
            ended = len(self.trained)
            return (
                f"Unfinished: {ended} of {ended + len(self.missing)} cells have ended, and recipes "
                f"are not ranked yet. Missing: {', '.join(self.missing)}."
            )
        if any(run.metrics["pass_at_1"] for run in self.trained):
            return ""
        return without_success(self.profile.select(OUTCOMES).sum().row(0, named=True))

    @property
    def accounts(self) -> list[str]:
        """The accounts of COMPARED in which the cost of every run is known. Another trainer's
        executed FLOPs are not."""
        return [name for name in COMPARED if all(run.flops[name] for run in self.trained)]

    @property
    def axes(self) -> list[str]:
        """Those of AXES on which every run has a place."""
        return [axis for axis in AXES if axis not in COMPARED or axis in self.accounts]

    @property
    def first_runs(self) -> list[Trained]:
        """The first seed of every recipe. The plans of different seeds differ in their order and
        random choices."""
        return [self.seeds(recipe)[0] for recipe in dict.fromkeys(r.recipe for r in self.trained)]

    def seeds(self, recipe: str) -> list[Trained]:
        return [run for run in self.trained if run.recipe == recipe]


def read_evidence(layout: Layout, experiment: Experiment, ended: Sequence[str] = ()) -> Evidence:
    """Read all files, or only those of the cells that have `ended` (recipe/seed). Raise
    ArtifactError with the name of a missing or damaged file."""
    cells = {f"{r}/{seed}": (r, seed) for r in experiment.recipes for seed in experiment.seeds}
    missing = [cell for cell in cells if ended and cell not in ended]
    return Evidence(
        read_checked(layout.policy_card),
        PROFILE.read(layout.profile / "profile.parquet"),
        read_checked(layout.profile / "summary.json")["sources"],
        read_checked(layout.profile / "flops.json"),
        metrics_of(layout.policy_card, layout.baseline),
        read_scores(layout.baseline),
        [read_trained(layout, *place) for cell, place in cells.items() if cell not in missing],
        experiment.budget,
        sorted(set(PROMPTS.read_columns(layout.prompts("test"), ("source",))["source"])),
        missing,
    )


def read_trained(layout: Layout, recipe: str, seed: int) -> Trained:
    """Read the plan, the training run and the evaluation of a recipe with one seed."""
    plan = layout.plan(recipe, seed)
    train = layout.train(recipe, seed)
    evaluation = layout.evaluation(recipe, seed)
    return Trained(
        recipe,
        seed,
        settings_of(layout, recipe, seed),
        PLAN.read(plan / "plan.parquet"),
        DECISIONS.read(plan / "decisions.parquet"),
        read_checked(plan / "forecast.json"),
        STEPS.read(train / "steps.parquet"),
        TRAIN_ROLLOUTS.read_columns(train / "rollouts.parquet", TRAINED, where=~pl.col("replayed")),
        CURVE.read(train / "curve.parquet"),
        read_checked(train / "flops.json"),
        metrics_of(layout.trained_card(recipe, seed), evaluation),
        read_scores(evaluation),
        read_tokens(train / "rollouts.parquet"),
    )


def read_scores(folder: Path) -> pl.DataFrame:
    """Return `score_prompts` of the rollouts in `folder`: counts per test prompt."""
    return score_prompts(ROLLOUTS.read_columns(folder / "rollouts.parquet", ANSWERS))


def read_tokens(path: Path) -> pl.DataFrame:
    """Count the tokens of prompts and completions that training sampled, by prompt and by whether
    the rollout's advantage is zero. The table is read in parts."""
    TRAIN_ROLLOUTS.verify(path)
    tokens = pl.col("prompt_tokens").cast(pl.Int64) + pl.col("token_ids").list.len()
    counts = (
        pl.scan_parquet(path)
        .filter(~pl.col("replayed"))
        .group_by("prompt_id", (pl.col("advantage") == 0).alias("dead"))
        .agg(tokens.sum().alias("tokens"))
    )
    return counts.collect(engine="streaming").sort("prompt_id", "dead")
