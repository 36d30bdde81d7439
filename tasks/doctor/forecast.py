"""What stages that are to run will cost: tokens, FLOPs, hours and GPU-hours, each as an interval.

FLOPs are charged ones: 2 P a token sampled, 6 P a token updated, 2 P a token scored again. Lengths
are those of the profile, where there is one; training changes them, so it is given half to twice of
them. Without a profile a completion is a tenth of `sampling.max_tokens` to all of it. What the
rollout store has already is not known here: the stages that sample through it may cost nothing."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common import recipes
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.sealed import read_sealed
from tasks.doctor import machine, places
from tasks.doctor.ranges import NOTHING, Range, around, exactly
from tasks.doctor.rates import STAGE_SECONDS, Rates, rates

Values = Mapping[str, Any]
Coordinates = tuple[str, str | None, int | None]
CHARACTERS_PER_TOKEN = Range(1.0, 4.0, 6.0)
UNKNOWN_PROMPT = Range(16.0, 100.0, 400.0)  # tokens, before there is any prompt
SAMPLING = ("profile", "baseline", "evaluate")


@dataclass(frozen=True)
class Cost:
    """What one stage costs."""

    tokens: Range = NOTHING
    flops: Range = NOTHING
    hours: Range = NOTHING
    gpu_hours: Range = NOTHING

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.tokens + other.tokens,
            self.flops + other.flops,
            self.hours + other.hours,
            self.gpu_hours + other.gpu_hours,
        )


@dataclass(frozen=True)
class World:
    """What is known before the run: parameters P, prompts by split, tokens of a prompt and of a
    completion, and how fast the machine is."""

    values: Values
    layout: Layout
    num_parameters: float
    prompts: Mapping[str, Range]
    prompt: Range
    completion: Range
    rates: Rates
    num_gpus: int


def forecast(
    values: Values, layout: Layout, stages: Sequence[Coordinates], stale: Sequence[Coordinates]
) -> tuple[list[Cost | None], str]:
    """The cost of every stage, and where the rates are from. A stage's plan is read where `stale`
    does not have it; None: nothing is known of the policy yet."""
    world = look(values, layout)
    if world is None:
        return [None] * len(stages), "the policy is not on this machine yet: its size is unknown"
    return [cost(world, stage, stale) for stage in stages], world.rates.source


def look(values: Values, layout: Layout) -> World | None:
    """What is known of a data root; None where the policy's size is not."""
    size = matmul_parameters(values, layout)
    if size is None:
        return None
    there = [] if values["engine"]["device"] == "cpu" else machine.gpus()
    prompt, completion = lengths(values, layout)
    splits = values["ingest"]["splits"]
    prompts = {
        name: num_prompts(layout.prompts(name), splits[name])
        for name in ("train", "validation", "test")
    }
    known = rates(layout, size, there[0].name if there else None)
    return World(values, layout, size, prompts, prompt, completion, known, len(there))


def matmul_parameters(values: Values, layout: Layout) -> float | None:
    """P of the FLOPs; all parameters where the policy is not described yet."""
    with suppress(ArtifactError, KeyError, TypeError):
        card = read_sealed(layout.policy_card)
        if card["source"] == values["policy"]["source"]:
            return float(card["num_matmul_parameters"])
    model = places.describe_model(values, layout)
    return float(model.num_parameters) if model else None


def num_prompts(path: Path, wanted: int | None) -> Range:
    """The prompts of a split: those that are there, else those that are asked for."""
    with suppress(OSError, pl.exceptions.PolarsError):
        return exactly(pl.scan_parquet(path).select(pl.len()).collect().item())
    return exactly(wanted) if wanted is not None else Range(100.0, 10_000.0, 1e6)


def lengths(values: Values, layout: Layout) -> tuple[Range, Range]:
    """Tokens of a prompt and of a completion."""
    limit = values["sampling"]["max_tokens"]
    with suppress(OSError, pl.exceptions.PolarsError, ZeroDivisionError, TypeError):
        columns = ("num_samples", "prompt_tokens", "completion_tokens")
        sums = pl.scan_parquet(layout.profile / "profile.parquet").select(
            pl.col("num_samples").sum(),
            pl.col("prompt_tokens").mean(),
            pl.col("completion_tokens").sum(),
        )
        samples, prompt, completion = (sums.collect()[name].item() for name in columns)
        return exactly(prompt), around(completion / samples, 1.1).at_most(limit)
    completion = Range(0.1 * limit, 0.5 * limit, limit)
    with suppress(OSError, pl.exceptions.PolarsError, TypeError):
        texts = pl.scan_parquet(layout.prompts("train")).select(
            pl.col("prompt").str.len_chars().mean()
        )
        return exactly(texts.collect().item()).at(CHARACTERS_PER_TOKEN), completion
    return UNKNOWN_PROMPT, completion


