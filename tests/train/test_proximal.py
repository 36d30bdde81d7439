"""The old policy of stale tokens: the policy of their version, or a mean of versions."""

import contextlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.learner.proximal import MEAN, ProximalPolicy
from tasks.train.learner.update import UpdateStats, statistics
from tasks.train.loop.loop import learn
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import Proximal
from tests.train.worlds import make_trainer, make_world, run_in_process, sampled

SIZES = [4, 2, 6] * 6


def changes_of(method: str | None, **more: Any) -> dict[str, Any]:
    proximal = None if method is None else {"method": method, **more.pop("proximal", {})}
    correction = {"proximal": proximal, **more.pop("correction", {})}
    return {"max_staleness": 1, "learning_rate": 1e-2, "correction": correction, **more}


def observed_in(layout: Any, changes: dict[str, Any]) -> list[tuple[Rollouts, np.ndarray]]:
    """Return the observed rollouts of every step, and the current policy's log-probabilities."""
    found = []

    def prepare(trainer: Trainer) -> None:
        scored = trainer.scored

        def recorded(rollouts: Rollouts) -> Rollouts:
            observed = scored(rollouts)
            current, _ = trainer.learner.score(rollouts, Features(), trainer.slots.loss)
            found.append((observed, current.logprobs_N))
            return observed

        trainer.scored = recorded  # type: ignore[method-assign]

    run_in_process(layout, changes, prepare)
    return found


@pytest.mark.parametrize("more", [{}, {"max_staleness": 3}, {"updates": {"minibatches": 2}}])
def test_old_log_probabilities_are_those_of_the_sampling_version(
    more: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    """The engine computed them in float32 from the same weights."""
    layout = make_world(tmp_path, guesser, SIZES)
    steps = observed_in(layout, changes_of("snapshot", **more))
    moved = []
    for rollouts, current_N in steps:
        assert rollouts.old_logprobs_N is not None
        np.testing.assert_allclose(rollouts.old_logprobs_N, rollouts.logprobs_N, atol=3e-5)
        moved.append(np.abs(current_N - rollouts.logprobs_N).max())
    assert max(moved) > 0.01


def test_scoring_with_other_weights_does_not_change_the_policy(
    guesser: Path, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    policy = ProximalPolicy(model, Proximal())
    policy.keep(3)
    copied = [part.clone() for part in model.parameters()]
    with torch.no_grad():
        model.weight.add_(1.0)
    mine = [part.clone() for part in model.parameters()]
    with contextlib.suppress(KeyError), policy.weights_of(3):
        assert all(map(torch.equal, model.parameters(), copied))
        raise KeyError
    with policy.weights_of(2):  # the version of a replayed rollout
        assert all(map(torch.equal, model.parameters(), mine))
    assert all(map(torch.equal, model.parameters(), mine))


def test_copies_are_kept_as_long_as_their_tokens(guesser: Path, tmp_path: Path) -> None:
    layout, most = make_world(tmp_path, guesser, SIZES), []

    def prepare(trainer: Trainer) -> None:
        forget = trainer.learner.proximal.forget

        def counted(oldest: int) -> None:
            forget(oldest)
            most.append(len(trainer.learner.proximal.copies))

        trainer.learner.proximal.forget = counted  # type: ignore[method-assign]

    run_in_process(layout, changes_of("snapshot"), prepare)
    assert max(most) == 2  # of this step's tokens, and of those in flight


def test_a_mean_of_versions_by_hand() -> None:
    """Every step has 0.75 times the weight of the next."""
    model = torch.nn.Linear(1, 1, bias=False)
    policy = ProximalPolicy(model, Proximal("ewma", 0.75, 0.9))
    values = [float(model.weight.detach()), 2.0, -1.0, 5.0]
    for value in values[1:]:
        with torch.no_grad():
            model.weight.fill_(value)
        policy.observe(active_share=0.95)
    weights = 0.75 ** np.arange(4)[::-1]
    expected = float(np.average(values, weights=weights))
    assert float(policy.copies[MEAN]["weight"]) == pytest.approx(expected)
    ones, cut = torch.ones(4), torch.tensor([True, True, False, False])
    sums = statistics(ones.sum(), torch.tensor([True, False, True, False]), ones, ones, cut, ones)
    stats = UpdateStats(num_tokens=4, inactive=float(sums["inactive"]))
    assert stats.active_share == 0.25  # a token that is both clipped and capped counts once
    policy.observe(active_share=0.89)
    assert float(policy.copies[MEAN]["weight"]) == 5.0
    assert policy.weight == 1.0


def test_a_mean_without_memory_is_the_current_policy(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    for rollouts, current_N in observed_in(layout, changes_of("ewma", proximal={"decay": 0.0})):
        assert rollouts.old_logprobs_N is not None
        np.testing.assert_allclose(rollouts.old_logprobs_N, current_N, atol=1e-6)


def test_the_proximal_pass_is_charged_and_executed(guesser: Path, tmp_path: Path) -> None:
    found = []
    for method in (None, "snapshot"):
        layout = make_world(tmp_path / str(method), guesser, SIZES)
        trainer = make_trainer(layout, **changes_of(method))
        trainer.weights.load()
        with closing(trainer.collector.grader):
            batch = sampled(trainer)
        learn(trainer, batch)
        found.append(trainer.state.ledger.as_dict())
    tokens = float(batch.fresh.tokens_B().sum())
    parameters = trainer.run.policy.architecture.num_matmul_parameters
    plain, proximal = found
    assert plain["charged"].get("score", 0.0) == 0.0
    assert proximal["charged"]["score"] == pytest.approx(2.0 * parameters * tokens)
    assert proximal["executed"]["score"] > 0.0
    assert proximal["charged"]["update"] == plain["charged"]["update"]
