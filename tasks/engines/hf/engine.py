"""A batched decoder over any transformers causal LM, in this process, on a CPU or a GPU.

Continuous batching: rows decode in slots, the prefill of a prompt is computed once for all its
completions, and freed slots are refilled. Models with layers that do not support packed sequences,
such as recurrent layers, raise an error: use the `vllm` engine."""

from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.engines.engine import (
    Ints,
    IsEnough,
    Request,
    Samples,
    StoppableEngine,
    check_lengths,
    never,
)
from tasks.engines.hf.cache import Prefill
from tasks.engines.hf.decoding import Slots
from tasks.engines.settings import EngineSettings
from tasks.models.forward_check import check_forward
from tasks.models.policy import (
    Policy,
    load_model,
    load_tokenizer,
    stop_token_ids,
    torch_device,
    torch_dtype,
)
from tasks.models.weights import is_sharded

# share of the slots that must be free before a refill: a prefill costs about one step of all rows
REFILL_RATE = 0.25
# prompt tokens in one prefill (one prompt at least), which bounds the memory of its activations
MAX_PREFILL_TOKENS = 16_384


class HfEngine(StoppableEngine):
    """Continuous batching over `max_rows` slots. The engine samples from `model` itself, so a model
    shared with the trainer needs no update."""

    name = "hf"
    version = version("transformers")
    prefix_block = 1

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], max_rows: int, max_length: int
    ) -> None:
        check_forward(model, packed=True)
        self.model = model
        self.stop_ids = np.array(stop_ids)
        self.max_rows = max_rows
        self.max_length = max_length
        self.shares_weights = False

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model, unless the model is the trainer's own."""
        if self.shares_weights:
            return
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(weights[name])

    def cache_bytes(self, positions: int) -> int:
        """Return the size in bytes of the KV cache of one row of `positions` tokens."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(
            2 * config.num_hidden_layers * heads * size * positions * self.model.dtype.itemsize
        )

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        # prompts that need the most memory start first, so that a lack of memory shows early
        lengths_B = np.array([len(prompt) for prompt in request.prompts])[request.owner_B()]
        order_B = np.argsort(-lengths_B, kind="stable")
        return self.decode(request, order_B, self.max_rows, REFILL_RATE, is_enough)

    def generate_in_order(self, request: Request, order_B: Ints, max_rows: int) -> Samples:
        return self.decode(request, order_B, max_rows, 0.0, never(None))

    @torch.inference_mode()
    def decode(
        self,
        request: Request,
        order_B: Ints,
        max_rows: int,
        refill_rate: float,
        is_enough: IsEnough,
    ) -> Samples:
        """Decode every row. Rows start in the order `order_B`, with at most `max_rows` in flight.
        New rows start when a share `refill_rate` of the slots is free. Samples do not depend on the
        order, on the slots or on whether an earlier call was stopped."""
        prompts = request.prompts
        owners, written = request.owner_B(), request.written_B()
        check_lengths(request, self.max_length)
        token_ids: list[list[int]] = [[] for _ in owners]
        logprobs: list[list[float]] = [[] for _ in owners]
        reasons = ["length"] * len(owners)
        capacity = min(max_rows, len(owners))
        own = zip(owners.tolist(), written.tolist(), strict=True)
        longest = max((len(prompts[owner]) - tokens for owner, tokens in own), default=0)
        slots = Slots(self.model, capacity, longest, request.sampling, self.stop_ids)
        cached = PromptCache(prompts, owners)
        pending = deque(order_B.tolist())
        has_enough = False
        while (pending or slots.rows) and not has_enough:
            free = capacity - len(slots.rows)
            # either start rows in the free slots, or decode one token of every row in flight
            if pending and (not slots.rows or free >= max(refill_rate * capacity, 1)):
                rows = [pending.popleft() for _ in range(min(free, len(pending)))]
                cached.start(slots, rows, request.seeds, written)
            else:
                slots.step()
            # return the ended rows, including rows that start with a stop token
            for row, row_tokens, row_logprobs, stopped in slots.collect():
                token_ids[row] = row_tokens
                logprobs[row] = row_logprobs
                reasons[row] = "stop" if stopped else "length"
                has_enough |= is_enough(row, row_tokens, reasons[row])
        for slot in range(len(slots.rows)):
            row, token_ids[row], logprobs[row], _ = slots.written(slot)
        for row in [*slots.rows, *pending]:
            reasons[row] = "abort"
        return Samples(token_ids, logprobs, reasons)


class PromptCache:
    """The prefill of each distinct prompt, computed once and kept until all its rows have
    started."""

    def __init__(self, prompts: Sequence[Sequence[int]], owners: Ints) -> None:
        distinct = {tuple(prompt): None for prompt in prompts}
        index = {prompt: number for number, prompt in enumerate(distinct)}
        self.prompts = list(distinct)
        # each row's distinct prompt, and each distinct prompt's number of rows yet to start
        self.owner = np.array([index[tuple(prompts[owner])] for owner in owners], dtype=np.int64)
        self.waiting = np.bincount(self.owner, minlength=len(distinct))
        self.kept: dict[int, Prefill] = {}

    def start(self, slots: Slots, rows: list[int], seeds: Sequence[int], written: Ints) -> None:
        """Start `rows` in free slots, after a prefill of those prompts that are not cached."""
        owner = self.owner[rows]
        new = [prompt for prompt in dict.fromkeys(owner.tolist()) if prompt not in self.kept]
        np.subtract.at(self.waiting, owner, 1)
        # start rows of prompts that were kept from an earlier call
        for prompt in set(owner.tolist()) - set(new):
            mine = [row for row in rows if self.owner[row] == prompt]
            only = np.zeros(len(mine), dtype=np.int64)
            of_mine = [seeds[row] for row in mine]
            slots.start(mine, of_mine, written[mine], self.kept[prompt], only)
        # start rows of new prompts, with one prefill per batch of prompts
        for batch in self.batches(new):
            prefill = slots.prefill([self.prompts[prompt] for prompt in batch])
            index = {prompt: number for number, prompt in enumerate(batch)}
            mine = [row for row in rows if self.owner[row] in index]
            owners = np.array([index[prompt] for prompt in self.owner[mine].tolist()])
            slots.start(mine, [seeds[row] for row in mine], written[mine], prefill, owners)
            for prompt in batch:
                if self.waiting[prompt]:
                    self.kept[prompt] = prefill.select(np.array([index[prompt]]))
        for prompt in [prompt for prompt in self.kept if not self.waiting[prompt]]:
            del self.kept[prompt]

    def batches(self, new: list[int]) -> list[list[int]]:
        """Split prompts into batches of MAX_PREFILL_TOKENS at most, or of one longer prompt."""
        batches: list[list[int]] = []
        tokens = 0
        for prompt in new:
            tokens += len(self.prompts[prompt])
            if batches and tokens <= MAX_PREFILL_TOKENS:
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
                tokens = len(self.prompts[prompt])
        return batches


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> HfEngine:
    """Return the engine for `policy`. It samples from the trainer's `model` if that is not sharded
    and has the engine's dtype. Otherwise every process samples from its own copy."""
    is_shared = (
        model is not None and model.dtype == torch_dtype(settings.dtype) and not is_sharded(model)
    )
    if model is None or not is_shared:
        model = load_model(
            policy.folder,
            dtype=torch_dtype(settings.dtype),
            device=torch_device(settings.device),
            trust_remote_code=policy.trust_remote_code,
        )
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    stop_ids = stop_token_ids(policy.folder, tokenizer)
    engine = HfEngine(model, stop_ids, settings.max_rows, policy.max_length)
    engine.shares_weights = is_shared
    return engine
