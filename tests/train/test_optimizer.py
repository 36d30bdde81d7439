"""AdamW with moments in 8 bits: it learns like AdamW with whole moments, its checkpoints have plain
tensors, and a killed run ends bit-identical. Most tests need the extra `torchao`."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.common import params
from tasks.common.params import ParamsError
from tasks.engines.memory import training_memory
from tasks.models.policy import load_model
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.tensors import WHOLE, optimizer_tensors
from tasks.train.learner.learner import memory_of
from tasks.train.learner.optimizer import make_optimizer, step
from tasks.train.settings import LearnerSettings, Sections, TrainSettings
from tests.train.worlds import PARAMS, make_world, run_in_process, run_with_kills

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]
EIGHT: dict[str, Any] = {"optimizer_bits": 8}
LORA = {"rank": 64, "alpha": 128.0, "modules": ["all-linear"], "base_bits": 32}
COMPONENTS = {"recipe": "r", "seed": 0}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def settings_of(**changes: Any) -> TrainSettings:
    return params.parse({**PARAMS["train"], **changes}, TrainSettings, "train")


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    return optimizer_tensors(trainer.learner.model, trainer.learner.optimizer)


def test_impossible_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = params.sections(PARAMS, Sections)
    sharded = replace(sections, learner=LearnerSettings(shard="fsdp2"))
    with pytest.raises(ParamsError, match=r"optimizer_bits is 8, and learner\.shard is fsdp2"):
        sharded.check(settings_of(**EIGHT))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParamsError, match=r"needs torchao: python -m pip install .*\[torchao\]"):
        sections.check(settings_of(**EIGHT))
    with pytest.raises(ParamsError, match=r"train\.lora\.base_bits is 4, which needs torchao"):
        sections.check(settings_of(lora={**LORA, "base_bits": 4}))


def test_the_forecast_by_hand() -> None:
    options: dict[str, Any] = {"num_reference": 0, "tokens_per_chunk": 1, "optimizer_bits": 8}
    assert training_memory(2560, 0, 10, **options).moments == 2 * (2560 + 10 * 4)
    assert training_memory(9, 0, 10, num_trained=2560, **options).moments == 2 * (2560 + 10 * 4)


@needs_torchao
def test_the_memory_of_the_moments_is_as_forecast(qwen: Path) -> None:
    model = load_model(qwen, dtype=torch.float32, device=torch.device("cpu"))
    settings = settings_of(**EIGHT)
    learner = params.parse(PARAMS["learner"], LearnerSettings, "learner")
    # moments of embeddings (no multiple of 256 here) and of norms (small) are float32
    large = [p for p in model.parameters() if p.numel() >= 4096 and p.numel() % 256 == 0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer([*model.parameters()], settings)
    step(optimizer, 0.01)
    num_bytes = sum(
        getattr(optimizer.state[parameter][moment], part).nbytes
        for parameter in large
        for moment in ("exp_avg", "exp_avg_sq")
        for part in ("codes", "scale")
    )
    num_large = sum(parameter.numel() for parameter in large)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    expected = memory_of(model, settings, learner).moments
    assert 0 < num_large < num_parameters
    assert num_bytes == pytest.approx(expected * num_large / num_parameters)


@needs_torchao
@pytest.mark.parametrize("changes", [{}, {"lora": LORA, "learning_rate": 0.01}])
def test_training_learns_as_with_whole_moments(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    whole, eight = (
        run_in_process(
            make_world(tmp_path / str(bits), guesser, SIZES * 4),
            {**changes, "optimizer_bits": bits, "max_steps": 12},
        )
        for bits in (32, 8)
    )
    for rows, name in (
        ([run.state.steps for run in (eight, whole)], "reward_mean"),
        ([run.state.curve for run in (eight, whole)], "accuracy"),
    ):
        ours, theirs = ([row[name] for row in run] for run in rows)
        assert ours == pytest.approx(theirs, abs=0.1)
        assert ours[-1] > ours[0] + 0.2
    assert any(name.startswith("exp_avg/codes.") for name in tensors_of(eight))


@needs_torchao
@pytest.mark.parametrize("changes", [{}, {"lora": LORA, "max_staleness": 1}])
def test_a_killed_run_ends_bit_identical_with_plain_tensors(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    finals = []
    for kills, name in (((), "whole"), ((3,), "killed")):
        layout = make_world(tmp_path / name, guesser, SIZES * 4)
        run_with_kills(layout, {**EIGHT, **changes, "max_steps": 5}, kills)
        newest = Checkpoints(layout.checkpoints, COMPONENTS, keep=2).steps()[-1]
        assert {path.suffix for path in newest.iterdir()} == {".json", ".parquet", ".safetensors"}
        finals.append(load_file(newest / WHOLE))
    ours, theirs = finals
    assert {tensor.dtype for tensor in ours.values()} >= {torch.uint8, torch.float32}
    assert set(ours) == set(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@needs_torchao
@pytest.mark.slow
def test_the_compiled_step_equals_the_eager_one() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        # one tensor with moments in 8 bits, and a small one
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((64, 64), (64,))]
        optimizer = make_optimizer(parameters, settings_of(**EIGHT, learning_rate=0.01))
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            if compiled:
                optimizer.step()
            else:
                step(optimizer, 0.01)
        found.append(parameters)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0.0)
