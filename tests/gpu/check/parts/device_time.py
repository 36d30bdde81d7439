"""The model of device time (`accounting.device_time`) compared with this device: seconds per token
of prefill and the update. On a CPU, compared with an A100, this shows only that the part runs."""

from collections.abc import Iterator
from typing import Any

import torch

from tasks.common.accounting.device_time import A100, H100, H200, Device, DeviceTime, Model
from tests.gpu.check.parts import update
from tests.gpu.check.shapes import Sizes, make_model, seconds_of

DEVICES = {"H200": H200, "H100": H100, "A100": A100}


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    device = next((device for part, device in DEVICES.items() if part in name), A100)
    for shape in sizes.shapes:
        model = make_model(shape, torch.bfloat16, sizes.device)
        modelled = DeviceTime(described(shape, model), device)
        for found in prefill(model, modelled, sizes):
            yield row(device, shape, "prefill", *found)
        del model
        update.free(sizes)
        for found in updates(shape, modelled, sizes):
            yield row(device, shape, "update", *found)


def row(
    device: Device, shape: str, part: str, size: int, measured: float, expected: float
) -> dict[str, Any]:
    return {
        "constants of": device.name,
        "model": shape,
        "part": part,
        "tokens": size,
        "measured, us a token": 1e6 * measured,
        "modelled, us a token": 1e6 * expected,
        "measured / modelled": measured / expected,
    }


def described(shape: str, model: Any) -> Model:
    """Return the policy's sizes. Embeddings are tied, so a step reads all parameters."""
    config, num = model.config, sum(parameter.numel() for parameter in model.parameters())
    heads = config.num_key_value_heads * config.head_dim
    cache = 2 * 2 * config.num_hidden_layers * heads  # keys and values, two bytes each
    return Model(shape, num, num, cache, config.num_hidden_layers, config.hidden_size)


@torch.no_grad()
def prefill(model: Any, modelled: DeviceTime, sizes: Sizes) -> Iterator[tuple[int, float, float]]:
    for length in sizes.lengths[:2]:
        num_rows = 2 if sizes.is_small else max(16_384 // length, 1)
        tokens = torch.ones(num_rows, length, dtype=torch.long, device=sizes.device)
        read = lambda ids=tokens: model.model(input_ids=ids, use_cache=False)  # noqa: E731
        read()
        expected = modelled.read([length] * num_rows)
        yield length, seconds_of(read, sizes.device) / tokens.numel(), expected / tokens.numel()


def updates(shape: str, modelled: DeviceTime, sizes: Sizes) -> Iterator[tuple[int, float, float]]:
    for length in sizes.lengths[:2]:
        found = update.measure(shape, length, sizes, 1.0, share_prompts=True)
        if found["tokens/s"]:
            whole = length + update.PROMPT_TOKENS / 8  # a prompt is read once for its eight
            yield length, 1.0 / found["tokens/s"], modelled.update([whole]) / length
