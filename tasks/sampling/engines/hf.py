"""Our own batched decoder over any transformers causal LM: the embedded default, on a CPU or a GPU.

Rows live in slots of one preallocated key-value cache, each at its own position, so that no row waits for another:
a prompt is read once and its cache copied to its samples' slots, finished rows are compacted away, and freed slots
are refilled. Randomness is a counter-based hash of (seed, position) per row, so a sample does not depend on which rows
decode beside it. Left out: sliding-window and recurrent layers beyond their window (refused; use the `vllm` engine).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from tasks.common.files import ArtifactError
from tasks.sampling.engine import EngineSettings, Samples, Sampling, check_lengths
from tasks.sampling.models import Policy, load_model, load_tokenizer, stop_token_ids, torch_device, torch_dtype

REFILL_RATE = 0.25  # of the slots must be free before a refill: a prefill costs about one step of all rows


class HfEngine:
    """Continuous batching over `max_rows` slots. It samples from `model` itself: a shared model needs no update."""

    name = "hf"
    version = version("transformers")
    prefix_block = 1

    def __init__(self, model: PreTrainedModel, stop_ids: Sequence[int], max_rows: int, max_length: int) -> None:
        self.model, self.max_rows, self.max_length = model, max_rows, max_length
        self.stop_ids = torch.tensor(stop_ids, device=model.device)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model, except where they already are the model's own memory."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if tensor.data_ptr() != weights[name].data_ptr():
                    tensor.copy_(weights[name])

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        on_finished: Callable[[int], object] | None = None,
    ) -> Samples:
        check_lengths(prompts, sampling.max_tokens, self.max_length)
        check_windows(self.model, max(map(len, prompts), default=0) + sampling.max_tokens)
        owners = np.repeat(np.arange(len(prompts)), num_samples)
        tokens: list[list[int]] = [[] for _ in owners]
        logprobs: list[list[float]] = [[] for _ in owners]
        reasons = ["length"] * len(owners)
        pending = longest_first(prompts, owners)
        slots = Slots(self.model, min(self.max_rows, len(owners)), sampling, self.stop_ids)
        while pending or slots.rows:
            if rows := next_rows(pending, slots):
                self.refill(slots, rows, [prompts[owners[row]] for row in rows], [seeds[row] for row in rows])
            else:
                slots.step()
            finished = slots.collect()
            for row, row_tokens, row_logprobs, stopped in finished:
                tokens[row], logprobs[row] = row_tokens, row_logprobs
                reasons[row] = "stop" if stopped else "length"
            if finished and on_finished:
                on_finished(len(finished))
        return Samples(tokens, logprobs, reasons)

    def refill(self, slots: "Slots", rows: list[int], prompts: list[Sequence[int]], seeds: list[int]) -> None:
        """Read each distinct prompt once, in batches of equal length (no padding), and fill slots with its samples."""
        members: dict[tuple[int, ...], list[int]] = {}
        for index, prompt in enumerate(prompts):
            members.setdefault(tuple(prompt), []).append(index)
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt_ids in members:
            by_length.setdefault(len(prompt_ids), []).append(prompt_ids)
        for batch in by_length.values():
            cache = DynamicCache(config=self.model.config)
            ids = torch.tensor(batch, device=self.model.device)
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            owner = [place for place, prompt_ids in enumerate(batch) for _ in members[prompt_ids]]
            chosen = [index for prompt_ids in batch for index in members[prompt_ids]]
            slots.fill([rows[i] for i in chosen], [seeds[i] for i in chosen], cache, logits, owner)


def longest_first(prompts: Sequence[Sequence[int]], owners: npt.NDArray[np.int64]) -> deque[list[int]]:
    """The rows of each prompt, longest prompts first: what needs the most memory fails first, not last."""
    groups: list[list[int]] = [[] for _ in prompts]
    for row, owner in enumerate(owners.tolist()):
        groups[owner].append(row)
    return deque(sorted(filter(None, groups), key=lambda rows: (-len(prompts[owners[rows[0]]]), rows[0])))


def next_rows(pending: deque[list[int]], slots: "Slots") -> list[int]:
    """Rows for the free slots, whole groups so that a prompt is read once; none while too few slots are free."""
    free = slots.capacity - len(slots.rows)
    rows: list[int] = []
    if slots.rows and free < REFILL_RATE * slots.capacity:
        return rows
    while pending and len(rows) + len(pending[0]) <= free:
        rows += pending.popleft()
    if pending and not rows and not slots.rows:
        rows, pending[0] = pending[0][:free], pending[0][free:]
    return rows


class Slots:
    """The rows in flight, always the first `len(rows)` of the cache, and what each has produced so far."""

    def __init__(self, model: PreTrainedModel, capacity: int, sampling: Sampling, stop_ids: torch.Tensor) -> None:
        self.model, self.capacity, self.sampling, self.stop_ids = model, capacity, sampling, stop_ids
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, capacity, sampling.max_tokens)
        device, shape = model.device, (capacity, sampling.max_tokens)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self.position = torch.zeros(capacity, dtype=torch.long, device=device)
        self.count = torch.zeros(capacity, dtype=torch.long, device=device)
        self.stopped = torch.zeros(capacity, dtype=torch.bool, device=device)

    def fill(self, rows: list[int], seeds: list[int], prompts: Cache, logits: torch.Tensor, owner: list[int]) -> None:
        """Start `rows`; row i continues prompt `owner[i]` of the prefilled batch, whose last logits are `logits`."""
        first, last = len(self.rows), len(self.rows) + len(rows)
        owners = torch.tensor(owner, device=logits.device)
        length = prompts.get_seq_length()
        self.cache.fill(first, prompts, owners)
        self.rows += rows
        self.lengths += [length] * len(rows)
        self.position[first:last] = length
        self.count[first:last] = 0
        self.uniforms[first:last] = torch.from_numpy(hashed_uniforms(seeds, self.sampling.max_tokens))
        self.draw(slice(first, last), logits[owners])

    def step(self) -> None:
        """One token for every row in flight."""
        active = len(self.rows)
        position = self.position[:active]
        span = max(self.lengths) + 1
        last = self.tokens[:active].gather(1, (self.count[:active] - 1)[:, None])
        hidden = torch.arange(span, device=position.device)[None, :] > position[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=position.device)
        mask.masked_fill_(hidden, torch.finfo(self.model.dtype).min)
        self.cache.place(position, span)
        logits = self.model(
            input_ids=last,
            attention_mask=mask[:, None, None, :],
            position_ids=position[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.position[:active] += 1
        self.lengths = [length + 1 for length in self.lengths]
        self.draw(slice(0, active), logits)

    def draw(self, rows: slice, logits: torch.Tensor) -> None:
        """Sample one token a row by inverting the distribution function at the row's own uniform number."""
        place = self.count[rows][:, None]
        uniform = self.uniforms[rows].gather(1, place)
        tokens, logprobs = choose(logits, uniform, self.sampling)
        self.tokens[rows] = self.tokens[rows].scatter(1, place, tokens)
        self.logprobs[rows] = self.logprobs[rows].scatter(1, place, logprobs)
        self.count[rows] += 1
        self.stopped[rows] = torch.isin(tokens[:, 0], self.stop_ids)

    def collect(self) -> list[tuple[int, list[int], list[float], bool]]:
        """Take out the rows that ended, (row, tokens, logprobs, stopped) each, and close the gaps they leave."""
        active = len(self.rows)
        ended = self.stopped[:active] | (self.count[:active] >= self.sampling.max_tokens)
        places = ended.nonzero()[:, 0].tolist()
        if not places:
            return []
        counts, stopped = self.count[:active].tolist(), self.stopped[:active].tolist()
        tokens, logprobs = self.tokens[places].tolist(), self.logprobs[places].tolist()
        finished = [
            (self.rows[place], tokens[i][: counts[place]], logprobs[i][: counts[place]], stopped[place])
            for i, place in enumerate(places)
        ]
        self.compact((~ended).nonzero()[:, 0])
        return finished

    def compact(self, kept: torch.Tensor) -> None:
        """Keep the rows `kept` only: rows from the end move into the gaps, the others stay where they are."""
        remaining = len(kept)
        keep = kept.tolist()
        gaps = sorted(set(range(remaining)) - set(keep))
        movers = [place for place in keep if place >= remaining]
        if gaps:
            target, source = torch.tensor(gaps, device=kept.device), torch.tensor(movers, device=kept.device)
            for state in (self.tokens, self.logprobs, self.uniforms, self.position, self.count, self.stopped):
                state[target] = state[source]
            self.cache.move(target, source)
        for gap, mover in zip(gaps, movers, strict=True):
            self.rows[gap], self.lengths[gap] = self.rows[mover], self.lengths[mover]
        self.rows, self.lengths = self.rows[:remaining], self.lengths[:remaining]


