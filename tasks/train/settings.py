"""The sections `train`, `learner`, `guards` and `checkpoint`, and errors in their combination. This
module does not import torch."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.common.params import ParamsError, above_zero, at_least, settings, share
from tasks.engines.settings import EngineSettings, Sampling
from tasks.grading.settings import Verify
from tasks.models.settings import Lora

Spec = dict[str, Any]
SLOTS = ("control", "generate", "select", "replay", "advantage", "loss")


@settings
class BatchSettings:
    """`train.batch`: the size of a step's batch."""

    unit: Literal["rollouts", "prompts"] = "rollouts"  # the unit of size
    size: int = 32  # size of a step's batch
    counts: Literal["generated", "kept"] = "generated"  # rollouts counted; kept needs select.keep

    def __post_init__(self) -> None:
        at_least(1, train__batch__size=self.size)


@settings
class Updates:
    """`train.updates`: optimizer steps per batch. With more than one, old log-probabilities are
    computed first."""

    epochs: int = 1  # passes over the batch
    minibatches: int = 1  # minibatches per epoch; a group stays whole

    def __post_init__(self) -> None:
        at_least(1, train__updates__epochs=self.epochs)
        at_least(1, train__updates__minibatches=self.minibatches)

    @property
    def is_several(self) -> bool:
        """Whether a batch is used for more than one optimizer step."""
        return self.epochs * self.minibatches > 1


@settings
class Rejection:
    """`train.correction.reject`: tokens dropped from the loss because the ratio of trainer to
    sampler is outside [low, high]."""

    policy: Literal["old", "present"] = "old"  # the trainer's policy: once per batch, or per update
    level: Literal["token", "sequence", "geometric"] = "token"  # as for the weights
    low: float = 0.0  # minimum ratio
    high: float | None = None  # maximum ratio; null: no limit
    whole_rows: bool = False  # one rejected token rejects its rollout
    only_negative: bool = False  # reject only where the advantage is below 0

    def __post_init__(self) -> None:
        at_least(0, train__correction__reject__low=self.low)
        if self.high is not None and self.high <= max(self.low, 0.0):
            raise ParamsError(
                f"train.correction.reject is [{self.low:g}, {self.high:g}]; high must be above low"
            )


@settings
class Proximal:
    """`train.correction.proximal`: the old policy of stale tokens (see `learner/proximal.py`)."""

    method: Literal["snapshot", "ewma"] = "snapshot"  # the version that sampled, or a mean
    decay: float = 0.75  # of ewma, per step
    reset_below: float = 0.9  # share of active tokens under which ewma starts over

    def __post_init__(self) -> None:
        share(
            train__correction__proximal__decay=self.decay,
            train__correction__proximal__reset_below=self.reset_below,
        )


@settings
class Correction:
    """`train.correction`: weights for the difference between sampler and trainer (see
    `learner/correction.py`). By default the clipped ratio is policy / old policy, and each token is
    weighted by old policy / sampler."""

    ratio_to: Literal["old", "sampler"] = "old"  # the denominator of the clipped ratio
    level: Literal["token", "sequence", "geometric"] = "token"  # level of the weights
    cap: float = 2.0  # maximum weight
    floor: float = 0.0  # minimum weight
    mode: Literal["truncate", "mask"] = "truncate"  # a weight outside becomes the bound, or 0
    reject: Rejection | None = None  # tokens that get weight 0, whatever the bounds
    m2po: float | None = None  # limit of a step's mean squared log-ratio, such as 0.04; null: none
    proximal: Proximal | None = None  # null: the old policy is that before the batch's first update

    def __post_init__(self) -> None:
        above_zero(train__correction__cap=self.cap)
        if self.m2po is not None:
            above_zero(train__correction__m2po=self.m2po)
        if not 0.0 <= self.floor < self.cap:
            raise ParamsError(
                f"train.correction.floor is {self.floor:g}; it must be at least 0 and below cap "
                f"({self.cap:g})"
            )
        if self.proximal is not None and self.ratio_to == "sampler":
            raise ParamsError(
                "train.correction.ratio_to is sampler, which leaves out the old policy that "
                "train.correction.proximal computes: set ratio_to to old, or proximal to null"
            )


