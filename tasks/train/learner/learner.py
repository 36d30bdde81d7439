"""The learner: the policy that is trained, its optimizer, and the gradient of a step."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tasks.engines.memory import TrainingMemory, training_memory
from tasks.engines.settings import Sampling
from tasks.models.adapters import has_adapters, is_quantized, num_adapter_parameters
from tasks.models.forward_check import check_forward
from tasks.models.policy import Policy, load_model
from tasks.models.weights import NamedWeights, is_sharded, whole
from tasks.train.learner.micro_batches import MicroBatch, micro_batches
from tasks.train.learner.observe import compute_states, join_observed, observe
from tasks.train.learner.optimizer import make_optimizer, step
from tasks.train.learner.ranks import Ranks
from tasks.train.learner.sharding import shard
from tasks.train.learner.update import (
    Objective,
    UpdateStats,
    accumulate_gradients,
    accumulate_nothing,
    batch_flops,
    compute_logprobs,
    enable_activation_checkpointing,
    merge_stats,
    token_logprobs,
)
from tasks.train.rollouts import (
    Bools,
    Estimate,
    Features,
    Ints,
    Observed,
    Rollouts,
    StepTotals,
    flat,
)
from tasks.train.settings import LearnerSettings, TrainSettings
from tasks.train.slots import Loss


def memory_of(
    model: PreTrainedModel, settings: TrainSettings, memory: LearnerSettings, num_ranks: int = 1
) -> TrainingMemory:
    """What a learner of `model` will allocate on each of `num_ranks`."""
    head = model.get_output_embeddings()
    # autocast keeps a copy of the weights of products until the step's gradient is done; the head
    # stays in float32, and of weights in 4 bits there is one layer at a time
    cast = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head]
    num_cast = sum(
        parameter.numel()
        for module in cast
        for parameter in module.parameters()
        if not is_quantized(parameter)
    )
    adapted = has_adapters(model)
    return training_memory(
        sum(parameter.numel() for parameter in model.parameters()),
        num_cast if settings.dtype == "bfloat16" else 0,
        model.config.get_text_config().vocab_size,
        num_trained=num_adapter_parameters(model) if adapted else None,
        has_reference=settings.kl_coefficient > 0 and not adapted,
        tokens_per_chunk=min(memory.tokens_per_logprob_chunk, memory.max_tokens_per_micro_batch),
        num_shards=num_ranks if memory.shard != "none" else None,
        optimizer_bits=settings.optimizer_bits,
    )


def reference_of(model: PreTrainedModel) -> PreTrainedModel:
    """What the KL term holds on to: the policy as it is now, in a copy. Adapters are turned off
    instead."""
    return model if has_adapters(model) else copy.deepcopy(model).requires_grad_(False)


class Learner:
    """Data parallel over ranks; every rank holds the policy in float32, or its rows of it. Of a
    policy with adapters these alone are trained, and the reference is the policy without them."""

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel,
        settings: TrainSettings,
        memory: LearnerSettings,
        sampling: Sampling,
        ranks: Ranks,
        device: torch.device | None = None,
    ) -> None:
        check_forward(model, packed=memory.share_prompts)
        self.policy, self.model, self.ranks = policy, model, ranks
        self.settings, self.memory, self.sampling = settings, memory, sampling
        self.version = 0  # updates made
        has_reference = settings.kl_coefficient > 0
        self.reference = reference_of(model) if has_reference else None
        if memory.activation_checkpointing:
            enable_activation_checkpointing(model)
        if memory.shard != "none":
            others = [] if self.reference in (None, model) else [self.reference]
            for each in [model, *others]:
                shard(each, device or model.device, (compute_logprobs, compute_states))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(trained, settings)

    def objective(self, loss: Loss) -> Objective:
        """What a step's gradient is of."""
        return Objective(
            loss,
            self.settings.correction,
            self.sampling.temperature,
            self.reference,
            self.settings.kl_coefficient,
            self.memory.share_prompts,
            self.memory.tokens_per_logprob_chunk,
            self.version,
        )

    def has_gradient(self, rollouts: Rollouts, estimate: Estimate) -> Bools:
        """[B] the kept rollouts with a gradient: they are computed, and charged in `charged_mixed`.
        Advantage 0 has none, without a KL term."""
        keep_B = estimate.keep_B
        return keep_B if self.reference is not None else keep_B & estimate.has_advantage_B(rollouts)

    def compute_gradient(self, rollouts: Rollouts, estimate: Estimate, loss: Loss) -> UpdateStats:
        """Put the gradient of the loss of these rollouts into the parameters, summed over ranks and
        clipped; returns sums over their tokens, and the gradient's norm.

        Rollouts without a gradient are not computed, but count in the loss's denominators.
        """
        rows = self.shard_rows(rollouts, self.has_gradient(rollouts, estimate))
        batches = self.micro_batches(rollouts, rows)
        fillers = self.fillers(rollouts, batches)
        totals = self.totals(rollouts, estimate.keep_B)
        kept = self.sums(rollouts, estimate.keep_B)
        objective, architecture = self.objective(loss), self.policy.architecture
        self.optimizer.zero_grad(set_to_none=True)
        # in evaluation mode transformers keeps all activations; and changing it takes time
        is_checkpointing = self.memory.activation_checkpointing
        if is_checkpointing:
            self.model.train()
        with self.autocast():
            stats = accumulate_gradients(
                self.model, batches, rollouts, estimate, objective, totals, architecture, kept
            )
            for filler in fillers:
                nothing = accumulate_nothing(self.model, filler, objective, architecture)
                stats = merge_stats([stats, nothing])
        if is_checkpointing:
            self.model.eval()
        stats = merge_stats(self.ranks.all_gather(stats))
        if not self.is_sharded:
            self.ranks.all_reduce_gradients(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        stats.norms = [float(whole(norm))]
        stats.num_nonfinite = int(not np.isfinite([*stats.norms, stats.loss]).all())
        return stats

    def observe(self, rollouts: Rollouts, features: Features, loss: Loss) -> tuple[Observed, float]:
        """The policy's view of `rollouts`, and the FLOPs that the pass executed. Ranks look at
        whole groups each, and all of them get all."""
        mine = self.shard_rows(rollouts, np.ones(len(rollouts.group_B), dtype=np.bool_))
        parts = self.ranks.all_gather(self.look(rollouts, mine, features, loss))
        order_B = np.argsort(np.concatenate([rows_B for rows_B, _, _, _ in parts]))
        order_N = np.argsort(np.concatenate([places_N for _, places_N, _, _ in parts]))
        seen = join_observed([observed for _, _, observed, _ in parts])
        return seen.take(order_B, order_N), sum(flops for _, _, _, flops in parts)

    def look(
        self, rollouts: Rollouts, rows: Ints, features: Features, loss: Loss
    ) -> tuple[Ints, Ints, Observed, float]:
        """This rank's view of the rollouts `rows`, in the order of its micro-batches: which
        rollouts these are, the places of their tokens, what is seen of them, and the FLOPs."""
        # hidden states are taken from whole rows, gradient norms from one rollout at a time
        batches = self.micro_batches(
            rollouts,
            rows,
            by_group=self.memory.share_prompts and features.hidden_layer is None,
            max_tokens=1 if features.gradient_norms else None,
        )
        fillers = self.fillers(rollouts, batches)
        objective, architecture = self.objective(loss), self.policy.architecture
        with self.autocast():
            observed, flops = observe(
                self.model, batches, objective, features, rollouts.trained_N(), architecture
            )
            for filler in fillers:
                with torch.no_grad():
                    token_logprobs(self.model, filler, objective)
                flops += sum(batch_flops(architecture, filler, objective.share_prompts))
        nothing = np.zeros(0, dtype=np.int64)
        rows_B = np.concatenate([nothing, *(batch.rows for batch in batches)])
        places_N = np.concatenate([nothing, *(batch.places_N for batch in batches)])
        return rows_B, places_N, observed, flops

    def shard_rows(self, rollouts: Rollouts, chosen_B: Bools) -> Ints:
        """The chosen rollouts of this rank: whole groups go to one, which prefills their prompts
        once."""
        groups = self.ranks.shard(np.unique(rollouts.group_B[chosen_B]).tolist())
        return np.flatnonzero(chosen_B & np.isin(rollouts.group_B, groups))

    def micro_batches(
        self,
        rollouts: Rollouts,
        rows: Ints,
        *,
        by_group: bool | None = None,
        max_tokens: int | None = None,
    ) -> list[MicroBatch]:
        """See `micro_batches.micro_batches`; by default as the section `learner` says."""
        return micro_batches(
            rollouts,
            rows,
            max_tokens or self.memory.max_tokens_per_micro_batch,
            self.model.device,
            by_group=self.memory.share_prompts if by_group is None else by_group,
            max_shared_tokens=self.memory.max_shared_tokens,
        )

    def fillers(self, rollouts: Rollouts, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """What a rank with fewer micro-batches than another computes besides, for nothing: ranks of
        a sharded policy gather its parameters together. All of them ask before they compute."""
        if not self.is_sharded:
            return []
        missing = max(self.ranks.all_gather(len(batches))) - len(batches)
        shortest = np.array([int(np.argmin(rollouts.tokens_B()))])
        return self.micro_batches(rollouts, shortest) * missing

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds some rows of the policy's parameters only."""
        return is_sharded(self.model)

    def autocast(self) -> torch.autocast:
        is_bfloat16 = self.settings.dtype == "bfloat16"
        return torch.autocast(
            self.model.device.type,
            torch.bfloat16,
            enabled=is_bfloat16,
            cache_enabled=not self.is_sharded,  # its copies would be of the whole policy
        )

    def totals(self, rollouts: Rollouts, keep_B: Bools) -> StepTotals:
        """What the loss may divide by, as `train.divisor` has it."""
        is_kept = self.settings.divisor == "kept"
        return self.sums(rollouts, keep_B if is_kept else ~rollouts.is_error_B())

    def sums(self, rollouts: Rollouts, counted_B: Bools) -> StepTotals:
        """The totals of the rollouts that `counted_B` marks."""
        num_tokens = int((rollouts.trained_N() & counted_B[rollouts.owner_N()]).sum())
        return StepTotals(num_tokens, int(counted_B.sum()), self.sampling.max_tokens)

    def step(self, rate: float) -> None:
        """Move the parameters along their gradient, which is gone afterwards: the engine may need
        its memory."""
        step(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def log_ratios(self, rollouts: Rollouts, loss: Loss) -> tuple[torch.Tensor, float]:
        """[N] the trainer's log-probabilities less the sampler's, of all completion tokens, and the
        FLOPs that this rank executed."""
        every = np.arange(len(rollouts.group_B))
        _, places_N, observed, flops = self.look(rollouts, every, Features(), loss)
        sampler_N = flat(rollouts.samples.logprobs, np.float64)[places_N]
        return torch.from_numpy(observed.logprobs_N - sampler_N), flops

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The policy's weights by name, as engines take them. Where they are sharded, all ranks
        must take them together."""
        return NamedWeights(self.model)

    def whole_model(self) -> PreTrainedModel | None:
        """The policy with all its weights, adapters added to them. Of a sharded or an adapted one
        the first rank gets a copy in main memory, the others None, and every rank must ask."""
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
        copies = model.state_dict() if model is not None else {}
        for name, tensor in self.weights().items():
            if name in copies:
                copies[name].copy_(tensor)
        return model

    def adapter(self) -> dict[str, torch.Tensor]:
        """The adapters' weights in main memory, by their names in the model; none of a policy that
        is trained whole. Every rank must ask."""
        return {
            name: whole(parameter.detach()).cpu()
            for name, parameter in self.model.named_parameters()
            if has_adapters(self.model) and parameter.requires_grad
        }

    @property
    def update_factor(self) -> float:
        """What an update costs a token, in forwards of the policy: a forward, and as much for each
        of the gradients of what a layer reads and of its weights. Adapters train no weights but
        their own."""
        matmul = self.policy.architecture.num_matmul_parameters
        num_adapted = num_adapter_parameters(self.model)
        return 2.0 + 3.0 * num_adapted / matmul if num_adapted else 3.0
