"""The table of the page on GPUs has the numbers that were measured."""

import json

from tests.bench.world import PROJECT

ROWS = "update of steps with other lengths, 128 to 2,048 or 1,024 to 16,384 tokens"


def test_the_table_has_the_measured_numbers() -> None:
    measured = json.loads((PROJECT / "docs/results/gpu_h100.json").read_text())[ROWS]
    page = (PROJECT / "docs/guide/gpu.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith(("| 0.6B", "| 1.7B"))]
    assert len(lines) == len(measured)
    for row in measured:
        cells = (
            row["model"] + ", checkpointing" * row["activation_checkpointing"],
            f"{row['longest completion']:,}",
            row["attention"] + " (before)" * row["attention"].startswith("blocks"),
            "yes" if row["compile"] else "no",
            f"{row['tokens per micro-batch']:,}",
            ", ".join(f"{seconds:.1f}" for seconds in row["steps, s"][1:]),
            f"{row['peak beside the weights, GiB']:.0f} GiB",
        )
        assert f"| {' | '.join(cells)} |" in lines
