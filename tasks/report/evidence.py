"""What the report is made of: the files of the profile, the baseline, and of every recipe and seed
asked for.

Nothing is computed here. A missing or damaged file fails, naming recipe, seed and file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.artifacts import CURVE, DECISIONS, PLAN, PROFILE, STEPS, TRAIN_ROLLOUTS, Layout
from tasks.common.files import ArtifactError, read_json
from tasks.common.params import Experiment

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a recipe was going to do: `tasks.allocate` wrote it."""

    recipe: str
    visits: pl.DataFrame
    decisions: pl.DataFrame
    forecast: Json

    @property
    def reads_profile(self) -> bool:
        return bool(self.forecast["reads_profile"])


@dataclass(frozen=True)
class Trained:
    """What a recipe did with one seed, and what its policy then scored on the test prompts."""

    recipe: str
    seed: int
    steps: pl.DataFrame
    rollouts: pl.DataFrame
    curve: pl.DataFrame
    flops: Json
    cost: Json
    metrics: Json

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
    plans: list[Plan]
    trained: list[Trained]

    def plan(self, recipe: str) -> Plan:
        return next(plan for plan in self.plans if plan.recipe == recipe)

    def seeds(self, recipe: str) -> list[Trained]:
        return [run for run in self.trained if run.recipe == recipe]


def read_evidence(layout: Layout, experiment: Experiment) -> Evidence:
    """Read all files. ArtifactError names the recipe, the seed and the file that is not there."""
    if not experiment.recipes or not experiment.seeds:
        raise ArtifactError(
            "experiment.recipes or experiment.seeds is empty: there is nothing to report"
        )
    return Evidence(
        read_json(layout.policy_card),
        PROFILE.read(layout.profile / "profile.parquet"),
        read_json(layout.profile / "flops.json"),
        read_json(layout.profile / "cost.json"),
        read_json(layout.baseline / "metrics.json"),
        [read_plan(layout.recipe(recipe), recipe) for recipe in experiment.recipes],
        [
            read_trained(layout, recipe, seed)
            for recipe in experiment.recipes
            for seed in experiment.seeds
        ],
    )


def read_plan(folder: Path, recipe: str) -> Plan:
    with of_whom(f"recipe '{recipe}'"):
        visits, decisions = (
            PLAN.read(folder / "plan.parquet"),
            DECISIONS.read(folder / "decisions.parquet"),
        )
        return Plan(recipe, visits, decisions, read_json(folder / "forecast.json"))


def read_trained(layout: Layout, recipe: str, seed: int) -> Trained:
    train, evaluation = layout.train(recipe, seed), layout.evaluation(recipe, seed)
    with of_whom(f"recipe '{recipe}', seed {seed}"):
        return Trained(
            recipe,
            seed,
            STEPS.read(train / "steps.parquet"),
            read_outcomes(train / "rollouts.parquet"),
            CURVE.read(train / "curve.parquet"),
            read_json(train / "flops.json"),
            read_json(train / "cost.json"),
            read_json(evaluation / "metrics.json"),
        )


def read_outcomes(path: Path) -> pl.DataFrame:
    """What became of each rollout of a training. All columns are checked and a few are read: the
    tokens and log-probabilities of a long run are gigabytes that no figure shows."""
    if not path.exists():
        raise ArtifactError(
            f"{path} does not exist: run the stage that makes the {TRAIN_ROLLOUTS.name} table first"
        )
    try:
        TRAIN_ROLLOUTS.check(pl.read_parquet(path, n_rows=0), str(path))
        return pl.read_parquet(path, columns=["step", "group", "prompt_id", "outcome"])
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from error


@contextmanager
def of_whom(coordinates: str) -> Iterator[None]:
    """Name the recipe and the seed in front of what is wrong with a file."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"{coordinates}: {error}") from error
