"""The costs of a run: tokens and FLOPs by phase, in parallel accounts, each with its own rule.

*charged* is the cost of what a method requests, whatever the implementation saves: 2 P T to
generate rollouts, 6 P T to train on them, 2 P T to score them with a reference model, where T is
the number of their tokens, prompts included. *charged_mixed* is the same, but charges an update
only for rollouts with a gradient: rollouts with a non-zero advantage or, with a reference model or
an entropy bonus, all kept rollouts. So the update of a group without a gradient is free, whichever
slot excludes it. The few operations per logit of the entropy bonus and the softmax are not counted:
they are negligible beside the 6 D operations that a logit costs in an update (D: hidden size).
*charged_paper* is sGPO's flat rate (arXiv 2606.08854): 2 P T for profiling, 12 P T for training
with a reference model and 8 P T without. *executed* is the actual computation. Shared prompts count
once, and groups that the update skips do not count. This account includes attention, the padding of
updates, the engine's probe after an update, and tokens read again after a swap of weights or a
stop. It excludes the few tokens that a server samples for its identification. Every account is in
plain FLOPs, as Float64, because the FLOPs of a 7B run would overflow Int64.

P counts the parameters that multiply a token: the weights of the linear layers, including the
output head (tied or not), and the active share of a mixture of experts; not the embedding look-up
or the norms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.common.artifacts import PHASES

ACCOUNTS = ("executed", "charged", "charged_mixed", "charged_paper")


@dataclass(frozen=True)
class Architecture:
    """The numbers of a policy that determine its FLOPs, as stored in `policy.json`."""

    num_matmul_parameters: int
    num_head_parameters: int
    num_layers: int
    attention_width: int


def forward_flops(
    architecture: Architecture, num_tokens: float, num_head_tokens: float, num_pairs: float
) -> float:
    """Return the FLOPs of one forward pass: `num_tokens` through the body, `num_head_tokens` of
    them through the output head, and attention over `num_pairs` (query, key) pairs in every layer,
    which costs 4 d per pair for scores and weighted sum (d = heads x head size)."""
    body = architecture.num_matmul_parameters - architecture.num_head_parameters
    attention = 4.0 * architecture.num_layers * architecture.attention_width * num_pairs
    return (
        2.0 * body * num_tokens
        + 2.0 * architecture.num_head_parameters * num_head_tokens
        + attention
    )


def prefill_flops(architecture: Architecture, num_tokens: float) -> float:
    """Return the FLOPs to prefill a prompt: attention on all pairs, the head on the last token."""
    return forward_flops(architecture, num_tokens, 1.0, num_tokens * num_tokens)


def decode_flops(
    architecture: Architecture, prompt_tokens: float, completion_tokens: float
) -> float:
    """Return the FLOPs of decoding a completion, one token at a time (the first token comes from
    the prefill, and the last is not fed back)."""
    fed = max(completion_tokens - 1.0, 0.0)
    return forward_flops(architecture, fed, fed, fed * prompt_tokens + fed * (fed + 1.0) / 2.0)


def charged_flops(
    architecture: Architecture,
    *,
    generated: float = 0.0,
    updated: float = 0.0,
    reference: float = 0.0,
    update_factor: float = 3.0,
) -> float:
    """Return 2 P T_generated + 6 P T_updated + 2 P T_reference, with T in tokens, prompts included.
    An update costs `update_factor` forward passes: three, or less if adapters are trained."""
    num_forwards = generated + update_factor * updated + reference
    return 2.0 * architecture.num_matmul_parameters * num_forwards


def paper_training_flops(
    architecture: Architecture, num_tokens: float, *, has_reference: bool
) -> float:
    """Return sGPO's flat charge for training: 12 P T with a reference model, 8 P T without."""
    return (12.0 if has_reference else 8.0) * architecture.num_matmul_parameters * num_tokens


def _zeros() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass
class Ledger:
    """Running totals by phase: one mapping per account, and the tokens and rollouts."""

    executed: dict[str, float] = field(default_factory=_zeros)
    charged: dict[str, float] = field(default_factory=_zeros)
    charged_mixed: dict[str, float] = field(default_factory=_zeros)
    charged_paper: dict[str, float] = field(default_factory=_zeros)
    tokens: dict[str, float] = field(default_factory=_zeros)
    rollouts: dict[str, float] = field(default_factory=_zeros)

    def add(self, phase: str, **amounts: float) -> None:
        """Add `executed=`, `charged=` and so on (FLOPs), `tokens=` and `rollouts=` to the totals of
        `phase`. Raise KeyError for an unknown phase."""
        if phase not in PHASES:
            raise KeyError(f"unknown phase {phase!r}; phases: {', '.join(PHASES)}")
        for account, amount in amounts.items():
            getattr(self, account)[phase] += float(amount)

    def total(self, account: str) -> float:
        return float(np.sum(list(getattr(self, account).values())))

    def as_dict(self) -> dict[str, Any]:
        """Return each account by phase, with its total, for `flops.json` and checkpoints."""
        return {
            name: {**getattr(self, name), "total": self.total(name)}
            for name in (*ACCOUNTS, "tokens", "rollouts")
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Mapping[str, float]]) -> "Ledger":
        return cls(
            **{
                name: {p: float(value[name][p]) for p in PHASES}
                for name in (*ACCOUNTS, "tokens", "rollouts")
            }
        )
