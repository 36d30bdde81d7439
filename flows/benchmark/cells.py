"""Run one cell: call each stage's `main` in this process, on the folders of the cell and family.

Prompts, policy, profile and baseline are made once per family. Plan, training and evaluation are
per cell, in a folder that is removed at the end; a killed cell resumes from its checkpoint."""

import importlib
import logging
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from flows.benchmark.keys import inputs_of
from flows.benchmark.protocol import BenchmarkCell, Values
from flows.benchmark.results import Line, digits
from tasks.common import recipes
from tasks.common.accounting.device_time import DeviceTime, Seconds
from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.artifacts import CURVE, PLAN, PROMPTS, ROLLOUTS, SAMPLES, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.files import digest, read_json, write_json
from tasks.common.layout import Layout
from tasks.common.stage import Stage
from tasks.common.statistics import score_prompts
from tasks.train import needs
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import Prompts
from tasks.train.loading import load_method

logger = logging.getLogger(__name__)

FAMILY_STAGES = ("policy", "ingest", "profile", "evaluate")
"""The stages of a family in their order. If the inputs of a stage change, that stage and all later
ones run again."""

TRAINING = ("generate", "score", "update")
# scaling from a tiny policy's run to a GPU run: lengths, and rollouts in a wave
LENGTHS = ("sample_index", "prompt_tokens", "completion_tokens")  # of the profile's rollouts
LENGTH_FACTOR = 40.0
ROWS_FACTOR = 16
THINNING = 3  # a separate stream of random numbers


@dataclass(frozen=True)
class CellLayout(Layout):
    """A cell's folder. Data that all cells of a family share is in the folder `family`."""

    family: Layout

    def prompts(self, split: str) -> Path:
        return self.family.prompts(split)

    @property
    def policy(self) -> Path:
        return self.family.policy

    @property
    def policy_card(self) -> Path:
        return self.family.policy_card

    @property
    def profile(self) -> Path:
        return self.family.profile


def family_layout(work: Path, family: str) -> Layout:
    return Layout(work / "families" / family)


def run_stage(
    name: str, values: Values, layout: Layout, recipe: str | None = None, seed: int | None = None
) -> None:
    """Run the `main` of a stage, without a record in MLflow."""
    main = importlib.import_module(f"tasks.{name}.run").main
    main(Stage.unrecorded(name, values, layout, recipe, seed))


def prepare_family(work: Path, family: str, values: Values, policy: Layout | None) -> None:
    """Make a family's policy, prompts, profile and baseline, except where inputs are unchanged. If
    `policy` is given (a data root with a policy of the same settings), copy its policy."""
    layout = family_layout(work, family)
    settings, code = inputs_of(values, next(iter(values["recipes"])))  # the same for all recipes
    inputs = ""
    for name in FAMILY_STAGES:
        mark = layout.root / "done" / f"{name}.json"
        inputs = digest([inputs, settings[name], code[name]])
        if mark.exists() and read_json(mark) == inputs:
            continue
        logger.info("%s: %s", family, name)
        if name == "policy" and policy is not None:
            shutil.copytree(policy.policy, layout.policy, dirs_exist_ok=True)
            shutil.copy(policy.policy_card, layout.policy_card)
        else:
            run_stage(name, values, layout)
        write_json(mark, inputs)


def run_cell(cell: BenchmarkCell, work: Path) -> Line:
    """Plan, train and measure a cell; then remove its folder. Return its line, failed or not."""
    layout = CellLayout(work / "cells" / cell.key, family_layout(work, cell.family))
    started, cpu = time.perf_counter(), time.process_time()
    line: Line = {
        "key": cell.key,
        "family": cell.family,
        "recipe": cell.recipe,
        "budget": cell.budget,
        "seed": cell.seed,
        "measures": cell.measures,
        "settings": dict(cell.settings),
        "code": digest(dict(cell.code)),
        "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
    }
    try:
        fit_plan(cell, layout)
        run_stage("train", dict(cell.params), layout, cell.recipe, cell.seed)
        line |= {"cpu_seconds": round(time.process_time() - cpu, 2), **measure(cell, layout)}
    except (KeyboardInterrupt, OSError, MemoryError):
        raise  # not the cell's fault: a full disk, for example
    except Exception as error:
        logger.warning("%s failed: %s", cell.name, error)
        line["failed"] = f"{type(error).__name__}: {error}"
    line["seconds"] = round(time.perf_counter() - started, 2)
    shutil.rmtree(layout.root, ignore_errors=True)
    return line


