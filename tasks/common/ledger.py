"""What everything cost: tokens and FLOPs by phase, in accounts side by side, each by its own rule.

*charged* is what a method asks for, whatever the implementation saves: 2 P T for every generated
token, 6 P T for every token that enters the loss, 2 P T for every token scored by a reference,
where T counts prompt and completion of every rollout. *charged_mixed* is the same, but charges an
update only for rollouts that have a gradient: those whose advantage is not zero, and with a KL term
all that are kept. So nobody pays for a dead group, whichever slot leaves it out. *charged_paper* is
sGPO's flat rate (arXiv 2606.08854): 2 P T for profiling, 12 P T for training with a reference model
and 8 P T without. *executed* is what really ran: shared prompts once, what is read again after a
swap of weights or a stop, the probe of the engine after an update, dead groups skipped, padding of
the update and attention included. Left out of it: what a server samples to be identified, a few
tokens. Every account is in plain FLOPs and Float64: a 7B run overflows Int64.

P counts what multiplies a token: the weights of the linear layers, the output head among them (tied
or not), of a mixture of experts the active share; not the embedding look-up, not the norms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.common.artifacts import PHASES

ACCOUNTS = ("executed", "charged", "charged_mixed", "charged_paper")


@dataclass(frozen=True)
class Architecture:
    """The numbers of a policy that set its FLOPs, as `policy.json` holds them."""

    num_matmul_parameters: int
    num_head_parameters: int
    num_layers: int
    attention_width: int


def forward_flops(
    architecture: Architecture, num_tokens: float, num_head_tokens: float, num_pairs: float
) -> float:
    """One forward: `num_tokens` through the body, `num_head_tokens` of them through the output
    head, and attention over `num_pairs` (query, key) pairs in every layer, 4 d each (d = heads x
    head size; scores and weighted sum)."""
    body = architecture.num_matmul_parameters - architecture.num_head_parameters
    attention = 4.0 * architecture.num_layers * architecture.attention_width * num_pairs
    return (
        2.0 * body * num_tokens
        + 2.0 * architecture.num_head_parameters * num_head_tokens
        + attention
    )


def prefill_flops(architecture: Architecture, num_tokens: float) -> float:
    """A prompt of `num_tokens` read once; the output head runs on its last token only."""
    return forward_flops(architecture, num_tokens, 1.0, num_tokens * num_tokens)


def decode_flops(
    architecture: Architecture, prompt_tokens: float, completion_tokens: float
) -> float:
    """Tokens of a completion fed back one at a time (the first comes from the prefill, the last is
    not fed)."""
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
    """2 P T_generated + 6 P T_updated + 2 P T_reference, T in tokens of prompt and completion. An
    update is `update_factor` forwards: three, or less where adapters are trained."""
    num_forwards = generated + update_factor * updated + reference
    return 2.0 * architecture.num_matmul_parameters * num_forwards


def paper_training_flops(
    architecture: Architecture, num_tokens: float, *, has_reference: bool
) -> float:
    """The sGPO paper's flat charge for training: 12 P T with a reference model, 8 P T without."""
    return (12.0 if has_reference else 8.0) * architecture.num_matmul_parameters * num_tokens


def _zeros() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass
class Ledger:
    """Running totals by phase: one mapping an account, and tokens and rollouts beside them."""

    executed: dict[str, float] = field(default_factory=_zeros)
    charged: dict[str, float] = field(default_factory=_zeros)
    charged_mixed: dict[str, float] = field(default_factory=_zeros)
    charged_paper: dict[str, float] = field(default_factory=_zeros)
    tokens: dict[str, float] = field(default_factory=_zeros)
    rollouts: dict[str, float] = field(default_factory=_zeros)

    def add(self, phase: str, **amounts: float) -> None:
        """Add `executed=`, `charged=` and so on (FLOPs), `tokens=`, `rollouts=` to
        `phase`."""
        if phase not in PHASES:
            raise KeyError(f"unknown phase {phase!r}; phases: {', '.join(PHASES)}")
        for account, amount in amounts.items():
            getattr(self, account)[phase] += float(amount)

    def total(self, account: str) -> float:
        """The sum of one account over the phases."""
        return float(np.sum(list(getattr(self, account).values())))

    def as_dict(self) -> dict[str, Any]:
        """For `flops.json` and checkpoints: each account by phase, with its total."""
        return {
            name: {**getattr(self, name), "total": self.total(name)}
            for name in (*ACCOUNTS, "tokens", "rollouts")
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Mapping[str, float]]) -> "Ledger":
        """The inverse of `as_dict`."""
        return cls(
            **{
                name: {p: float(value[name][p]) for p in PHASES}
                for name in (*ACCOUNTS, "tokens", "rollouts")
            }
        )
