"""The columns of a table of rollouts, and lists of tokens as flat arrays.

Legend: B rollouts, N completion tokens of all of them, one rollout after another."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

UNFINISHED = "abort"  # the finish reason of a stopped, unfinished completion, as in engines
INTS, FLOATS, BOOLS = pl.List(pl.Int64), pl.List(pl.Float64), pl.List(pl.Boolean)
ARROW = {INTS: pa.int64(), FLOATS: pa.float64(), BOOLS: pa.bool_()}  # element types of the lists
COLUMNS: dict[str, Any] = {
    "group": pl.Int64,  # the rollout's group within the step
    "prompt_row": pl.Int64,  # the prompt's row among the training prompts
    "prompt": INTS,  # its token ids
    "since": pl.Int64,  # the first step in which its group was in flight, -1 before that
    "seed": pl.Int64,
    "token_ids": INTS,  # of the completion, or of its sampled part
    "logprobs": FLOATS,  # the sampler's
    "versions": INTS,  # the version (number of updates) of the policy that sampled each token
    "is_action": BOOLS,  # False for tokens of an environment, not trained on; null: there are none
    "reason": pl.String,  # of finishing, UNFINISHED before that
    "text": pl.String,
    "outcome": pl.String,
    "reward": pl.Float64,
    "scores": pl.String,  # the parts of a composite reward by name, as JSON
    "replayed": pl.Boolean,  # from an earlier step, or from the profile
    "kept": pl.Boolean,  # whether it enters the loss
    "advantages": FLOATS,  # of its tokens, 0 for tokens without an advantage
    "old_logprobs": FLOATS,  # of the old policy; null if that is the present policy
}
EMPTY: dict[str, Any] = {
    "since": -1,
    "seed": 0,
    "is_action": None,
    "reason": UNFINISHED,
    "text": "",
    "outcome": "",
    "reward": 0.0,
    "scores": "{}",
    "replayed": False,
    "kept": True,
    "advantages": None,
    "old_logprobs": None,
}
"""The values of a rollout before sampling, except those of its group, prompt and tokens."""
OF_TOKENS = ("token_ids", "logprobs", "versions", "is_action", "advantages", "old_logprobs")
"""The columns with a value for each completion token."""
OWN_TOKENS = pl.coalesce("is_action", pl.lit(True).repeat_by(pl.col("token_ids").list.len()))


def with_values(table: pl.DataFrame, values: Mapping[str, Any]) -> pl.DataFrame:
    """Return the table with new values in some columns: a list, an array or one value each."""
    columns = {each.name: each for each in table.get_columns()}
    for name, value in values.items():
        if isinstance(value, list | np.ndarray | pl.Series):
            columns[name] = column(name, value)
        else:
            columns[name] = column(name, [value]).new_from_index(0, len(table))
    return pl.DataFrame(list(columns.values()))  # not by expressions, which cost a thread pool each


def column(name: str, values: Any) -> pl.Series:
    """Return the column `name` of COLUMNS, from a list, an array or another column."""
    dtype = COLUMNS[name]
    if dtype in ARROW and not isinstance(values, pl.Series):
        # by Arrow: Polars converts every inner list separately, which takes five times as long
        values = pa.array(values, pa.large_list(ARROW[dtype]))
    return pl.Series(name, values, dtype)


def flat(lists: pl.Series) -> "np.ndarray":
    """Return the values of a column of lists, one after another."""
    values: np.ndarray = lists.to_arrow().flatten().to_numpy(zero_copy_only=False, writable=True)
    return values


def lengths_of(lists: pl.Series) -> Ints:
    return np.diff(lists.to_arrow().offsets.to_numpy())


def spans(starts_B: Ints, lengths_B: Ints) -> Ints:
    """Return [N] the indices in all spans, one span after another: start, start + 1, ..."""
    before = np.cumsum(lengths_B) - lengths_B
    return np.asarray(np.arange(lengths_B.sum()) + np.repeat(starts_B - before, lengths_B))


def nested(values_N: "np.ndarray", lengths_B: Ints) -> pl.Series:
    """Return a column of lists of these lengths; the inverse of `flat`."""
    offsets = np.concatenate([[0], np.cumsum(lengths_B)])
    return pl.Series(pa.LargeListArray.from_arrays(offsets, values_N))
