"""What the report reads: the files of the profile, the baseline, and of every recipe and seed of
the experiment.

Of rollouts only a few columns are read, and those on test are counted prompt by prompt at once: no
text is in memory. Nothing else is computed here. A missing or damaged file is an error that names
recipe, seed and file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.artifacts import (
    CURVE,
    DECISIONS,
    PLAN,
    PROFILE,
    ROLLOUTS,
    STEPS,
    TRAIN_ROLLOUTS,
    Layout,
)
from tasks.common.files import ArtifactError
from tasks.common.params import Budget, Experiment
from tasks.common.scores import score_prompts
from tasks.common.sealed import read_sealed

Json = Mapping[str, Any]
# the columns that are read of the rollouts on test, and of those in training
ANSWERS = ("prompt_id", "greedy", "outcome")
TRAINED = ("step", "group", "prompt_id", "outcome")


@dataclass(frozen=True)
class RecipePlan:
    """The plan of a recipe with one seed, written by `tasks.allocate`."""

    recipe: str
    seed: int
    visits: pl.DataFrame
    decisions: pl.DataFrame
    forecast: Json

    @property
    def reads_profile(self) -> bool:
        return bool(self.forecast["reads_profile"])


@dataclass(frozen=True)
class Trained:
    """The training of a recipe with one seed, and the metrics of its policy on the test prompts,
    overall and of each prompt (`scores`, as `score_prompts` counts). `tokens` are those sampled on
    each training prompt, by whether its group was `mixed`."""

    recipe: str
    seed: int
    steps: pl.DataFrame
    rollouts: pl.DataFrame
    curve: pl.DataFrame
    flops: Json
    cost: Json
    metrics: Json
    scores: pl.DataFrame
    tokens: pl.DataFrame

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.seed}"


@dataclass(frozen=True)
class Evidence:
    """Everything the report reads, in the order of `experiment`."""

    policy: Json
    profile: pl.DataFrame
    profile_flops: Json
    profile_cost: Json
    baseline: Json
    baseline_scores: pl.DataFrame
    plans: list[RecipePlan]
    trained: list[Trained]
    budget: Budget | None

    def plan(self, recipe: str, seed: int | None = None) -> RecipePlan:
        """The plan of a run, or that of the recipe's first seed."""
        return next(p for p in self.plans if p.recipe == recipe and seed in (None, p.seed))

    @property
    def first_plans(self) -> list[RecipePlan]:
        """The plan of every recipe's first seed: seeds differ in order and in what is drawn."""
        return [self.plan(recipe) for recipe in dict.fromkeys(p.recipe for p in self.plans)]

    def seeds(self, recipe: str) -> list[Trained]:
        return [run for run in self.trained if run.recipe == recipe]


def read_evidence(layout: Layout, experiment: Experiment) -> Evidence:
    """Read all files. Raises ArtifactError naming recipe, seed and file if one is missing."""
    if not experiment.recipes or not experiment.seeds:
        raise ArtifactError(
            "experiment.recipes or experiment.seeds is empty: name at least one of each to report"
        )
    return Evidence(
        read_sealed(layout.policy_card),
        PROFILE.read(layout.profile / "profile.parquet"),
        read_sealed(layout.profile / "flops.json"),
        read_sealed(layout.profile / "cost.json"),
        read_sealed(layout.baseline / "metrics.json"),
        read_scores(layout.baseline),
        [
            read_plan(layout.plan(recipe, seed), recipe, seed)
            for recipe in experiment.recipes
            for seed in experiment.seeds
        ],
        [
            read_trained(layout, recipe, seed)
            for recipe in experiment.recipes
            for seed in experiment.seeds
        ],
        experiment.budget,
    )


def read_plan(folder: Path, recipe: str, seed: int) -> RecipePlan:
    """Read the plan of a recipe with one seed."""
    with naming(f"recipe '{recipe}', seed {seed}"):
        return RecipePlan(
            recipe,
            seed,
            PLAN.read(folder / "plan.parquet"),
            DECISIONS.read(folder / "decisions.parquet"),
            read_sealed(folder / "forecast.json"),
        )


def read_trained(layout: Layout, recipe: str, seed: int) -> Trained:
    """Read the training and the evaluation of a recipe with one seed."""
    train = layout.train(recipe, seed)
    evaluation = layout.evaluation(recipe, seed)
    with naming(f"recipe '{recipe}', seed {seed}"):
        return Trained(
            recipe,
            seed,
            STEPS.read(train / "steps.parquet"),
            TRAIN_ROLLOUTS.read_columns(
                train / "rollouts.parquet", TRAINED, where=~pl.col("replayed")
            ),
            CURVE.read(train / "curve.parquet"),
            read_sealed(train / "flops.json"),
            read_sealed(train / "cost.json"),
            read_sealed(evaluation / "metrics.json"),
            read_scores(evaluation),
            read_tokens(train / "rollouts.parquet"),
        )


def read_scores(folder: Path) -> pl.DataFrame:
    """Count the rollouts on test in `folder`, prompt by prompt."""
    return score_prompts(ROLLOUTS.read_columns(folder / "rollouts.parquet", ANSWERS))


def read_tokens(path: Path) -> pl.DataFrame:
    """Count the tokens of prompts and completions that training sampled, by prompt and by whether
    the group had a right and a wrong answer. The tokens themselves are read in parts."""
    TRAIN_ROLLOUTS.verify(path)
    correct = pl.col("outcome") == "correct"
    wrong = ~pl.col("outcome").is_in(["correct", "error"])
    groups = (
        pl.scan_parquet(path)
        .filter(~pl.col("replayed"))
        .group_by("step", "group", "prompt_id")
        .agg(
            (correct.any() & wrong.any()).alias("mixed"),
            (pl.col("prompt_tokens") + pl.col("token_ids").list.len()).sum().alias("tokens"),
        )
    )
    counts = groups.group_by("prompt_id", "mixed").agg(pl.col("tokens").sum().cast(pl.Int64))
    return counts.collect(engine="streaming").sort("prompt_id", "mixed")


@contextmanager
def naming(coordinates: str) -> Iterator[None]:
    """Put the recipe and the seed in front of an error about a file."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"{coordinates}: {error}") from error
