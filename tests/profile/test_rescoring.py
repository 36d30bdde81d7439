"""The weights of the benchmark of scored profiles, against numbers by hand."""

import numpy as np
import polars as pl
import pytest

from tests.bench.rescoring import error, weighed

MU, REWARDS = np.array([0.6, 0.3, 0.1]), ("wrong", "correct", "correct")


@pytest.mark.parametrize(
    ("policy", "estimate", "size"),
    [((0.4, 0.3, 0.3), 0.6, 5.252), (tuple(MU), 3 / 8, 8.0)],
)
def test_estimate_and_effective_size(
    policy: tuple[float, ...], estimate: float, size: float
) -> None:
    """Eight rollouts of a policy with three answers: five, two and one."""
    answers = [0] * 5 + [1] * 2 + [2]
    rows = pl.DataFrame({"prompt_id": "a", "outcome": [REWARDS[each] for each in answers]})
    found = weighed(
        pl.DataFrame({"prompt_id": ["a"]}), rows, np.log(np.array(policy) / MU)[answers]
    )
    assert found["estimate"].item() == pytest.approx(estimate, abs=5e-4)
    assert found["size"].item() == pytest.approx(size, abs=5e-4)


def test_the_noise_of_the_truth_is_subtracted() -> None:
    rng = np.random.default_rng(0)
    rates = rng.random(100_000)
    assert error(rates, rng.binomial(16, rates) / 16, 16) < 0.02
    assert error(rates + 0.1, rng.binomial(16, rates) / 16, 16) == pytest.approx(0.1, abs=0.01)
