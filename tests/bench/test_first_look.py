"""The comparison of a first look with finished runs."""

import polars as pl
import pytest

from tasks.code.effective import complete
from tasks.common.params import load
from tests.allocate.test_allocate import profile_of
from tests.bench.block_lines import ROOT
from tests.bench.first_look import RESULTS, measured, savings, table


def test_savings_by_hand() -> None:
    """Groups of 2 and of 8, for 2 passes: a profile of 8 rollouts at 2 FLOPs, and 10 instead of 16
    rollouts at 8. Small groups compute more prompts."""
    profile = profile_of([(4, 8), (1, 8)] * 20).with_columns(
        prompt_tokens=pl.lit(5, pl.Int32), completion_tokens=pl.lit(8 * 10, pl.Int64)
    )
    values = complete({**load(ROOT / "params.yaml"), "allocate": {"passes": 2}})
    found = savings(values, profile)
    for formula in ("first", "present"):
        assert found["charged", "pass", formula] == pytest.approx(1 - (16 + 80) / 128)
    assert found["executed", "pass", "present"] < found["executed", "pass", "first"]
    for account in ("charged", "executed"):
        # some groups are smaller, and mixed less often
        by_mixed = found[account, "mixed rollout", "present"]
        assert by_mixed < found[account, "pass", "present"]


def test_measured_savings() -> None:
    costs = [{"executed": 8.0, "pass": 1.0, "mixed rollout": 4.0}]
    costs.append({"executed": 6.0, "pass": 1.0, "mixed rollout": 2.0})
    assert measured(costs, "executed", "pass") == 0.25
    assert measured(costs, "executed", "mixed rollout") == -0.5


def test_the_page_has_the_table() -> None:
    assert "\n".join(table(pl.read_csv(RESULTS))) in (ROOT / "docs/guide/profiles.md").read_text()
