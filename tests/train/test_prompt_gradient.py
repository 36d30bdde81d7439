"""`train.prompt_gradient: false`: prompts are read once, without a gradient."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.accounting.ledger import forward_flops
from tasks.common.accounting.spending import Rows, pass_cost, prompt_cost
from tasks.common.params import ParamsError
from tasks.engines.settings import EngineSettings, Sampling
from tasks.grading.settings import Verify
from tasks.models.packing import Packing
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import update_flops
from tasks.train.rollouts import Rollouts
from tasks.train.settings import (
    CheckpointSettings,
    Guards,
    LearnerSettings,
    Sections,
    TrainSettings,
)
from tests.engines.test_flops import architecture_of
from tests.train import test_sharding as sharding
from tests.train.test_budget import ARCHITECTURE
from tests.train.test_gradient import OBJECTIVE, gradient, recomputing, step
from tests.train.worlds import make_world, run_in_process

__all__ = ["step"]
STOPPED = dataclasses.replace(OBJECTIVE, share_prompts=True, prompt_gradient=False)
WITH = dataclasses.replace(OBJECTIVE, share_prompts=True)
ROWS = np.arange(12)


def test_the_gradient_is_that_of_detached_keys_and_values(
    step: tuple[Any, Rollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the forward that shares prompts, in which every token attends to copies of
    the keys and values of a prompt that have no gradient, but for the prompt's last token."""
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


@pytest.mark.parametrize("recompute", [True, False])
def test_it_does_not_depend_on_micro_batches(step: tuple[Any, Rollouts], recompute: bool) -> None:
    model, rollouts = step
    whole = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    other = recomputing(model) if recompute else model
    for max_tokens in (1, 40, 10**6):
        objective = dataclasses.replace(STOPPED, tokens_per_chunk=7)
        found = gradient(other, rollouts, ROWS, max_tokens, objective)
        np.testing.assert_allclose(found, whole, atol=1e-6)


def test_a_weight_that_autocast_has_cast_for_prompts_gets_its_gradient(
    step: tuple[Any, Rollouts],
) -> None:
    model, rollouts = step
    exact = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradient(model, rollouts, ROWS, 10**6, STOPPED)
    assert torch.nn.functional.cosine_similarity(rounded, exact, dim=0) > 0.99


def test_flops_are_one_forward_over_prompts_and_three_over_the_rest(
    step: tuple[Any, Rollouts],
) -> None:
    model, rollouts = step
    sizes, device = architecture_of(model), torch.device("cpu")
    [batch] = micro_batches(rollouts, ROWS, 10**6, device, by_group=True)
    prompts, rest, _ = batch.continued
    num_targets = int(rollouts.completion_tokens_B().sum())
    assert len(rest.ids) == num_targets  # each is computed from the token before it
    lengths = [len(prompt) for prompt in rollouts.table["prompt"].unique()]
    assert len(prompts.ids) == sum(lengths) - len(lengths)
    read = forward_flops(sizes, len(prompts.ids), 0.0, prompts.num_pairs())
    computed = forward_flops(sizes, len(rest.ids), num_targets, rest.num_pairs())
    found = update_flops(model, batch, STOPPED, sizes)
    assert found == pytest.approx(read + 3.0 * computed)
    assert found < update_flops(model, batch, WITH, sizes)


def test_the_cost_in_accounts_by_hand() -> None:
    rows = Rows(np.array([0, 0, 1]), np.array([9, 9, 4]), np.array([2, 3, 5]))
    charged = prompt_cost("charged", ARCHITECTURE, rows)
    assert charged == 2.0 * ARCHITECTURE.num_matmul_parameters * 22
    assert prompt_cost("rollouts", ARCHITECTURE, rows) == 0.0
    nothing = dataclasses.replace(rows, completion_tokens_B=np.zeros(3, dtype=np.int64))
    executed = prompt_cost("executed", ARCHITECTURE, rows)
    assert executed == pass_cost("executed", ARCHITECTURE, nothing)


def test_a_run_spends_less_for_its_updates_and_a_neutral_setting_changes_nothing(
    guesser: Path, tmp_path: Path
) -> None:
    runs = {}
    for name, changes in {
        "default": {},
        "true": {"prompt_gradient": True},
        "false": {"prompt_gradient": False},
    }.items():
        layout = make_world(tmp_path / name, guesser, [4] * 9)
        runs[name] = run_in_process(layout, {"max_steps": 3, **changes}).state
    assert runs["default"].steps == runs["true"].steps
    update = {name: state.ledger.executed["update"] for name, state in runs.items()}
    charged = {name: state.ledger.charged["update"] for name, state in runs.items()}
    assert update["false"] < update["true"]
    assert charged["false"] < charged["true"]
    assert runs["false"].steps[0]["reward_mean"] == runs["true"].steps[0]["reward_mean"]
    assert runs["false"].steps[0]["grad_norm"] != runs["true"].steps[0]["grad_norm"]
    assert runs["false"].steps[0]["loss"] == pytest.approx(runs["true"].steps[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("changes", [{"shard": "fsdp2"}, {"share_prompts": False}])
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any]) -> None:
    found = Sections(
        Sampling(1.0, 1.0, 0, 8, 0),
        EngineSettings(),
        Verify(),
        LearnerSettings(**changes),
        Guards(),
        CheckpointSettings(),
    )
    with pytest.raises(ParamsError, match=r"train\.prompt_gradient is false"):
        found.check(TrainSettings(prompt_gradient=False))
    found.check(TrainSettings())


def test_two_ranks_take_the_steps_of_one_process(guesser: Path, tmp_path: Path) -> None:
    case, models = {"train": {"prompt_gradient": False}}, []
    for size in (0, 2):
        layout = sharding.world(tmp_path / f"world-{size}", guesser, case, "none")
        models.append(sharding.run(layout, size, 4, tmp_path / f"out-{size}") / "model")
    one, two = models
    assert sharding.same_tensors(one, two, 1e-4)
