"""How well beliefs about pass rates predict the rollouts of recorded runs, before they are sampled.

    python -m tests.bench.beliefs --data data --cells grpo/0 winnow/0

A run is replayed step by step: every belief predicts the pass rate of each of the step's prompts,
and then learns from the step's outcomes. Prints, for each cell and belief, the Brier score (the
mean of (prediction - outcome)^2 over rollouts; lower is better) of all groups and of the second
half of them, its difference from the best constant prediction's in percent, and the calibration
error: the mean of |mean prediction - mean outcome| over ten bins of predictions, weighted by their
rollouts.

Beliefs: the profile's counts with a prior fitted to all prompts, kept; those of `drift`, with and
without the profile; `information` as it is, and after it learned the profile; the counts of
`knapsack`; and two with a prior by features of the prompt (GPS, arXiv 2602.01970, as a ridge
logistic regression on the profile: length, digits, level and source)."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.artifacts import PROMPTS, ROLLOUTS, TRAIN_ROLLOUTS, Layout
from tasks.common.statistics import fit_beta
from tasks.train.methods.control.drift import Settings as Drift
from tasks.train.methods.pass_rates import PassRates, PriorSettings

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BINS = 10
RIDGE = 1.0


@dataclass(frozen=True)
class Group:
    """The graded rollouts of a prompt in one step."""

    row: int
    correct: int
    size: int


Steps = Sequence[Sequence[Group]]


class Kept:
    """A Beta for every prompt that learns nothing."""

    def __init__(self, first: Floats, second: Floats) -> None:
        self.counts = np.stack([first, second])

    def predict(self, row: int) -> float:
        return float(self.counts[0, row] / self.counts[:, row].sum())

    def learn(self, groups: Sequence[Group]) -> None:
        pass


class Discounted(Kept):
    """The counts of the control `drift`, whose older outcomes weigh less, for any prior."""

    def __init__(self, prior: Floats, correct: Floats, wrong: Floats) -> None:
        super().__init__(prior[0] + correct, prior[1] + wrong)
        self.prior, self.keep = prior, Drift().discount

    def learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            new = [group.correct, group.size - group.correct]
            before, prior = self.counts[:, group.row], self.prior[:, group.row]
            self.counts[:, group.row] = self.keep * before + (1 - self.keep) * prior + new


class Strata:
    """The belief of `information` and of `winnow`'s baseline."""

    def __init__(self, prompts: pl.DataFrame) -> None:
        self.rates = PassRates(PriorSettings(), prompts)

    def predict(self, row: int) -> float:
        first, second = self.rates.beta(np.array([row]))
        return float(first[0] / (first[0] + second[0]))

    def learn(self, groups: Sequence[Group]) -> None:
        rows = np.array([group.row for group in groups])
        owner = np.repeat(np.arange(len(groups)), [group.size for group in groups])
        share = [float(place < each.correct) for each in groups for place in range(each.size)]
        self.rates.add(rows, owner, np.array(share))


