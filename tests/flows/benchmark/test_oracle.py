"""The saving of a family's oracle, against sums by hand."""

import numpy as np
import pytest

from flows.benchmark.oracle import family_facts, oracle_saving
from tests.allocate.test_allocate import profile_of


def test_even_prompts_gain_the_own_share_of_a_group() -> None:
    found = oracle_saving(np.full(40, 0.5))
    assert found["charged"] == pytest.approx(8 / 7)
    assert found["charged_mixed"] == pytest.approx(8 / 7 * (1 + 3 * 127 / 128) / 4)


def test_hard_and_dead_prompts_save_updates() -> None:
    one_sided = (0.75 / 1.75) / (7 / 8 / 4)
    assert oracle_saving(np.full(40, 0.25))["charged"] == pytest.approx(one_sided)
    mixed_in = oracle_saving(np.repeat([0.25, 0.0], 20))
    assert mixed_in["charged"] == pytest.approx(2 * one_sided)
    never_mixed = 0.25**8 + 0.75**8
    assert mixed_in["charged_mixed"] == pytest.approx(
        2 * one_sided * (1 + 3 * (1 - never_mixed) / 2) / 4
    )


def test_the_facts_of_a_profile() -> None:
    found = family_facts(profile_of([(0, 8)] * 30 + [(8, 8)] * 10 + [(4, 8)] * 60))
    assert (found["prompts"], found["num_samples"]) == (100, 8)
    assert (found["never"], found["always"]) == (0.3, 0.1)
    assert found["pass_rate"] == pytest.approx(0.4)
    assert 1 < found["oracle"]["charged_mixed"] < found["oracle"]["charged"] < 8
