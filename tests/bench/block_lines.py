"""The lines of a comparison in blocks (blocks.py): a cell's accuracy, costs, dead groups and
drift."""

import io
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl

from flows.benchmark.cells import passes_of, wave_of
from flows.benchmark.results import digits
from tasks.code.effective import complete
from tasks.common import recipes
from tasks.common.accounting.device_time import DeviceTime
from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.artifacts import CURVE, PROFILE, PROMPTS, ROLLOUTS, STEPS, TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.files import replace_file
from tasks.common.layout import Layout
from tasks.common.params import load
from tasks.common.statistics import score_prompts
from tasks.report.drift import drift_of, groups_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("generate", "score", "update")
KEPT = ("params.yaml", "policy.json", "prompts/*", "profile/*", "baseline/*", "measured/*.json")
"""Files of a data root that are copied, besides those of a cell except weights and checkpoints."""
TOKENS = ["token_ids", "sampler_logprobs", "is_action", "versions"]
START = "start"  # the recipe of a block's initial policy
CONSTANT = "constant"  # that of the best constant answer
QUARTERS = 4
DRIFT = ("drift", "gap", "chance", "mixed_rate", "mixed_rate_forecast")


@dataclass(frozen=True)
class Run:
    """Recipes that are run with the same number of passes over their prompts, or until they have
    generated a number of `rollouts`; in these `blocks` only, or in all."""

    recipes: list[str]
    passes: int = 1
    rollouts: int | None = None
    blocks: list[int] | None = None

    @property
    def length(self) -> str:
        return f"{self.passes} passes" if self.rollouts is None else f"{self.rollouts:,} rollouts"

    def key(self, block: int, recipe: str) -> str:
        return f"{block} {recipe} {self.length}"


def keep(work: Path, folder: Path, block: int, run: Run) -> None:
    """Copy the tables of a run's cells, and what all cells of its block share."""
    cells = [f"runs/{recipe}/{block}/*/*" for recipe in run.recipes]
    for path in (path for pattern in (*KEPT, *cells) for path in work.glob(pattern)):
        if path.is_file():
            copy = folder / path.relative_to(work)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def archive(kept: Path, plan: Path, block: int) -> None:
    """Write a block's copied tables to an archive beside the plan, the same bytes each time. Its
    folders have names such as gsm-0-2-passes."""
    files = [path for path in sorted(kept.glob(f"{block} */**/*")) if path.is_file()]
    if not files:
        raise SystemExit(f"{kept} has no tables of block {block}")

    def write(target: BinaryIO) -> None:
        with tarfile.open(fileobj=target, mode="w:xz", preset=9) as tar:
            for path in files:
                folder, *rest = path.relative_to(kept).parts
                name = "-".join([plan.name, *folder.replace(",", "").split()])
                content = archived(path)
                entry = tarfile.TarInfo("/".join([name, *rest]))  # without times and owners
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))

    replace_file(plan.with_name(f"{plan.name}-{block}.tar.xz"), write)


def archived(path: Path) -> bytes:
    """Return a file's content for the archive: training rollouts without tokens."""
    if not path.match("train/rollouts.parquet"):
        return path.read_bytes()
    buffer = io.BytesIO()
    pl.read_parquet(path).drop(TOKENS).write_parquet(buffer, compression="uncompressed")
    return buffer.getvalue()


def lines_of(layout: Layout, block: int, run: Run) -> Iterator[dict[str, Any]]:
    """Yield the lines of a block's start and best constant answer, and those of a run's cells."""
    common = {
        "block": block,
        "code": git("rev-parse", "HEAD"),
        "machine": f"{cpu()}, Python {platform.python_version()}",
        "policy": read_checked(layout.policy_card)["digest"],
    }
    profile = PROFILE.read(layout.profile / "profile.parquet").sort("prompt_id")
    yield {
        **common,
        "key": f"{block} {START}",
        "recipe": START,
        "length": "",
        **tested(layout.baseline),
        "profile": digits(profile["correct"].to_list()),
        "profile_samples": int(profile["num_samples"].max()),  # type: ignore[arg-type]
    }
    constant = {"key": f"{block} {CONSTANT}", "recipe": CONSTANT, "length": "", "trials": 1}
    yield {**common, **constant, "correct": best_constant(layout)}
    for recipe in run.recipes:
        yield {
            **common,
            "key": run.key(block, recipe),
            "recipe": recipe,
            "length": run.length,
            **tested(layout.evaluation(recipe, block)),
            **trained(layout, recipe, block),
        }


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def cpu() -> str:
    """Return the name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def tested(folder: Path) -> dict[str, Any]:
    """Return the test prompts' numbers of correct samples, in the order of their ids."""
    answers = ROLLOUTS.read_columns(folder / "rollouts.parquet", ["prompt_id", "greedy", "outcome"])
    scores = score_prompts(answers).sort("prompt_id")
    return {"correct": digits(scores["correct"].to_list()), "trials": int(scores["trials"][0])}


