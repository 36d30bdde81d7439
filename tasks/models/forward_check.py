"""Whether the forwards in `packing` compute what a model's class does.

Attention gets windows, caps and sinks as arguments and masks, and each class names its own. One
that is missed changes log-probabilities without an error, in the trainer and in the engine `hf`
alike. So both forwards are compared with the model's own forward and its own eager attention,
before anything is sampled. Left out: what shows only in text longer than some tokens and is no
window."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.models.packing import ATTENTION, forward, forward_rows, head_logits, pack

LENGTH = 12  # tokens of the sequence that is computed
NARROW = 4  # tokens of a window that it goes past
# where configurations and modules of transformers keep the size of an attention window
WINDOWS = ("sliding_window", "attention_chunk_size")


@torch.no_grad()
def check_forward(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise ArtifactError when hidden states and `head_logits` do not give the model's own logits:
    its class does something that is not computed here. With `packed`, the hidden states are those
    of a packed forward.

    Windows are tested with another size. A sequence longer than a window of 4,096 tokens would take
    a large policy minutes on a CPU, and the size changes nothing about how attention gets it."""
    name = type(model).__name__
    has_body = model.base_model is not model
    is_standard = has_body and (model._supports_attention_backend or not packed)
    advice = "it cannot be trained here"
    if packed and has_body:
        advice = "set engine.name to vllm and learner.share_prompts to false"
    with resized_windows(model, LENGTH) as window:
        if not (is_standard and gives_own_logits(model, packed=packed)):
            raise ArtifactError(f"{name} computes something that is not supported here: {advice}")
    with resized_windows(model, NARROW):
        if window is not None and not gives_own_logits(model, packed=packed):
            raise ArtifactError(
                f"{name} has an attention window of {window} tokens, which would be ignored here: "
                f"{advice}"
            )


def gives_own_logits(model: PreTrainedModel, *, packed: bool) -> bool:
    """Whether the logits of a made-up sequence are the model's own. In 16 bits eager attention
    rounds by more than a fault may show, and torch's attention takes its place."""
    ids = [(7 * n + 3) % model.config.get_text_config().vocab_size for n in range(LENGTH)]
    whole = torch.tensor([ids], device=model.device)
    is_precise = model.dtype == torch.float32
    with with_eager_attention(model) if is_precise else nullcontext():
        expected = model(input_ids=whole, use_cache=False).logits[0].float()
    if packed:
        # two prompts that are prefixes of it, each with a continuation that follows it
        packing, _, _ = pack(
            [ids[:5], ids[:3]], np.array([0, 0]), [ids[5:], ids[5:9]], model.device
        )
        hidden = forward(model, packing.ids, packing.positions, packing.attend)
        expected = expected[[0, 1, 2, 3, 4, 0, 1, 2, *range(5, 12), *range(5, 9)]]
    else:
        hidden = forward_rows(model, whole).last_hidden_state[0]
    tolerance = 1e-3 if is_precise else 0.1
    logits = head_logits(model, hidden).float()
    return torch.allclose(logits, expected, atol=tolerance, rtol=tolerance)


@contextmanager
def with_eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with its own eager attention in place of `packing.handed_attention`."""
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
    """The model with attention windows of `size` tokens in place of its own. Yields the smallest of
    its own; None: it has none. transformers makes masks from the configuration's windows, and
    modules hand theirs to attention."""
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