@settings
class Reference:
    """`train.reference`: the policy that a KL term, or a loss, compares with the trained one."""

    source: str | None = None  # folder of a teacher with the same vocabulary; null: initial policy
    reset_every: int | None = None  # copy the policy into it every so many steps; null: never

    def __post_init__(self) -> None:
        if self.reset_every is not None:
            at_least(1, train__reference__reset_every=self.reset_every)
        if "://" in (self.source or ""):
            raise ParamsError(
                "train.reference.source is an address: name the folder of the teacher, such as the "
                "snapshot of a hub's model"
            )

    @property
    def folder(self) -> Path | None:
        """The folder of the teacher; None without a teacher."""
        return None if self.source is None else Path(self.source).expanduser()


@settings
class Entropy:
    """`train.loss.entropy`, for any loss: a bonus for the mean entropy of the policy at the tokens
    of the kept rollouts. With a target its coefficient is adaptive (Skywork-OR1, arXiv 2505.22312):
    every update moves it by `step`, up while the entropy is at most the target and down otherwise,
    and there is a bonus only while the entropy is at most the target. This entropy is from the
    previous update, because an update computes its entropy along with its gradient."""

    coefficient: float = 0.0  # of the bonus; with a target, its initial value
    target: float | None = None  # target mean entropy in nats; null: a constant coefficient
    step: float = 0.005  # change of the coefficient per update
    most: float = 1.0  # maximum coefficient

    def __post_init__(self) -> None:
        at_least(0, train__loss__entropy__coefficient=self.coefficient)
        above_zero(train__loss__entropy__step=self.step, train__loss__entropy__most=self.most)
        if self.target is not None:
            above_zero(train__loss__entropy__target=self.target)
        if self.coefficient > self.most:
            raise ParamsError(
                f"train.loss.entropy.coefficient is {self.coefficient:g}, above most "
                f"({self.most:g}): lower it, or raise most"
            )

    @property
    def is_on(self) -> bool:
        """Whether an update may have a bonus."""
        return self.coefficient > 0.0 or self.target is not None


@settings
class ValidationSettings:
    """`train.validation`: the validation curve."""

    num_samples: int = 2  # samples of every validation prompt at each point
    every_share: float = 0.05  # share of the run between two points

    def __post_init__(self) -> None:
        at_least(1, train__validation__num_samples=self.num_samples)
        if not 0 < self.every_share <= 1:
            raise ParamsError(
                f"train.validation.every_share is {self.every_share}; it is the share of a run "
                "between two points of the validation curve, above 0 and at most 1"
            )


@settings
class WarmStart:
    """`train.warm_start`: supervised steps on correct completions, before the first step."""

    data: Literal["solutions", "profile"]  # of the prompts, or the profile's correct samples
    steps: int = 50  # optimizer steps
    batch_size: int = 32  # completions per step
    learning_rate: float | None = None  # constant; null: train.learning_rate

    def __post_init__(self) -> None:
        at_least(
            1, train__warm_start__steps=self.steps, train__warm_start__batch_size=self.batch_size
        )
        if self.learning_rate is not None:
            above_zero(train__warm_start__learning_rate=self.learning_rate)


@settings
class Dumps:
    """`train.external.rollouts`: the rollouts that a command dumps."""

    format: Literal["verl", "trl", "verifiers", "areal"]  # the trainer that dumps so
    folder: str = "rollouts"  # in {out}


@settings
class External:
    """`train.external`: how another trainer runs."""

    python: str | None = None  # trl: interpreter of an environment with TRL; null: this one
    arguments: dict[str, Any] = {}  # trl: more arguments of GRPOConfig
    command: list[str] = []  # command: a program and its arguments, run without a shell
    target: str = "parquet"  # command: format of {data}, a target of `winnow export`
    checkpoint: str = "policy"  # command: folder of the trained policy, in {out}
    rollouts: Dumps | None = None  # command: rollouts to read back


