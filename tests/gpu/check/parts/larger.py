"""A policy of about 100M parameters, made from scratch on the hard family and killed once; then
`grpo`, `sgpo` and `winnow` on it, and `grpo` killed and continued.

The policy is made in bfloat16 on a GPU, the rest is in float32. Results stay in the part's folder
until the part ends, and a stopped part continues from there: it loses about twenty seconds of
making, or the steps since the last checkpoint. Seconds are since the last start."""

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from flows.benchmark.cells import CellLayout, fit_plan
from flows.benchmark.protocol import BenchmarkCell
from tasks.common.artifacts import Layout
from tasks.common.checksums import read_checked
from tasks.common.files import read_json, write_json
from tests.bench.world import parameters
from tests.gpu.check.parts import training
from tests.gpu.check.parts.training import run_stage
from tests.gpu.check.shapes import Sizes
from tests.parameters import every_value

RUNS = {"grpo": ("grpo", 0), "grpo, killed": ("killed", 1), "sgpo": ("sgpo", 0)}
RUNS |= {"winnow": ("winnow", 0)}
"""The recipe of every run, and its number of kills."""

# Attention has 4 x 768^2 and the MLP 3 x 768 x 2560 parameters: 99M in 12 layers. An H100 trained
# it at 1.0e5 tokens a second, for which the host launches the kernels: 200 seconds.
MODEL = {"num_layers": 12, "hidden_size": 768, "num_heads": 24, "num_key_value_heads": 24}
MODEL |= {"intermediate_size": 2560, "max_length": 256}
TRAINING = {"tokens": 2.0e7, "batch_size": 512, "batches_per_bucket": 32, "learning_rate": 6.0e-4}
SMALL_MODEL = {"num_layers": 1, "hidden_size": 32, "num_heads": 1, "num_key_value_heads": 1}
SMALL_MODEL |= {"intermediate_size": 32, "max_length": 128}
SMALL_TRAINING = {"tokens": 1.0e5, "batch_size": 16, "batches_per_bucket": 16}
SMALL_TRAINING |= {"learning_rate": 1.0e-2}


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    layout = Layout(sizes.folder)
    layout.root.mkdir(parents=True, exist_ok=True)
    values = settings(sizes)
    write_settings(layout, values, 0.0 if sizes.is_small else 20.0)
    yield kept(layout, "policy", lambda: make(layout))
    yield kept(layout, "profile", lambda: profile(layout))
    write_settings(layout, values, 0.0 if sizes.is_small else 10.0)
    for name in list(RUNS)[: 2 if sizes.is_small else None]:
        yield kept(layout, name, lambda name=name: train(layout, name, values, sizes))


def kept(layout: Layout, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row of that name, measured unless an earlier start of the part has saved it."""
    path = layout.root / "rows" / f"{name}.json"
    if not path.exists():
        write_json(path, list(measure().items()))  # in the order of the table's columns
    return dict(read_json(path))


def settings(sizes: Sizes) -> dict[str, Any]:
    """Return the parameters of the stages: the protocol's hard prompts, and examples in which sums
    of five and more terms are almost never worked, so that about half of the prompts are dead."""
    small = sizes.is_small
    values = parameters(rollouts=16 if small else 128)
    recipes = every_value()["recipes"]
    values["recipes"] = {name: recipes[name] for name in ("grpo", "sgpo", "winnow")}
    values["recipes"]["killed"] = recipes["grpo"]
    values["engine"] |= {"device": sizes.device.type, "max_rows": 64 if small else 1024}
    values["sampling"]["max_tokens"] = 24 if small else 80
    values["gates"]["min_solved_rate"] = 0.0
    values["train"]["learning_rate"] = 3.0e-4 if small else 5.0e-5
    num = 32 if small else 512
    values["ingest"]["splits"] = {"train": num, "validation": num // 2, "test": num // 2}
    digits = {"min_digits": 1, "max_digits": 1 if small else 3}
    terms = ((2, 2, 0.1), (3, 3, 0.9)) if small else ((2, 4, 0.1), (5, 7, 0.97))
    source = values["ingest"]["sources"][0]["settings"]
    source["tasks"][0]["config"] = {"min_terms": 2, "max_terms": terms[1][1], **digits}
    tiny = values["policy"]["tiny"]
    (family,) = tiny["families"]
    tiny["families"] = [
        {
            **family,
            "settings": {
                "config": {"min_terms": fewest, "max_terms": most, **digits},
                "direct_rate_shortest": direct,
                "direct_rate_longest": max(direct, 0.5),
                "step_error_rate": 0.02,
            },
        }
        for fewest, most, direct in terms
    ]
    tiny["model"] = SMALL_MODEL if small else MODEL
    tiny["training"] |= {"device": sizes.device.type, **(SMALL_TRAINING if small else TRAINING)}
    return values


def write_settings(layout: Layout, values: dict[str, Any], every_seconds: float) -> None:
    changed = {**values, "checkpoint": {**values["checkpoint"], "every_seconds": every_seconds}}
    (layout.root / "params.yaml").write_text(yaml.safe_dump(changed))


def make(layout: Layout) -> dict[str, Any]:
    """Make the prompts, and the policy, which is killed after its first checkpoint."""
    run_stage(layout, ["tasks.ingest"])
    seconds, kills = run_stage(layout, ["tasks.policy"], 1, lambda: states(layout))
    values = yaml.safe_load((layout.root / "params.yaml").read_text())
    return {
        "made": "policy",
        "parameters": read_checked(layout.policy_card)["num_parameters"],
        "tokens": values["policy"]["tiny"]["training"]["tokens"],
        "kills": kills,
        "seconds": seconds,
    }


def states(layout: Layout) -> set[int]:
    """Return the time of the policy's checkpoint, if there is one."""
    return {path.stat().st_mtime_ns for path in layout.checkpoints.glob("policy*.safetensors")}


def profile(layout: Layout) -> dict[str, Any]:
    """Profile the policy before training."""
    seconds, _ = run_stage(layout, ["tasks.profile"])
    found = read_checked(layout.profile / "summary.json")
    return {
        "made": "profile",
        "pass rate": found["pass_rate_mean"],
        "between 0.1 and 0.8": 0.1 <= found["pass_rate_mean"] <= 0.8,
        "share never solved": found["never_solved"] / found["num_prompts"],
        "seconds": seconds,
    }


def train(layout: Layout, name: str, values: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Train over a plan with the same number of rollouts for every recipe."""
    recipe, kills = RUNS[name]
    budget = 128 if sizes.is_small else 4096
    cell = BenchmarkCell("hard", recipe, budget, 0, "validation", {}, values, {}, {})
    fit_plan(cell, CellLayout(layout.root, layout))  # always the same plan
    return training.train(layout, name, recipe, kills, "grpo")
