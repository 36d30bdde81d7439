"""The cost of rollouts in the account of a budget, computed from their lengths by fixed rules.

A run ends when its budget is spent, so this cost must not depend on the engine, the packing or the
machine. In the account `executed`, generation reads a prompt once per group and decodes completions
token by token from a KV cache. Every pass (scoring, reference, update) reads each completion once
and each prompt once per group, or per rollout for features that cannot share prompts
(`reads_whole_rows`). A backward pass counts as two forward passes, less with adapters, and does not
count for prompts without a gradient. Recomputed activations, probes, and padding count as zero,
except the padding of features with hidden states. `charged` and `charged_mixed` follow the ledger:
2 P for every token of every rollout and pass. `rollouts` and `tokens` count only generation: the
rollouts, or their tokens with prompts. The actual computation is the ledger's account `executed`.

Legend: B rollouts, Q groups."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.accounting.ledger import Architecture, charged_flops, forward_flops
from tasks.common.checksums import read_checked, write_checked

Ints = npt.NDArray[np.int64]
LENGTHS = ("prompt_id", "prompt_tokens", "completion_tokens")  # columns that `rows_in` reads
GENERATED = ("rollouts", "tokens")  # accounts in which only generation counts


@dataclass(frozen=True)
class CellBudget:
    """The budget of a cell in `account`, and the amount that its profile cost: 0 for a recipe that
    does not read the profile. For example CellBudget("executed", 6.0e11, 8.1e10)."""

    account: str
    amount: float
    profile: float

    def write(self, path: Path) -> None:
        """Write the budget of a cell, which `allocate` passes to `train`."""
        write_checked(path, {"budget": asdict(self)})


def read_budget(path: Path) -> CellBudget | None:
    """Return the budget that `allocate` wrote, or None for a cell that trains on its whole plan."""
    found = read_checked(path)["budget"]
    return None if found is None else CellBudget(**found)


@dataclass(frozen=True)
class Rows:
    """The lengths of rollouts: arrays [B] of each rollout's group, prompt tokens and completion
    tokens (counts). Rows([0, 0], [9, 9], [2, 3]) has two rollouts of one prompt of 9 tokens."""

    group_B: Ints
    prompt_tokens_B: Ints
    completion_tokens_B: Ints

    @property
    def num_tokens(self) -> float:
        """Return the tokens of all rollouts, each with its prompt."""
        return float(self.prompt_tokens_B.sum() + self.completion_tokens_B.sum())

    def apart(self) -> "Rows":
        """Return the same rollouts, each in a separate group, so that none shares a prompt."""
        return replace(self, group_B=np.arange(len(self.group_B)))

    def padded(self) -> "Rows":
        """Return the same rollouts, padded to the length of the longest. The padding of each is
        added to the length of its prompt."""
        lengths_B = self.prompt_tokens_B + self.completion_tokens_B
        return replace(self, prompt_tokens_B=lengths_B.max(initial=0) - self.completion_tokens_B)

    @property
    def prompt_tokens_Q(self) -> Ints:
        """Return [Q] the number of tokens of each group's prompt."""
        return self.prompt_tokens_B[np.unique(self.group_B, return_index=True)[1]]


def rows_in(table: pl.DataFrame) -> Rows:
    """Return the lengths in a ROLLOUTS table, with all rollouts of a prompt in one group."""
    groups = table["prompt_id"].rank("dense").to_numpy()
    prompt_tokens, completion_tokens = (
        table[name].cast(pl.Int64).to_numpy() for name in LENGTHS[1:]
    )
    return Rows(groups, prompt_tokens, completion_tokens)


def generation_cost(account: str, architecture: Architecture, rows: Rows) -> float:
    """Return the cost of generating the rollouts, in the unit of `account`."""
    if account == "rollouts":
        return float(len(rows.group_B))
    if account == "tokens":
        return rows.num_tokens
    if account != "executed":
        return charged_flops(architecture, generated=rows.num_tokens)
    prompts, completions = rows.prompt_tokens_Q, rows.completion_tokens_B
    prefill = forward_flops(
        architecture, float(prompts.sum()), float(len(prompts)), float((prompts**2).sum())
    )
    fed = np.maximum(completions - 1, 0)  # the first comes from the prefill, the last is not fed
    num_fed = float(fed.sum())
    return prefill + forward_flops(
        architecture, num_fed, num_fed, num_pairs(rows.prompt_tokens_B, fed)
    )


def pass_cost(account: str, architecture: Architecture, rows: Rows) -> float:
    """Return the cost, in the unit of `account`, of one forward pass that computes the
    log-probabilities of the completions; 0 in the accounts `rollouts` and `tokens`."""
    if account in GENERATED:
        return 0.0
    if account != "executed":
        return charged_flops(architecture, reference=rows.num_tokens)
    prompts, completions = rows.prompt_tokens_Q, rows.completion_tokens_B
    num_read, num_targets = float(prompts.sum() + completions.sum()), float(completions.sum())
    pairs = float((prompts**2).sum()) + num_pairs(rows.prompt_tokens_B, completions)
    return forward_flops(architecture, num_read, num_targets, pairs)


def prompt_cost(account: str, architecture: Architecture, rows: Rows) -> float:
    """Return the part of `pass_cost` that is due to the prompts, in the unit of `account`."""
    if account in GENERATED:
        return 0.0
    if account != "executed":
        return charged_flops(architecture, reference=float(rows.prompt_tokens_B.sum()))
    prompts = rows.prompt_tokens_Q
    return forward_flops(architecture, float(prompts.sum()), 0.0, float((prompts**2).sum()))


def num_pairs(prompt_tokens_B: Ints, completion_tokens_B: Ints) -> float:
    """Return the number of pairs (completion token, preceding token or itself)."""
    completions = completion_tokens_B.astype(np.float64)
    return float((completions * prompt_tokens_B + completions * (completions + 1.0) / 2.0).sum())
