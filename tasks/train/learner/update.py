"""The policy-gradient update: log-probabilities of the sampled tokens, and the step's gradient, one
micro-batch at a time.

With `share_prompts` the prompt of a group is encoded once for all its rollouts (as in Prefix
Grouper, arXiv 2506.05433): a forward over the prompts keeps its keys and values *in the graph*,
each rollout's completion attends to a copy of its group's keys and values, and autograd sums the
gradients of the copies. Log-probabilities are computed over chunks of tokens whose logits are
recomputed in the backward pass, so [B, T, V] never exists. No device value is read before all
micro-batches are queued, so a GPU need not wait for the host.

Legend: B rollouts of a micro-batch, Q prompts in it, P prompt positions, T positions that predict
completion tokens, N = the completion tokens of the micro-batch, D hidden size, V vocabulary."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.common.accounting.ledger import Architecture, forward_flops
from tasks.models.adapters import adapters_off, has_adapters, num_adapter_parameters
from tasks.models.packing import forward, forward_after, forward_rows, head_logits, head_precision
from tasks.models.sharding import call
from tasks.models.transfer import index_of, to_device, to_host
from tasks.train.data.columns import Bools, Floats
from tasks.train.data.noise import GradientNoise
from tasks.train.data.rollouts import Rollouts, StepTotals
from tasks.train.data.tokens import Tokens, average
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import MicroBatch
from tasks.train.settings import Correction, TrainSettings
from tasks.train.slots import Loss


@dataclass(frozen=True)
class Objective:
    """The objective of a step. `reference` is the policy with which the KL term or the loss
    compares the trained one, or None."""

    loss: Loss
    correction: Correction
    temperature: float
    reference: PreTrainedModel | None
    kl_coefficient: float
    share_prompts: bool
    tokens_per_chunk: int
    version: int = 0  # of the policy
    prompt_gradient: bool = True
    reference_architecture: Architecture | None = None  # None: the policy's
    is_tf32: bool = False  # in the head; off while a thread samples, see `head_precision`


@dataclass
class UpdateStats:
    """Sums over the tokens of a step's micro-batches, and the executed FLOPs of forward and
    backward (and of the reference's forward). `log_ratios` are between trainer and sampler, for
    fresh rollouts of the current policy. `log_weights` are the logs of all rollouts' importance
    weights, not capped. `norms` (before clipping) and `rate_factors` (of the learning rate) have an
    entry per optimizer step. `num_nonfinite` counts updates with a non-finite loss or gradient.
    `noise` is of the updates for which it was measured."""

    loss: float = 0.0
    num_tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    inactive: float = 0.0  # tokens that are clipped or capped
    weights: float = 0.0
    squared_weights: float = 0.0
    kl: float = 0.0
    flops: float = 0.0
    reference_flops: float = 0.0

    log_ratios: list[torch.Tensor] = field(default_factory=list)
    log_weights: list[torch.Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rate_factors: list[float] = field(default_factory=list)
    num_nonfinite: int = 0
    noise: list[GradientNoise] = field(default_factory=list)

    @property
    def active_share(self) -> float:
        """The share of tokens that are not clipped and whose weight no bound changed."""
        return 1.0 - self.inactive / max(self.num_tokens, 1)


def merge_stats(parts: list[UpdateStats]) -> UpdateStats:
    """Return the statistics of several ranks or updates: sums, and concatenated lists."""
    merged = UpdateStats()
    for field_ in fields(UpdateStats):
        values = [getattr(part, field_.name) for part in parts]
        setattr(merged, field_.name, sum(values, type(values[0])()))  # numbers or lists
    return merged


def accumulate_gradients(
    model: PreTrainedModel,
    batches: list[MicroBatch],
    rollouts: Rollouts,
    objective: Objective,
    totals: StepTotals,
    architecture: Architecture,
    kept: StepTotals | None = None,
) -> UpdateStats:
    """Add the gradient of the whole step's objective to the parameters. Rollouts without old
    log-probabilities use the policy's own. The loss is divided by `totals`; the KL term and entropy
    bonus, sums over the kept rollouts, are divided by their totals `kept` (None: all are kept)."""
    stats, unread = UpdateStats(), list[dict[str, torch.Tensor]]()
    trained_N, is_current_N = rollouts.trained_N(), rollouts.is_current_N(objective.version)
    marked_N = objective.loss.marks(rollouts)
    for batch in batches:
        reference_N, flops = reference_logprobs(batch, objective, rollouts, architecture)
        stats.reference_flops += flops

        # the policy's log-probabilities of its own tokens
        own_N = trained_N[batch.places_N]
        own = index_of(own_N, batch.device)
        logprobs_N, entropy_N = (part[own] for part in token_logprobs(model, batch, objective))
        sampler_N = batch.sampler_logprobs_N[own]

        old_N = logprobs_N.detach()
        if rollouts.old_logprobs_N is not None:
            old_N = of_batch(batch, rollouts.old_logprobs_N, logprobs_N)[own]
        advantages_N = of_batch(batch, rollouts.advantages_N, logprobs_N)[own]
        place = batch.row_N[own], len(batch.rows), objective.correction
        tokens, cut_N = corrected_tokens(logprobs_N, old_N, sampler_N, advantages_N, *place)
        tokens = replace(tokens, group_B=batch.group_B, sampler_logprobs_N=sampler_N)
        if reference_N is not None:
            tokens = replace(tokens, reference_logprobs_N=reference_N[own])
        if marked_N is not None:
            tokens = replace(tokens, marked_N=of_batch(batch, marked_N, logprobs_N)[own] > 0)
        part, sums = objective.loss(tokens, totals)

        # the KL term and the bonus, averaged like the loss, but over the kept rollouts
        kl_N = logprobs_N[:0] if reference_N is None else unbiased_kl(tokens, reference_N[own])
        coefficients = objective.kl_coefficient, -objective.loss.bonus()
        for coefficient, values_N in zip(coefficients, (kl_N, entropy_N), strict=True):
            if coefficient:
                mean = average(values_N, tokens, kept or totals, objective.loss.normalize)
                part = part + coefficient * mean
        part.backward()

        # statistics stay on the device: reading them here would make the host wait
        unread.append(statistics(part, sums["clipped"], entropy_N, kl_N, cut_N, tokens.weights_N))
        is_current = index_of(is_current_N[batch.places_N][own_N], batch.device)
        stats.log_ratios.append((logprobs_N.detach() - sampler_N)[is_current])
        stats.log_weights.append(tokens.by_row(old_N - sampler_N))
        stats.num_tokens += len(logprobs_N)
        stats.flops += update_flops(model, batch, objective, architecture)
        batch.free()
    if unread:
        read(stats, unread)
    return stats


def squared_norm(model: PreTrainedModel) -> float:
    """Return the squared norm of the gradient so far."""
    norms = [part.grad.norm().double() for part in model.parameters() if part.grad is not None]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def statistics(
    loss: torch.Tensor,
    is_clipped_N: torch.Tensor,
    entropy_N: torch.Tensor,
    kl_N: torch.Tensor,
    cut_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return a micro-batch's sums by their names in `UpdateStats`, still on its device."""
    sums = {
        "loss": loss,
        "entropy": entropy_N.sum(),
        "clipped": is_clipped_N.sum(),
        "capped": cut_N.sum(),
        "inactive": (cut_N | (is_clipped_N > 0)).sum(),
        "kl": kl_N.sum(),
        "weights": weights_N.sum(),
        "squared_weights": (weights_N**2).sum(),
    }
    return {name: value.detach().double() for name, value in sums.items()}


def of_batch(batch: MicroBatch, values_N: Floats | Bools, like: torch.Tensor) -> torch.Tensor:
    """Return the micro-batch's part of an array over completion tokens, as a tensor like `like`."""
    return to_device(values_N[batch.places_N], like.device).to(like.dtype)


def read(stats: UpdateStats, unread: list[dict[str, torch.Tensor]]) -> None:
    """Wait for the device, and copy results to the host: set fields of `stats` to the sums over all
    micro-batches in `unread`, and replace the log-ratios and log-weights with copies."""
    sums, *lists = to_host(
        [
            torch.stack([torch.as_tensor(sum(part[k] for part in unread)) for k in unread[0]]),
            torch.cat(stats.log_ratios),
            torch.cat(stats.log_weights),
        ]
    )
    for name, value in zip(unread[0], sums.tolist(), strict=True):
        setattr(stats, name, value)
    stats.log_ratios, stats.log_weights = [lists[0]], [lists[1]]


@torch.no_grad()
def reference_logprobs(
    batch: MicroBatch, objective: Objective, rollouts: Rollouts, architecture: Architecture
) -> tuple[torch.Tensor | None, float]:
    """Return [N] the reference's log-probabilities (None without a reference) and the executed
    FLOPs (0 if `rollouts` contain the log-probabilities). The reference may be the policy without
    its adapters, so call this before the forward with gradient."""
    if objective.reference is None:
        return None, 0.0
    if rollouts.reference_N is not None:
        return of_batch(batch, rollouts.reference_N, batch.sampler_logprobs_N), 0.0
    flops = reference_flops(architecture, batch, objective)
    with adapters_off(objective.reference):
        return token_logprobs(objective.reference, batch, objective)[0], flops


def unbiased_kl(tokens: Tokens, reference_N: torch.Tensor) -> torch.Tensor:
    """Return [N] k3 times the corrected ratio of policy and sampler, with gradient. Value and
    *gradient* are unbiased estimates of KL(policy | reference) and its gradient, except for the
    weights' cap (DeepSeek-V3.2). The gradient of k3 alone is that of KL(reference | policy)."""
    ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp() * tokens.weights_N
    return ratio_N * k3(tokens.logprobs_N, reference_N)


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Return [N] the unbiased, non-negative estimate of KL(policy | reference) from a sampled token
    (Schulman, 2020)."""
    gap_N = reference_N - logprobs_N
    return gap_N.exp() - gap_N - 1.0


def accumulate_nothing(
    model: PreTrainedModel,
    batch: MicroBatch,
    rollouts: Rollouts,
    objective: Objective,
    architecture: Architecture,
) -> UpdateStats:
    """Compute `batch` as `accumulate_gradients` does, but with a gradient of zero, because a rank
    of a sharded policy that has fewer micro-batches must take part in the others' passes."""
    stats = UpdateStats()
    _, stats.reference_flops = reference_logprobs(batch, objective, rollouts, architecture)
    logprobs_N, _ = token_logprobs(model, batch, objective)
    (0.0 * logprobs_N.sum()).backward()
    stats.flops = update_flops(model, batch, objective, architecture)
    return stats


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] the completion's log-probabilities at sampling temperature, and [N] entropies,
    which have a gradient if the loss has a bonus for them."""
    return call(compute_logprobs, model, batch, objective)


def compute_logprobs(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] log-probabilities and [N] entropies for `token_logprobs`."""
    if torch.is_grad_enabled() and not objective.prompt_gradient:
        prompts, rest, predicts_N = batch.continued
        hidden_ND = forward_after(model, prompts, rest).index_select(0, predicts_N)
    elif objective.share_prompts:  # each prompt is computed once, without padding
        packing, predicts_N = batch.shared
        states = forward(model, packing.ids, packing.positions, packing.attend)
        hidden_ND = states.index_select(0, predicts_N)
    else:  # padding is at the end, so no token attends to it: no mask is needed
        states = forward_rows(model, batch.whole.input_ids).last_hidden_state
        hidden_ND = batch.whole.predicting(states)
    return chunked_logprobs(model, hidden_ND, batch.targets_N, objective)


