"""A small finished pipeline, written by hand, with round numbers for sums in the head."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.code.__main__ import write as write_code
from tasks.common import params
from tasks.common.accounting.ledger import Ledger
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
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import digest_file
from tasks.common.params import Budget, Experiment
from tasks.report.evidence import read_evidence
from tasks.report.results import Results, results_of
from tasks.report.settings import ReportSettings
from tests.files import PROJECT
from tests.once import once
from tests.stages import run_stage

HOSTILE = (
    "</script><script>window.hacked = 1</script><!--<img src=x onerror='window.hacked=2'> ${x}"
)
RECIPE = "third"
NUM_PROMPTS = 40
SOURCES = {
    "a<b": {
        "num_prompts": 40,
        "pass_rate_mean": 0.25,
        "never_solved_rate": 0.5,
        "always_solved_rate": 0.1,
        "successes": [20, 16, 4],
        "constant_answer": HOSTILE,
        "constant_rate": 0.05,
        "truncated_rate": 0.0,
        "repeated_rate": 0.125,
    }
}
NUM_TEST = 256  # prompts, 8 samples each


def ledger(**phases: dict[str, float]) -> dict[str, Any]:
    book = Ledger()
    for phase, amounts in phases.items():
        book.add(phase, **amounts)
    return book.as_dict()


def amounts(
    executed: float, charged: float, mixed: float, paper: float, **counts: float
) -> dict[str, float]:
    """Return the GFLOPs in each account, as FLOPs, with counts of tokens and rollouts."""
    names = ("executed", "charged", "charged_mixed", "charged_paper")
    flops = (executed, charged, mixed, paper)
    return {name: 1e9 * value for name, value in zip(names, flops, strict=True)} | counts


INITIAL = "91c0a1b2c3d4e5f6"  # digest of the initial policy; that of a trained one is RECIPE-SEED


def metrics(pass_at_1: float, policy: str = INITIAL, half: float = 0.04) -> dict[str, Any]:
    return {
        "policy": policy,
        "settings": {"num_samples": 8},
        "num_prompts": 256,
        "num_samples": 8,
        "pass_at_1": pass_at_1,
        "pass_at_1_low": pass_at_1 - half,
        "pass_at_1_high": pass_at_1 + half,
        "pass_at": {"1": pass_at_1, "4": pass_at_1 + 0.1, "8": pass_at_1 + 0.15},
        "greedy": pass_at_1 + 0.02,
        "levels": {
            level: {"num_prompts": 64, "pass_at_1": share * pass_at_1, "greedy": share * pass_at_1}
            for level, share in (("2", 1.5), ("10", 0.4), ("4", 1.1))
        },
    }


def solved(pass_at_1: float, seed: int) -> list[int]:
    """Return the number of correct samples of 8 for each test prompt: in total the share
    `pass_at_1`, distributed at random."""
    slots = np.random.default_rng(seed).permutation(NUM_TEST * 8)
    return list((slots < round(pass_at_1 * NUM_TEST * 8)).reshape(NUM_TEST, 8).sum(axis=1))


def write_answers(folder: Path, correct: list[int]) -> None:
    """Write the rollouts on test: `correct` of the 8 samples of each prompt are correct, no greedy
    sample is."""
    rows = [
        {
            **ROLLOUTS.example,
            "prompt_id": f"t{prompt}",
            "sample_index": sample % 8,
            "greedy": sample == 8,
            "outcome": "correct" if sample < right else "wrong",
        }
        for prompt, right in enumerate(correct)
        for sample in range(9)
    ]
    ROLLOUTS.write(folder / "rollouts.parquet", ROLLOUTS.frame(rows))


RATES = ("pass_rate", "pass_rate_unbiased")


def profile_of(counts: Mapping[str, tuple[int, int, int]]) -> pl.DataFrame:
    """Return a profile with (correct, wrong, error) for each prompt."""
    rows = [
        {
            **PROFILE.example,
            **dict.fromkeys(OUTCOMES, 0),
            "prompt_id": name,
            "num_samples": right + wrong + error,
            "correct": right,
            "wrong": wrong,
            "error": error,
            **dict.fromkeys(RATES, right / (right + wrong) if right + wrong else None),
        }
        for name, (right, wrong, error) in counts.items()
    ]
    return PROFILE.frame(rows)


def write_shared(layout: Layout) -> None:
    """Write policy card, profile and baseline: prompts are solved 0 to 8 of 8 times, evenly;
    profiling costs 100 charged, 80 executed."""
    card = {
        "architecture": "Qwen3ForCausalLM",
        "num_parameters": 438656,
        "digest": INITIAL,
        "source": "tiny",
    }
    write_checked(layout.policy_card, card)
    counts = {f"p{n}": (n % 9, 8 - n % 9, 0) for n in range(NUM_PROMPTS)}
    PROFILE.write(layout.profile / "profile.parquet", profile_of(counts))
    spent = amounts(80, 100, 90, 100, tokens=5000, rollouts=320)
    write_checked(layout.profile / "flops.json", ledger(profile=spent))
    write_checked(
        layout.profile / "summary.json", {"settings": {"num_samples": 8}, "sources": SOURCES}
    )
    of = digest_file(layout.profile / "profile.parquet")
    write_checked(layout.measured("profile"), {"of": of, "seconds": {"profile": 6.0}})
    prompts = [
        {**PROMPTS.example, "prompt_id": f"t{index}", "prompt": f"Question {index}: 3 + 4 ="}
        for index in range(NUM_TEST)
    ]
    PROMPTS.write(layout.prompts("test"), PROMPTS.frame(prompts))
    write_checked(layout.baseline / "metrics.json", metrics(0.40))
    write_answers(layout.baseline, solved(0.40, 99))


def write_plans(layout: Layout, recipe: str, reads_profile: bool) -> None:
    """Write equal plans for two seeds: every prompt in groups of 8, or sizes by pass rate without
    the prompts that are never solved or too easy."""

    def size(index: int) -> int:
        by_solved = (0, 8, 4, 2, 2, 2, 2, 0, 0)
        return by_solved[index % 9] if reads_profile else 8

    chosen = [index for index in range(NUM_PROMPTS) if size(index)]
    visits = [
        {
            "visit": place,
            "pass": 0,
            "phase": 0,
            "order": place,
            "prompt_id": f"p{index}",
            "group_size": size(index),
        }
        for place, index in enumerate(chosen)
    ]
    decisions = [
        {
            "prompt_id": f"p{index}",
            "pass_rate": index % 9 / 8,
            "decision": "learnable" if size(index) else "dropped",
            "group_size": size(index),
            "reason": f"solved {index % 9} of 8; groups of {size(index)}",
        }
        for index in range(NUM_PROMPTS)
    ]
    rollouts = sum(size(index) for index in chosen)
    expected = {"rollouts": rollouts, "mixed_rate": 0.5, "tokens": rollouts * 30.0}
    forecast = {"reads_profile": reads_profile, "strategy": recipe, "plan": expected}
    forecast["settings"] = {"strategy": recipe, "passes": 4}
    for seed in (0, 1):
        folder = layout.plan(recipe, seed)
        PLAN.write(folder / "plan.parquet", PLAN.frame(visits))
        DECISIONS.write(folder / "decisions.parquet", DECISIONS.frame(decisions))
        write_checked(folder / "forecast.json", forecast)
        write_checked(folder / "budget.json", {"budget": None})


def write_training(
    layout: Layout, recipe: str, seed: int, *, scale: float, validation: float, test: float
) -> None:
    """Write a training that costs `scale` times 300 + 600 charged, 300 + 450 for mixed groups, and
    200 + 400 executed; it loses 30 and validates for 50 (all e9)."""
    folder = layout.train(recipe, seed)
    phases = {
        "generate": amounts(200, 300, 300, 300, tokens=9000, rollouts=320),
        "update": amounts(400, 600, 450, 900, tokens=9000),
    }
    scaled = {
        name: {key: value * scale for key, value in found.items()} for name, found in phases.items()
    }
    write_checked(folder / "flops.json", ledger(**scaled, evaluate={"executed": 50e9}))
    lost = {"seconds": 2.0, "flops": 30e9, "tokens": 70.0}
    policy = f"{recipe}-{seed}"
    write_checked(layout.trained_card(recipe, seed), {"digest": policy})
    made = dict.fromkeys(("sampling", "verify", "budget"))
    made |= {"train": {"loss": {"clip_high": 0.28}}, "engine": {"dtype": "float32"}}
    write_checked(folder / "settings.json", {**made, "recipe": recipe, "seed": seed})
    write_checked(layout.evaluation(recipe, seed) / "metrics.json", metrics(test, policy))
    write_answers(layout.evaluation(recipe, seed), solved(test, 10 * ord(recipe[0]) + seed))
    rng = np.random.default_rng(seed)
    shares = np.linspace(0.4, validation, 8) + np.append(0, np.append(rng.normal(0, 0.01, 6), 0))
    points = [
        {
            "step": step * 5,
            "flops_charged": 900e9 * scale * step / 7,
            "flops_charged_mixed": 750e9 * scale * step / 7,
            "flops_executed": 600e9 * scale * step / 7,
            "rollouts": step * 40,
            "accuracy": share,
            "accuracy_low": share - 0.03,
            "accuracy_high": share + 0.03,
            "branch": None,
        }
        for step, share in enumerate(map(float, shares))
    ]
    CURVE.write(folder / "curve.parquet", CURVE.frame(points))
    of = digest_file(folder / "curve.parquet")
    note = {"of": of, "seconds": {"train": 60.0 * scale}, "lost": lost}
    write_checked(layout.measured(f"{recipe}-{seed}"), note)
    mixed = rng.binomial(4, 0.7 if recipe == "sgpo" else 0.4, 35)
    steps = [
        {**STEPS.example, "step": step, "pass": step // 20, "num_mixed_groups": int(n)}
        for step, n in enumerate(mixed)
    ]
    STEPS.write(folder / "steps.parquet", STEPS.frame(steps))
    write_rollouts(layout, recipe, seed, more=0)


def write_rollouts(layout: Layout, recipe: str, seed: int, *, more: int) -> None:
    """Write 35 steps of 4 groups of 8; each prompt is solved as often as in the profile, and `more`
    times (of 8)."""
    solved = [min(number % NUM_PROMPTS % 9 + more, 8) for number in range(35 * 4)]
    rows = [
        {
            **TRAIN_ROLLOUTS.example,
            "step": number // 4,
            "group": number % 4,
            "prompt_id": f"p{number % NUM_PROMPTS}",
            "sample_index": sample,
            "outcome": "correct" if sample < correct else "wrong",
            "advantage": (sample < correct) - correct / 8,
        }
        for number, correct in enumerate(solved)
        for sample in range(8)
    ]
    TRAIN_ROLLOUTS.write(
        layout.train(recipe, seed) / "rollouts.parquet", TRAIN_ROLLOUTS.frame(rows)
    )


def write_params(folder: Path, recipes: list[str], seeds: list[int]) -> Path:
    path = folder / "params.yaml"
    path.write_text(
        f"experiment: {{recipes: {recipes}, seeds: {seeds}}}\n"
        "report: {stale_above: 0.15, num_bootstrap: 200}\n"
        "tracking: {uri: null, experiment: winnow, max_weights_gb: 0.0, also: []}\n"
    )
    return path


def run_report(
    layout: Layout,
    *options: str,
    recipes: Sequence[str] = ("grpo", "sgpo"),
    seeds: Sequence[int] = (0, 1),
) -> str:
    """Run the stage, which must succeed, and return its output and log."""
    params = write_params(layout.root.parent, [*recipes], [*seeds])
    done = run_stage("report", params, layout.root, *options)
    assert done.returncode == 0, done.output
    return done.output


@pytest.fixture(scope="session")
def finished() -> Layout:
    """Return the pipeline of `make_layout`, for tests that only read it."""
    return Layout(once("pipeline", lambda folder: make_layout(folder / "data")) / "data")


@pytest.fixture
def layout(finished: Layout, tmp_path: Path) -> Layout:
    """Return a copy of the pipeline, for tests that change it."""
    return Layout(shutil.copytree(finished.root, tmp_path / "data"))


@pytest.fixture(scope="session")
def reported() -> Layout:
    """Return the pipeline of `make_layout` with its report, for tests that only read it. The
    command's output is in the file `output` beside it."""

    def make(folder: Path) -> None:
        (folder / "output").write_text(run_report(make_layout(folder / "data")))

    return Layout(once("reported", make) / "data")


