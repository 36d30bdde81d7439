"""Models of real shapes with random weights, and the sizes of measurements."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tasks.models.packing import ATTENTION

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "0.5B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.5B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "7B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
}
HEADS = {"tiny": (4, 2, 32), "0.5B": (16, 8, 128), "1.5B": (16, 8, 128), "7B": (32, 8, 128)}


@dataclass(frozen=True)
class Sizes:
    """The sizes of measurements: real shapes on a GPU, or small ones on the CPU. `folder` contains
    the results of a part that was stopped."""

    is_small: bool
    folder: Path = Path()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_small else "cuda")

    @property
    def shapes(self) -> list[str]:
        return ["tiny"] if self.is_small else ["0.5B", "1.5B"]

    @property
    def rows(self) -> list[int]:
        """Rollouts in flight."""
        return [4, 8] if self.is_small else [64, 256, 1024]

    @property
    def lengths(self) -> list[int]:
        """Tokens of a completion in the update."""
        return [16, 32] if self.is_small else [512, 2048, 16384]

    @property
    def new_tokens(self) -> int:
        return 8 if self.is_small else 64

    @property
    def repeats(self) -> int:
        return 1 if self.is_small else 3


def make_model(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a Qwen3 of this shape, always with the same weights on one device."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = HEADS[shape]
    config = Qwen3Config(
        vocab_size=98 if shape == "tiny" else 151_936,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        **SHAPES[shape],
    )
    with device:
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of `work`, including those of the GPU, and its result."""
    wait(device)
    started = time.perf_counter()
    found = work()
    wait(device)
    return time.perf_counter() - started, found


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    return timed(work, device)[0]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Return the FLOPs per second of a product of two square matrices, the best of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [seconds_of(lambda: a @ b, device) for _ in range(12)]
    return 2.0 * size**3 / min(seconds[2:])
