"""A reference: its resets, and the losses that read it (A*-PO, distillation of a teacher)."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.allocate.budget import reference_forwards
from tasks.common import recipes
from tasks.common.accounting.ledger import charged_flops
from tasks.common.accounting.spending import CellBudget
from tasks.common.files import ArtifactError
from tasks.common.recipes import input_digests
from tasks.models.folder import num_parameters
from tasks.models.policy import load_model, load_tokenizer, save_policy
from tasks.train.data.rollouts import StepTotals
from tasks.train.loop.charge import costs_of
from tasks.train.loop.loop import learn
from tasks.train.loop.trainer import Trainer
from tasks.train.methods.advantage import a_star
from tasks.train.methods.loss import distil, regression
from tasks.train.needs import has_reference, read_train, reference_parameters
from tests.parameters import every_value
from tests.train.steps import profile_of, rollouts_of, tokens_of
from tests.train.test_warm_start import WARM
from tests.train.worlds import check_kills, make_trainer, make_world, run, same_parameters, sampled

SIZES = [4, 2, 6] * 6


def changes_of(reset_every: int | None, **more: Any) -> dict[str, Any]:
    reference = {"source": None, "reset_every": reset_every}
    return {"kl_coefficient": 0.1, "learning_rate": 1e-2, "reference": reference, **more}


def test_the_reference_is_the_policy_after_every_second_step(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes_of(2))
    learner, divergences = trainer.learner, []
    before = copy.deepcopy(learner.reference)
    for step in range(4):
        batch = sampled(trainer)
        divergences.append(learn(trainer, batch)["kl"])
        trainer.weights.load()
        assert same_parameters(learner.model, learner.reference) == (step % 2 == 1)
        assert same_parameters(before, learner.reference) == (step == 0)
    first, second, third, fourth = divergences
    assert first == third == 0.0
    assert min(second, fourth) > 0.0


# --- A*-PO: published values, its gradient and its optimum by enumeration


RECIPE: dict[str, Any] = {
    "advantage": {"method": "a_star", "beta": 0.5},
    "loss": {"method": "regression", "beta": 0.1},
}


def test_the_optimal_value_by_the_number_of_correct_samples() -> None:
    """Of 8 samples, with beta 0.5."""
    rows = np.repeat(np.arange(9), 8)
    rewards = (np.tile(np.arange(8), 9) < rows).astype(np.float64)
    found = a_star.optimal_values(rewards, rows, 10, 0.5)
    expected = [0, 0.2935, 0.4772, 0.6113, 0.7169, 0.8040, 0.8782, 0.9428, 1]
    assert found[:9] == pytest.approx(expected, abs=5e-5)
    assert np.isnan(found[9])  # a prompt without samples
    sharp = a_star.optimal_values(rewards, rows, 9, 1e-4)
    assert sharp[[0, 1, 8]] == pytest.approx([0.0, 1.0, 1.0], abs=1e-3)
    assert a_star.optimal_values(rewards, rows, 9, 1e4) == pytest.approx(np.arange(9) / 8, abs=1e-3)


def test_the_advantage_is_relative_to_the_value_of_the_prompt() -> None:
    """Prompt 0 is always solved, 1 once in three samples, 2 once in two; errors do not count, and 3
    has no other samples."""
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
    """Return the exact mean loss over the arms of a bandit with a policy of these scores."""
    logprobs, method = scores.log_softmax(-1), regression.Method(regression.Settings(beta=beta))
    total = torch.zeros((), dtype=torch.float64)
    for arm, chance in enumerate(logprobs.detach().exp()):
        one = slice(arm, arm + 1)
        old, of_arm = logprobs[one].detach(), {"reference_logprobs_N": reference[one]}
        tokens = tokens_of(logprobs[one], advantages[arm], old, **of_arm)
        total = total + chance * method(tokens, StepTotals(1, 1, 1))[0]
    return total


def test_the_optimum_of_the_penalised_reward_has_no_loss() -> None:
    """It is the reference times exp(reward / beta); the value is from exact samples."""
    beta, correct = 0.5, 3
    reference = torch.tensor([correct / 8, 1 - correct / 8], dtype=torch.float64).log()
    samples = (np.arange(8) < correct).astype(np.float64)
    [value] = a_star.optimal_values(samples, np.zeros(8, dtype=np.int64), 1, beta)
    best = reference + torch.tensor([1.0 / beta, 0.0], dtype=torch.float64)
    assert loss_of(best, reference, [1 - value, -value], beta).item() == pytest.approx(0, abs=1e-12)
    assert loss_of(reference, reference, [1 - value, -value], beta).item() > 0.1


def test_a_completion_is_regressed_as_a_whole() -> None:
    """The completions have one and three tokens, and the second has a weight of 0.5."""
    logs = torch.tensor([0.5, 0.1, 0.2, 0.3])
    gains, weights = [1.0, -2.0, -2.0, -2.0], torch.tensor([1.0, 0.5, 0.5, 0.5])
    fields = {"weights_N": weights, "reference_logprobs_N": torch.zeros(4)}
    tokens = tokens_of(logs, gains, logs, [0, 1, 1, 1], **fields)
    loss, _ = regression.Method(regression.Settings(beta=2.0))(tokens, StepTotals(4, 2, 3))
    # (2 * 0.5 - 1)^2, and half of (2 * 0.6 + 2)^2
    assert loss.item() == pytest.approx((0.0 + 0.5 * 3.2**2) / 2)


def test_the_reference_of_a_loss_is_charged_like_that_of_a_kl_term(
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
    assert row["kl"] == pytest.approx(0.0, abs=1e-6)  # at the reference it is 0


def test_the_forecast_includes_the_reference_of_a_loss() -> None:
    assert not has_reference(read_train({}))
    assert has_reference(read_train({"kl_coefficient": 0.1}))
    assert has_reference(read_train(recipes.recipe(every_value(), "a_star_po")["train"]))


# --- on-policy distillation: its gradient by enumeration, and the cost of a teacher


LOG2 = float(np.log(2.0))
TEACHER = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log()


def distilling(teacher: Path | str | None, **loss: Any) -> dict[str, Any]:
    """Return the settings of a run that learns from the teacher in a folder."""
    source = None if teacher is None else str(teacher)
    advantage = {"method": "raw", "wrong": 0}
    return {
        "reference": {"source": source},
        "advantage": advantage,
        "loss": {"method": "distil", **loss},
    }


@pytest.fixture
def teacher(guesser: Path, tmp_path: Path) -> Path:
    """Return the guesser with different weights in its last layer."""
    model = load_model(guesser, dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.layers[-1].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_policy(model, load_tokenizer(guesser), tmp_path / "teacher")
    return tmp_path / "teacher"


def gradient_of(
    policy: list[float], sampler: list[float], gains: list[float], **settings: Any
) -> tuple[list[float], float]:
    """Return the exact mean gradient of the policy's scores, over a completion of one token from
    the sampler; and the mean number of tokens outside the loss. The old policy is the present one,
    as in the only update of a batch."""
    scores = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    method = distil.Method(distil.Settings(**{"penalty": 0.0, **settings}))
    drawn, logprobs = torch.tensor(sampler).double(), scores.log_softmax(-1)
    weights = logprobs.detach().exp() / drawn
    loss, outside = torch.zeros((), dtype=torch.float64), 0.0
    for arm, chance in enumerate(drawn):
        one = slice(arm, arm + 1)
        others = {"reference_logprobs_N": TEACHER[one], "sampler_logprobs_N": drawn.log()[one]}
        old, weight = logprobs[one].detach(), {"weights_N": weights[one]}
        tokens = tokens_of(logprobs[one], gains[arm], old, **others, **weight)
        part, sums = method(tokens, StepTotals(1, 1, 1))
        loss, outside = loss + chance * part, outside + float(chance) * float(sums["clipped"])
    return torch.autograd.grad(loss, scores)[0].tolist(), outside


@pytest.mark.parametrize("sampler", [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]])
def test_the_gradient_is_that_of_the_divergence_from_the_teacher(sampler: list[float]) -> None:
    """Autograd computes KL(policy | teacher) over all arms, for any sampler near the policy."""
    policy = [0.5, 0.3, 0.2]
    scores = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    mine = scores.log_softmax(-1)
    (expected,) = torch.autograd.grad((mine.exp() * (mine - TEACHER)).sum(), scores)
    found, outside = gradient_of(policy, sampler, [9.0, 9.0, 0.0])
    assert found == pytest.approx(expected.tolist())
    assert outside == 0.0
    # the verifier's reward for the second arm, at half its weight: minus its own gradient
    rewarded, _ = gradient_of(policy, sampler, [0.0, 1.0, 0.0], reward_weight=0.5)
    chances = np.array(policy)
    own = 0.5 * chances * ((np.arange(3) == 1) - chances[1])
    assert rewarded == pytest.approx((expected.numpy() - own).tolist())


def test_a_token_whose_probability_fell_too_far_leaves_the_loss() -> None:
    policy, sampler = [0.45, 0.35, 0.2], [0.7, 0.2, 0.1]  # the first by 0.25
    found, outside = gradient_of(policy, sampler, [0.0] * 3)
    assert outside == pytest.approx(0.7)
    chances, gaps = np.array(policy), TEACHER.numpy() - np.log(policy)
    kept = [chances[arm] * gaps[arm] * (np.eye(3)[arm] - chances) for arm in (1, 2)]
    assert found == pytest.approx((-sum(kept)).tolist())
    assert gradient_of(policy, sampler, [0.0] * 3, max_fall=0.26)[1] == 0.0


@pytest.mark.parametrize("max_fall", [0.2, 0.3])
def test_every_token_has_a_penalty_on_its_move_from_the_sampler(max_fall: float) -> None:
    """From 1/2 to 1/4: 0.001 log^2 2 has the gradient -0.002 log 2, whether masked or not."""
    logs = torch.tensor([0.25]).log().requires_grad_()
    at_teacher = {"reference_logprobs_N": logs.detach(), "sampler_logprobs_N": logs.detach() + LOG2}
    method = distil.Method(distil.Settings(max_fall=max_fall))
    loss, sums = method(tokens_of(logs, 0.0, logs.detach(), **at_teacher), StepTotals(1, 1, 1))
    loss.backward()
    assert sums["clipped"].item() == (max_fall == 0.2)
    assert logs.grad is not None
    assert logs.grad.item() == pytest.approx(-0.0013863, abs=5e-8)


def test_a_teacher_is_charged_by_its_own_size(guesser: Path, tmp_path: Path) -> None:
    """The teacher has four layers, the policy two."""
    larger = tmp_path / "larger"
    config = AutoConfig.from_pretrained(guesser)
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    save_policy(AutoModelForCausalLM.from_config(config), load_tokenizer(guesser), larger)
    layout = make_world(tmp_path, guesser, [4] * 24)
    CellBudget("charged", 1e12, 0.0).write(layout.plan("r", 0) / "budget.json")
    trainer = make_trainer(layout, **distilling(larger))
    sizes, own = trainer.learner.reference_architecture, trainer.run.policy.architecture
    assert (sizes.num_layers, own.num_layers) == (4, 2)
    batch = sampled(trainer)
    rollouts = trainer.estimate(batch.fresh, trainer.rng())
    learn(trainer, batch)
    tokens, ledger = float(batch.fresh.tokens_B().sum()), trainer.state.ledger
    scored = charged_flops(sizes, reference=tokens)
    for account in (ledger.charged, ledger.charged_mixed, ledger.charged_paper):
        assert account["score"] == scored
    assert scored == 2.0 * sizes.num_matmul_parameters * tokens
    assert costs_of(trainer, rollouts, "charged")["reference"] == scored
    # 2 P to generate and 6 P to update in sGPO's flat rate without a reference
    assert ledger.charged_paper["update"] == 6.0 * own.num_matmul_parameters * tokens
    # the teacher's forward of the same tokens: a third of an update of its size
    ratio = sizes.num_matmul_parameters / own.num_matmul_parameters
    executed = 3.0 * ledger.executed["score"] / ledger.executed["update"]
    assert executed == pytest.approx(ratio, rel=0.2)
    train = read_train({"reference": {"source": str(larger)}, "loss": {"method": "distil"}})
    assert reference_parameters(train, 7) == num_parameters(larger) > 10_000
    assert reference_forwards(own, train) == pytest.approx(ratio, rel=0.05)
    missing = read_train({"reference": {"source": "missing"}, "loss": {"method": "distil"}})
    assert reference_parameters(missing, 7) == 7


def test_a_killed_run_resumes_with_its_teacher(
    guesser: Path, teacher: Path, tmp_path: Path
) -> None:
    changes = {**distilling(teacher), "updates": {"minibatches": 2}, "learning_rate": 1e-2}
    whole = check_kills(tmp_path, guesser, [4, 2, 3] * 4, changes, (2,))
    assert whole.state.steps[0]["kl"] > 0.5  # from the teacher, not from the initial policy


def test_a_warm_start_has_no_teacher(guesser: Path, teacher: Path, tmp_path: Path) -> None:
    """Its steps compute and charge no teacher."""
    layout = make_world(tmp_path, guesser, [4] * 3)
    changes = distilling(teacher)

    def count(trainer: Trainer) -> None:
        gradient = trainer.learner.compute_gradient

        def counting(*arguments: Any, **named: Any) -> Any:
            stats = gradient(*arguments, **named)
            found.append(stats.reference_flops)
            return stats

        trainer.learner.compute_gradient = counting  # type: ignore[method-assign]

    found: list[float] = []
    run(layout, {**changes, "warm_start": WARM}, prepare=count)
    assert found[: WARM["steps"]] == [0.0] * WARM["steps"]
    assert min(found[WARM["steps"] :]) > 0.0


def test_a_teacher_with_other_tokens_is_refused(guesser: Path, llama: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 3)
    with pytest.raises(ArtifactError, match=r"has another vocabulary than the policy .* such as"):
        make_trainer(layout, **distilling(llama))
    with pytest.raises(ArtifactError, match=r"train.reference.source: .*nowhere is not a folder"):
        make_trainer(layout, **distilling(tmp_path / "nowhere"))


def test_a_cell_depends_on_the_content_of_its_teacher(teacher: Path) -> None:
    train = {"reference": {"source": str(teacher)}}
    before = input_digests(train)
    (teacher / "config.json").write_text((teacher / "config.json").read_text() + "\n")
    assert len(before["inputs"][str(teacher)]) == 16
    assert input_digests(train) != before
    assert input_digests({"reference": {"source": "missing"}}) == {}
    assert input_digests({"reference": {"source": None}}) == {}
