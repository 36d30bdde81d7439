"""The gradient of a step: it does not depend on packing, skipped rollouts or recomputation, and the
KL term is unbiased."""

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tasks.common import params
from tasks.common.accounting.ledger import forward_flops
from tasks.common.accounting.spending import Rows, pass_cost, prompt_cost
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.settings import Sampling
from tasks.models import packing
from tasks.models.forward_check import check_forward
from tasks.models.packing import Packing
from tasks.models.policy import load_model, load_tokenizer
from tasks.train.data.rollouts import Rollouts, StepTotals
from tasks.train.learner import update
from tasks.train.learner.correction import corrected_tokens
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    Objective,
    accumulate_gradients,
    enable_activation_checkpointing,
    learning_rate,
    unbiased_kl,
    update_flops,
)
from tasks.train.methods.loss import clip
from tasks.train.settings import (
    Correction,
    LearnerSettings,
    Sections,
    TrainSettings,
)
from tests.engines.test_flops import architecture_of
from tests.train.steps import estimated, graded
from tests.train.test_budget import ARCHITECTURE
from tests.train.worlds import PARAMS, make_world, run_in_process


@pytest.fixture(scope="module")
def step(qwen: Path) -> tuple[Any, Rollouts]:
    """Return a model, and a ragged step of its rollouts with arbitrary rewards."""
    model = load_model(qwen, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(qwen)
    prompts = [tokenizer(text).input_ids for text in ("1+1 =", "Janet has 3", "2", "17 - 4 - 3 =")]
    counts = [4, 3, 4, 1]
    samples = HfEngine(model, [1], 64, 512).generate(
        Request(prompts, counts, list(range(12)), Sampling(1.0, 1.0, 0, 10, 0))
    )
    group_B = np.repeat(np.arange(4), counts)
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1.0])
    return model, graded(prompts, group_B, samples, rewards)


ADVANTAGES = np.array([1.0, -1, -1, 1, 0, 0, 0, 1, 1, -1, -1, 0])
CORRECTION = Correction(ratio_to="old", level="token", cap=2.0, mode="truncate")
OBJECTIVE = Objective(
    clip.Method(clip.Settings()),
    CORRECTION,
    1.0,
    None,
    0.0,
    share_prompts=False,
    tokens_per_chunk=10**6,
)
WITH = dataclasses.replace(OBJECTIVE, share_prompts=True)
STOPPED = dataclasses.replace(WITH, prompt_gradient=False)
ROWS = np.arange(12)


def gradient(
    model: Any,
    rollouts: Rollouts,
    rows: np.ndarray,
    max_tokens: int,
    objective: Objective = OBJECTIVE,
) -> torch.Tensor:
    totals = StepTotals(int(rollouts.completion_tokens_B().sum()), 12, 10)
    model.zero_grad(set_to_none=True)
    device, by_group = torch.device("cpu"), objective.share_prompts
    batches = micro_batches(rollouts, rows, max_tokens, device, by_group=by_group)
    assert sorted(np.concatenate([batch.rows for batch in batches])) == sorted(rows)
    rollouts = estimated(rollouts, ADVANTAGES)
    accumulate_gradients(model, batches, rollouts, objective, totals, architecture_of(model))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def recomputing(model: Any) -> Any:
    copied = copy.deepcopy(model)
    enable_activation_checkpointing(copied)
    return copied.train()


@pytest.mark.parametrize(
    ("objective", "same"),
    [(WITH, OBJECTIVE), (OBJECTIVE, OBJECTIVE), (STOPPED, STOPPED)],
    ids=["with", "apart", "stopped"],
)
@pytest.mark.parametrize("recompute", [True, False])
def test_a_gradient_does_not_depend_on_how_it_is_computed(
    step: tuple[Any, Rollouts], objective: Objective, same: Objective, recompute: bool
) -> None:
    """It does not depend on the size of micro-batches and of chunks of logits, the order of
    rollouts, or skipped rollouts of advantage 0."""
    model, rollouts = step
    alive = np.array([0, 1, 2, 3, 7, 8, 9, 10])
    whole = gradient(model, rollouts, ROWS, 10**6, same)
    assert whole.norm() > 1e-3
    other = recomputing(model) if recompute else model
    for max_tokens, chunk in itertools.product((1, 60, 10**6), (7, 10**6)):
        chunked = dataclasses.replace(objective, tokens_per_chunk=chunk)
        for chosen in (ROWS, ROWS[::-1].copy(), alive):
            found = gradient(other, rollouts, chosen, max_tokens, chunked)
            np.testing.assert_allclose(found, whole, atol=1e-6)


