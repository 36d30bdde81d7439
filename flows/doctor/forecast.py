"""The expected cost of stages: tokens, FLOPs, hours and GPU-hours, each as an interval.

FLOPs are executed FLOPs: a group's prompt is read once. Lengths come from the profile, if there is
one; training changes them, so for training the interval is from half to twice these lengths. Before
the profile a completion has from 15 % of `sampling.max_tokens` to all of it. The content of the
rollout store is not considered: stored samples cost nothing, so `profile`, `baseline` and
`evaluate` may cost less than their intervals."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import polars as pl

from flows.doctor import nvidia, places, rows
from flows.doctor.ranges import NOTHING, Range, around, exactly, spanning
from flows.doctor.rates import CALL, STAGE_SECONDS, UPDATE, Rates, num_calls, rates
from tasks.allocate import budget
from tasks.allocate.budget import Planned
from tasks.common import recipes
from tasks.common.accounting.ledger import Architecture
from tasks.common.accounting.spending import generation_cost
from tasks.common.checksums import read_checked, read_note
from tasks.common.files import ArtifactError
from tasks.common.layout import Layout
from tasks.common.params import ParamsError, Problems, section
from tasks.policy.settings import Policy
from tasks.policy.source import is_embedded
from tasks.profile.settings import ProfileSettings
from tasks.train import needs
from tasks.train.settings import TrainSettings

Values = Mapping[str, Any]
Coordinates = tuple[str, str | None, int | None]
SHARES = Range(0.15, 0.5, 1.0)  # of `sampling.max_tokens`, before any completion exists
DRIFT = Range(0.5, 1.0, 2.0)  # factor by which training changes a completion's tokens


@dataclass(frozen=True)
class Cost:
    """The expected cost of one stage. `flops` are executed; `validation` is their part for the
    validation curve."""

    tokens: Range = NOTHING
    flops: Range = NOTHING
    hours: Range = NOTHING
    gpu_hours: Range = NOTHING
    validation: Range = NOTHING

    def __add__(self, other: "Cost") -> "Cost":
        names = (one.name for one in fields(self))
        return Cost(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class World:
    """The values known before the run: the policy's architecture, the profile if it exists, prompts
    by split, tokens of a prompt and of a completion, and the GPU's name."""

    values: Values
    layout: Layout
    architecture: Architecture
    profile: pl.DataFrame | None
    prompts: Mapping[str, Range]
    prompt: Range
    completion: Range
    gpu: str | None
    sampling_gpus: int
    training_gpus: int

    @cached_property
    def rates(self) -> Rates:
        used, prompt = (self.sampling_gpus, self.training_gpus), self.prompt.middle
        return rates(self.values, self.layout, self.architecture, prompt, self.gpu, used)

    @property
    def is_as_set(self) -> bool:
        """Whether the profile was made with the settings of these values."""
        noted = read_note(self.layout.profile / "summary.json").get("settings")
        return bool(noted == self.values["profile"])

    def fixed(self, per_layer: float) -> float:
        """Return the FLOPs that the fixed time of all layers counts as."""
        return 0.0 if self.gpu else per_layer * self.architecture.num_layers


def forecast(
    values: Values, layout: Layout, stages: Sequence[Coordinates]
) -> tuple[list[Cost | None], str]:
    """Return the cost of every stage, and the source of the rates. A cost is None if the policy is
    still unknown."""
    world = known_values(values, layout)
    if world is None:
        return [None] * len(stages), "the policy is not on this machine yet: its size is unknown"
    return [cost(world, stage) for stage in stages], world.rates.source


def known_values(values: Values, layout: Layout) -> World | None:
    """Return what is known before the run, or None if the policy's size is unknown."""
    architecture = architecture_of(values, layout)
    if architecture is None:
        return None
    there = [] if values["engine"]["device"] == "cpu" else nvidia.gpus()
    profile = None
    with suppress(ArtifactError):
        profile = budget.read_profile(layout)
    prompts, texts = rows.expected(values, layout)
    prompt, completion = lengths(values, layout, texts, profile)
    gpu = there[0].name if there else None
    requested = (values["engine"][name] for name in ("num_replicas", "num_processes"))
    used = [min(max(num, 1), len(there)) for num in requested]
    return World(values, layout, architecture, profile, prompts, prompt, completion, gpu, *used)


