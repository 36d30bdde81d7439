"""Waits of the host in a decode step of `hf`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.engines.hf.decoding import Slots
from tasks.engines.settings import Sampling
from tasks.models.policy import load_model
from tests.waits import num_waits

SAMPLING = Sampling(1.0, 1.0, 0, 64, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_waits_once_per_step(
    device: str, guesser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the tokens, in one copy, which is not counted as a wait on a CPU."""
    copies: list[int] = []
    copy = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.numel())
        return copy(tensor)

    model = load_model(guesser, dtype=torch.float32, device=torch.device(device))
    with torch.inference_mode():
        slots = Slots(model, 4, 5, SAMPLING, np.array([], dtype=np.int64))
        owners = np.array([0, 0, 1, 1])
        prefill = slots.prefill([[20, 14, 20, 3, 32], [20, 3, 32]])
        slots.start([0, 1, 2, 3], [5, 6, 7, 8], np.zeros(4, dtype=np.int64), prefill, owners)
        slots.step()  # creates the objects that are reused

        monkeypatch.setattr(torch.Tensor, "cpu", counted)

        def decode() -> None:
            for _ in range(10):
                slots.step()

        assert num_waits(decode, torch.device(device)) == (10 if device == "cuda" else 0)
    assert copies == [8] * 10  # a token and a log-probability for each of four rows
    assert slots.count.tolist() == [12] * 4
