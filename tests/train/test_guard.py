"""An engine that samples from other weights than the trainer's is found, one update old or more."""

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.engines.hf.engine import HfEngine
from tasks.train import run as training
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.state import TrainingError
from tasks.train.loop.sync import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tests.train.worlds import make_trainer, make_world


class OwnWeights(HfEngine):
    """The engine over a copy of the trainer's model; it loses the updates `lost` (from 1)."""

    def __init__(self, model: PreTrainedModel, lost: set[int]) -> None:
        super().__init__(copy.deepcopy(model), [1], 64, 512)
        self.lost, self.updates = lost, 0

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.updates += 1
        if self.updates not in self.lost:
            super().set_weights(weights)


class Refusing(OwnWeights):
    """An engine that does not take the policy's weights."""

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        raise ArtifactError("there is no module named 'experts'")


def run(guesser: Path, root: Path, lost: set[int]) -> Trainer:
    layout = make_world(root, guesser, [4, 3, 4, 2, 2, 6] * 2)
    trainer = make_trainer(layout)
    trainer.collector.engine = OwnWeights(trainer.learner.model, lost)
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    with closing(trainer.collector.grader):
        train(trainer, checkpoints, CheckpointSettings(1e9, 1), lambda *_: None)
    return trainer


def test_weights_one_update_old_stop_the_run_at_once(guesser: Path, tmp_path: Path) -> None:
    message = r"before step 2: the engine hf .* at policy version 2, over guards.max_sampler_gap"
    with pytest.raises(TrainingError, match=message):
        run(guesser, tmp_path, lost={2})


def test_weights_that_an_engine_does_not_take_are_found_before_it_samples(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []

    def load(settings: object, policy: object, model: PreTrainedModel) -> HfEngine:
        engines.append(Refusing(model, lost=set()))
        return engines[0]

    monkeypatch.setattr(training, "load_engine", load)
    with pytest.raises(ArtifactError, match="there is no module named 'experts'"):
        make_trainer(make_world(tmp_path, guesser, [4, 3, 4, 2, 2, 6] * 2))
    assert [engine.prefilled_tokens for engine in engines] == [0]


def test_weights_that_arrive_are_let_through(guesser: Path, tmp_path: Path) -> None:
    trainer = run(guesser, tmp_path, lost=set())
    assert trainer.learner.version == sum(row["updated"] for row in trainer.state.steps) > 3
    assert max(row["log_ratio_mean"] or 0.0 for row in trainer.state.steps) < 1e-5


def test_with_several_updates_a_batch_every_fresh_rollout_is_looked_at(
    guesser: Path, tmp_path: Path
) -> None:
    """Only the first of them sees the policy that sampled."""
    layout = make_world(tmp_path, guesser, [4, 4, 4] * 4)
    updates = {"epochs": 1, "minibatches": 3}
    trainer = make_trainer(layout, updates=updates, advantage={"method": "rloo"})
    with closing(trainer.collector.grader):
        batch = trainer.sample()
    assert batch is not None
    samples = batch.fresh.samples
    for stale in (0, 5, 11):
        logprobs = [list(row) for row in samples.logprobs]
        logprobs[stale] = [value - 0.1 for value in logprobs[stale]]
        other = dataclasses.replace(samples, logprobs=logprobs)
        seen = trainer.observe_policy(dataclasses.replace(batch.fresh, samples=other))
        rng = trainer.rng(1)
        with pytest.raises(TrainingError, match="step 0: the engine hf .* at policy version 0"):
            trainer.update(seen, trainer.estimate(seen, rng), 1e-4, rng)
