"""Rollout lengths as they were, in steps of training, and a model that predicts them from the steps
before."""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CHARACTERS_PER_TOKEN = 3
SO_FAR = (0, 64, 256)  # tokens already decoded at which a length is predicted anew


@dataclass(frozen=True)
class Step:
    """Rollouts that are asked for together: their lengths, their prompts' lengths, and the mean
    length of what their prompt's earlier rollouts had (nan: none), in tokens."""

    lengths_B: Ints
    prompt_tokens_B: Ints
    earlier_mean_B: Floats


def log_normal(num_steps: int, seed: int) -> list[Step]:
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.7, (num_steps, 32))
    whole = np.clip(np.ceil(lengths), 1, 1024).astype(np.int64)
    return [Step(row, np.full(32, 256), np.full(32, np.nan)) for row in whole]


def service(data: Path, num_steps: int) -> list[Step]:
    with (data / "traces" / "AzureLLMInferenceTrace_code.csv").open() as file:
        rows = np.array(
            [[int(r["GeneratedTokens"]), int(r["ContextTokens"])] for r in csv.DictReader(file)]
        )
    chunks = rows[: len(rows) // 32 * 32].reshape(-1, 32, 2)[:num_steps]
    return [Step(chunk[:, 0], chunk[:, 1], np.full(32, np.nan)) for chunk in chunks]


def read_math(data: Path) -> tuple[Ints, Ints]:
    """[P, 8] and [P] tokens, estimated, of completions and of prompts."""
    lines = (data / "rollouts" / "qwen25math_math100x8.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    characters = np.array([[len(text) for text in row["code"]] for row in rows])
    prompts = np.array([len(row["question"]) for row in rows])
    return in_tokens(characters), in_tokens(prompts)


def in_tokens(characters: Ints) -> Ints:
    return -(-characters // CHARACTERS_PER_TOKEN)


def math_steps(data: Path, num_steps: int, seed: int) -> list[Step]:
    """Eight prompts a step until all had their turn, then again, with another half of each prompt's
    completions as its profile. What a model learned from a completion it may meet again; four
    numbers cannot remember it."""
    rng, (lengths, prompts) = np.random.default_rng(seed), read_math(data)
    steps: list[Step] = []
    while len(steps) < num_steps:
        order, halves = rng.permutation(len(prompts)), rng.permuted(lengths, axis=1)
        for rows in order[: len(order) // 8 * 8].reshape(-1, 8):
            means = halves[rows, :4].mean(axis=1)
            steps.append(
                Step(halves[rows, 4:].ravel(), np.repeat(prompts[rows], 4), np.repeat(means, 4))
            )
    return steps[:num_steps]


def one_prompt(data: Path) -> list[Step]:
    lengths, prompts = read_math(data)
    return [
        Step(row, np.full(8, n), np.full(8, np.nan))
        for row, n in zip(lengths, prompts, strict=True)
    ]


class LengthModel:
    """A ridge regression of log length on prompt length, the prompt's earlier mean (else that of
    all) and tokens so far, fitted anew after every step on all steps before."""

    def __init__(self) -> None:
        self.rows: list[Floats] = []
        self.targets: list[Floats] = []
        self.lengths: list[Ints] = []
        self.model: Any = None

    def features(self, step: Step, so_far: int) -> Floats:
        overall = np.concatenate(self.lengths).mean() if self.lengths else 1.0
        means = np.where(np.isnan(step.earlier_mean_B), overall, step.earlier_mean_B)
        return np.log1p(
            np.stack([step.prompt_tokens_B, means, np.full(len(means), so_far)], axis=1)
        )

    def predict(self, step: Step, so_far: int = 0) -> Floats:
        """[B] predicted lengths; all alike before the first step."""
        if self.model is None:
            return np.ones(len(step.lengths_B))
        return np.asarray(np.exp(self.model.predict(self.features(step, so_far))))

    def learn(self, step: Step) -> None:
        """From each rollout as it stood after so many tokens, if it got there."""
        self.lengths.append(step.lengths_B)
        for so_far in SO_FAR:
            longer = step.lengths_B > so_far
            self.rows.append(self.features(step, so_far)[longer])
            self.targets.append(np.log(step.lengths_B[longer]))
        self.model = make_pipeline(StandardScaler(), Ridge(alpha=1.0))
        self.model.fit(np.concatenate(self.rows), np.concatenate(self.targets))


def predict_online(steps: Iterable[Step]) -> list[dict[int, Floats]]:
    """For each step its rollouts' lengths as predicted after so many tokens, from the steps before
    it."""
    model, found = LengthModel(), []
    for step in steps:
        found.append({so_far: model.predict(step, so_far) for so_far in SO_FAR})
        model.learn(step)
    return found
