"""python -m tests.bench.schedule: how long a step's rollouts decode in a few slots, by the order in which they go in.

Replays real lengths (no model runs, a minute) through `tasks.train.scheduling`, with the lengths known, and as they
would be predicted by a ridge regression that has seen the earlier steps only. Four sets of steps:

- `log-normal`: 32 rollouts of one prompt, median 245, cut at 1,024 tokens (drawn, the numbers of the literature);
- `service`: output tokens of a production code assistant (Azure, 2023), 32 requests in a row: short, heavy-tailed;
- `math`: 8 prompts x 4 of Qwen2.5-Math's completions of MATH, the 4 others of each prompt standing for its profile.
  Only characters are known: CHARACTERS_PER_TOKEN of them are taken for one token, and that factor cancels in ratios;
- `math, one prompt`: the 8 completions of one prompt, in half as many slots.

Seconds are decoding only, from milliseconds measured on an A100 (7B, bfloat16), by rows at once and mean context,
bilinear between the measured points. Left out: prefill, the cost of refilling, slots that depend on free memory.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.interpolate import RegularGridInterpolator
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tasks.train import scheduling as s

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Milliseconds = Callable[[Floats, Floats], Floats]

CHARACTERS_PER_TOKEN = 3
SO_FAR = (0, 64, 256)  # tokens already decoded at which a length is predicted anew
EPSILON = {2: 0.05, 3: 0.5}  # of the FPTAS, by slots: what takes well under a second
MAX_BALANCED = 50  # steps that the FPTAS is shown on


@dataclass(frozen=True)
class Step:
    """Rollouts that are asked for together: their lengths, their prompts' lengths, and the mean length of what their
    prompt's earlier rollouts had (nan: none), in tokens."""

    lengths_B: Ints
    prompt_tokens_B: Ints
    earlier_mean_B: Floats


# --- the sets of steps


def log_normal(num_steps: int, seed: int) -> list[Step]:
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.7, (num_steps, 32))
    whole = np.clip(np.ceil(lengths), 1, 1024).astype(np.int64)
    return [Step(row, np.full(32, 256), np.full(32, np.nan)) for row in whole]