@settings
class TrainSettings:
    """The section `train`. A slot is a mapping: the key `method` names a file in the slot's folder
    in tasks/train/methods (the slot's default method if the key is missing), and the other keys are
    that method's settings. `shape` is a list of such mappings."""

    trainer: Literal["own", "trl", "command"] = "own"  # what trains the cell
    external: External = External()  # of another trainer
    batch: BatchSettings = BatchSettings()  # of a step
    updates: Updates = Updates()  # of a batch
    max_staleness: int = 0  # maximum age in steps of the policy that sampled a token; 0: none
    in_flight_updates: bool = False  # load new weights in the middle of completions
    over_provision: float = 1.0  # groups in flight, as a multiple of a step's groups; at most 2
    max_steps: int | None = None  # null: all steps of the plan
    learning_rate: float = 3.0e-4  # maximum learning rate
    warmup_steps: int = 0  # steps over which the learning rate rises
    final_learning_rate_fraction: float = 0.1  # final learning rate after the decay, as a fraction
    decay_share: float = 1.0  # last share of the run, in which the rate decays; 0.2 with a budget
    branches: list[float] = []  # shares where decayed branches end; [0.25, 0.5] with a budget
    betas: list[float] = [0.9, 0.95]  # of AdamW
    weight_decay: float = 0.0  # of AdamW
    optimizer_bits: Literal[32, 8] = 32  # 8: AdamW's moments by torchao, in a quarter of the memory
    max_grad_norm: float = 1.0  # norm above which a gradient is scaled down
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the trainer's forward pass
    lora: Lora | None = None  # adapters that are trained instead of all weights
    warm_start: WarmStart | None = None  # supervised steps before the first step
    prompt_gradient: bool = True  # false: read prompts without a gradient, at a third of the cost
    kl_coefficient: float = 0.0  # of the KL to the reference; dead groups are then computed too
    reference: Reference = Reference()  # the initial policy, or a teacher
    advantage_over: Literal["kept", "pool"] = "kept"  # group statistics: of kept or of all rollouts
    divisor: Literal["generated", "kept"] = "generated"  # rollouts in the loss's denominator
    correction: Correction = Correction()  # for the difference between sampler and trainer
    validation: ValidationSettings = ValidationSettings()  # of the curve
    control: Spec = {"method": "plan"}  # the next prompts and group sizes
    generate: Spec = {"method": "batched"}  # how rollouts are drawn
    select: Spec = {"method": "all"}  # which rollouts enter the loss
    replay: Spec = {"method": "none"}  # rollouts that are trained on again
    shape: list[Spec] = []  # changes of rewards before the advantage, or of advantages after it
    advantage: Spec = {"method": "grpo"}  # weight of a rollout in the gradient
    loss: Spec = {"method": "clip"}  # the minimised function

    def __post_init__(self) -> None:
        external = self.external
        if self.trainer == "command" and not (external.command and external.rollouts):
            raise ParamsError(
                "train.trainer is command: set train.external.command, a program and its "
                "arguments, and train.external.rollouts, the format and folder of its dumps"
            )
        at_least(0, train__max_staleness=self.max_staleness)
        self.check_optimizer()
        self.check_branches()
        self.check_provision()
        self.check_in_flight()
        if self.correction.proximal is not None and not self.max_staleness:
            raise ParamsError(
                "train.correction.proximal is the old policy of tokens from earlier updates, and "
                "with train.max_staleness 0 there are none: set max_staleness to 1 or more, or "
                "proximal to null"
            )

    def check_optimizer(self) -> None:
        """Raise ParamsError for invalid values of the optimizer, or a warm start with a KL term."""
        if self.max_steps is not None:
            at_least(1, train__max_steps=self.max_steps)
        at_least(
            0,
            train__learning_rate=self.learning_rate,
            train__warmup_steps=self.warmup_steps,
            train__weight_decay=self.weight_decay,
            train__kl_coefficient=self.kl_coefficient,
        )
        if self.warm_start is not None and self.kl_coefficient > 0:
            raise ParamsError(
                "train.warm_start moves the policy away from the reference, and "
                "train.kl_coefficient pulls it back there: set one of them to its default"
            )
        above_zero(train__max_grad_norm=self.max_grad_norm)
        share(train__final_learning_rate_fraction=self.final_learning_rate_fraction)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ParamsError(
                f"train.betas is {self.betas}; they are AdamW's two: from 0 on and below 1"
            )

    def check_branches(self) -> None:
        """Raise ParamsError for impossible branches or decay."""
        if not 0 < self.decay_share <= 1:
            raise ParamsError(
                f"train.decay_share is {self.decay_share}; it is the last share of the run, above "
                "0 and at most 1, over which the learning rate falls"
            )
        shares = self.branches
        if shares and (shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] < 1):
            raise ParamsError(
                f"train.branches is {shares}; they are the shares of the run at which decayed "
                "branches end: ascending, above 0 and below 1"
            )
        if shares and self.decay_share == 1:
            raise ParamsError(
                "train.branches needs train.decay_share below 1: with 1 every branch would leave "
                "the trunk at its first step, as a separate run. With experiment.budget set "
                "branches are [0.25, 0.5] by default: set them to [] for a decay of the whole run"
            )

    def check_provision(self) -> None:
        """Raise ParamsError if `over_provision` is out of range or conflicts with a setting."""
        if not 1.0 <= self.over_provision <= 2.0:
            raise ParamsError(
                f"train.over_provision is {self.over_provision:g}; it is how many times a step's "
                "groups are in flight, from 1.0 (its own alone) to 2.0 (those of the next step, "
                "too)"
            )
        if self.over_provision == 1.0:
            return
        if not self.max_staleness:
            raise ParamsError(
                "train.over_provision continues completions in the next step, with the weights of "
                "that step: set train.max_staleness to 1 or more, or over_provision to 1.0"
            )
        if self.generate.get("method") != "batched":
            raise ParamsError(
                f"train.generate.method is {self.generate.get('method')}, which cannot stop "
                "and continue completions: set it to batched, or train.over_provision to 1.0"
            )

    def check_in_flight(self) -> None:
        """Raise ParamsError if `in_flight_updates` conflicts with other settings."""
        if not self.in_flight_updates:
            return
        if not self.num_ahead:
            more = "" if self.over_provision == 1.0 else " beside over_provision"
            raise ParamsError(
                "train.in_flight_updates loads new weights while the engine samples, but with "
                f"train.max_staleness {self.max_staleness}{more} it never samples during an "
                f"update: set that to {2 if more else 1} or more"
            )
        if self.generate.get("method") != "batched":
            raise ParamsError(
                f"train.generate.method is {self.generate.get('method')}, which does not record "
                "each token's policy: set it to batched, or train.in_flight_updates to false"
            )

    @property
    def reads_policy(self) -> bool:
        """Whether a pass before a step's first update computes the policy's log-probabilities."""
        return self.scores_old or self.correction.m2po is not None

    @property
    def scores_old(self) -> bool:
        """Whether old log-probabilities are computed in a pass before the first of several updates.
        `proximal` replaces them, and `ratio_to: sampler` needs them only to reject by them."""
        correction = self.correction
        tests_old = correction.reject is not None and correction.reject.policy == "old"
        reads_old = correction.ratio_to == "old" or tests_old
        return reads_old and self.updates.is_several and correction.proximal is None

    @property
    def num_ahead(self) -> int:
        """The number n of batches that are sampled from one policy, during the updates on the n
        batches before them; when the last of them is used, that policy is 2 n - 1 steps old. With
        0, a step samples its own batch. Over-provisioning uses up one step of `max_staleness`."""
        return (self.max_staleness + (self.over_provision == 1.0)) // 2

    @property
    def lead(self) -> int:
        """The number of steps by which a batch may begin early: with in-flight updates,
        `max_staleness`, less one if over-provisioned; otherwise 2 `num_ahead` - 1, at least 0."""
        if self.in_flight_updates:
            return self.max_staleness - (self.over_provision > 1.0)
        return max(2 * self.num_ahead - 1, 0)

    @property
    def max_carried(self) -> int:
        """The maximum number of steps that a group may stay in flight after its first step."""
        return self.max_staleness - self.lead


