"""Our own batched decoder over any transformers causal LM: the embedded default, on a CPU or a GPU.

Continuous batching: rows decode in slots, a prompt is read once for all its samples, freed slots are refilled. Left
out: what packed rows do not know, such as recurrent layers (refused; use the `vllm` engine).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from tasks.sampling.decoding import Slots
from tasks.sampling.engine import EngineSettings, Samples, Sampling, check_lengths
from tasks.sampling.models import Policy, load_model, load_tokenizer, stop_token_ids, torch_device, torch_dtype
from tasks.sampling.packing import check_forward

REFILL_RATE = 0.25  # of the slots must be free before a refill: a prefill costs about one step of all rows


class HfEngine:
    """Continuous batching over `max_rows` slots. It samples from `model` itself: a shared model needs no update."""

    name = "hf"
    version = version("transformers")
    prefix_block = 1

    def __init__(self, model: PreTrainedModel, stop_ids: Sequence[int], max_rows: int, max_length: int) -> None:
        self.model, self.max_rows, self.max_length = model, max_rows, max_length
        self.stop_ids, self.prefilled_tokens = np.array(stop_ids), 0
        check_forward(model, packed=True)

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model, except where they already are the model's own memory."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if tensor.data_ptr() != weights[name].data_ptr():
                    tensor.copy_(weights[name])

    def sleep(self) -> None:
        """Nothing is held between calls."""

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        on_finished: Callable[[int], object] | None = None,
        with_logprobs: bool = True,
    ) -> Samples:
        check_lengths(prompts, sampling.max_tokens, self.max_length)
        owners = np.repeat(np.arange(len(prompts)), num_samples)
        tokens: list[list[int]] = [[] for _ in owners]
        logprobs: list[list[float]] = [[] for _ in owners]
        reasons = ["length"] * len(owners)
        pending = longest_first(prompts, owners)
        slots = Slots(self.model, min(self.max_rows, len(owners)), self.max_length, sampling, self.stop_ids)
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

    def refill(self, slots: Slots, rows: list[int], prompts: list[Sequence[int]], seeds: list[int]) -> None:
        """Fill slots with `rows`; each distinct prompt is read once."""
        distinct = {tuple(prompt): None for prompt in prompts}
        place = {prompt: index for index, prompt in enumerate(distinct)}
        self.prefilled_tokens += sum(map(len, distinct))
        slots.fill(rows, seeds, list(distinct), np.array([place[tuple(prompt)] for prompt in prompts]))


def longest_first(prompts: Sequence[Sequence[int]], owners: npt.NDArray[np.int64]) -> deque[list[int]]:
    """The rows of each prompt, longest prompts first: what needs the most memory fails first, not last."""
    groups: list[list[int]] = [[] for _ in prompts]
    for row, owner in enumerate(owners.tolist()):
        groups[owner].append(row)
    return deque(sorted(filter(None, groups), key=lambda rows: (-len(prompts[owners[rows[0]]]), rows[0])))


def next_rows(pending: deque[list[int]], slots: Slots) -> list[int]:
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
