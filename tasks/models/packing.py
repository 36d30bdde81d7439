"""Tokens of many sequences in one row without padding: a forward in which only attention knows who
sees whom.

transformers lets attention be a function of our own, for every architecture whose attention has no
peculiarity. Ours hands queries, keys and values to the `attend` of the call. So the same modules
read prompts, decode one token for each of many rows, and compute rollouts that share their prompts
(as in Prefix Grouper, arXiv 2506.05433), and no linear layer, norm or head ever sees a padding
token. Left out: attention that is biased or capped (refused by name).

Legend: N tokens of the row, H query heads, K key-value heads, D size of a head; a block has R
sequences of T queries and S keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tasks.common.files import ArtifactError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# (layer, queries [N, H, D], keys [N, K, D], values [N, K, D], scaling, window or None) -> [N, H, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]

ATTENTION = "handed"
UNKNOWN = (
    "softcap",
    "s_aux",
    "position_bias",
)  # what some models add to attention, and no `attend` here computes
SHORTEST = 0.6  # of a block's longest sequence; shorter ones begin a block of their own
NOWHERE = 2**62  # the position of a key that is padding: after every query


def handed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attend: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: the `attend` of the forward, or torch's own attention where there is
    none."""
    if attend is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    if extra := [name for name in UNKNOWN if others.get(name) is not None]:
        raise ArtifactError(
            f"{type(module).__name__} has {', '.join(extra)} in its attention, which the packed "
            "forward does not know: "
            "set engine.name to vllm and train.share_prompts to false"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_NHD, key_NKD, value_NKD = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(module.layer_idx, query_NHD, key_NKD, value_NKD, scaling, sliding_window)[
        None
    ], None


AttentionInterface.register(ATTENTION, handed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def forward(
    model: PreTrainedModel, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """[N, hidden size] the last hidden states of tokens `ids_N` that stand at `positions_N` of
    their sequences."""
    unused = ids_N.new_zeros(
        (1, 1, 1, 1)
    )  # transformers passes a mask of four dimensions on; `attend` has its own
    hidden: torch.Tensor = model.base_model(
        input_ids=ids_N[None],
        position_ids=positions_N[None],
        attention_mask=unused,
        use_cache=False,
        attend=attend,
    ).last_hidden_state
    return hidden[0]


class ModuleForward:
    """Hidden states and logits of packed rows by transformers' own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `forward`."""
        return forward(self.model, ids_N, positions_N, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `head_logits`."""
        return head_logits(self.model, hidden)


def head_logits(model: PreTrainedModel, hidden_ND: torch.Tensor) -> torch.Tensor:
    """[N, V] what the model's own forward makes of its last hidden states; `check_packing` holds it
    to that."""
    config: Any = model.config.get_text_config()
    logits: torch.Tensor = model.get_output_embeddings()(hidden_ND)
    if scale := getattr(config, "logits_scaling", None):  # Granite divides
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):  # Cohere multiplies
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_forward(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise ArtifactError when hidden states (of a packed row, or as transformers reads them) and
    `head_logits` do not give the model's own logits: its class does more than we know of."""
    advice = (
        "set engine.name to vllm and train.share_prompts to false"
        if packed
        else "it cannot be trained here"
    )
    refusal = ArtifactError(
        f"{type(model).__name__} computes something that is not known here: {advice}"
    )
    if packed and not model._supports_attention_backend:
        raise refusal
    ids = [(7 * n + 3) % model.config.get_text_config().vocab_size for n in range(12)]
    whole = torch.tensor([ids], device=model.device)
    expected = model(input_ids=whole, use_cache=False).logits[0].float()
    if packed:
        packing, _, _ = pack(
            [ids[:5], ids[:3]], np.array([0, 0]), [ids[5:], ids[5:9]], model.device
        )
        hidden = forward(model, packing.ids, packing.positions, packing.attend)
        expected = expected[[0, 1, 2, 3, 4, 0, 1, 2, *range(5, 12), *range(5, 9)]]
    else:
        hidden = model.base_model(input_ids=whole, use_cache=False).last_hidden_state[0]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    if not torch.allclose(
        head_logits(model, hidden).float(), expected, atol=tolerance, rtol=tolerance
    ):
        raise refusal


@dataclass(frozen=True)
class Block:
    """Sequences that are attended to together, padded only here.

    `queries` [R, T] and `keys` [R, S] are places of the row, `query_positions` and `key_positions`
    where those tokens stand in their sequences; a query sees the keys up to its own position.
    `kept` lists what of [R * T] is no padding."""

    queries: torch.Tensor
    keys: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    kept: torch.Tensor

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[R, 1, T, S] what is added to the scores: 0 where a query sees a key, next to minus
        infinity elsewhere."""
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        hidden = (key > query) if window is None else (key > query) | (key <= query - window)
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """[len(kept), H, D] attention of the block's queries."""
        found = torch.nn.functional.scaled_dot_product_attention(
            take(query, self.queries),
            take(key, self.keys),
            take(value, self.keys),
            attn_mask=bias,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return (
            found.transpose(1, 2)
            .flatten(2)
            .flatten(0, 1)
            .index_select(0, self.kept)
            .view(-1, *query.shape[1:])
        )


@dataclass
class Packing:
    """Sequences in a row, block after block, and the attention among them."""

    ids: torch.Tensor
    positions: torch.Tensor
    blocks: list[Block]
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
        """[N, H, D] attention, block by block; see `Attend`."""
        kind = (window, query.dtype)
        if kind not in self.biases:  # the same for every layer
            self.biases[kind] = [block.bias(window, query.dtype) for block in self.blocks]
        return torch.cat(
            [
                block.attend(query, key, value, bias, scaling)
                for block, bias in zip(self.blocks, self.biases[kind], strict=True)
            ]
        )

    def num_pairs(self) -> int:
        """Pairs of query and key that attention computes, padding included."""
        return sum(block.queries.numel() * block.keys.shape[1] for block in self.blocks)


def take(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[R, heads, T, D] the states [N, heads, D] at `places` [R, T]. Of all ways to index,
    `index_select` over rows has the quickest backward on a CPU."""
    flat = states.reshape(len(states), -1).index_select(0, places.flatten())
    return flat.view(*places.shape, *states.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class Places:
    """Where sequences lie in a row: the first place of each and how many tokens it has."""

    starts: Ints
    lengths: Ints

    def of(self, rows: Ints) -> tuple[Ints, Bools]:
        """[len(rows), longest] the places of `rows`, the last one repeated where there is no token,
        and which are."""
        steps = np.arange(self.lengths[rows].max())
        last = np.maximum(self.lengths[rows] - 1, 0)
        places = self.starts[rows][:, None] + np.minimum(steps, last[:, None])
        return places, steps < self.lengths[rows][:, None]


def pack(
    prompts: Sequence[Sequence[int]],
    owners: Ints,
    continuations: Sequence[Sequence[int]],
    device: torch.device,
) -> tuple[Packing, Places, Places]:
    """Every prompt once, then each continuation, which sees prompt `owners[i]` and itself; where
    both came to lie."""
    prompt_blocks, prompt_places = lay_out(prompts, 0)
    num_prompt_tokens = int(prompt_places.lengths.sum())
    blocks, places = lay_out(continuations, num_prompt_tokens)
    total = num_prompt_tokens + int(places.lengths.sum())
    ids, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    firsts = np.concatenate([np.zeros(len(prompts), dtype=np.int64), prompt_places.lengths[owners]])
    starts = np.concatenate([prompt_places.starts, places.starts])
    for start, first, tokens in zip(starts, firsts, [*prompts, *continuations], strict=True):
        ids[start : start + len(tokens)] = tokens
        positions[start : start + len(tokens)] = first + np.arange(len(tokens))
    made = []
    for rows in prompt_blocks:
        at, real = prompt_places.of(rows)
        made.append(block(at, real, at, real, positions, device))
    for rows in blocks:
        at, real = places.of(rows)
        before, is_prompt = prompt_places.of(owners[rows])
        keys, is_key = np.concatenate([before, at], 1), np.concatenate([is_prompt, real], 1)
        made.append(block(at, real, keys, is_key, positions, device))
    return (
        Packing(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), made),
        prompt_places,
        places,
    )


def lay_out(sequences: Sequence[Sequence[int]], first: int) -> tuple[list[Ints], Places]:
    """Sequences one after another from place `first` on, the longest first, and the rows of like
    length as blocks."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    starts = np.empty(len(lengths), dtype=np.int64)
    starts[order] = first + np.cumsum(lengths[order]) - lengths[order]
    blocks: list[list[int]] = []
    for row in order[lengths[order] > 0].tolist():
        if blocks and lengths[row] >= SHORTEST * lengths[blocks[-1][0]]:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return [np.array(rows) for rows in blocks], Places(starts, lengths)


def block(
    queries: Ints, is_query: Bools, keys: Ints, is_key: Bools, positions: Ints, device: torch.device
) -> Block:
    """A block from places and from which of them are no padding."""
    key_positions = np.where(is_key, positions[keys], NOWHERE)
    arrays = (queries, keys, positions[queries], key_positions, np.flatnonzero(is_query))
    return Block(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))
