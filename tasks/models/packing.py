"""Many sequences packed into one without padding: a forward in which only attention distinguishes
the sequences.

transformers accepts a custom attention function, for every architecture with standard attention.
Ours passes queries, keys and values to the `attend` argument of the call. So the same modules
prefill prompts, decode one token for each of many rows, and compute rollouts that share their
prompts (as in Prefix Grouper, arXiv 2506.05433), and no linear layer, norm or head processes a
padding token. Packed attention with biases, caps or sinks is not supported (an error names them).

Legend: N tokens packed together, H query heads, K key-value heads, D size of a head; a block has R
sequences of T queries and S keys."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tasks.common.files import ArtifactError
from tasks.models.transfer import to_device

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# (layer, queries [N, H, D], keys [N, K, D], values [N, K, D], scaling, window or None) -> [N, H, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]

ATTENTION = "handed"
# cuDNN's attention makes a plan for every new shape: a tenth of a second each, in every step
torch.backends.cuda.enable_cudnn_sdp(False)
# arguments that some models pass to attention, and that no `attend` here computes
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
# minimum length in a block, as a share of its longest; a shorter sequence starts a new block
MIN_LENGTH_RATE = 0.6
# the largest head size of torch's FlashAttention; the size must be a multiple of 8
MAX_FLASH_HEAD = 256
# the position of a padding key: after every query, so that no query sees it
PADDING_POSITION = 2**62


def handed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attend: Attend | None = None,
    is_plain: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output for transformers. Use `attend` if given (it needs no mask), else
    torch's attention, or the model's own eager attention if torch's would ignore an argument. With
    `is_plain`, ignore the mask."""
    extra = [name for name in UNSUPPORTED if others.get(name) is not None]
    if attend is None:
        mask = None if is_plain else attention_mask
        attention = eager_attention if extra else sdpa_attention_forward
        return attention(module, query, key, value, mask, scaling=scaling, **others)
    if extra:
        raise ArtifactError(
            f"{type(module).__name__} has {', '.join(extra)} in its attention, which the packed "
            "forward does not support: set engine.name to vllm and learner.share_prompts to false"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # [1, heads, N, D] -> [N, heads, D], and back by adding the batch dimension
    query_NHD, key_NKD, value_NKD = (states[0].transpose(0, 1) for states in (query, key, value))
    attended = attend(module.layer_idx, query_NHD, key_NKD, value_NKD, scaling, sliding_window)
    return attended[None], None


def eager_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of eager attention from the model's own file. `mask` is True where a query
    sees a key. If it is None, a query sees all keys up to its own position."""
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    # eager attention adds its mask to the scores
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~mask, torch.finfo(query.dtype).min)
    attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, query, key, value, bias, **others)[0], None


AttentionInterface.register(ATTENTION, handed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def forward(
    model: PreTrainedModel, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Return the last hidden states [N, hidden size] of the tokens `ids_N`, whose positions in
    their sequences are `positions_N`."""
    hidden: torch.Tensor = model.base_model(
        input_ids=ids_N[None],
        position_ids=positions_N[None],
        attention_mask=unused_mask(ids_N),
        use_cache=False,
        attend=attend,
    ).last_hidden_state
    return hidden[0]


def forward_after(model: PreTrainedModel, prompts: "Packing", rest: "Packing") -> torch.Tensor:
    """Return the last hidden states [tokens of `rest`, hidden size] of the continuations `rest` of
    `prompts` (see `Packing.split`). The prompts have a separate forward without gradient."""
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend_prompts(layer: int, query: Any, key: Any, value: Any, *others: Any) -> torch.Tensor:
        known[layer] = key, value
        return prompts.attend(layer, query, key, value, *others)

    def attend_rest(layer: int, query: Any, key: Any, value: Any, *others: Any) -> torch.Tensor:
        if layer in known:
            before_key, before_value = known[layer]
            key, value = torch.cat([before_key, key]), torch.cat([before_value, value])
        return rest.attend(layer, query, key, value, *others)

    kind = prompts.ids.device.type
    # cache no casts: weights cast without gradient would have none in the second forward either
    cast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    if len(prompts.ids):
        with torch.no_grad(), cast:
            forward(model, prompts.ids, prompts.positions, attend_prompts)
    return forward(model, rest.ids, rest.positions, attend_rest)


def unused_mask(ids: torch.Tensor) -> torch.Tensor:
    """Return a mask that attention ignores. transformers passes it on unchanged, as it does every
    mask of four dimensions."""
    return ids.new_zeros((1, 1, 1, 1))


def forward_rows(model: PreTrainedModel, ids_BL: torch.Tensor, **others: Any) -> Any:
    """Return the outputs of transformers' body for B right-padded sequences of L tokens. The model
    is causal, so a sequence does not see its padding. If some layers have a window, transformers
    makes the masks, and the host waits for the device."""
    if not is_plainly_causal(model):
        return model.base_model(input_ids=ids_BL, use_cache=False, **others)
    # without a mask, transformers checks rows for packed sequences, and the host waits for that
    positions_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    return model.base_model(
        input_ids=ids_BL,
        position_ids=positions_L[None],
        attention_mask=unused_mask(ids_BL),
        use_cache=False,
        is_plain=True,
        **others,
    )


def is_plainly_causal(model: PreTrainedModel) -> bool:
    """Return whether every layer uses `handed_attention` and attends to all earlier tokens."""
    config: Any = model.config.get_text_config()
    if config._attn_implementation != ATTENTION or not model._supports_attention_backend:
        return False
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the decoder layers: the modules that transformers would not split over devices."""
    names = set(model._no_split_modules or ())
    # FSDP replaces the class of a sharded module by a subclass of it
    return [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def compile_layers(model: PreTrainedModel) -> None:
    """Let torch.compile compile every layer, without attention, in its first forward, for any
    number of tokens. On a GPU elementwise operations become a few kernels, which keep fewer
    activations. Raise ArtifactError if there are no known layers, or there is no C compiler."""
    layers = layers_of(model)
    if not layers:
        raise ArtifactError(f"{type(model).__name__} names no layers: set learner.compile to false")
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        raise ArtifactError("learner.compile needs a C compiler: install gcc, or set it to false")
    AttentionInterface.register(ATTENTION, torch.compiler.disable(handed_attention))
    torch._dynamo.config.recompile_limit = 32  # one per kind of pass, for all layers together
    for layer in layers:
        forward: Any = torch.compile(layer.forward, dynamic=True)
        layer.forward = forward  # inside FSDP's hooks and checkpoints of activations


def head_logits(model: PreTrainedModel, hidden_ND: torch.Tensor) -> torch.Tensor:
    """Return the logits [N, V] of the last hidden states, as the model's own forward computes them
    (`check_forward` compares the two)."""
    config: Any = model.config.get_text_config()
    logits: torch.Tensor = model.get_output_embeddings()(hidden_ND)
    if scale := getattr(config, "logits_scaling", None):  # Granite divides
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):  # Cohere multiplies
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


@contextmanager
def head_precision(*, is_tf32: bool) -> Iterator[None]:
    """With `is_tf32`, let a float32 head use TF32 on a GPU (10 bits of mantissa). Wrap only the
    head: torch's switch is process-wide, and would also round positions in rotary embeddings."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32" if is_tf32 else before
    try:
        yield
    finally:
        backend.fp32_precision = before


def causal_bias(
    query: torch.Tensor, key: torch.Tensor, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the bias for scores of queries and keys at these positions, broadcast: 0 where a query
    sees a key, and the lowest finite number elsewhere."""
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Block:
    """Sequences of similar length, padded only here, to compute their attention together.

    `queries` [R, T] and `keys` [R, S] are indices into the packed tokens. `query_positions` and
    `key_positions` are the positions of those tokens in their sequences. A query sees the keys up
    to its own position. `kept` and `kept_keys` list the indices into [R * T] and [R * S] that are
    not padding, and `lengths` [R, 2] the numbers of queries and keys."""

    queries: torch.Tensor
    keys: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    kept: torch.Tensor
    kept_keys: torch.Tensor
    lengths: Ints

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias [R, 1, T, S] for the scores."""
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        return causal_bias(query, key, window, dtype)[:, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention [len(kept), H, D] of the block's queries."""
        # gather to [R, heads, T or S, D], attend, then drop padding: [R, H, T, D] -> [kept, H, D]
        keys, values = gather(key, self.keys), gather(value, self.keys)
        group_size = query.shape[1] // key.shape[1]
        if query.is_cuda and group_size > 1:
            # no kernel supports grouped query heads with a bias: torch would allocate all scores
            keys, values = (part.repeat_interleave(group_size, 1) for part in (keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(
            gather(query, self.queries),
            keys,
            values,
            attn_mask=bias,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return flat.index_select(0, self.kept).view(-1, *query.shape[1:])


@dataclass
class Packing:
    """Packed sequences, block after block, and their attention. The prompts come first, with
    `num_prompt_tokens` tokens in `num_prompt_blocks` blocks, then the continuations."""

    ids: torch.Tensor
    positions: torch.Tensor
    blocks: list[Block]
    num_prompt_tokens: int
    num_prompt_blocks: int
    biases: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return the attention [N, H, D], by FlashAttention or block by block; see `Attend`."""
        if supports_flash(value):
            return self.flash((query, key, value), scaling, window)
        kind = (window, query.dtype)
        if kind not in self.biases:  # the same for every layer of the same kind
            self.biases[kind] = [block.bias(window, query.dtype) for block in self.blocks]
        # the blocks' queries, one block after another, are the packed tokens in their order
        attended = [
            block.attend(query, key, value, bias, scaling)
            for block, bias in zip(self.blocks, self.biases[kind], strict=True)
        ]
        return torch.cat(attended)

    def flash(
        self, states: tuple[torch.Tensor, ...], scaling: float, window: int | None
    ) -> torch.Tensor:
        """Return the attention output [N, H, D] of (queries, keys, values), from torch's
        FlashAttention (Dao, arXiv 2307.08691), without padding or bias, in the values' dtype."""
        from torch.nn.attention import varlen  # the import takes a second

        attention: Any = varlen.varlen_attn
        keys, sequences = self.sequences
        # torch 2.11 supports grouped query heads without such an argument
        if "enable_gqa" in attention.__kwdefaults__:
            sequences = sequences | {"enable_gqa": True}
        query, *others = (part.to(states[2].dtype) for part in states)
        key_value = (part.index_select(0, keys) for part in others)
        # the last query of a sequence sees its last key
        shown = (-1 if window is None else window - 1, 0)
        attended: torch.Tensor = attention(
            query, *key_value, **sequences, scale=scaling, window_size=shown
        )
        return attended

    @cached_property
    def sequences(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """The packed indices of the keys, sequence after sequence, and FlashAttention's arguments:
        the cumulative numbers of queries and of keys [sequences + 1], which begin with 0, and the
        largest numbers of queries and keys in a sequence."""
        keys = [block.keys.flatten().index_select(0, block.kept_keys) for block in self.blocks]
        lengths = np.concatenate([block.lengths for block in self.blocks])
        starts = np.concatenate([np.zeros((1, 2)), lengths.cumsum(0)]).astype(np.int32).T
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        values = *to_device(starts, self.ids.device), *lengths.max(0).tolist()
        return torch.cat(keys), dict(zip(names, values, strict=True))

    def split(self) -> tuple["Packing", "Packing"]:
        """Return the prompts alone, and the continuations alone. The keys of the continuations are
        still indices into all tokens."""
        tokens, blocks = self.num_prompt_tokens, self.num_prompt_blocks
        rest = [replace(block, queries=block.queries - tokens) for block in self.blocks[blocks:]]
        return (
            Packing(
                self.ids[:tokens], self.positions[:tokens], self.blocks[:blocks], tokens, blocks
            ),
            Packing(self.ids[tokens:], self.positions[tokens:], rest, 0, 0),
        )

    def num_pairs(self) -> int:
        """Return the number of query-key pairs that attention by blocks computes, with padding."""
        return sum(block.queries.numel() * block.keys.shape[1] for block in self.blocks)


def supports_flash(value: torch.Tensor) -> bool:
    """Return whether torch's FlashAttention supports these values [N, K, D]: 16-bit floats on a GPU
    of compute capability 8.0 or higher, with a supported head size."""
    is_possible = value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)
    is_size = value.shape[-1] % 8 == 0 and value.shape[-1] <= MAX_FLASH_HEAD
    return is_possible and is_size and torch.cuda.get_device_capability(value.device) >= (8, 0)


def gather(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the states [N, heads, D] at `indices` [R, T], as [R, heads, T, D]. Among all ways to
    index, `index_select` over rows has the fastest backward on a CPU."""
    flat = states.reshape(len(states), -1).index_select(0, indices.flatten())
    return flat.view(*indices.shape, *states.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class Segments:
    """The position of each sequence among the packed tokens: the index of its first token, and its
    length."""

    starts: Ints
    lengths: Ints

    def padded_indices(self, rows: Ints) -> tuple[Ints, Bools]:
        """Return the packed indices [len(rows), longest] of the tokens of `rows`, and a mask that
        is False for padding. Padding repeats the last token's index."""
        steps = np.arange(self.lengths[rows].max())
        last = np.maximum(self.lengths[rows] - 1, 0)
        indices = self.starts[rows][:, None] + np.minimum(steps, last[:, None])
        return indices, steps < self.lengths[rows][:, None]


def pack(
    prompts: Sequence[Sequence[int] | Ints],
    owners: Ints,
    continuations: Sequence[Sequence[int] | Ints],
    device: torch.device,
) -> tuple[Packing, Segments, Segments]:
    """Pack every prompt once, then each continuation i, which sees prompt `owners[i]` and itself.
    Return the packing, the segments of prompts, and the segments of continuations."""
    # the order of packed tokens: prompts first, then continuations
    prompt_blocks, prompt_segments = lay_out(prompts, 0)
    num_prompt_tokens = int(prompt_segments.lengths.sum())
    continuation_blocks, segments = lay_out(continuations, num_prompt_tokens)
    total = num_prompt_tokens + int(segments.lengths.sum())
    # token ids, and positions: a continuation's positions start at the end of its prompt
    ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    prompt_firsts = np.zeros(len(prompts), dtype=np.int64)
    firsts = np.concatenate([prompt_firsts, prompt_segments.lengths[owners]])
    starts = np.concatenate([prompt_segments.starts, segments.starts])
    for start, first, tokens in zip(starts, firsts, [*prompts, *continuations], strict=True):
        ids[start : start + len(tokens)] = tokens
        positions[start : start + len(tokens)] = first + np.arange(len(tokens))
    # prompts attend to themselves, continuations to their prompt and to themselves
    blocks = []
    for rows in prompt_blocks:
        own, is_own = prompt_segments.padded_indices(rows)
        blocks.append(make_block(own, is_own, own, is_own, positions, device))
    for rows in continuation_blocks:
        own, is_own = segments.padded_indices(rows)
        prompt, is_prompt = prompt_segments.padded_indices(owners[rows])
        keys = np.concatenate([prompt, own], 1)
        is_key = np.concatenate([is_prompt, is_own], 1)
        blocks.append(make_block(own, is_own, keys, is_key, positions, device))
    on_device = to_device(ids, device), to_device(positions, device)
    packing = Packing(*on_device, blocks, num_prompt_tokens, len(prompt_blocks))
    return packing, prompt_segments, segments


def lay_out(sequences: Sequence[Sequence[int] | Ints], first: int) -> tuple[list[Ints], Segments]:
    """Place sequences one after another from packed index `first` on, the longest first. Return
    blocks (indices of non-empty sequences of similar length), and the segment of each sequence."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    starts = np.empty(len(lengths), dtype=np.int64)
    starts[order] = first + np.cumsum(lengths[order]) - lengths[order]
    blocks: list[list[int]] = []
    for row in order[lengths[order] > 0].tolist():
        if blocks and lengths[row] >= MIN_LENGTH_RATE * lengths[blocks[-1][0]]:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return [np.array(rows) for rows in blocks], Segments(starts, lengths)


def make_block(
    queries: Ints,
    is_query: Bools,
    keys: Ints,
    is_key: Bools,
    positions: Ints,
    device: torch.device,
) -> Block:
    """Return the block of these queries and keys: packed indices with masks (False: padding)."""
    key_positions = np.where(is_key, positions[keys], PADDING_POSITION)
    return Block(
        to_device(queries, device),
        to_device(keys, device),
        to_device(positions[queries], device),
        to_device(key_positions, device),
        to_device(np.flatnonzero(is_query), device),
        to_device(np.flatnonzero(is_key), device),
        np.stack([is_query.sum(1), is_key.sum(1)], 1),
    )
