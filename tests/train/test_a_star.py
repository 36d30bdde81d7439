"""A*-PO: published values, its gradient and its optimum by enumeration, and runs of its recipe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common import recipes
from tasks.common.accounting.ledger import charged_flops
from tasks.common.recipes import has_reference
from tasks.train.loop.loop import learn
from tasks.train.methods.advantage import a_star
from tasks.train.methods.loss import regression
from tasks.train.rollouts import StepTotals
from tests.parameters import every_value
from tests.train.steps import profile_of, rollouts_of, tokens_of
from tests.train.worlds import (
    make_trainer,
    make_world,
    sampled,
)

RECIPE: dict[str, Any] = {
    "advantage": {"method": "a_star", "beta": 0.5},
    "loss": {"method": "regression", "beta": 0.1},
}


def test_the_optimal_value_by_the_number_of_correct_samples() -> None:
    """Of 8, with beta 0.5."""
    rows = np.repeat(np.arange(9), 8)
    rewards = (np.tile(np.arange(8), 9) < rows).astype(np.float64)
    found = a_star.optimal_values(rewards, rows, 10, 0.5)
    expected = [0, 0.2935, 0.4772, 0.6113, 0.7169, 0.8040, 0.8782, 0.9428, 1]
    assert found[:9] == pytest.approx(expected, abs=5e-5)
    assert np.isnan(found[9])  # a prompt without samples
    sharp = a_star.optimal_values(rewards, rows, 9, 1e-4)
    assert sharp[[0, 1, 8]] == pytest.approx([0.0, 1.0, 1.0], abs=1e-3)
    assert a_star.optimal_values(rewards, rows, 9, 1e4) == pytest.approx(np.arange(9) / 8, abs=1e-3)


def test_the_advantage_is_over_the_value_of_the_own_prompt() -> None:
    """Prompts by row: 0 is always solved, 1 once in three samples, 2 once in two; samples with an
    error do not count, and 3 has none."""
    outcomes = {
        "p2": ["wrong", "correct", "error"],
        "p0": ["correct", "correct", "error"],
        "p1": ["wrong", "truncated", "correct"],
        "p3": ["error"],
    }
    estimate = a_star.Method(a_star.Settings(beta=0.5), profile_of(outcomes))
    rows = [2, 1, 0, 3]
    found = estimate(rollouts_of([1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 2, 3], prompt_rows=rows))
    half, third = 0.5 * np.log((1 + np.e**2) / 2), 0.5 * np.log((2 + np.e**2) / 3)
    assert found == pytest.approx([1 - half, -half, -third, 1 - third, 0.0, 0.0])
    assert half == pytest.approx(0.7169, abs=5e-5)  # 4 of 8


def loss_of(
    scores: torch.Tensor, reference: torch.Tensor, advantages: list[float], beta: float
) -> torch.Tensor:
    """The exact mean loss over the arms of a bandit, drawn from the policy of these scores."""
    logprobs, method = scores.log_softmax(-1), regression.Method(regression.Settings(beta=beta))
    total = torch.zeros((), dtype=torch.float64)
    for arm, chance in enumerate(logprobs.detach().exp()):
        one = slice(arm, arm + 1)
        old, of_arm = logprobs[one].detach(), {"reference_logprobs_N": reference[one]}
        tokens = tokens_of(logprobs[one], advantages[arm], old, **of_arm)
        total = total + chance * method(tokens, StepTotals(1, 1, 1))[0]
    return total


def test_the_first_gradient_is_that_of_the_pass_rate() -> None:
    """At the reference: -2 beta (r - V*) S, on average -2 beta times p (1 - p) for the correct arm
    of two, whatever V* is."""
    scores = torch.tensor([0.3, 0.7], dtype=torch.float64).log().requires_grad_()
    reference = scores.detach().log_softmax(-1)
    for value in (0.0, 0.45):
        loss = loss_of(scores, reference, [1.0 - value, -value], beta=0.01)
        (found,) = torch.autograd.grad(loss, scores)
        step = 2 * 0.01 * 0.3 * 0.7
        assert found.tolist() == pytest.approx([-step, step])


def test_the_optimum_of_the_penalised_reward_has_no_loss() -> None:
    """Its policy is the reference times exp(reward / beta); the value is from exact samples."""
    beta, correct = 0.5, 3
    reference = torch.tensor([correct / 8, 1 - correct / 8], dtype=torch.float64).log()
    samples = (np.arange(8) < correct).astype(np.float64)
    [value] = a_star.optimal_values(samples, np.zeros(8, dtype=np.int64), 1, beta)
    best = reference + torch.tensor([1.0 / beta, 0.0], dtype=torch.float64)
    assert loss_of(best, reference, [1 - value, -value], beta).item() == pytest.approx(0, abs=1e-12)
    assert loss_of(reference, reference, [1 - value, -value], beta).item() > 0.1


def test_a_completion_is_regressed_as_a_whole() -> None:
    """Two completions, of one and of three tokens, with a weight of 0.5 on the second."""
    logs = torch.tensor([0.5, 0.1, 0.2, 0.3])
    gains, weights = [1.0, -2.0, -2.0, -2.0], torch.tensor([1.0, 0.5, 0.5, 0.5])
    of_tokens = {"weights_N": weights, "reference_logprobs_N": torch.zeros(4)}
    tokens = tokens_of(logs, gains, logs, [0, 1, 1, 1], **of_tokens)
    loss, _ = regression.Method(regression.Settings(beta=2.0))(tokens, StepTotals(4, 2, 3))
    # (2 * 0.5 - 1)^2, and half of (2 * 0.6 + 2)^2
    assert loss.item() == pytest.approx((0.0 + 0.5 * 3.2**2) / 2)


def test_the_reference_of_the_loss_is_charged_like_that_of_a_kl_term(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, [1] * 24)
    trainer = make_trainer(layout, **RECIPE)
    batch = sampled(trainer)
    row = learn(trainer, batch)
    ledger, tokens = trainer.state.ledger, float(batch.fresh.tokens_B().sum())
    architecture = trainer.run.policy.architecture
    for account in (ledger.charged, ledger.charged_mixed):
        assert account["score"] == charged_flops(architecture, reference=tokens)
        assert account["update"] == charged_flops(architecture, updated=tokens)
    assert ledger.executed["score"] > 0
    assert row["kl"] == pytest.approx(0.0, abs=1e-6)  # recorded, and at the reference 0


def test_a_loss_with_a_reference_is_forecast_with_it() -> None:
    train = {"loss": {"method": "clip"}, "kl_coefficient": 0.0}
    assert not has_reference(train)
    assert has_reference({**train, "kl_coefficient": 0.1})
    assert has_reference(recipes.recipe(every_value(), "a_star_po")["train"])
