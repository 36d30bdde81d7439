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
class Correction:
    """How the loss treats what sampler and trainer differ: see `learner/correction.py`."""

    ratio_to: Literal["old", "sampler"]
    level: Literal["token", "sequence"]
    cap: float
    mode: Literal["truncate", "mask"]


@dataclass(frozen=True)
class ValidationSettings:
    """The validation curve: samples a prompt, and the share of the run between two points."""

    num_samples: int
    every_share: float


@dataclass(frozen=True)
class TrainSettings:
    """The section `train`. The last six are slots: a mapping with `method` and that method's
    settings."""

    batch: BatchSettings
    max_steps: int | None
    learning_rate: float
    warmup_steps: int
    final_learning_rate_fraction: float
    betas: list[float]
    weight_decay: float
    max_grad_norm: float
    dtype: Literal["float32", "bfloat16"]
    kl_coefficient: float
    advantage_over: Literal["kept", "pool"]
    divisor: Literal["generated", "kept"]
    correction: Correction
    validation: ValidationSettings
    control: Spec
    generate: Spec
    select: Spec
    replay: Spec
    advantage: Spec
    loss: Spec


@dataclass(frozen=True)
class LearnerSettings:
    """The section `learner`: memory and speed of the update. They change no value but for
    rounding, so a run goes on when they change."""

    max_tokens_per_micro_batch: int
    tokens_per_logprob_chunk: int
    share_prompts: bool
    activation_checkpointing: bool


@dataclass(frozen=True)
class SamplerGaps:
    """Mean |log-probability| by which sampler and trainer may differ, for the coarser of their
    dtypes. What rounding makes is below; weights an update old are above."""

    float32: float
    bfloat16: float
    float16: float


@dataclass(frozen=True)
class Guards:
    """The section `guards`: when training stops rather than go on with what cannot be right."""

    max_sampler_gap: SamplerGaps
    max_nonfinite_steps: int


@dataclass(frozen=True)
class CheckpointSettings:
    """The section `checkpoint`: seconds between two checkpoints, and how many are kept."""

    every_seconds: float
    keep: int