def test_a_micro_batch_frees_its_masks_and_inputs(step: tuple[Any, Rollouts]) -> None:
    model, rollouts = step
    batches = micro_batches(rollouts, np.arange(12), 40, torch.device("cpu"), by_group=True)
    shared = dataclasses.replace(OBJECTIVE, share_prompts=True)
    rollouts, totals = estimated(rollouts, ADVANTAGES), StepTotals(99, 12, 10)
    packings = [batch.shared[0] for batch in batches]
    accumulate_gradients(model, batches, rollouts, shared, totals, architecture_of(model))
    assert len(batches) > 1
    assert [packing.biases for packing in packings] == [{}] * len(batches)
    assert not any("shared" in vars(batch) for batch in batches)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_bfloat16_gradient_has_the_direction_of_the_float32_gradient(
    step: tuple[Any, Rollouts], share_prompts: bool
) -> None:
    """Under autocast, queries and keys are float32 (by their rotation), values bfloat16, and layers
    are recomputed."""
    model, rollouts = step
    whole = gradient(model, rollouts, np.arange(12), 60)
    objective = dataclasses.replace(OBJECTIVE, share_prompts=share_prompts)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradient(recomputing(model), rollouts, np.arange(12), 60, objective)
    assert 0.99 < torch.nn.functional.cosine_similarity(found, whole, dim=0) < 1 - 1e-7


@pytest.mark.parametrize("is_tf32", [True, False])
def test_only_the_head_is_in_tf32_and_entropies_are_computed_once(
    step: tuple[Any, Rollouts], is_tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, precision, once = [], torch.backends.cuda.matmul, Mock(wraps=update.entropies)
    before = precision.fp32_precision  # none, or ieee after a compilation in this process
    assert before != "tf32"

    def head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        found.append((hidden.dtype, precision.fp32_precision))
        return packing.head_logits(model, hidden)

    monkeypatch.setattr(update, "head_logits", head)
    monkeypatch.setattr(update, "entropies", once)
    objective = dataclasses.replace(OBJECTIVE, tokens_per_chunk=40, is_tf32=is_tf32)
    gradient(*step, np.arange(12), 10_000, objective)
    expected = "tf32" if is_tf32 else before
    assert found == [(torch.float32, expected)] * 2 * once.call_count
    assert precision.fp32_precision == before  # in the body, and after the update


def test_the_kl_term_and_its_gradient_are_unbiased() -> None:
    scores = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([-0.2, 0.5, 1.4, -2.0, 0.0], dtype=torch.float64).log_softmax(-1)
    sampler = torch.tensor([0.1, -0.8, 0.9, 0.0, -0.2], dtype=torch.float64).log_softmax(-1)
    mine = scores.log_softmax(-1)
    (true,) = torch.autograd.grad((mine.exp() * (mine - other)).sum(), scores, retain_graph=True)
    # for each token of the vocabulary
    correction = dataclasses.replace(CORRECTION, cap=1e9)
    tokens, _ = corrected_tokens(
        mine, mine.detach(), sampler, mine.detach(), torch.arange(5), 5, correction
    )
    estimates = unbiased_kl(tokens, other)
    (expected,) = torch.autograd.grad((sampler.exp() * estimates).sum(), scores)
    np.testing.assert_allclose(expected, true, atol=1e-12)
    assert (sampler.exp() * estimates).sum().item() == pytest.approx(
        (mine.exp() * (mine - other)).sum().item()
    )


def test_an_unsupported_head_is_refused(step: tuple[Any, Rollouts]) -> None:
    model = copy.deepcopy(step[0])
    check_forward(model, packed=False)
    model.config.logit_scale = 2.0  # as if its class ignored its configuration
    with pytest.raises(
        ArtifactError, match="Qwen3ForCausalLM computes something that is not supported"
    ):
        check_forward(model, packed=False)


def test_learning_rate_by_hand() -> None:
    plain = TrainSettings(learning_rate=1.0)
    assert learning_rate(plain, 0, 0.0) == 1.0
    assert learning_rate(dataclasses.replace(plain, warmup_steps=4), 1, 0.0) == 0.5
    assert learning_rate(TrainSettings(learning_rate=2.0), 9, 0.5) == pytest.approx(1.1)
    assert learning_rate(plain, 99, 1.0) == pytest.approx(0.1)
    # constant, then a decay over the last fifth
    late = TrainSettings(learning_rate=1.0, final_learning_rate_fraction=0.0, decay_share=0.2)
    rates = [learning_rate(late, 0, done) for done in (0.0, 0.5, 0.8, 0.9, 1.0)]
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])


