"""The policy-gradient update: log-probabilities of what was sampled, and the step's gradient, a
micro-batch at a time.

With `share_prompts` the prompt of a group is encoded once for all its rollouts (as in Prefix
Grouper, arXiv 2506.05433): a forward over the prompts keeps its keys and values *in the graph*,
each rollout's completion attends to a copy of its group's, and autograd sums the copies' gradients.
Log-probabilities are computed over chunks of tokens whose logits are computed again in the backward
pass, so [B, T, V] never exists. Nothing is read of a device before all micro-batches are under way,
so a GPU need not wait for the host.

Legend: B rollouts of a micro-batch, Q prompts in it, P prompt positions, T positions that predict
completion tokens, N = the completion tokens of the micro-batch, D hidden size, V vocabulary."""

from dataclasses import dataclass, field, fields

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.common.ledger import Architecture, forward_flops
from tasks.models.adapters import adapters_off, has_adapters, num_adapter_parameters
from tasks.models.packing import forward, forward_rows, head_logits
from tasks.models.transfer import chosen, to_device, to_host
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import MicroBatch
from tasks.train.learner.sharding import call
from tasks.train.rollouts import Estimate, Floats, Rollouts, StepTotals
from tasks.train.settings import Correction, TrainSettings
from tasks.train.slots import Loss
from tasks.train.tokens import Tokens, average


@dataclass(frozen=True)
class Objective:
    """What a step's gradient is of. `reference` is the policy that the KL term holds on to, None
    without one."""

    loss: Loss
    correction: Correction
    temperature: float
    reference: PreTrainedModel | None
    kl_coefficient: float
    share_prompts: bool
    tokens_per_chunk: int
    version: int = 0  # of the policy


@dataclass
class UpdateStats:
    """Sums over the tokens of a step's micro-batches, and what forward and backward (and the
    reference's forward) executed. Of fresh rollouts of the current policy the log-ratios of trainer
    and sampler themselves; of all rollouts the logarithm of their importance weight, not capped. Of
    every optimizer step the norm of its gradient before clipping and the factor of its learning
    rate; and how many gradients were not finite."""

    loss: float = 0.0
    num_tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
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


def merge_stats(parts: list[UpdateStats]) -> UpdateStats:
    """The sums of several ranks, or of several updates."""
    if len(parts) == 1:
        return parts[0]
    merged = UpdateStats()
    for field_ in fields(UpdateStats):
        values = [getattr(part, field_.name) for part in parts]
        setattr(merged, field_.name, sum(values, type(values[0])()))  # numbers or lists
    return merged


def accumulate_gradients(
    model: PreTrainedModel,
    batches: list[MicroBatch],
    rollouts: Rollouts,
    estimate: Estimate,
    objective: Objective,
    totals: StepTotals,
    architecture: Architecture,
    kept: StepTotals | None = None,
) -> UpdateStats:
    """Add the gradient of the whole step's objective to the parameters. The rollouts' old
    log-probabilities are the policy's own where `estimate` has none. The loss is divided by
    `totals`, the KL term by the totals of the `kept` rollouts, over which it is summed; None: all
    are."""
    stats, unread = UpdateStats(), list[dict[str, torch.Tensor]]()
    trained_N, is_current_N = rollouts.trained_N(), rollouts.is_current_N(objective.version)
    for batch in batches:
        reference_N = reference_logprobs(batch, objective)

        # the policy's log-probabilities of the tokens that it wrote itself
        own_N = trained_N[batch.places_N]
        own = chosen(own_N, batch.device)
        logprobs_N, entropy_N = (part[own] for part in token_logprobs(model, batch, objective))
        sampler_N = batch.sampler_logprobs_N[own]

        old_N = logprobs_N.detach()
        if estimate.old_N is not None:
            old_N = of_batch(batch, estimate.old_N, logprobs_N)[own]
        advantages_N = of_batch(batch, estimate.advantages_N, logprobs_N)[own]
        rows = batch.row_N[own], len(batch.rows)
        tokens, cut_N = corrected_tokens(
            logprobs_N, old_N, sampler_N, advantages_N, *rows, objective.correction
        )
        part, sums = objective.loss(tokens, totals)

        # the pull towards the reference, averaged as the loss is, but over what is kept
        kl_N = logprobs_N[:0]
        if reference_N is not None:
            kl_N = unbiased_kl(tokens, reference_N[own])
            kl = average(kl_N, tokens, kept or totals, objective.loss.normalize)
            part = part + objective.kl_coefficient * kl
            stats.reference_flops += sum(batch_flops(architecture, batch, objective.share_prompts))

        part.backward()

        # statistics; whatever is read here makes the host wait
        clipped, weights_N = sums["clipped"], tokens.weights_N
        unread.append(statistics(part, clipped, entropy_N, kl_N, cut_N, weights_N))
        is_current = chosen(is_current_N[batch.places_N][own_N], batch.device)
        stats.log_ratios.append((logprobs_N.detach() - sampler_N)[is_current])
        stats.log_weights.append(tokens.by_row(old_N - sampler_N))
        stats.num_tokens += len(logprobs_N)
        stats.flops += update_flops(model, batch, objective, architecture)
        if objective.share_prompts:
            batch.shared[0].biases.clear()  # [R, T, S] each: those of all micro-batches may not fit
    if unread:
        read(stats, unread)
    return stats