def chunked_logprobs(
    model: PreTrainedModel, hidden_ND: torch.Tensor, targets_N: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] log-probabilities and [N] entropies. Only one chunk's logits [n, V] exist at a
    time."""
    size, has_bonus = objective.tokens_per_chunk, objective.loss.bonus() > 0.0
    settings = objective.temperature, has_bonus, objective.is_tf32
    if len(hidden_ND) <= size:
        return project(model, hidden_ND, targets_N, *settings)
    parts = [
        checkpoint(project, model, hidden, targets, *settings, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def project(
    model: PreTrainedModel,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    has_bonus: bool,
    is_tf32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] log-probabilities of the targets and [N] entropies, in float32. The entropies have
    a gradient if there is a bonus for them."""
    # in float32 also under autocast: a bfloat16 head changes log-probabilities by over a percent
    with head_precision(is_tf32=is_tf32), torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = head_logits(model, hidden_ND.float())
    logprobs_NV = (logits_NV if temperature == 1.0 else logits_NV / temperature).log_softmax(-1)
    # a sum of one term, not a view: FSDP adds its hooks to the outputs of a forward
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).sum(-1)
    # last: without a bonus, the backward pass recomputes only the lines above
    return logprobs_N, entropies(logprobs_NV if has_bonus else logprobs_NV.detach())


