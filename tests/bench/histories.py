"""A real policy's pass rates while it learned, as a world that answers requests: see
`simulate.py`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from tasks.engines.engine import Samples
from tasks.profile.profile import profile_prompts
from tasks.train.rollouts import GroupRequest, Rollouts
from tests.bench.lengths import Floats, Ints, in_tokens
from tests.train.steps import graded

PROFILED_SAMPLES = 8


@dataclass(frozen=True)
class World:
    """Pass rates [epochs, P], lengths of the prompts [P], and of wrong and of correct completions,
    to draw from."""

    pass_rates: Floats
    prompt_tokens: Ints
    completion_tokens: tuple[Ints, Ints]

    @property
    def ids(self) -> list[str]:
        return [f"p{row}" for row in range(len(self.prompt_tokens))]

    def draw(self, epoch: int, rows_B: Ints, rng: np.random.Generator) -> tuple[Floats, Ints]:
        """Rewards and completion lengths of rollouts of the prompts `rows_B`; past the record's end
        its last epoch."""
        rates = self.pass_rates[min(epoch, len(self.pass_rates) - 1)]
        rewards_B = (rng.random(len(rows_B)) < rates[rows_B]).astype(np.float64)
        wrong, correct = (rng.choice(pool, len(rows_B)) for pool in self.completion_tokens)
        return rewards_B, np.where(rewards_B > 0, correct, wrong)


def read_world(data: Path, window: int) -> World:
    """The record's epochs that all prompts have, each averaged with its neighbours over `window`
    epochs."""
    history = json.loads((data / "rollouts" / "dsr_sub_acc_history.json").read_text())
    num = min(map(len, history.values()))
    rates = np.array([values[:num] for values in history.values()]).T
    means = np.stack(
        [rates[max(e - window // 2, 0) : e + window // 2 + 1].mean(axis=0) for e in range(num)]
    )
    chats = pl.read_parquet(data / "dsr_sub_1209" / "dsr_sub.parquet")["prompt"]
    characters = np.array([len(chats[int(row)][0]["content"]) for row in history])
    lines = (data / "rollouts" / "qwen25math_math100x8.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    wrong, correct = (
        np.array(
            [
                len(t)
                for row in rows
                for t, right in zip(row["code"], row["score"], strict=True)
                if right == wanted
            ]
        )
        for wanted in (False, True)
    )
    return World(means, in_tokens(characters), (in_tokens(wrong), in_tokens(correct)))


def take_profile(world: World, epoch: int, rng: np.random.Generator) -> pl.DataFrame:
    """The PROFILE table of 8 samples a prompt, by the stage's own code."""
    rows = np.repeat(np.arange(len(world.ids)), PROFILED_SAMPLES)
    rewards, lengths = world.draw(epoch, rows, rng)
    rollouts = pl.DataFrame(
        {
            "prompt_id": np.array(world.ids)[rows],
            "outcome": np.where(rewards > 0, "correct", "wrong"),
            "prompt_tokens": world.prompt_tokens[rows].astype(np.int32),
            "completion_tokens": lengths.astype(np.int32),
            "finish_reason": ["stop"] * len(rows),
        }
    )
    return profile_prompts(rollouts)


def collect(world: World, epoch: int, request: GroupRequest, rng: np.random.Generator) -> Rollouts:
    """What the engine and the verifier would have answered."""
    group_B = np.repeat(np.arange(len(request.counts)), request.counts)
    rewards, lengths = world.draw(epoch, request.prompt_rows[group_B], rng)
    samples = Samples(
        [[0] * n for n in lengths.tolist()], [[]] * len(lengths), ["stop"] * len(lengths)
    )
    prompts = [[0] * n for n in world.prompt_tokens[request.prompt_rows].tolist()]
    outcomes = ["correct" if reward else "wrong" for reward in rewards]
    made = graded(prompts, group_B, samples, rewards)
    return dataclasses.replace(made, prompt_rows_Q=request.prompt_rows, outcomes=outcomes)
