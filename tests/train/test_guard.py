"""An engine whose weights are not the trainer's is detected, even if they are one update old."""

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from tasks.common.accounting.ledger import decode_flops, forward_flops, prefill_flops
from tasks.common.files import ArtifactError
from tasks.engines.engine import OnEnded, Request, Samples, sample_seed
from tasks.engines.hf.cache import KVCache
from tasks.engines.hf.engine import HfEngine
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import resume
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import Cost
from tasks.train.trainers import own as training
from tests.engines.conftest import load
from tests.policies import make_policy
from tests.train.worlds import make_trainer, make_world, run_in_process, sampled, write_params

SIZES = [4, 3, 4, 2, 2, 6] * 2


class OwnWeights(HfEngine):
    """An engine with a copy of the trainer's model, which misses the updates `lost` (from 1)."""

    def __init__(self, model: PreTrainedModel, lost: set[int]) -> None:
        super().__init__(copy.deepcopy(model), [1], 64, 512)
        self.lost, self.updates = lost, 0
        self.probes: list[tuple[int, int]] = []  # numbers of tokens of prompt and completion

    def generate(self, request: Request, on_ended: OnEnded | None = None) -> Samples:
        samples = super().generate(request, on_ended)
        if request.seeds == [sample_seed("probe")]:
            self.probes.append((len(request.prompts[0]), len(samples.token_ids[0])))
        return samples

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.updates += 1
        if self.updates not in self.lost:
            super().set_weights(weights)


def run(guesser: Path, root: Path, lost: set[int]) -> Trainer:
    def prepare(trainer: Trainer) -> None:
        trainer.collector.engine = OwnWeights(trainer.learner.model, lost)

    return run_in_process(make_world(root, guesser, SIZES), {}, prepare)


def test_weights_one_update_old_stop_the_run_at_once(guesser: Path, tmp_path: Path) -> None:
    message = r"before step 2: the engine hf .* at policy version 2, over guards.max_sampler_gap"
    with pytest.raises(TrainingError, match=message):
        run(guesser, tmp_path, lost={2})