def fit_plan(cell: BenchmarkCell, layout: CellLayout) -> None:
    """Write the recipe's plan with as many passes as the budget of rollouts needs. The last pass is
    thinned at random to fit the budget; the order of the remaining visits does not change. The
    profile's samples come from the family's store."""
    store = {**cell.params["store"], "location": str(layout.family.store.absolute())}

    def plan_of(passes: int) -> pl.DataFrame:
        allocate = {**cell.params["allocate"], "passes": passes}
        values = {**cell.params, "allocate": allocate, "store": store}
        run_stage("allocate", values, layout, cell.recipe, cell.seed)
        return PLAN.read(path)

    path = layout.plan(cell.recipe, cell.seed) / "plan.parquet"
    plan = plan_of(1)
    if (passes := -(-cell.budget // int(plan["group_size"].sum()))) > 1:
        plan = plan_of(passes)
    PLAN.write(path, thinned(plan, cell.budget, np.random.default_rng([cell.seed, THINNING])))


def thinned(plan: pl.DataFrame, budget: int, rng: np.random.Generator) -> pl.DataFrame:
    """Return the plan with a random subset of its last pass, so that it fits the budget of
    rollouts. At least one visit of the plan is kept, whatever the budget."""
    last = int(plan["pass"].max())  # type: ignore[arg-type]
    is_last = plan["pass"].to_numpy() == last
    sizes = plan["group_size"].to_numpy().astype(np.int64)
    candidates = rng.permutation(np.flatnonzero(is_last))
    room = budget - int(sizes[~is_last].sum())
    num = int(np.searchsorted(np.cumsum(sizes[candidates]), room, side="right"))
    keep = ~is_last
    keep[candidates[: max(num, int(not keep.any()))]] = True
    kept = plan.filter(pl.Series(keep))
    return kept.with_columns(
        visit=pl.int_range(pl.len(), dtype=pl.Int64),
        order=pl.int_range(pl.len(), dtype=pl.Int64).over("phase"),
        phase=(pl.col("phase").rle_id()).cast(pl.Int32),
    ).select(plan.columns)


def measure(cell: BenchmarkCell, layout: CellLayout) -> Line:
    """Return a trained cell's results and costs for its line; evaluate it if it measures `test`."""
    out = layout.train(cell.recipe, cell.seed)
    flops = read_checked(out / "flops.json")
    forecast = read_checked(layout.plan(cell.recipe, cell.seed) / "forecast.json")
    rollouts = TRAIN_ROLLOUTS.read(out / "rollouts.parquet")
    num_profiled, profile_flops, profile_time = 0.0, dict.fromkeys(ACCOUNTS, 0.0), Seconds()
    train = recipes.recipe(cell.params, cell.recipe)["train"]
    parameters, time_of = read_checked(layout.policy_card)["num_matmul_parameters"], DeviceTime()
    passes = passes_of(train, PROMPTS.read(layout.prompts("train")), parameters)
    passes = replace(passes, cut=computed_share(rollouts, passes, flops["tokens"]["update"]))
    seconds = device_seconds(rollouts, passes, time_of)
    if not passes.num_scorings and not passes.reference:  # so replay or a judge scored
        num_tokens = flops["charged"]["score"] / (2.0 * parameters)
        seconds += Seconds(score=scoring_seconds(num_tokens, rollouts, time_of))
    if forecast["reads_profile"]:
        profiled = read_checked(layout.profile / "flops.json")
        num_profiled = profiled["rollouts"]["profile"]
        profile_flops = {name: profiled[name]["profile"] for name in ACCOUNTS}
        samples = ROLLOUTS.read_columns(layout.profile / "rollouts.parquet", LENGTHS)
        profile_time = profile_seconds(samples, time_of)
    line: Line = {
        "validation": float(CURVE.read(out / "curve.parquet")["accuracy"][-1]),
        "rollouts": flops["rollouts"]["generate"],
        "flops": {name: sum(flops[name][phase] for phase in TRAINING) for name in ACCOUNTS},
        "rollouts_profile": num_profiled,
        "flops_profile": profile_flops,
        "device_seconds": parts_of(seconds),
        "device_seconds_profile": parts_of(profile_time),
    }
    if cell.measures == "test":
        run_stage("evaluate", dict(cell.params), layout, cell.recipe, cell.seed)
        out = layout.evaluation(cell.recipe, cell.seed)
        answers = ROLLOUTS.read_columns(
            out / "rollouts.parquet", ["prompt_id", "greedy", "outcome"]
        )
        scores = score_prompts(answers).sort("prompt_id")
        line |= {
            "test": read_checked(out / "metrics.json")["pass_at_1"],
            "correct": digits(scores["correct"].to_list()),
            "trials": digits(scores["trials"].to_list()),
        }
    return line


def parts_of(seconds: Seconds) -> Mapping[str, float]:
    return {part: round(value, 3) for part, value in asdict(seconds).items()}


@dataclass(frozen=True)
class Passes:
    """The trainer's passes over a step's rollouts: the number of update `epochs`; the number of the
    policy's forward passes before the update; whether a slot needs each rollout's gradient norm;
    for the loss of kept rollouts, the size of its reference relative to the policy (0: none), and
    whether it has an entropy bonus; whether an update has a gradient of prompts; and the share of
    the kept completions' tokens that it computes, such as .75 with `nat`."""

    epochs: int = 1
    num_scorings: int = 0
    has_norms: bool = False
    reference: float = 0.0
    has_bonus: bool = False
    prompt_gradient: bool = True
    cut: float = 1.0


def passes_of(train: Values, prompts: pl.DataFrame, parameters: int) -> Passes:
    """Return the passes that the methods in a recipe's section `train` require, for a policy with
    `parameters`. A method that reads the profile gets an empty one."""
    settings = needs.read_train(train)
    nothing = Profile(SAMPLES.frame([]), Prompts(prompts, encode=lambda _: []))
    specs = [(slot, train[slot]) for slot in ("select", "advantage")]
    specs += [("shape", spec) for spec in train.get("shape", [])]
    methods = [load_method(*spec, prompts=prompts, profile=nothing) for spec in specs]
    features = [method.features for method in methods if method.features]
    return Passes(
        epochs=settings.updates.epochs,
        num_scorings=needs.num_scorings(settings, has_features=bool(features)),
        has_norms=any(each.gradient_norms for each in features),
        reference=needs.reference_parameters(settings, parameters) / parameters,
        has_bonus=needs.has_bonus(settings),
        prompt_gradient=settings.prompt_gradient,
    )


def computed_share(rollouts: pl.DataFrame, passes: Passes, updated: float) -> float:
    """Return the share of the kept completions' tokens that the updates computed; `updated` are the
    tokens of all updates, with prompts, which a warm start may raise above those of the table."""
    kept = rollouts.filter("kept")
    completions = float(kept["token_ids"].list.len().sum())
    computed = updated / passes.epochs - float(kept["prompt_tokens"].sum())
    return min(computed / max(completions, 1.0), 1.0)


def device_seconds(rollouts: pl.DataFrame, passes: Passes, time_of: DeviceTime) -> Seconds:
    """Return the modelled seconds for the steps of a TRAIN_ROLLOUTS table. A step decodes its fresh
    rollouts in one wave, prefills each group once, scores rollouts as `passes` requires, and uses
    those with a gradient (all kept ones if there is a reference or bonus) for updates. A wave has
    ROWS_FACTOR copies, to fill the device; a step pays for one. LENGTH_FACTOR scales lengths.
    Updates of adapters count as whole ones, and a warm start does not count."""
    seconds = Seconds()
    for (_step,), rows in rollouts.group_by("step", maintain_order=True):
        prompts, completions = lengths_of(rows)
        whole = prompts + completions
        fresh = ~rows["replayed"].to_numpy()
        kept = rows["kept"].to_numpy()
        is_all = passes.reference > 0.0 or passes.has_bonus
        updated = kept if is_all else rows["advantage"].to_numpy() != 0.0
        update = time_of.update((prompts + passes.cut * completions)[updated])
        if not passes.prompt_gradient:  # two of three passes over the prompts
            update -= time_of.update(prompts[updated]) * 2.0 / 3.0
        _, first = np.unique(rows["group"].to_numpy()[fresh], return_index=True)
        seconds += Seconds(
            decode=wave_of(prompts[fresh], completions[fresh], time_of),
            prefill=time_of.read(prompts[fresh][first]),
            score=passes.num_scorings * time_of.read(whole)
            # each rollout's gradient separately, beside the pass that all slots share
            + passes.has_norms * time_of.update(whole)
            + passes.reference * time_of.read(whole[kept]),
            update=passes.epochs * update,
        )
    return seconds


def scoring_seconds(num_tokens: float, rollouts: pl.DataFrame, time_of: DeviceTime) -> float:
    """Return the modelled seconds to score `num_tokens`, in rollouts as long as the table's."""
    prompts, completions = lengths_of(rollouts)
    whole = prompts + completions
    return num_tokens * LENGTH_FACTOR / float(whole.sum()) * time_of.read(whole)


def profile_seconds(rollouts: pl.DataFrame, time_of: DeviceTime) -> Seconds:
    """Return the modelled seconds to sample a profile: one wave, and one prefill per prompt."""
    prompts, completions = map(scaled, (rollouts[name] for name in LENGTHS[1:]))
    once = rollouts["sample_index"].to_numpy() == 0
    return Seconds(
        decode=wave_of(prompts, completions, time_of), prefill=time_of.read(prompts[once])
    )


def lengths_of(rows: pl.DataFrame) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Return the rollouts' prompt and completion lengths, [B] each, times LENGTH_FACTOR."""
    return scaled(rows["prompt_tokens"]), scaled(rows["token_ids"].list.len())


def scaled(lengths: pl.Series) -> "np.ndarray[Any, Any]":
    return np.asarray((lengths.to_numpy() * LENGTH_FACTOR).astype(np.int64))


def wave_of(prompts: Any, completions: Any, time_of: DeviceTime) -> float:
    """Return the seconds to decode these rollouts: their share of a wave of ROWS_FACTOR copies."""
    if not len(prompts):
        return 0.0
    held = float((prompts + completions).mean())
    many, longer = np.tile(prompts, ROWS_FACTOR), np.tile(completions, ROWS_FACTOR)
    return time_of.wave(many, longer, time_of.max_rows(held)) / ROWS_FACTOR
