"""Our own batched decoder over any transformers causal LM: the embedded default, on a CPU or a GPU.

Continuous batching: rows decode in slots, a prompt is read once for all its samples, freed slots
are refilled. Left out: what packed rows do not know, such as recurrent layers (refused; use the
`vllm` engine)."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.common.params import at_least
from tasks.engines.engine import EngineSettings, Ints, Request, Samples, check_lengths
from tasks.engines.hf.decoding import Reading, Slots
from tasks.models.packing import check_forward
from tasks.models.policy import (
    Policy,
    load_model,
    load_tokenizer,
    stop_token_ids,
    torch_device,
    torch_dtype,
)

# of the slots must be free before a refill: reading prompts costs about one step of all rows
REFILL_RATE = 0.25
MOST_READ = (
    16_384  # tokens of prompts in one forward (one prompt at least): what bounds its activations
)


class HfEngine:
    """Continuous batching over `max_rows` slots. It samples from `model` itself: a shared model
    needs no update."""

    name = "hf"
    version = version("transformers")
    prefix_block = 1

    def __init__(
        self, model: PreTrainedModel, stop_ids: Sequence[int], max_rows: int, max_length: int
    ) -> None:
        self.model, self.max_rows, self.max_length = model, max_rows, max_length
        self.stop_ids, self.prefilled_tokens, self.peak_cache_bytes = np.array(stop_ids), 0, 0
        check_forward(model, packed=True)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model, except where they already are the model's own memory."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if tensor.data_ptr() != weights[name].data_ptr():
                    tensor.copy_(weights[name])

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the keys and values of one row of `positions` tokens."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(
            2 * config.num_hidden_layers * heads * size * positions * self.model.dtype.itemsize
        )

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def generate(
        self, request: Request, on_finished: Callable[[int], object] | None = None
    ) -> Samples:
        order_B = longest_first(request.prompts, request.owner_B())
        return self.decode(request, order_B, self.max_rows, REFILL_RATE, on_finished)

    def generate_in_order(
        self,
        request: Request,
        order_B: Ints,
        max_rows: int,
        on_finished: Callable[[int], object] | None = None,
    ) -> Samples:
        return self.decode(request, order_B, max_rows, 0.0, on_finished)

    @torch.inference_mode()
    def decode(
        self,
        request: Request,
        order_B: Ints,
        max_rows: int,
        refill_rate: float,
        on_finished: Callable[[int], object] | None,
    ) -> Samples:
        """Rows start in `order_B`, at most `max_rows` are in flight, and others start as soon as
        `refill_rate` of the slots are free. `peak_cache_bytes` is the most memory that took.
        Neither order nor slots change a sample."""
        prompts, sampling, owners = request.prompts, request.sampling, request.owner_B()
        check_lengths(prompts, sampling.max_tokens, self.max_length)
        tokens: list[list[int]] = [[] for _ in owners]
        logprobs: list[list[float]] = [[] for _ in owners]
        reasons = ["length"] * len(owners)
        capacity, pending = min(max_rows, len(owners)), deque(order_B.tolist())
        longest = max((len(prompt) for prompt in prompts), default=0)
        slots, shelf = (
            Slots(self.model, capacity, longest, sampling, self.stop_ids),
            Shelf(prompts, owners),
        )
        while pending or slots.rows:
            free = capacity - len(slots.rows)
            if pending and (not slots.rows or free >= max(refill_rate * capacity, 1)):
                rows = [pending.popleft() for _ in range(min(free, len(pending)))]
                self.prefilled_tokens += shelf.start(slots, rows, request.seeds)
                self.peak_cache_bytes = max(
                    self.peak_cache_bytes, slots.memory.num_bytes() + shelf.peak_bytes
                )
            else:
                slots.step()
            finished = slots.collect()
            for row, row_tokens, row_logprobs, stopped in finished:
                tokens[row], logprobs[row] = row_tokens, row_logprobs
                reasons[row] = "stop" if stopped else "length"
            if finished and on_finished:
                on_finished(len(finished))
        return Samples(tokens, logprobs, reasons)


class Shelf:
    """Prompts that were read and whose rows have not all started: each distinct prompt is read
    once."""

    def __init__(self, prompts: Sequence[Sequence[int]], owners: Ints) -> None:
        distinct = {tuple(prompt): None for prompt in prompts}
        self.prompts = list(distinct)
        place = {prompt: index for index, prompt in enumerate(distinct)}
        self.owner = np.array([place[tuple(prompts[owner])] for owner in owners], dtype=np.int64)
        self.waiting = np.bincount(self.owner, minlength=len(distinct))
        self.kept: dict[int, Reading] = {}
        self.peak_bytes = 0

    def start(self, slots: Slots, rows: list[int], seeds: Sequence[int]) -> int:
        """Start `rows`, reading the prompts that were not read yet; how many tokens were read."""
        owner = self.owner[rows]
        new = [prompt for prompt in dict.fromkeys(owner.tolist()) if prompt not in self.kept]
        np.subtract.at(self.waiting, owner, 1)
        for prompt in set(owner.tolist()) - set(new):
            mine = [row for row in rows if self.owner[row] == prompt]
            slots.start(
                mine,
                [seeds[row] for row in mine],
                self.kept[prompt],
                np.zeros(len(mine), dtype=np.int64),
            )
        for part in self.parts(new):
            reading, place = (
                slots.read([self.prompts[prompt] for prompt in part]),
                {p: i for i, p in enumerate(part)},
            )
            mine = [row for row in rows if self.owner[row] in place]
            at = np.array([place[prompt] for prompt in self.owner[mine].tolist()])
            slots.start(mine, [seeds[row] for row in mine], reading, at)
            self.peak_bytes = max(self.peak_bytes, reading.num_bytes() + self.num_bytes())
            for prompt in part:
                if self.waiting[prompt]:
                    self.kept[prompt] = reading.only(np.array([place[prompt]]))
        for prompt in [prompt for prompt in self.kept if not self.waiting[prompt]]:
            del self.kept[prompt]
        return sum(len(self.prompts[prompt]) for prompt in new)

    def parts(self, new: list[int]) -> list[list[int]]:
        """The prompts `new` in parts that are read in one forward each."""
        parts: list[list[int]] = []
        tokens = 0
        for prompt in new:
            tokens += len(self.prompts[prompt])
            if parts and tokens <= MOST_READ:
                parts[-1].append(prompt)
            else:
                parts.append([prompt])
                tokens = len(self.prompts[prompt])
        return parts

    def num_bytes(self) -> int:
        """Bytes of the kept prompts."""
        return sum(reading.num_bytes() for reading in self.kept.values())


def longest_first(prompts: Sequence[Sequence[int]], owners: Ints) -> Ints:
    """The rows, longest prompts first: what needs the most memory fails first, not last."""
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)[owners]
    return np.asarray(np.lexsort((np.arange(len(owners)), owners, -lengths)), dtype=np.int64)


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> HfEngine:
    """The engine for `policy`, sampling from `model` when the trainer hands over its own in the
    engine's dtype."""
    at_least(1, engine__max_rows=settings.max_rows)
    if model is None or model.dtype != torch_dtype(settings.dtype):
        model = load_model(
            policy.folder,
            dtype=torch_dtype(settings.dtype),
            device=torch_device(settings.device),
            trust_remote_code=policy.trust_remote_code,
        )
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    return HfEngine(
        model, stop_token_ids(policy.folder, tokenizer), settings.max_rows, policy.max_length
    )
