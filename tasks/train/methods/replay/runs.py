"""`runs`: train on groups of finished runs along with fresh ones (the shared rollouts of SAPO,
arXiv 2509.08721).

`folders` are the results of runs on some of the same prompts, with a policy of the same vocabulary.
Their mixed groups, except groups that the runs had replayed, form a pool; `share` of every batch is
drawn from it uniformly, and fewer rollouts are sampled. The loss's weights correct for the other
policy (`train.correction`), with the log-probabilities of the engine that sampled (the published
code uses a ratio of 1). Only training on these rollouts is charged. Their generation was charged to
their own run, which the report names. A run that is still training cannot be a source: results
would depend on the clock."""

from pathlib import Path

import numpy as np
import polars as pl

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.files import ArtifactError
from tasks.common.params import settings, share
from tasks.train.data.groups import mixed_groups
from tasks.train.data.prompts import Prompts, rows_of
from tasks.train.data.rollouts import Rollouts, make_rollouts, merge
from tasks.train.methods.replay.kept import drawn
from tasks.train.settings import BatchSettings
from tasks.train.slots import Replay

encodes_prompts = True
COLUMNS = [
    *("step", "group", "prompt_id", "outcome", "reward", "finish_reason", "token_ids"),
    *("sampler_logprobs", "is_action"),
]
UNKNOWN = -1  # the version of a token of another run


@settings
class Settings:
    folders: list[str]  # such as data/runs/grpo/0/train; none: all rollouts are fresh
    share: float = 0.5  # of a batch

    def __post_init__(self) -> None:
        share(train__replay__share=self.share)


EXAMPLE = Settings(folders=[])


class Method(Replay):
    def __init__(self, settings: Settings, prompts: Prompts) -> None:
        self.settings, nothing = settings, np.zeros(0, dtype=np.int64)
        found = [groups_of(Path(folder).expanduser(), prompts) for folder in settings.folders]
        self.pool = merge([make_rollouts(nothing, [], nothing), *found])

    def room(self, batch: BatchSettings, promised: int = 0) -> int:
        """Return the share of the batch; 0 without a pool."""
        return int(self.settings.share * batch.size) * bool(self.settings.folders)

    def draw(self, rng: np.random.Generator, room: int, batch: BatchSettings) -> Rollouts | None:
        return drawn(self.pool, rng, room, batch)


def groups_of(folder: Path, prompts: Prompts) -> Rollouts:
    """Return the mixed groups of a run's record whose prompts are training prompts here. Raise
    ArtifactError if there is none."""
    path, is_known = folder / "rollouts.parquet", pl.col("prompt_id").is_in(prompts.ids.implode())
    where = is_known & ~pl.col("replayed") & (pl.col("outcome") != "error")
    rows = TRAIN_ROLLOUTS.read_columns(path, COLUMNS, where)
    group = pl.struct("step", "group").rank("dense").cast(pl.Int64) - 1
    rows = rows.with_columns(group=group).sort("group", maintain_order=True)
    group_B = rows["group"].to_numpy()
    is_mixed_Q = mixed_groups(rows["reward"].to_numpy(), group_B, rows["group"].n_unique())
    if not is_mixed_Q.any():
        raise ArtifactError(
            f"{path}: no group of a training prompt has both outcomes: train.replay.folders needs "
            "finished runs on these prompts"
        )
    rows = rows.filter(pl.Series(is_mixed_Q[group_B]))
    _, first_Q, group_B = np.unique(rows["group"], return_index=True, return_inverse=True)
    rows_Q = rows_of(rows["prompt_id"][first_Q], prompts.ids, str(path))
    versions = pl.lit(UNKNOWN).repeat_by(pl.col("token_ids").list.len())
    return make_rollouts(
        rows_Q,
        prompts.token_ids(rows_Q),
        group_B,
        token_ids=rows["token_ids"],
        logprobs=rows["sampler_logprobs"],
        versions=rows.select(versions).to_series(),
        is_action=rows["is_action"],
        reason=rows["finish_reason"],
        outcome=rows["outcome"],
        reward=rows["reward"],
        replayed=True,
    )