# --- prompts without a gradient (`train.prompt_gradient: false`)


def test_prompts_without_a_gradient_have_detached_keys_and_values(
    step: tuple[Any, Rollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the forward that shares prompts, in which the keys and values of a prompt
    are detached, except for the prompt's last token."""
    model, rollouts = step
    found = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    lengths = sorted((len(prompt) for prompt in rollouts.table["prompt"].unique()), reverse=True)
    is_last = torch.zeros(sum(lengths), dtype=torch.bool)
    is_last[torch.tensor(lengths).cumsum(0) - 1] = True
    attend = Packing.attend

    def detached(
        self: Packing, layer: int, query: Any, key: Any, value: Any, *others: Any
    ) -> torch.Tensor:
        is_free = torch.ones(len(key), dtype=torch.bool)
        is_free[: len(is_last)] = is_last
        free = is_free[:, None, None]
        key, value = (torch.where(free, part, part.detach()) for part in (key, value))
        return attend(self, layer, query, key, value, *others)

    monkeypatch.setattr(Packing, "attend", detached)
    np.testing.assert_allclose(found, gradient(model, rollouts, ROWS, 10**6, WITH), atol=1e-6)
    monkeypatch.undo()
    whole = gradient(model, rollouts, ROWS, 10**6, WITH)
    assert (found - whole).abs().max() > 1e-3
    assert torch.nn.functional.cosine_similarity(found, whole, dim=0) > 0.5


def test_autocast_weights_that_prompts_share_get_a_gradient(
    step: tuple[Any, Rollouts],
) -> None:
    model, rollouts = step
    exact = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    assert torch.nn.functional.cosine_similarity(rounded, exact, dim=0) > 0.99


def test_flops_of_prompts_are_a_third_of_those_of_other_tokens(
    step: tuple[Any, Rollouts],
) -> None:
    model, rollouts = step
    sizes, device = architecture_of(model), torch.device("cpu")
    [batch] = micro_batches(rollouts, ROWS, 10**6, device, by_group=True)
    prompts, rest, _ = batch.continued
    num_targets = int(rollouts.completion_tokens_B().sum())
    assert len(rest.ids) == num_targets  # one per token before a target
    lengths = [len(prompt) for prompt in rollouts.table["prompt"].unique()]
    assert len(prompts.ids) == sum(lengths) - len(lengths)
    read = forward_flops(sizes, len(prompts.ids), 0.0, prompts.num_pairs())
    computed = forward_flops(sizes, len(rest.ids), num_targets, rest.num_pairs())
    found = update_flops(model, batch, STOPPED, sizes)
    assert found == pytest.approx(read + 3.0 * computed)
    assert found < update_flops(model, batch, WITH, sizes)


def test_the_cost_of_prompts_in_accounts_by_hand() -> None:
    rows = Rows(np.array([0, 0, 1]), np.array([9, 9, 4]), np.array([2, 3, 5]))
    charged = prompt_cost("charged", ARCHITECTURE, rows)
    assert charged == 2.0 * ARCHITECTURE.num_matmul_parameters * 22
    assert prompt_cost("rollouts", ARCHITECTURE, rows) == 0.0
    nothing = dataclasses.replace(rows, completion_tokens_B=np.zeros(3, dtype=np.int64))
    executed = prompt_cost("executed", ARCHITECTURE, rows)
    assert executed == pass_cost("executed", ARCHITECTURE, nothing)


def test_updates_without_prompt_gradients_cost_less(guesser: Path, tmp_path: Path) -> None:
    whole, stopped = (
        run_in_process(
            make_world(tmp_path / str(setting), guesser, [4] * 9),
            {"max_steps": 3, "prompt_gradient": setting},
        ).state
        for setting in (True, False)
    )
    assert stopped.ledger.executed["update"] < whole.ledger.executed["update"]
    assert stopped.ledger.charged["update"] < whole.ledger.charged["update"]
    assert stopped.steps[0]["grad_norm"] != whole.steps[0]["grad_norm"]
    assert stopped.steps[0]["loss"] == pytest.approx(whole.steps[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("changes", [{"shard": "fsdp2"}, {"share_prompts": False}])
def test_excluded_settings_are_refused(changes: dict[str, Any]) -> None:
    sections = params.sections(PARAMS, Sections)
    found = dataclasses.replace(sections, learner=LearnerSettings(**changes))
    with pytest.raises(ParamsError, match=r"train\.prompt_gradient is false"):
        found.check(TrainSettings(prompt_gradient=False))
    found.check(TrainSettings())
