"""Test that the memory of a profile does not grow with its text: a small form of the benchmark."""

from pathlib import Path

import pytest

from tests.bench.profile_scale import measure

NUM_CHARACTERS = 40_000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """From 122 MB of text to 366 MB: both fill the buffers of fixed size. A stage with all texts in
    memory once would grow by the difference. Evaluation reads and writes rollouts by the same two
    functions."""
    few, many = (
        measure(tmp_path, num_rollouts, NUM_CHARACTERS, "exact")[0].megabytes
        for num_rollouts in (3_200, 9_600)
    )
    assert many - few < 6_400 * NUM_CHARACTERS / 2**20