def best_constant(layout: Layout) -> str:
    """Return which test prompts the most frequent gold answer solves, in the order of their ids."""
    answers = PROMPTS.read(layout.prompts("test")).sort("prompt_id")["answer"]
    return digits((answers == answers.mode().sort()[0]).cast(pl.Int64).to_list())


def trained(layout: Layout, recipe: str, seed: int) -> dict[str, Any]:
    """Return a cell's costs, its validation curve, its share of mixed groups in each quarter of its
    steps, and their drift from the profile's pass rates."""
    out = layout.train(recipe, seed)
    flops = read_checked(out / "flops.json")
    plan = read_checked(layout.plan(recipe, seed) / "forecast.json")
    steps = STEPS.read(out / "steps.parquet")
    rollouts = TRAIN_ROLLOUTS.read(out / "rollouts.parquet")
    # in place of the plan's passes: with a budget the number of passes is not that of the plan
    quarters = steps.with_columns((pl.int_range(pl.len()) * QUARTERS // pl.len()).alias("pass"))
    groups = quarters.group_by("pass", maintain_order=True).agg(
        mixed=pl.col("num_mixed_groups").sum() / pl.col("num_prompts").sum(),
    )
    curve = CURVE.read(out / "curve.parquet").filter(pl.col("branch").is_null())
    values = complete(load(layout.root / "params.yaml"))
    profile = PROFILE.read(layout.profile / "profile.parquet")
    drift = drift_of(groups_of(quarters, rollouts, profile), stale_above=0.0)["passes"]
    line = {
        "rollouts": flops["rollouts"]["generate"],
        "rollouts_mixed": mixed_rollouts(rollouts),
        "flops": {name: sum(flops[name][part] for part in PARTS) for name in ACCOUNTS},
        "device_seconds": device_seconds(rollouts, values, layout, recipe),
        "seconds": read_checked(layout.measured(f"{recipe}-{seed}"))["seconds"],
        "mixed": [round(share, 4) for share in groups["mixed"]],
        "validation": [round(value, 5) for value in curve["accuracy"]],
        "drift": [{key: round(each[key], 4) for key in DRIFT} for each in drift],
    }
    if not plan["reads_profile"]:
        zero = dict.fromkeys(ACCOUNTS, 0.0)
        return {**line, "rollouts_profile": 0.0, "flops_profile": zero}
    profiled = read_checked(layout.profile / "flops.json")
    return {
        **line,
        "rollouts_profile": profiled["rollouts"]["profile"],
        "flops_profile": {name: profiled[name]["profile"] for name in ACCOUNTS},
        "device_seconds_profile": profile_seconds(layout),
        "seconds_profile": read_checked(layout.measured("profile"))["seconds"]["profile"],
    }


def mixed_rollouts(rollouts: pl.DataFrame) -> int:
    """Return the number of fresh rollouts in groups with both verdicts."""
    is_correct = (pl.col("outcome") == "correct").sum()
    groups = rollouts.filter(~pl.col("replayed")).group_by("step", "group")
    sizes = groups.agg(size=pl.len(), solved=is_correct)
    return int(sizes.filter(pl.col("solved").is_between(1, pl.col("size") - 1))["size"].sum())


def device_seconds(
    rollouts: pl.DataFrame, values: dict[str, Any], layout: Layout, recipe: str
) -> float:
    """Return the modelled seconds of these steps for a 7B policy on an H100, with the lengths and
    in waves as in the benchmark (flows/benchmark/cells.py), but without its factor of lengths."""
    parameters = read_checked(layout.policy_card)["num_matmul_parameters"]
    train = recipes.recipe(values, recipe)["train"]
    passes = passes_of(train, PROMPTS.read(layout.prompts("train")), parameters)
    time_of, seconds = DeviceTime(), 0.0
    for _, rows in rollouts.group_by("step", maintain_order=True):
        prompts = rows["prompt_tokens"].to_numpy().astype(np.int64)
        completions = rows["token_ids"].list.len().to_numpy().astype(np.int64)
        _, first = np.unique(rows["group"].to_numpy(), return_index=True)
        updated = rows["advantage"].to_numpy() != 0.0
        seconds += wave_of(prompts, completions, time_of) + time_of.read(prompts[first])
        seconds += passes.num_scorings * time_of.read(prompts + completions)
        seconds += passes.epochs * time_of.update((prompts + completions)[updated])
    return round(seconds, 3)


def profile_seconds(layout: Layout) -> float:
    """Return the modelled seconds of the profile on an H100: one wave, one prefill per prompt."""
    lengths = ["sample_index", "prompt_tokens", "completion_tokens"]
    rows, time_of = (
        ROLLOUTS.read_columns(layout.profile / "rollouts.parquet", lengths),
        DeviceTime(),
    )
    prompts, completions = (rows[name].to_numpy().astype(np.int64) for name in lengths[1:])
    once = prompts[rows["sample_index"].to_numpy() == 0]
    return round(wave_of(prompts, completions, time_of) + time_of.read(once), 3)