@pytest.mark.parametrize(("is_chance", "limit"), [(True, 0.02), (False, 0.02), (True, 1.0)])
def test_in_16_bits_more_prompts_decide_whether_a_difference_is_chance(
    is_chance: bool, limit: float, guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that rose before changes no cost: a resumed run does not have it."""
    layout = make_world(tmp_path, guesser, SIZES)
    write_params(layout, engine={"dtype": "bfloat16"})
    trainer = make_trainer(layout)
    probe, ledger, probed = trainer.collector.probe, trainer.state.ledger, []

    def differing(prompts: Prompts, size: int, length: int) -> tuple[Rollouts, Cost]:
        rollouts, cost = probe(prompts, size, length)
        probed.append(cost.flops)
        shift = 0.5 if size == 1 or not is_chance else 0.0
        logprobs = [[x + shift for x in row] for row in rollouts.table["logprobs"]]
        return rollouts.with_columns(logprobs=logprobs), cost

    monkeypatch.setattr(trainer.collector, "probe", differing)
    trainer.weights.limit = limit
    before = ledger.executed["generate"]
    with nullcontext() if is_chance else pytest.raises(TrainingError, match="before step 0: "):
        trainer.weights.load()
    assert ledger.executed["generate"] - before == pytest.approx(sum(probed))
    assert probed[1] > 4 * probed[0]


def test_every_rank_repeats_a_probe_that_is_over_the_limit_on_one(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    write_params(layout, engine={"dtype": "bfloat16"})
    trainer = make_trainer(layout)
    probe, ranks, sizes = trainer.collector.probe, trainer.learner.ranks, list[int]()

    def noting(prompts: Prompts, size: int, length: int) -> tuple[Rollouts, Cost]:
        sizes.append(size)
        return probe(prompts, size, length)

    monkeypatch.setattr(trainer.collector, "probe", noting)
    others = Mock(wraps=ranks, all_gather=lambda mine: [mine, (0.0, 0.0, len(sizes) == 1)])
    monkeypatch.setattr(trainer.learner, "ranks", others)
    trainer.weights.load()
    assert sizes == [1, 8]


def test_an_engine_that_rejects_weights_fails_before_it_samples(
    guesser: Path, tmp_path: Path, prefilled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OwnWeights(load(guesser), lost=set())
    refusal = ArtifactError("there is no module named 'experts'")
    monkeypatch.setattr(engine, "set_weights", Mock(side_effect=refusal))
    monkeypatch.setattr(training, "load_engine", lambda *_, **__: engine)
    with pytest.raises(ArtifactError, match="there is no module named 'experts'"):
        make_trainer(make_world(tmp_path, guesser, [4, 3, 4, 2, 2, 6] * 2))
    assert not prefilled


def test_the_probe_is_executed_but_not_charged(guesser: Path, tmp_path: Path) -> None:
    trainer = run(guesser, tmp_path / "own", lost=set())
    engine, ledger = trainer.collector.engine, trainer.state.ledger
    assert isinstance(engine, OwnWeights)
    assert len(engine.probes) == trainer.learner.version > 3
    architecture = trainer.run.policy.architecture
    sampled = scored = 0.0
    for prompt, length in engine.probes:
        fed = length - 1
        sampled += prefill_flops(architecture, prompt) + decode_flops(architecture, prompt, length)
        pairs = prompt**2 + fed * (prompt + fed)
        scored += forward_flops(architecture, prompt + fed, length, pairs)
    plain = run_in_process(make_world(tmp_path / "plain", guesser, SIZES), {}).state.ledger
    assert ledger.executed["generate"] == pytest.approx(plain.executed["generate"] + sampled)
    assert ledger.executed["score"] == pytest.approx(scored)
    assert dataclasses.replace(ledger, executed={}) == dataclasses.replace(plain, executed={})


def test_a_resumed_run_has_the_ledger_of_the_stopped_one(guesser: Path, tmp_path: Path) -> None:
    """Its additional probe of the engine is not charged."""
    layout = make_world(tmp_path, guesser, SIZES)
    changes = {"max_staleness": 1, "max_steps": 2}  # the engine has a copy of the policy
    trainer = run_in_process(layout, changes)
    checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    resumed = make_trainer(layout, **changes)
    resume(resumed, checkpoints, None)
    assert resumed.state.ledger == trainer.state.ledger
    assert resumed.state.ledger.executed["score"] > 0


def test_several_updates_per_batch_check_all_fresh_rollouts(guesser: Path, tmp_path: Path) -> None:
    """Only the first update has the policy that sampled."""
    layout = make_world(tmp_path, guesser, [4, 4, 4] * 4)
    updates = {"epochs": 1, "minibatches": 3}
    trainer = make_trainer(layout, updates=updates, advantage={"method": "rloo"})
    with closing(trainer.collector.grader):
        batch = sampled(trainer)
    for stale in (0, 5, 11):
        logprobs = batch.fresh.table["logprobs"].to_list()
        logprobs[stale] = [value - 0.1 for value in logprobs[stale]]
        seen = trainer.scored(batch.fresh.with_columns(logprobs=logprobs))
        rng = trainer.rng()
        with pytest.raises(TrainingError, match="step 0: the engine hf .* at policy version 0"):
            trainer.update(trainer.estimate(seen, rng), 1e-4, rng)


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Give the model other random weights, and a distribution that is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 3 * noise if "norm" in name else noise)
        model.get_output_embeddings().weight.mul_(5.0)


def swap_layers(model: Any, _: pytest.MonkeyPatch) -> None:
    layers = model.base_model.layers
    middle = len(layers) // 2
    layers[middle], layers[middle - 1] = layers[middle - 1], layers[middle]


def age_head(model: Any, _: pytest.MonkeyPatch) -> None:
    weight = model.get_output_embeddings().weight
    weight.data += 0.2 * weight.std() * torch.randn_like(weight)


def narrow_window(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = KVCache.bias
    monkeypatch.setattr(KVCache, "bias", lambda cache, window, dtype: bias(cache, 4, dtype))


@pytest.mark.parametrize("num_layers", [4, 30])
def test_rounding_of_bfloat16_is_told_from_faults(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No healthy policy is refused, however much bfloat16 rounds its log-probabilities."""
    policy = make_policy(tmp_path / "policy", "llama", num_layers=num_layers)
    layout = make_world(tmp_path / "world", policy, SIZES)
    write_params(layout, engine={"dtype": "bfloat16"})
    trainer = make_trainer(layout)
    weights, learner, engine = trainer.weights, trainer.learner, trainer.collector.engine
    limits = []
    for seed in range(10):
        randomize(learner.model, seed)
        weights.limit = 0.02
        weights.load()
        limits.append(weights.limit)
    assert max(limits) > 0.04
    for fault in (swap_layers, age_head, narrow_window):
        monkeypatch.setattr(engine, "model", copy.deepcopy(engine.model))
        fault(engine.model, monkeypatch)
        with pytest.raises(TrainingError, match=r"over guards.max_sampler_gap 0\.\d+: it samples"):
            weights.probe()
        monkeypatch.undo()
