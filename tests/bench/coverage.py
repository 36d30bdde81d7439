"""Measure how often the interval of the benchmark's ratios of compute contains the true factor.

    python -m tests.bench.coverage [--simulations 2000] [--seeds 2 3 5] [--prompts 256 1024 2048]

Two recipes have the same accuracy by compute, except that the reference needs `factor` times as
much: a line in log compute, so that interpolation is exact. Budgets, answers for each test prompt,
gain for each doubling, and noise are about those of docs/results/protocol2.yaml. With noise of the
search, every recipe has three searches, whose settings differ in accuracy, and the best on
validation are used. All parts after the pass rates are the benchmark's own. A line is printed for
each cell: the share of intervals that contain the factor (goal: 0.95) and that exclude 1, at two of
the reference's budgets. All cells take about 12 minutes on one core, `--simulations 200` about
one."""

import argparse
import itertools
from dataclasses import dataclass

import numpy as np

from flows.benchmark.frontier import Floats
from flows.benchmark.interval import Spread, compute_interval, frontier_of, spread_between
from tasks.common.statistics import noise_of

BUDGETS = {
    "mine": np.array([1024.0, 2896, 8192, 16384]),
    "reference": np.array([1024.0, 2896, 8192]),
}
TARGETS = (1, 2)  # the reference's budgets 2,896 and 8,192
FACTORS = (1.0, 1.3, 2.0)
GAIN = 0.025  # of accuracy when compute doubles
NUM_RECIPES = 4  # whose searches show the noise of a search
NUM_SEARCHES = 3
NUM_SAMPLES = 4  # answers to each test prompt
# standard deviations of accuracy
OF_SEEDS = 0.006
OF_SEARCHES = 0.005
OF_VALIDATION = 0.011  # of a trial with one seed, from the settings' true accuracy
OF_PROMPTS = 0.15  # of a prompt's pass rate 0.5 between two settings


@dataclass(frozen=True)
class Simulated:
    """The pass rates [K, B, S, P] of every search's settings at every budget, and the index [B] of
    the search that is best on validation."""

    rates: Floats
    best: Floats

    def chosen(self) -> list[Floats]:
        return [self.rates[search, place] for place, search in enumerate(self.best.tolist())]


def simulate(
    rng: np.random.Generator, difficulty_P: Floats, true_B: Floats, num_seeds: int, searches: float
) -> Simulated:
    """Return a recipe with these true accuracies, above the mean of `difficulty_P`."""
    num_budgets, num_prompts = len(true_B), len(difficulty_P)
    num = NUM_SEARCHES if searches else 1
    deviation_KB = np.repeat(rng.normal(0, searches, (num, 1)), num_budgets, axis=1)
    best = (deviation_KB + rng.normal(0, OF_VALIDATION, deviation_KB.shape)).argmax(axis=0)
    scale_P = OF_PROMPTS * np.sqrt(2 * difficulty_P * (1 - difficulty_P))
    of_prompts = scale_P * rng.standard_normal((num, num_budgets, 1, num_prompts), np.float32)
    of_seeds = rng.normal(0, OF_SEEDS, (num, num_budgets, num_seeds, 1))
    gain = (true_B + deviation_KB)[:, :, None, None] + of_seeds
    share_P = difficulty_P * (1 - difficulty_P)  # of the gain; rates stay between 0 and 1
    rate = (difficulty_P + of_prompts + gain * share_P / share_P.mean()).astype(np.float32)
    correct = sum(rng.random(rate.shape, np.float32) < rate for _ in range(NUM_SAMPLES))
    return Simulated(np.asarray(correct, dtype=np.float64) / NUM_SAMPLES, best)


def spread_of(recipes: list[Simulated]) -> Spread:
    """Return the spread between the searches, pooled over the recipes."""
    freedom, squares = len(recipes) * (NUM_SEARCHES - 1), 0.0
    for recipe in recipes:
        num, num_budgets = recipe.rates.shape[:2]
        noise = noise_of(recipe.rates.reshape(-1, *recipe.rates.shape[2:]))
        places = np.arange(num * num_budgets).reshape(num, num_budgets).tolist()
        squares += spread_between(noise, places) * (num - 1)
    return Spread(float(np.sqrt(max(squares / freedom, 0.0))), freedom)


def intervals(
    rng: np.random.Generator, num_seeds: int, num_prompts: int, factor: float, searches: float
) -> list[tuple[float, float]]:
    """Return the interval of the ratio for each of TARGETS in one simulated benchmark."""
    difficulty = rng.beta(0.5, 0.6, num_prompts)
    computes = [factor * BUDGETS["mine"], *[BUDGETS["reference"]] * (NUM_RECIPES - 1)]
    recipes = [
        simulate(rng, difficulty, GAIN * np.log2(compute / 2896), num_seeds, searches)
        for compute in computes[: NUM_RECIPES if searches else 2]
    ]
    noise = noise_of([rates for recipe in recipes[:2] for rates in recipe.chosen()])
    spread = spread_of(recipes) if searches else None
    num, found = len(BUDGETS["mine"]), []
    mine = frontier_of(zip(BUDGETS["mine"], range(num), strict=True), noise)
    places = range(num, len(noise.means))
    reference = frontier_of(zip(BUDGETS["reference"], places, strict=True), noise)
    for place in TARGETS:
        target = float(noise.means[num + place])
        least, largest = compute_interval(mine, reference, target, noise, spread)
        compute = reference.reach(target)
        found.append((compute / largest, compute / least if least > 0 else np.inf))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="coverage of the interval of the compute ratio")
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--searches", type=float, nargs="+", default=[0.0, OF_SEARCHES])
    given = parser.parse_args()
    print("seeds prompts factor  search  coverage at 2,896 and 8,192   exclude 1 at both")
    cells = itertools.product(given.seeds, given.prompts, FACTORS, given.searches)
    for num_seeds, num_prompts, factor, searches in cells:
        rng = np.random.default_rng([num_seeds, num_prompts, round(10 * factor)])
        draws = range(given.simulations)
        ends = np.array([intervals(rng, num_seeds, num_prompts, factor, searches) for _ in draws])
        low, high = ends[..., 0], ends[..., 1]
        shares = [((low <= factor) & (factor <= high)).mean(0), ((low > 1) | (high < 1)).mean(0)]
        words = "   ".join(f"{share[0]:10.3f} {share[1]:10.3f}" for share in shares)
        print(f"{num_seeds:5} {num_prompts:7} {factor:6} {searches:7} {words}", flush=True)


if __name__ == "__main__":
    main()