class Own(Kept):
    """The counts of `knapsack`, halved at each visit; the mean of all outcomes before the first."""

    def __init__(self, num: int) -> None:
        super().__init__(np.zeros(num), np.zeros(num))
        self.all = np.array([1.0, 2.0])

    def predict(self, row: int) -> float:
        known = self.counts[:, row].sum() > 0
        return super().predict(row) if known else float(self.all[0] / self.all[1])

    def learn(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.counts[:, group.row] *= 0.5
            self.counts[:, group.row] += [group.correct, group.size - group.correct]
            self.all += [group.correct, group.size]


def features(prompts: pl.DataFrame) -> Floats:
    """Return [prompts, features], standardised: logarithms of the length and of the number of
    digits, and each level and source as 0 or 1."""
    text = pl.col("prompt")
    columns = prompts.select(
        length=text.str.len_chars().log(),
        digits=text.str.count_matches(r"\d").cast(pl.Float64).log1p(),
        level=pl.col("level").cast(pl.String).fill_null("none"),
        source=pl.col("source"),
    )
    values = columns.to_dummies(["level", "source"]).to_numpy().astype(np.float64)
    spread = values.std(axis=0)
    values = (values - values.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    return np.column_stack([np.ones(len(values)), values])


def logistic(x: Floats, correct: Floats, size: Floats) -> Floats:
    """Return the fitted pass rates of a ridge logistic regression (Newton's method)."""
    weights = np.zeros(x.shape[1])
    penalty = RIDGE * np.eye(x.shape[1])
    penalty[0, 0] = 0.0
    for _ in range(30):
        rate = 1.0 / (1.0 + np.exp(-x @ weights))
        hessian = x.T @ (x * (size * rate * (1 - rate))[:, None]) + penalty
        weights += np.linalg.solve(hessian, x.T @ (correct - size * rate) - penalty @ weights)
    return np.asarray(1.0 / (1.0 + np.exp(-x @ weights)))


def beliefs_of(prompts: pl.DataFrame, correct: Ints, size: Ints) -> dict[str, Kept | Strata]:
    """Return fresh beliefs by name; `correct` and `size` are the profile's counts, by row."""
    wrong, nothing = size - correct, np.zeros(len(prompts))
    first, second = fit_beta([*correct, 1], [*size, 2])
    by_features = logistic(features(prompts), correct.astype(float), size.astype(float))
    flat = np.ones((2, len(prompts)))
    informed = (first + second) * np.stack([by_features, 1 - by_features])
    profiled = zip(range(len(prompts)), correct.tolist(), size.tolist(), strict=True)
    return {
        "profile, kept": Kept(first + correct, second + wrong),
        "features, and the profile, kept": Kept(informed[0] + correct, informed[1] + wrong),
        "drift without profile": Discounted(flat, nothing, nothing),
        "drift": Discounted(flat, correct, wrong),
        "drift, prior by features": Discounted(informed, correct, wrong),
        "knapsack": Own(len(prompts)),
        "information": Strata(prompts),
        "information after the profile": learned(
            Strata(prompts), [Group(*each) for each in profiled]
        ),
    }


def learned(belief: Strata, groups: Sequence[Group]) -> Strata:
    """Return the belief after one step with these groups."""
    belief.learn([group for group in groups if group.size])
    return belief


def steps_of(table: pl.DataFrame, row_of: dict[str, int]) -> Steps:
    """Return the fresh graded groups of a run's rollouts, by step."""
    graded = table.filter(~pl.col("replayed"), pl.col("outcome") != "error")
    groups = graded.group_by("step", "group", "prompt_id", maintain_order=True).agg(
        correct=(pl.col("outcome") == "correct").sum(), size=pl.len()
    )
    return [
        [
            Group(row_of[each["prompt_id"]], each["correct"], each["size"])
            for each in rows.to_dicts()
        ]
        for _, rows in groups.group_by("step", maintain_order=True)
    ]


def replay(belief: Kept | Strata, steps: Steps) -> tuple[Floats, Floats, Floats]:
    """Return the predictions, successes and sizes of all groups, in their order."""
    predicted, correct, size = list[float](), list[int](), list[int]()
    for groups in steps:
        predicted += [belief.predict(group.row) for group in groups]
        correct += [group.correct for group in groups]
        size += [group.size for group in groups]
        belief.learn(groups)
    return np.array(predicted), np.array(correct, float), np.array(size, float)


def brier(predicted: Floats, correct: Floats, size: Floats) -> float:
    """Return the mean of (prediction - outcome)^2 over the rollouts of groups."""
    squares = correct * (1 - predicted) ** 2 + (size - correct) * predicted**2
    return float(squares.sum() / size.sum())


def calibration(predicted: Floats, correct: Floats, size: Floats) -> float:
    """Return the mean distance of prediction and outcome over bins, weighted by rollouts."""
    place = np.minimum((predicted * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, size * predicted - correct, BINS)
    return float(np.abs(gaps).sum() / size.sum())


def counts_of(prompts: pl.DataFrame, samples: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return the numbers of correct and of graded samples of each prompt, by row."""
    graded = samples.filter(pl.col("outcome") != "error", ~pl.col("greedy"))
    counts = graded.group_by("prompt_id").agg(
        correct=(pl.col("outcome") == "correct").sum(), size=pl.len()
    )
    joined = prompts.join(counts, on="prompt_id", how="left", maintain_order="left").fill_null(0)
    correct, size = (joined[name].to_numpy().astype(np.int64) for name in ("correct", "size"))
    return correct, size


def report(layout: Layout, cell: str, line: Callable[[str], None]) -> None:
    recipe, seed = cell.split("/")
    prompts = PROMPTS.read(layout.prompts("train"))
    samples = ROLLOUTS.read(layout.profile / "rollouts.parquet")
    row_of = {each: row for row, each in enumerate(prompts["prompt_id"])}
    table = TRAIN_ROLLOUTS.read(layout.train(recipe, int(seed)) / "rollouts.parquet")
    steps = steps_of(table, row_of)
    line(f"{cell}: {len(steps)} steps, {sum(map(len, steps))} groups of {len(prompts)} prompts")
    for name, belief in beliefs_of(prompts, *counts_of(prompts, samples)).items():
        scored = replay(belief, steps)
        late = tuple(part[len(part) // 2 :] for part in scored)
        constant = np.full(len(scored[0]), scored[1].sum() / scored[2].sum())
        least = brier(constant, *scored[1:])
        line(
            f"  {name:32} Brier {brier(*scored):.4f} ({brier(*scored) / least - 1:+.1%} from the "
            f"constant's), second half {brier(*late):.4f}, calibration {calibration(*scored):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", required=True, metavar="RECIPE/SEED")
    args = parser.parse_args()
    for cell in args.cells:
        report(Layout(args.data), cell, print)


if __name__ == "__main__":
    main()
