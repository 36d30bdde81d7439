"""Adapters: only they are trained, every engine samples with them, and the result is a normal
policy."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.common.files import ArtifactError
from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models.adapters import adapted_layers, adapters_off
from tasks.models.folder import policy_digest
from tasks.models.fused import fits
from tasks.models.lora import add_adapters
from tasks.models.policy import load_model, load_tokenizer
from tasks.models.settings import Lora
from tasks.models.weights import NamedWeights
from tasks.train.checkpoint.tensors import optimizer_tensors
from tasks.train.data.rollouts import Rollouts, StepTotals
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    accumulate_gradients,
    enable_activation_checkpointing,
    token_logprobs,
)
from tests.engines.test_flops import architecture_of
from tests.train.steps import estimated, graded
from tests.train.test_gradient import OBJECTIVE
from tests.train.worlds import make_trainer, make_world, run, run_in_process

SETTINGS: dict[str, Any] = {"rank": 4, "alpha": 8.0, "modules": ["all-linear"], "base_bits": 32}
LORA = Lora(**SETTINGS)
CPU = torch.device("cpu")
SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]


def adapted(folder: Path, settings: Lora = LORA) -> Any:
    """Return a policy whose adapters have an effect."""
    model = load_model(folder, dtype=torch.float32, device=CPU)
    add_adapters(model, settings, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.2)
    return model


def sample(engine: HfEngine, tokenizer: Any) -> Rollouts:
    prompts = [tokenizer(text).input_ids for text in ("1+1 =", "Janet has 3", "2")]
    samples = engine.generate(Request(prompts, [4, 4, 4], [*range(12)], Sampling(1, 1, 0, 12, 0)))
    return graded(prompts, np.repeat(np.arange(3), 4), samples, np.arange(12) % 2 * 1.0)


def logprobs(model: Any, rollouts: Rollouts) -> torch.Tensor:
    """Return the gaps between the trainer's and the sampler's log-probabilities."""
    rows = np.arange(len(rollouts.group_B))
    (batch,) = micro_batches(rollouts, rows, 10**6, CPU, by_group=False)
    with torch.no_grad():
        return token_logprobs(model, batch, OBJECTIVE)[0] - batch.sampler_logprobs_N


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_the_engine_samples_with_the_adapters(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    model = adapted(folder)
    assert fits(model)  # the adapters are added to copies of the weights
    rollouts = sample(HfEngine(model, [1], 64, 512), load_tokenizer(folder))
    assert logprobs(model, rollouts).abs().max() < 1e-4
    with adapters_off(model):
        assert logprobs(model, rollouts).abs().mean() > 0.05
    initial = load_model(folder, dtype=torch.float32, device=CPU)
    with adapters_off(model):
        assert torch.equal(logprobs(model, rollouts), logprobs(initial, rollouts))


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_an_engine_with_separate_weights_gets_the_merged_ones(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    model = adapted(folder)
    own = load_model(folder, dtype=torch.float32, device=CPU)
    assert set(own.state_dict()) <= set(NamedWeights(model))
    engine = HfEngine(own, [1], 64, 512)
    engine.set_weights(NamedWeights(model))
    assert logprobs(model, sample(engine, load_tokenizer(folder))).abs().max() < 1e-4


def test_only_adapters_are_trained_and_the_result_is_a_policy(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    trainer = run(layout, {"lora": SETTINGS, "learning_rate": 0.01, "max_steps": 3})
    learner, initial = trainer.learner, load_model(guesser, dtype=torch.float32, device=CPU)

    # the policy without its adapters does not change
    for name, layer in adapted_layers(learner.model).items():
        assert torch.equal(layer.base_layer.weight, initial.get_submodule(name).weight)
        assert layer.lora_B["default"].weight.abs().max() > 1e-3
    names = set(optimizer_tensors(learner.model, learner.optimizer))
    assert names
    assert all(".lora_" in name for name in names)

    # the artifact: a merged policy, and the adapters as peft loads them
    policy = layout.train("r", 0) / "policy"
    merged = load_model(policy, dtype=torch.float32, device=CPU)
    by_peft: Any = PeftModel.from_pretrained(initial, policy / "adapter").merge_and_unload()
    for (name, mine), theirs in zip(merged.named_parameters(), by_peft.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0.0, msg=name)
    card = json.loads((policy / "adapter" / "adapter_config.json").read_text())
    assert str(guesser) not in json.dumps(card)
    assert (
        policy_digest(policy) == json.loads((policy.parent / "policy.json").read_text())["digest"]
    )


def test_the_reference_is_the_policy_without_its_adapters(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    changes = {"lora": SETTINGS, "kl_coefficient": 0.1, "learning_rate": 0.05, "max_steps": 3}
    trainer = run_in_process(layout, changes)
    learner = trainer.learner
    assert learner.reference is learner.model
    assert trainer.state.steps[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert trainer.state.steps[2]["kl"] > 1e-4
    # with a copy as the reference, a step costs a whole update
    whole = make_trainer(layout, kl_coefficient=0.1)
    with closing(whole.collector.grader):
        assert whole.learner.reference is not whole.learner.model
        assert whole.learner.update_factor == 3.0
    assert 2.0 < learner.update_factor < 3.0


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_flops_of_an_update_agree_with_torchs_counter(recomputes: bool, llama: Path) -> None:
    model = adapted(llama)
    architecture = architecture_of(load_model(llama, dtype=torch.float32, device=CPU))
    rollouts = sample(HfEngine(model, [1], 64, 512), load_tokenizer(llama))
    if recomputes:
        enable_activation_checkpointing(model)
        model.train()
    batches = micro_batches(rollouts, np.arange(12), 10**6, CPU, by_group=False)
    rollouts, totals = estimated(rollouts, np.ones(12)), StepTotals(100, 12, 12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        stats = accumulate_gradients(model, batches, rollouts, OBJECTIVE, totals, architecture)
    # the input of the first layer's projections needs no gradient; transformers requests one anyway
    # if activations are recomputed
    attention = model.model.layers[0].self_attn
    first = [attention.q_proj, attention.k_proj, attention.v_proj]
    left_out = sum(layer.weight.numel() + layer.lora_A["default"].weight.numel() for layer in first)
    num_tokens = sum(batch.whole.input_ids.numel() for batch in batches)
    counted_flops = counted.get_total_flops() + (not recomputes) * 2.0 * left_out * num_tokens
    assert stats.flops == pytest.approx(counted_flops, rel=0.01)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (["query"], "not found"),
        (["q_proj", "query"], "query not found"),
        # the embedding would be written with the changes of the head that is tied to it
        (["q_proj", "lm_head"], "lm_head cannot have adapters"),
        (["embed_tokens"], "embed_tokens cannot have adapters"),
    ],
)
def test_modules_without_linear_weights_are_refused(
    modules: list[str], reason: str, qwen: Path
) -> None:
    model = load_model(qwen, dtype=torch.float32, device=CPU)
    with pytest.raises(ArtifactError, match=rf"linear layers are .*, v_proj: name .*{reason}"):
        add_adapters(model, Lora(4, 8.0, modules, 32), seed=0)
