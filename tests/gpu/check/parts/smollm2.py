"""The example `smollm2`, stage by stage: conversion and supervised start, profile, and `grpo`,
`sgpo` and `winnow` with one seed, by vLLM where it is installed.

A part that was stopped continues with its last stage, from the checkpoint of that stage. Seconds
are since the last start. The small form trains a random policy."""

from collections.abc import Iterator
from typing import Any

import yaml

from tasks.code.effective import complete
from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.common.checksums import read_checked
from tests.files import PROJECT
from tests.gpu.check.parts.larger import kept, profile
from tests.gpu.check.parts.training import run_stage, train
from tests.gpu.check.shapes import Sizes
from tests.policies import make_policy

EXAMPLE = PROJECT / "examples" / "smollm2" / "params.yaml"


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    layout = Layout(sizes.folder)
    layout.root.mkdir(parents=True, exist_ok=True)
    values = settings(sizes)
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    yield kept(layout, "policy", lambda: make(layout))
    yield kept(layout, "profile", lambda: profile(layout))
    for recipe in values["experiment"]["recipes"]:
        yield kept(layout, recipe, lambda recipe=recipe: measure(layout, recipe))


def settings(sizes: Sizes) -> dict[str, Any]:
    """Return the parameters of the example, on this device and with its first seed."""
    values = params.load(EXAMPLE)
    values["experiment"]["seeds"] = [0]
    values["engine"] |= {"device": sizes.device.type}
    if sizes.is_small:
        base = make_policy(sizes.folder / "base", "llama", max_length=1024)
        values["policy"]["source"] = str(base)
        values["policy"]["supervised"]["training"] |= {"tokens": 2000, "device": "cpu"}
        values["ingest"]["splits"] = {"train": 16, "validation": 8, "test": 8}
        values["sampling"]["max_tokens"] = 8
        values["experiment"] |= {"recipes": ["grpo"], "budget": {"account": "rollouts"}}
        values["experiment"]["budget"]["amount"] = 128
        values["gates"] = {"min_solved_rate": 0.0, "max_truncated_rate": 1.0}
    return complete(values)


def make(layout: Layout) -> dict[str, Any]:
    """Make the prompts and the policy."""
    run_stage(layout, ["tasks.ingest"])
    seconds, _ = run_stage(layout, ["tasks.policy"])
    card = read_checked(layout.policy_card)
    trained = {"tokens": card["supervised"]["tokens"], "seconds": seconds}
    return {"made": "policy", "parameters": card["num_parameters"], **trained}


def measure(layout: Layout, recipe: str) -> dict[str, Any]:
    """Train with a recipe, and evaluate the policy on the test prompts."""
    cell = ["--recipe", recipe, "--seed", "0"]
    run_stage(layout, ["tasks.allocate", *cell])
    row = train(layout, recipe, recipe, 0, recipe)
    seconds, _ = run_stage(layout, ["tasks.evaluate", *cell])
    metrics = read_checked(layout.evaluation(recipe, 0) / "metrics.json")
    return {**row, "test pass@1": metrics["pass_at_1"], "seconds of evaluation": seconds}
