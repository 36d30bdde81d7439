"""The model of device time (`accounting.device_time`) compared with this device: seconds per token
of decoding, prefill and the update. On a CPU the numbers are compared with an A100's, and mean only
that the part runs."""

from collections.abc import Iterator
from typing import Any

import torch

from tasks.common.accounting.device_time import A100, H100, H200, Device, DeviceTime, Model
from tests.gpu.check.parts import engine, update
from tests.gpu.check.shapes import Sizes, make_model, seconds_of

DEVICES = {"H200": H200, "H100": H100, "A100": A100}


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    device = device_of(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    for shape in sizes.shapes:
        model = make_model(shape, torch.bfloat16, sizes.device)
        modelled = DeviceTime(described(shape, model), device)
        for part, context, measured, expected in (
            *decoding(model, modelled, sizes),
            *prefill(model, modelled, sizes),
        ):
            yield row(device, shape, part, context, measured, expected)
        del model
        update.free(sizes)
        for part, context, measured, expected in updates(shape, modelled, sizes):
            yield row(device, shape, part, context, measured, expected)


def row(
    device: Device, shape: str, part: str, size: int, measured: float, expected: float
) -> dict[str, Any]:
    return {
        "constants of": device.name,
        "model": shape,
        "part": part,
        "rows, or tokens": size,
        "measured, us a token": 1e6 * measured,
        "modelled, us a token": 1e6 * expected,
        "measured / modelled": measured / expected,
    }


def device_of(name: str) -> Device:
    """Return the constants of a GPU by its name, by default an A100's."""
    return next((device for part, device in DEVICES.items() if part in name), A100)


def described(shape: str, model: Any) -> Model:
    """Return the policy's sizes. Embeddings are tied, so a step reads all parameters."""
    config, num = model.config, sum(parameter.numel() for parameter in model.parameters())
    heads = config.num_key_value_heads * config.head_dim
    cache = 2 * 2 * config.num_hidden_layers * heads  # keys and values, two bytes each
    return Model(shape, num, num, cache, config.num_hidden_layers, config.hidden_size)


def decoding(
    model: Any, modelled: DeviceTime, sizes: Sizes
) -> Iterator[tuple[str, int, float, float]]:
    """Measure the engine `hf` by rows in flight, which all end together after short prompts."""
    new = sizes.new_tokens
    for num_rows in sizes.rows:
        draw = lambda n=num_rows: engine.draw(model, n // 4, 4, new, max_rows=n)  # noqa: E731
        draw()
        seconds = seconds_of(draw, sizes.device)
        context = num_rows * len(engine.PROMPTS[0])
        tokens = num_rows * new
        yield "decode", num_rows, seconds / tokens, modelled.steps(new, num_rows, context) / tokens


@torch.no_grad()
def prefill(
    model: Any, modelled: DeviceTime, sizes: Sizes
) -> Iterator[tuple[str, int, float, float]]:
    for length in sizes.lengths[:2]:
        num_rows = 2 if sizes.is_small else max(16_384 // length, 1)
        tokens = torch.ones(num_rows, length, dtype=torch.long, device=sizes.device)
        read = lambda ids=tokens: model.model(input_ids=ids, use_cache=False)  # noqa: E731
        read()
        seconds = seconds_of(read, sizes.device)
        total = num_rows * length
        yield "prefill", length, seconds / total, modelled.read([length] * num_rows) / total


def updates(
    shape: str, modelled: DeviceTime, sizes: Sizes
) -> Iterator[tuple[str, int, float, float]]:
    for length in sizes.lengths[:2]:
        found = update.measure(shape, length, sizes, 1.0, share_prompts=True)
        if found["tokens/s"]:
            whole = length + update.PROMPT_TOKENS / 8  # a prompt is read once for its eight
            yield "update", length, 1.0 / found["tokens/s"], modelled.update([whole]) / length
