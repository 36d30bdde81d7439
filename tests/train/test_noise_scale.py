"""The noise of the gradient, and the control that sizes steps by it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.data.noise import GradientNoise
from tasks.train.methods.control import noise_scale
from tasks.train.settings import BatchSettings
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


def test_the_halves_of_an_update(guesser: Path, tmp_path: Path) -> None:
    """The norms are those of the gradients of all groups and of every second one with a gradient,
    and the gradient is the same as without the measurement."""
    batch = {"unit": "rollouts", "size": 28, "counts": "generated"}
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 14), batch=batch, max_grad_norm=1e9)
    learner, loss = trainer.learner, trainer.slots.loss
    fresh = sampled(trainer).fresh
    rng = np.random.default_rng(0)
    values_Q = rng.standard_normal(len(fresh.prompt_rows_Q))
    values_Q[0] = 0.0  # a group without a gradient
    rollouts = fresh.estimated(
        np.ones(len(fresh.group_B), dtype=bool), values_Q[fresh.group_B][fresh.owner_N()]
    )

    def gradient_of(
        groups: list[int], with_noise: bool = False
    ) -> tuple[torch.Tensor, list[GradientNoise]]:
        only = np.isin(fresh.group_B, groups)[fresh.owner_N()]
        part = rollouts.estimated(rollouts.kept_B, np.where(only, rollouts.advantages_N, 0.0))
        stats = learner.compute_gradient(part, loss, with_noise=with_noise)
        grads = [
            each.grad.flatten() for each in learner.model.parameters() if each.grad is not None
        ]
        return torch.cat(grads).clone(), stats.noise

    num = len(values_Q)
    assert num > 4
    whole, nothing = gradient_of([*range(num)])
    assert nothing == []
    measured, (noise,) = gradient_of([*range(num)], with_noise=True)
    torch.testing.assert_close(measured, whole, rtol=1e-4, atol=1e-7)
    half, _ = gradient_of([*range(1, num, 2)])
    alive, in_half = num - 1, len(range(1, num, 2))
    assert noise.num_groups == num
    assert noise.num_in_part == pytest.approx(num * in_half / alive)
    assert noise.square == pytest.approx(float(whole.square().sum()), rel=1e-4)
    expected = float(half.square().sum()) * (alive / in_half) ** 2
    assert noise.part_square == pytest.approx(expected, rel=1e-4)
    assert gradient_of([1], with_noise=True)[1] == []  # one group cannot be divided


def method_of(**values: float) -> noise_scale.Method:
    return noise_scale.Method(noise_scale.Settings(**values), passes_of(40, 8, 4, BATCH))


def test_the_size_of_a_step_follows_the_noise() -> None:
    method = method_of(memory=0.0)
    assert len(requested(method).counts) == 8  # before the first update, the whole batch
    method.observe_noise(GradientNoise(8, 4, 1.0, 1.0))  # no noise
    assert method.describe() == {"noise_scale": 0.0}
    assert len(requested(method).counts) == 2
    assert method.rate_factor(2) == pytest.approx(0.5)
    method.observe_noise(GradientNoise(8, 4, 1.0, 1.6))  # a variance of 4.8, a signal of .4
    assert method.noise_scale() == pytest.approx(12.0)
    assert len(requested(method).counts) == 8
    method.observe_noise(GradientNoise(8, 4, 1.0, 1.4))  # 3.2 and .6
    assert method.noise_scale() == pytest.approx(16 / 3)
    assert len(requested(method).counts) == 5
    method.observe_noise(GradientNoise(8, 4, 1.0, 2.5))  # more noise than signal
    assert method.describe() == {}
    assert len(requested(method).counts) == 8
    assert method.rate_factor(9) == 1.0


def test_the_parts_are_averaged_before_they_are_divided() -> None:
    method = method_of(memory=0.5)
    method.observe_noise(GradientNoise(8, 4, 1.0, 1.4))
    method.observe_noise(GradientNoise(8, 4, 2.0, 2.4))  # 3.2 and 1.6
    assert method.noise_scale() == pytest.approx((0.25 * 3.2 + 0.5 * 3.2) / (0.25 * 0.6 + 0.8))


def test_the_noise_scale_is_recorded(guesser: Path, tmp_path: Path) -> None:
    """With `smallest: 1` every step is a whole batch, at the whole learning rate."""
    layout = make_world(tmp_path, guesser, [4] * 24)
    control = {"method": "noise_scale", "smallest": 1.0, "memory": 0.5}
    measuring = make_trainer(layout, control=control)
    steps = run_steps(measuring, 4)
    plain = run_steps(make_trainer(layout), 4)
    for name in ("step", "learning_rate", "num_rollouts"):
        assert [row[name] for row in steps] == [row[name] for row in plain]
    assert measuring.slots.control.state.signal != 0
    assert set(measuring.queue.describe()) <= {"control/noise_scale"}


def test_several_processes_are_refused(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, [4] * 6))
    trainer.learner.ranks = dataclasses.replace(trainer.learner.ranks, size=2)
    fresh = sampled(trainer).fresh
    all_B = np.ones(len(fresh.group_B), dtype=bool)
    rollouts = fresh.estimated(all_B, np.ones(len(fresh.owner_N())))
    with pytest.raises(ParamsError, match=r"num_processes is 2: set it to 1"):
        trainer.learner.compute_gradient(rollouts, trainer.slots.loss, with_noise=True)