def architecture_of(values: Values, layout: Layout) -> Architecture | None:
    """Return the policy's architecture from its card. Without a card, count all parameters as
    matmul parameters and attention as free; return None if their number is unknown."""
    with suppress(ArtifactError, KeyError, TypeError):
        card = read_checked(layout.policy_card)
        if card["source"] == values["policy"]["source"]:
            return Architecture(**{name: card[name] for name in Architecture.__dataclass_fields__})
    model = places.describe_model(values, layout)
    return Architecture(model.num_parameters, 0, model.num_layers, 0) if model else None


def lengths(
    values: Values, layout: Layout, texts: Sequence[str], profile: pl.DataFrame | None
) -> tuple[Range, Range]:
    """Return the ranges of the mean number of tokens of a prompt and of a completion."""
    limit = values["sampling"]["max_tokens"]
    if profile is not None:
        names = ("num_samples", "prompt_tokens", "completion_tokens")
        num_samples, prompt, completion = profile.select(names).mean().row(0)
        return exactly(prompt), around(completion / num_samples, 1.1).at_most(limit)
    return rows.prompt_tokens(values, layout, texts), SHARES * limit


def cost(world: World, stage: Coordinates) -> Cost:
    name, recipe, _ = stage
    values = world.values
    if name == "train" and recipe is not None:
        return training(world, recipe)
    if name == "profile":
        num_samples = values["profile"]["num_samples"]
        prompts = world.prompts["train"] * profiled_share(world)
    elif name in ("baseline", "evaluate"):
        prompts = world.prompts["test"]
        num_samples = values["evaluate"]["num_samples"] + 1  # greedy
    else:
        return of_policy(world) if name == "policy" else spent(NOTHING, NOTHING, NOTHING, 0)
    completion = world.completion if name != "evaluate" else drifted(world)
    tokens = prompts * num_samples * (world.prompt + completion)
    per_call = values["store"]["batch_rollouts"]
    flops, fixed = sampled(world, prompts, num_samples, completion, per_call)
    return spent(tokens, flops, (flops + fixed).at(world.rates.sampling), world.sampling_gpus)


def profiled_share(world: World) -> Range:
    """Return the share of `profile.num_samples` that the mean prompt gets under `profile.stop`."""
    settings = section(world.values, "profile", ProfileSettings)
    if world.profile is not None and world.is_as_set:
        return exactly(float(world.profile["num_samples"].mean()) / settings.num_samples)  # type: ignore[arg-type]
    least = settings.stages[0] / settings.num_samples
    return Range(least, (least + 1.0) / 2.0, 1.0)


def sampled(
    world: World, prompts: Range, size: int, completion: Range, per_call: float
) -> tuple[Range, Range]:
    """Return the FLOPs of sampling groups of `size` rollouts, `per_call` rollouts at a time, and
    those that the fixed time counts as."""
    groups = (budget.group(size, *each) for each in zip(world.prompt, completion, strict=True))
    costs = Range(*(generation_cost("executed", world.architecture, rows) for rows in groups))
    pairs = zip(prompts * size, completion, strict=True)
    calls = Range(*(num_calls(world.values, *each, per_call) for each in pairs))
    return prompts * costs, calls * world.fixed(CALL)


def of_policy(world: World) -> Cost:
    """Return the cost of supervised training, and of training the tiny policy, unless it is the
    embedded one, which is copied. Fetching or converting another policy is not estimated."""
    settings = section(world.values, "policy", Policy)
    tokens = exactly(settings.supervised.training.tokens if settings.supervised else 0.0)
    if settings.source == "tiny" and not is_embedded(settings.tiny, world.layout.code("policy")):
        tokens += exactly(settings.tiny.training.tokens)
    if not tokens.high:
        return spent(NOTHING, NOTHING, NOTHING, 0)
    flops = tokens * (6.0 * world.architecture.num_matmul_parameters)
    return spent(tokens, flops, flops.at(world.rates.updates), 0)


