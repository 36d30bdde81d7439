"""The learner: the trained policy, its optimizer, and the gradient of a step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tasks.common.accounting.spending import Rows, pass_cost, prompt_cost
from tasks.common.params import ParamsError
from tasks.engines.memory import TrainingMemory, training_memory
from tasks.engines.settings import Sampling
from tasks.models.adapters import (
    adapters_off,
    has_adapters,
    is_quantized,
    num_adapter_parameters,
    update_factor,
)
from tasks.models.forward_check import check_forward, own_logits
from tasks.models.packing import compile_layers
from tasks.models.policy import Policy, load_model
from tasks.models.sharding import local, shard
from tasks.models.transfer import to_device
from tasks.models.weights import NamedWeights, is_sharded, load_weights, whole
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.noise import noise_of
from tasks.train.data.rollouts import Features, Observed, Rollouts, StepTotals
from tasks.train.learner.balance import rank_of
from tasks.train.learner.micro_batches import MicroBatch, micro_batches
from tasks.train.learner.optimizer import make_optimizer, step
from tasks.train.learner.proximal import ProximalPolicy
from tasks.train.learner.ranks import Ranks
from tasks.train.learner.reference import make_reference
from tasks.train.learner.scoring import compute_states, join_observed, score
from tasks.train.learner.update import (
    Objective,
    UpdateStats,
    accumulate_gradients,
    accumulate_nothing,
    batch_flops,
    compute_logprobs,
    enable_activation_checkpointing,
    merge_stats,
    squared_norm,
    token_logprobs,
)
from tasks.train.needs import reference_parameters
from tasks.train.settings import LearnerSettings, TrainSettings
from tasks.train.slots import Loss

PLAIN = Features()  # only log-probabilities and entropies
FORWARDS = (compute_logprobs, compute_states, own_logits)  # of a sharded policy


def memory_of(
    model: PreTrainedModel, settings: TrainSettings, memory: LearnerSettings, num_ranks: int = 1
) -> TrainingMemory:
    """Return the memory that a learner of `model` will allocate on each of `num_ranks` ranks."""
    head = model.get_output_embeddings()
    # autocast keeps a copy of the linear layers' weights until the step's gradient is done; the
    # head stays in float32, and of weights in 4 bits only one layer at a time is copied
    cast = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    num_cast = sum(
        parameter.numel()
        for module in cast
        for parameter in module.parameters()
        if not is_quantized(parameter)
    )
    adapted = has_adapters(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return training_memory(
        num_parameters,
        num_cast if settings.dtype == "bfloat16" else 0,
        model.config.get_text_config().vocab_size,
        num_trained=num_adapter_parameters(model) if adapted else None,
        num_reference=reference_parameters(settings, 0 if adapted else num_parameters),
        tokens_per_chunk=min(memory.tokens_per_logprob_chunk, memory.max_tokens_per_micro_batch),
        num_shards=num_ranks // memory.replicas if memory.shard != "none" else None,
        optimizer_bits=settings.optimizer_bits,
    )


def sharding_of(
    settings: TrainSettings, memory: LearnerSettings, ranks: Ranks, device: torch.device
) -> Callable[[PreTrainedModel], None] | None:
    """Return the function that shards a policy before it has weights; None with one rank or without
    sharding. Raise ParamsError if `learner.replicas` does not divide the number of ranks."""
    if ranks.size % memory.replicas:
        raise ParamsError(
            f"learner.replicas is {memory.replicas}, and {ranks.size} processes train: it must "
            "divide their number"
        )
    if memory.shard == "none" or ranks.size == 1:
        return None
    dtype = getattr(torch, settings.dtype)
    return partial(shard, device=device, dtype=dtype, forwards=FORWARDS, replicas=memory.replicas)


class Learner:
    """Data-parallel training. Every rank has the policy in float32, or only its own rows. With
    adapters, only these are trained, and the model without them is the initial policy."""

    def __init__(
        self,
        *,
        policy: Policy,
        model: PreTrainedModel,
        settings: TrainSettings,
        memory: LearnerSettings,
        sampling: Sampling,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.policy, self.model, self.ranks = policy, model, ranks
        self.settings, self.memory, self.sampling = settings, memory, sampling
        # sharded layers are gathered in the trainer's dtype
        with self.autocast() if is_sharded(model) else nullcontext():
            check_forward(model, packed=memory.share_prompts)
        self.version = 0  # number of updates
        by_rows = sharding_of(settings, memory, ranks, device) if is_sharded(model) else None
        self.reference, self.reference_architecture = make_reference(
            model, policy, settings, memory, by_rows
        )
        if memory.activation_checkpointing:
            enable_activation_checkpointing(model)
        others = [] if self.reference in (None, model) else [self.reference]
        for each in [model, *others]:
            if memory.compile:
                compile_layers(each)
            if memory.shard != "none" and not is_sharded(each):
                dtype = getattr(torch, settings.dtype)
                shard(each, device, dtype, FORWARDS, memory.replicas)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(trained, settings)
        self.proximal = ProximalPolicy(model, settings.correction.proximal)

    def objective(self, loss: Loss) -> Objective:
        return Objective(
            loss,
            self.settings.correction,
            self.sampling.temperature,
            self.reference if self.reads_reference(loss) else None,
            self.settings.kl_coefficient,
            self.memory.share_prompts,
            self.memory.tokens_per_logprob_chunk,
            self.version,
            self.settings.prompt_gradient,
            self.reference_architecture,
            is_tf32=self.settings.dtype == "bfloat16" and not self.settings.max_staleness,
        )

    def reads_reference(self, loss: Loss) -> bool:
        """Return whether the objective with this loss needs the reference's log-probabilities."""
        return self.settings.kl_coefficient > 0 or loss.reads_reference

    def has_gradient(self, rollouts: Rollouts, loss: Loss) -> Bools:
        """Return [B] whether a rollout is kept and has a gradient. Only such rollouts are computed,
        and charged in `charged_mixed`. Advantage 0 has no gradient, unless there is a reference or
        an entropy bonus."""
        if self.reads_reference(loss) or loss.entropy.is_on:
            return rollouts.kept_B
        return rollouts.kept_B & rollouts.has_advantage_B()

    def compute_gradient(
        self,
        rollouts: Rollouts,
        loss: Loss,
        *,
        cuts_rows: bool = False,
        drops_cut: bool = False,
        with_noise: bool = False,
    ) -> UpdateStats:
        """Write the gradient of the loss of these rollouts into the parameters, summed over ranks
        and clipped. Return sums over their tokens, the gradient's norm and, `with_noise` and two
        graded groups, its noise.

        Rollouts without a gradient are not computed, but count in the loss's denominators; with
        `cuts_rows` the same is true of tokens after a rollout's last nonzero advantage. `drops_cut`
        is as in `totals`.
        """
        totals = self.totals(rollouts, drops_cut=drops_cut)
        kept = self.sums(rollouts, rollouts.kept_B)
        rollouts = rollouts.without_tails() if cuts_rows else rollouts
        rows = self.shard_rows(rollouts, self.has_gradient(rollouts, loss))
        graded = np.unique(rollouts.group_B[~rollouts.is_error_B()])
        in_half = np.isin(rollouts.group_B[rows], graded[:: 2 if with_noise else 1])
        batches = self.micro_batches(rollouts, rows[in_half])
        fillers = self.fillers(rollouts, batches)
        objective, architecture = self.objective(loss), self.policy.architecture
        self.optimizer.zero_grad(set_to_none=True)
        # in evaluation mode transformers keeps all activations; and switching modes takes time
        is_checkpointing = self.memory.activation_checkpointing
        if is_checkpointing:
            self.model.train()
        with self.autocast():
            given = rollouts, objective, totals, architecture, kept
            stats = accumulate_gradients(self.model, batches, *given)
            if with_noise:
                of_half, rest = (
                    squared_norm(self.model),
                    self.micro_batches(rollouts, rows[~in_half]),
                )
                stats = merge_stats([stats, accumulate_gradients(self.model, rest, *given)])
            for filler in fillers:
                nothing = accumulate_nothing(self.model, filler, rollouts, objective, architecture)
                stats = merge_stats([stats, nothing])
        if is_checkpointing:
            self.model.eval()
        stats = merge_stats(self.ranks.all_gather(stats))
        if not self.is_sharded:
            self.ranks.all_reduce_gradients(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        stats.norms = [float(whole(norm))]
        if with_noise and len(graded) > 1:
            stats.noise = [noise_of(len(graded), stats.norms[0] ** 2, of_half)]
        stats.num_nonfinite = int(not np.isfinite([*stats.norms, stats.loss]).all())
        return stats

    def score(self, rollouts: Rollouts, features: Features, loss: Loss) -> tuple[Observed, float]:
        """Return the policy's view of `rollouts`, and the executed FLOPs. Each rank computes its
        share, and all ranks receive all results."""
        mine = self.shard_rows(rollouts, np.ones(len(rollouts.group_B), dtype=np.bool_))
        parts = self.ranks.all_gather(self.score_rows(rollouts, mine, features, loss))
        order_B = np.argsort(np.concatenate([rows_B for rows_B, _, _, _ in parts]))
        order_N = np.argsort(np.concatenate([places_N for _, places_N, _, _ in parts]))
        seen = join_observed([observed for _, _, observed, _ in parts])
        return seen.take(order_B, order_N), sum(flops for _, _, _, flops in parts)

    def score_old(self, rollouts: Rollouts, loss: Loss) -> tuple[Floats, float]:
        """Return [N] the log-probabilities of the proximal policy, and the executed FLOPs. Every
        rollout is computed once per version of its tokens."""
        old_N, flops = np.zeros_like(rollouts.logprobs_N), 0.0
        for version, is_theirs_N in self.proximal.by_version(rollouts, self.version):
            rows = np.unique(rollouts.owner_N()[is_theirs_N])
            with self.proximal.weights_of(version):
                observed, executed = self.score(rollouts.take(rows), PLAIN, loss)
            places_N, flops = rollouts.places(rows), flops + executed
            theirs_N = is_theirs_N[places_N]
            old_N[places_N[theirs_N]] = observed.logprobs_N[theirs_N]
        return old_N, flops

    def score_reference(self, rollouts: Rollouts, loss: Loss) -> tuple[Rollouts, float]:
        """Return the rollouts with the reference's log-probabilities (0 for rollouts without a
        gradient) and the executed FLOPs. Without a reference, return them unchanged."""
        if self.reference is None:
            return rollouts, 0.0
        mine = self.shard_rows(rollouts, self.has_gradient(rollouts, loss))
        with adapters_off(self.reference):
            own = self.score_rows(rollouts, mine, PLAIN, loss, self.reference)
        parts = self.ranks.all_gather(own)
        reference_N = np.zeros_like(rollouts.logprobs_N)
        for _, places_N, seen, _ in parts:
            reference_N[places_N] = seen.logprobs_N
        return replace(rollouts, reference_N=reference_N), sum(flops for _, _, _, flops in parts)

    def score_rows(
        self,
        rollouts: Rollouts,
        rows: Ints,
        features: Features,
        loss: Loss,
        reference: PreTrainedModel | None = None,
        dtype: str | None = None,
    ) -> tuple[Ints, Ints, Observed, float]:
        """Return the view of the rollouts at `rows` by this rank's policy, or by `reference`: the
        rows in the order of the micro-batches, the positions of their tokens in the step's flat
        arrays, the observed values, and the FLOPs. `dtype` replaces the trainer's."""
        model, architecture = self.model, self.policy.architecture
        if reference is not None:
            model, architecture = reference, self.reference_architecture
        batches = self.micro_batches(rollouts, rows, features)
        fillers = self.fillers(rollouts, batches)
        objective = self.objective(loss)
        with self.autocast(dtype):
            observed, flops = score(
                model, batches, objective, features, rollouts.trained_N(), architecture
            )
            for filler in fillers:
                with torch.no_grad():
                    token_logprobs(model, filler, objective)
                flops += sum(batch_flops(architecture, filler, objective.share_prompts))
        nothing = np.zeros(0, dtype=np.int64)
        rows_B = np.concatenate([nothing, *(batch.rows for batch in batches)])
        places_N = np.concatenate([nothing, *(batch.places_N for batch in batches)])
        return rows_B, places_N, observed, flops

    def shard_rows(self, rollouts: Rollouts, included_B: Bools) -> Ints:
        """Return this rank's rows among the rollouts of `included_B`. All ranks get about the same
        number of tokens (see `balance`)."""
        rows, num_ranks = np.flatnonzero(included_B), self.ranks.size
        if num_ranks == 1 or not len(rows):
            return rows
        shares = self.memory.share_prompts
        is_mine = rank_of(rollouts, rows, num_ranks, shares=shares) == self.ranks.rank
        return np.asarray(rows[is_mine])

    def micro_batches(
        self, rollouts: Rollouts, rows: Ints, features: Features = PLAIN
    ) -> list[MicroBatch]:
        """Return the micro-batches of a pass that supplies `features`. Hidden states need whole
        rows, and gradient norms one rollout at a time."""
        memory = self.memory
        return micro_batches(
            rollouts,
            rows,
            1 if features.gradient_norms else memory.max_tokens_per_micro_batch,
            self.model.device,
            by_group=memory.share_prompts and features.hidden_layer is None,
        )

    def fillers(self, rollouts: Rollouts, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return dummy micro-batches that give every rank of a sharded policy the same number, as
        ranks gather parameters together. All ranks must call this before they compute."""
        if not self.is_sharded:
            return []
        missing = max(self.ranks.all_gather(len(batches))) - len(batches)
        shortest = np.array([int(np.argmin(rollouts.tokens_B()))])
        return self.micro_batches(rollouts, shortest) * missing

    @property
    def is_sharded(self) -> bool:
        """Whether this rank stores only some rows of the policy's parameters."""
        return is_sharded(self.model)

    def autocast(self, dtype: str | None = None) -> torch.autocast:
        """Return the context of the forwards, in the trainer's dtype or in `dtype`."""
        dtype = dtype or self.settings.dtype
        return torch.autocast(
            self.model.device.type,
            torch.float16 if dtype == "float16" else torch.bfloat16,
            enabled=dtype != "float32",
            cache_enabled=not self.is_sharded,  # the cached copies would be of the whole policy
        )

    def totals(self, rollouts: Rollouts, *, drops_cut: bool = False) -> StepTotals:
        """Return the denominators of the loss, as set by `train.divisor`. With `drops_cut` they
        count no tokens of completions that were cut at the token limit."""
        counted_B = rollouts.kept_B if self.settings.divisor == "kept" else ~rollouts.is_error_B()
        if not drops_cut:
            return self.sums(rollouts, counted_B)
        in_tokens = self.sums(rollouts, counted_B & ~rollouts.is_cut_B())
        return replace(in_tokens, num_rollouts=int(counted_B.sum()))

    def sums(self, rollouts: Rollouts, counted_B: Bools) -> StepTotals:
        """Return the loss's divisors over the rollouts that `counted_B` marks."""
        owner_N = rollouts.owner_N()[rollouts.trained_N()]
        group_N = rollouts.group_B[owner_N[counted_B[owner_N]]]
        tokens_Q = np.bincount(group_N, minlength=len(rollouts.prompt_rows_Q))
        return StepTotals(
            len(group_N),
            int(counted_B.sum()),
            self.sampling.max_tokens,
            to_device(tokens_Q * np.count_nonzero(tokens_Q), self.model.device),
        )

    def step(self, rate: float) -> None:
        """Take an optimizer step, count it in `version`, and free the gradient's memory."""
        step(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def reference_tensors(self) -> dict[str, torch.Tensor]:
        """Return the reference's tensors by name if it is reset periodically, else {}."""
        if self.reference is None or self.settings.reference.reset_every is None:
            return {}
        return {f"reference.{name}": part for name, part in self.reference.named_parameters()}

    def reset_reference(self, num_steps: int) -> None:
        """Copy the policy into the reference if a reset is due after `num_steps` steps."""
        tensors = self.reference_tensors()
        if tensors and num_steps % (self.settings.reference.reset_every or 1) == 0:
            for mine, theirs in zip(tensors.values(), self.model.parameters(), strict=True):
                local(mine).copy_(local(theirs.detach()))

    def log_ratios(self, rollouts: Rollouts, loss: Loss) -> tuple[torch.Tensor, float]:
        """Return [N] the trainer's minus the sampler's log-probabilities, of all completion tokens
        in the order of the micro-batches, and the FLOPs that this rank executed."""
        every = np.arange(len(rollouts.group_B))
        _, places_N, observed, flops = self.score_rows(rollouts, every, PLAIN, loss)
        return torch.from_numpy(observed.logprobs_N - rollouts.logprobs_N[places_N]), flops

    def rounding(self, rollouts: Rollouts, loss: Loss, dtype: str) -> float:
        """Return the mean absolute difference between the log-probabilities of `rollouts` in
        float32 and by autocast to `dtype`. A sharded policy is gathered in one dtype: return 0."""
        if self.is_sharded:
            return 0.0
        every = np.arange(len(rollouts.group_B))
        precise_N, rounded_N = (
            self.score_rows(rollouts, every, PLAIN, loss, dtype=each)[2].logprobs_N
            for each in ("float32", dtype)
        )
        return float(np.abs(rounded_N - precise_N).mean())

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the policy's weights by name, as engines load them. If they are sharded, all ranks
        must read them together."""
        return NamedWeights(self.model)

    def whole_model(self) -> PreTrainedModel | None:
        """Return the policy with all its weights, adapters merged. For a sharded or adapted policy
        rank 0 gets a copy in main memory, the others None; every rank must call this."""
        if not self.is_sharded and not has_adapters(self.model):
            return self.model
        model = None
        if self.ranks.is_main:
            model = load_model(
                self.policy.folder,
                dtype=torch.float32,
                device=torch.device("cpu"),
                trust_remote_code=self.policy.trust_remote_code,
            )
        load_weights(model, self.weights())
        return model

    def adapter(self) -> dict[str, torch.Tensor]:
        """Return the adapters' weights in main memory, by their names in the model; empty for a
        policy without adapters. Every rank must call this."""
        return {
            name: whole(parameter.detach()).cpu()
            for name, parameter in self.model.named_parameters()
            if has_adapters(self.model) and parameter.requires_grad
        }

    def update_cost(self, account: str, rows: Rows, epochs: int = 1) -> float:
        """Return the cost of `epochs` epochs of updates on `rows`, in the unit of `account`."""
        architecture, factor = self.policy.architecture, self.update_factor
        cost = factor * epochs * pass_cost(account, architecture, rows)
        if self.settings.prompt_gradient:
            return cost
        return cost - (factor - 1.0) * epochs * prompt_cost(account, architecture, rows)

    def score_cost(self, account: str, rows: Rows, features: Features) -> float:
        """Return the cost of `score` on `rows`, in the unit of `account`. Gradient norms cost as
        much as an update."""
        if features.gradient_norms:
            return self.update_cost(account, rows)
        return pass_cost(account, self.policy.architecture, rows)

    @cached_property
    def update_factor(self) -> float:
        """See `adapters.update_factor`."""
        return update_factor(self.model, self.policy.architecture)
