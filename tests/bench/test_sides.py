"""The comparison with TRL: its own side runs, and its policies are evaluated. TRL itself is not
installed here."""

import pytest

from tests.bench.against_trl import accuracy, run_side, speeds
from tests.bench.world import make_world


@pytest.mark.slow
def test_winnows_side_of_the_comparison(tmp_path):
    make_world(tmp_path, steps=4, rollouts=16, seeds=2)
    report = run_side("winnow", tmp_path, steps=4, seed=1, points=[1, 4])
    assert (len(report["wall"]), len(report["rewards"])) == (5, 4)
    assert [point["step"] for point in report["points"]] == [1, 4]
    assert all(rate > 0 for rate in list(speeds(report, 1, 16).values())[:4])
    assert 0 < accuracy(tmp_path, tmp_path / "winnow-1-4") < 1
