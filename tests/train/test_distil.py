"""On-policy distillation: its gradient by enumeration, a teacher of its own, and what it costs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.allocate.budget import reference_forwards
from tasks.common.accounting.ledger import charged_flops
from tasks.common.accounting.spending import CellBudget
from tasks.common.files import ArtifactError
from tasks.common.recipes import input_digests
from tasks.models.folder import num_parameters, reference_parameters
from tasks.models.policy import load_model, load_tokenizer, save_policy
from tasks.train.loading import settings_of
from tasks.train.loop.charge import costs_of
from tasks.train.loop.loop import learn
from tasks.train.loop.trainer import Trainer
from tasks.train.methods.loss import distil
from tasks.train.rollouts import StepTotals
from tests.train.steps import tokens_of
from tests.train.test_warm_start import WARM
from tests.train.worlds import check_kills, make_trainer, make_world, run, sampled

TEACHER = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log()


def distilling(teacher: Path | str | None, **loss: Any) -> dict[str, Any]:
    """The settings of a run that learns from the teacher in a folder."""
    source = None if teacher is None else str(teacher)
    advantage = {"method": "raw", "wrong": 0}
    return {
        "reference": {"source": source},
        "advantage": advantage,
        "loss": {"method": "distil", **loss},
    }


@pytest.fixture
def teacher(guesser: Path, tmp_path: Path) -> Path:
    """The guesser with other weights in its last layer, and so with another opinion."""
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
    """The exact mean gradient by the scores of the policy, over a completion of one token that the
    sampler draws; and the mean number of tokens that left the loss."""
    scores = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    method, drawn = distil.Method(distil.Settings(**settings)), torch.tensor(sampler).double()
    logprobs = scores.log_softmax(-1)
    loss, left = torch.zeros((), dtype=torch.float64), 0.0
    for arm, chance in enumerate(drawn):
        one = slice(arm, arm + 1)
        reference = {"reference_logprobs_N": TEACHER[one]}
        tokens = tokens_of(logprobs[one], gains[arm], drawn.log()[one], **reference)
        part, sums = method(tokens, StepTotals(1, 1, 1))
        loss, left = loss + chance * part, left + float(chance) * float(sums["clipped"])
    return torch.autograd.grad(loss, scores)[0].tolist(), left


@pytest.mark.parametrize("sampler", [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]])
def test_the_gradient_is_that_of_the_divergence_from_the_teacher(sampler: list[float]) -> None:
    """Of KL(policy | teacher), by autograd over all arms, for any sampler near the policy."""
    policy = [0.5, 0.3, 0.2]
    scores = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    mine = scores.log_softmax(-1)
    (expected,) = torch.autograd.grad((mine.exp() * (mine - TEACHER)).sum(), scores)
    found, left = gradient_of(policy, sampler, [9.0, 9.0, 0.0])
    assert found == pytest.approx(expected.tolist())
    assert left == 0.0
    # the verifier's reward for the second arm, at half its weight: minus its own gradient
    rewarded, _ = gradient_of(policy, sampler, [0.0, 1.0, 0.0], reward_weight=0.5)
    chances = np.array(policy)
    own = 0.5 * chances * ((np.arange(3) == 1) - chances[1])
    assert rewarded == pytest.approx((expected.numpy() - own).tolist())


def test_a_token_that_has_become_much_less_likely_leaves_the_loss() -> None:
    policy, sampler = [0.45, 0.35, 0.2], [0.7, 0.2, 0.1]  # the first by 0.25
    found, left = gradient_of(policy, sampler, [0.0] * 3)
    assert left == pytest.approx(0.7)
    chances, gaps = np.array(policy), TEACHER.numpy() - np.log(policy)
    kept = [chances[arm] * gaps[arm] * (np.eye(3)[arm] - chances) for arm in (1, 2)]
    assert found == pytest.approx((-sum(kept)).tolist())
    assert gradient_of(policy, sampler, [0.0] * 3, max_fall=0.26)[1] == 0.0


def test_the_policy_comes_nearer_to_its_teacher(
    guesser: Path, teacher: Path, tmp_path: Path
) -> None:
    """`kl` is the estimate of KL(policy | teacher) on the policy's own tokens."""
    layout = make_world(tmp_path, guesser, [4] * 120)
    trainer = run(layout, {**distilling(teacher), "learning_rate": 1e-2})
    steps = trainer.state.steps
    assert trainer.learner.reference is not trainer.learner.model
    kls = [row["kl"] for row in steps]
    assert np.median(kls[:5]) > 0.5
    assert np.median(kls[-5:]) < 0.5 * np.median(kls[:5])


def test_a_teacher_that_is_the_policy_teaches_nothing(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 3)
    trainer = make_trainer(layout, **distilling(guesser))
    batch = sampled(trainer)
    row = learn(trainer, batch)
    assert row["kl"] == pytest.approx(0.0, abs=1e-9)
    assert row["grad_norm"] < 1e-6


def test_a_teacher_is_charged_by_its_own_size(guesser: Path, tmp_path: Path) -> None:
    """It has four layers, and the policy two."""
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
    assert costs_of(trainer, batch, rollouts, "charged")["reference"] == scored
    # 2 P to generate and 6 P to update in sGPO's flat rate without a reference
    assert ledger.charged_paper["update"] == 6.0 * own.num_matmul_parameters * tokens
    # the forward of the same tokens, in the teacher's sizes: a third of an update in its own
    ratio = sizes.num_matmul_parameters / own.num_matmul_parameters
    executed = 3.0 * ledger.executed["score"] / ledger.executed["update"]
    assert executed == pytest.approx(ratio, rel=0.2)
    train = {
        "reference": {"source": str(larger)},
        "loss": {"method": "distil"},
        "kl_coefficient": 0,
    }
    assert reference_parameters(train, 7) == num_parameters(larger) > 10_000
    assert reference_forwards(own, train) == pytest.approx(ratio, rel=0.05)
    train["reference"]["source"] = "missing"
    assert reference_parameters(train, 7) == 7


def test_a_killed_run_goes_on_with_its_teacher(
    guesser: Path, teacher: Path, tmp_path: Path
) -> None:
    changes = {**distilling(teacher), "updates": {"minibatches": 2}, "learning_rate": 1e-2}
    check_kills(tmp_path, guesser, [4, 2, 3] * 4, changes, (2,))


def test_a_warm_start_has_no_teacher(guesser: Path, teacher: Path, tmp_path: Path) -> None:
    """Its steps are charged without one, and so compute none."""
    layout = make_world(tmp_path, guesser, [4] * 3)
    changes = distilling(teacher)
    settings_of({**changes, "warm_start": WARM})

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
