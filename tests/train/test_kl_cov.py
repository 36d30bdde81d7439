"""A penalty on the tokens with the largest covariance of advantage and log-probability (KL-Cov)."""

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.loading import settings_of
from tasks.train.methods.loss import kl_cov
from tasks.train.rollouts import Rollouts, StepTotals
from tasks.train.tokens import Tokens
from tests.train.steps import rollouts_of


def kl_cov_step(share: float = 0.2) -> tuple[Rollouts, kl_cov.Method]:
    """Ten tokens of five rollouts; the last two are dropped, and without an advantage."""
    gains = np.array([2.0, -1.0, 1.0, 3.0, 0.0])
    logs = np.array([-1.0, -4.0, -2.0, -1.0, -3.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    keep_B = np.array([True, True, True, False, True])
    rollouts = rollouts_of([0.0] * 5, [0, 0, 0, 1, 1], [2] * 5)
    rollouts = rollouts.estimated(keep_B, np.repeat(gains, 2), logs)
    return rollouts, kl_cov.Method(kl_cov.Settings(share=share, penalty=0.5))


def test_kl_cov_marks_the_largest_covariances() -> None:
    """Of tokens with A 2, 2, -1, -1, 1, 1 and log p -1, -4, -2, -1, -3, -1, around 2/3 and -2:
    4/3, -8/3, 0, -5/3, -1/3, 1/3."""
    for share, expected in ((1e-9, [0]), (0.2, [0]), (0.34, [0, 5]), (0.5, [0, 2, 5])):
        rollouts, method = kl_cov_step(share)
        assert np.flatnonzero(method.marks(rollouts)).tolist() == expected
        shuffled = method.marks(rollouts.take(np.array([2, 0, 1, 4, 3])))
        assert shuffled.sum() == len(expected)
    rollouts, method = kl_cov_step()
    nothing = rollouts.estimated(np.zeros(5, dtype=np.bool_), np.zeros(10), np.zeros(10))
    assert not method.marks(nothing).any()
    with pytest.raises(ParamsError, match=r"train.loss.share is 0"):
        kl_cov.Settings(share=0)
    with pytest.raises(ParamsError, match=r"train.loss.penalty is -1"):
        kl_cov.Settings(penalty=-1)


def test_kl_cov_pulls_marked_tokens_back() -> None:
    """At ratios 2, 1/2 and 1, with penalty 0.5: the gradient of |log r| is its sign."""
    logs = torch.tensor([2.0, 0.5, 1.0, 2.0]).log().requires_grad_()
    ones, rows = torch.ones(4), torch.arange(4)
    marked = torch.tensor([True, True, True, False])
    tokens = Tokens(logs, torch.zeros(4), ones, ones, rows, 4, None, marked)
    loss, stats = kl_cov.Method(kl_cov.Settings(penalty=0.5))(tokens, StepTotals(1, 1, 1))
    loss.backward()
    assert logs.grad is not None
    assert (-logs.grad).tolist() == pytest.approx([2.0 - 0.5, 0.5 + 0.5, 1.0, 2.0])
    assert stats["clipped"].item() == 3


def test_kl_cov_needs_several_updates() -> None:
    chosen = {"loss": {"method": "kl_cov"}}
    with pytest.raises(ParamsError, match=r"train.updates makes one update: set its epochs"):
        settings_of(chosen)
    for updates in ({"epochs": 2}, {"minibatches": 2}):
        settings_of({**chosen, "updates": updates})
