"""Forward passes before the update: log-probabilities and entropies of a step's rollouts, and the
hidden states and gradient norms that a slot requests.

If a batch is used for several updates, the old log-probabilities are those of this pass. It has no
gradient, except for the norms.

Legend: B rollouts, N their completion tokens, L padded length, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.common.accounting.ledger import Architecture
from tasks.models.packing import forward_rows
from tasks.models.sharding import call
from tasks.models.transfer import index_of, to_host
from tasks.train.data.columns import Bools, Singles
from tasks.train.data.rollouts import Features, Observed
from tasks.train.learner.micro_batches import MicroBatch
from tasks.train.learner.update import (
    Objective,
    batch_flops,
    chunked_logprobs,
    token_logprobs,
    update_flops,
)

PROMPT_TOKENS = 10  # tokens at the end of a prompt whose hidden states are averaged (as in POISE)


def score(
    model: PreTrainedModel,
    batches: list[MicroBatch],
    objective: Objective,
    features: Features,
    own_N: Bools,
    architecture: Architecture,
) -> tuple[Observed, float]:
    """Return the policy's features of the rollouts in `batches`, in their order, and the executed
    FLOPs. `own_N` marks the step's tokens that the policy wrote; gradient norms include no other
    tokens."""
    # keep tensors on the device until all micro-batches are queued; but hidden states may not fit
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    prompts: list[torch.Tensor] = []
    hidden: list[Singles] = []
    flops = 0.0
    # hidden states need whole rows
    shared = objective.share_prompts and features.hidden_layer is None
    objective = replace(objective, share_prompts=shared)
    for batch in batches:
        with torch.set_grad_enabled(features.gradient_norms):
            if features.hidden_layer is None:
                logprobs_N, entropies_N = token_logprobs(model, batch, objective)
            else:
                logprobs_N, entropies_N, layer = call(
                    compute_states, model, batch, objective, features.hidden_layer
                )
                layer = layer.detach()
                hidden.append(batch.whole.predicting(layer).float().cpu().numpy())
                prompts.append(prompt_means(layer, batch.whole.prompt_ends_B))
        if features.gradient_norms:
            assert len(batch.rows) == 1  # each of several would need a backward pass over all
            norms.append(gradient_norm(model, logprobs_N, own_N[batch.places_N]))
            flops += update_flops(model, batch, objective, architecture)
        else:
            flops += sum(batch_flops(architecture, batch, objective.share_prompts))
        batch.free()
        logprobs.append(logprobs_N.detach().float())
        entropies.append(entropies_N.detach().float())
    nothing = torch.zeros(0, device=model.device)
    lists = logprobs, entropies, norms, prompts
    read = to_host([torch.cat([nothing, *parts]) for parts in lists])
    all_logprobs_N, all_entropies_N, norms_B, prompt_BD = (tensor.numpy() for tensor in read)
    observed = Observed(
        all_logprobs_N.astype(np.float64),
        all_entropies_N.astype(np.float64),
        np.concatenate(hidden) if hidden else None,
        prompt_BD if prompts else None,
        norms_B.astype(np.float64) if norms else None,
    )
    return observed, flops


def compute_states(
    model: PreTrainedModel, batch: MicroBatch, objective: Objective, layer: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [N] log-probabilities, [N] entropies, and [B, L, D] the hidden states of a layer.
    Every rollout is a separate row with its prompt."""
    states = forward_rows(model, batch.whole.input_ids, output_hidden_states=True)
    hidden_ND = batch.whole.predicting(states.last_hidden_state)
    logprobs_N, entropies_N = chunked_logprobs(model, hidden_ND, batch.targets_N, objective)
    return logprobs_N, entropies_N, states.hidden_states[layer]


def prompt_means(hidden_BLD: torch.Tensor, last_B: torch.Tensor) -> torch.Tensor:
    """Return [B, D] the mean hidden state of at most PROMPT_TOKENS tokens, the last at `last_B`."""
    places = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)
    of_prompt = (places <= last_B[:, None]) & (places > last_B[:, None] - PROMPT_TOKENS)
    weights = of_prompt / of_prompt.sum(1, keepdim=True)
    return torch.einsum("bld,bl->bd", hidden_BLD.float(), weights)


def gradient_norm(model: PreTrainedModel, logprobs_N: torch.Tensor, own_N: Bools) -> torch.Tensor:
    """Return [1] the gradient norm of the log-probability of the tokens that the policy wrote."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = index_of(own_N, logprobs_N.device)
    gradients = torch.autograd.grad(logprobs_N[own].sum(), parameters, allow_unused=True)
    squares = [part.float().square().sum() for part in gradients if part is not None]
    return torch.stack(squares).sum().sqrt()[None]


def join_observed(parts: Sequence[Observed]) -> Observed:
    """Concatenate the views of several sets of rollouts."""

    def joined(name: str) -> Any:
        arrays = [array for part in parts if (array := getattr(part, name)) is not None]
        return np.concatenate(arrays) if arrays else None

    return Observed(*(joined(field.name) for field in fields(Observed)))
