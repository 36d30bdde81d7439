"""The host waits for the device a fixed number of times per step, for any number of micro-batches.
The tests count on a CPU; `tests/gpu/check` counts on a GPU."""

import copy
import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.engines.engine import Samples
from tasks.models.transfer import index_of, to_device, to_host
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.learner.learner import Learner
from tasks.train.learner.update import accumulate_gradients
from tasks.train.methods.loss import clip, vcpo
from tests.train.steps import graded
from tests.train.worlds import make_trainer, make_world
from tests.waits import Waits

META = torch.device("meta")
SEQUENCE = clip.Settings(ratio="sequence", normalize="sequence")
LOSSES = {
    "token": clip.Method(clip.Settings()),
    "sequence": clip.Method(SEQUENCE),
    "vcpo": vcpo.Method(vcpo.Settings()),
}


def make_learner(folder: Path, policy: Path, share_prompts: bool, **changes: Any) -> Learner:
    learner = make_trainer(make_world(folder, policy, [4, 4]), **changes).learner
    learner.memory = dataclasses.replace(learner.memory, share_prompts=share_prompts)
    return learner


def ragged_rollouts() -> Rollouts:
    """Return twelve rollouts of two groups with the log-probabilities before an earlier update: the
    first has a token of an environment, the last is replayed."""
    tokens = [[5 + k, 20, 9, *range(4, 4 + k % 5)] for k in range(12)]
    logprobs = [[-2.0 - 0.1 * k] * len(ids) for k, ids in enumerate(tokens)]
    samples = Samples(tokens, logprobs, ["stop"] * 12)
    rollouts = graded([[3, 7, 11], [4] * 6], np.repeat([0, 1], 6), samples, np.arange(12) % 2.0)
    old = [[-2.1] * length for length in rollouts.completion_tokens_B()]
    is_action = [[True, False, True], *([None] * 11)]
    rollouts = rollouts.with_columns(is_action=is_action, replayed=np.arange(12) == 11)
    advantages_N = np.where(rollouts.rewards_B > 0, 1.0, -1.0)[rollouts.owner_N()]
    keep_B = np.ones(12, dtype=np.bool_)
    return rollouts.with_columns(old_logprobs=old).estimated(keep_B, advantages_N)


def batches_of(learner: Learner, rollouts: Rollouts, max_tokens: int) -> list[Any]:
    learner.memory = dataclasses.replace(learner.memory, max_tokens_per_micro_batch=max_tokens)
    return learner.micro_batches(rollouts, np.arange(12))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_step_waits_once(
    tmp_path: Path, guesser: Path, share_prompts: bool, kl_coefficient: float, loss: str
) -> None:
    changes = {"kl_coefficient": kl_coefficient}
    if loss == "sequence":
        changes["correction"] = {"level": "sequence"}
    learner = make_learner(tmp_path, guesser, share_prompts, **changes)
    rollouts = ragged_rollouts()
    for max_tokens, fewest in ((10**6, 1), (20, 5)):
        assert len(batches_of(learner, rollouts, max_tokens)) >= fewest
        with Waits() as waits:
            gradient = learner.compute_gradient(rollouts, LOSSES[loss])
            learner.step(1e-3)
        assert not gradient.num_nonfinite
        assert waits.names == ["aten._local_scalar_dense"]  # the gradient's norm


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_no_value_is_read_before_the_last_micro_batch_has_started(
    tmp_path: Path,
    guesser: Path,
    share_prompts: bool,
    kl_coefficient: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device without values, every read raises an error, and so does a copy to the host."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # absent on meta
    learner = make_learner(tmp_path, guesser, share_prompts, kl_coefficient=kl_coefficient)
    learner.reference = copy.deepcopy(learner.model).to(META) if kl_coefficient else None
    learner.model.to(META)
    rollouts = ragged_rollouts()
    batches = batches_of(learner, rollouts, 20)
    totals, seen = learner.totals(rollouts), []

    class Counted(clip.Method):
        def __call__(self, *arguments: Any) -> Any:
            seen.append(arguments)
            return super().__call__(*arguments)

    objective = learner.objective(Counted(clip.Settings()))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        accumulate_gradients(
            learner.model,
            batches,
            rollouts,
            objective,
            totals,
            learner.policy.architecture,
        )
    assert len(seen) == len(batches) > 4
    assert all(p.grad is not None for p in learner.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_observing_rollouts_never_waits(tmp_path: Path, guesser: Path, share_prompts: bool) -> None:
    learner = make_learner(tmp_path, guesser, share_prompts)
    rollouts = ragged_rollouts()
    assert len(batches_of(learner, rollouts, 20)) > 4
    for features in (Features(), Features(gradient_norms=True), Features(hidden_layer=-1)):
        with Waits() as waits:
            observed, _ = learner.score(rollouts, features, LOSSES["token"])
        assert waits.names == []
        assert len(observed.logprobs_N) == len(rollouts.owner_N())


def test_waits_are_counted() -> None:
    values = torch.tensor([1.0, -2.0, 3.0])
    for work in (
        lambda: values.sum().item(),
        lambda: bool((values > 0).all()),
        lambda: values[values > 0],
        lambda: values.nonzero(),
        lambda: torch.bincount(torch.tensor([0, 1, 1])),
    ):
        with Waits() as waits:
            work()
        assert len(waits.names) == 1
    with Waits() as waits:
        values[torch.tensor([0, 2])] + values.index_select(0, torch.tensor([1]))
    assert waits.names == []


def test_copies_to_the_host_are_exact() -> None:
    singles = torch.tensor([[0.1, 1e-38], [float("nan"), -3e38]])
    doubles = torch.tensor([1 / 3, float("-inf")], dtype=torch.float64)
    found = to_host([singles, doubles, torch.zeros(0)])
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.float64, torch.float32]
    torch.testing.assert_close(found[0], singles, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], doubles, rtol=0, atol=0)
    cpu = torch.device("cpu")
    assert index_of(np.array([True, True]), cpu) == slice(None)
    assert torch.equal(
        torch.as_tensor(index_of(np.array([True, False, True]), cpu)), torch.tensor([0, 2])
    )
    assert torch.equal(to_device(np.arange(6).reshape(2, 3)[:, ::2], cpu)[1], torch.tensor([3, 5]))