def training(world: World, recipe: str) -> Cost:
    """Return the cost of one run: rollouts, updates and validation, and, not in tokens, warm start
    and decayed branches."""
    train = needs.read_train(recipes.recipe(world.values, recipe)["train"])
    runs = [trained(world, recipe, plan) for plan in plans_of(world, recipe)]
    tokens = Range(*(run.rollouts * (run.prompt + run.completion) for run in runs))
    numbers = zip(*(run_flops(world, run, train) for run in runs), strict=True)
    generated, fixed, updated, overhead = (spanning(Range(*number)) for number in numbers)
    num_samples, every = train.validation.num_samples, train.validation.every_share
    prompts = world.prompts["validation"]
    groups = prompts * (1.0 / every + 1.0 + len(train.branches))
    per_call = max(prompts.middle * num_samples, 1.0)
    validation, tails = sampled(world, groups, num_samples, drifted(world), per_call)
    tokens += groups * num_samples * (world.prompt + drifted(world))
    seconds = (generated + fixed + validation + tails).at(world.rates.rollouts)
    seconds += (updated + overhead).at(world.rates.updates)
    total = spanning(tokens), generated + updated + validation, seconds
    if world.profile is None:  # then share, lengths, mixed groups and speed are all unknown
        total = tuple(each.jointly(4) for each in total)  # type: ignore[assignment]
    return replace(spent(*total, world.training_gpus), validation=validation)


def run_flops(
    world: World, run: Planned, train: TrainSettings
) -> tuple[float, float, float, float]:
    """Return the FLOPs of sampling and of updates, each with those that its fixed time counts
    as."""
    policy, size = world.architecture, max(round(run.group_size), 1)
    lengths, per_step = (run.prompt, run.completion), budget.step_size(run, train)
    generated = generation_cost("executed", policy, budget.group(size, *lengths)) / size
    updated = budget.rollout_cost("executed", policy, run, train) - generated
    warm = budget.warm_start_cost("executed", policy, *lengths, train)
    num = run.rollouts * (1.0 + train.decay_share * sum(train.branches))
    calls = num_calls(world.values, num, run.completion, per_step)
    fixed = calls * world.fixed(CALL), num / per_step * world.fixed(UPDATE)
    return num * generated, fixed[0], num * updated + warm, fixed[1]


def plans_of(world: World, recipe: str) -> list[Planned]:
    """Return three plans of the recipe: with the cheapest rollouts (shortest, fewest trained on),
    with the expected ones, and with the most expensive ones. Without a usable profile, every prompt
    (strategy `uniform`) or a share of 5 % to 100 % (other strategies) gets the largest group."""
    settings, limit = recipes.recipe(world.values, recipe), world.values["sampling"]["max_tokens"]
    spec, train = settings["allocate"], needs.read_train(settings["train"])
    with suppress(ParamsError):  # a plan may have no visit
        if world.profile is not None:
            compared = budget.compared_plan(world.values, world.profile, recipe)
            plan = budget.planned(compared, train)
            completion = (exactly(plan.completion) * DRIFT).at_most(limit)
            return [replace(plan, completion=length) for length in completion]
    size = spec.get("group_size") or max(spec.get("buckets", [8]))
    share = exactly(1.0) if spec["strategy"] == "uniform" else Range(0.05, 0.4, 1.0)
    rollouts = world.prompts["train"] * (world.values["allocate"]["passes"] * size) * share
    mixed = Range(0.1, 0.5, 1.0)
    kept = exactly(1.0) if train.select["method"] == "all" else mixed
    parts = zip(rollouts, world.prompt, world.completion, kept, mixed, strict=True)
    return [Planned(part[0], size, *part[1:]) for part in parts]


