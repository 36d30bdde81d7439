"""What a plan is expected to cost and yield, before anything is trained. Training never reads
it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.allocate.visits import Compared, Visits
from tasks.common import registry
from tasks.common.ledger import Architecture, charged_flops, paper_training_flops
from tasks.common.statistics import mixed_probability

METHODS = Path(__file__).parents[1] / "train" / "methods"

Floats = npt.NDArray[np.float64]


def reading_slots(train: Mapping[str, Any]) -> list[str]:
    """The slots of a recipe's section `train` whose methods read the profile's samples."""
    return [
        slot
        for slot, spec in train.items()
        if isinstance(spec, Mapping)
        and "method" in spec
        and registry.declares(METHODS / slot / f"{spec['method']}.py", "reads_profile")
    ]


def forecast(
    compared: Compared,
    architecture: Architecture,
    *,
    reads_profile: bool,
    strategy: str,
    train: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the plan is expected to cost and yield, beside a uniform plan with its largest
    group size. `train` is the recipe's section, as params.yaml has it."""
    profiled = compared.profile.select(profiled_tokens().sum()).item()
    train = {**train, **{slot: completed(slot, train[slot]) for slot in ("select", "replay")}}

    def expected(visits: Visits, profiled: int) -> dict[str, Any]:
        return expect(visits, compared, architecture, profiled, train)

    return {
        "strategy": strategy,
        "reads_profile": reads_profile,
        "plan": expected(compared.plan, profiled if reads_profile else 0),
        "uniform": {
            **expected(compared.uniform, profiled if reading_slots(train) else 0),
            "group_size": int(compared.uniform.sizes[0]),
        },
    }


def completed(slot: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A slot's mapping with the defaults of its method, whose file is not imported."""
    return {**registry.defaults(METHODS / slot / f"{spec['method']}.py"), **spec}


def profiled_tokens() -> pl.Expr:
    """Tokens of a prompt's samples in the profile, the prompt counted with each."""
    return pl.col("num_samples").cast(pl.Int64) * pl.col("prompt_tokens") + pl.col(
        "completion_tokens"
    )


def expect(
    visits: Visits,
    compared: Compared,
    architecture: Architecture,
    profiled: int,
    train: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the expected rollouts, mixed groups, tokens and FLOPs of visits for the policy that
    was profiled, with `profiled` tokens spent on the profile.

    Mixed groups follow from each prompt's posterior pass rate, tokens from its mean length; both
    drift as the policy learns. What is updated is what `select` keeps and what is replayed, every
    epoch; the old log-probabilities of several updates are scored. A replayed group is taken as
    mixed and kept whole, and a kept part of a mixed group counts as mixed. Left out: features that
    a slot asks for, rollouts of advantage 0 that an advantage leaves out, whom control prefers, and
    the steps before a replay is full."""
    counted, profile = visits.counted, compared.profile
    num_V, sizes_V = counted["visits"].to_numpy(), counted["group_size"].to_numpy()
    mixed_V = mixed_probability(
        counted["correct"].to_numpy(), counted["graded"].to_numpy(), sizes_V, compared.prior
    )
    rollouts, mixed = int(num_V @ sizes_V), float(num_V @ mixed_V)
    tokens_V = num_V * sizes_V * counted["tokens"].to_numpy()
    select, updates = train["select"], train["updates"]
    kept_V = kept_share(sizes_V, mixed_V, select)
    tokens, kept = float(tokens_V.sum()), float(tokens_V @ kept_V)
    in_mixed = float(tokens_V @ (mixed_V if select["method"] == "mixed" else mixed_V * kept_V))
    # of every batch, beside the fresh rest of it
    share = train["replay"].get("share", 0.0)
    replayed = tokens * share / (1.0 - share) if share < 1.0 else 0.0
    if reading_slots({"replay": train["replay"]}):
        replayed = min(
            replayed, mixed_sample_tokens(visits, profile, train["replay"].get("capacity"))
        )
    updated, in_mixed = (updates["epochs"] * (part + replayed) for part in (kept, in_mixed))
    is_several = updates["epochs"] * updates["minibatches"] > 1
    fixed = charged_flops(
        architecture, generated=profiled, reference=(tokens + replayed) * is_several
    )
    return {
        "visits": visits.num,
        "prompts": int(np.count_nonzero(np.bincount(visits.rows, minlength=len(profile)))),
        "rollouts": rollouts,
        "group_size_mean": rollouts / visits.num,
        "mixed_groups": mixed,
        "mixed_rate": mixed / visits.num,
        "tokens": tokens,
        "tokens_updated": updated,
        "flops_charged": fixed + charged_flops(architecture, generated=tokens, updated=updated),
        "flops_charged_mixed": fixed
        + charged_flops(architecture, generated=tokens, updated=in_mixed),
        "flops_charged_paper": fixed
        + paper_training_flops(architecture, tokens, has_reference=False),
    }


def mixed_sample_tokens(visits: Visits, profile: pl.DataFrame, capacity: int | None) -> float:
    """Tokens of the profile's samples of the first `capacity` prompts whose groups are mixed."""
    graded = pl.col("num_samples") - pl.col("error")
    first = pl.Series(visits.rows).unique(maintain_order=True)
    prompts = profile.select("correct", graded=graded, tokens=profiled_tokens())[first]
    mixed = prompts.filter((pl.col("correct") > 0) & (pl.col("correct") < pl.col("graded")))
    return float(mixed.head(capacity or len(mixed))["tokens"].sum())


def kept_share(sizes: npt.NDArray[np.int64], mixed: Floats, select: Mapping[str, Any]) -> Floats:
    """[V] the share of each visit's rollouts that a selector is expected to keep: those of mixed
    groups, or `keep` of a group. Of other selectors nothing is known beforehand: all."""
    if select["method"] == "mixed":
        return mixed
    return np.asarray(np.minimum(sizes, select.get("keep", sizes)) / sizes)