class SlotCache(Cache):
    """A key-value cache in which every row stands at its own position; grown, in steps, to the longest row."""

    def __init__(self, num_layers: int, capacity: int, max_tokens: int) -> None:
        self.slots = [SlotLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=[*self.slots])
        self.max_tokens = max_tokens

    def fill(self, first: int, prompts: Cache, owners: torch.Tensor) -> None:
        """Copy the cache of prompt `owners[i]` into slot `first + i`."""
        for mine, theirs in zip(self.slots, prompts.layers, strict=True):
            mine.fill(first, theirs.keys, theirs.values, owners, self.max_tokens)  # type: ignore[union-attr]

    def place(self, position: torch.Tensor, span: int) -> None:
        """Say where the next update goes: one position a row, and how many positions are attended to."""
        for layer in self.slots:
            layer.position, layer.span = position, span

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the slots `source` to the slots `target`."""
        for layer in self.slots:
            layer.move(target, source)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, `[capacity, heads, positions, head size]`."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.span = capacity, 0
        self.position = torch.empty(0)

    def fill(self, first: int, keys: Any, values: Any, owners: torch.Tensor, room: int) -> None:
        length = keys.shape[2]
        self.keys = self.reserve(self.keys, keys, length + room)
        self.values = self.reserve(self.values, values, length + room)
        rows = slice(first, first + len(owners))
        self.keys[rows, :, :length] = keys[owners]
        self.values[rows, :, :length] = values[owners]

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys[target], self.values[target] = self.keys[source], self.values[source]

    def reserve(self, mine: torch.Tensor | None, like: torch.Tensor, positions: int) -> torch.Tensor:
        """`mine`, grown to hold `positions`; prompts come longest first, so this happens once."""
        if mine is not None and mine.shape[2] >= positions:
            return mine
        grown = like.new_zeros((self.capacity, like.shape[1], positions, like.shape[3]))
        if mine is not None:
            grown[:, :, : mine.shape[2]] = mine
        return grown

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(self.position), device=key_states.device)
        assert self.keys is not None
        assert self.values is not None
        self.keys[rows, :, self.position] = key_states[:, :, 0]
        self.values[rows, :, self.position] = value_states[:, :, 0]
        return self.keys[: len(rows), :, : self.span], self.values[: len(rows), :, : self.span]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is reserved by `fill`."""

    def get_seq_length(self) -> int:
        return self.span

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.span, 0


