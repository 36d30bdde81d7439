"""Adapters on frozen weights in 4 bits: trainer, engines and result have the same policy. The tests
need the extra `torchao`."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common import params
from tasks.engines.hf.engine import HfEngine
from tasks.engines.memory import WEIGHT
from tasks.models.adapters import adapted_layers, adapters_off, dense, is_quantized
from tasks.models.lora import add_adapters, quantize_base
from tasks.models.policy import load_model, load_tokenizer
from tasks.models.settings import Lora
from tasks.train.learner.learner import memory_of
from tasks.train.settings import LearnerSettings, TrainSettings
from tests.train.test_lora import logprobs, sample
from tests.train.test_optimizer import SIZES, tensors_of
from tests.train.worlds import (
    PARAMS,
    check_kills,
    make_trainer,
    make_world,
    run_in_process,
    write_params,
)

pytest.importorskip("torchao")

SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 8.0, "modules": ["all-linear"], "base_bits": 4}
CHANGES: dict[str, Any] = {"lora": SETTINGS, "learning_rate": 0.01}
CPU = torch.device("cpu")


def quantized(folder: Path) -> Any:
    model = load_model(folder, dtype=torch.float32, device=CPU)
    add_adapters(model, Lora(**SETTINGS), seed=0)
    quantize_base(model, CPU)
    return model


def bases(model: Any) -> dict[str, Any]:
    return {name: layer.base_layer.weight for name, layer in adapted_layers(model).items()}


def test_the_memory_of_the_weights_is_as_forecast(qwen: Path) -> None:
    model, initial = quantized(qwen), load_model(qwen, dtype=torch.float32, device=CPU)
    for name, weight in bases(model).items():
        before = initial.get_submodule(name).weight.detach()
        assert is_quantized(weight)
        error = (dense(weight) - before).norm() / before.norm()
        assert 0.05 < float(error) < 0.15  # of 16 values, for normally distributed weights
        parts = [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]
        assert sum(part.nbytes for part in parts) == pytest.approx(
            WEIGHT[4] * weight.numel(), abs=4 * (16 + 1 + 1)
        )
    # autocast keeps no copy of them
    settings = params.parse({**PARAMS["train"], "dtype": "bfloat16"}, TrainSettings, "train")
    learner = params.parse(PARAMS["learner"], LearnerSettings, "learner")
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory_of(model, settings, learner).low_precision == 2 * num_trained


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"max_staleness": 1}])
def test_training_learns_and_all_models_have_the_same_policy(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    """The engine samples from the trainer's model, in the last case from a copy. A run whose engine
    had another policy would stop at the first probe."""
    layout = make_world(tmp_path, guesser, SIZES * 4)
    trainer = run_in_process(layout, {**CHANGES, **changes, "max_steps": 12})
    assert trainer.collector.engine.shares_weights == (not changes.get("max_staleness"))
    assert trainer.state.curve[-1]["accuracy"] > trainer.state.curve[0]["accuracy"]
    learner = trainer.learner
    merged = learner.whole_model()
    assert merged is not None
    rollouts = sample(HfEngine(merged, [1], 64, 512), load_tokenizer(guesser))
    assert logprobs(learner.model, rollouts).abs().max() < 1e-4
    with adapters_off(learner.model):
        assert logprobs(learner.model, rollouts).abs().mean() > 0.05
    # frozen weights do not change
    before = bases(quantized(guesser))
    for name, weight in bases(learner.model).items():
        assert torch.equal(dense(weight), dense(before[name]))
    assert all(".lora_" in name for name in tensors_of(trainer))


def test_a_resumed_run_ends_like_an_uninterrupted_one(guesser: Path, tmp_path: Path) -> None:
    changes = {**CHANGES, "optimizer_bits": 8, "max_steps": 4}
    check_kills(tmp_path, guesser, SIZES * 4, changes, (2,))


def test_an_engine_of_another_dtype_gets_the_base_before_the_first_step(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    write_params(layout, engine={"dtype": "bfloat16"})
    trainer = make_trainer(layout, **CHANGES)
    with closing(trainer.collector.grader):
        engine: Any = trainer.collector.engine
        assert not engine.shares_weights
        base = bases(trainer.learner.model)["model.layers.0.mlp.up_proj"]
        parts = engine.model.model.layers[0].mlp.up_proj.weight
        assert torch.equal(parts, dense(base).bfloat16())