def trained(world: World, recipe: str, plan: Planned) -> Planned:
    """Return the plan with the number of rollouts that the run will train on."""
    settings, limit = recipes.recipe(world.values, recipe), budget.budget_of(world.values)
    is_charged = limit is not None and budget.is_profile_charged(settings)
    profile = of_profile(world, limit.account).middle if limit and is_charged else 0.0
    train = needs.read_train(settings["train"])
    rollouts = budget.rollouts_of(limit, world.architecture, plan, train, profile)
    return replace(plan, rollouts=rollouts)


def of_profile(world: World, account: str) -> Range:
    """Return the cost of the profile in a budget's account: exact if a profile with the requested
    prompts and samples exists, otherwise an estimate."""
    prompts, num_samples = world.prompts["train"], world.values["profile"]["num_samples"]
    num_profiled = 0 if world.profile is None else len(world.profile)
    if num_profiled == round(prompts.middle) and world.is_as_set:
        with suppress(ArtifactError):
            return exactly(budget.profile_cost(world.layout, account, world.architecture))
    lengths = zip(world.prompt, world.completion, strict=True)
    groups = [budget.group(num_samples, *pair) for pair in lengths]
    each = Range(*(generation_cost(account, world.architecture, g) for g in groups))
    return prompts * profiled_share(world) * each


def refusals(
    values: Values, layout: Layout, names: Sequence[str], *, certain: bool = True
) -> list[str]:
    """Return a message for each recipe that `allocate` would refuse because its profile and warm
    start use up the budget. Costs that are not known exactly count at their lowest estimate if
    `certain`, and else at the expected one."""
    limit, problems = budget.budget_of(values), Problems()
    world = known_values(values, layout) if limit else None
    if limit is None or world is None:
        return []
    place, verb = (0, "takes at least") if certain else (1, "takes about")
    for name in names:
        settings = recipes.recipe(values, name)
        is_charged = budget.is_profile_charged(settings)
        least = [*of_profile(world, limit.account)][place] if is_charged else 0.0
        lengths = [*world.prompt][place], [*world.completion][place]
        train = needs.read_train(settings["train"])
        warm = budget.warm_start_cost(limit.account, world.architecture, *lengths, train)
        problems.of(budget.require_rest, limit, name, least, warm, verb)
    return problems.messages


def fits(values: Values, layout: Layout, names: Sequence[str]) -> dict[str, dict[str, Range]]:
    """Return the result of `fit` for each recipe; empty without a budget, or if the policy is still
    unknown."""
    world = known_values(values, layout)
    if world is None or budget.budget_of(values) is None:
        return {}
    return {name: fit(world, name) for name in names}


def fit(world: World, recipe: str) -> dict[str, Range]:
    """Return how many rollouts, steps and passes a cell's budget allows, its executed FLOPs and
    those of validation, and its hours and GPU-hours, including a profile that it pays for."""
    settings, plans = recipes.recipe(world.values, recipe), plans_of(world, recipe)[::-1]
    train = needs.read_train(settings["train"])
    rollouts = [trained(world, recipe, plan).rollouts for plan in plans]  # the longest first
    passes = sorted(num / plan.rollouts for num, plan in zip(rollouts, plans, strict=True))
    total = training(world, recipe)
    if budget.is_profile_charged(settings):
        total += cost(world, ("profile", None, None))
    return {
        "rollouts": Range(*rollouts),
        "steps": Range(*rollouts) * (1.0 / budget.step_size(plans[0], train)),
        "passes": Range(*passes) * float(world.values["allocate"]["passes"]),
        "FLOPs": total.flops,
        "validation": total.validation,
        "hours": total.hours,
        "GPU-hours": total.gpu_hours,
    }


def drifted(world: World) -> Range:
    """Return the tokens per completion in or after training, which changes them by DRIFT."""
    if world.profile is None:  # the range is wide already
        return world.completion
    return (world.completion * DRIFT).at_most(world.values["sampling"]["max_tokens"])


def spent(tokens: Range, flops: Range, seconds: Range, num_gpus: int) -> Cost:
    hours = (seconds + STAGE_SECONDS) * (1.0 / 3600.0)
    return Cost(tokens, flops, hours, hours * float(num_gpus))
