"""The parameters of training, as params.yaml holds them after the recipe's slots replaced the base
section's."""

from dataclasses import dataclass
from typing import Any, Literal

from tasks.common.params import at_least

Spec = dict[str, Any]


@dataclass(frozen=True)
class BatchSettings:
    """How much a step takes: so many rollouts, or so many prompts. `counts` says which rollouts:
    all that are generated, or those that a selector of fixed yield keeps."""

    unit: Literal["rollouts", "prompts"]
    size: int
    counts: Literal["generated", "kept"]


@dataclass(frozen=True)
class Updates:
    """Optimizer steps a batch: each epoch goes over its groups in `minibatches` parts."""

    epochs: int
    minibatches: int

    def __post_init__(self) -> None:
        at_least(1, train__updates__epochs=self.epochs)
        at_least(1, train__updates__minibatches=self.minibatches)

    @property
    def is_several(self) -> bool:
        """Whether a batch is used for more than one optimizer step."""
        return self.epochs * self.minibatches > 1


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
class Lora:
    """The section `train.lora`: the rank of the adapters, the factor `alpha` / rank on what they
    add, and the linear layers that get one by the last part of their names; `[all-linear]` are all
    but the output head. Their frozen weights have `base_bits`."""

    rank: int
    alpha: float
    modules: list[str]
    base_bits: Literal[32, 4]

    def __post_init__(self) -> None:
        at_least(1, train__lora__rank=self.rank)


@dataclass(frozen=True)
class TrainSettings:
    """The section `train`. With `lora` adapters are trained, else the whole policy. With
    `max_staleness` above 0 batches are sampled ahead (`loop/asynchronous.py`), and with
    `in_flight_updates` completions go on with new weights in the middle; or with `over_provision`
    above 1 that many times a step's groups are in flight (`loop/provision.py`). The last six are
    slots: a mapping with `method` and that method's settings."""

    batch: BatchSettings
    updates: Updates
    max_staleness: int
    in_flight_updates: bool
    over_provision: float
    max_steps: int | None
    learning_rate: float
    warmup_steps: int
    final_learning_rate_fraction: float
    decay_share: float
    branches: list[float]
    betas: list[float]
    weight_decay: float
    optimizer_bits: Literal[32, 8]
    max_grad_norm: float
    dtype: Literal["float32", "bfloat16"]
    lora: Lora | None
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

    @property
    def is_provisioned(self) -> bool:
        """Whether more groups are in flight than a step takes."""
        return self.over_provision > 1.0

    @property
    def is_ahead(self) -> bool:
        """Whether the engine samples while the policy is updated."""
        return self.max_staleness > 0 and not self.is_provisioned


@dataclass(frozen=True)
class LearnerSettings:
    """The section `learner`: memory and speed of the update. They change no value but for
    rounding, so a run goes on when they change. `shard` says how the ranks hold the policy: each
    the whole, or each a part (see `learner/sharding.py`). A collective may take
    `collective_timeout_seconds`: then a rank is taken to be lost."""

    max_tokens_per_micro_batch: int
    tokens_per_logprob_chunk: int
    share_prompts: bool
    max_shared_tokens: int
    activation_checkpointing: bool
    shard: Literal["none", "fsdp2"]
    collective_timeout_seconds: int

    def __post_init__(self) -> None:
        at_least(1, learner__collective_timeout_seconds=self.collective_timeout_seconds)


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
