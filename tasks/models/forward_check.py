"""The check that the forwards in `packing` agree with a model's own forward.

Attention gets windows, caps and sinks as arguments and masks, with different names in each class.
An argument that is missed changes log-probabilities without an error, in the trainer and in the
engine `hf` alike. So both forwards are compared with the model's own forward and its own eager
attention, before any sampling. The check does not find differences that appear only in text longer
than a few tokens, except those of windows."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.models.packing import ATTENTION, forward, forward_rows, head_logits, pack
from tasks.models.sharding import call

LENGTH = 12  # tokens of the test sequence
NARROW = 4  # tokens of a window that is shorter than the sequence
ROUNDINGS = 3.0  # in 16 bits, how often the model's own rounding may differ
LEAST = 0.05  # of the logits' deviation: the allowed difference, whatever the rounding
# attributes for the size of an attention window in configurations and modules of transformers
WINDOWS = ("sliding_window", "attention_chunk_size")


@torch.no_grad()
def check_forward(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise ArtifactError if a forward of `packing`, followed by `head_logits`, does not yield the
    model's own logits. The model's class then computes something that is not supported here. With
    `packed`, check `packing.forward`, otherwise `forward_rows`.

    Windows are tested with a smaller size: a sequence longer than a window of 4,096 tokens would
    take a large policy minutes on a CPU, and attention gets windows of any size in the same way."""
    name = type(model).__name__
    has_body = model.base_model is not model
    is_standard = has_body and (model._supports_attention_backend or not packed)
    advice = "it cannot be trained here"
    if packed and has_body:
        advice = "set engine.name to vllm and learner.share_prompts to false"
    # layers that would be compiled are not compiled for this sequence
    with torch.compiler.set_stance("force_eager"), resized_windows(model, LENGTH) as window:
        if not (is_standard and gives_own_logits(model, packed=packed)):
            raise ArtifactError(f"{name} computes something that is not supported here: {advice}")
    with torch.compiler.set_stance("force_eager"), resized_windows(model, NARROW):
        if window is not None and not gives_own_logits(model, packed=packed):
            raise ArtifactError(
                f"{name} has an attention window of {window} tokens, which would be ignored here: "
                f"{advice}"
            )


def gives_own_logits(model: PreTrainedModel, *, packed: bool) -> bool:
    """Return whether a forward of `packing` gives the model's own logits for a test sequence: in
    float32 those of its eager attention up to rounding, in 16 bits those of its present attention
    up to ROUNDINGS times the difference that its eager attention makes. In root mean square, this
    difference is 1 to 4 % of the logits' deviation for 4 to 30 layers, and that of an ignored
    window 19 to 36 %."""
    ids = [(7 * n + 3) % model.config.get_text_config().vocab_size for n in range(LENGTH)]
    whole = torch.tensor([ids], device=model.device)
    is_precise = model.dtype == torch.float32 and not torch.is_autocast_enabled(whole.device.type)
    with with_eager_attention(model):
        eager = model(input_ids=whole, use_cache=False).logits[0].float()
    expected = eager if is_precise else model(input_ids=whole, use_cache=False).logits[0].float()
    rounding = max(ROUNDINGS * rms(eager - expected), LEAST * float(expected.std()))
    if packed:
        expected = expected[[0, 1, 2, 3, 4, 0, 1, 2, *range(5, 12), *range(5, 9)]]
    logits = call(own_logits, model, ids, packed=packed)
    if is_precise:
        return torch.allclose(logits, expected, atol=1e-3, rtol=1e-3)
    return rms(logits - expected) <= rounding


def rms(values: torch.Tensor) -> float:
    """Return the root mean square of the values."""
    return float(values.square().mean().sqrt())


def own_logits(model: PreTrainedModel, ids: list[int], *, packed: bool) -> torch.Tensor:
    """Return the logits of a sequence from a forward of `packing`. With `packed`, return the logits
    of two prompts (prefixes of the sequence) and of two continuations of the first prompt."""
    if packed:
        rest = [ids[5:], ids[5:9]]
        packing, _, _ = pack([ids[:5], ids[:3]], np.array([0, 0]), rest, model.device)
        hidden_ND = forward(model, packing.ids, packing.positions, packing.attend)
    else:
        whole = torch.tensor([ids], device=model.device)
        hidden_ND = forward_rows(model, whole).last_hidden_state[0]
    return head_logits(model, hidden_ND).float()


@contextmanager
def with_eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use the model's own eager attention in place of `packing.handed_attention`."""
    is_handed = model.config._attn_implementation == ATTENTION
    if is_handed:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if is_handed:
            model.set_attn_implementation(ATTENTION)


@contextmanager
def resized_windows(model: PreTrainedModel, size: int) -> Iterator[int | None]:
    """Set the model's attention windows to `size` tokens. Yield the smallest original window, or
    None if the model has none. transformers makes masks from the configuration's windows, and
    modules pass their windows to attention."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = [config for each in models for config in (each.config, each.config.get_text_config())]
    own = [
        (holder, name, window)
        for holder in [*configs, *model.modules()]
        for name in WINDOWS
        if isinstance(window := getattr(holder, name, None), int) and window > 0
    ]
    for holder, name, _ in own:
        setattr(holder, name, size)
    try:
        yield min((window for _, _, window in own), default=None)
    finally:
        for holder, name, window in own:
            setattr(holder, name, window)
