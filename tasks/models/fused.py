"""The forward of small Llama-like decoders in as few operations as possible: most of their decoding
time is the overhead of calls.

It replaces transformers' own modules (`packing.forward`), for sampling only. Rotary tables are
computed once, the weights of norms are folded into the projections after them, projections of the
same states are one matmul, sums are folded into matmuls, and weights are transposed (a matmul of
few rows is up to twice as fast). All of this requires copies of the weights. Large models spend
their time in matmuls anyway, so they use transformers' modules, as do models that `fits` rejects.

Legend: N packed tokens, H query heads, K key-value heads, D size of a head, V vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from tasks.models.adapters import merged_weight
from tasks.models.packing import Attend

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# rotary embeddings with tables that depend on the current length of the sequence
CHANGING_ROTATIONS = {"dynamic", "longrope"}
# above this, copying the weights costs more than it saves
MAX_PARAMETERS = 200_000_000


def fits(model: PreTrainedModel) -> bool:
    """Return whether this forward supports the model, and would be faster."""
    config: Any = model.config
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    known = (
        type(model).__name__ in FAMILY
        and config.hidden_act == "silu"
        and rotation not in CHANGING_ROTATIONS
    )
    return known and model.num_parameters() <= MAX_PARAMETERS


class Projection:
    """Projections of the same states as one matmul. Their weights are concatenated, transposed,
    and multiplied by the weight of the norm before them. Adapters are added to the weights."""

    def __init__(self, *modules: Any, norm: Any = None) -> None:
        weight = torch.cat([merged_weight(module) for module in modules])
        self.weight = (weight if norm is None else weight * norm.weight).t().contiguous()
        biases = [module.bias for module in modules if module.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return states @ self.weight
        return torch.addmm(self.bias, states, self.weight)

    def add(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the sum of `residual` and the projection of `states`."""
        offset = residual if self.bias is None else residual + self.bias
        return torch.addmm(offset, states, self.weight)


@dataclass(frozen=True)
class Layer:
    """The fused projections of one layer (including the weights of the norms before them), and its
    attention settings."""

    qkv: "Projection"
    head_norms: torch.Tensor | None
    output: "Projection"
    gate_up: "Projection"
    down: "Projection"
    scaling: float
    window: int | None


class FusedForward:
    """`packing.forward` of one model, with copies of its weights. The engine creates one for every
    call, since the weights may have changed."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        body: Any = model.base_model
        config = body.config
        self.body = body
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.epsilon = torch.tensor(config.rms_norm_eps, dtype=model.dtype, device=model.device)
        # rotary tables [positions, 1, D]; the first half of the sines is negated for the rotation
        positions = torch.arange(max_length, device=model.device)[None]
        cos, sin = body.rotary_emb(
            torch.empty(1, dtype=model.dtype, device=model.device), positions
        )
        half = cos.shape[-1] // 2
        self.cos = cos[0][:, None]
        self.sin = torch.cat([-sin[0][:, :half], sin[0][:, half:]], -1)[:, None]
        self.layers = [self.layer(module) for module in body.layers]
        self.head = Projection(model.get_output_embeddings(), norm=body.norm)

    def layer(self, module: Any) -> Layer:
        """Return fused copies of one layer's weights."""
        attention = module.self_attn
        mlp = module.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            copies = [attention.q_norm.weight] * self.heads + [
                attention.k_norm.weight
            ] * self.kv_heads
            norms = torch.stack(copies)
        return Layer(
            Projection(
                attention.q_proj, attention.k_proj, attention.v_proj, norm=module.input_layernorm
            ),
            norms,
            Projection(attention.o_proj),
            Projection(mlp.gate_proj, mlp.up_proj, norm=module.post_attention_layernorm),
            Projection(mlp.down_proj),
            attention.scaling,
            # Mistral's attention reads the window from the configuration, Llama's does not
            self.body.config.sliding_window
            if type(self.body).__name__ == "MistralModel"
            else getattr(attention, "sliding_window", None),
        )

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return the last hidden states [N, hidden size], without the weight of the last norm; see
        `packing.forward`."""
        hidden = embedding(ids_N, self.body.embed_tokens.weight)
        cos = self.cos.index_select(0, positions_N)
        sin = self.sin.index_select(0, positions_N)
        rotated = self.heads + self.kv_heads
        for index, layer in enumerate(self.layers):
            # queries, keys and values from one matmul, [N, H + 2 K, D]
            states = layer.qkv(self.scale(hidden)).view(len(hidden), rotated + self.kv_heads, -1)
            query_key = states[:, :rotated]
            value = states[:, rotated:]
            if layer.head_norms is not None:
                query_key = self.scale(query_key) * layer.head_norms
            # the rotary position embedding; `sin` includes the sign
            turned = query_key.roll(query_key.shape[-1] // 2, -1)
            query_key = torch.addcmul(query_key * cos, turned, sin)
            query = query_key[:, : self.heads]
            key = query_key[:, self.heads :]
            # attention and the gated MLP, each added to the residual by its last projection
            attended = attend(index, query, key, value, layer.scaling, layer.window)
            hidden = layer.output.add(hidden, attended.flatten(1))
            gate, up = layer.gate_up(self.scale(hidden)).chunk(2, -1)
            hidden = layer.down.add(hidden, silu(gate).mul_(up))
        return self.scale(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states from `__call__`. The head's weights include the
        weight of the last norm."""
        return self.head(hidden)

    def scale(self, states: torch.Tensor) -> torch.Tensor:
        """Divide `states` by their root mean square: RMSNorm without its weight."""
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.epsilon, length, length, value=1.0 / states.shape[-1])
        return states * mean_square.rsqrt_()
