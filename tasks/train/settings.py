"""The parameters of training, as params.yaml holds them after the recipe's slots replaced the base
section's."""

from dataclasses import dataclass
from typing import Any, Literal

Spec = dict[str, Any]


@dataclass(frozen=True)
class BatchSettings:
    """How much a step takes from the plan: so many rollouts, or so many prompts."""

    unit: Literal["rollouts", "prompts"]
    size: int


@dataclass(frozen=True)
class ValidationSettings:
    """The validation curve: samples a prompt, and the charged training FLOPs between two points."""

    num_samples: int
    every_flops: float


@dataclass(frozen=True)
class TrainSettings:
    """The section `train`. The last six are slots: a mapping with `method` and that method's
    settings."""

    batch: BatchSettings
    max_steps: int | None
    learning_rate: float
    warmup_steps: int
    final_learning_rate_rate: float
    betas: list[float]
    weight_decay: float
    max_grad_norm: float
    dtype: Literal["float32", "bfloat16"]
    max_tokens_per_micro_batch: int
    tokens_per_logprob_chunk: int
    share_prompts: bool
    activation_checkpointing: bool
    kl_coefficient: float
    max_sampler_gap: float
    max_nonfinite_steps: int
    advantage_over: Literal["kept", "pool"]
    validation: ValidationSettings
    control: Spec
    generate: Spec
    select: Spec
    replay: Spec
    advantage: Spec
    loss: Spec


@dataclass(frozen=True)
class CheckpointSettings:
    """The section `checkpoint`: seconds between two checkpoints, and how many are kept."""

    every_seconds: float
    keep: int
