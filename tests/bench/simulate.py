"""python -m tests.bench.simulate: what every recipe WOULD have sampled while a real policy learned.
No model.

The world is the record of a GRPO run of Qwen2.5-Math-1.5B: pass rates of 605 prompts at 44 epochs.
A pass of a recipe meets the pass rates of one epoch, and its rewards are drawn with them.
Everything else is the project's own code: the profile, the strategies, the controllers and the
selectors, with the settings that the recipes of `params.yaml` have (but one size of a step for
all). Generate, advantage and loss play no part.

Columns: groups that were sampled, and the share of them with different rewards among what select
kept (mixed; in brackets the lowest and the highest seed); by how much that is short of what one who
knows the epoch's pass rates would have got out of as many rollouts in that pass (regret; the more
rollouts, the easier it is to be near); rollouts and tokens drawn; charged FLOPs, profiling
included, over the first recipe's; and, over the first recipe's, mixed groups and `spread` a charged
FLOP: squared differences between kept rewards and their group's mean. Mixed groups a FLOP flatter
small groups (two rollouts make one most cheaply), spread flatters large ones; neither is learning.

What it cannot say: the record is of another policy's training, and what a recipe chooses does not
change what comes after; so it shows what is sampled at what cost, never what is learned. A recorded
rate is k of 8 samples; a mean over `--window` epochs is taken for the truth, else what happened to
fail 8 times could never be solved. Lengths were not recorded: they are drawn from Qwen2.5-Math's
completions of MATH, of correct ones and of wrong ones (longer) apart, three characters a token."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tasks.allocate.planning import load_strategy, make_plan
from tasks.common import params
from tasks.common.ledger import Architecture, charged_flops
from tasks.common.recipes import names
from tasks.common.recipes import recipe as recipe_of
from tasks.train.loading import load_slots
from tasks.train.plan import read_plan
from tasks.train.rollouts import Ints, Rollouts, mixed_groups
from tasks.train.settings import BatchSettings, TrainSettings
from tasks.train.slots import Slots, SoFar
from tests.bench.histories import World, collect, read_world, take_profile
from tests.bench.lengths import Floats
from tests.bench.schedule import table
from tests.bench.world import PROJECT
from tests.train.steps import merge_requests

AMOUNTS = ("groups", "mixed", "regret", "rollouts", "M tokens")
ONE_PARAMETER = Architecture(1, 0, 0, 0)
FLOPS_PER_TRAINED_TOKEN = charged_flops(ONE_PARAMETER, generated=1, updated=1)
LARGEST = 32  # group size that the oracle may give


@dataclass(frozen=True)
class Tally:
    """Sums over a pass. `spread` is of squared differences between kept rewards and their group's
    mean: what a group weighs in the gradient before it is standardised. `oracle` is the most mixed
    groups that these rollouts allowed."""

    groups: float = 0
    mixed: float = 0
    spread: float = 0
    rollouts: float = 0
    tokens: float = 0
    tokens_kept: float = 0
    tokens_profiled: float = 0
    oracle: float = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def charged(self) -> float:
        """What it all charges, in tokens of training (generated and updated: 8 P)."""
        drawn = self.tokens + self.tokens_profiled
        return (
            charged_flops(ONE_PARAMETER, generated=drawn, updated=self.tokens_kept)
            / FLOPS_PER_TRAINED_TOKEN
        )


def tally(rollouts: Rollouts, slots: Slots, rng: np.random.Generator) -> Tally:
    """A step: what was drawn, what select kept of it, and what that is worth."""
    rewards_B, group_B, num = rollouts.rewards_B, rollouts.group_B, len(rollouts.prompt_rows_Q)
    keep_B = slots.select(rollouts, rng)
    kept, groups = rewards_B[keep_B], group_B[keep_B]
    means = np.bincount(groups, kept, num) / np.maximum(np.bincount(groups, minlength=num), 1)
    tokens_B = rollouts.tokens_B()
    return Tally(
        groups=num,
        mixed=int(mixed_groups(kept, groups, num).sum()),
        spread=float(((kept - means[groups]) ** 2).sum()),
        rollouts=len(rewards_B),
        tokens=int(tokens_B.sum()),
        tokens_kept=int(tokens_B[keep_B].sum()),
    )


def oracle(rates: Floats, rollouts: float) -> float:
    """The most mixed groups that who knows the pass rates can expect of so many rollouts, one group
    a prompt.

    A group has 2 to LARGEST rollouts. Each goes where it adds most; as each adds no more than the
    one before, that is the optimum, or up to one rollout above it: the first two of a group may be
    split."""
    sizes = np.arange(1, LARGEST + 1)[:, None]
    added = np.diff(
        1 - rates**sizes - (1 - rates) ** sizes, axis=0
    )  # by the 2nd, 3rd, ... rollout of each prompt
    gains = np.concatenate(
        [added[:1] / 2, added[:1] / 2, added[1:]]
    ).ravel()  # the first two count together
    best = np.sort(gains)[::-1]
    return float(
        np.interp(rollouts, np.arange(len(best) + 1), np.concatenate([[0.0], np.cumsum(best)]))
    )


def replay(
    world: World,
    recipe: dict[str, Any],
    batch: BatchSettings,
    seed: int,
    *,
    first: int,
    passes: int,
    profiled: int,
) -> dict[int, Tally]:
    """What a recipe samples in `passes` passes from epoch `first` on, with the profile of the epoch
    `profiled`: a tally an epoch."""
    rng = np.random.default_rng([seed, first, 0])
    settings = params.parse(recipe["train"], TrainSettings, "train")
    module, allocate = load_strategy(recipe["allocate"])
    profile = take_profile(world, profiled, np.random.default_rng([seed, profiled, 1]))
    table = make_plan(allocate(profile, passes, rng).phases, profile)
    prompts = pl.DataFrame({"prompt_id": world.ids}).with_columns(
        source=pl.lit(""), level=pl.lit(""), prompt=pl.lit("")
    )
    slots = load_slots(settings, read_plan(table, prompts["prompt_id"], batch), prompts)
    found: dict[int, Tally] = {}
    while True:
        parts: list[Rollouts] = []
        numbers: list[Ints] = []
        rollouts: Rollouts | None = None
        epoch = first
        while request := slots.control.next(SoFar(rollouts, len(parts), 0), rng):
            epoch = first + request.pass_number
            numbers.append(request.groups(0 if rollouts is None else len(rollouts.prompts)))
            parts.append(collect(world, epoch, request, rng))
            rollouts = merge_requests(parts, numbers)
        if rollouts is None:
            break
        found[epoch] = found.get(epoch, Tally()) + tally(rollouts, slots, rng)
        slots.control.observe(rollouts)
    rates = world.pass_rates
    found = {
        e: replace(t, oracle=oracle(rates[min(e, len(rates) - 1)], t.rollouts))
        for e, t in found.items()
    }
    if module.reads_profile:
        spent = profile.select(
            (pl.col("num_samples") * pl.col("prompt_tokens") + pl.col("completion_tokens")).sum()
        )
        found[min(found)] += Tally(tokens_profiled=spent.item())
    return found


def replay_all(
    world: World,
    recipe: dict[str, Any],
    batch: BatchSettings,
    seed: int,
    *,
    passes: int,
    every: int,
) -> Tally:
    """The sum over `passes` passes from the first epoch on, with a new profile before every `every`
    of them."""
    total = Tally()
    for first in range(0, passes, every):
        num = min(every, passes - first)
        total = sum(
            replay(world, recipe, batch, seed, first=first, passes=num, profiled=first).values(),
            start=total,
        )
    return total


def with_range(values: Sequence[float]) -> str:
    """Mean, and in brackets the lowest and the highest seed."""
    return f"{np.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def compare(
    world: World,
    recipes: dict[str, dict[str, Any]],
    batch: BatchSettings,
    seeds: range,
    passes: int,
) -> str:
    """Every recipe over the same passes, profiled once, beside the first one."""
    head = ["recipe", *AMOUNTS, "charged", "mixed a charge", "spread a charge"]
    rows, base = [], None
    for name, recipe in recipes.items():
        runs = [
            replay_all(world, recipe, batch, seed, passes=passes, every=passes) for seed in seeds
        ]
        mean = [
            float(np.mean([getattr(run, key) for run in runs]))
            for key in ("charged", "mixed", "spread")
        ]
        base = base or mean
        charge = mean[0] / base[0]
        rows.append(
            [
                name,
                f"{np.mean([run.groups for run in runs]):,.0f}",
                with_range([run.mixed / run.groups for run in runs]),
                f"{1 - np.mean([run.mixed / run.oracle for run in runs]):.0%}",
                f"{np.mean([run.rollouts for run in runs]):,.0f}",
                f"{np.mean([run.tokens for run in runs]) / 1e6:.1f}",
                f"{charge:.2f}",
                *(
                    f"{value / before / charge:.2f}"
                    for value, before in zip(mean[1:], base[1:], strict=True)
                ),
            ]
        )
    return table(head, rows)


def age(
    world: World,
    recipes: dict[str, dict[str, Any]],
    batch: BatchSettings,
    seeds: range,
    ages: list[int],
) -> str:
    """Mixed groups and regret of one pass at an epoch, by a profile of the first epoch and by one
    of that epoch."""
    rows = []
    for name, recipe in recipes.items():
        for label, is_fresh in (("profile of epoch 0", False), ("of the same epoch", True)):
            cells = []
            for epoch in ages:
                runs = [
                    replay(
                        world,
                        recipe,
                        batch,
                        seed,
                        first=epoch,
                        passes=1,
                        profiled=epoch if is_fresh else 0,
                    )[epoch]
                    for seed in seeds
                ]
                mixed = np.mean([run.mixed / run.groups for run in runs])
                cells.append(
                    f"{mixed:.1%}, {1 - np.mean([run.mixed / run.oracle for run in runs]):.0%}"
                )
            rows.append([f"{name}, {label}", *cells])
    return table(["mixed, regret at epoch", *map(str, ages)], rows)


def refresh(
    world: World,
    recipes: dict[str, dict[str, Any]],
    batch: BatchSettings,
    seeds: range,
    passes: int,
    every: list[int],
) -> str:
    """What re-profiling costs and brings over the whole record."""
    rows = []
    for name, recipe in recipes.items():
        for interval in every:
            runs = [
                replay_all(world, recipe, batch, seed, passes=passes, every=interval)
                for seed in seeds
            ]
            share = np.mean(
                [Tally(tokens_profiled=run.tokens_profiled).charged / run.charged for run in runs]
            )
            rows.append(
                [
                    f"{name}, {'never' if interval >= passes else f'every {interval}'}",
                    with_range([run.mixed / run.groups for run in runs]),
                    f"{1 - np.mean([run.mixed / run.oracle for run in runs]):.0%}",
                    f"{share:.0%}",
                    f"{np.mean([1e6 * run.mixed / run.charged for run in runs]):.0f}",
                ]
            )
    head = [
        "re-profiled",
        "mixed",
        "regret",
        "profiling's share",
        "mixed groups a million tokens charged",
    ]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="*", help="all where none is named")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256, help="rollouts a step")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--window", type=int, default=5, help="epochs averaged into a pass rate; 1: as recorded"
    )
    parser.add_argument(
        "--aging", nargs="*", default=["sgpo", "filter_pods"], help="recipes of the other tables"
    )
    parser.add_argument(
        "--params", type=Path, default=PROJECT / "params.yaml", help="where the recipes stand"
    )
    chosen = parser.parse_args()
    if "WINNOW_REAL_DATA" not in os.environ:
        sys.exit(
            "set WINNOW_REAL_DATA to the folder of real data: pass rates and lengths are read from "
            "it"
        )
    world = read_world(Path(os.environ["WINNOW_REAL_DATA"]), chosen.window)
    values = params.load(chosen.params)
    batch, seeds = BatchSettings("rollouts", chosen.batch, "generated"), range(chosen.seeds)
    recipes = {name: recipe_of(values, name) for name in chosen.recipes or names(values)}
    aging = {name: recipe_of(values, name) for name in chosen.aging}
    epochs = len(world.pass_rates)
    print(
        f"{chosen.passes} passes over {len(world.ids)} prompts, profiled once, {chosen.seeds} "
        "seeds:\n"
    )
    print(compare(world, recipes, batch, seeds, chosen.passes))
    print("\nOne pass, by the age of the profile:\n")
    print(age(world, aging, batch, seeds, [0, 5, 10, 20, epochs - 1]))
    print(f"\nRe-profiled within {epochs} passes:\n")
    print(refresh(world, aging, batch, seeds, epochs, [1, 4, 11, epochs]))


if __name__ == "__main__":
    main()