def with_method(slot: str, spec: Any) -> Any:
    """Return the mapping `spec` of a slot; without `method`, merge it into the slot's default."""
    is_open = isinstance(spec, dict) and "method" not in spec
    return {**getattr(TrainSettings(), slot), **spec} if is_open else spec


@settings
class LearnerSettings:
    """The section `learner`: memory and speed of the update. The settings change results only by
    rounding, so a run resumes after a change."""

    max_tokens_per_micro_batch: int = 4096  # tokens of one forward and backward
    tokens_per_logprob_chunk: int = 4096  # completion tokens whose logits exist at once
    share_prompts: bool = True  # prefill a group's prompt once for all its rollouts
    activation_checkpointing: bool = False  # compute activations again in the backward pass
    compile: bool = False  # torch.compile of the layers, for a GPU: half a minute at the start
    shard: Literal["none", "fsdp2"] = "none"  # fsdp2: each rank stores a part of the policy
    replicas: int = 1  # groups of ranks that each store a whole policy (HSDP)
    collective_timeout_seconds: int = 1800  # time without a response after which a rank is lost

    def __post_init__(self) -> None:
        at_least(
            1,
            learner__max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            learner__replicas=self.replicas,
            learner__tokens_per_logprob_chunk=self.tokens_per_logprob_chunk,
            learner__collective_timeout_seconds=self.collective_timeout_seconds,
        )
        if self.replicas > 1 and self.shard == "none":
            raise ParamsError(
                f"learner.replicas is {self.replicas}, and learner.shard is none: every process "
                "has the whole policy. Set shard to fsdp2, or replicas to 1"
            )


