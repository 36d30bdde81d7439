"""What training takes on one GPU, by hand."""

from pathlib import Path

import pytest
import torch

from tasks.common import params
from tasks.common.files import ArtifactError
from tasks.engines.memory import GIB, TrainingMemory, check_memory, training_memory
from tasks.models.policy import load_model
from tasks.train.learner.learner import memory_of
from tasks.train.settings import LearnerSettings, TrainSettings
from tests.train.worlds import PARAMS

# 1.5B parameters in float32: 6 of weights, 6 of gradients, 12 of moments
FLOAT32 = TrainingMemory(12 * GIB, 0, 6 * GIB, 0, 0)
# in bfloat16, with a reference and logits
BFLOAT16 = TrainingMemory(12 * GIB, 6 * GIB, 6 * GIB, 3 * GIB, 2 * GIB)


def test_training_by_hand() -> None:
    chunk = {"tokens_per_chunk": 4096}
    assert training_memory(1000, 0, 10, num_reference=0, **chunk) == TrainingMemory(
        8000, 0, 4000, 0, 4 * 4 * 4096 * 10
    )
    assert training_memory(1000, 900, 10, num_reference=1000, **chunk) == TrainingMemory(
        8000, 4000, 4000, 1800, 4 * 4 * 4096 * 10
    )
    # 7.6B parameters, 7.0B of them in products outside the head, a vocabulary of 152,064
    large = training_memory(
        7_615_616_512,
        6_525_288_448,
        152_064,
        num_reference=7_615_616_512,
        tokens_per_chunk=4096,
    )
    assert str(large) == (
        "optimizer 56.7, reference policy 28.4, gradients 28.4, low-precision weights 12.2, "
        "logits 9.3"
    )


def test_a_models_memory_by_hand(qwen: Path) -> None:
    model = load_model(qwen, dtype=torch.float32, device=torch.device("cpu"))
    num_parameters = sum(p.numel() for p in model.parameters())
    # all matrices of the layers; embeddings, which are the head too, and norms are not cast
    num_cast = sum(p.numel() for name, p in model.named_parameters() if "_proj" in name)
    settings = params.parse(PARAMS["train"], TrainSettings, "train")
    learner = params.parse(PARAMS["learner"], LearnerSettings, "learner")
    plain = memory_of(model, settings, learner)
    logits = 4 * 4 * 50 * model.config.vocab_size  # chunks of 50 tokens
    assert plain == TrainingMemory(8 * num_parameters, 0, 4 * num_parameters, 0, logits)
    changed = {**PARAMS["train"], "dtype": "bfloat16", "kl_coefficient": 0.1}
    held = memory_of(model, params.parse(changed, TrainSettings, "train"), learner)
    assert (held.reference, held.low_precision) == (4 * num_parameters, 2 * num_cast)


def test_autocast_keeps_the_copy_that_is_counted(qwen: Path) -> None:
    """The matrices that a forward under autocast casts, and keeps for its backward."""
    model = load_model(qwen, dtype=torch.float32, device=torch.device("cpu"))
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
    bfloat16 = {**PARAMS["train"], "dtype": "bfloat16"}
    memory = memory_of(
        model,
        params.parse(bfloat16, TrainSettings, "train"),
        params.parse(PARAMS["learner"], LearnerSettings, "learner"),
    )
    assert sum(weights) == memory.low_precision


def test_what_fits_is_not_refused() -> None:
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
            FLOAT32,
            31,
            True,
            r"needs 32.0 GiB .* 31.0 GiB are free; the engine may use 19.0 GiB at most: "
            r"lower engine.memory",
        ),
        (FLOAT32, 17, True, r"too much even without the engine"),
        (
            BFLOAT16,
            48,
            False,
            r"needs 49.0 GiB \(optimizer 12.0, reference policy 6.0, gradients 6.0, "
            r"low-precision weights 3.0, logits 2.0, engine 20.0\).* use 19.0 GiB at most",
        ),
        (BFLOAT16, 37, True, r"use 19.0 GiB at most"),
        (BFLOAT16, 28, True, r"too much even without the engine.*tokens_per_logprob_chunk"),
    ],
)
def test_what_does_not_fit_is_refused(
    training: TrainingMemory, free: int, sleeps: bool, message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        check_memory(training, 20 * GIB, free * GIB, sleeps=sleeps)
