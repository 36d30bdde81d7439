"""Test the comparison with TRL: Winnow's side runs, and its policies are evaluated. TRL itself is
not installed here."""

import pytest

from tests.bench.against_trl import accuracy, run_side, speeds
from tests.bench.world import make_world


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_winnows_side_of_the_comparison(tmp_path):
    side = "winnow"
    make_world(tmp_path, steps=4, rollouts=16, seeds=2)
    report = run_side(side, tmp_path, steps=4, seed=1, points=[1, 4], learning_rate=1e-3)
    assert (len(report["wall"]), len(report["rewards"])) == (5, 4)
    assert [point["step"] for point in report["points"]] == [1, 4]
    assert all(rate > 0 for rate in list(speeds(report, 1, 16).values())[:4])
    assert 0 < accuracy(tmp_path, tmp_path / f"{side}-1-0.001-4") < 1
