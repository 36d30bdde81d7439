"""Runs that end with their budget: equal spends, the position in the plan, kills."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.common.accounting.ledger import Architecture, decode_flops, prefill_flops
from tasks.common.accounting.spending import CellBudget, Rows, generation_cost, pass_cost
from tasks.common.checksums import read_checked
from tasks.common.layout import Layout
from tasks.common.progress import progress
from tasks.train import loading
from tasks.train.data.prompts import GroupRequest
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.charge import costs_of
from tasks.train.loop.queue import cut
from tasks.train.loop.reporter import Reporter
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import BatchSettings, TrainSettings
from tasks.train.trainers.own import length_of
from tests.train.steps import plan_of
from tests.train.worlds import make_trainer, make_world, run, sampled, write_params

SIZES = [4] * 12  # four steps of three groups, below the budgets of these tests
ARCHITECTURE = Architecture(
    num_matmul_parameters=1000, num_head_parameters=200, num_layers=2, attention_width=8
)
ROWS = Rows(np.array([0, 0, 1]), np.array([3, 3, 5]), np.array([1, 4, 2]))


def spend(
    layout: Layout, account: str, amount: float, profile: float = 0.0, **changes: Any
) -> Trainer:
    """Run the world to the end of this budget."""
    CellBudget(account, amount, profile).write(layout.plan("r", 0) / "budget.json")
    return run(layout, changes)


# --- costs


def test_generation_reads_a_prompt_once_per_group() -> None:
    prompts = prefill_flops(ARCHITECTURE, 3.0) + prefill_flops(ARCHITECTURE, 5.0)
    completions = sum(decode_flops(ARCHITECTURE, p, c) for p, c in ((3, 1), (3, 4), (5, 2)))
    assert generation_cost("executed", ARCHITECTURE, ROWS) == pytest.approx(prompts + completions)


def test_a_pass_by_hand() -> None:
    """8 prompt and 7 completion tokens pass the body of 800, 7 the head of 200. Pairs: 9 and 25 of
    prompts, 3 + 1, 12 + 10 and 10 + 3 of completions, with 2 layers of width 8, 4 per pair."""
    expected = 2 * 800 * (8 + 7) + 2 * 200 * 7 + 4 * 2 * 8 * (9 + 25 + 4 + 22 + 13)
    assert pass_cost("executed", ARCHITECTURE, ROWS) == expected


def test_the_other_accounts_by_hand() -> None:
    num_tokens = 3 + 1 + 3 + 4 + 5 + 2
    for account in ("charged", "charged_mixed"):
        assert generation_cost(account, ARCHITECTURE, ROWS) == 2 * 1000 * num_tokens
        assert pass_cost(account, ARCHITECTURE, ROWS) == 2 * 1000 * num_tokens
    assert generation_cost("rollouts", ARCHITECTURE, ROWS) == 3
    assert generation_cost("tokens", ARCHITECTURE, ROWS) == num_tokens
    assert pass_cost("rollouts", ARCHITECTURE, ROWS) == 0


# --- the position in the plan


@pytest.mark.parametrize(
    ("position", "done", "expected"),
    [
        (0, None, 0),
        (6, None, None),  # the plan ends, without a budget
        (1, 0.0, 1),
        (4, 0.1, 0),  # the first phase again: it has half of the rollouts and of the budget
        (2, 0.49, 2),
        (2, 0.5, 4),  # the second phase begins before the first is complete
        (6, 0.99, 4),
        (5, 1.0, 5),
    ],
)
def test_phases_keep_their_shares_of_the_budget(
    position: int, done: float | None, expected: int | None
) -> None:
    plan = plan_of([(0, 2), (0, 2), (0, 2), (0, 2), (1, 4), (1, 4)])
    assert plan.start(position, done) == expected


def test_the_last_groups_are_cut_to_the_remaining_budget() -> None:
    request = GroupRequest(np.array([7, 8, 9]), np.array([4, 4, 4]), 0, 1)
    found = cut(request, 5, TrainSettings())
    assert (found.prompt_rows.tolist(), found.counts.tolist()) == ([7, 8], [4, 1])
    kept = TrainSettings(batch=BatchSettings(counts="kept"), select={"method": "pods", "keep": 2})
    assert cut(request, 3, kept).counts.tolist() == [4, 2]
    assert cut(request, 2, TrainSettings(batch=BatchSettings("prompts"))) == request


# --- runs


@pytest.mark.parametrize("account", ["rollouts", "charged_mixed", "executed"])
def test_a_run_spends_its_budget(account: str, guesser: Path, tmp_path: Path) -> None:
    """One budget is larger than the plan, and one is smaller."""
    layout = make_world(tmp_path / "whole", guesser, SIZES)
    step = spend(layout, account, 1e99, max_steps=4).budget.spent / 4
    for number, steps in enumerate((2.5, 9.2)):
        layout = make_world(tmp_path / str(number), guesser, SIZES)
        trainer = spend(layout, account, steps * step)
        found = read_checked(layout.train("r", 0) / "flops.json")["budget"]
        assert found["spent"] == pytest.approx(steps * step, abs=0.2 * step)
        assert trainer.state.progress == pytest.approx(1.0, abs=0.2 / steps)


@pytest.mark.parametrize("lora", [None, {"rank": 1, "alpha": 8.0}])
@pytest.mark.parametrize("name", ["value_probe", "poise", "min_variance"])
def test_the_counted_pass_is_the_executed_one(
    name: str, lora: dict[str, Any] | None, guesser: Path, tmp_path: Path
) -> None:
    """Up to last tokens: hidden states and norms compute every prompt again, and rows of hidden
    states are padded to the longest."""
    layout = make_world(tmp_path, guesser, [6] * 12)
    write_params(layout, learner={"max_tokens_per_micro_batch": 4096})
    all_prompts = {"unit": "rollouts", "size": 36, "counts": "generated"}  # of 3 to 13 tokens
    advantage = loading.completed("advantage", {"method": name})
    trainer = make_trainer(layout, batch=all_prompts, advantage=advantage, lora=lora)
    with closing(trainer.collector.grader):
        batch = sampled(trainer)
        rollouts = trainer.estimate(trainer.scored(batch.fresh), trainer.rng())
    counted = costs_of(trainer, rollouts, "executed")["score"]
    assert trainer.state.ledger.executed["score"] == pytest.approx(counted, rel=0.12)


def test_the_profile_is_paid_first(guesser: Path, tmp_path: Path) -> None:
    layouts = [make_world(tmp_path / name, guesser, SIZES) for name in ("without", "with")]
    without = spend(layouts[0], "rollouts", 60)
    paid = spend(layouts[1], "rollouts", 90, profile=30, branches=[0.5], decay_share=0.8)
    sampled = [trainer.state.ledger.rollouts["generate"] for trainer in (without, paid)]
    assert sampled == [60, 60]
    assert [p["rollouts"] for p in paid.state.curve if p["branch"]] == [pytest.approx(15, abs=12)]
    rates = [[row["learning_rate"] for row in run.state.steps] for run in (without, paid)]
    assert rates[0][0] == pytest.approx(1e-3 * (1.0 - 0.9 * 12 / 60))
    # it decays over the last four fifths of the rest, after this step
    assert rates[1][0] == pytest.approx(1e-3)
    assert rates[1][1] < 1e-3


def test_the_progress_line_names_both_counts_of_flops(capsys) -> None:
    """The bar counts the budget's account; the step's total is in charged FLOPs."""
    budget = RunBudget(CellBudget("executed", 4e11, 0.0), 8)
    budget.spend(1e11)
    trainer: Any = SimpleNamespace(budget=budget, state=SimpleNamespace(branch=None))
    row = dict.fromkeys(("num_rollouts", "completion_tokens_mean", "reward_mean"), 1.0)
    row |= {"step": 5, "num_mixed_groups": 2, "num_prompts": 4, "flops_charged": 4.2e11}
    trainer.state.ledger = SimpleNamespace(rollouts={"generate": 32.0})
    length = length_of(trainer.budget, plan_of([(0, 4)]))
    with progress(length.amount, "train", length.unit) as bar:
        unused: Any = None
        Reporter(trainer, unused, unused, unused, bar).show(row, 1.0)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "100G/400G FLOPs executed [" in line
    assert line.endswith("4.2e+11 FLOPs charged]")
