"""The machine, and the rate of its matrix products, with which other rates are compared."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tests.gpu.check.shapes import Sizes, matmul_rate

PACKAGES = ("torch", "transformers", "vllm", "triton", "peft", "safetensors", "numpy", "polars")


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    device = sizes.device
    machine: dict[str, Any] = {"python": platform.python_version(), "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "GPU": properties.name,
            "memory, GiB": properties.total_memory / 2**30,
            "CUDA": torch.version.cuda,
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
    yield machine
    yield {name: installed(name) for name in PACKAGES}
    for dtype in (torch.bfloat16, torch.float32):
        size = 128 if sizes.is_small else 8192
        yield {"matmul": str(dtype), "TFLOP/s": matmul_rate(dtype, device, size) / 1e12}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"
