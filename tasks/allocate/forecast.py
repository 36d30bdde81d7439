"""The expected cost and yield of a plan, computed before training. Training does not read it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.allocate.visits import Compared, Visits
from tasks.common.accounting.ledger import Architecture, charged_flops, paper_training_flops
from tasks.common.statistics import mixed_probability
from tasks.train.needs import (
    declared,
    has_bonus,
    num_scorings,
    profile_readers,
    reference_parameters,
)
from tasks.train.settings import TrainSettings

Floats = npt.NDArray[np.float64]


def forecast(
    compared: Compared,
    architecture: Architecture,
    *,
    reads_profile: bool,
    strategy: str,
    train: TrainSettings,
) -> dict[str, Any]:
    """Return the expected cost and yield of the compared plan, and of a uniform plan with the
    largest group size. `train` is the recipe's section."""
    profiled = compared.profile.select(profiled_tokens().sum()).item()
    shared, is_read = (compared, architecture, train), bool(profile_readers(train))
    return {
        "strategy": strategy,
        "reads_profile": reads_profile,
        "plan": expect(compared.plan, profiled * reads_profile, *shared),
        "uniform": {
            **expect(compared.uniform, profiled * is_read, *shared),
            "group_size": int(compared.uniform.sizes[0]),
        },
    }


def profiled_tokens() -> pl.Expr:
    """Return the expression for a prompt's profiled tokens. Each sample includes the prompt."""
    return pl.col("num_samples").cast(pl.Int64) * pl.col("prompt_tokens") + pl.col(
        "completion_tokens"
    )


def expect(
    visits: Visits,
    profiled: int,
    compared: Compared,
    architecture: Architecture,
    train: TrainSettings,
) -> dict[str, Any]:
    """Return the expected rollouts, mixed groups, tokens and FLOPs of visits for the policy that
    was profiled, with `profiled` tokens spent on the profile.

    Mixed groups follow from each prompt's posterior pass rate, and tokens from its mean length.
    Both drift as the policy learns. Every epoch trains on the rollouts that `select` keeps and on
    replayed ones; a reference reads each once. With a reference or entropy bonus, every rollout has
    a gradient. With several updates, the old log-probabilities are computed first. A replayed group
    counts as mixed and whole, and a kept part of a mixed group counts as mixed. Not modelled:
    features requested by a slot, zero advantages that a method excludes, prompts that `control`
    prefers, stored rollouts that join groups, and the steps before a replay buffer is full."""
    counted, profile = visits.counted, compared.profile
    num_V, sizes_V = counted["visits"].to_numpy(), counted["group_size"].to_numpy()
    mixed_V = mixed_probability(
        counted["correct"].to_numpy(), counted["graded"].to_numpy(), sizes_V, compared.prior
    )
    rollouts, mixed = int(num_V @ sizes_V), float(num_V @ mixed_V)
    tokens_V = num_V * sizes_V * counted["tokens"].to_numpy()
    updates, replay = train.updates, train.replay
    kept_V, in_mixed_V = kept_shares(sizes_V, mixed_V, train.select)
    tokens, kept = float(tokens_V.sum()), float(tokens_V @ kept_V)
    parameters = reference_parameters(train, architecture.num_matmul_parameters)
    is_all = parameters > 0 or has_bonus(train)
    in_mixed = float(tokens_V @ (kept_V if is_all else in_mixed_V))
    share = replay.get("share", 0.0)  # of every batch; the rest is fresh
    replayed = tokens * share / (1.0 - share) if share < 1.0 else 0.0
    if declared("replay", replay, "reads_profile"):
        replayed = min(replayed, mixed_sample_tokens(visits, profile, replay.get("capacity")))
    updated, in_mixed = (updates.epochs * (part + replayed) for part in (kept, in_mixed))
    scored = (tokens + replayed) * num_scorings(train)
    read = 2.0 * parameters * (kept + replayed)
    warm = num_demonstrations(train) * tokens / rollouts
    fixed = read + charged_flops(architecture, generated=profiled, updated=warm, reference=scored)
    is_own = parameters > 0 and train.reference.source is None  # part of the flat rate
    factor = update_factor(visits, profile, tokens, train)
    return {
        "visits": visits.num,
        "prompts": int(np.count_nonzero(np.bincount(visits.rows, minlength=len(profile)))),
        "rollouts": rollouts,
        "group_size_mean": rollouts / visits.num,
        "mixed_groups": mixed,
        "mixed_rate": mixed / visits.num,
        "tokens": tokens,
        "tokens_updated": updated + warm,
        "flops_charged": fixed
        + charged_flops(architecture, generated=tokens, updated=updated, update_factor=factor),
        "flops_charged_mixed": fixed
        + charged_flops(architecture, generated=tokens, updated=in_mixed, update_factor=factor),
        "flops_charged_paper": fixed
        - read * is_own
        + paper_training_flops(architecture, tokens, has_reference=is_own),
    }


def update_factor(
    visits: Visits, profile: pl.DataFrame, tokens: float, train: TrainSettings
) -> float:
    """Return the cost of training on the visits' `tokens`, in forward passes over them."""
    if train.prompt_gradient:
        return 3.0
    lengths = profile["prompt_tokens"].to_numpy()[visits.rows]
    return 3.0 - 2.0 * visits.times * float(visits.sizes @ lengths) / tokens


def mixed_sample_tokens(visits: Visits, profile: pl.DataFrame, capacity: int | None) -> float:
    """Return the profiled tokens of the first `capacity` mixed prompts visited (None: of all)."""
    graded = pl.col("num_samples") - pl.col("error")
    first = pl.Series(visits.rows).unique(maintain_order=True)
    prompts = profile.select("correct", graded=graded, tokens=profiled_tokens())[first]
    mixed = prompts.filter((pl.col("correct") > 0) & (pl.col("correct") < pl.col("graded")))
    return float(mixed.head(capacity or len(mixed))["tokens"].sum())


def num_demonstrations(train: TrainSettings) -> int:
    """Return the number of completions that a recipe's warm start imitates, with repetition. Each
    is assumed to be as long as a rollout."""
    warm = train.warm_start
    return warm.steps * warm.batch_size if warm else 0


def kept_shares(
    sizes: npt.NDArray[np.int64], mixed: Floats, select: Mapping[str, Any]
) -> tuple[Floats, Floats]:
    """Return, for V rows of visits, the expected share [V] of rollouts that a selector keeps, and
    the share [V] that it keeps in mixed groups. It keeps `keep` per group (by default all). A
    selector that is `mixed` or has `drop_dead` keeps none of a group with equal rewards."""
    share = np.minimum(sizes, select.get("keep", sizes)) / sizes
    drops_dead = select["method"] == "mixed" or select.get("drop_dead")
    return share * mixed if drops_dead else share, share * mixed
