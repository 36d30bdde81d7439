"""The memory of a profile does not grow with its text: the benchmark, made small."""

from pathlib import Path

import pytest

from tests.bench.profile_scale import measure

NUM_CHARACTERS = 40_000


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["profile", "baseline"])
def test_memory_does_not_grow_with_the_text(stage: str, tmp_path: Path) -> None:
    """From 244 MB of text to 732 MB: both fill the buffers of fixed size. A stage that held all
    texts even once would grow by the difference."""
    few, many = (
        measure(tmp_path, num_rollouts, NUM_CHARACTERS, "exact", stage)[0].megabytes
        for num_rollouts in (6_400, 19_200)
    )
    assert many - few < 12_800 * NUM_CHARACTERS / 2**20
