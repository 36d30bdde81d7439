"""The noise of the gradient, and the control that sizes steps by it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.data.noise import GradientNoise, noise_of
from tasks.train.methods.control import noise_scale
from tasks.train.settings import BatchSettings, TrainSettings
from tasks.train.trainers.own import check_noise
from tests.train.steps import passes_of, requested
from tests.train.worlds import make_trainer, make_world, run_steps, sampled

BATCH = BatchSettings("rollouts", 64, "generated")


def test_the_estimates_are_unbiased() -> None:
    """4,000 draws of 64 gradients of 50 numbers, and of 16 of them."""
    rng = np.random.default_rng(0)
    mean = np.full(50, np.sqrt(5.5 / 50))
    drawn = []
    for _ in range(4000):
        gradients = mean + rng.standard_normal((64, 50))
        squares = [float((part.mean(0) ** 2).sum()) for part in (gradients, gradients[:16])]
        drawn.append(GradientNoise(64, 16, *squares))
    assert np.mean([each.signal for each in drawn]) == pytest.approx(5.5, abs=0.05)
    assert np.mean([each.variance for each in drawn]) == pytest.approx(
        50, abs=1.4
    )  # three standard errors


def test_the_estimates_are_unbiased_with_dead_groups() -> None:
    """Seven of ten groups have no gradient; halves are formed over all eight groups of a step."""
    rng = np.random.default_rng(0)
    mean = np.full(20, 0.5)  # a squared norm of 5
    drawn = []
    for _ in range(20_000):
        alive = rng.random((8, 1)) < 0.3
        gradients = alive * (mean + 0.5 * rng.standard_normal((8, 20)))
        squares = [float((part.sum(0) ** 2).sum()) / 64 for part in (gradients, gradients[::2])]
        drawn.append(noise_of(8, *squares))
    assert np.mean([each.signal for each in drawn]) == pytest.approx(0.09 * 5, rel=0.1)
    assert np.mean([each.variance for each in drawn]) == pytest.approx(0.3 * 10 - 0.45, rel=0.1)


def test_the_halves_of_an_update(guesser: Path, tmp_path: Path) -> None:
    """The norms are those of the gradients of all groups and of every second graded one, and the
    gradient is the same as without the measurement."""
    batch = {"unit": "rollouts", "size": 28, "counts": "generated"}
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 14), batch=batch, max_grad_norm=1e9)
    learner, loss = trainer.learner, trainer.slots.loss
    fresh = sampled(trainer).fresh
    num = len(fresh.prompt_rows_Q)
    assert num > 4
    values_Q = np.random.default_rng(0).standard_normal(num)
    values_Q[2] = 0.0  # a group without a gradient
    all_B = np.ones(len(fresh.group_B), dtype=bool)
    rollouts = fresh.estimated(all_B, values_Q[fresh.group_B][fresh.owner_N()])

    def gradient_of(
        groups: Sequence[int], with_noise: bool = False
    ) -> tuple[torch.Tensor, list[GradientNoise]]:
        only_N = np.isin(fresh.group_B, groups)[fresh.owner_N()]
        part = rollouts.estimated(all_B, np.where(only_N, rollouts.advantages_N, 0.0))
        stats = learner.compute_gradient(part, loss, with_noise=with_noise)
        grads = [
            each.grad.flatten() for each in learner.model.parameters() if each.grad is not None
        ]
        return torch.cat(grads).clone(), stats.noise

    whole, nothing = gradient_of(range(num))
    assert nothing == []
    measured, (noise,) = gradient_of(range(num), with_noise=True)
    torch.testing.assert_close(measured, whole, rtol=1e-4, atol=1e-7)
    half, _ = gradient_of(range(0, num, 2))
    num_in_half = len(range(0, num, 2))
    assert (noise.num_groups, noise.num_in_part) == (num, num_in_half)
    assert noise.square == pytest.approx(float(whole.square().sum()), rel=1e-4)
    expected = float(half.square().sum()) * (num / num_in_half) ** 2
    assert noise.part_square == pytest.approx(expected, rel=1e-4)
    # all of the gradient in the other half
    assert gradient_of([1], with_noise=True)[1][0].part_square == 0.0


def method_of(**values: float) -> noise_scale.Method:
    settings = noise_scale.Settings(**{"memory": 0.0, "first": 1, **values})  # type: ignore[arg-type]
    return noise_scale.Method(settings, passes_of(40, 8, 4, BATCH))


@pytest.mark.parametrize(
    ("square", "of_half", "scale", "groups"),
    [
        (1.0, 1.0, 0.0, 2),  # no noise: the smallest step
        (1.0, 1.4, 16 / 3, 5),  # a variance of 3.2, a signal of .6
        (1.0, 1.6, 12.0, 8),  # 4.8 and .4: more than a batch
        (1.0, 2.5, None, 8),  # more noise than signal
    ],
)
def test_the_size_of_a_step_follows_the_noise(
    square: float, of_half: float, scale: float | None, groups: int
) -> None:
    method = method_of()
    assert len(requested(method).counts) == 8  # before the first measurement
    method.observe_noise(GradientNoise(8, 4, square, of_half))
    assert len(requested(method).counts) == groups
    assert method.describe().get("noise_scale") == (None if scale is None else pytest.approx(scale))
    expected = min(max((scale or 99.0) / 8 if scale != 0.0 else 0.0, 0.25), 1.0)
    assert method.rate_factor() == pytest.approx(expected**0.5)


def test_a_step_has_two_groups_at_least_and_the_first_ones_are_whole() -> None:
    method = noise_scale.Method(noise_scale.Settings(smallest=0.01), passes_of(40, 8, 4, BATCH))
    sizes = []
    for _ in range(12):
        sizes.append(len(requested(method).counts))
        method.observe_noise(GradientNoise(8, 4, 1.0, 1.0))
    assert sizes == [8] * 10 + [2] * 2


def test_the_parts_are_averaged_before_they_are_divided() -> None:
    method = method_of(memory=0.5)
    method.observe_noise(GradientNoise(8, 4, 1.0, 1.4))
    method.observe_noise(GradientNoise(8, 4, 2.0, 2.4))  # 3.2 and 1.6
    assert method.noise_scale() == pytest.approx((0.25 * 3.2 + 0.5 * 3.2) / (0.25 * 0.6 + 0.8))


@pytest.mark.parametrize(
    "changes", [{}, {"replay": {"method": "recent", "share": 0.5}}], ids=["fresh", "replay"]
)
def test_the_noise_scale_is_only_recorded(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    """With `smallest: 1` every step is a whole batch, at the whole learning rate, with groups that
    do not divide a batch."""
    layout = make_world(tmp_path, guesser, [5] * 24)
    control = {"method": "noise_scale", "smallest": 1.0, "memory": 0.5, "first": 1}
    measuring = make_trainer(layout, control=control, **changes)
    steps = run_steps(measuring, 6)
    plain = run_steps(make_trainer(layout, **changes), 6)
    for name in ("step", "learning_rate", "num_rollouts"):
        assert [row[name] for row in steps] == [row[name] for row in plain]
    assert measuring.slots.control.state.steps == 6  # those without a gradient, too
    assert {*measuring.queue.describe()} <= {"control/noise_scale", "control/batch_share"}


def test_small_steps_are_measured_and_can_grow_again(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4] * 48)
    batch = {"unit": "rollouts", "size": 16, "counts": "generated"}
    control = {"method": "noise_scale", "smallest": 0.1, "memory": 0.5, "first": 2}
    trainer = make_trainer(layout, batch=batch, control=control, learning_rate=1e-2)
    steps = run_steps(trainer, 12)
    assert trainer.slots.control.state.steps == len(steps)
    assert [row["num_prompts"] for row in steps[:2]] == [4, 4]
    assert {row["num_prompts"] for row in steps} - {4} != set()
    assert min(row["num_prompts"] for row in steps) >= 2


def test_several_processes_are_refused() -> None:
    settings = TrainSettings(control={"method": "noise_scale"})
    with pytest.raises(ParamsError, match="num_processes is 2: set it to 1"):
        check_noise(settings, True, 2)
    check_noise(settings, True, 1)
    check_noise(settings, False, 2)