@settings
class SamplerGaps:
    """`guards.max_sampler_gap`: the mean absolute difference allowed between log-probabilities of
    sampler and trainer, for their coarser dtype. Rounding stays below it; stale weights do not."""

    float32: float = 1.0e-4  # both in float32
    bfloat16: float = 0.02  # one in bfloat16
    float16: float = 0.005  # one in float16


@settings
class Guards:
    """The section `guards`: limits that stop training. A run resumes after a change."""

    max_sampler_gap: SamplerGaps = SamplerGaps()  # maximum difference between sampler and trainer
    max_nonfinite_steps: int = 3  # consecutive steps; such a step is skipped and recorded

    def __post_init__(self) -> None:
        at_least(1, guards__max_nonfinite_steps=self.max_nonfinite_steps)


@settings
class CheckpointSettings:
    """The section `checkpoint`: how often checkpoints are written, and how many are kept."""

    every_seconds: float = 30.0  # minimum time between two checkpoints
    keep: int = 2  # number of checkpoints

    def __post_init__(self) -> None:
        at_least(1, checkpoint__keep=self.keep)


@dataclass(frozen=True)
class Sections:
    """The sections that the train stage reads besides `train`; recipes do not change them."""

    sampling: Sampling
    engine: EngineSettings
    verify: Verify
    learner: LearnerSettings
    guards: Guards
    checkpoint: CheckpointSettings

    def check(self, train: TrainSettings) -> None:
        """Raise ParamsError if a section conflicts with `train`, or torchao is missing. Truncated
        sampling is an error: the trainer's log-probabilities are not truncated."""
        learner = self.learner
        if not train.prompt_gradient and (learner.shard != "none" or not learner.share_prompts):
            raise ParamsError(
                "train.prompt_gradient is false, which reads a group's prompt once and on every "
                "rank alike: set learner.share_prompts to true and learner.shard to none, or "
                "train.prompt_gradient to true"
            )
        base_bits = 32 if train.lora is None else train.lora.base_bits
        bits = {"train.optimizer_bits": train.optimizer_bits, "train.lora.base_bits": base_bits}
        for key, few in bits.items():
            if few != 32 and self.learner.shard != "none":
                raise ParamsError(
                    f"{key} is {few}, and learner.shard is fsdp2: numbers of few bits are scaled "
                    f"in blocks, which a shard may cut. Set {key} to 32, or learner.shard to none"
                )
            if few != 32 and importlib.util.find_spec("torchao") is None:
                raise ParamsError(
                    f"{key} is {few}, which needs torchao: python -m pip install --constraint "
                    'requirements.txt --editable ".[torchao]", or set it to 32'
                )
        sampling = self.sampling
        if sampling.temperature <= 0 or sampling.top_p < 1.0 or sampling.top_k > 0:
            raise ParamsError(
                "training needs sampling.temperature > 0, top_p 1.0 and top_k 0 (no truncation); "
                f"sampling is {sampling}: with another distribution the ratio between trainer and "
                "sampler would be wrong"
            )
