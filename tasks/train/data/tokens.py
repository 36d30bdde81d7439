"""The completion tokens of a micro-batch, one after another, and sums and averages over them.

Legend: N tokens, B rollouts of the micro-batch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from tasks.train.data.rollouts import StepTotals

if TYPE_CHECKING:
    import torch

Normalize = Literal["token", "sequence", "constant", "prompt"]
Level = Literal["token", "sequence"]
Gains: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # [N] objectives, [N] whether clipped


@dataclass(frozen=True)
class Tokens:
    """The input of a loss. `row_N` is the index of each token's rollout among the B, and `group_B`
    is each rollout's group in the step, which only `normalize: prompt` reads.

    `logprobs_N` are the policy's and carry the gradient. `old_logprobs_N` are the denominator of
    the ratio that PPO clips: the old policy's, or with `ratio_to: sampler` the sampler's.
    `weights_N` correct for the difference between old policy and sampler; they are constants.
    `reference_logprobs_N` are the reference's, None without one. `marked_N` marks the tokens that
    the loss chose among all tokens of the update (`Loss.marks`), None if it never chooses.
    `sampler_logprobs_N` are the sampler's.
    """

    logprobs_N: "torch.Tensor"
    old_logprobs_N: "torch.Tensor"
    weights_N: "torch.Tensor"
    advantages_N: "torch.Tensor"
    row_N: "torch.Tensor"
    num_rows: int
    reference_logprobs_N: "torch.Tensor | None" = None
    marked_N: "torch.Tensor | None" = None
    group_B: "torch.Tensor | None" = None
    sampler_logprobs_N: "torch.Tensor | None" = None

    def by_row(self, values_N: "torch.Tensor") -> "torch.Tensor":
        """Return [B] the sum of each rollout's values."""
        return values_N.new_zeros(self.num_rows).index_add(0, self.row_N, values_N)

    def length_B(self) -> "torch.Tensor":
        """Return [B] the number of tokens of each rollout."""
        # not by bincount, which makes the host wait for a GPU
        return self.by_row(self.row_N.new_ones(len(self.row_N)))


def average(
    values_N: "torch.Tensor", tokens: Tokens, totals: StepTotals, normalize: Normalize
) -> "torch.Tensor":
    """Return the micro-batch's share of the step's average of `values_N`.

    - `token`: over all tokens of the step (DAPO, arXiv 2503.14476)
    - `sequence`: over each completion, then over rollouts (GRPO, arXiv 2402.03300, and GSPO)
    - `constant`: the sum / (rollouts * token limit) (Dr. GRPO, arXiv 2503.20783: no length bias)
    - `prompt`: over the tokens of each group, then over groups (sGPO, arXiv 2606.08854)
    """
    if normalize == "prompt":
        assert totals.divisor_Q is not None
        assert tokens.group_B is not None
        return (tokens.by_row(values_N) / totals.divisor_Q[tokens.group_B]).sum()
    if normalize == "sequence":
        return (tokens.by_row(values_N) / tokens.length_B()).sum() / totals.num_rollouts
    in_tokens = totals.num_tokens, totals.num_rollouts * totals.max_tokens
    return values_N.sum() / in_tokens[normalize == "constant"]