@pytest.fixture
def copied(reported: Layout, tmp_path: Path) -> Layout:
    """Return a copy of the pipeline with its report, for tests that change it."""
    return Layout(shutil.copytree(reported.root, tmp_path / "data"))


@pytest.fixture(scope="session")
def hostile() -> Path:

    def make(folder: Path) -> None:
        run_report(hostile_layout(folder / "data"), recipes=["grpo", "sgpo", RECIPE])

    return Layout(once("hostile", make) / "data").report / "index.html"


def results(
    layout: Layout,
    recipes: Sequence[str] = ("grpo", "sgpo"),
    seeds: Sequence[int] = (0, 1),
    budget: Budget | None = None,
    num_bootstrap: int = 200,
) -> Results:
    evidence = read_evidence(layout, Experiment([*recipes], [*seeds], budget))
    return results_of(evidence, ReportSettings(num_bootstrap=num_bootstrap))


def make_layout(root: Path) -> Layout:
    """Make grpo at full cost and sgpo at a third of it, with two seeds each; only sgpo reads the
    profile."""
    layout = Layout(root)
    write_shared(layout)
    write_plans(layout, "grpo", reads_profile=False)
    write_plans(layout, "sgpo", reads_profile=True)
    write_training(layout, "grpo", 0, scale=1.0, validation=0.52, test=0.50)
    write_training(layout, "grpo", 1, scale=1.0, validation=0.54, test=0.54)
    write_training(layout, "sgpo", 0, scale=1 / 3, validation=0.55, test=0.51)
    write_training(layout, "sgpo", 1, scale=1 / 3, validation=0.57, test=0.55)
    experiment = {"recipes": ["grpo", "sgpo"], "seeds": [0, 1]}
    values = {**params.load(PROJECT / "params.yaml"), "experiment": experiment}
    write_code(values, PROJECT, layout.code_folder)
    return layout


