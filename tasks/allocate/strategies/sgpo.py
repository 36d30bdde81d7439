"""`sgpo`: sorted Group Policy Optimization (arXiv 2606.08854, sections on filtering, group size and
curriculum).

Trivial prompts (pass rate above `trivial_above`) are dropped. Of the prompts never solved, a random
share `unsolved_rate` is kept. Every other prompt gets G = 1 / pass rate, rounded down to one of
`buckets` (at least the smallest). A pass goes through the buckets in order, easy to hard, and the
kept unsolved prompts are mixed into the phase of every bucket, with its group size. With 8 samples
(buckets 2, 4, 8; `trivial_above` 0.75), 0 to 8 successes give: unsolved, 8, 4, 2, 2, 2, 2, trivial,
trivial. Not done here: re-profiling between passes (the paper found it worse)."""

import numpy as np
import polars as pl

from tasks.allocate.planning import Allocation, decide, phase, shuffled, solved_words

reads_profile = True


def allocate(
    profile: pl.DataFrame,
    passes: int,
    rng: np.random.Generator,
    *,
    trivial_above: float,
    unsolved_rate: float,
    buckets: list[int],
) -> Allocation:
    """Return the visits of every pass, phase by phase, and the decision about every prompt."""
    sizes = sorted(buckets)
    known = profile.select("row", "pass_rate", "correct", "num_samples", "error")
    graded = known.filter(pl.col("pass_rate").is_not_null())
    trivial = graded.filter(pl.col("pass_rate") > trivial_above)
    unsolved = graded.filter(pl.col("correct") == 0)
    learnable = graded.filter((pl.col("correct") > 0) & (pl.col("pass_rate") <= trivial_above))
    learnable = learnable.with_columns(group_size=group_sizes(learnable, sizes))
    num_kept = round(unsolved_rate * len(unsolved))
    order = rng.permutation(len(unsolved))
    kept, left = (
        unsolved["row"].gather(np.sort(part)) for part in (order[:num_kept], order[num_kept:])
    )
    clusters = [learnable.filter(pl.col("group_size") == size)["row"] for size in sizes]
    visits = [
        phase(number, shuffled(pl.concat([cluster, kept]), rng), size)
        for number in range(passes)
        for size, cluster in zip(sizes, clusters, strict=True)
    ]
    share = f"random {unsolved_rate:.0%}"
    decided = [
        (known.filter(pl.col("pass_rate").is_null())["row"], "ungraded", 0, "no valid grade"),
        (trivial["row"], "trivial", 0, f"solved more often than {trivial_above:.0%}: dropped"),
        (left, "unsolved_dropped", 0, f"never solved, not in the {share} kept"),
        (kept, "unsolved_kept", sizes[-1], f"never solved, in the {share} kept for every phase"),
    ]
    decided += [
        (cluster, "learnable", size, f"{solved_words(size, sizes)}: groups of {size}")
        for size, cluster in zip(sizes, clusters, strict=True)
    ]
    decisions = pl.concat([decide(profile, *each) for each in decided])
    return Allocation(visits, decisions)


def group_sizes(learnable: pl.DataFrame, sizes: list[int]) -> pl.Series:
    """Return for each prompt the largest bucket g with g x pass rate <= 1, or the smallest bucket
    if there is none. The comparison uses integers, so that 1/8 gives exactly 8."""
    graded = pl.col("num_samples") - pl.col("error")
    # the condition is always true: a literal alone would be a single row
    chosen = pl.when(graded >= 0).then(sizes[0]).otherwise(None)
    for size in sizes[1:]:
        chosen = pl.when(size * pl.col("correct") <= graded).then(size).otherwise(chosen)
    return learnable.select(chosen.cast(pl.Int32).alias("group_size"))["group_size"]
