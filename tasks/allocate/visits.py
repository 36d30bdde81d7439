"""Visit counts of a plan and of a uniform plan, by the prompt's (correct, graded) and group size.
Prompts are identified by their row in the profile, because comparing millions of ids is slow."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.statistics import fit_beta

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint32]

COUNTS = ["correct", "graded"]


@dataclass(frozen=True)
class Visits:
    """A list of visits, repeated `times` times: the prompts' `rows` in the profile and the group
    `sizes`, each [num_visits]. `counted` has a row per distinct (correct, graded, group_size): the
    number of `visits`, with repetitions, and the mean `tokens` of a rollout."""

    rows: Rows
    sizes: Ints
    times: int
    counted: pl.DataFrame

    @property
    def num(self) -> int:
        """The number of visits, repetitions included."""
        return len(self.rows) * self.times


@dataclass(frozen=True)
class Compared:
    """The visits of a `plan`, of a `uniform` plan with the same largest group size and number of
    passes, and of the profile's sampling; and the Beta `prior` (a, b) of the pass rates."""

    profile: pl.DataFrame
    plan: Visits
    uniform: Visits
    samples: Visits
    prior: tuple[float, float]


def compare(plan: pl.DataFrame, profile: pl.DataFrame) -> Compared:
    """Count the visits of a plan (columns row, group_size, pass), of a uniform plan and of the
    profile's sampling. This reduces millions of prompts to a few dozen rows."""
    passes = int(plan["pass"].max()) + 1  # type: ignore[arg-type]
    prompts, mean = prompts_of(profile), pl.col("tokens").mean()
    every = prompts.group_by(*COUNTS, "num_samples").agg(mean, prompts=pl.len()).sort(pl.all())
    largest = pl.lit(plan["group_size"].max(), pl.Int64)
    uniform = every.with_columns(group_size=largest, visits=pl.col("prompts") * passes)
    samples = every.with_columns(group_size=pl.col("num_samples"), visits=pl.col("prompts"))
    visited = prompts[plan["row"]].with_columns(group_size=plan["group_size"].cast(pl.Int64))
    counted = visited.group_by(*COUNTS, "group_size").agg(mean, visits=pl.len()).sort(pl.all())
    rows = np.arange(len(profile), dtype=np.uint32)
    sizes = prompts["num_samples"].to_numpy()
    return Compared(
        profile,
        Visits(plan["row"].to_numpy(), visited["group_size"].to_numpy(), 1, counted),
        Visits(rows, np.full_like(sizes, plan["group_size"].max()), passes, uniform),
        Visits(rows, sizes, 1, samples),
        fit_beta(every["correct"], every["graded"], every["prompts"]),
    )


def by_prompt(visits: Visits, profile: pl.DataFrame, rows: Rows) -> pl.DataFrame:
    """Return the visits to the prompts in these profile `rows`, one row per prompt and group size:
    the prompt's index in `rows` (`prompt`), counts and tokens, and the number of `visits`."""
    place = np.full(len(profile), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    prompts = place[visits.rows]
    chosen = prompts >= 0
    found = pl.DataFrame({"prompt": prompts[chosen], "group_size": visits.sizes[chosen]})
    counted = found.group_by("prompt", "group_size").agg(visits=pl.len() * visits.times)
    counted = counted.sort("prompt", "group_size")
    return counted.hstack(prompts_of(profile[rows])[counted["prompt"]])


def prompts_of(profile: pl.DataFrame) -> pl.DataFrame:
    """Return a row per prompt, in the profile's order: its counts, its mean tokens per rollout, and
    those of the prompt."""
    return profile.select(
        "correct",
        graded=pl.col("num_samples") - pl.col("error"),
        num_samples=pl.col("num_samples").cast(pl.Int64),
        tokens=pl.col("prompt_tokens") + pl.col("completion_tokens") / pl.col("num_samples"),
        prompt_tokens="prompt_tokens",
    )
