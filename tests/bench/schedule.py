"""python -m tests.bench.schedule: how long a step's rollouts decode in a few slots, by the order in
which they go in.

Replays real lengths (no model runs, a minute) through `tests.bench.scheduling`, with the lengths
known, and as they would be predicted by a ridge regression that has seen the earlier steps only.
Four sets of steps:

- `log-normal`: 32 rollouts of one prompt, median 245, cut at 1,024 tokens (drawn, the numbers of
  the literature);
- `service`: output tokens of a production code assistant (Azure, 2023), 32 requests in a row:
  short, heavy-tailed;
- `math`: 8 prompts x 4 of Qwen2.5-Math's completions of MATH, the 4 others of each prompt standing
  for its profile. Only characters are known: CHARACTERS_PER_TOKEN of them are taken for one token,
  and that factor cancels in ratios;
- `math, one prompt`: the 8 completions of one prompt, in half as many slots.

Seconds are decoding only, from milliseconds measured on an A100 (7B, bfloat16), by rows at once and
mean context, bilinear between the measured points. Left out: prefill, the cost of refilling, slots
that depend on free memory."""

import argparse
import csv
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.stats import spearmanr

from tasks.train.methods.generate.micro_groups import Order, queue
from tests.bench.lengths import (
    SO_FAR,
    Floats,
    Ints,
    Step,
    log_normal,
    math_steps,
    one_prompt,
    predict_online,
    service,
)
from tests.bench.scheduling import (
    balance,
    in_slots,
    lower_bound,
    makespan,
    occupied,
    refill,
    rounds,
)

Milliseconds = Callable[[Ints, Floats], Floats]

EPSILON = {2: 0.05, 3: 0.5}  # of the FPTAS, by slots: what takes well under a second
MAX_BALANCED = 50  # steps that the FPTAS is shown on


def decode_milliseconds(data: Path) -> Milliseconds:
    """Measured milliseconds of one decode step, by rows and mean context; outside of the sweep as
    at its edge."""
    with (data / "traces" / "sweep_a100_tp1_qwen257b.csv").open() as file:
        rows = [
            r for r in csv.DictReader(file) if r["mode"] == "target_decode" and r["batch"] != "0"
        ]
    points = {(int(r["batch"]), int(r["seq"])): float(r["median_ms"]) for r in rows}
    batches, contexts = (sorted({point[axis] for point in points}) for axis in (0, 1))
    grid = RegularGridInterpolator(
        (batches, contexts), [[points[b, c] for c in contexts] for b in batches]
    )
    low, high = (batches[0], contexts[0]), (batches[-1], contexts[-1])
    return lambda rows_T, context_T: np.asarray(
        grid(np.clip(np.stack([rows_T, context_T], axis=-1), low, high))
    )


def context_sum(step: Step, starts_B: Ints) -> Ints:
    """[steps] tokens of prompt and completion that all decoding rollouts have behind them."""
    steps = int(makespan(step.lengths_B, starts_B)) + 1
    behind = (step.prompt_tokens_B - starts_B).astype(np.float64)
    entered = np.bincount(starts_B, behind, steps) - np.bincount(
        starts_B + step.lengths_B, behind, steps
    )
    rows = occupied(step.lengths_B, starts_B)
    return np.asarray(
        np.rint(np.cumsum(entered)[:-1]) + np.arange(steps - 1) * rows, dtype=np.int64
    )


def seconds(step: Step, starts_B: Ints, milliseconds: Milliseconds) -> float:
    """Modelled seconds of decoding by this schedule."""
    rows = occupied(step.lengths_B, starts_B)
    return float(milliseconds(rows, context_sum(step, starts_B) / rows).sum()) / 1000


def schedules(step: Step, predicted_B: Floats, slots: int) -> dict[str, Ints]:
    """The starts by every policy."""
    lengths = step.lengths_B
    came, longest, shortest = (queue(lengths, order) for order in ("fifo", "lpt", "sjf"))
    return {
        "naive rounds": rounds(lengths, came, slots),
        "sorted rounds, lengths known": rounds(lengths, longest, slots),
        "FIFO refill: vLLM as it is": refill(lengths, came, slots),
        "SJF refill, lengths known": refill(lengths, shortest, slots),
        "SJF refill, predicted": refill(lengths, queue(predicted_B, "sjf"), slots),
        "LPT refill, lengths known": refill(lengths, longest, slots),
        "LPT refill, predicted": refill(lengths, queue(predicted_B, "lpt"), slots),
        "all at once, memory for all": np.zeros_like(lengths),
    }