def hostile_layout(root: Path) -> Layout:
    """Make a pipeline whose prompts, golds, answers, texts, sources and levels are markup. Names of
    recipes cannot be markup (tests/common/test_params.py)."""
    layout = make_layout(root)
    write_plans(layout, RECIPE, reads_profile=True)
    for seed in (0, 1):
        write_training(layout, RECIPE, seed, scale=1.0, validation=0.5, test=0.5)
    hostile = pl.lit(HOSTILE)
    path = layout.prompts("test")
    texts = dict.fromkeys(("source", "level", "answer"), hostile)
    marked = (hostile + " " + pl.col("prompt")).alias("prompt")
    PROMPTS.write(path, PROMPTS.read(path).with_columns(marked, **texts))
    folders = [layout.evaluation(name, seed) for name in ("sgpo", RECIPE) for seed in (0, 1)]
    for folder in (layout.baseline, *folders):
        rollouts = ROLLOUTS.read(folder / "rollouts.parquet")
        changed = rollouts.with_columns(text=hostile, answer=hostile)
        ROLLOUTS.write(folder / "rollouts.parquet", changed)
        metrics = read_checked(folder / "metrics.json")
        metrics["levels"][HOSTILE] = metrics["levels"]["2"]
        write_checked(folder / "metrics.json", metrics)
    return layout