def service(data: Path, num_steps: int) -> list[Step]:
    with (data / "traces" / "AzureLLMInferenceTrace_code.csv").open() as file:
        rows = np.array([[int(r["GeneratedTokens"]), int(r["ContextTokens"])] for r in csv.DictReader(file)])
    chunks = rows[: len(rows) // 32 * 32].reshape(-1, 32, 2)[:num_steps]
    return [Step(chunk[:, 0], chunk[:, 1], np.full(32, np.nan)) for chunk in chunks]


def read_math(data: Path) -> tuple[Ints, Ints]:
    """[P, 8] and [P] tokens, estimated, of completions and of prompts."""
    lines = (data / "rollouts" / "qwen25math_math100x8.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    characters = np.array([[len(text) for text in row["code"]] for row in rows])
    prompts = np.array([len(row["question"]) for row in rows])
    return -(-characters // CHARACTERS_PER_TOKEN), -(-prompts // CHARACTERS_PER_TOKEN)


def math_steps(data: Path, num_steps: int, seed: int) -> list[Step]:
    """Eight prompts a step until all had their turn, then again, with another half of each prompt's completions as its
    profile. What a model learned from a completion it may meet again; four numbers cannot remember it."""
    rng, (lengths, prompts) = np.random.default_rng(seed), read_math(data)
    steps: list[Step] = []
    while len(steps) < num_steps:
        order, halves = rng.permutation(len(prompts)), rng.permuted(lengths, axis=1)
        for rows in order[: len(order) // 8 * 8].reshape(-1, 8):
            means = halves[rows, :4].mean(axis=1)
            steps.append(Step(halves[rows, 4:].ravel(), np.repeat(prompts[rows], 4), np.repeat(means, 4)))
    return steps[:num_steps]


def one_prompt(data: Path) -> list[Step]:
    lengths, prompts = read_math(data)
    return [Step(row, np.full(8, n), np.full(8, np.nan)) for row, n in zip(lengths, prompts, strict=True)]


# --- prediction


class LengthModel:
    """A ridge regression of log length on prompt length, the prompt's earlier mean (else that of all) and tokens so
    far, fitted anew after every step on all steps before."""

    def __init__(self) -> None:
        self.rows: list[Floats] = []
        self.targets: list[Floats] = []
        self.lengths: list[Ints] = []
        self.model: Any = None

    def features(self, step: Step, so_far: int) -> Floats:
        overall = np.concatenate(self.lengths).mean() if self.lengths else 1.0
        means = np.where(np.isnan(step.earlier_mean_B), overall, step.earlier_mean_B)
        return np.log1p(np.stack([step.prompt_tokens_B, means, np.full(len(means), so_far)], axis=1))

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
    """For each step its rollouts' lengths as predicted after so many tokens, from the steps before it."""
    model, found = LengthModel(), []
    for step in steps:
        found.append({so_far: model.predict(step, so_far) for so_far in SO_FAR})
        model.learn(step)
    return found


# --- cost


def decode_milliseconds(data: Path) -> Milliseconds:
    """Measured milliseconds of one decode step, by rows and mean context; outside of the sweep as at its edge."""
    with (data / "traces" / "sweep_a100_tp1_qwen257b.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["mode"] == "target_decode" and r["batch"] != "0"]
    points = {(int(r["batch"]), int(r["seq"])): float(r["median_ms"]) for r in rows}
    batches, contexts = (sorted({point[axis] for point in points}) for axis in (0, 1))
    grid = RegularGridInterpolator((batches, contexts), [[points[b, c] for c in contexts] for b in batches])
    low, high = (batches[0], contexts[0]), (batches[-1], contexts[-1])
    return lambda rows_T, context_T: np.asarray(grid(np.clip(np.stack([rows_T, context_T], axis=-1), low, high)))


def context_sum(step: Step, starts_B: Ints) -> Ints:
    """[steps] tokens of prompt and completion that all decoding rollouts have behind them."""
    steps = int(s.makespan(step.lengths_B, starts_B)) + 1
    behind = (step.prompt_tokens_B - starts_B).astype(np.float64)
    entered = np.bincount(starts_B, behind, steps) - np.bincount(starts_B + step.lengths_B, behind, steps)
    rows = s.occupied(step.lengths_B, starts_B)
    return np.asarray(np.rint(np.cumsum(entered)[:-1]) + np.arange(steps - 1) * rows, dtype=np.int64)


def seconds(step: Step, starts_B: Ints, milliseconds: Milliseconds) -> float:
    """Modelled seconds of decoding by this schedule."""
    rows = s.occupied(step.lengths_B, starts_B)
    return float(milliseconds(rows, context_sum(step, starts_B) / rows).sum()) / 1000


# --- the comparison


def schedules(step: Step, predicted_B: Floats, slots: int) -> dict[str, Ints]:
    """The starts by every policy."""
    lengths = step.lengths_B
    came, longest, shortest = (s.queue(lengths, order) for order in ("fifo", "lpt", "sjf"))
    return {
        "naive rounds": s.rounds(lengths, came, slots),
        "sorted rounds, lengths known": s.rounds(lengths, longest, slots),
        "FIFO refill: vLLM as it is": s.refill(lengths, came, slots),
        "SJF refill, lengths known": s.refill(lengths, shortest, slots),
        "SJF refill, predicted": s.refill(lengths, s.queue(predicted_B, "sjf"), slots),
        "LPT refill, lengths known": s.refill(lengths, longest, slots),
        "LPT refill, predicted": s.refill(lengths, s.queue(predicted_B, "lpt"), slots),
        "all at once, memory for all": np.zeros_like(lengths),
    }


@dataclass(frozen=True)
class Result:
    """A policy on a set: median over the steps of decode steps over the bound, the same of their sums (where the worst
    steps show), and mean modelled seconds a step."""

    median: float
    total: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.total:.3f}), {self.seconds:.1f} s"


def compare(
    steps: list[Step], predictions: list[dict[int, Floats]], slots: int, milliseconds: Milliseconds
) -> dict[str, Result]:
    """Every policy on these steps."""
    bound = np.array([s.lower_bound(step.lengths_B, slots) for step in steps])
    found: dict[str, list[tuple[float, float]]] = {}
    for step, predicted in zip(steps, predictions, strict=True):
        for name, starts in schedules(step, predicted[0], slots).items():
            row = (float(s.makespan(step.lengths_B, starts)), seconds(step, starts, milliseconds))
            found.setdefault(name, []).append(row)
    results = {}
    for name, rows in found.items():
        spans, spent = np.array(rows).T
        results[name] = Result(float(np.median(spans / bound)), float(spans.sum() / bound.sum()), float(spent.mean()))
    return results


def balanced(steps: list[Step], slots: int) -> dict[str, float]:
    """Mean decode steps over the bound by FIFO, LPT and the FPTAS, lengths known."""
    total = dict.fromkeys(("FIFO", "LPT", "FPTAS", "bound"), 0)
    for step in steps:
        lengths = step.lengths_B
        starts = {name: s.refill(lengths, s.queue(lengths, name.lower()), slots) for name in ("FIFO", "LPT")}
        starts["FPTAS"] = s.in_slots(lengths, s.balance(lengths, slots, EPSILON[slots]))
        for name, begins in starts.items():
            total[name] += int(s.makespan(lengths, begins))
        total["bound"] += s.lower_bound(lengths, slots)
    return {name: total[name] / total["bound"] for name in ("FIFO", "LPT", "FPTAS")}


def errors(steps: list[Step], predictions: list[dict[int, Floats]]) -> dict[int, tuple[float, float]]:
    """By tokens so far, of rollouts that got there: median relative error of the predicted length, and its rank
    correlation with the true one within a step (0 where all predictions of a step are alike)."""
    found = {}
    for so_far in SO_FAR:
        relative, ranks = [], []
        for step, predicted in list(zip(steps, predictions, strict=True))[len(steps) // 4 :]:
            longer = step.lengths_B > so_far
            true, guess = step.lengths_B[longer], predicted[so_far][longer]
            relative += list(np.abs(guess - true) / true)
            if len(true) > 2:
                differ = np.ptp(guess) > 1e-9 * guess.max() and np.ptp(true) > 0
                ranks.append(float(spearmanr(guess, true).statistic) if differ else 0.0)
        found[so_far] = (float(np.median(relative)), float(np.mean(ranks)) if ranks else np.nan)
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def report(sets: dict[str, tuple[list[Step], int]], milliseconds: Milliseconds) -> None:
    """Print the tables: policies against sets, the FPTAS, the predictions."""
    predictions = {name: predict_online(steps) for name, (steps, _) in sets.items()}
    found = {name: compare(steps, predictions[name], slots, milliseconds) for name, (steps, slots) in sets.items()}
    head = ["", *(f"{name} ({len(steps)} steps, {slots} slots)" for name, (steps, slots) in sets.items())]
    rows = [[policy, *(str(of[policy]) for of in found.values())] for policy in next(iter(found.values()))]
    print("Decode steps over the lower bound, median step (sum of all), and modelled seconds:\n\n" + table(head, rows))
    shares = [
        [f"{name}, {slots} slots", *(f"{share:.4f}" for share in balanced(steps[:MAX_BALANCED], slots).values())]
        for name, (steps, _) in sets.items()
        for slots in EPSILON
    ]
    print("\nSlots few enough for the FPTAS, lengths known:\n\n" + table(["", "FIFO", "LPT", "FPTAS"], shares))
    quality = [
        [name, *(f"{e:.0%}, {r:.2f}".replace("nan", "too few") for e, r in errors(steps, predictions[name]).values())]
        for name, (steps, _) in sets.items()
    ]
    head = ["", *(f"after {so_far} tokens" for so_far in SO_FAR)]
    print("\nPredicted lengths: median relative error, rank correlation within a step:\n\n" + table(head, quality))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--steps", type=int, default=275, help="of each set, at most")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if "WINNOW_REAL_DATA" not in os.environ:
        sys.exit("set WINNOW_REAL_DATA to the folder of real data: lengths and decode times are read from it")
    data = Path(os.environ["WINNOW_REAL_DATA"])
    sets = {
        "log-normal": (log_normal(chosen.steps, chosen.seed), chosen.slots),
        "service": (service(data, chosen.steps), chosen.slots),
        "math": (math_steps(data, chosen.steps, chosen.seed), chosen.slots),
        "math, one prompt": (one_prompt(data), max(chosen.slots // 2, 1)),
    }
    report(sets, decode_milliseconds(data))


if __name__ == "__main__":
    main()