@dataclass(frozen=True)
class Result:
    """A policy on a set: median over the steps of decode steps over the bound, the same of their
    sums (where the worst steps show), and mean modelled seconds a step."""

    median: float
    total: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.total:.3f}), {self.seconds:.1f} s"


def compare(
    steps: list[Step], predictions: list[dict[int, Floats]], slots: int, milliseconds: Milliseconds
) -> dict[str, Result]:
    """Every policy on these steps."""
    bound = np.array([lower_bound(step.lengths_B, slots) for step in steps])
    found: dict[str, list[tuple[float, float]]] = {}
    for step, predicted in zip(steps, predictions, strict=True):
        for name, starts in schedules(step, predicted[0], slots).items():
            row = (float(makespan(step.lengths_B, starts)), seconds(step, starts, milliseconds))
            found.setdefault(name, []).append(row)
    results = {}
    for name, rows in found.items():
        spans, spent = np.array(rows).T
        results[name] = Result(
            float(np.median(spans / bound)), float(spans.sum() / bound.sum()), float(spent.mean())
        )
    return results


def balanced(steps: list[Step], slots: int) -> dict[str, float]:
    """Mean decode steps over the bound by FIFO, LPT and the FPTAS, lengths known."""
    total = dict.fromkeys(("FIFO", "LPT", "FPTAS", "bound"), 0)
    orders: dict[str, Order] = {"FIFO": "fifo", "LPT": "lpt"}
    for step in steps:
        lengths = step.lengths_B
        starts = {
            name: refill(lengths, queue(lengths, order), slots) for name, order in orders.items()
        }
        starts["FPTAS"] = in_slots(lengths, balance(lengths, slots, EPSILON[slots]))
        for name, begins in starts.items():
            total[name] += int(makespan(lengths, begins))
        total["bound"] += lower_bound(lengths, slots)
    return {name: total[name] / total["bound"] for name in ("FIFO", "LPT", "FPTAS")}


def errors(
    steps: list[Step], predictions: list[dict[int, Floats]]
) -> dict[int, tuple[float, float]]:
    """By tokens so far, of rollouts that got there: median relative error of the predicted length,
    and its rank correlation with the true one within a step (0 where all predictions of a step are
    alike)."""
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
    found = {
        name: compare(steps, predictions[name], slots, milliseconds)
        for name, (steps, slots) in sets.items()
    }
    head = [
        "",
        *(f"{name} ({len(steps)} steps, {slots} slots)" for name, (steps, slots) in sets.items()),
    ]
    rows = [
        [policy, *(str(of[policy]) for of in found.values())]
        for policy in next(iter(found.values()))
    ]
    print(
        "Decode steps over the lower bound, median step (sum of all), and modelled seconds:\n\n"
        + table(head, rows)
    )
    shares = [
        [
            f"{name}, {slots} slots",
            *(f"{share:.4f}" for share in balanced(steps[:MAX_BALANCED], slots).values()),
        ]
        for name, (steps, _) in sets.items()
        for slots in EPSILON
    ]
    print(
        "\nSlots few enough for the FPTAS, lengths known:\n\n"
        + table(["", "FIFO", "LPT", "FPTAS"], shares)
    )
    quality = [
        [
            name,
            *(
                f"{e:.0%}, {r:.2f}".replace("nan", "too few")
                for e, r in errors(steps, predictions[name]).values()
            ),
        ]
        for name, (steps, _) in sets.items()
    ]
    head = ["", *(f"after {so_far} tokens" for so_far in SO_FAR)]
    print(
        "\nPredicted lengths: median relative error, rank correlation within a step:\n\n"
        + table(head, quality)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--steps", type=int, default=275, help="of each set, at most")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if "WINNOW_REAL_DATA" not in os.environ:
        sys.exit(
            "set WINNOW_REAL_DATA to the folder of real data: lengths and decode times are read "
            "from it"
        )
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