def entropies(logprobs_NV: torch.Tensor) -> torch.Tensor:
    """Return [N] the entropies, in nats, of distributions over the vocabulary."""
    entropy_N: torch.Tensor = Entropies.apply(logprobs_NV)  # type: ignore[no-untyped-call]
    return entropy_N


class Entropies(torch.autograd.Function):
    """`entropies`, storing only one [N, V] array: its input. The gradient is with respect to the
    logits; `log_softmax` passes it on unchanged because it sums to 0 over V."""

    @staticmethod
    def forward(ctx: Any, logprobs_NV: torch.Tensor) -> torch.Tensor:
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        ctx.save_for_backward(logprobs_NV, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> torch.Tensor:
        logprobs_NV, entropy_N = ctx.saved_tensors
        rising_NV = (logprobs_NV + entropy_N[:, None]).mul_(logprobs_NV.exp())
        falling_NV: torch.Tensor = rising_NV.mul_(-gradient_N[:, None])
        return falling_NV


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass. transformers does so in training mode only, so
    dropout is removed from the model: it would make the trainer's policy differ from the
    sampler's."""
    model.gradient_checkpointing_enable()
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def update_flops(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective, architecture: Architecture
) -> float:
    """Return the FLOPs of the micro-batch's forward and backward. With checkpointing, body and head
    are recomputed in the backward pass."""
    body, head = batch_flops(architecture, batch, objective.share_prompts)
    body_again = float(model.is_gradient_checkpointing and model.training)
    head_again = float(len(batch.targets_N) > objective.tokens_per_chunk)
    num_tokens, num_pairs = batch_size(batch, objective.share_prompts)
    per_token, read = 2.0 * num_adapter_parameters(model), 0.0
    if not objective.prompt_gradient:  # one forward over the prompts, and no more
        prompts, rest, _ = batch.continued
        num_read, read_pairs = len(prompts.ids), prompts.num_pairs()
        read = forward_flops(architecture, num_read, 0.0, read_pairs) + per_token * num_read
        num_tokens, num_pairs = float(len(rest.ids)), float(rest.num_pairs())
        body = forward_flops(architecture, num_tokens, 0.0, num_pairs)
    if not has_adapters(model):
        return read + (3.0 + body_again) * body + (3.0 + head_again) * head
    # frozen layers have no weight gradient; attention has no weights, so its backward is full
    attention = forward_flops(architecture, 0.0, 0.0, num_pairs)
    body = (2.0 + body_again) * body + attention
    adapters = (3.0 + body_again) * per_token * num_tokens
    return read + body + adapters + (2.0 + head_again) * head


def reference_flops(architecture: Architecture, batch: MicroBatch, objective: Objective) -> float:
    """Return the FLOPs of the reference's forward; `architecture` is the policy's."""
    sizes = objective.reference_architecture or architecture
    return sum(batch_flops(sizes, batch, objective.share_prompts))


def batch_flops(
    architecture: Architecture, batch: MicroBatch, share_prompts: bool
) -> tuple[float, float]:
    """Return the FLOPs of the body and of the output head, in one forward over the micro-batch.
    They include padding; the head runs on completion tokens only."""
    head = forward_flops(architecture, 0.0, float(len(batch.targets_N)), 0.0)
    num_tokens, num_pairs = batch_size(batch, share_prompts)
    return forward_flops(architecture, num_tokens, 0.0, num_pairs), head


def batch_size(batch: MicroBatch, share_prompts: bool) -> tuple[float, float]:
    """Return the number of tokens that a forward over the micro-batch computes, and the number of
    query-key pairs per layer, padding included."""
    if not share_prompts:
        rows, length = batch.whole.input_ids.shape
        return float(rows * length), float(rows) * length * length
    packing, _ = batch.shared
    return float(len(packing.ids)), float(packing.num_pairs())


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Return the learning rate of step `step` (from 0): linear warm-up, constant, then linear decay
    over the last `decay_share` of `progress` to the final fraction (WSD, arXiv 2404.06395)."""
    warm = min((step + 1) / settings.warmup_steps, 1.0) if settings.warmup_steps else 1.0
    decayed = max(progress - (1.0 - settings.decay_share), 0.0) / settings.decay_share
    fallen = (1.0 - settings.final_learning_rate_fraction) * decayed
    return settings.learning_rate * warm * (1.0 - fallen)