def cost(world: World, stage: Coordinates, stale: Sequence[Coordinates]) -> Cost:
    """What one stage costs."""
    name, recipe, seed = stage
    values = world.values
    if name == "train" and recipe is not None and seed is not None:
        return training(world, recipe, seed, is_planned=("allocate", recipe, seed) not in stale)
    if name == "profile":
        rollouts = world.prompts["train"] * values["profile"]["num_samples"]
    elif name in SAMPLING:
        rollouts = world.prompts["test"] * (values["evaluate"]["num_samples"] + 1)  # one is greedy
    else:
        return of_policy(world) if name == "policy" else spent(NOTHING, NOTHING, NOTHING, 0)
    # what is in the store already costs nothing
    completion = world.completion if name != "evaluate" else drifted(world)
    tokens = rollouts * (world.prompt + completion)
    tokens = Range(0.0, tokens.middle, tokens.high) if name == "profile" else tokens
    flops = tokens * (2.0 * world.num_parameters)
    gpus = min(max(values["engine"]["num_replicas"], 1), world.num_gpus)
    return spent(tokens, flops, flops.at(world.rates.sampling * max(gpus, 1)), gpus)


def of_policy(world: World) -> Cost:
    """Making the tiny policy; fetching another is not forecast."""
    policy = world.values["policy"]
    if policy["source"] != "tiny":
        return spent(NOTHING, NOTHING, NOTHING, 0)
    tokens = exactly(float(policy["tiny"]["training"]["tokens"]))
    flops = tokens * (6.0 * world.num_parameters)
    return spent(tokens, flops, flops.at(world.rates.training), 0)


def training(world: World, recipe: str, seed: int, *, is_planned: bool) -> Cost:
    """Rollouts, updates and the validation curve of one run."""
    train = recipes.recipe(world.values, recipe)["train"]
    generated, updated = rollout_tokens(world, recipe, seed, is_planned)
    points = 1.0 / train["validation"]["every_share"] + 1.0
    validated = world.prompts["validation"] * (train["validation"]["num_samples"] * points)
    validation = validated * (world.prompt + drifted(world))
    scored = train["updates"]["epochs"] * train["updates"]["minibatches"] > 1
    scores = int(scored) + int(train["kl_coefficient"] > 0)
    forwards = generated * (1.0 + scores) + validation
    flops = forwards * (2.0 * world.num_parameters) + updated * (6.0 * world.num_parameters)
    gpus = min(max(world.values["engine"]["num_processes"], 1), world.num_gpus)
    hours = flops.at(world.rates.training * max(gpus, 1))
    return spent(generated + validation, flops, hours, gpus)


def rollout_tokens(world: World, recipe: str, seed: int, is_planned: bool) -> tuple[Range, Range]:
    """Tokens that are sampled and tokens that are updated: those of the plan's own forecast, else
    as if every prompt were visited with the recipe's largest group."""
    chosen = recipes.recipe(world.values, recipe)
    train, drift = chosen["train"], Range(0.5, 1.0, 2.0)
    if is_planned:
        with suppress(ArtifactError, KeyError, TypeError):
            plan = read_sealed(world.layout.plan(recipe, seed) / "forecast.json")["plan"]
            updated = exactly(plan["tokens_updated"]) * drift
            return exactly(plan["tokens"]) * drift, updated
    spec = chosen["allocate"]
    size = spec.get("group_size") or max(spec.get("buckets", [8]))
    share = exactly(1.0) if spec["strategy"] == "uniform" else Range(0.05, 0.4, 1.0)
    rollouts = world.prompts["train"] * (world.values["allocate"]["passes"] * size) * share
    if train["max_steps"] is not None and train["batch"]["unit"] == "rollouts":
        rollouts = rollouts.at_most(train["max_steps"] * train["batch"]["size"])
    generated = rollouts * (world.prompt + drifted(world))
    kept = Range(0.1, 0.5, 1.0) if train["select"]["method"] != "all" else exactly(1.0)
    return generated, generated * kept * train["updates"]["epochs"]


def drifted(world: World) -> Range:
    """Tokens of a completion after training, which changes them."""
    limit = world.values["sampling"]["max_tokens"]
    return (world.completion * Range(0.5, 1.0, 2.0)).at_most(limit)


def spent(tokens: Range, flops: Range, seconds: Range, num_gpus: int) -> Cost:
    """A stage's cost, with what it takes to start one."""
    hours = (seconds + STAGE_SECONDS) * (1.0 / 3600.0)
    return Cost(tokens, flops, hours, hours * float(num_gpus))