def choose(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, 1] and their log-probabilities [B, 1] from logits [B, V] and uniform numbers [B, 1]."""
    logits = logits.float()
    if sampling.temperature == 0.0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1, keepdim=True)
        return tokens, logprobs.gather(1, tokens)
    logprobs = truncated_logprobs(logits / sampling.temperature, sampling.top_p, sampling.top_k)
    cumulative = logprobs.double().exp().cumsum(-1)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    tokens = tokens.clamp_max(logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens)


def truncated_logprobs(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Renormalised log-probabilities [B, V] of the `top_k` likeliest tokens within the nucleus `top_p`."""
    if top_k > 0:
        smallest = logits.topk(min(top_k, logits.shape[1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def hashed_uniforms(seeds: Sequence[int], num: int) -> npt.NDArray[np.float64]:
    """[len(seeds), num] numbers in [0, 1): splitmix64 of (seed, position), 53 bits each (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64)[:, None] + np.uint64(0x9E3779B97F4A7C15) * np.arange(
            1, num + 1, dtype=np.uint64
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def check_windows(model: PreTrainedModel, longest: int) -> None:
    """Refuse what the slot cache would compute wrongly: a window shorter than the rows, or recurrent layers."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < longest:
        raise ArtifactError(
            f"{type(model).__name__} attends to {window} tokens in some layers and rows here reach {longest}: "
            "use engine.name vllm for this policy, or lower sampling.max_tokens"
        )
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise ArtifactError(f"{type(model).__name__} has layers of type {sorted(others)}: use engine.name vllm")


def load(settings: EngineSettings, policy: Policy, model: PreTrainedModel | None) -> HfEngine:
    """The engine for `policy`, sampling from `model` when the trainer hands over its own in the engine's dtype."""
    if model is None or model.dtype != torch_dtype(settings.dtype):
        model = load_model(
            policy.folder,
            dtype=torch_dtype(settings.dtype),
            device=torch_device(settings.device),
            trust_remote_code=policy.trust_remote_code,
        )
    tokenizer = load_tokenizer(policy.folder, trust_remote_code=policy.trust_remote_code)
    return HfEngine(model, stop_token_ids(policy.folder, tokenizer), settings.max_rows, policy.max_length)
