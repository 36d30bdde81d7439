"""Memory of training on one GPU, computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common import params
from tasks.common.files import ArtifactError
from tasks.engines.memory import GIB, TrainingMemory, check_memory
from tasks.train.learner.learner import memory_of
from tasks.train.settings import LearnerSettings, TrainSettings
from tests.engines.conftest import load
from tests.train.worlds import PARAMS

# 1.5B parameters in float32: 6 of weights, 6 of gradients, 12 of moments
FLOAT32 = TrainingMemory(12 * GIB, 0, 6 * GIB, 0, 0)
# in bfloat16, with a reference and logits
BFLOAT16 = TrainingMemory(12 * GIB, 6 * GIB, 6 * GIB, 3 * GIB, 2 * GIB)


def test_memory_of_a_model_by_hand(qwen: Path) -> None:
    model = load(qwen)
    num_parameters = sum(p.numel() for p in model.parameters())
    plain = memory(model)
    logits = 4 * 4 * 50 * model.config.vocab_size  # chunks of 50 tokens
    assert plain == TrainingMemory(8 * num_parameters, 0, 4 * num_parameters, 0, logits)
    assert memory(model, kl_coefficient=0.1).reference == 4 * num_parameters


def memory(model: Any, **changes: Any) -> TrainingMemory:
    settings = params.parse({**PARAMS["train"], **changes}, TrainSettings, "train")
    return memory_of(model, settings, params.parse(PARAMS["learner"], LearnerSettings, "learner"))


def test_low_precision_memory_is_autocasts_copy(qwen: Path) -> None:
    """Autocast casts matrices in a forward pass, and keeps them for the backward pass."""
    model = load(qwen)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.ndim == 2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.ones(1, 5, dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum()
    sizes = {2 * p.numel() for name, p in model.named_parameters() if "_proj" in name}
    weights = [size for size in kept.values() if size in sizes]
    assert sum(weights) == memory(model, dtype="bfloat16").low_precision


def test_training_that_fits_is_accepted() -> None:
    check_memory(FLOAT32, 20 * GIB, 38 * GIB, sleeps=False)
    check_memory(FLOAT32, 20 * GIB, 32 * GIB, sleeps=True)
    check_memory(BFLOAT16, 20 * GIB, 49 * GIB, sleeps=False)


@pytest.mark.parametrize(
    ("training", "free", "sleeps", "message"),
    [
        (
            FLOAT32,
            37,
            False,
            r"needs 38.0 GiB \(optimizer 12.0, gradients 6.0, engine 20.0\), "
            r"and 37.0 .* 19.0 .* engine.sleep",
        ),
        (
            BFLOAT16,
            48,
            False,
            r"needs 49.0 GiB \(optimizer 12.0, reference policy 6.0, gradients 6.0, "
            r"low-precision weights 3.0, logits 2.0, engine 20.0\).* use 19.0 GiB at most",
        ),
        (BFLOAT16, 37, True, r"use 19.0 GiB at most: lower engine.memory_fraction$"),
        (BFLOAT16, 28, True, r"too much even without the engine.*tokens_per_logprob_chunk"),
    ],
)
def test_training_that_does_not_fit_is_refused(
    training: TrainingMemory, free: int, sleeps: bool, message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_memory(training, 20 * GIB, free * GIB, sleeps=sleeps)
