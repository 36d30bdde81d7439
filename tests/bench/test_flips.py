"""A bit that flips in a file between stages is noticed, in a world without training; and the
harness that says so can fail. The long form is `python -m tests.bench.flips`."""

from pathlib import Path

import pytest

from tasks.common.layout import Layout
from tests.bench import flips, flips_world
from tests.bench.flips_world import Reader

QUICK = {"profile", "allocate@r-0", "replay", "judge", "pipeline", "parameters put back"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flips") / "world"
    flips_world.make_notes(flips_world.begin(root))
    return root


def test_no_flipped_bit_is_used_without_a_word(world: Path, tmp_path: Path) -> None:
    trials = flips.run(30, 0, 10, world, tmp_path / "copy", QUICK)
    assert flips.defects(trials) == []
    found = {one.outcome for one in trials}
    assert found >= {"refused", "repaired", "harmless", "remedy worked"}


def test_what_is_used_without_a_word_is_found(world: Path, tmp_path: Path) -> None:
    """A reader that does not look at the checksum, and one that ends with a bare error."""
    name, work = "policy.json", tmp_path / "copy"
    content = (world / name).read_bytes()
    bit = 8 * content.index(b"guesser")
    plain = Reader("plain", lambda layout: {"card": layout.policy_card.read_text()})
    expected = plain.read(Layout(world))
    made = flips.trial(world, work, "policy.json", name, bit, plain, expected)
    assert made.outcome == "SILENT"

    def fail(layout: Layout) -> dict[str, int]:
        return {"length": 1 // (layout.policy_card.read_bytes() == content)}

    made = flips.trial(world, work, "policy.json", name, bit, Reader("bare", fail), {"length": 1})
    assert made.outcome == "CRASHED"