def statistics(
    loss: torch.Tensor,
    clipped: torch.Tensor,
    entropy_N: torch.Tensor,
    kl_N: torch.Tensor,
    cut_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """A micro-batch's sums by their names in `UpdateStats`, still on its device."""
    sums = {
        "loss": loss,
        "entropy": entropy_N.sum(),
        "clipped": clipped,
        "capped": cut_N.sum(),
        "kl": kl_N.sum(),
        "weights": weights_N.sum(),
        "squared_weights": (weights_N**2).sum(),
    }
    return {name: value.detach().double() for name, value in sums.items()}


def of_batch(batch: MicroBatch, values_N: Floats, like: torch.Tensor) -> torch.Tensor:
    """The micro-batch's part of an array over all completion tokens, as a tensor like another."""
    return to_device(values_N[batch.places_N], like.device).to(like.dtype)


def read(stats: UpdateStats, unread: list[dict[str, torch.Tensor]]) -> None:
    """Bring what was computed on a device to the host, which waits for it: the sums of every
    micro-batch, by their names in `stats`, and the log-ratios and log-weights that it has."""
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
def reference_logprobs(batch: MicroBatch, objective: Objective) -> torch.Tensor | None:
    """[N] the reference's log-probabilities; None without one. It may be the policy itself, without
    its adapters: the forward with gradient comes after."""
    if objective.reference is None:
        return None
    with adapters_off(objective.reference):
        return token_logprobs(objective.reference, batch, objective)[0]


def unbiased_kl(tokens: Tokens, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] k3 times the corrected ratio of policy and sampler, with gradient: value and *gradient*
    are unbiased estimates, but for the weights' cap, of KL(policy | reference) and its gradient
    (DeepSeek-V3.2). k3 alone has the gradient of the KL the other way round."""
    ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).exp() * tokens.weights_N
    return ratio_N * k3(tokens.logprobs_N, reference_N)


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N] the unbiased, never negative estimate of KL(policy | reference) from a sampled token
    (Schulman, 2020)."""
    gap_N = reference_N - logprobs_N
    return gap_N.exp() - gap_N - 1.0


def accumulate_nothing(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective, architecture: Architecture
) -> UpdateStats:
    """Compute `batch` as `accumulate_gradients` does, for a gradient of zero: where the policy is
    sharded, a rank with fewer micro-batches than others takes part in theirs."""
    stats = UpdateStats()
    if reference_logprobs(batch, objective) is not None:
        stats.reference_flops = sum(batch_flops(architecture, batch, objective.share_prompts))
    logprobs_N, _ = token_logprobs(model, batch, objective)
    (0.0 * logprobs_N.sum()).backward()
    stats.flops = update_flops(model, batch, objective, architecture)
    return stats


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities of completion tokens at the sampling temperature, and [N] entropies."""
    return call(compute_logprobs, model, batch, objective)


def compute_logprobs(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `token_logprobs`."""
    if objective.share_prompts:  # each prompt is read once and nothing padded
        packing, predicts_N = batch.shared
        states = forward(model, packing.ids, packing.positions, packing.attend)
        hidden_ND = states.index_select(0, predicts_N)
    else:  # padding stands at the end, where a causal model cannot see it: no mask is needed
        states = forward_rows(model, batch.whole.input_ids).last_hidden_state
        hidden_ND = batch.whole.predicting(states)
    return chunked_logprobs(model, hidden_ND, batch.targets_N, objective)


def chunked_logprobs(
    model: PreTrainedModel, hidden_ND: torch.Tensor, targets_N: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities and [N] entropies (without gradient), never more than a chunk's [n, V]
    at a time."""
    size = objective.tokens_per_chunk
    if len(hidden_ND) <= size:
        return project(model, hidden_ND, targets_N, objective.temperature)
    parts = [
        checkpoint(project, model, hidden, targets, objective.temperature, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def project(
    model: PreTrainedModel, hidden_ND: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities of the targets and [N] entropies of the distributions, in float32."""
    # in float32 also under autocast: a bfloat16 head moves log-probabilities by a percent and more
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = head_logits(model, hidden_ND.float())
    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    # by a sum of one, not by a view: FSDP puts its hooks on what a forward returns
    return logprobs_NV.gather(-1, targets_N[:, None]).sum(-1), entropy_N


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Compute each layer again in the backward pass. transformers does so in training mode only, so
    dropout, which would make the trainer another policy than the sampler, is taken out of the
    model."""
    model.gradient_checkpointing_enable()
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def update_flops(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective, architecture: Architecture
) -> float:
    """What the micro-batch's forward and backward execute. Body and head are computed once more in
    the backward pass where they are checkpointed."""
    body, head = batch_flops(architecture, batch, objective.share_prompts)
    body_again = float(model.is_gradient_checkpointing and model.training)
    head_again = float(len(batch.targets_N) > objective.tokens_per_chunk)
    if not has_adapters(model):
        return (3.0 + body_again) * body + (3.0 + head_again) * head
    # of frozen layers no gradient of the weights; attention has none, and its backward is whole
    num_tokens, num_pairs = batch_size(batch, objective.share_prompts)
    attention = forward_flops(architecture, 0.0, 0.0, num_pairs)
    adapters = 2.0 * num_adapter_parameters(model) * num_tokens
    body = (2.0 + body_again) * body + attention + (3.0 + body_again) * adapters
    return body + (2.0 + head_again) * head


def batch_flops(
    architecture: Architecture, batch: MicroBatch, share_prompts: bool
) -> tuple[float, float]:
    """What one forward over the micro-batch executes, padding included: the body, and the output
    head, which runs on completion tokens only."""
    head = forward_flops(architecture, 0.0, float(len(batch.targets_N)), 0.0)
    num_tokens, num_pairs = batch_size(batch, share_prompts)
    return forward_flops(architecture, num_tokens, 0.0, num_pairs), head


def batch_size(batch: MicroBatch, share_prompts: bool) -> tuple[float, float]:
    """The tokens that a forward over the micro-batch computes, and the pairs of queries and keys in
    every layer, padding included."""
    if not share_prompts:
        rows, length = batch.whole.input_ids.shape
        return float(rows * length), float(rows) * length * length
    packing, _ = batch.shared
    return float(len(packing.ids)), float(packing.num_pairs())


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Linear warm-up; over the last `decay_share` of the run's progress linear decay to the final
    fraction, and constant between (WSD, arXiv 2404.06395)."""
    warm = min((step + 1) / settings.warmup_steps, 1.0) if settings.warmup_steps else 1.0
    decayed = max(progress - (1.0 - settings.decay_share), 0.0) / settings.decay_share
    fallen = (1.0 - settings.final_learning_rate_fraction) * decayed
    return settings.learning_rate * warm * (1.0 - fallen)
